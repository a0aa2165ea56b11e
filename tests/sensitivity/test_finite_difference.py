"""fenchel/sensitivity/finite_difference.py: estimates that say their error, and keep to it."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from fenchel.sensitivity import difference_jacobian, jacobian, spectral_norm

Draw = Callable[..., Tensor]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("scale", [0.3, 1.0, 3.0])
def test_a_product_is_within_the_error_of_the_operator(
    scale: float, dtype: torch.dtype, draw: Draw
) -> None:
    W = [draw(6, 6).to(dtype) / 6**0.5 for _ in range(3)]
    X = draw(24, 6).to(dtype)

    def f(X: Tensor) -> Tensor:
        q, k, v = (X @ w for w in W)
        return scaled_dot_product_attention(q, k, v, scale=scale)

    estimate, exact = difference_jacobian(f, X), jacobian(f, X)
    norm = spectral_norm(exact).lower
    for _ in range(5):
        v = draw(24, 6).to(dtype)
        off = ((estimate @ v) - (exact @ v)).norm() / (norm * v.norm())
        assert off <= estimate.error
    assert estimate.error < (1e-7 if dtype == torch.float64 else 2e-3)


def test_the_bracket_of_an_estimate_still_holds_the_truth(
    draw: Draw, generator: torch.Generator
) -> None:
    W = [draw(4, 4) for _ in range(3)]

    def f(X: Tensor) -> Tensor:  # a kernel without a forward derivative
        return scaled_dot_product_attention(*(X @ w for w in W))

    for _ in range(20):
        X = draw(7, 4)
        truth = torch.linalg.matrix_norm(jacobian(f, X).dense(), 2)
        bracket = spectral_norm(difference_jacobian(f, X), generator=generator)
        assert bracket.lower <= truth * (1 + 1e-12)
        assert bracket.upper >= truth
        assert bracket.ratio < 1.001


def test_a_coarse_step_states_a_large_error(draw: Draw) -> None:
    X, v = draw(6, 4), draw(6, 4)
    fine, coarse = (difference_jacobian(torch.exp, X, step=step) for step in (1e-3, 0.3))
    exact = jacobian(torch.exp, X)
    for J in (fine, coarse):
        off = ((J @ v) - (exact @ v)).norm() / (torch.exp(X).max() * v.norm())
        assert off <= J.error
    assert coarse.error > 100 * fine.error


def test_extrapolation_leaves_an_error_of_fourth_order(draw: Draw) -> None:
    X, v = draw(6, 4), draw(6, 4)
    exact = torch.cos(X) * v
    off = [
        (difference_jacobian(torch.sin, X, step=step) @ v - exact).norm() for step in (0.04, 0.02)
    ]
    assert 14 < off[0] / off[1] < 18


def test_a_function_without_reverse_derivative_has_forward_products_alone(draw: Draw) -> None:
    X = draw(5)
    J = difference_jacobian(lambda x: torch.from_numpy(x.detach().numpy() ** 2), X)
    torch.testing.assert_close(J @ torch.ones_like(X), 2 * X, rtol=1e-8, atol=1e-8)
    with pytest.raises(ValueError, match="no reverse derivative"):
        J.T @ X


def test_a_step_is_a_fraction(draw: Draw) -> None:
    with pytest.raises(ValueError, match="fraction"):
        difference_jacobian(torch.sin, draw(3), step=2.0)
