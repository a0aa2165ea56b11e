"""What every layer of one forward pass shares: who is there, what was kept, who watches.

Slots are places in a batch, cached ones first; ``present_BS`` says which of them hold a token. A
token's position is the number of tokens before it, so a sequence may be padded on either side.
The T new slots are the last of S; a layer that kept fewer gives its last ones, and the prior is
aligned to the end, so nothing else has to know.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from fenchel.attention import Angles, Dense, Prior

SMALL = 1 << 22
"""Scores for which a prior is written out once for all layers, rather than by each as it goes."""
Observer = Callable[[int, Tensor, Tensor, Tensor], Tensor | None]
"""Called in each layer with its number and the q (B, H, T, D), k and v (B, G, S, D) it uses.

One that gives something, (B, H, T, D), is taken at its word, and ``attend`` is not asked.
"""


class Cache(Protocol):
    """Keys and values of the slots already read; see fenchel.generation.kv_cache."""

    @property
    def length(self) -> int:
        """How many slots were read."""

    def append(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Add (B, G, T, D) and give back the last of all that is held, (B, G, S, D), in order."""

    def advance(self, positions: int) -> None:
        """Count slots that every layer has appended."""


@runtime_checkable
class Memory(Protocol):
    """A cache that also keeps the keys and values of what an encoder read."""

    def remember(
        self, layer: int, make: Callable[[], tuple[Tensor, Tensor]]
    ) -> tuple[Tensor, Tensor]:
        """The k and v (B, G, S, D) of a layer: made at the first call, the same ever after."""


@dataclass(frozen=True, eq=False, slots=True)
class ForwardContext:
    """One pass over T new slots."""

    turns: tuple[Angles | None, Angles | None] = (None, None)
    """How far queries and keys are turned, in layers without a window and in those with one."""
    present: Tensor | None = None
    """Which slots hold a token, (B, S); None is all of them."""
    bias: Prior | None = None
    """What distances add to the scores of every layer."""
    cache: Cache | None = None
    observe: Observer | None = None
    memory: Tensor | None = None
    """What the encoder gave, (B, S, M)."""
    memory_present: Tensor | None = None
    """Which of its slots hold a token, (B, S)."""

    made: dict[tuple[Prior | None, int], Prior] = field(default_factory=dict)
    """Priors that layers of one shape share, written out once."""

    def prior(self, shape: Prior | None, q: Tensor, k: Tensor) -> Prior | None:
        """Where the queries q of a layer of this ``shape`` may look among its keys k."""
        bias, S = self.bias, k.shape[2]
        prior = shape if bias is None else (bias if shape is None else shape + bias)
        if self.present is None:
            return prior
        B, H, T, _ = q.shape
        if B * H * T * S > SMALL:
            return among(prior, self.present, S)
        if (shape, S) not in self.made:
            wide = torch.promote_types(q.dtype, torch.float32)
            whole = among(prior, self.present, S)
            assert whole is not None
            log_u = whole.log(T, S, B=B, H=H, device=q.device, dtype=wide)
            self.made[shape, S] = Dense(log_u)
        return self.made[shape, S]


def among(prior: Prior | None, present_BS: Tensor | None, keys: int) -> Prior | None:
    """``prior`` over those of the last ``keys`` slots that are present."""
    if present_BS is None:
        return prior
    there = Dense(present_BS[:, None, None, -keys:])
    return there if prior is None else prior + there
