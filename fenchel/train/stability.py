"""Switches that keep attention stable during training: an entropy floor and QK-clip.

    entropy_floor    heads below it are pushed up: the loss of a micro-batch gains
                     entropy_weight * mean over layers and heads of max(0, floor - H_head)^2
    qk_clip          after the step, heads whose largest score in it exceeded the limit are scaled
                     down to it

Both read the queries and keys of the forward pass, which the model passes to ``observe``. They are
functions of only the step, so a resumed run needs no state of theirs. QK-norm, soft-capping and
sigma-reparametrisation change the model instead, and are its settings.

Where documents are packed into one row of a batch, entropies and scores are measured over pairs of
a query and a key of the same document, and padding is excluded: the result is that of every
document in a separate row (``PackedDocuments``).

**Entropy.** The entropy of a head is the mean of H(p) over all rows that have a key
(``fenchel.attention.head_entropy``, which computes its gradient with the value). A head whose
entropy falls to 0 attends to one key per row and hardly learns any more.

**QK-clip.** With s_h the largest |scale q.k| of head h over the keys its queries may attend to, in
the forward pass of the step, and tau the limit,

    gamma_h = min(1, tau / s_h)
    W_Q,h <- sqrt(gamma_h) W_Q,h          W_K,h <- sqrt(gamma_h) W_K,h

biases alike. Scores are bilinear in the two, so those of head h shrink by exactly gamma_h and
those of every other head stay as they are. Where several heads share a key, the query takes the
whole factor, W_Q,h <- gamma_h W_Q,h. QK-clip acts only on weights: it adds nothing to the loss,
leaves the model at inference and the optimiser state as they are, and does not touch, to the bit, a
head below the limit.

With several processes the largest scores are those of all of them, and the owner of a weight scales
it (fenchel/distributed/cells.py).

Zhai et al. (2023), Stabilizing transformer training by preventing attention entropy collapse.
Kimi Team (2025), Kimi K2: open agentic intelligence.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from fenchel.attention.mask import Segments
from fenchel.attention.prior import Dense, Prior
from fenchel.attention.shapes import check
from fenchel.attention.spec import AttentionSpec
from fenchel.attention.statistics import head_entropy
from fenchel.attention.tiles import score_tiles
from fenchel.data import Batch
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
    """The settings of a model that decide whether its scores are just scale q.k."""

    @property
    def layers(self) -> int:
        """The number of blocks that a pass runs."""

    @property
    def has_position_bias(self) -> bool:
        """Whether distances add a bias to the scores (ALiBi, T5)."""

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
    def shared_kv_layers(self) -> int:
        """How many layers attend to the keys of others."""

    @property
    def sigma_reparam(self) -> bool:
        """Whether the weights are divided by their largest singular value."""


@runtime_checkable
class AttentionModel(Protocol):
    """What the switches need of a model in addition to ``Trainable`` (fenchel/train/step.py)."""

    @property
    def config(self) -> AttentionSettings:
        """Its settings."""

    def attention_layers(self) -> Sequence[AttentionModule]:
        """The attention of every layer, in the order of the numbers that ``observe`` gets."""


def why_not_entropy(config: AttentionSettings) -> str | None:
    """Why the scores of a model are not just scale q.k, or None if they are."""
    if config.has_position_bias:
        return "a bias of positions adds to its scores"
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
    if config.shared_kv_layers:
        return "its layers share keys"
    return None if config.scores == "dot" else f'its scores are of kind "{config.scores}"'


def entropy_penalty(entropy_H: Tensor, floor: float) -> Tensor:
    """Mean square of the amount by which heads are below ``floor`` nats: (H,) -> ().

    >>> entropy_penalty(torch.tensor([0.5, 3.0]), floor=1.0)
    tensor(0.1250)
    """
    return (floor - entropy_H).clamp(min=0.0).square().mean()


class PackedDocuments(NamedTuple):
    """The documents of the rows of a batch, and where there is none: both (B, T)."""

    segments: Tensor
    """The number of every position's document in its row."""
    filled: Tensor
    """False at padding: in a segment without a target, since every document has one."""

    @classmethod
    def of(cls, batch: Batch) -> "PackedDocuments | None":
        """Those of a batch; None where a row is one text.

        >>> ids = torch.zeros(1, 5, dtype=torch.long)
        >>> targets = torch.tensor([[7, -100, 7, -100, -100]])
        >>> PackedDocuments.of(Batch(ids, targets, torch.tensor([[0, 0, 1, 2, 2]]))).filled
        tensor([[ True,  True,  True, False, False]])
        """
        if (segments := batch.segments) is None:
            return None
        rows = torch.arange(len(segments), device=segments.device)[:, None]
        numbers = segments - segments.min()
        by_row = numbers + rows * (numbers.max() + 1)
        document = by_row.unique(return_inverse=True)[1]  # type: ignore[no-untyped-call]
        filled = torch.zeros(document.numel(), dtype=torch.bool, device=segments.device)
        filled[document[batch.targets >= 0]] = True
        return cls(segments, filled[document])

    def prior(self, mask: Prior | None, keys: int) -> Prior:
        """``mask`` inside documents, for the first ``keys`` positions."""
        own = Segments(self.segments[:, :keys]) + Dense(self.filled[:, None, None, :keys])
        return own if mask is None else mask + own

    def row_weight(self, queries: int, keys: int) -> Tensor:
        """How many of the last ``queries`` of ``keys`` positions are filled, 1 at the mean: ().

        The mean of chunks of as many queries each, so weighted, is that of all filled positions.
        """
        chunk = self.filled[:, keys - queries : keys].float().mean()
        return chunk / self.filled.float().mean().clamp(min=torch.finfo().tiny)


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
    largest_H = q.new_zeros(q.shape[1], dtype=torch.promote_types(q.dtype, torch.float32))
    with torch.autocast(q.device.type, enabled=False):  # which would narrow the scores again
        for scored in score_tiles(q, k, AttentionSpec(prior=prior, scale=scale)):
            z, log_u, heads = scored.z.abs_(), scored.log_prior(), scored.tile.heads
            if log_u is not None:
                z = torch.where(log_u > -torch.inf, z, 0.0)
            if z.numel():
                largest_H[heads] = torch.maximum(largest_H[heads], z.amax((0, 2, 3)))
    return largest_H


