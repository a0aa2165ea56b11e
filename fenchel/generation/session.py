"""Prompts of unequal lengths as one batch.

Shorter ones are filled on the left, so that all end together and the next token of each is
read at the same step. The fill is absent: its keys are forbidden and positions do not count
it, so a prompt in a batch is read as it would be alone.

Shapes: B prompts of lengths n_b become ids (B, T), T the largest n_b; present (B, T) is False
at the fill, or None when there is none.

A model that has read something and reads on, past the end of its context.

Every position is read once, into the cache. When the model's context is full, the newest half
of it is read again into an empty cache and reading goes on: text of any length comes out, each
token with at least half a context behind it. In a batch of unequal prompts that happens to all
at once, when the longest is full.

Shapes: ids (B, T) -> logits (B, T, V), or (B, 1, V) of the last position.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fenchel.generation import cuda_graph
from fenchel.generation.cpu_step import CpuStep, why_not
from fenchel.generation.cuda_graph import RECORDERS, PendingTokens, Record, RecordedStep
from fenchel.generation.kv_cache import Kind, KVCache
from fenchel.model import Transformer

FILL = 0
"""Any id does: what stands there is never looked at."""


class Prompts(NamedTuple):
    """Ids and where they are real."""

    ids: Tensor
    present: Tensor | None


def side_by_side(prompts: Tensor | Sequence[Tensor]) -> Prompts:
    """A batch (B, T), or prompts of one axis each, filled to the longest."""
    if isinstance(prompts, Tensor):
        if prompts.ndim != 2 or prompts.shape[1] < 1:
            raise ValueError(
                f"ids should be (B, T) with T at least 1, got {tuple(prompts.shape)}; "
                "prompts of different lengths go in a list."
            )
        return Prompts(prompts, None)
    shapes = [tuple(one.shape) for one in prompts]
    if not shapes or any(len(shape) != 1 or shape[0] < 1 for shape in shapes):
        raise ValueError(f"a list of prompts needs tensors (T,) with T at least 1, got {shapes}.")
    lengths, T = [n for (n,) in shapes], max(n for (n,) in shapes)
    ids = prompts[0].new_full((len(lengths), T), FILL)
    for row, one in zip(ids, prompts, strict=True):
        row[T - len(one) :] = one
    if min(lengths) == T:
        return Prompts(ids, None)
    places = torch.arange(T, device=ids.device)
    return Prompts(ids, places >= T - torch.tensor(lengths, device=ids.device).unsqueeze(-1))


def seen(prompts: Prompts, vocabulary: int) -> Tensor:
    """Which tokens each prompt has: (B, V), True at those."""
    ids_BT, present_BT = prompts
    # The fill goes to a column of its own, which is cut off again.
    real_BT = ids_BT if present_BT is None else ids_BT.where(present_BT, vocabulary)
    seen_BV = torch.zeros(len(ids_BT), vocabulary + 1, dtype=torch.bool, device=ids_BT.device)
    return seen_BV.scatter_(1, real_BT.long(), True)[:, :vocabulary]


class Session:
    """Reads for one call of ``generate``: ``count`` tokens behind ``prompts``.

    An encoder reads the ``source`` first. The last ``spare`` positions can be taken back.
    """

    def __init__(
        self,
        model: Transformer,
        prompts: Prompts,
        *,
        count: int,
        source: Prompts | None = None,
        kind: Kind = "model",
        spare: int = 0,
        record: Record | None = None,
    ) -> None:
        self.model, self.context = model, model.config.context
        B, T = prompts.ids.shape
        self.room = min(self.context, T + count)
        table = model.lm_head_weight
        self.cache = KVCache(
            model.config,
            batch=B,
            positions=self.room,
            dtype=table.dtype,
            device=table.device,
            kind=kind,
            spare=spare,
        )
        self._record, self._to_take, self._batch = record, True, B
        self._fixed: RecordedStep | None = None
        self._fit: cuda_graph.RecordingFit | None = None
        self._lean = CpuStep(model, self.cache, batch=B) if why_not(model) is None else None
        self.fill_B: Tensor | None = None
        """How many slots at the left of each sequence are absent."""
        if prompts.present is not None:
            self.fill_B = (~prompts.present).sum(-1)
        self._place_fill()
        self.memory: tuple[Tensor | None, Tensor | None] = None, None
        """What an encoder made of the source, and where it is real."""
        self._source = source

    @property
    def left(self) -> int:
        """How many positions can be read before the context is full."""
        return self.room - self.cache.length

    def begin(self, said_BN: Tensor, most: int) -> Tensor:
        """What is to be read of ``said_BN``, its last ``most`` positions, into an empty cache."""
        if self._source is not None:
            ids, present = self._source
            self.memory = self.model.encode(ids, token_mask_BS=present), present
            self._source = None  # once is enough
        self.cache.clear()
        self._to_take = True
        gone = max(0, said_BN.shape[1] - most)
        if self.fill_B is not None and gone:
            self.fill_B = (self.fill_B - gone).clamp(min=0)
            self._place_fill()
        return said_BN[:, gone:]

    def read(self, ids_BT: Tensor, *, last: bool = True) -> Tensor:
        """Read on; logits of the ``last`` position or of all that are new."""
        token_mask_BS = None
        if self._present_BR is not None:
            token_mask_BS = self._present_BR[:, : self.cache.length + ids_BT.shape[1]]
        if self.replays(ids_BT):
            step = self._recorded()
            self.cache.advance(1)  # counted here, held there
            return step.step(ids_BT[:, 0]).unsqueeze(1)
        if self._lean is not None and ids_BT.shape[1] == 1:
            return self._lean.step(ids_BT[:, 0], token_mask_BS).unsqueeze(1)
        memory_BSM, memory_mask_BS = self.memory
        logits_BTV: Tensor = self.model(
            ids_BT,
            cache=self.cache,
            token_mask_BS=token_mask_BS,
            memory_BSM=memory_BSM,
            memory_mask_BS=memory_mask_BS,
            last=last,
        )
        return logits_BTV

    def replays(self, ids_BT: Tensor) -> bool:
        """Whether these ids are read by a recorded step, which reads one token behind others."""
        return self._record is not None and ids_BT.shape[1] == 1 and self.cache.length > 0

    def follow(self, ids_B1: Tensor | None, count: int) -> PendingTokens:
        """The likeliest tokens behind ``ids_B1``, each read in turn but the last, (B, count).

        None for the last that was asked for, which nobody here has seen yet.
        """
        step, number = self._recorded(), self.cache.length
        self.cache.advance(count)
        return step.follow(None if ids_B1 is None else ids_B1[:, 0], number, count)

    def _recorded(self) -> RecordedStep:
        """The recorded step, which has a cache of its own, with all that was read so far."""
        if self._fixed is None:
            self._fixed = self._kept_or_new()
        if self._to_take:
            self._fixed.cache.take(self.cache, self.fill_B)
            self._to_take = False
        return self._fixed

    def _kept_or_new(self) -> RecordedStep:
        assert self._record is not None
        B, record = self._batch, RECORDERS[self._record]
        if cuda_graph.why_not_fused(self.model, batch=B) is not None:
            return RecordedStep(self.model, self.cache, batch=B, record=record)
        self._fit = cuda_graph.fit(self.model, batch=B, positions=self.room)
        return cuda_graph.take(self.model, self._fit) or RecordedStep(
            self.model, self.cache, batch=B, record=record, fused=True
        )

    def close(self) -> None:
        """Nothing more is read; what the next call can use is kept for it."""
        if self._fixed is not None and self._fit is not None:
            cuda_graph.bring_back(self.model, self._fit, self._fixed)
        self._fixed = None

    def take_back(self, positions: int) -> None:
        """Forget the last positions read."""
        if positions:
            self.cache.rewind(self.cache.length - positions)

    def _place_fill(self) -> None:
        self._present_BR: Tensor | None = None
        if self.fill_B is not None and bool(self.fill_B.any()):
            slots_R = torch.arange(self.room, device=self.fill_B.device)
            self._present_BR = slots_R >= self.fill_B.unsqueeze(-1)
