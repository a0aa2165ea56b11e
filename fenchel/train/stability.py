"""Switches that keep attention stable during training: an entropy floor and QK-clip.

    entropy_floor    heads below it are pushed up: the loss of a micro-batch gains
                     entropy_weight * mean over layers and heads of max(0, floor - H_head)^2
    qk_clip          after the step, heads whose largest score in it exceeded the limit are scaled
                     down to it

Both read the queries and keys of the forward pass, which the model passes to ``observe``. They are
functions of the step alone, so a resumed run needs no state of theirs. QK-norm, soft-capping and
sigma-reparametrisation change the model instead, and are its settings.

**Entropy.** For a row of weights p = choice.weights(z, log_prior) over its keys, in nats,

    H(p) = - sum_j p_j log p_j

and the entropy of a head is the mean of H over all rows that have a key. A head whose entropy falls
to 0 attends to one key per row and hardly learns any more. Derivative, with J that of the weights
(symmetric, and J 1 = 0, which removes the -1):

    dH/dz = J (-log p)          dH/dq = scale dH/dz k          dH/dk = scale dH/dz^T q

with the factor 1 - (z / c)^2 in between when scores are softly capped, z = c tanh(s / c). All rows
of a head weigh alike, so its gradient is known up to one factor per head as soon as p is: it is
computed with the value, tile by tile (fenchel/attention/tiles.py), and no (T, S) square is stored
for the backward pass. Heads that share keys keep their parts of dH/dk apart until their factors are
known. The gradient cannot be differentiated again.

**QK-clip.** With s_h the largest |scale q.k| of head h over the keys its queries may attend to, in
the forward pass of the step, and tau the limit,

    gamma_h = min(1, tau / s_h)
    W_Q,h <- sqrt(gamma_h) W_Q,h          W_K,h <- sqrt(gamma_h) W_K,h

biases alike. Scores are bilinear in the two, so those of head h shrink by exactly gamma_h and
those of every other head stay as they are. Where several heads share a key, the query takes the
whole factor, W_Q,h <- gamma_h W_Q,h. QK-clip acts on weights alone: it adds nothing to the loss,
leaves the model at inference and the optimiser state as they are, and does not touch, to the bit, a
head below the limit.

Zhai et al. (2023), Stabilizing transformer training by preventing attention entropy collapse.
Kimi Team (2025), Kimi K2: open agentic intelligence.
"""

from collections.abc import Sequence
from typing import Any, Protocol, Unpack, runtime_checkable

import torch
from torch import Tensor, nn

from fenchel.attention.prior import Prior
from fenchel.attention.reference import cap, cap_slope, mix, mix_transposed, score
from fenchel.attention.shapes import check
from fenchel.attention.spec import AttentionKeywords, AttentionSpec
from fenchel.attention.tiles import tiles
from fenchel.train.config import TrainConfig


class AttentionModule(Protocol):
    """Attention with one linear map for queries, keys and values, its rows in that order."""

    heads: int
    groups: int
    head_width: int
    qkv: nn.Linear

    @property
    def spec(self) -> AttentionSpec:
        """Its choice, scale and soft cap, with its mask as the prior."""


class AttentionSettings(Protocol):
    """The settings of a model that decide whether its scores are scale q.k alone."""

    @property
    def positions(self) -> str:
        """The kind of position encoding; "alibi" and "buckets" add a bias to the scores."""

    @property
    def scores(self) -> str:
        """ "dot" for q.k."""

    @property
    def sinks(self) -> bool:
        """Whether heads have a sink besides the keys."""

    @property
    def qk_norm(self) -> bool:
        """Whether queries and keys are normalised."""

    @property
    def sigma_reparam(self) -> bool:
        """Whether the weights are divided by their largest singular value."""


@runtime_checkable
class AttentionModel(Protocol):
    """What the switches need of a model beside ``Trainable`` (fenchel/train/step.py)."""

    @property
    def config(self) -> AttentionSettings:
        """Its settings."""

    def attention_layers(self) -> Sequence[AttentionModule]:
        """The attention of every layer, in the order of the numbers that ``observe`` gets."""


def why_not_entropy(config: AttentionSettings) -> str | None:
    """Why the scores of a model are not those of its q and k alone, or None if they are."""
    if config.positions in ("alibi", "buckets"):
        return f'positions="{config.positions}" add to its scores'
    if config.sinks:
        return "its heads have sinks beside the keys"
    if config.scores != "dot":
        return f'its scores are of kind "{config.scores}"'
    return None


def why_not_clip(config: AttentionSettings) -> str | None:
    """Why scaling the query and key weights would not scale the scores, or None if it does."""
    if config.qk_norm:
        return "qk_norm would undo it"
    if config.sigma_reparam:
        return "sigma_reparam would undo it"
    return None if config.scores == "dot" else f'its scores are of kind "{config.scores}"'


def entropy_penalty(entropy_H: Tensor, floor: float) -> Tensor:
    """Mean square of the amount by which heads are below ``floor`` nats: (H,) -> ().

    >>> entropy_penalty(torch.tensor([0.5, 3.0]), floor=1.0)
    tensor(0.1250)
    """
    return (floor - entropy_H).clamp(min=0.0).square().mean()