@torch.no_grad()
def qk_clip_(attention: AttentionModule, largest_H: Tensor, tau: float) -> Tensor:
    """Scale down the heads whose largest score is above ``tau``; returns which, (H,) of bool.

    A parameter on the meta device is left to the process that has its values.
    """
    H, G, D = attention.heads, attention.groups, attention.head_width
    over_H = (largest_H > tau) & largest_H.isfinite()
    gamma_H = torch.where(over_H, tau / largest_H, 1.0)
    for x in (attention.qkv.weight, attention.qkv.bias):
        if x is None or x.is_meta:
            continue
        rows_QD = x[: (H + G) * D].view(H + G, D, -1)
        if G == H:
            rows_QD.mul_(gamma_H.sqrt().repeat(2)[:, None, None].to(x.dtype))
        else:
            rows_QD[:H].mul_(gamma_H[:, None, None].to(x.dtype))
    return over_H


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
        first: dict[int, int] = {}
        self.modules = [first.setdefault(id(layer), n) for n, layer in enumerate(self.layers)]
        """Per layer the number of the first one that its module serves, which may be several."""
        if len(self.layers) < model.config.layers:
            raise ValueError(
                "qk_clip and entropy_floor need attention in every layer, and this model has "
                "layers of gated DeltaNet; leave them out."
            )
        if self.limit is not None and (reason := why_not_clip(model.config)):
            raise ValueError(f"qk_clip scales query and key weights, and {reason}; choose one.")
        if self.floor and (reason := why_not_entropy(model.config)):
            raise ValueError(f"entropy_floor cannot serve this model: {reason}.")
        self.reset()

    def reset(self) -> None:
        """Discard the measurements of the step before."""
        self._entropies: dict[int, list[Tensor]] = {}
        self._largest: dict[int, Tensor] = {}
        self._documents: PackedDocuments | None = None
        self._metrics: dict[str, Tensor] = {}

    def begin_pass(self, batch: Batch) -> None:
        """Take the documents of a micro-batch whose forward pass follows."""
        self._documents = PackedDocuments.of(batch)

    def observe(self, number: int, q: Tensor, k: Tensor, _v: Tensor) -> None:
        """Measure the queries (B, H, T, D) and keys (B, G, S, D) of one layer.

        A layer that attends chunk by chunk calls it for each of its chunks, which are equally long.
        """
        spec, documents, T, S = self.layers[number].spec, self._documents, q.shape[2], k.shape[2]
        if documents is not None:
            spec = replace(spec, prior=documents.prior(spec.prior, S))
        if self.floor:
            entropy_H = head_entropy(q, k, **spec)
            if documents is not None and documents.filled.shape[1] > T:
                entropy_H = entropy_H * documents.row_weight(T, S)
            self._entropies.setdefault(number, []).append(entropy_H)
        if self.limit is not None:
            largest_H = largest_scores(q, k, prior=spec.prior, scale=spec.scale)
            before_H = self._largest.get(self.modules[number], largest_H)
            self._largest[self.modules[number]] = torch.maximum(before_H, largest_H)

    def penalty(self, share: float) -> Tensor | float:
        """The entropy penalty of the micro-batch just observed, ``share`` of the step."""
        if not self.floor:
            return 0.0
        penalty = share * self.weight * entropy_penalty(self._head_entropies(), self.floor)
        before = self._metrics.get("entropy_penalty", 0.0)
        self._metrics["entropy_penalty"] = before + penalty.detach()
        return penalty

    def _head_entropies(self) -> Tensor:
        """Of all layers and heads in the micro-batch just observed, once."""
        layers = self._entropies.values()
        self._entropies = {}
        return torch.cat([x[0] if len(x) == 1 else torch.stack(x).mean(0) for x in layers])

    def clip_scores(self) -> None:
        """Apply QK-clip, after the optimiser has moved the weights."""
        self._clip(self.layers)

    def _clip(self, layers: Sequence[AttentionModule]) -> None:
        if self.limit is None:
            return
        over = [qk_clip_(layers[n], x_H, self.limit) for n, x_H in self._largest.items()]
        self._metrics["clipped_heads"] = torch.cat(over).sum()

    def metrics(self) -> dict[str, float]:
        """The entropy penalty of the step, and the number of heads that QK-clip scaled down."""
        return {name: float(value) for name, value in self._metrics.items()}
