"""fenchel/lessons/convex_program.py: small programs solved, checked and compared with cvxpy."""

import math

import cvxpy as cp
import numpy as np
import pytest
import torch
from torch import Tensor

from fenchel.choice import Softmax, Sparsemax
from fenchel.lessons.convex_program import (
    ConvexProgram,
    dual_value,
    licq,
    multipliers,
    residuals,
    slater_point,
    solve,
)

Z = torch.tensor([1.0, 0.8, -3.0, 0.3], dtype=torch.float64)


def simplex(objective: object) -> ConvexProgram:
    return ConvexProgram(objective, lambda p: -p, lambda p: (p.sum() - 1.0).reshape(1))


def negative_entropy(p: Tensor) -> Tensor:
    return torch.special.xlogy(p, p).sum()


ENTROPY = simplex(lambda p: negative_entropy(p) - Z @ p)
DISTANCE = simplex(lambda p: 0.5 * p @ p - Z @ p)
MIDDLE = torch.full((4,), 0.25, dtype=torch.float64)


def worst(program: ConvexProgram, x: Tensor, mu: Tensor, nu: Tensor) -> float:
    return max(abs(float(r)) for r in residuals(program, x, mu, nu))


def test_softmax_is_derived_with_no_inequality_active() -> None:
    found = solve(ENTROPY, MIDDLE)
    torch.testing.assert_close(found.x, Softmax().weights(Z), atol=1e-8, rtol=0)
    assert (found.mu < 1e-7).all()
    assert worst(ENTROPY, *found) < 1e-8
    # stationarity z_i - log p_i - 1 - nu = 0 gives nu
    torch.testing.assert_close(float(found.nu), float(Softmax().value(Z)) - 1.0)


def test_sparsemax_is_derived_with_active_inequalities() -> None:
    found = solve(DISTANCE, MIDDLE)
    p = Sparsemax().weights(Z)
    torch.testing.assert_close(found.x, p, atol=1e-8, rtol=0)
    assert ((found.mu > 0.01) == (p == 0)).all()
    assert worst(DISTANCE, *found) < 1e-8


def test_least_squares_finds_the_multipliers_of_the_exact_solution() -> None:
    for program, p in ((ENTROPY, Softmax().weights(Z)), (DISTANCE, Sparsemax().weights(Z))):
        found = multipliers(program, p)
        assert worst(program, *found) < 1e-12
        assert licq(program, p)


def test_least_squares_shows_what_is_wrong_elsewhere() -> None:
    p = torch.tensor([1.0, 0.0, 0.0, 0.0], dtype=torch.float64)
    found = residuals(DISTANCE, *multipliers(DISTANCE, p))
    assert found.dual > 0.5
    found = residuals(DISTANCE, *multipliers(DISTANCE, MIDDLE))
    assert found.stationarity > 0.5


def test_the_objective_slopes_along_the_normals_of_what_holds_it() -> None:
    # the point of a sphere nearest to a plane's pull: grad f lies in the span of grad h
    program = ConvexProgram(lambda x: x @ x, None, lambda x: torch.stack([x[0] + 2 * x[1] - 5.0]))
    found = solve(program, torch.zeros(3, dtype=torch.float64))
    torch.testing.assert_close(found.x, torch.tensor([1.0, 2.0, 0.0]).double())
    torch.testing.assert_close(found.nu, torch.tensor([-2.0]).double())
    assert worst(program, *found) < 1e-12


def test_the_dual_bounds_from_below_and_meets_the_primal() -> None:
    best = float(-Sparsemax().value(Z) + 0.5)  # Omega there is (|p|^2 - 1) / 2
    found = solve(DISTANCE, MIDDLE)
    torch.testing.assert_close(
        float(dual_value(DISTANCE, found.mu, found.nu, MIDDLE)), best, atol=1e-8, rtol=0
    )
    generator = torch.Generator().manual_seed(0)
    for _ in range(5):
        mu = torch.rand(4, dtype=torch.float64, generator=generator)
        nu = torch.randn(1, dtype=torch.float64, generator=generator)
        assert dual_value(DISTANCE, mu, nu, MIDDLE) <= best
    line = ConvexProgram(lambda x: x.sum())
    none = torch.zeros(0, dtype=torch.float64)
    assert dual_value(line, none, none, MIDDLE) == -math.inf


