"""fenchel/sensitivity/bounds/attention.py, and Choice.sensitivity as certificates rest on it."""

import math
from collections.abc import Callable

import mpmath
import pytest
import torch
from torch import Tensor

from fenchel.choice import Choice, Entmax, Softmax, Sparsemax
from fenchel.sensitivity import bounds

Draw = Callable[..., Tensor]
CHOICES = [Softmax(), Softmax(3.0), Entmax(1.5), Sparsemax()]


def jacobians(choice: Choice, p: Tensor) -> Tensor:
    """diag(s) - s s^T / sum(s), times beta, as matrices."""
    eye = torch.eye(p.shape[-1], dtype=p.dtype)
    return choice.jacobian_product(p.unsqueeze(-2), eye.expand(*p.shape, p.shape[-1]))


@pytest.mark.parametrize("choice", CHOICES, ids=repr)
def test_no_row_exceeds_its_closed_form(choice: Choice, draw: Draw, spread_out: Draw) -> None:
    for K in (2, 3, 7, 40):
        p = choice.weights(draw(2500, K) * spread_out(-2, 1.3, 2500, 1))
        bound = bounds.row(choice, p)
        exact = torch.linalg.eigvalsh(jacobians(choice, p))[..., -1]
        assert (bound >= exact * (1 - 1e-9) - 1e-15).all()  # 10,000 rows a choice
        sensitivity = choice.sensitivity(p)
        assert (bound >= sensitivity * (1 - 1e-13)).all()
        clear = exact > 1e-6
        torch.testing.assert_close(sensitivity[clear], exact[clear], rtol=1e-6, atol=0)


def test_the_closed_form_is_exact_when_the_others_are_equal() -> None:
    p = torch.tensor([[0.7, 0.3, 0.0], [0.4, 0.3, 0.3], [0.8, 0.1, 0.1]], dtype=torch.float64)
    torch.testing.assert_close(bounds.row(Softmax(), p), Softmax().sensitivity(p))


def test_it_is_never_more_than_a_sixth_too_large(draw: Draw, spread_out: Draw) -> None:
    p = Softmax().weights(draw(20_000, 12) * spread_out(-1, 1, 20_000, 1))
    ratio = bounds.row(Softmax(), p) / Softmax().sensitivity(p)
    assert ratio.max() < 4 - 2 * math.sqrt(2)


@pytest.mark.parametrize("depth", [10.0, 40.0, 300.0])
def test_saturated_rows_are_right_to_their_last_digits(depth: float) -> None:
    # 1 - p_1 has no correct digit at depth 40; sums of the others have all of theirs.
    z = torch.tensor([0.0, -depth, -depth - 1.0, -depth - 3.0], dtype=torch.float64)
    p = Softmax().weights(z)
    with mpmath.workdps(400):
        q = [mpmath.mpf(float(x)) for x in p]
        q = [1 - sum(q[1:]), *q[1:]]
        J = mpmath.diag(q) - mpmath.matrix(q) * mpmath.matrix(q).T
        exact = max(mpmath.eigsy(J, eigvals_only=True))
        off = abs(mpmath.mpf(float(Softmax().sensitivity(p))) / exact - 1)
        above = mpmath.mpf(float(bounds.row(Softmax(), p))) / exact
    assert off < 1e-12
    assert 1 <= above < 1.2


def test_half_is_reached_by_two_equal_scores_and_only_approached_by_more() -> None:
    two = Softmax().weights(torch.zeros(2, dtype=torch.float64))
    assert float(Softmax().sensitivity(two)) == 0.5
    for depth, value in ((1.0, 0.322), (5.0, 0.495), (20.0, 0.49999999845)):
        z = torch.tensor([0.0, 0.0, -depth, -depth, -depth], dtype=torch.float64)
        found = float(Softmax().sensitivity(Softmax().weights(z)))
        assert found < 0.5
        assert abs(found - value) < 1e-3
    even = Softmax(2.0).weights(torch.zeros(8, dtype=torch.float64))
    assert abs(float(Softmax(2.0).sensitivity(even)) - 2.0 / 8) < 1e-15


