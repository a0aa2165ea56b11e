"""The state of one call of ``generate``: a batch of prompts, a KV cache and the step that reads.

**Padding.** Prompts of unequal lengths are padded on the left, so that all end together and the
next token of each is computed by the same step. Padding is masked and does not count as a position:
a prompt in a batch gives what it gives alone. B prompts of lengths n_b become ids (B, T), T the
largest n_b, with a token mask (B, T) that is False at padding, or None without padding.

**Context.** Every position is read once, into the cache. When the context of the model is full, its
newest half is read again into an empty cache and decoding continues: text of any length comes out,
each token with at least half a context before it. In a padded batch this happens to all sequences
at once, when the longest is full.

**Prefixes.** A ``PrefixCache`` keeps the session of a call for the next one, as in a chat, whose
prompt is the text so far and a little more. What the cache has of its beginning is not read again:
of the positions that were read, the common prefix stays and the others are removed. A layer with a
window may have dropped keys of that prefix; then everything is read again.

**Steps.** The prompt is read by the model itself. One token is read by a recorded step on a GPU
(generation/cuda_graph.py), by ``CpuStep`` for a plain decoder on a CPU (generation/cpu_step.py),
and else by the model.

Shapes: ids (B, T) -> logits (B, T, V), or (B, 1, V) of the last position.
"""

from collections.abc import Sequence
from contextlib import nullcontext
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from fenchel.generation import cuda_graph
from fenchel.generation.cpu_step import CpuStep, why_not_cpu_step
from fenchel.generation.cuda_graph import RECORDERS, PendingTokens, RecordedStep, TokenChoice
from fenchel.generation.kv_cache import CacheKind, KVCache
from fenchel.model import Transformer

NO_PLANS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
"""The kernels of torch's fused attention that serve a new length at once."""
PAD = 0
"""The id at padding; any id serves, since padding is never attended to."""


class Prompts(NamedTuple):
    """Ids (B, T), and a mask (B, T) that is True at tokens; None without padding."""

    ids: Tensor
    token_mask: Tensor | None


def pad_prompts(prompts: Tensor | Sequence[Tensor]) -> Prompts:
    """A batch (B, T) as it is, or prompts (T_b,) padded on the left to the longest.

    >>> pad_prompts([torch.tensor([7, 8]), torch.tensor([9])]).ids.tolist()
    [[7, 8], [0, 9]]
    """
    if isinstance(prompts, Tensor):
        if prompts.ndim != 2 or prompts.shape[1] < 1:
            raise ValueError(
                f"ids should be (B, T) with T at least 1, got {tuple(prompts.shape)}; "
                "prompts of different lengths go in a list."
            )
        return Prompts(prompts, None)
    shapes = [tuple(prompt.shape) for prompt in prompts]
    if not shapes or any(len(shape) != 1 or shape[0] < 1 for shape in shapes):
        raise ValueError(f"a list of prompts needs tensors (T,) with T at least 1, got {shapes}.")
    lengths, T = [n for (n,) in shapes], max(n for (n,) in shapes)
    ids = prompts[0].new_full((len(lengths), T), PAD)
    for row, prompt in zip(ids, prompts, strict=True):
        row[T - len(prompt) :] = prompt
    if min(lengths) == T:
        return Prompts(ids, None)
    slots = torch.arange(T, device=ids.device)
    return Prompts(ids, slots >= T - torch.tensor(lengths, device=ids.device).unsqueeze(-1))


def previous_tokens(prompts: Prompts, vocabulary: int) -> Tensor:
    """True at the tokens of each prompt: (B, V)."""
    ids_BT, mask_BT = prompts
    # Padding is sent to a column of its own, which is cut off again.
    ids_BT = ids_BT if mask_BT is None else ids_BT.where(mask_BT, vocabulary)
    previous_BV = torch.zeros(len(ids_BT), vocabulary + 1, dtype=torch.bool, device=ids_BT.device)
    return previous_BV.scatter_(1, ids_BT.long(), True)[:, :vocabulary]


