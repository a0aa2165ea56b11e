"""State shared by all layers during one forward pass.

Slots are the columns of a batch; ``token_mask_BS`` is True at those that hold a token and False at
padding. The position of a token is the number of tokens before it, so a sequence may be padded on
either side. Priors are aligned to the last key, so that the same prior serves a layer that has
fewer keys, those of a window. The rows of a cache may have unequal numbers of tokens, and their
keys may be in any order: such a layer has a prior at the positions of its keys.

Several documents may share a row (``segments_BT``, a number per document): a query then attends to
keys of its own document only, and positions count from the first slot of each.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from fenchel.attention import Angles, Dense, Prior, Segments
from fenchel.attention.prior import Positioned
from fenchel.attention.spec import AttentionCall

SHARED_PRIOR = 1 << 22
"""Up to this many scores, a padded batch has its prior computed once for all layers that share it;
above, each layer computes it tile by tile."""
SHARED_SEGMENTS = 1 << 24
"""The same for a packed batch, in numbers of the prior, which heads mostly share: 64 MiB."""
Observer = Callable[[int, Tensor, Tensor, Tensor], None]
"""Called in each layer with its number and its q (B, H, T, D), k and v (B, G, S, D)."""
AttentionOverride = Callable[[int, AttentionCall], Tensor | None]
"""Called in each layer with its number and the call of ``attend`` it is about to make.

A tensor it returns, (B, H, T, D), replaces the attention output; None leaves the layer to compute
it."""
StreamVectors = Mapping[int, Tensor]
"""What is added to the stream after a block, (B or 1, T or 1, M), by the number of its layer from
0."""


class Cache(Protocol):
    """Keys and values of the tokens already read (fenchel/generation/kv_cache.py)."""

    @property
    def length(self) -> int:
        """How many tokens the longest row has."""

    def new_positions(self, T: int) -> Tensor | None:
        """The positions (B, T) of new tokens; None where every row continues at ``length``."""

    def append(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Append (B, G, T, D); return the keys and values that queries see, (B, G, S, D)."""

    def key_positions(self, layer: int) -> Tensor | None:
        """The positions of those keys, (B, S); None where they are the last S in order."""

    def advance(self, positions: int) -> None:
        """Count tokens that every layer has appended."""


@runtime_checkable
class CrossAttentionCache(Protocol):
    """A cache that also stores the keys and values of an encoder's output."""

    def cross_kv(
        self, layer: int, compute: Callable[[], tuple[Tensor, Tensor]]
    ) -> tuple[Tensor, Tensor]:
        """The k and v (B, G, S, D) of a layer: computed at the first call, the same afterwards."""


class SequencePart(Protocol):
    """This process's positions of every sequence under distributed/context_parallel.py."""

    def positions(self, length: int, device: torch.device) -> Tensor:
        """The positions that this pass computes, of sequences of ``length``."""

    def chunks(self, length: int) -> Sequence[tuple[slice, int]]:
        """Consecutive queries among them, and the end of the keys that they are aligned to."""

    def gather(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """The keys and values of all positions, in order: (B, G, S, D)."""


@dataclass(frozen=True, eq=False, slots=True)
class ForwardContext:
    """State shared by all layers during one forward pass over T new slots.

    Rotary angles, token mask, position bias, KV cache, observer and override of attention, and for
    cross-attention the encoder's output.
    """

    rotary: tuple[Angles | None, Angles | None] = (None, None)
    """Rotary angles of queries and keys, in layers without a window and in those with one."""
    query_scale: Tensor | None = None
    """What ``Attention.temperature`` makes the factor on queries of, (T, 1) or (B, 1, T, 1)."""
    token_mask: Tensor | None = None
    """Which slots hold a token, (B, S); None is all of them."""
    segments: Tensor | None = None
    """The number of every slot's document, (B, S); None where a row is one document."""
    position_bias: Prior | None = None
    """What distances add to the scores of every layer (ALiBi, T5)."""
    cache: Cache | None = None
    part: SequencePart | None = None
    """Which positions of the sequences are computed; None is all of them."""
    observe: Observer | None = None
    attention_override: AttentionOverride | None = None
    memory: Tensor | None = None
    """The encoder's output, (B, S, M)."""
    memory_mask: Tensor | None = None
    """Which of its slots hold a token, (B, S)."""
    recompute: bool = False
    """Whether a block keeps only its input and is run again in the backward pass."""
    steer: StreamVectors | None = None
    """What is added to the stream after some layers."""

    per_layer: Tensor | None = None
    """The further embedding of every layer, (B, T, L, P)."""
    lent_kv: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)
    """Keys and values of layers that later ones attend to, by the number of the layer; with those
    of the cache."""
    priors: dict[tuple[Prior | None, int, Tensor | None], Prior] = field(default_factory=dict)
    """Dense priors by mask, keys and their positions, computed once for the layers that share
    them."""

    def prior(
        self, mask: Prior | None, q: Tensor, k: Tensor, key_positions: Tensor | None = None
    ) -> Prior | None:
        """The prior of a layer with this ``mask``, for its queries q and keys k."""
        bias, S = self.position_bias, k.shape[2]
        prior = mask if bias is None else (bias if mask is None else mask + bias)
        if self.token_mask is None and self.segments is None and key_positions is None:
            return prior
        B, H, T, _ = q.shape
        masked, limit, heads = with_token_mask(prior, self.token_mask, S), SHARED_PRIOR, H
        if self.segments is not None:
            own = Segments(self.segments[:, :S])
            masked = own if masked is None else masked + own
            limit, heads = SHARED_SEGMENTS, H if masked.varies()[1] else 1
        assert masked is not None
        if key_positions is not None:
            masked = Positioned(masked, key_positions)
            heads = H if masked.varies()[1] else 1
        if B * heads * T * S > limit:
            return masked
        key = mask, S, key_positions
        if key not in self.priors:
            wide = torch.promote_types(q.dtype, torch.float32)
            log_u = masked.log(T, S, B=B, H=H, device=q.device, dtype=wide)
            self.priors[key] = Dense(log_u)
        return self.priors[key]


def with_token_mask(prior: Prior | None, mask_BS: Tensor | None, keys: int) -> Prior | None:
    """``prior`` restricted to those of the last ``keys`` slots that hold a token."""
    if mask_BS is None:
        return prior
    tokens = Dense(mask_BS[:, None, None, -keys:])
    return tokens if prior is None else prior + tokens
