"""The conditions of Karush, Kuhn and Tucker for the weights of a choice map, measured.

For the scores x = beta z + log u, p solves

    maximise <p, x> - sum_i omega(p_i)   subject to   sum_i p_i = 1,   0 <= p_i <= c,

with c the cap (infinite where there is none), exactly when there are numbers nu, mu_i, eta_i with

    stationarity    omega'(p_i) - x_i + nu - mu_i + eta_i = 0
    primal          sum_i p_i = 1,  0 <= p_i <= c,  p_i = 0 where forbidden
    dual            mu_i >= 0,  eta_i >= 0
    slackness       mu_i p_i = 0,  eta_i (c - p_i) = 0.

Over the box the first constraint is absent, nu = 0 and c = 1.

The problem is convex with affine constraints, so these are sufficient, and necessary because the
simplex has interior points (or, where it has none, because affine constraints need no Slater).
Each ``Residuals`` entry is the largest violation per row. ``gap`` is the duality gap,

    nu + sum_i max over 0 <= t <= min(c, 1) of [t (x_i - nu) - omega(t)]  -  [<p, x> - Omega(p)],

never negative for a feasible p, and 0 only at the solution.

Given p alone, the multipliers are computed as follows: nu is the mean of x_i - omega'(p_i) under p
over the weights that are free to move; the remaining force of stationarity is assigned to mu_i
where p_i is at 0 (or closer to it than the force), to eta_i where p_i is at c, and counts as an
error elsewhere. Near the cap of the box omega' is steep: half a rounding of p is left out of the
force there. A weight of 0 stands for anything too small for the dtype, so slope(0) is its
slope. All sums are in float64.

The lessons ``lagrange`` and ``sparse_choice`` show them.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from fenchel.choice.base import FORBIDDEN, Choice


class Residuals(NamedTuple):
    """The violation of each condition, per row: each entry is (...)."""

    primal: Tensor
    dual: Tensor
    slackness: Tensor
    stationarity: Tensor
    gap: Tensor


class Multipliers(NamedTuple):
    """The prices of the constraints: nu (...), mu and eta (..., K)."""

    total: Tensor
    floor: Tensor
    ceiling: Tensor


def kkt(choice: Choice, z: Tensor, p: Tensor, log_prior: Tensor | None = None) -> Residuals:
    """The residuals of ``p`` as the weights of ``z``: (..., K), (..., K) -> five of (...).

    >>> import torch
    >>> from fenchel.choice import Softmax
    >>> z = torch.tensor([1.0, 0.0], dtype=torch.float64)
    >>> max(kkt(Softmax(), z, Softmax().weights(z))) < 1e-15
    tensor(True)
    >>> kkt(Softmax(), z, torch.tensor([0.5, 0.5])).gap
    tensor(0.1276, dtype=torch.float64)
    """
    row = _Problem.of(choice, z, p, log_prior)
    nu, mu, eta = _multipliers(choice, row)
    unequal = (row.p.sum(-1) - (~row.empty).to(row.p.dtype)).abs()
    unequal = unequal if choice.feasible == "simplex" else torch.zeros_like(unequal)
    below, over = (-row.p).amax(-1), (row.p - row.cap).amax(-1)
    misplaced = torch.where(row.allowed, 0.0, row.p.abs()).amax(-1)
    primal = torch.stack([unequal, below, over, misplaced]).amax(0).clamp(min=0.0)
    wrong = _force(choice, row, nu) - mu + eta
    return Residuals(
        primal=primal,
        dual=torch.maximum((-mu).amax(-1), (-eta).amax(-1)).clamp(min=0.0),
        slackness=torch.maximum(
            (mu * row.p).abs().amax(-1),
            torch.where(eta == 0, 0.0, eta * (row.cap - row.p)).abs().amax(-1),
        ),
        stationarity=wrong.abs().amax(-1),
        gap=_gap(choice, row, nu),
    )


def multipliers(
    choice: Choice, z: Tensor, p: Tensor, log_prior: Tensor | None = None
) -> Multipliers:
    """nu, mu and eta for ``p`` as the weights of ``z``; 0 where an alternative is forbidden.

    >>> import torch
    >>> from fenchel.choice import Capped
    >>> z = torch.tensor([3.0, 0.0, 0.0])
    >>> multipliers(Capped(0.5), z, Capped(0.5).weights(z)).ceiling  # the price of the cap
    tensor([2.3069, 0.0000, 0.0000], dtype=torch.float64)
    """
    row = _Problem.of(choice, z, p, log_prior)
    nu, mu, eta = _multipliers(choice, row)
    return Multipliers(nu + row.top, mu, eta)


class _Problem(NamedTuple):
    """The problem in float64: scores minus their largest, forbidden scores set to 0."""

    x: Tensor
    p: Tensor
    allowed: Tensor
    empty: Tensor
    cap: Tensor
    top: Tensor
    inner: Tensor
    """p where its slope is taken: inside the box by as much as the dtype of p resolves."""
    rounding: Tensor
    """What the rounding of p leaves open of its slope near the cap of the box."""

    @classmethod
    def of(cls, choice: Choice, z: Tensor, p: Tensor, log_prior: Tensor | None) -> "_Problem":
        prior = None if log_prior is None else log_prior.double()
        x, _ = choice.scores(z.double(), prior, -1)
        limits = torch.finfo(p.dtype)
        x, p = x.detach().expand_as(p), p.detach().double()
        allowed = x > FORBIDDEN
        count = allowed.sum(-1, keepdim=True).to(p.dtype)
        top = x.amax(-1, keepdim=True).masked_fill(count == 0, 0.0)
        cap = (1.0 / count.clamp(min=1.0)).clamp(min=choice.ceiling)
        inner, rounding = p.clamp(min=0.0), torch.zeros_like(p)
        if choice.feasible == "box":
            top, cap = torch.zeros_like(top), torch.ones_like(cap)
            inner = p.clamp(limits.tiny, 1.0 - limits.eps / 4)
            rounding = 0.5 * limits.eps / (1.0 - inner).clamp(min=limits.eps / 4)
        shifted = torch.where(allowed, x - top, 0.0)
        return cls(
            shifted, p, allowed, count.squeeze(-1) == 0, cap, top.squeeze(-1), inner, rounding
        )


def _multipliers(choice: Choice, row: _Problem) -> Multipliers:
    slope = choice.slope(row.inner)
    free = row.allowed & (row.p < row.cap)
    weight = torch.where(free, row.p.clamp(min=0.0), 0.0)
    share = weight.sum(-1)
    level = torch.where(weight > 0, row.x - slope, 0.0)
    mean = (weight * level).sum(-1) / torch.where(share > 0, share, 1.0)
    # With nothing free, any nu up to the least that keeps every eta >= 0 will do.
    least = torch.where(row.allowed, row.x - slope, torch.inf).amin(-1)
    nu = torch.where(share > 0, mean, least).masked_fill(row.empty, 0.0)
    nu = nu if choice.feasible == "simplex" else torch.zeros_like(nu)
    force = _force(choice, row, nu)
    at_floor = row.allowed & (row.p <= force.clamp(min=0.0))
    at_cap = row.allowed & (row.cap - row.p <= (-force).clamp(min=0.0)) & ~at_floor
    return Multipliers(nu, torch.where(at_floor, force, 0.0), torch.where(at_cap, -force, 0.0))


def _force(choice: Choice, row: _Problem, nu: Tensor) -> Tensor:
    """omega'(p) - x + nu, which mu - eta balances; 0 where an alternative is forbidden."""
    force = choice.slope(row.inner) - row.x + nu.unsqueeze(-1)
    force = force.sign() * (force.abs() - row.rounding).clamp(min=0.0)
    return torch.where(row.allowed, force, 0.0)


def _gap(choice: Choice, row: _Problem, nu: Tensor) -> Tensor:
    y = row.x - nu.unsqueeze(-1)
    t = torch.minimum(choice.response(y), row.cap.clamp(max=1.0))
    best = torch.where(row.allowed, t * y - choice.omega(t), 0.0).sum(-1) + nu
    reached = torch.where(row.p > 0, row.p * row.x, 0.0).sum(-1) - choice.omega(row.p).sum(-1)
    return (best - reached).masked_fill(row.empty, 0.0)