def test_the_dual_recipe_recovers_the_solution() -> None:
    # L = |p|^2 / 2 - z p + nu (sum p - 1) - mu p is least at p = z - nu + mu, so the dual is
    # -|z - nu + mu|^2 / 2 - nu, to be made large over mu >= 0.
    dual = ConvexProgram(
        lambda y: 0.5 * (Z - y[4] + y[:4]).square().sum() + y[4] + 1e-12 * y.square().sum(),
        lambda y: -y[:4],
    )
    y = solve(dual, torch.ones(5, dtype=torch.float64)).x
    torch.testing.assert_close(Z - y[4] + y[:4], Sparsemax().weights(Z), atol=1e-6, rtol=0)


def test_slater_finds_an_inner_point_or_returns_none() -> None:
    outside = torch.tensor([2.0, -1.0, 0.0, 0.0], dtype=torch.float64)
    inner = slater_point(DISTANCE, outside)
    assert inner is not None
    assert (inner > 0).all()
    torch.testing.assert_close(inner.sum(), torch.tensor(1.0).double())
    point = ConvexProgram(lambda x: x.sum(), lambda x: torch.cat([x - 1.0, 1.0 - x]))
    assert slater_point(point, torch.zeros(1, dtype=torch.float64)) is None


def test_a_square_that_must_vanish_has_no_multiplier() -> None:
    # minimise x subject to x^2 <= 0: solved by 0, but without Slater no mu makes it stationary
    program = ConvexProgram(lambda x: x.sum(), lambda x: x.square())
    x = torch.zeros(1, dtype=torch.float64)
    assert not licq(program, x)
    assert residuals(program, *multipliers(program, x)).stationarity == 1


def test_dependent_normals_are_not_qualified() -> None:
    twice = ConvexProgram(lambda x: x @ x, None, lambda x: torch.stack([x.sum(), 2 * x.sum()]))
    assert not licq(twice, torch.zeros(3, dtype=torch.float64))


def test_a_curved_constraint_agrees_with_cvxpy_in_point_and_multiplier() -> None:
    A = torch.tensor([[2.0, 0.5, 0.0], [0.5, 1.0, 0.2], [0.0, 0.2, 1.5]], dtype=torch.float64)
    c = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)
    program = ConvexProgram(
        lambda x: 0.5 * x @ A @ x - c @ x,
        lambda x: torch.stack([x @ x - 0.6, x[0] - 0.1]),
        lambda x: torch.stack([x.sum() + 0.4]),
    )
    found = solve(program, torch.tensor([-0.2, -0.1, -0.1], dtype=torch.float64))
    x = cp.Variable(3)
    rules = [cp.sum_squares(x) <= 0.6, x[0] <= 0.1, cp.sum(x) == -0.4]
    objective = cp.Minimize(0.5 * cp.quad_form(x, A.numpy()) - c.numpy() @ x)
    cp.Problem(objective, rules).solve(solver=cp.CLARABEL)
    torch.testing.assert_close(found.x, torch.from_numpy(x.value), atol=1e-6, rtol=0)
    wanted = torch.from_numpy(np.concatenate([np.ravel(rule.dual_value) for rule in rules]))
    torch.testing.assert_close(torch.cat([found.mu, found.nu]), wanted, atol=1e-4, rtol=0)
    assert worst(program, *found) < 1e-6  # what the steep end of the barrier allows


def test_the_density_of_largest_entropy_with_given_moments_is_gaussian() -> None:
    # a function-space problem on a grid: mean 0.3 and second moment 1 fix the shape
    grid = torch.linspace(-6.0, 6.0, 41, dtype=torch.float64)
    width = 0.3
    moments = torch.stack([torch.ones_like(grid), grid, grid.square()])
    wanted = torch.tensor([1.0, 0.3, 1.0], dtype=torch.float64)
    program = ConvexProgram(
        lambda q: width * negative_entropy(q), None, lambda q: width * moments @ q - wanted
    )
    q = solve(program, torch.full((41,), 1 / 12.0, dtype=torch.float64)).x
    gauss = torch.exp(-((grid - 0.3) ** 2) / (2 * 0.91)) / math.sqrt(2 * math.pi * 0.91)
    torch.testing.assert_close(q, gauss, atol=1e-5, rtol=0)


def test_a_start_outside_gets_a_sentence() -> None:
    with pytest.raises(ValueError, match="slater"):
        solve(DISTANCE, -MIDDLE)
