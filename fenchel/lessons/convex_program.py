"""Small convex programs given as functions: a solver, and a check of a given solution.

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

``solve`` follows the barrier path: it minimises f - sum_i log(-g_i) / t subject to h = 0 by
Newton's method, for growing t; there mu_i = 1 / (-t g_i), and the gap is (number of g) / t.
Everything is float64 and dense, for tens of unknowns.

The lesson ``lagrange`` is made of it; no command uses it.

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
class ConvexProgram:
    """minimise objective subject to inequalities <= 0 and equalities = 0; each takes x (n,).

    >>> import torch
    >>> program = ConvexProgram(lambda x: x @ x, equalities=lambda x: x.sum(0, keepdim=True) - 1.0)
    >>> solve(program, torch.zeros(2, dtype=torch.float64)).x
    tensor([0.5000, 0.5000], dtype=torch.float64)
    """

    objective: Function
    inequalities: Function | None = None
    equalities: Function | None = None

    def g(self, x: Tensor) -> Tensor:
        """The inequalities at x, (0,) without any."""
        return x.new_zeros(0) if self.inequalities is None else self.inequalities(x)

    def h(self, x: Tensor) -> Tensor:
        """The equalities at x, (0,) without any."""
        return x.new_zeros(0) if self.equalities is None else self.equalities(x)

    def lagrangian(self, x: Tensor, mu: Tensor, nu: Tensor) -> Tensor:
        """f + <mu, g> + <nu, h>."""
        return self.objective(x) + mu @ self.g(x) + nu @ self.h(x)


class Solution(NamedTuple):
    """A point and its multipliers."""

    x: Tensor
    mu: Tensor
    nu: Tensor


def residuals(program: ConvexProgram, x: Tensor, mu: Tensor, nu: Tensor) -> Residuals:
    """The largest violation of each condition, and the duality gap.

    >>> import torch
    >>> program = ConvexProgram(lambda x: (x - 2.0).square().sum(), lambda x: x - 1.0)
    >>> x, mu, nu = solve(program, torch.zeros(1, dtype=torch.float64))
    >>> bool(max(residuals(program, x, mu, nu)) < 1e-6)
    True
    """
    g, h = program.g(x), program.h(x)
    slope = grad(program.lagrangian)(x, mu, nu)
    return Residuals(
        primal=torch.cat([g.clamp(min=0.0), h.abs(), h.new_zeros(1)]).amax(),
        dual=torch.cat([(-mu).clamp(min=0.0), mu.new_zeros(1)]).amax(),
        slackness=torch.cat([(mu * g).abs(), g.new_zeros(1)]).amax(),
        stationarity=slope.abs().amax(),
        gap=program.objective(x) - dual_value(program, mu, nu, start=x),
    )


def multipliers(program: ConvexProgram, x: Tensor, active: float = 1e-7) -> Solution:
    """mu and nu at ``x`` by least squares on stationarity, mu_i = 0 where g_i < -active.

    The sign of mu is not imposed: at a point that is no solution mu may be negative, or a residual
    may remain. At a solution grad f lies in the span of these normals.

    >>> import torch
    >>> program = ConvexProgram(lambda x: (x - 2.0).square().sum(), lambda x: x - 1.0)
    >>> multipliers(program, torch.ones(1, dtype=torch.float64)).mu
    tensor([2.], dtype=torch.float64)
    """
    g = program.g(x)
    tight = g >= -active
    normals = torch.cat([jacrev(program.g)(x)[tight], jacrev(program.h)(x)])
    least = torch.linalg.lstsq(normals.T, -grad(program.objective)(x).unsqueeze(-1), driver="gelsd")
    both = least.solution.squeeze(-1)
    mu = torch.zeros_like(g).masked_scatter(tight, both[: int(tight.sum())])
    return Solution(x, mu, both[int(tight.sum()) :])


def licq(program: ConvexProgram, x: Tensor, active: float = 1e-7) -> bool:
    """Whether the gradients of the active constraints at ``x`` are linearly independent.

    >>> import torch
    >>> program = ConvexProgram(lambda x: (x - 2.0).square().sum(), lambda x: x - 1.0)
    >>> licq(program, torch.ones(1, dtype=torch.float64))
    True
    """
    tight = program.g(x) >= -active
    normals = torch.cat([jacrev(program.g)(x)[tight], jacrev(program.h)(x)])
    return int(torch.linalg.matrix_rank(normals)) == normals.shape[0] if normals.numel() else True


def slater_point(program: ConvexProgram, start: Tensor) -> Tensor | None:
    """A point with h = 0 and every g < 0, or None: minimises s subject to g(x) <= s, -1 <= s.

    >>> import torch
    >>> program = ConvexProgram(lambda x: (x - 2.0).square().sum(), lambda x: x - 1.0)
    >>> inner = slater_point(program, torch.full((1,), 3.0, dtype=torch.float64))
    >>> program.g(inner) < 0
    tensor([True])
    """
    m = program.g(start).numel()
    lifted = ConvexProgram(
        lambda xs: (
            xs[-1] + 1e-9 * xs[:-1].square().sum()
        ),  # the small term fixes what s leaves free
        lambda xs: torch.cat([program.g(xs[:-1]) - xs[-1], -1.0 - xs[-1:]]),
        lambda xs: program.h(xs[:-1]),
    )
    room = program.g(start).amax().clamp(min=0.0) + 1.0 if m else start.new_ones(())
    x = solve(lifted, torch.cat([start, room.reshape(1)]), gap=1e-6).x[:-1]
    feasible = program.h(x).abs().sum() < 1e-8
    return x if bool(feasible) and bool((program.g(x) < -1e-8).all()) else None


def dual_value(program: ConvexProgram, mu: Tensor, nu: Tensor, start: Tensor) -> Tensor:
    """min over x of the Lagrangian: for mu >= 0 a lower bound of f on the feasible set.

    >>> import torch
    >>> program = ConvexProgram(lambda x: (x - 2.0).square().sum(), lambda x: x - 1.0)
    >>> mu, nu = torch.full((1,), 2.0).double(), torch.zeros(0).double()
    >>> dual_value(program, mu, nu, start=torch.zeros(1).double())  # = f(1): no gap
    tensor(1., dtype=torch.float64)
    """
    free = ConvexProgram(lambda x: program.lagrangian(x, mu, nu))
    x, _ = _newton(free.objective, free, start)
    if not bool(grad(free.objective)(x).abs().amax() < 1e-6):
        return start.new_full((), -torch.inf)  # the Lagrangian has no minimum
    return free.objective(x)


def solve(program: ConvexProgram, start: Tensor, gap: float = 1e-10) -> Solution:
    """The solution by the barrier path from ``start``, where every g < 0 but h may be violated."""
    if bool((program.g(start) >= 0).any()) or not bool(program.objective(start).isfinite()):
        raise ValueError(
            "solve starts at a point with every g < 0 and a finite f, and this is none; "
            "slater_point(program, point) returns one."
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


def _with_barrier(program: ConvexProgram, t: float) -> Function:
    """f - sum_i log(-g_i) / t; nan outside, which the line search rejects."""
    return lambda x: program.objective(x) - torch.log(-program.g(x)).sum() / t


def _newton(phi: Function, program: ConvexProgram, x: Tensor) -> tuple[Tensor, Tensor]:
    """Minimise phi subject to h = 0 by Newton's method from x; h(x) may differ from 0."""
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
            break  # at the precision of float64
        x, nu = x + step * dx, nu + step * dnu
        if bool(after < 1e-13 * (1.0 + slope.abs().amax())):
            break
    return x, nu


def _residual(phi: Function, program: ConvexProgram, x: Tensor, nu: Tensor) -> Tensor:
    inside = (program.g(x) < 0).all() & phi(x).isfinite()
    residual = torch.cat([grad(phi)(x) + jacrev(program.h)(x).T @ nu, program.h(x)])
    return torch.where(inside, residual.norm(), torch.nan)