def head_entropy(q: Tensor, k: Tensor, **spec: Unpack[AttentionKeywords]) -> Tensor:
    """Mean entropy of each head: q (B, H, T, D), k (B, G, S, D) -> (H,), in float32 or better.

    >>> q = k = torch.zeros(1, 2, 3, 4)
    >>> head_entropy(q, k).exp()  # equal scores: uniform over the three keys
    tensor([3.0000, 3.0000])
    """
    call = AttentionSpec(**spec)
    check(q, k, k, softcap=call.softcap)
    if q.dim() != 4:
        raise ValueError(f"head_entropy takes q with four axes, (B, H, T, D); got {q.dim()}.")
    learns = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad)
    with torch.autocast(q.device.type, enabled=False):  # which would narrow the scores again
        entropy_H: Tensor = _HeadEntropy.apply(q, k, call, learns)  # type: ignore[no-untyped-call]
    return entropy_H


class _HeadEntropy(torch.autograd.Function):
    """The entropies, with their gradients computed in the forward pass."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, spec: AttentionSpec, learns: bool) -> Tensor:
        choice, prior, softcap = spec.choice, spec.prior, spec.softcap
        scale = spec.scale_for(q.shape[-1])
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
        if torch.is_grad_enabled():  # the gradients are constants here: a derivative would be lost
            raise RuntimeError("head_entropy has no second derivative.")
        gq_BHTD, gk_BHSD, rows_H = ctx.saved_tensors
        share_H11 = (g_H / rows_H.clamp(min=1.0))[:, None, None]
        gk_BGRSD = (gk_BHSD * share_H11).unflatten(1, (ctx.groups, -1))
        gq, gk = (x.to(ctx.dtype) for x in (gq_BHTD * share_H11, gk_BGRSD.sum(2)))
        return gq, gk, None, None


@torch.no_grad()
def largest_scores(
    q: Tensor, k: Tensor, *, prior: Prior | None = None, scale: float | None = None
) -> Tensor:
    """max |scale q.k| of each head over allowed keys: (B, H, T, D), (B, G, S, D) -> (H,).

    >>> q = torch.tensor([2.0, -3.0]).view(1, 1, 2, 1)
    >>> largest_scores(q, q, scale=1.0)
    tensor([9.])
    """
    check(q, k, k)
    scale = AttentionSpec(scale=scale).scale_for(q.shape[-1])
    with torch.autocast(q.device.type, enabled=False):  # which would narrow the scores again
        return _largest_scores(q, k, prior, scale)


@torch.no_grad()
def qk_clip_(attention: AttentionModule, largest_H: Tensor, tau: float) -> Tensor:
    """Scale down the heads whose largest score is above ``tau``; returns which, (H,) of bool."""
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
    largest_H = q.new_zeros(q.shape[1], dtype=torch.promote_types(q.dtype, torch.float32))
    for tile in tiles(q, k, prior):
        z = score(tile.queries(q), tile.items(k), scale).abs_()
        if prior is not None:
            z = torch.where(prior.dense(tile.block(q, k), z.dtype) > -torch.inf, z, 0.0)
        if z.numel():
            largest_H[tile.heads] = torch.maximum(largest_H[tile.heads], z.amax((0, 2, 3)))
    return largest_H


class Stability:
    """Measures the attention of one step, and applies the switches that are on."""

    def __init__(self, model: nn.Module, config: TrainConfig) -> None:
        self.limit, self.floor = config.qk_clip, config.entropy_floor
        self.weight = config.entropy_weight
        if not isinstance(model, AttentionModel):
            raise ValueError(
                f"qk_clip and entropy_floor need a model with attention_layers and config, which "
                f"{type(model).__name__} lacks; leave them out."
            )
        self.layers = model.attention_layers()
        if self.limit is not None and (reason := why_not_clip(model.config)):
            raise ValueError(f"qk_clip scales query and key weights, and {reason}; choose one.")
        if self.floor and (reason := why_not_entropy(model.config)):
            raise ValueError(f"entropy_floor cannot serve this model: {reason}.")
        self.reset()

    def reset(self) -> None:
        """Discard the measurements of the step before."""
        self._entropies: list[Tensor] = []
        # By module: one may serve several layers.
        self._largest: dict[int, tuple[AttentionModule, Tensor]] = {}
        self._metrics: dict[str, Tensor] = {}

    def observe(self, number: int, q: Tensor, k: Tensor, _v: Tensor) -> None:
        """Measure the queries (B, H, T, D) and keys (B, G, S, D) of one layer."""
        layer = self.layers[number]
        if self.floor:
            self._entropies.append(head_entropy(q, k, **layer.spec))
        if self.limit is not None:
            scale = layer.spec.scale
            largest_H = largest_scores(q, k, prior=layer.spec.prior, scale=scale)
            _, before_H = self._largest.get(id(layer), (layer, largest_H))
            self._largest[id(layer)] = layer, torch.maximum(before_H, largest_H)

    def penalty(self, share: float) -> Tensor | float:
        """The entropy penalty of the micro-batch just observed, ``share`` of the step."""
        if not self.floor:
            return 0.0
        penalty = share * self.weight * entropy_penalty(torch.cat(self._entropies), self.floor)
        self._entropies = []
        before = self._metrics.get("entropy_penalty", 0.0)
        self._metrics["entropy_penalty"] = before + penalty.detach()
        return penalty

    def clip_scores(self) -> None:
        """Apply QK-clip, after the optimiser has moved the weights."""
        if self.limit is None:
            return
        over = [
            qk_clip_(attention, largest_H, self.limit)
            for attention, largest_H in self._largest.values()
        ]
        self._metrics["clipped_heads"] = torch.cat(over).sum()

    def metrics(self) -> dict[str, float]:
        """The entropy penalty of the step, and the number of heads that QK-clip scaled down."""
        return {name: float(value) for name, value in self._metrics.items()}
