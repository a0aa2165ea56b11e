"""fenchel/sensitivity/norms.py: small, non-negative and token-by-token norms."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn.functional import gelu

from fenchel.attention import Causal, self_attention
from fenchel.sensitivity import (
    bounds,
    influence,
    jacobian,
    self_attention_jacobian,
    token_norm,
    witness,
)
from fenchel.sensitivity.norms import nonnegative, spectral

Draw = Callable[..., Tensor]


@pytest.mark.parametrize("shape", [(1, 1), (3, 5), (5, 3), (6, 6)], ids=str)
@pytest.mark.parametrize("size", [1e-200, 1.0, 1e200])
def test_the_norm_of_small_matrices_of_any_size(
    shape: tuple[int, int], size: float, draw: Draw
) -> None:
    A = size * draw(40, *shape)
    torch.testing.assert_close(
        spectral(A) / size, torch.linalg.matrix_norm(A / size, 2), rtol=1e-12, atol=0
    )


def test_the_norm_of_a_non_negative_matrix_is_met_from_above(draw: Draw, spread_out: Draw) -> None:
    scores = draw(200, 12, 12) * spread_out(-1, 2, 200, 1, 1)
    scores[::2] += torch.ones(12, 12).triu(1).mul(-1e9)  # causal, every second one
    P = scores.softmax(-1)
    exact = torch.linalg.matrix_norm(P, 2)
    upper = nonnegative(P)
    assert (upper >= exact * (1 - 1e-14)).all()
    assert (upper <= 1.05 * exact).all()
    assert (nonnegative(P, steps=1) >= exact * (1 - 1e-14)).all()
    assert nonnegative(torch.zeros(3, 4)) == 0.0


def test_influence_is_the_norm_of_every_block(draw: Draw) -> None:
    X, W = draw(5, 3), [draw(3, 3), draw(3, 3), draw(3, 2)]
    J = self_attention_jacobian(X, *W, prior=Causal())
    blocks = J.dense().reshape(5, 2, 5, 3).permute(0, 2, 1, 3)
    torch.testing.assert_close(influence(J), torch.linalg.matrix_norm(blocks, 2))


def test_two_layers_mix_what_one_layer_keeps_apart(draw: Draw) -> None:
    # Each token of a band matrix sees its neighbour; after two layers, its neighbour's neighbour.
    W = [draw(3, 3) for _ in range(3)]
    X = draw(6, 3)

    def layer(X: Tensor) -> Tensor:
        return X + 0.5 * torch.cat([X[:1], X[:-1]])

    once, twice = influence(jacobian(layer, X)), influence(jacobian(lambda x: layer(layer(x)), X))
    assert ((once > 0).sum(-1) <= 2).all()
    assert (twice[2:] > 0).sum(-1).tolist() == [3, 3, 3, 3]
    attended = influence(jacobian(lambda x: self_attention(x, *W), X))
    assert (attended > 0).all()  # one attention layer already mixes every token into every other


def test_the_token_norm_is_met_from_both_sides(draw: Draw, generator: torch.Generator) -> None:
    for _ in range(10):
        X, W = draw(6, 3), [draw(3, 3) for _ in range(3)]
        J = self_attention_jacobian(X, *W)
        found = token_norm(J, generator=generator)
        assert found.lower <= found.upper
        assert found.upper <= bounds.token_max(X, *W) * 2
        unit = found.direction.norm(dim=-1)
        torch.testing.assert_close(unit, torch.ones_like(unit))
        reached = (J @ found.direction).norm(dim=-1).max()
        torch.testing.assert_close(reached, found.lower)
        for _ in range(50):
            d = draw(6, 3)
            d = d / d.norm(dim=-1, keepdim=True)
            assert (J @ d).norm(dim=-1).max() <= found.upper


def test_it_is_exact_for_outputs_of_one_number(draw: Draw, generator: torch.Generator) -> None:
    # Then every token can turn towards the row at once: the norm is a row sum, max_i sum_j |J_ij|.
    W = draw(4, 6, 3)
    found = token_norm(
        jacobian(lambda X: torch.einsum("inm,nm->i", W, X).unsqueeze(-1), draw(6, 3)),
        steps=5,
        generator=generator,
    )
    exact = W.norm(dim=-1).sum(-1).max()
    torch.testing.assert_close(found.lower, exact, rtol=1e-10, atol=0)
    torch.testing.assert_close(found.upper, exact, rtol=1e-10, atol=0)


def test_it_is_exact_for_a_map_of_every_token_by_itself(draw: Draw) -> None:
    W = draw(4, 5)
    found = token_norm(jacobian(lambda x: x @ W, draw(3, 4)))
    torch.testing.assert_close(found.lower, torch.linalg.matrix_norm(W, 2))
    torch.testing.assert_close(found.upper, torch.linalg.matrix_norm(W, 2), rtol=1e-12, atol=0)


def test_a_growth_in_frobenius_norm_is_bounded_in_token_norm(
    generator: torch.Generator,
) -> None:
    eye = torch.eye(4, dtype=torch.float64)
    found = []
    for n in (8, 32):
        w = witness.adversarial(-eye, eye, eye, n, 4.0, family="minus", score_scale=1.0)
        J = self_attention_jacobian(w.X, -eye, eye, eye, scale=1.0)
        found.append((w.growth * w.rate, float(token_norm(J, generator=generator).upper)))
    assert found[1][0] > 1.9 * found[0][0]  # sqrt(n)
    assert found[1][1] < 1.01 * found[0][1] < 1.02


def test_influence_needs_tokens(draw: Draw) -> None:
    with pytest.raises(ValueError, match=r"\(N, M\)"):
        influence(jacobian(gelu, draw(2, 3, 4)))