class Session:
    """Forward passes over ``prompts`` and up to ``count`` new tokens.

    An encoder reads the ``source`` first. The last ``rewindable`` positions can be removed again.
    """

    def __init__(
        self,
        model: Transformer,
        prompts: Prompts,
        *,
        count: int,
        source: Prompts | None = None,
        cache: CacheKind = "model",
        rewindable: int = 0,
        recorded: bool = False,
    ) -> None:
        self.model, self.context = model, model.config.context
        B, T = prompts.ids.shape
        self.capacity = min(self.context, T + count)
        table = model.lm_head_weight
        self.cache = KVCache(
            model.config,
            batch=B,
            positions=self.capacity,
            dtype=table.dtype,
            device=table.device,
            kind=cache,
            rewindable=rewindable,
        )
        self._batch, self._recorded = B, recorded
        self._recorded_step: RecordedStep | None = None
        self._recording_key: cuda_graph.RecordingKey | None = None
        self._static_cache_is_stale = True
        cpu = why_not_cpu_step(model) is None
        self._cpu_step = CpuStep(model, self.cache, batch=B) if cpu else None
        self.padding_B: Tensor | None = None
        """How many slots at the left of each sequence are padding."""
        if prompts.token_mask is not None:
            self.padding_B = (~prompts.token_mask).sum(-1)
        self._update_token_mask()
        self.memory: tuple[Tensor | None, Tensor | None] = None, None
        """The encoder's output and its token mask."""
        self._source = source
        self._read: list[int] | None = None
        """The ids that were given to passes; the cache has as many of them as it counts, since a
        pass may be interrupted. None unless a later prompt may begin with them."""

    @property
    def free(self) -> int:
        """How many positions can be read before the context is full."""
        return self.capacity - self.cache.length

    def begin(self, ids_BT: Tensor) -> Tensor:
        """What to read of a prompt: what follows the ids that the cache has, or all of it."""
        if not self._read or ids_BT.shape[1] > self.context:
            return self.restart(ids_BT, self.context)
        ids = ids_BT[0, :-1].tolist()  # the last one is read in any case, for its logits
        pairs = enumerate(zip(self._read, ids, strict=False))
        n = next((i for i, (old, new) in pairs if old != new), min(len(self._read), len(ids)))
        if not self.cache.can_rewind(n):
            return self.restart(ids_BT, self.context)
        self.cache.rewind(n)
        del self._read[n:]
        self._static_cache_is_stale = True
        return ids_BT[:, n:]

    def restart(self, ids_BN: Tensor, positions: int) -> Tensor:
        """Empty the cache; returns what to read into it, the last ``positions`` of ``ids_BN``."""
        if self._source is not None:
            ids, mask = self._source
            self.memory = self.model.encode(ids, token_mask_BS=mask), mask
            self._source = None  # the encoder runs once
        self.cache.clear()
        self._read = None if self._read is None else []
        self._static_cache_is_stale = True
        dropped = max(0, ids_BN.shape[1] - positions)
        if self.padding_B is not None and dropped:
            self.padding_B = (self.padding_B - dropped).clamp(min=0)
            self._update_token_mask()
        return ids_BN[:, dropped:]

    def forward(self, ids_BT: Tensor, *, last: bool = True) -> Tensor:
        """Logits of the ``last`` position or of all new ones: (B, T) -> (B, 1 or T, V)."""
        token_mask_BS = None
        if self._token_mask_BR is not None:
            token_mask_BS = self._token_mask_BR[:, : self.cache.length + ids_BT.shape[1]]
        if self.uses_recorded_step(ids_BT):
            step = self._step_with_cache()
            self.cache.advance(1)  # counted here; the keys are in the static cache
            return step.step(ids_BT[:, 0]).unsqueeze(1)
        if self._read is not None:
            self._read += ids_BT[0].tolist()
        if self._cpu_step is not None and ids_BT.shape[1] == 1:
            return self._cpu_step.step(ids_BT[:, 0], token_mask_BS).unsqueeze(1)
        memory_BSM, memory_mask_BS = self.memory
        # cuDNN's attention builds a plan for every new length: 64 tokens of six layers in bfloat16
        # took 3.5 s on an H200 instead of 0.16.
        with sdpa_kernel(NO_PLANS) if ids_BT.is_cuda else nullcontext():
            logits_BTV: Tensor = self.model(
                ids_BT,
                cache=self.cache,
                token_mask_BS=token_mask_BS,
                memory_BSM=memory_BSM,
                memory_mask_BS=memory_mask_BS,
                last=last,
            )
        return logits_BTV

    def uses_recorded_step(self, ids_BT: Tensor) -> bool:
        """Whether these ids are read by a recorded step, which reads one token after others."""
        return self._recorded and ids_BT.shape[1] == 1 and self.cache.length > 0

    def decode(
        self, last_B1: Tensor | None, count: int, choose: TokenChoice | None = None
    ) -> PendingTokens:
        """The next ``count`` tokens after ``last_B1``, (B, count), chosen on the device.

        None continues from the last token chosen on the device, which has not been copied to the
        host. Without ``choose`` the tokens are greedy.
        """
        step, number = self._step_with_cache(), self.cache.length
        self.cache.advance(count)
        last_B = None if last_B1 is None else last_B1[:, 0]
        return step.decode(last_B, number, count, batch=self._batch, choose=choose)

    def _step_with_cache(self) -> RecordedStep:
        """The recorded step, its static cache filled with what was read so far."""
        if self._recorded_step is None:
            self._recorded_step = self._record_or_reuse()
        if self._static_cache_is_stale:
            self._recorded_step.cache.copy_from(self.cache, self.padding_B)
            self._static_cache_is_stale = False
        return self._recorded_step

    def _record_or_reuse(self) -> RecordedStep:
        rows, record = self._batch, RECORDERS["graph"]
        if cuda_graph.why_not_fused(self.model) is not None:
            return RecordedStep(self.model, self.cache, rows=rows, record=record)
        rows = cuda_graph.row_bucket(rows)
        self._recording_key = key = cuda_graph.recording_key(self.model, self.cache, rows=rows)
        return cuda_graph.acquire(self.model, key) or RecordedStep(
            self.model, self.cache, rows=rows, record=record, fused=True
        )

    def close(self) -> None:
        """End the session; a recorded step goes back to the pool for the next call."""
        if self._recorded_step is not None and self._recording_key is not None:
            cuda_graph.release(self.model, self._recording_key, self._recorded_step)
        self._recorded_step = None

    def rewind(self, positions: int) -> None:
        """Remove the last ``positions`` from the cache."""
        if positions:
            self.cache.rewind(self.cache.length - positions)
            if self._read is not None:
                del self._read[-positions:]

    def _update_token_mask(self) -> None:
        self._token_mask_BR: Tensor | None = None
        if self.padding_B is not None and bool(self.padding_B.any()):
            slots_R = torch.arange(self.capacity, device=self.padding_B.device)
            self._token_mask_BR = slots_R >= self.padding_B.unsqueeze(-1)


