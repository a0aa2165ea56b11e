"""The habits of heads: how evenly each one looks, how far back, and how alike two of them are.

From the weights p (B, H, T, S) of a layer, query t standing at position i = t + S - T,

    entropy_h       mean over rows of H(p) = -sum_j p_j log p_j, in nats: evenly or at one key
    distance_h      mean over rows of sum_j p_j |i - j|: near (syntax) or far (long range)
    first_h         mean weight on key 0: a head that has nothing to say rests there
    previous_h      mean weight on key i - 1: a head that looks at position alone
    similarity_hg   1 - JS(p_h, p_g) / log 2, mean over rows: 1 for the same weights, 0 for others

JS is the Jensen-Shannon divergence, H((p + q) / 2) - (H(p) + H(q)) / 2. Rows without weights (no
key was open to them) are left out. Nothing here is differentiable.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.special import entr


class Habits(NamedTuple):
    """One number a head, (H,), and one a pair of heads, (H, H)."""

    entropy: Tensor
    distance: Tensor
    first: Tensor
    previous: Tensor
    similarity: Tensor


@torch.no_grad()
def habits(p: Tensor) -> Habits:
    """What the heads of a layer do with their weights p (B, H, T, S)."""
    if p.dim() != 4 or 0 in p.shape:
        raise ValueError(f"weights should be (B, H, T, S) and not empty, got {tuple(p.shape)}.")
    p = p.to(torch.promote_types(p.dtype, torch.float32))
    T, S = p.shape[2:]
    i = torch.arange(T, device=p.device).unsqueeze(-1) + (S - T)
    j = torch.arange(S, device=p.device)
    open_ = p.sum(-1) > 0
    rows = open_.sum((0, 2)).clamp(min=1)

    def mean(x_BHT: Tensor) -> Tensor:
        return x_BHT.sum((0, 2)) / rows

    entropy_BHT = entr(p).sum(-1)
    return Habits(
        entropy=mean(entropy_BHT),
        distance=mean((p * (i - j).abs()).sum(-1)),
        first=mean(p[..., 0]),
        previous=mean((p * (j == i - 1)).sum(-1)),
        similarity=_similarity(p, entropy_BHT, open_),
    )


def _similarity(p: Tensor, entropy_BHT: Tensor, open_: Tensor) -> Tensor:
    """Head by head against all, so that no more than the weights themselves is held at once."""
    lines = []
    for h in range(p.shape[1]):
        both = open_ & open_[:, h : h + 1]
        mixed = entr((p + p[:, h : h + 1]) / 2).sum(-1)
        apart = (mixed - (entropy_BHT + entropy_BHT[:, h : h + 1]) / 2) * both
        lines.append(1.0 - apart.sum((0, 2)) / both.sum((0, 2)).clamp(min=1) / math.log(2))
    return torch.stack(lines)
