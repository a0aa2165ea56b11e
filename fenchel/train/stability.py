"""The attention layers of a model, and how each of them attends.

A model shows the queries and keys of a layer as it reads (``observe``); what becomes of them, the
map, the prior, the scale, stands in the layer itself. Layers are known by what they have, so that
this page knows no model by name.

The mean entropy of every head, with its gradient, in O(n) memory; and a penalty on it.

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

QK-clip: after a step, heads whose largest score passed a limit are scaled back to it.

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

Switches that keep attention stable while a step is taken.

    entropy_floor    heads below it are pushed up: the loss of a part of the step gains
                     entropy_weight * mean over layers and heads of max(0, floor - H_head)^2
    qk_clip          after the step, heads whose largest score in it passed the limit are scaled
                     back (fenchel/train/stability.py)

Both need the queries and keys of the forward pass, which the model shows as it reads. What they
do is a function of the step alone, so a run that is resumed needs nothing of them. QK-norm,
soft-capping and sigma-reparametrisation change the model instead, and are its settings.
"""

from dataclasses import dataclass
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn

from fenchel.attention.prior import Prior
from fenchel.attention.reference import cap, cap_slope, mix, mix_transposed, score
from fenchel.attention.shapes import check
from fenchel.attention.tiles import tiles
from fenchel.choice import Choice, Softmax
from fenchel.train.config import TrainConfig


class Projected(Protocol):
    """Attention with one map for queries, keys and values, rows in that order."""

    heads: int
    groups: int
    head_width: int
    qkv: nn.Linear


@dataclass(frozen=True)
class AttentionLayer:
    """One attention layer: its module and the arguments of ``attend`` that it uses."""

    attention: Any
    choice: Choice
    prior: Prior | None
    scale: float | None
    softcap: float | None


def attention_layers(model: nn.Module) -> list[AttentionLayer]:
    """The layers in the order of their numbers, as ``observe`` is told them."""
    blocks: Any = getattr(model, "blocks", ())
    found = [block.attention for block in blocks if hasattr(block, "attention")]
    if not found:
        raise ValueError("the model has no attention layer of the kind that fenchel.model builds.")
    config: Any = model.config
    each = config.layers // len(found)  # a block may serve several layers in a row
    return [
        AttentionLayer(a, a.choice, a.mask, a.scale, a.softcap) for a in found for _ in range(each)
    ]


def why_not_entropy(model: nn.Module) -> str | None:
    """Why the scores of this model are not those of its q and k alone, or None if they are."""
    config: Any = model.config
    if config.positions in ("alibi", "buckets"):
        return f'positions="{config.positions}" add to its scores'
    if config.sinks:
        return "its heads may look at nothing (sinks)"
    if config.scores != "dot":
        return f'its scores are of kind "{config.scores}"'
    return None


def why_not_clip(model: nn.Module) -> str | None:
    """Why scaling the query and key weights would not scale the scores, or None if it does."""
    config: Any = model.config
    for name in ("qk_norm", "sigma_reparam"):
        if getattr(config, name):
            return f"{name} would undo it"
    return None if config.scores == "dot" else f'its scores are of kind "{config.scores}"'


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
                mine += mix_transposed(dz, q_t.to(wide), q_t.shape[1])
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


class Stability:
    """What one step sees of attention, and does about it."""

    def __init__(self, model: nn.Module, config: TrainConfig) -> None:
        self.limit, self.floor = config.qk_clip, config.entropy_floor
        self.weight = config.entropy_weight
        self.layers = attention_layers(model)
        if self.limit is not None and (reason := why_not_clip(model)):
            raise ValueError(f"qk_clip scales query and key weights, and {reason}; choose one.")
        if self.floor and (reason := why_not_entropy(model)):
            raise ValueError(f"entropy_floor cannot serve this model: {reason}.")
        self.reset()

    def reset(self) -> None:
        """Forget the step before."""
        self._entropies: list[Tensor] = []
        self._largest: dict[nn.Module, Tensor] = {}  # a module may serve several layers
        self._metrics: dict[str, Tensor] = {}

    def observe(self, number: int, q: Tensor, k: Tensor, _v: Tensor) -> None:
        """Look at the queries (B, H, T, D) and keys (B, G, S, D) of one layer."""
        layer = self.layers[number]
        if self.floor:
            self._entropies.append(
                head_entropy(
                    q,
                    k,
                    choice=layer.choice,
                    prior=layer.prior,
                    scale=layer.scale,
                    softcap=layer.softcap,
                )
            )
        if self.limit is not None:
            found_H = largest_scores(q, k, prior=layer.prior, scale=layer.scale)
            before_H = self._largest.get(layer.attention, found_H)
            self._largest[layer.attention] = torch.maximum(before_H, found_H)

    def penalty(self, share: float) -> Tensor | float:
        """What the part just read, ``share`` of the step, adds to the loss."""
        if not self.floor:
            return 0.0
        found = share * self.weight * entropy_penalty(torch.cat(self._entropies), self.floor)
        self._entropies = []
        self._metrics["entropy_penalty"] = (
            self._metrics.get("entropy_penalty", 0.0) + found.detach()
        )
        return found

    def clip_scores(self) -> None:
        """After the weights have moved: scale back what was too large."""
        if self.limit is None:
            return
        over = [
            qk_clip_(cast(Projected, attention), largest_H, self.limit)
            for attention, largest_H in self._largest.items()
        ]
        self._metrics["clipped_heads"] = torch.cat(over).sum()

    def metrics(self) -> dict[str, float]:
        """The penalty of the step, and how many heads were scaled back after it."""
        return {name: float(value) for name, value in self._metrics.items()}
