"""The mean entropy of every head, with its gradient, in O(n) memory; and a penalty on it.

For a row of weights p = choice.weights(z, log_prior) over its keys, in nats,

    H(p) = - sum_j p_j log p_j

and a head's entropy is the mean of H over all rows that see a key. A head whose entropy falls to
0 looks at one key each time and hardly learns any more, so a loss may hold a floor under it:

    penalty = mean over heads of  max(0, floor - H_head)^2

Derivative, with J that of the weights (symmetric, and J 1 = 0, which takes care of the -1):

    dH/dz = J (-log p)          dH/dq = scale dH/dz k          dH/dk = scale dH/dz^T q

and the factor 1 - (z / c)^2 in between when scores are softly capped, z = c tanh(s / c). All
rows of a head weigh alike, so the gradient is known up to one factor a head as soon as p is: it
is computed with the value, tile by tile (fenchel/attention/tiles.py), and no (T, S) square is
kept until the backward pass. Heads that share keys keep their parts of dH/dk apart until their
factors are known. The gradient cannot be differentiated again.

Zhai et al. (2023), Stabilizing transformer training by preventing attention entropy collapse.
"""

from typing import Any

import torch
from torch import Tensor

from fenchel.attention.prior import Prior
from fenchel.attention.reference import cap, cap_slope, mix, pull, score
from fenchel.attention.shapes import check
from fenchel.attention.tiles import tiles
from fenchel.choice import Choice, Softmax

_SOFTMAX = Softmax()


def entropy_penalty(entropy_H: Tensor, floor: float) -> Tensor:
    """Mean square of what heads lack to ``floor`` nats: (H,) -> ()."""
    return (floor - entropy_H).clamp(min=0.0).square().mean()


def head_entropy(
    q: Tensor,
    k: Tensor,
    *,
    choice: Choice = _SOFTMAX,
    prior: Prior | None = None,
    scale: float | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Mean entropy of each head: q (B, H, T, D), k (B, G, S, D) -> (H,), in float32 or better."""
    check(q, k, k, softcap=softcap)
    if q.dim() != 4:
        raise ValueError(f"head_entropy takes q with four axes, (B, H, T, D); got {q.dim()}.")
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    learns = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad)
    with torch.autocast(q.device.type, enabled=False):  # which would narrow the scores again
        found: Tensor = _HeadEntropy.apply(q, k, choice, prior, scale, softcap, learns)  # type: ignore[no-untyped-call]
    return found


class _HeadEntropy(torch.autograd.Function):
    """The entropies; their gradients are at hand when they are."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        choice: Choice,
        prior: Prior | None,
        scale: float,
        softcap: float | None,
        learns: bool,
    ) -> Tensor:
        wide = torch.promote_types(q.dtype, torch.float32)
        (B, H, T, D), S = q.shape, k.shape[2]
        total_H, rows_H = (q.new_zeros(H, dtype=wide) for _ in range(2))
        gq_BHTD = q.new_zeros((B, H, T, D) if learns else 0, dtype=wide)
        gk_BHSD = q.new_zeros((B, H, S, D) if learns else 0, dtype=wide)
        for tile in tiles(q, k, prior):
            q_t, k_t = tile.queries(q), tile.items(k)
            z = cap(score(q_t, k_t, scale), softcap)
            log_u = None if prior is None else prior.dense(tile.block(q, k), wide)
            p = choice.weights(z, log_u)
            on = p > 0
            log_p = torch.where(on, p, 1.0).log()
            total_H[tile.heads] -= (p * log_p).sum((0, 2, 3))
            rows_H[tile.heads] += on.any(-1).sum((0, 2))
            if learns:
                dz = scale * choice.jacobian_product(p, -log_p)
                if (slope := cap_slope(z, softcap)) is not None:
                    dz *= slope
                tile.queries(gq_BHTD).copy_(mix(dz, k_t.to(wide)))
                mine = gk_BHSD[tile.batch, tile.heads, tile.keys]
                mine += pull(dz, q_t.to(wide), q_t.shape[1])
        ctx.save_for_backward(gq_BHTD, gk_BHSD, rows_H)
        ctx.dtype, ctx.groups = q.dtype, k.shape[1]
        return total_H / rows_H.clamp(min=1.0)

    @staticmethod
    def backward(ctx: Any, g_H: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():  # the gradients are numbers here: a derivative would be lost
            raise RuntimeError("head_entropy has no second derivative.")
        gq_BHTD, gk_BHSD, rows_H = ctx.saved_tensors
        share_H11 = (g_H / rows_H.clamp(min=1.0))[:, None, None]
        gk_BGRSD = (gk_BHSD * share_H11).unflatten(1, (ctx.groups, -1))
        gq, gk = (x.to(ctx.dtype) for x in (gq_BHTD * share_H11, gk_BGRSD.sum(2)))
        return gq, gk, None, None, None, None, None
