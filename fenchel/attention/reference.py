"""Attention as it is defined: score the keys, choose among them, mix the values.

    z = scale * q k^T                      (B, H, T, S)
    z = c tanh(z / c)                      where scores are softly capped at c
    p = choice.weights(z, log_prior)       each query's row on the simplex
    o = p v                                (B, H, T, E)

Plain PyTorch, O(T S) memory, every map, every prior, every derivative. All other back ends are
measured against this one. Half precision is widened to float32 for the scores and the weights and
narrowed again at the end: a bfloat16 score of 1e4 would be off by 32. With grouped heads (G of k
and v for H of q, H = R G) the R query heads of a group are laid under one another, so that keys
are never repeated.
"""

import torch
from torch import Tensor
from torch.nn.functional import dropout as drop

from fenchel.attention.prior import Prior
from fenchel.choice import Choice


def score(q: Tensor, k: Tensor, scale: float) -> Tensor:
    """z = scale * q k^T: (B, H, T, D), (B, G, S, D) -> (B, H, T, S)."""
    wide = torch.promote_types(q.dtype, torch.float32)
    return _grouped(q.to(wide) * scale, k.to(wide).transpose(-1, -2))


def cap(z: Tensor, softcap: float | None) -> Tensor:
    """c tanh(z / c), close to z while it is small and never beyond c; None leaves z alone."""
    return z if softcap is None else softcap * torch.tanh(z / softcap)


def cap_slope(capped: Tensor, softcap: float | None) -> Tensor | None:
    """The derivative of ``cap`` where it gave ``capped``, 1 - (capped / c)^2; None is 1."""
    return None if softcap is None else 1.0 - (capped / softcap).square()


def mix(p: Tensor, v: Tensor) -> Tensor:
    """o = p v: (B, H, T, S), (B, G, S, E) -> (B, H, T, E)."""
    return _grouped(p, v.to(p.dtype)).to(v.dtype)


def mix_transposed(p: Tensor, g: Tensor, G: int) -> Tensor:
    """p^T g summed over the heads of a group: (B, H, T, S), (B, H, T, E) -> (B, G, S, E)."""
    B, H, T, S = p.shape
    R = H // G
    return p.reshape(B, G, R * T, S).transpose(-1, -2) @ g.reshape(B, G, R * T, g.shape[-1])


def log_prior(prior: Prior | None, z: Tensor) -> Tensor | None:
    """log u for scores z (B, H, T, S), in their dtype; None for no prior."""
    if prior is None:
        return None
    B, H, T, S = z.shape
    return prior.log(T, S, B=B, H=H, device=z.device, dtype=z.dtype)


def weights(
    q: Tensor,
    k: Tensor,
    choice: Choice,
    prior: Prior | None,
    scale: float,
    softcap: float | None = None,
) -> Tensor:
    """p, in float32 or better: (B, H, T, D), (B, G, S, D) -> (B, H, T, S)."""
    z = cap(score(q, k, scale), softcap)
    return choice.weights(z, log_prior(prior, z))


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    choice: Choice,
    prior: Prior | None,
    scale: float,
    dropout: float,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """(outputs (B, H, T, E), weights (B, H, T, S)); dropped weights are those that were used."""
    p = weights(q, k, choice, prior, scale, softcap)
    if dropout:
        p = drop(p, dropout)
    return mix(p, v), p


def _grouped(x: Tensor, y: Tensor) -> Tensor:
    """x y where x (B, H, T, M) has R heads for each of y's (B, G, M, N): -> (B, H, T, N)."""
    B, H, T, M = x.shape
    G = y.shape[1]
    if G == H:
        return torch.matmul(x, y)
    stacked = x.reshape(B, G, H // G * T, M)
    return torch.matmul(stacked, y).view(B, H, T, y.shape[-1])
