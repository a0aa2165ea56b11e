"""Small convex programs given as functions: solve one, or check that something solves it.

    minimise f(x)   subject to   g(x) <= 0   and   h(x) = 0,          x in R^n,

f and every g_i convex, h affine. With multipliers mu for g and nu for h, and the Lagrangian
L = f + <mu, g> + <nu, h>, the conditions of Karush, Kuhn and Tucker are

    stationarity    grad f + (dg)^T mu + (dh)^T nu = 0
    primal          g(x) <= 0,  h(x) = 0
    dual            mu >= 0
    slackness       mu_i g_i(x) = 0.

They are always sufficient here. They are necessary, and the duality gap f(x) - min_x L is 0, when
Slater's condition holds: some x has h(x) = 0 and g(x) < 0. The multipliers are unique when the
gradients of the active constraints are independent (without g: when dh has full row rank; between
Banach spaces: when dh is onto).

``solve`` follows the barrier path: minimise f - sum_i log(-g_i) / t by Newton's method with h kept,
t growing; there mu_i = 1 / (-t g_i), and the gap is (number of g) / t. Everything is float64 and
dense, for tens of unknowns.

Boyd and Vandenberghe (2004), Convex Optimization, chapters 5, 10 and 11.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.func import grad, hessian, jacrev

from fenchel.choice.kkt import Residuals

Function = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Program:
    """minimise objective subject to inequalities <= 0 and equalities = 0; each takes x (n,)."""

    objective: Function
    inequalities: Function | None = None
    equalities: Function | None = None

    def g(self, x: Tensor) -> Tensor:
        """The inequalities at x, none if there are none."""
        return x.new_zeros(0) if self.inequalities is None else self.inequalities(x)

    def h(self, x: Tensor) -> Tensor:
        """The equalities at x, none if there are none."""
        return x.new_zeros(0) if self.equalities is None else self.equalities(x)

    def lagrangian(self, x: Tensor, mu: Tensor, nu: Tensor) -> Tensor:
        """f + <mu, g> + <nu, h>."""
        return self.objective(x) + mu @ self.g(x) + nu @ self.h(x)


class Solution(NamedTuple):
    """A point and its multipliers."""

    x: Tensor
    mu: Tensor
    nu: Tensor


def residuals(program: Program, x: Tensor, mu: Tensor, nu: Tensor) -> Residuals:
    """The largest violation of each condition, and the duality gap."""
    g, h = program.g(x), program.h(x)
    slope = grad(program.lagrangian)(x, mu, nu)
    return Residuals(
        primal=torch.cat([g.clamp(min=0.0), h.abs(), h.new_zeros(1)]).amax(),
        dual=torch.cat([(-mu).clamp(min=0.0), mu.new_zeros(1)]).amax(),
        slackness=torch.cat([(mu * g).abs(), g.new_zeros(1)]).amax(),
        stationarity=slope.abs().amax(),
        gap=program.objective(x) - dual_value(program, mu, nu, start=x),
    )


def multipliers(program: Program, x: Tensor, active: float = 1e-7) -> Solution:
    """mu and nu at ``x`` by least squares on stationarity, mu_i = 0 where g_i < -active.

    The sign of mu is not imposed: at a point that is no solution a negative one may come out, or
    a residual be left. At a solution grad f lies in the span of these normals.
    """
    g = program.g(x)
    tight = g >= -active
    normals = torch.cat([jacrev(program.g)(x)[tight], jacrev(program.h)(x)])
    found = torch.linalg.lstsq(normals.T, -grad(program.objective)(x).unsqueeze(-1), driver="gelsd")
    both = found.solution.squeeze(-1)
    mu = torch.zeros_like(g).masked_scatter(tight, both[: int(tight.sum())])
    return Solution(x, mu, both[int(tight.sum()) :])


def qualified(program: Program, x: Tensor, active: float = 1e-7) -> bool:
    """Whether the gradients of the active constraints at ``x`` are independent."""
    tight = program.g(x) >= -active
    normals = torch.cat([jacrev(program.g)(x)[tight], jacrev(program.h)(x)])
    return int(torch.linalg.matrix_rank(normals)) == normals.shape[0] if normals.numel() else True


def slater(program: Program, start: Tensor) -> Tensor | None:
    """A point with h = 0 and every g < 0, or None: minimise s subject to g(x) <= s, -1 <= s."""
    m = program.g(start).numel()
    lifted = Program(
        lambda xs: (
            xs[-1] + 1e-9 * xs[:-1].square().sum()
        ),  # the small term fixes what s leaves free
        lambda xs: torch.cat([program.g(xs[:-1]) - xs[-1], -1.0 - xs[-1:]]),
        lambda xs: program.h(xs[:-1]),
    )
    room = program.g(start).amax().clamp(min=0.0) + 1.0 if m else start.new_ones(())
    x = solve(lifted, torch.cat([start, room.reshape(1)]), gap=1e-6).x[:-1]
    kept = program.h(x).abs().sum() < 1e-8
    return x if bool(kept) and bool((program.g(x) < -1e-8).all()) else None


def dual_value(program: Program, mu: Tensor, nu: Tensor, start: Tensor) -> Tensor:
    """min over x of the Lagrangian, a lower bound of f on what is allowed if mu >= 0."""
    free = Program(lambda x: program.lagrangian(x, mu, nu))
    x, _ = _newton(free.objective, free, start)
    if not bool(grad(free.objective)(x).abs().amax() < 1e-6):
        return start.new_full((), -torch.inf)  # it has no minimum
    return free.objective(x)


def solve(program: Program, start: Tensor, gap: float = 1e-10) -> Solution:
    """The solution by the barrier path from ``start``, where every g < 0; h need not hold there."""
    if bool((program.g(start) >= 0).any()) or not bool(program.objective(start).isfinite()):
        raise ValueError(
            "solve starts inside the inequalities, where f is finite, and this point is not; "
            "slater(program, point) finds one that is."
        )
    m = program.g(start).numel()
    if m == 0:
        x, nu = _newton(program.objective, program, start)
        return Solution(x, program.g(x), nu)
    x, t = start, 1.0
    while m / t > gap:
        t = min(30.0 * t, 2.0 * m / gap)
        x, nu = _newton(_with_barrier(program, t), program, x)
    return Solution(x, -1.0 / (t * program.g(x)), nu)


def _with_barrier(program: Program, t: float) -> Function:
    """f - sum_i log(-g_i) / t; nan outside, which the line search refuses."""
    return lambda x: program.objective(x) - torch.log(-program.g(x)).sum() / t


def _newton(phi: Function, program: Program, x: Tensor) -> tuple[Tensor, Tensor]:
    """Minimise phi subject to h = 0 by Newton's method from x, where h need not hold."""
    nu = torch.zeros_like(program.h(x))
    for _ in range(100):
        slope, A, gap = grad(phi)(x), jacrev(program.h)(x), program.h(x)
        H = hessian(phi)(x)
        system = torch.cat(
            [torch.cat([H, A.T], 1), torch.cat([A, A.new_zeros(len(A), len(A))], 1)], 0
        )
        right = -torch.cat([slope + A.T @ nu, gap])
        move = torch.linalg.lstsq(system, right.unsqueeze(-1), driver="gelsd").solution.squeeze(-1)
        dx, dnu = move[: x.numel()], move[x.numel() :]
        before, step = _residual(phi, program, x, nu), 1.0
        while step > 1e-10:
            after = _residual(phi, program, x + step * dx, nu + step * dnu)
            if bool(after <= (1.0 - 0.1 * step) * before):  # false for nan: outside the domain
                break
            step *= 0.5
        else:
            break  # as good as the numbers allow
        x, nu = x + step * dx, nu + step * dnu
        if bool(after < 1e-13 * (1.0 + slope.abs().amax())):
            break
    return x, nu


def _residual(phi: Function, program: Program, x: Tensor, nu: Tensor) -> Tensor:
    inside = (program.g(x) < 0).all() & phi(x).isfinite()
    lacking = torch.cat([grad(phi)(x) + jacrev(program.h)(x).T @ nu, program.h(x)])
    return torch.where(inside, lacking.norm(), torch.nan)
