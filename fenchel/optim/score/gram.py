"""Partner Grams: how far the scores of a head go when its queries, or its keys, move.

To first order, with dq = dW_Q x and R the rotation by position (1 without rotary positions),

    dS_ij = scale <R_i dq_i, k_j> + scale <q_i, R_j dk_j>        q, k as they enter the product,

so queries are measured by A_K = E (R_i^T k_j)(R_i^T k_j)^T and keys by A_Q = E (R_j^T q_i)(...)^T,
both over the open pairs (i, j). Without rotation A_K is the mean of k k^T with each key counted
once for every query that sees it. With it the mean runs over relative rotations as well; they
mix the planes that turn at different speeds, so the unrotated Gram is a wrong measure. It is
taken at TURNS positions of the other side, on every SPREAD-th sequence in turn. Keys shared by a
group are measured by the mean over its heads of A_Q.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from fenchel.attention import Angles, rotate
from fenchel.optim.score.line import Line, by_group, second_moment
from fenchel.optim.score.processes import mean_over_processes

TURNS = 8
"""Positions at which a rotation-averaged Gram is formed."""
SPREAD = 4
"""Of so many sequences one serves a position."""


class Grams(NamedTuple):
    """Second moments of the partners, each (L, G, D, D) but for A_Q (L, H, D, D)."""

    K: Tensor
    """E k k^T, which measures queries."""
    Q: Tensor
    """E q q^T of every head; the mean over a group measures its keys."""


def partner_grams(line: Line) -> Grams:
    """The Grams at the start of a line."""
    open_ = line.at.open
    if line.at.turn is None:
        return Grams(
            second_moment(line.start_k, open_.sum(3).to(line.k.dtype)),
            second_moment(line.start_q, open_.sum(4).to(line.q.dtype)),
        )
    cos, sin = line.at.turn
    asking = Angles(cos[..., line.at.queries, :], sin[..., line.at.queries, :])
    layout = line.pairs[0].layout
    return Grams(
        _averaged(line.start_k, asking, open_, layout),
        _averaged(line.start_q, line.at.turn, open_.mT, layout),
    )


def _averaged(x: Tensor, turn: Angles, open_: Tensor, layout: str) -> Tensor:
    """Mean of (R_s^T x)(R_s^T x)^T over pairs (s, x): turn at the s, open (L, n, 1, s, x)."""
    places, own = turn.cos.shape[-2], turn.cos.shape[1] > 1
    stride = min(SPREAD, x.shape[1])
    total: Tensor | float = 0.0
    count: Tensor | float = 0.0
    some = range(places // (2 * min(TURNS, places)), places, max(1, places // TURNS))
    for n, s in enumerate(some):
        which = slice(n % stride, None, stride)
        cos, sin = (part[:, which if own else slice(None), :, s : s + 1] for part in turn)
        back = Angles(cos, -sin)
        weight, y = open_[:, which, :, s, :, None].to(x.dtype), x[:, which]
        sums = (y * weight).mT @ y  # of every sequence, and turned back on both sides
        sums = rotate(rotate(sums, back, layout=layout).mT, back, layout=layout)
        total = total + sums.sum(1)
        count = count + weight.sum(dim=(1, 3)).unsqueeze(-1)
    assert isinstance(total, Tensor)
    assert isinstance(count, Tensor)
    return mean_over_processes(total / count.clamp(min=1))


def over_groups(x: Tensor, groups: int) -> Tensor:
    """Mean over the heads that share a key: (L, H, ...) -> (L, G, ...)."""
    return by_group(x, groups).mean(2)


def damped(A: Tensor, damping: float) -> Tensor:
    """A plus the share ``damping`` of its mean eigenvalue, times the identity."""
    diagonal = A.diagonal(dim1=-2, dim2=-1)
    more = damping * diagonal.mean(-1, keepdim=True).clamp(min=1e-12)
    return A + torch.diag_embed(more.expand_as(diagonal))


def inverse_root(A: Tensor, iterations: int = 20) -> Tensor:
    """A^-1/2 of positive definite A (..., D, D) by the coupled Newton-Schulz iteration.

        Y <- Y T,  Z <- T Z,  T = (3 - Z Y) / 2        from Y = A / |A|, Z = 1

    Only products of small matrices, so that all heads of all layers go at once; an eigenvalue at
    the share e of |A| is reached after log(1/e) / log(9/4) steps and a few more.
    """
    size = torch.linalg.matrix_norm(A)[..., None, None].clamp(min=1e-12)
    eye = torch.eye(A.shape[-1], dtype=A.dtype, device=A.device)
    Y, Z = A / size, eye.expand_as(A)
    for _ in range(iterations):
        T = 1.5 * eye - 0.5 * Z @ Y
        Y, Z = Y @ T, T @ Z
    root: Tensor = Z * size.rsqrt()
    return root
