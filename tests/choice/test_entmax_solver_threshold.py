"""fenchel/choice/entmax_solver.py: the fast threshold against the slow one, and against mpmath."""

import math

import mpmath
import pytest
import torch
from torch import Tensor

from fenchel.choice import entmax_solver as module
from fenchel.choice.entmax_solver import _step, bisect, origin, threshold, tsallis_weights

ALPHAS = [1.001, 1.1, 1.5, 1.75, 2.0, 2.0001, 3.0, 4.0]


def rows(kind: str, K: int = 600) -> Tensor:
    """Eight rows of scores of a kind that some solver dislikes."""
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(8, K, dtype=torch.float64, generator=generator)
    falling = torch.arange(K, dtype=torch.float64)
    sizes = torch.logspace(-8, 2, 8, dtype=torch.float64)[:, None]
    return {
        "near uniform": 0.1 * noise,
        "normal": 2.0 * noise,
        "heavy tails": noise / noise.flip(0).abs().clamp(min=0.05),
        "one far ahead": 0.1 * noise + 9.0 * (falling == 3),
        "one in eight": 0.1 * noise - 9.0 * (falling % 8 == 0),
        "equal": 0.0 * noise,
        "line": -sizes * falling / K,
        "crowded at the top": -sizes / (1.0 + falling),
        "crowded at the bottom": -sizes * torch.exp2(-falling / 8),
    }[kind]


KINDS = [
    "near uniform",
    "normal",
    "heavy tails",
    "one far ahead",
    "one in eight",
    "equal",
    "line",
    "crowded at the top",
    "crowded at the bottom",
]


def scaled(x: Tensor, alpha: float) -> Tensor:
    return (alpha - 1.0) * (x - x.amax(-1, keepdim=True))


def solve(y: Tensor, alpha: float | Tensor) -> Tensor:
    return threshold(y, alpha, (torch.empty_like(y), torch.empty_like(y)))


def weights(y: Tensor, d: Tensor, alpha: float | Tensor) -> Tensor:
    p = tsallis_weights(y + d, alpha)
    return p / p.sum(-1, keepdim=True)


@pytest.mark.parametrize("alpha", ALPHAS)
@pytest.mark.parametrize("kind", KINDS)
def test_it_agrees_with_bisection_in_both_precisions(kind: str, alpha: float) -> None:
    y = scaled(rows(kind), alpha)
    wanted = weights(y, bisect(y, alpha), alpha)
    # above 2 the weight at the edge of the support is a root of a rounding error
    blur = 1e-12 if alpha <= 2.0 else 1e-8
    torch.testing.assert_close(weights(y, solve(y, alpha), alpha), wanted, atol=blur, rtol=1e-9)
    z = y.float()
    single = weights(z, solve(z, alpha), alpha).double()
    exact = weights(z.double(), bisect(z.double(), alpha), alpha)
    blur = 1e-6 if alpha <= 2.0 else 2e-2
    torch.testing.assert_close(single, exact, atol=blur, rtol=1e-3)


@pytest.mark.parametrize("alpha", [1.001, 1.3, 1.5, 2.0, 3.0])
def test_thirty_digits_agree(alpha: float) -> None:
    y = scaled(rows("normal", 20)[:1], alpha)
    with mpmath.workdps(30):
        r = 1 / (mpmath.mpf(alpha) - 1)
        entries = [mpmath.mpf(float(v)) for v in y[0]]

        def excess(t: mpmath.mpf) -> mpmath.mpf:
            return sum(max(v + t, mpmath.mpf(0)) ** r for v in entries) - 1

        low, high = mpmath.mpf(0), mpmath.mpf(1)
        for _ in range(100):
            middle = (low + high) / 2
            low, high = (low, middle) if excess(middle) >= 0 else (middle, high)
        wanted = float(high - mpmath.mpf(origin(alpha)))
    for found in (solve(y, alpha), bisect(y, alpha)):
        assert math.isclose(float(found), wanted, rel_tol=1e-13)


@pytest.mark.parametrize("alpha", [1.1, 1.5, 1.75, 2.0])
@pytest.mark.parametrize("kind", KINDS)
def test_steps_fall_towards_the_root_and_never_past_it(kind: str, alpha: float) -> None:
    y = scaled(rows(kind), alpha)
    root = bisect(y, alpha)
    d = torch.ones_like(root) - origin(alpha)
    work = (torch.empty_like(y), torch.empty_like(y))
    for _ in range(12):
        step = _step(y, d, alpha, work)
        assert (step >= -1e-15).all()
        d = d - step
        assert (d >= root - 1e-14).all()
    # and from below, one step leads above
    below = root * 0.7 if origin(alpha) == 0.0 else root - 0.3 * (1.0 + root)
    assert (below - _step(y, below, alpha, work) >= root - 1e-14).all()


@pytest.mark.parametrize("alpha", [1.5, 2.0, 3.0])
def test_rows_that_resist_go_to_bisection(alpha: float, monkeypatch: pytest.MonkeyPatch) -> None:
    y = scaled(rows("normal"), alpha)
    wanted = bisect(y, alpha)
    monkeypatch.setattr(module, "_STEPS", 1)
    assert torch.equal(solve(y, alpha), wanted)


def test_a_row_with_nan_leaves_the_others_alone() -> None:
    for alpha in (1.3, 1.5, 2.0, 3.0):
        y = scaled(rows("normal"), alpha)
        wanted = solve(y, alpha)
        y[2] = math.nan
        found = solve(y, alpha)
        kept = [0, 1, 3, 4, 5, 6, 7]
        torch.testing.assert_close(found[kept], wanted[kept])
        assert weights(y, found, alpha)[2].isnan().all()


def test_an_alpha_for_each_row() -> None:
    x = rows("normal")
    for values in ([1.001, 1.1, 1.5, 1.75, 2.0, 1.2, 1.9, 1.4], [1.2, 4.0] * 4):
        alpha = torch.tensor(values, dtype=torch.float64)[:, None]
        y = (alpha - 1.0) * (x - x.amax(-1, keepdim=True))
        found = solve(y, alpha)
        for i, a in enumerate(values):
            torch.testing.assert_close(found[i : i + 1], bisect(y[i : i + 1], a))