def test_no_pair_of_scores_moves_the_weights_by_more_than_half(draw: Draw) -> None:
    z, move = draw(5000, 6) * 3, draw(5000, 6)
    for size in (1e-3, 1.0, 10.0):
        for p in (1, 2, torch.inf):  # the same constant in every l_p
            ratio = (Softmax().weights(z + size * move) - Softmax().weights(z)).norm(
                p=p, dim=-1
            ) / (size * move).norm(p=p, dim=-1)
            assert ratio.max() <= 0.5
    # From the largest to the sum of absolute values the constant is one.
    change = (Softmax().weights(z + move) - Softmax().weights(z)).abs().sum(-1)
    assert (change <= move.abs().amax(-1)).all()


def test_gershgorin_gives_the_half(draw: Draw) -> None:
    p = Softmax().weights(draw(1000, 5) * 2)
    rows = jacobians(Softmax(), p).abs().sum(-1)
    torch.testing.assert_close(rows, 2 * p * (1 - p))
    assert rows.max() <= 0.5


def test_the_penalty_pulls_rows_apart_from_ties(draw: Draw) -> None:
    z = draw(3, 2, 5, 6).requires_grad_()
    value = bounds.penalty(Softmax(), Softmax().weights(z))
    (slope,) = torch.autograd.grad(value, z)
    assert torch.autograd.gradcheck(lambda z: bounds.penalty(Softmax(), Softmax().weights(z)), z)
    lower = bounds.penalty(Softmax(), Softmax().weights(z - 0.1 * slope))
    assert lower < value
    sure = torch.eye(6, dtype=torch.float64).expand(1, 6, 6)
    assert bounds.penalty(Softmax(), sure).isfinite()


@pytest.mark.parametrize("T", [2, 4, 64])
def test_entropy_has_the_floor_that_its_scores_allow(T: int, draw: Draw) -> None:
    for size in (0.5, 2.0, 10.0):
        z = draw(4000, T)
        z = size * z / z.norm(dim=-1, keepdim=True)
        p = z.softmax(-1)
        entropy = -(p * p.log()).sum(-1)
        assert (entropy >= bounds.entropy(T, size) - 1e-12).all()
        worst = torch.full((T,), -1.0 / (T - 1), dtype=torch.float64)
        worst[0] = 1.0
        q = (size * worst / worst.norm()).softmax(-1)
        floor = -torch.special.xlogy(q, q).sum()
        torch.testing.assert_close(float(floor), bounds.entropy(T, size), rtol=1e-9, atol=1e-12)
    assert bounds.entropy(1, 5.0) == 0.0
    assert bounds.entropy(7, 0.0) == pytest.approx(math.log(7))
    with pytest.raises(ValueError, match="T >= 1"):
        bounds.entropy(0, 1.0)


def test_attention_collapses_without_its_scale(draw: Draw) -> None:
    # n = 64 keys. Unscaled scores make a row choose one key; its sensitivity then dies, but only
    # at widths of about 256 and up: at 16 and 64 it is larger than with the scale.
    medians = {}
    for width in (16, 64, 256, 1024):
        q, k = draw(200, 1, width), draw(200, 64, width)
        z = (q @ k.mT).squeeze(1)
        for name, scale in (("raw", 1.0), ("scaled", width**-0.5)):
            p = Softmax().weights(scale * z)
            entropy = -torch.special.xlogy(p, p).sum(-1).mean()
            medians[name, width] = (
                float(entropy),
                float(p.amax(-1).mean()),
                float(Softmax().sensitivity(p).median()),
            )
    assert abs(medians["raw", 64][0] - 0.55) < 0.15
    assert abs(medians["scaled", 64][0] - 3.68) < 0.1
    assert medians["raw", 64][1] > 0.7 > 0.3 > medians["scaled", 64][1]
    assert medians["raw", 16][2] > 2 * medians["scaled", 16][2]
    assert medians["raw", 256][2] < 0.6 * medians["scaled", 256][2]
    assert medians["raw", 1024][2] < 1e-2 < 0.08 < medians["scaled", 1024][2] < 0.1
