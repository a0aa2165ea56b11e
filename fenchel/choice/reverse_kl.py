"""Reverse KL: choice under KL(u || p), the divergence from the weights to the prior.

    p*       = argmax_p  <p, z> - KL(u || p) / beta          over the simplex, u normalised
    p_i      = u_i / (beta (nu - z_i)),       nu > max z,     sum_i p_i = 1
    J        = beta (diag(s) - s s^T / sum(s)),               s_i = p_i^2 / u_i

Softmax has KL(p || u) in its place. Its weights fall exponentially with the score, these like one
over the distance from nu: no alternative that u allows has weight 0, and none is negligible.
beta -> 0 gives u, beta -> inf all weight to the largest score.

This is no ``Choice``: the prior enters Omega itself and not as scores log u, so that s depends on u
beside p. Hence one function, with its derivatives, and no back end of attention.

With g the largest score, w_i = beta (g - z_i) >= 0 and D = beta (nu - g),

    sum_i u_i / (D + w_i) = 1,        u(maximisers) <= D <= 1,
    value = g - (1 - D + sum_i u_i log(D + w_i)) / beta.

One over the sum is concave and increasing in D, so Newton's method on it increases to the root from
the lower bound and never passes it, as in secular.py.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from fenchel.choice.base import (
    FORBIDDEN,
    checked_axis,
    float32_or_better,
    is_plain,
    require_positive,
)

_STEPS = 40  # it takes 3 to 10; the bound is for rows whose last digits alternate


class ReverseKL(NamedTuple):
    """The weights, (..., K), and the maximum, (...), whose gradient in z they are."""

    p: Tensor
    value: Tensor


def reverse_kl(z: Tensor, beta: float | Tensor = 1.0, log_prior: Tensor | None = None) -> ReverseKL:
    """The choice under KL(u || p), differentiable twice: (..., K) -> (..., K), (...).

    ``log_prior`` is log u up to a constant, and None is uniform; -inf in it or in z forbids. Where
    all are forbidden the weights are 0 and the value is -inf.

    >>> import torch
    >>> reverse_kl(torch.tensor([3.0, 1.0, 0.0]), beta=2.0).p
    tensor([0.8717, 0.0761, 0.0522])
    """
    require_positive("reverse_kl", beta)
    checked_axis(z, log_prior, -1)
    if z.shape[-1] == 0:
        return ReverseKL(z, z.new_full(z.shape[:-1], FORBIDDEN))
    x = float32_or_better(z)
    log_u = torch.zeros_like(x) if log_prior is None else log_prior.to(x.dtype).expand_as(x)
    allowed = (x > FORBIDDEN) & (log_u > FORBIDDEN)
    empty = ~allowed.any(-1, keepdim=True)
    log_u = log_u.masked_fill(~allowed, FORBIDDEN).masked_fill(empty, 0.0)
    u = log_u.softmax(-1)
    scores = x.masked_fill(~allowed, FORBIDDEN).masked_fill(empty, 0.0)
    largest = scores.detach().amax(-1, keepdim=True)
    w = beta * (largest - torch.where(allowed, x, largest))
    D = torch.where(scores == largest, u, 0.0).detach().sum(-1, keepdim=True)
    with torch.no_grad():
        for _ in range(_STEPS):
            following = _newton(D, u, w)
            if is_plain(D) and not bool((following > D).any()):
                break
            D = torch.maximum(D, following)
    for _ in range(2):  # from the root itself: two steps carry two derivatives
        D = _newton(D, u, w)
    p = (u / (D + w)).masked_fill(empty, 0.0)
    cost = 1.0 - D.squeeze(-1) + (u * (D + w).log()).sum(-1)
    rows = beta.squeeze(-1) if isinstance(beta, Tensor) and beta.ndim > 0 else beta
    value = largest.squeeze(-1) - cost / rows
    return ReverseKL(p.to(z.dtype), value.masked_fill(empty.squeeze(-1), FORBIDDEN).to(z.dtype))


def _newton(D: Tensor, u: Tensor, w: Tensor) -> Tensor:
    """One step on 1 / sum_i u_i / (D + w_i) = 1."""
    share = u / (D + w)
    total, steepness = share.sum(-1, keepdim=True), (share / (D + w)).sum(-1, keepdim=True)
    return D + total * (total - 1.0) / steepness
