"""QK-clip: after a step, heads whose largest score passed a limit are scaled back to it.

With s_h the largest |scale q.k| of head h over the keys its queries may see, in the forward pass
of the step, and tau the limit,

    gamma_h = min(1, tau / s_h)
    W_Q,h <- sqrt(gamma_h) W_Q,h          W_K,h <- sqrt(gamma_h) W_K,h

biases alike. Scores are bilinear in the two, so those of head h shrink by exactly gamma_h and
those of every other head stay as they are. Where several heads share a key, its scale is not
theirs to change: the query takes the whole factor, W_Q,h <- gamma_h W_Q,h.

It acts on weights alone: nothing is added to the loss, the model at inference is the same, and
the optimiser's memory is left as it is. A head below the limit is not touched, to the bit.

Kimi Team (2025), Kimi K2: open agentic intelligence.
"""

import torch
from torch import Tensor

from fenchel.attention.prior import Prior
from fenchel.attention.reference import score
from fenchel.attention.shapes import check
from fenchel.attention.tiles import tiles
from fenchel.optim.layers import Projected


@torch.no_grad()
def largest_scores(
    q: Tensor, k: Tensor, *, prior: Prior | None = None, scale: float | None = None
) -> Tensor:
    """max |scale q.k| of each head over open keys: (B, H, T, D), (B, G, S, D) -> (H,)."""
    check(q, k, k)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    with torch.autocast(q.device.type, enabled=False):  # which would narrow the scores again
        return _largest_scores(q, k, prior, scale)


@torch.no_grad()
def qk_clip_(attention: Projected, largest_H: Tensor, tau: float) -> Tensor:
    """Scale back the heads whose largest score is above ``tau``; which ones, (H,) of bool."""
    H, G, D = attention.heads, attention.groups, attention.head_width
    over_H = (largest_H > tau) & largest_H.isfinite()
    gamma_H = torch.where(over_H, tau / largest_H, 1.0)
    for x in (attention.qkv.weight, attention.qkv.bias):
        if x is None:
            continue
        rows_QD = x[: (H + G) * D].view(H + G, D, -1)
        if G == H:
            rows_QD.mul_(gamma_H.sqrt().repeat(2)[:, None, None].to(x.dtype))
        else:
            rows_QD[:H].mul_(gamma_H[:, None, None].to(x.dtype))
    return over_H


def _largest_scores(q: Tensor, k: Tensor, prior: Prior | None, scale: float) -> Tensor:
    found_H = q.new_zeros(q.shape[1], dtype=torch.promote_types(q.dtype, torch.float32))
    for tile in tiles(q, k, prior):
        z = score(tile.queries(q), tile.items(k), scale).abs_()
        if prior is not None:
            z = torch.where(prior.dense(tile.block(q, k), z.dtype) > -torch.inf, z, 0.0)
        if z.numel():
            found_H[tile.heads] = torch.maximum(found_H[tile.heads], z.amax((0, 2, 3)))
    return found_H
