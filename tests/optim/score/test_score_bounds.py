"""fenchel/optim/score/score_bounds.py: bounds that random moves and losses try to break."""

import mpmath  # type: ignore[import-untyped]
import pytest
import torch
from torch import Tensor

from fenchel.optim import remove_gauge, score_step
from fenchel.optim.score.exact_step import ScoreMap, WeightMove
from fenchel.optim.score.score_bounds import (
    decrease_lower,
    efficiency_lower,
    gamma_bounds,
    reachable_gradient,
    reachable_rank,
    remainder_upper,
    score_spectrum,
)


def draw(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, dtype=torch.float64, generator=generator)


def problem(n: int, d: int, k: int, seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return tuple(draw(*s, seed=seed + i) for i, s in enumerate([(n, d), (d, k), (d, k), (n, n)]))  # type: ignore[return-value]


@pytest.mark.parametrize("size", [(10, 6, 2), (5, 7, 3), (9, 4, 4)], ids=str)
def test_the_spectrum_is_that_of_the_dense_map(size: tuple[int, int, int]) -> None:
    X, W_Q, W_K, _ = problem(*size, seed=0)
    scores = ScoreMap(X[None], W_Q, W_K)
    basis = torch.eye(2 * W_Q.numel(), dtype=torch.float64).reshape(-1, 2, *W_Q.shape)
    s = torch.linalg.svdvals(torch.stack([scores.linear(WeightMove(*e)).flatten() for e in basis]))
    found = score_spectrum(X, W_Q, W_K)
    s = s[s > 1e-10 * s[0]]
    assert found.rank == len(s) == reachable_rank(X, W_Q, W_K)
    assert found.largest == pytest.approx(float(s[0]))
    assert found.smallest == pytest.approx(float(s[-1]), rel=1e-6)


def test_the_reachable_dimension_is_k_times_2r_less_k_at_full_rank() -> None:
    X, W_Q, W_K, _ = problem(10, 6, 2, seed=3)
    assert reachable_rank(X, W_Q, W_K) == 2 * (2 * 6 - 2)


@pytest.mark.parametrize("seed", range(0, 100, 10))
@pytest.mark.parametrize("solver", ["raw", "exact", "spectral"])
def test_the_remainder_of_a_gauge_free_step_stays_below_its_bound(seed: int, solver: str) -> None:
    X, W_Q, W_K, G = problem(9, 5, 2, seed=seed)
    step = score_step(X, W_Q, W_K, G, 0.3, solver=solver, gauge="least")
    dW = WeightMove(step.dW_Q, step.dW_K)
    scores = ScoreMap(X[None], W_Q, W_K)
    gamma = float(scores.linear(dW).norm())
    assert float(scores.bilinear(dW).norm()) <= remainder_upper(X, W_Q, W_K, gamma)


def test_along_the_gauge_the_remainder_has_no_bound_and_removal_takes_it_away() -> None:
    X, W_Q, W_K, _ = problem(9, 5, 2, seed=0)
    M = draw(2, 2, seed=9)
    gauge = WeightMove(W_Q @ M, -W_K @ M.mT)
    scores = ScoreMap(X[None], W_Q, W_K)
    assert float(scores.linear(gauge).norm()) < 1e-12
    assert float(scores.bilinear(gauge).norm()) > 1.0
    assert max(float(m.norm()) for m in remove_gauge(W_Q, W_K, *gauge)) < 1e-12


@pytest.mark.parametrize("seed", range(0, 60, 10))
def test_a_smooth_loss_falls_at_least_as_far_as_promised(seed: int) -> None:
    """L(S) = b/2 |S - target|^2 is exactly b-smooth, so the bound is attained by linear dS."""
    X, W_Q, W_K, target = problem(9, 5, 2, seed=seed)
    b, S = 0.7, X @ W_Q @ W_K.mT @ X.mT
    G = b * (S - target)
    slope = float(reachable_gradient(X, W_Q, W_K, G).norm())
    bounds = gamma_bounds(X, W_Q, W_K, G, smoothness=b, tau=1e-3)
    gamma = min(bounds.best, bounds.bilinear)
    step = score_step(X, W_Q, W_K, G, gamma)
    fall = 0.5 * b * float((S - target).square().sum() - (S + step.dS - target).square().sum())
    assert fall >= decrease_lower(slope, b, gamma) * (1 - 2e-3) > 0  # 2e-3: twice the tau above
    assert decrease_lower(slope, b, bounds.largest) == pytest.approx(0.0, abs=1e-9)
    assert decrease_lower(slope, b, bounds.best) >= decrease_lower(slope, b, 1.1 * bounds.best)


def test_up_to_the_gamma_bounds_the_linear_rule_errs_by_less_than_tau() -> None:
    X, W_Q, W_K, G = problem(9, 5, 2, seed=1)
    gamma = gamma_bounds(X, W_Q, W_K, G, smoothness=1.0, tau=0.05).bilinear
    assert remainder_upper(X, W_Q, W_K, gamma) == pytest.approx(0.05 * gamma)


def test_a_loss_that_is_not_smooth_has_no_gamma_bounds() -> None:
    with pytest.raises(ValueError, match="smoothness=0"):
        gamma_bounds(*problem(9, 5, 2, seed=1), smoothness=0.0)


@pytest.mark.parametrize("log_condition", [2, 5, 7, 8, 10])
def test_ill_conditioned_tokens_never_raise_the_bound_above_what_is_attained(
    log_condition: int,
) -> None:
    n, d, k = 12, 5, 2
    for seed in range(2):
        U, _, V = torch.linalg.svd(draw(n, d, seed=seed), full_matrices=False)
        X = U * 10.0 ** -torch.linspace(0, log_condition, d, dtype=torch.float64) @ V
        W_Q, W_K = draw(d, k, seed=seed + 1), draw(d, k, seed=seed + 2)
        s, s_max = exact_extremes(X, W_Q, W_K)
        # Kantorovich's inequality is attained by a G with equal parts of both singular vectors.
        attained = 2.0 * s * s_max / (s * s + s_max * s_max)
        assert efficiency_lower(X, W_Q, W_K) <= attained
        gamma = 0.1
        assert remainder_upper(X, W_Q, W_K, gamma) >= spectral(X) ** 2 * gamma**2 / (2 * s**2)
        tau_length = gamma_bounds(X, W_Q, W_K, draw(n, n, seed=9), smoothness=1.0).bilinear
        assert tau_length <= 0.2 * s**2 / spectral(X) ** 2
        if log_condition <= 5:
            assert efficiency_lower(X, W_Q, W_K) == pytest.approx(attained, rel=1e-3)


@pytest.mark.parametrize("size", [1e-120, 1e-30, 1e30, 1e120])
def test_the_efficiency_does_not_depend_on_the_units(size: float) -> None:
    X, W_Q, W_K, _ = problem(9, 5, 2, seed=4)
    plain = efficiency_lower(X, W_Q, W_K)
    assert efficiency_lower(size * X, W_Q, W_K) == pytest.approx(plain)
    assert efficiency_lower(X, size * W_Q, size * W_K) == pytest.approx(plain)


def spectral(X: Tensor) -> float:
    return float(torch.linalg.matrix_norm(X, 2))


def exact_extremes(X: Tensor, W_Q: Tensor, W_K: Tensor) -> tuple[float, float]:
    """Extreme singular values of J at full rank, by mpmath to 50 digits."""
    with mpmath.workdps(50):
        x, q, k = (mpmath.matrix(A.tolist()) for A in (X, W_Q, W_K))
        d, width = W_Q.shape
        r = mpmath.qr(x)[1][:d, :]  # the scores of R are those of X = Q R up to a rotation
        Q, K = r * q, r * k
        rows = []
        for a in range(d):
            for b in range(width):
                rows.append([r[i, a] * K[j, b] for i in range(d) for j in range(d)])
                rows.append([Q[i, b] * r[j, a] for i in range(d) for j in range(d)])
        J = mpmath.matrix(rows)
        squares = sorted(mpmath.eigsy(J * J.T, eigvals_only=True))
        rank = width * (2 * d - width)
        return float(mpmath.sqrt(squares[-rank])), float(mpmath.sqrt(squares[-1]))
