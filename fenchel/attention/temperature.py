"""Inverse temperatures that depend on the head, the query and the length.

Attention solves p = argmax <p, z> - Omega(p) / beta. The scores of n keys are about equal while
log n grows, so with a fixed beta the weights of softmax fade as 1 / n. A beta that grows with the
logarithm of the length keeps the best key's share. For a query at position m, with n = m + 1 keys
that it may see, ``attend(..., beta=...)`` takes

    log_length        s log n                                   Scalable-Softmax, s per head
    stepped_length    1 + a log(1 + floor((m + offset) / f))    Llama 4; Ministral 3 with offset 0
    ratio_length      1 + a log(max(1, n / n0))                 Inkling
    adaptive_length   delta + b (log n)^gamma                   ASEntmax, b and gamma per token

A query that sees one key gives it weight 1 whatever beta is; n is taken as 2 at least, so that beta
is positive there too.

Derivative. The scores are x = beta z + log u, so along a move of beta they move by z dbeta and the
weights by J z dbeta / beta, with J that of fenchel/choice/base.py; the gradient of beta of a row is
<g, J z> / beta. A beta that is a tensor may learn, in every back end: it multiplies the query.

Shapes: positions (T,) or (B, T) -> (T, 1) or (B, 1, T, 1), with a number per head (H,) or a tensor
that broadcasts to (B, H, T) in front: what broadcasts to (B, H, T, 1).

Nakanishi (2025), Scalable-Softmax; Vasylenko et al. (2025), Long-context generalization with sparse
attention.
"""

import torch
from torch import Tensor


def log_length(positions: Tensor, s: Tensor | float = 1.0) -> Tensor:
    """s log n, Scalable-Softmax; ``s`` is a number or one per head.

    >>> log_length(torch.tensor([0, 1, 7])).squeeze(-1)
    tensor([0.6931, 0.6931, 2.0794])
    """
    return _per_head(s) * _visible(positions).log()


def stepped_length(positions: Tensor, a: float = 0.1, floor: int = 8192, offset: int = 1) -> Tensor:
    """1 + a log(1 + floor((m + offset) / floor)): Llama 4, and Ministral 3 with ``offset=0``.

    >>> stepped_length(torch.tensor([0, 8191, 16383])).squeeze(-1)
    tensor([1.0000, 1.0693, 1.1099])
    """
    steps = torch.floor((_column(positions) + offset) / floor)
    return 1.0 + a * torch.log1p(steps)


def ratio_length(positions: Tensor, a: float, floor: float) -> Tensor:
    """1 + a log(max(1, n / floor)), as Inkling has it.

    >>> ratio_length(torch.tensor([0, 99]), a=0.5, floor=10.0).squeeze(-1)
    tensor([1.0000, 2.1513])
    """
    return 1.0 + a * ((_column(positions) + 1.0) / floor).clamp(min=1.0).log()


def adaptive_length(
    positions: Tensor, b: Tensor | float, gamma: Tensor | float = 1.0, delta: float = 1.0
) -> Tensor:
    """delta + b (log n)^gamma, ASEntmax; ``b`` >= 0 and ``gamma`` per head, or (B, H, T) per token.

    >>> adaptive_length(torch.tensor([7]), b=0.5, gamma=2.0).squeeze(-1)
    tensor([3.1620])
    """
    return delta + _per_head(b) * _visible(positions).log() ** _per_head(gamma)


def _column(positions: Tensor) -> Tensor:
    """(T,) or (B, T) as numbers of shape (T, 1) or (B, 1, T, 1)."""
    if positions.dim() not in (1, 2):
        raise ValueError(f"positions have the shape (T,) or (B, T), got {tuple(positions.shape)}.")
    wide = positions if positions.is_floating_point() else positions.float()
    return wide.unsqueeze(-1) if wide.dim() == 1 else wide[:, None, :, None]


def _visible(positions: Tensor) -> Tensor:
    return (_column(positions) + 1.0).clamp(min=2.0)


def _per_head(x: Tensor | float) -> Tensor | float:
    """One number per head as (H, 1, 1), one per token as (B, H, T, 1)."""
    if not isinstance(x, Tensor) or not x.dim():
        return x
    if x.dim() not in (1, 3):
        raise ValueError(
            f"there is one number per head, (H,), or per token, (B, H, T); got {tuple(x.shape)}."
        )
    return x.view(-1, 1, 1) if x.dim() == 1 else x.unsqueeze(-1)