class PrefixCache:
    """The session of the last call, for a prompt that begins as the text that it has read.

    For one prompt at a time. The text is the same as without it but for rounding: what a single
    step has read is not read again as part of a prompt.

    >>> from fenchel.model import ModelConfig
    >>> model = Transformer(ModelConfig(vocabulary=9, width=8, layers=1, heads=2))
    >>> prefix_cache = PrefixCache()  # stream_text(..., prefix_cache=prefix_cache)
    >>> for ids in (torch.tensor([[1, 2, 3]]), torch.tensor([[1, 2, 3, 4, 5]])):
    ...     session = prefix_cache.session(
    ...         model, Prompts(ids, None), cache="model", rewindable=0, recorded=False
    ...     )
    ...     new = session.begin(ids)
    ...     session.forward(new).shape, new.tolist()
    (torch.Size([1, 1, 9]), [[1, 2, 3]])
    (torch.Size([1, 1, 9]), [[4, 5]])
    """

    def __init__(self) -> None:
        self._session: Session | None = None
        self._kind: tuple[CacheKind, int] | None = None

    def session(
        self,
        model: Transformer,
        prompts: Prompts,
        *,
        cache: CacheKind,
        rewindable: int,
        recorded: bool,
    ) -> Session:
        """A session with room for the whole context: the last one if it is of the same kind."""
        kind = (cache, rewindable)
        if self._session is None or self._session.model is not model or self._kind != kind:
            self._kind = kind
            self._session = Session(
                model, prompts, count=model.config.context, cache=cache, rewindable=rewindable
            )
            self._session._read = []
        self._session._recorded = recorded
        return self._session
