"""The inverse temperature for a budget of divergence from the prior.

    maximise <p, z>   subject to   KL(p || u) <= kappa

is solved by the softmax p_beta with KL(p_beta || u) = kappa: beta is one over the multiplier of
the budget. The divergence rises with beta from 0,

    d KL(p_beta || u) / d beta = beta Var_p(z),         KL ~ beta^2 Var_u(z) / 2   near 0,

to -log u(the best alternatives), its limit as beta -> inf. So a budget of 0 gives beta = 0 (as does
a row where every alternative is forbidden), a budget at or above the limit gives inf, and between
them beta is unique. It is computed by Newton's method on sqrt(2 KL), which near 0 is a straight
line, confined between two bounds; since KL <= beta (max z - min z), the lower begins at
kappa / (max z - min z). Where u is nearly all on one alternative, KL is nearly 0 up to some beta
and rises at once: the bounds are halved there, in logarithms. u is log_prior normalised, and
uniform where there is none.
"""

import torch
from torch import Tensor

from fenchel.choice.base import FORBIDDEN, checked_axis

_STEPS = 80


def beta_for_budget(z: Tensor, kappa: float | Tensor, log_prior: Tensor | None = None) -> Tensor:
    """The beta whose softmax weights have KL(p || u) = kappa, differentiable: (..., K) -> (...).

    >>> import torch
    >>> beta_for_budget(torch.tensor([0.0, 1.0, 3.0]), kappa=0.2)
    tensor(0.5104)
    """
    checked_axis(z, log_prior, -1)
    z64 = z.double()
    log_u = torch.zeros_like(z64) if log_prior is None else log_prior.double().expand_as(z64)
    log_u = torch.where(z64 == FORBIDDEN, FORBIDDEN, log_u)
    empty = (log_u == FORBIDDEN).all(-1, keepdim=True)
    log_u = log_u.masked_fill(empty, 0.0).log_softmax(-1)
    allowed = log_u > FORBIDDEN
    top = torch.where(allowed, z64, FORBIDDEN).amax(-1, keepdim=True)
    gains = torch.where(allowed, z64 - top.detach(), 0.0)
    budget = torch.as_tensor(kappa, dtype=torch.float64, device=z.device).expand(z.shape[:-1])
    if bool((budget < 0).any()):
        raise ValueError("beta_for_budget needs kappa >= 0: a divergence is never negative.")
    best = torch.where(gains == 0, log_u, FORBIDDEN)
    limit = -best.logsumexp(-1)
    inside = (budget > 0) & (budget < limit.detach()) & ~empty.squeeze(-1)
    # Rows without an inner root get a harmless problem instead.
    easy = torch.where(torch.arange(z.shape[-1], device=z.device) == 0, 0.0, -1.0).double()
    gains = torch.where(inside.unsqueeze(-1), gains, easy)
    log_u = torch.where(inside.unsqueeze(-1), log_u, easy.log_softmax(-1))
    budget_in = torch.where(inside, budget, 0.01)
    with torch.no_grad():
        beta = _solve(gains, log_u, budget_in)
    kl, variance = _divergence(beta, gains, log_u)
    change = (kl - budget_in) / (beta * variance)
    beta = beta - (change - change.detach())  # 0 in value; carries the derivative
    outside = torch.where((budget > 0) & ~empty.squeeze(-1), torch.inf, 0.0)
    beta = torch.where(inside, beta, outside.double())
    return beta.to(z.dtype)


def _solve(gains: Tensor, log_u: Tensor, budget: Tensor) -> Tensor:
    _, variance = _divergence(torch.zeros_like(budget), gains, log_u)
    width = torch.where(log_u > FORBIDDEN, -gains, 0.0).amax(-1)
    limit = -torch.where(gains == 0, log_u, FORBIDDEN).logsumexp(-1)
    low, high = budget / width, torch.full_like(budget, torch.inf)
    beta = torch.minimum((2.0 * budget / variance).sqrt(), (1.0 + limit) / width)
    beta = torch.maximum(beta, low)
    for _ in range(_STEPS):
        kl, variance = _divergence(beta, gains, log_u)
        short = kl < budget
        low, high = torch.where(short, beta, low), torch.where(short, high, beta)
        slope = beta * variance / (2.0 * kl).sqrt()
        trial = beta + ((2.0 * budget).sqrt() - (2.0 * kl).sqrt()) / slope
        middle = torch.where(high.isinf(), 2.0 * beta, (low * high).sqrt())
        moved = torch.where((trial > low) & (trial < high), trial, middle)
        done = ((moved - beta).abs() <= 4e-16 * beta) | (kl == budget)
        beta = torch.where(done, beta, moved)
        if bool(done.all()):
            break
    return beta


def _divergence(beta: Tensor, gains: Tensor, log_u: Tensor) -> tuple[Tensor, Tensor]:
    """KL(p || u) and the variance of the gains under p, for p ~ u exp(beta gains)."""
    tilt = beta.unsqueeze(-1) * gains
    log_Z = (log_u + tilt).logsumexp(-1, keepdim=True)
    p = (log_u + tilt - log_Z).exp()
    # log(p / u) = beta z - log Z: every term is small where beta is, and none is 0 log 0
    kl = (p * (tilt - log_Z)).sum(-1)
    mean = (p * gains).sum(-1, keepdim=True)
    return kl, (p * (gains - mean).square()).sum(-1)
