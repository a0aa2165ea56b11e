"""fenchel/sensitivity/attention_ball.py: what holds in a ball, attacked from inside."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from fenchel.attention import ALiBi, AttentionSpec, Causal, Prior, angles
from fenchel.choice import Choice, Entmax, Softmax, Sparsemax
from fenchel.sensitivity import Ball, self_attention_jacobian
from fenchel.sensitivity.attention_ball import (
    _coordinates,
    _softmax_box,
    _threshold_box,
    bounded,
    head_bounds,
)
from fenchel.sensitivity.layers import SelfAttention, rotation_matrices
from fenchel.sensitivity.norms import spectral
from fenchel.sensitivity.weight_blocks import project

Draw = Callable[..., Tensor]
CHOICES = [Softmax(), Softmax(2.5), Entmax(1.5), Entmax(1.2, 2.0), Sparsemax()]


@pytest.mark.parametrize("choice", CHOICES, ids=repr)
@pytest.mark.parametrize("prior", [None, Causal(), ALiBi(1)], ids=repr)
@pytest.mark.parametrize("norm", ["token", "fro"])
def test_no_point_of_the_ball_exceeds_any_bound(
    norm: str, prior: Prior | None, choice: Choice, draw: Draw, spread_out: Draw
) -> None:  # 30 settings of 5 instances, 70 points each: more than 10,000
    n, d, count = 5, 3, 70
    for _ in range(5):
        X, W = 2 * draw(n, d), [draw(d, d) for _ in range(3)]
        radius = float(spread_out(-2.5, 0.0, 1))
        ball = Ball.of(radius, norm, n)
        found = head_bounds(project(X, *W), None, AttentionSpec(choice, prior), ball)
        moves = torch.stack([ball.within(1e6 * draw(n, d)) for _ in range(count)])
        moves[::3] = moves[::3] * torch.rand(len(moves[::3]), 1, 1)
        points = X + moves
        J = self_attention_jacobian(points, *W, each=True, choice=choice, prior=prior)
        centre = self_attention_jacobian(X, *W, choice=choice, prior=prior)
        D, D0 = J.dense(), centre.dense()
        assert torch.linalg.matrix_norm(D, 2).max() <= found.upper * (1 + 1e-12)
        assert torch.linalg.matrix_norm(D - D0, 2).max() <= found.variation * (1 + 1e-12)
        rows = D.reshape(count, n, d, n, d)
        unit = draw(n, d)
        unit = unit / unit.norm(dim=-1, keepdim=True)
        moved = torch.einsum("cienm,nm->cie", rows, unit).norm(dim=-1)
        assert moved.max() <= found.token * (1 + 1e-12)
        single = torch.linalg.matrix_norm(rows.permute(0, 1, 3, 2, 4), 2)
        assert single.max() <= found.token * (1 + 1e-12)


@pytest.mark.parametrize("choice", CHOICES, ids=repr)
def test_weights_stay_in_the_box_that_their_scores_allow(
    choice: Choice, draw: Draw, generator: torch.Generator
) -> None:
    x, e = 2 * draw(60, 7), draw(60, 7).abs()
    x[:, 5] = -torch.inf  # forbidden, and it stays so
    plain: Choice = type(choice)(choice.alpha) if isinstance(choice, Entmax) else type(choice)()
    if isinstance(choice, Softmax):
        low, high = _softmax_box(x, e)
    else:
        low, high = _threshold_box(plain, x, e)
    for _ in range(50):
        share = torch.randint(0, 2, x.shape, generator=generator).double() * 2 - 1  # the corners
        q = plain.weights(x + share * e)
        assert (low <= q + 1e-12).all()
        assert (q <= high + 1e-12).all()
    assert (high[:, 5] == 0).all()
    if isinstance(choice, Softmax):  # and the corners that matter are reached
        for j in range(5):
            sign = -torch.ones(7, dtype=torch.float64)
            sign[j] = 1.0
            torch.testing.assert_close(plain.weights(x + sign * e)[:, j], high[:, j])
            torch.testing.assert_close(plain.weights(x - sign * e)[:, j], low[:, j])


def test_scores_a_thousand_apart_do_not_overflow_the_box() -> None:
    x = torch.tensor([[0.0, -5.0, -900.0]], dtype=torch.float64)
    low, high = _softmax_box(x, torch.full((1, 3), 1e3, dtype=torch.float64))
    assert low.isfinite().all()
    assert (high <= 1.0).all()
    assert (low >= 0.0).all()


def test_without_a_radius_nothing_varies_and_the_bound_is_the_covariance_bound(
    draw: Draw,
) -> None:
    from fenchel.sensitivity import bounds

    X, W = draw(6, 3), [draw(3, 3) for _ in range(3)]
    found = head_bounds(project(X, *W), None, AttentionSpec(), Ball(0.0, 0.0))
    assert found.variation < 1e-6
    exact = torch.linalg.matrix_norm(self_attention_jacobian(X, *W).dense(), 2)
    assert exact <= found.upper
    assert found.upper <= 1.5 * bounds.covariance(X, *W)


def test_heads_and_an_output_matrix_are_folded_in(draw: Draw) -> None:
    X, W = draw(5, 4), [draw(2, 4, 3), draw(2, 4, 3), draw(2, 4, 2)]
    W_O = draw(2, 2, 6)
    ball = Ball.of(0.05, "token", 5)
    folded = head_bounds(project(X, *W), W_O, AttentionSpec(), ball)
    for h in range(2):
        merged = [W[0][h], W[1][h], W[2][h] @ W_O[h]]
        alone = head_bounds(project(X, *merged), None, AttentionSpec(), ball)
        for a, b in zip(folded, alone, strict=True):
            torch.testing.assert_close(a[h : h + 1], b)


def test_which_choices_are_bounded() -> None:
    assert all(bounded(choice) for choice in CHOICES)
    assert not bounded(Entmax(2.5))
    assert bounded(Softmax(torch.ones(4, 1, 1)))  # per head
    assert not bounded(Softmax(torch.ones(6, 1)))  # per query


@pytest.mark.parametrize("positions", [[4, 5, 6, 7], [0, 1, 5, 40]], ids=["even", "uneven"])
def test_rotated_coordinates_are_the_derivatives_of_the_scores(
    positions: list[int], draw: Draw
) -> None:
    n, d, D = 4, 3, 4
    X, W = draw(n, d), [draw(1, d, D) for _ in range(3)]
    R = rotation_matrices(angles(torch.tensor(positions), D, dtype=torch.float64), D)
    layer = SelfAttention(*W, choice=Softmax(1.5), biases=(draw(D), draw(D), None), rotations=R)
    x = project(X, *W)

    def scores(X: Tensor) -> Tensor:
        q, k, _ = layer._qkv(X)
        return 1.5 * D**-0.5 * (q @ k.mT)[0]

    q, k, v = layer._qkv(X)
    rotated = x._replace(q=q[None], k=k[None], v=v[None], rotations=R)
    head = _coordinates(rotated, None, AttentionSpec(Softmax(1.5)))
    first = torch.autograd.functional.jacobian(scores, X)  # (n, n, n, d)
    second = torch.func.hessian(scores)(X)  # (n, n, n, d, n, d)
    keys = head.keys(torch.zeros(1, n, D, dtype=torch.float64), slice(0, n)).norm(dim=-1)[0]
    queries = head.query_sizes()[0]
    pair = X.new_zeros(())
    for i in range(n):
        for j in range(n):
            if i != j:
                torch.testing.assert_close(keys[i, j], first[i, j, i].norm())
                torch.testing.assert_close(queries[i, j], first[i, j, j].norm())
                mixed = torch.linalg.matrix_norm(second[i, j, i, :, j], 2)
                pair = torch.maximum(pair, mixed)
    assert head.M[0] >= pair * (1 - 1e-9)
    if positions[-1] == 7:  # even steps: no more than the largest of the offsets, 0 among them
        own = torch.linalg.matrix_norm(1.5 * D**-0.5 * W[0][0] @ W[1][0].mT, 2)
        torch.testing.assert_close(head.M[0], torch.maximum(pair, own))
    else:
        product = spectral(W[0][0]) * spectral(W[1][0]) * 1.5 * D**-0.5
        torch.testing.assert_close(head.M[0], product)


def test_a_rotation_common_to_all_positions_changes_no_bound(draw: Draw) -> None:
    n, d, D = 5, 3, 4
    X, W = draw(n, d), [draw(2, d, D) for _ in range(3)]
    same = torch.linalg.qr(draw(D, D)).Q.expand(n, D, D)
    ball = Ball.of(0.1, "token", n)
    plain = SelfAttention(*W, prior=Causal()).head_bounds(X, ball)
    turned = SelfAttention(*W, prior=Causal(), rotations=same).head_bounds(X, ball)
    for a, b in zip(plain, turned, strict=True):
        torch.testing.assert_close(a, b)


def test_in_a_ball_so_large_that_no_factor_of_a_weight_is_a_number(draw: Draw) -> None:
    """Scores move by thousands, by different amounts, and weights that are 0 here are 1 there."""
    X = 4 * draw(3, 2)
    X[0] *= 10.0  # its scores move by far more than the others
    layer = SelfAttention(3 * draw(2, 2), 3 * draw(2, 2), draw(2, 2), choice=Softmax(2.0))
    here = float(torch.linalg.matrix_norm(layer.jacobian(X).dense(), 2))
    for radius in (1.0, 20.0, 400.0):
        bounds = layer.head_bounds(X, Ball(radius, radius))
        assert float(bounds.upper) >= here
        for _ in range(20):
            move = draw(3, 2)
            there = layer.jacobian(X + radius * move / move.norm()).dense()
            assert float(torch.linalg.matrix_norm(there, 2)) <= float(bounds.upper)
