"""Continuous batching: sequences that join and leave a batch between two decoding steps.

    columns   ...............................c      c columns were written, the same for all rows
    row 0          [ prompt 0 | its tokens ]|       every sequence ends at column c
    row 1                  [ prompt 1 | ...]|
    row 2                                   |       free

All sequences read their newest token in one step, which writes column c. A sequence *joins* between
two steps: its prompt is read into a cache of its own (``Prefill``), whose keys and values are then
copied into the columns before c of a free row; several short prompts are read at once. It *leaves*
by being forgotten: nothing is copied. A row b of n_b tokens has them in its last n_b columns and
the others are masked, as the padding of unequal prompts is (generation/session.py); positions count
tokens, keys have their rotation already, and distances between columns are distances between
tokens. So windows, ALiBi and every choice map hold as they are.

**Columns.** A step reads the last n + 1 columns, n the length of the longest sequence. A layer
stores a quarter more than a query may see; when it is full, what is still seen moves to the front,
so each key moves four times at most (generation/kv_cache.py). A prompt that is longer than c moves
all others to the right.

**Buckets.** A step computes 1, 2, 4, 8, 16, ... rows, the fewest that hold all sequences. A free
row reads token 0 and its result is not used. When the sequences fit into a smaller bucket, those in
the last rows move into free rows before them.

**Packed tokens.** For a plain decoder on a CPU, steps and prompts are computed by ``PackedForward``
(generation/cpu_step.py): the prompts of a pass are one after another without padding, each attends
to itself, and all products have packed weights. A step of one row in float32 reads a further copy,
in the order of memory. A model in bfloat16 has its keys and values in float32: torch's attention of
one query is five times as fast to those.

**Invariance.** Rounding depends on the shapes of the products: the number of rows, of columns, of
tokens in a prefill. With ``invariant`` all of them are fixed or follow from the sequence alone: the
largest bucket; every prompt read alone, in chunks of the same size; attention row by row over the
columns of the row (generation/cpu_step.py), or where another step is taken, over the whole context.
Maps that are solved by iterations until all rows have converged are solved row by row. The logits
of a sequence are then the same bits whatever the other rows do, and in whatever row it is. A
library of products may treat the last rows differently, so the bucket is a multiple of
``INVARIANT_MULTIPLE``, and ``warm_up`` compares all rows.

**Recorded steps.** On a GPU a step is a CUDA graph per bucket (``RecordedRows`` of
generation/cuda_graph.py) where the model can be recorded, the cache has the model's dtype and the
batch is not invariant. Then a row has slots and a token number of its own instead of the common
column c, and its tokens are drawn on the device: ``launch`` returns before they are there, and may
be called again before they are read.

B rows of a step, T tokens of a prompt, S columns that a step reads, M width of the stream, V
vocabulary.
"""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import sdpa_kernel

from fenchel.attention import Dense, attend
from fenchel.attention.spec import AttentionCall
from fenchel.choice import Softmax
from fenchel.generation.cpu_step import (
    CpuStep,
    PackedForward,
    StepAttention,
    why_not_cpu_step,
)
from fenchel.generation.cuda_graph import (
    AUTO_TOKENS,
    PendingTokens,
    Record,
    RecordedRows,
    StaticCache,
    use_recorded_step,
)
from fenchel.generation.kv_cache import (
    CacheKind,
    KVCache,
    LayerStores,
    allocate_stores,
    lookback,
    slack,
)
from fenchel.generation.sampling import RowSampling, Sampling
from fenchel.generation.session import NO_PLANS, pad_prompts
from fenchel.model import ModelConfig, Transformer
from fenchel.model.forward_context import Observer

INVARIANT_MULTIPLE = 8
"""Divides the rows of an invariant step. Of 1 to 64 rows in either layout, MKL 2024.2 on an EPYC
gives different bits to equal rows only for 5, 6 and 7 rows whose results are transposed."""
PREFILL_CHUNK, GPU_PREFILL_CHUNK = 128, 2048
"""Tokens of a prompt that are read between two decoding steps. On a GPU the launches of a pass take
some ten milliseconds, in which it could compute about so many tokens of a thousand million
parameters (an estimate from 450 TFLOP/s, not timed)."""
GREEDY = Sampling(temperature=0.0)


def row_buckets(rows: int) -> tuple[int, ...]:
    """The numbers of rows that a step may have, the last one ``rows``.

    >>> row_buckets(32), row_buckets(3)
    ((1, 2, 4, 8, 16, 32), (1, 2, 3))
    """
    return (*(2**i for i in range((rows - 1).bit_length())), rows)


@dataclass(eq=False)
class Row:
    """A sequence in the batch: its row, how many tokens were read, and the one to read next."""

    index: int
    length: int
    token: int
    """-1 for the one that the last step has drawn on the device."""
    end: int
    """How many tokens it reads at most."""
    sampling: Sampling
    seed: int


class NewRow(NamedTuple):
    """A sequence that joins: the number of its prompt in a prefill, and the token that follows it.

    It reads ``end`` tokens at most, None for as many as the context holds. A recorded step draws
    its tokens by ``sampling``, without penalties and bias, and ``seed``.
    """

    number: int
    token: int
    end: int | None = None
    sampling: Sampling = GREEDY
    seed: int = 0


class LaunchedStep(NamedTuple):
    """A step whose tokens are drawn on the device, perhaps not yet."""

    rows: tuple[tuple[Row, int], ...]
    """The sequences that it reads, and the row of each at that time."""
    logits: Tensor
    """(B, V); the next step overwrites them."""
    tokens: PendingTokens


@dataclass
class _Layer:
    """The memory of one layer; its next column goes to ``end``."""

    stores: LayerStores
    capacity: int
    lookback: int
    """How many columns before its own a query sees."""
    end: int


class RowCache:
    """Keys and values of ``rows`` sequences that end at one column.

    A step reads ``length`` columns before its own. With ``every_column`` these are always all of
    the context, else as many as the longest sequence has.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        rows: int,
        dtype: torch.dtype,
        device: torch.device,
        kind: CacheKind,
        every_column: bool,
    ) -> None:
        self.context, self.every_column = config.context, every_column
        self.length = config.context - 1 if every_column else 0
        everything = config.context - 1
        seen = [lookback(config, layer) for layer in range(config.layers)]
        lookbacks = [everything if n is None else min(n, everything) for n in seen]
        capacities = [n + slack(n) for n in lookbacks]
        stores, self.work = allocate_stores(
            config, capacities, batch=rows, dtype=dtype, device=device, kind=kind
        )
        for x in (x for layer in stores for store in layer for x in store.buffers()):
            x.zero_()  # a masked column has weight zero, and zero times NaN would be NaN
        self.layers = [
            _Layer(layer, capacity, n, end=n if every_column else 0)
            for layer, capacity, n in zip(stores, capacities, lookbacks, strict=True)
        ]
        self._first_rows: dict[int, list[LayerStores]] = {rows: stores}

    def append(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Write a column of the first B rows, (B, G, 1, D); returns those that its queries see."""
        here = self.layers[layer]
        seen = min(self.length, here.lookback)
        if here.end == here.capacity:
            self._move(here, seen)
        keys, values = self._stores(k.shape[0])[layer]
        keys.write(here.end, k)
        values.write(here.end, v)
        here.end += 1
        first = here.end - 1 - seen
        return keys.read(first, here.end), values.read(first, here.end)

    def advance(self, positions: int) -> None:
        """Nothing: layers count their columns, and the length follows from the rows."""

    def set_length(self, longest: int) -> None:
        """The number of columns before its own that the next step reads."""
        if not self.every_column:
            self.length = longest

    def copy_row(
        self, row: int, source: KVCache, source_row: int, tokens: int, *, stop: int | None = None
    ) -> None:
        """Copy ``tokens`` columns of a sequence of another cache into the last ones of ``row``.

        They are those before ``stop``, the last ones by default.
        """
        for here, there in zip(self.layers, source.layers, strict=True):
            n = min(tokens, here.lookback)
            end = (source.length if stop is None else stop) - there.first_slot
            if here.end < n:
                self._move(here, n)
            for mine, theirs in zip(here.stores, (there.keys, there.values), strict=True):
                for x, y in zip(mine.buffers(), theirs.buffers(), strict=True):
                    x[row].narrow(1, here.end - n, n).copy_(y[source_row].narrow(1, end - n, n))

    def move_row(self, row: int, to: int, tokens: int) -> None:
        """Copy the last ``tokens`` columns of a row into another."""
        for here in self.layers:
            n = min(tokens, here.lookback)
            for x in (x for store in here.stores for x in store.buffers()):
                x[to].narrow(1, here.end - n, n).copy_(x[row].narrow(1, here.end - n, n))

    def clear_row(self, row: int) -> None:
        """Overwrite a row with zeros: columns that are not finite would spoil its next sequence."""
        for x in (x for here in self.layers for store in here.stores for x in store.buffers()):
            x[row].zero_()

    @property
    def bytes(self) -> int:
        """All memory of the cache, the work space included."""
        stores = sum(store.bytes for here in self.layers for store in here.stores)
        return stores + sum(x.numel() * x.element_size() for x in self.work)

    def _move(self, here: _Layer, end: int) -> None:
        """Move the columns of a layer that are still seen, so that they end at ``end``."""
        seen = min(self.length, here.lookback, end)
        for store in here.stores:
            store.slide(here.end - seen, here.end, end - seen)
        here.end = end

    def _stores(self, B: int) -> list[LayerStores]:
        if B not in self._first_rows:
            self._first_rows[B] = [
                LayerStores(here.stores.keys.first_rows(B), here.stores.values.first_rows(B))
                for here in self.layers
            ]
        return self._first_rows[B]


class Prefill:
    """Reads prompts into a cache of their own, ``PREFILL_CHUNK`` tokens per call of ``read``.

    Several prompts are padded on the left to the longest.
    """

    def __init__(
        self,
        model: Transformer,
        prompts: Sequence[Sequence[int]],
        *,
        cache: CacheKind = "model",
        chunk: int = PREFILL_CHUNK,
    ) -> None:
        self.model, self.prompts, self.chunk = model, prompts, chunk
        ids, self.token_mask_BT = pad_prompts(
            [torch.tensor(prompt, device=model.lm_head_weight.device) for prompt in prompts]
        )
        self._begin(ids, model.config, cache)

    def _begin(self, ids_BT: Tensor, config: ModelConfig, cache: CacheKind) -> None:
        table, self.ids_BT = self.model.lm_head_weight, ids_BT
        B, T = ids_BT.shape
        self.cache = KVCache(
            config, batch=B, positions=T, dtype=table.dtype, device=table.device, kind=cache
        )
        self._hidden_BTM = table.new_empty(B, 0, table.shape[1])

    @property
    def done(self) -> bool:
        """Whether all tokens were read."""
        return self.cache.length == self.ids_BT.shape[1]

    @property
    def at_last_chunk(self) -> bool:
        """Whether the next call of ``read`` is the last."""
        return self.cache.length + self.chunk >= self.ids_BT.shape[1]

    def read(self, observe: Observer | None = None) -> int:
        """Read the next chunk; returns how many tokens were computed.

        ``observe`` as in the forward pass of the model.
        """
        start = self.cache.length
        ids_BT, mask_BT = self.ids_BT[:, start : start + self.chunk], self.token_mask_BT
        with sdpa_kernel(NO_PLANS) if ids_BT.is_cuda else nullcontext():
            self._hidden_BTM = self.model(
                ids_BT,
                cache=self.cache,
                token_mask_BS=None if mask_BT is None else mask_BT[:, : start + ids_BT.shape[1]],
                observe=observe,
                return_hidden=True,
            )
        return ids_BT.numel()

    @property
    def hidden_TM(self) -> Tensor:
        """What the LM head takes at the tokens of the last chunk of a single prompt."""
        assert len(self.prompts) == 1
        return self._hidden_BTM[0]

    @property
    def last_hidden_PM(self) -> Tensor:
        """What the LM head takes at the last token of every prompt."""
        return self._hidden_BTM[:, -1]

    def copy_into(self, cache: RowCache, row: int, number: int) -> None:
        """Copy the keys and values of a prompt into a row."""
        cache.copy_row(row, self.cache, number, len(self.prompts[number]))


class PackedPrefill(Prefill):
    """Prompts one after another, without padding, in a cache of one sequence.

    Several are read at once; a single one chunk by chunk. ``scored`` where ``hidden_TM`` is needed.
    """

    def __init__(
        self,
        model: Transformer,
        prompts: Sequence[Sequence[int]],
        *,
        forward: PackedForward,
        cache: CacheKind = "model",
        chunk: int = PREFILL_CHUNK,
        scored: bool = False,
    ) -> None:
        self.model, self.prompts, self.forward = model, prompts, forward
        self.scored = scored
        self._stops = [*accumulate(map(len, prompts))]
        self.chunk = chunk if len(prompts) == 1 else self._stops[-1]
        ids = torch.tensor([[token for prompt in prompts for token in prompt]])
        self._begin(ids, forward.unlimited, cache)

    def read(self, observe: Observer | None = None) -> int:
        """Read the next chunk; returns how many tokens were computed.

        ``observe`` as in the forward pass of the model, of a single prompt.
        """
        start = self.cache.length
        token_N = self.ids_BT[0, start : start + self.chunk]
        N = len(token_N)
        spans = [(stop - len(p), stop) for p, stop in zip(self.prompts, self._stops, strict=True)]
        queries, keys = spans, spans
        position_N = torch.cat([torch.arange(len(prompt)) for prompt in self.prompts])
        if len(spans) == 1:
            queries, keys = [(0, N)], [(0, start + N)]
            position_N = position_N[start : start + N]

        def attend_prompts(layer: int, q_NHD: Tensor, k_NGD: Tensor, v_NGD: Tensor) -> Tensor:
            q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (q_NHD, k_NGD, v_NGD))
            k, v = self.cache.append(layer, k, v)
            if observe is not None:
                observe(layer, q, k, v)
            settings, parts = self.forward.attention[layer], []
            for (first, last), (begin, end) in zip(queries, keys, strict=True):
                seen = k[:, :, begin:end], v[:, :, begin:end]
                parts.append(attend(q[:, :, first:last], *seen, **settings)[0].transpose(0, 1))
            return torch.cat(parts).flatten(1)

        ends = [stop - 1 - start for stop in self._stops if stop <= start + N]
        wanted = None if self.scored else ends
        self._hidden_BTM = self.forward(token_N, position_N, attend_prompts, wanted).unsqueeze(0)
        self.cache.advance(N)
        return N

    @property
    def last_hidden_PM(self) -> Tensor:
        """What the LM head takes at the last token of every prompt."""
        return self._hidden_BTM[:, -1] if self.scored else self._hidden_BTM[0]

    def copy_into(self, cache: RowCache, row: int, number: int) -> None:
        """Copy the keys and values of a prompt into a row."""
        stop = self._stops[number]
        cache.copy_row(row, self.cache, 0, len(self.prompts[number]), stop=stop)


def attend_row_by_row(_: int, call: AttentionCall) -> Tensor | None:
    """The attention of a layer by one call per row; None for softmax, whose rows are independent.

    For ``attention_override`` of the forward pass: q (B, H, T, D), k and v (B, G, S, D).
    """
    q, k, v, spec = call
    if isinstance(spec.choice, Softmax):
        return None
    B, H, T, _ = q.shape
    wide = torch.promote_types(q.dtype, torch.float32)
    assert spec.prior is not None  # a decoder has a causal mask at least
    log_u = spec.prior.log(T, k.shape[2], B=B, H=H, device=q.device, dtype=wide)
    rows = []
    for b in range(B):
        row = slice(b, b + 1)
        prior = Dense(log_u[row if len(log_u) > 1 else slice(1)])
        rows.append(attend(q[row], k[row], v[row], **replace(spec, prior=prior)))
    return torch.cat(rows)


class ContinuousBatch:
    """Up to ``rows`` sequences of up to ``context`` tokens that decode together."""

    def __init__(
        self,
        model: Transformer,
        *,
        rows: int,
        invariant: bool = False,
        cache: CacheKind = "model",
        record: Record | None = "auto",
    ) -> None:
        if model.config.kind != "decoder":
            raise ValueError(f"a model of kind={model.config.kind!r} does not decode by itself.")
        if rows < 1:
            raise ValueError(f"rows={rows} should be at least 1.")
        if invariant and model.config.experts:
            raise ValueError(
                "experts compute as many tokens at once as choose them, so that other requests "
                "change the rounding; serve this model without invariant."
            )
        self.model, self.context, self.invariant = model, model.config.context, invariant
        table = model.lm_head_weight
        self.device, self.kind = table.device, cache
        self._uses_cpu_step = why_not_cpu_step(model) is None
        self._cpu_steps: dict[int, CpuStep] = {}
        recorded = self._records(record)
        self._packed = None if recorded else PackedForward.of(model)
        self.dtype = table.dtype if self._packed is None else torch.float32
        """That of keys and values as a step reads them."""
        self.buckets = row_buckets(rows)
        if invariant:
            self.buckets = (-(-rows // INVARIANT_MULTIPLE) * INVARIANT_MULTIPLE,)
        self.prefill_chunk = GPU_PREFILL_CHUNK if table.is_cuda else PREFILL_CHUNK
        self.recorded: RecordedRows | None = None
        """The recorded steps, which draw tokens on the device."""
        self.cache: RowCache | StaticCache
        if recorded:
            self.recorded = RecordedRows(model, self.buckets)
            self.cache = self.recorded.cache
        else:
            self.cache = RowCache(
                model.config,
                rows=self.buckets[-1],
                dtype=self.dtype,
                device=table.device,
                kind=cache,
                every_column=invariant and self._packed is None and not self._uses_cpu_step,
            )
        self.rows: list[Row | None] = [None] * rows
        self._changed = self._arrived = False
        """Whether the lengths of rows, or their settings, are not yet those on the device."""

    def _records(self, record: Record | None) -> bool:
        """Whether steps are recorded; raises where "graph" cannot be."""
        if record == "graph" and (self.invariant or self.kind != "model"):
            raise ValueError("recorded steps need a cache of the model's dtype, and no invariant.")
        return (
            not self.invariant
            and self.kind == "model"
            and use_recorded_step(
                self.model, record, cache=self.kind, padded=False, draft=0, tokens=AUTO_TOKENS
            )
        )

    @property
    def active(self) -> list[Row]:
        """The sequences, by row."""
        return [row for row in self.rows if row is not None]

    @property
    def free(self) -> int:
        """How many more sequences can join."""
        return self.rows.count(None)

    @property
    def columns(self) -> int:
        """Columns before its own that the next step reads: the length of the longest sequence."""
        return max((row.length for row in self.active), default=0)

    def prefill(self, prompts: Sequence[Sequence[int]], *, scored: bool = False) -> Prefill:
        """A pass over prompts that may ``join``; several need ``fits``.

        ``scored`` for a single prompt whose ``hidden_TM`` is needed.
        """
        if self._packed is None:
            return Prefill(self.model, prompts, cache=self.kind, chunk=self.prefill_chunk)
        return PackedPrefill(
            self.model,
            prompts,
            forward=self._packed,
            cache=self.kind,
            chunk=self.prefill_chunk,
            scored=scored or self.invariant,  # the shapes of a prompt do not depend on its requests
        )

    def fits(self, lengths: Sequence[int]) -> bool:
        """Whether prompts of these lengths are read together: what is computed is one chunk."""
        padded = len(lengths) * max(lengths)
        return (padded if self._packed is None else sum(lengths)) <= self.prefill_chunk

    def logits(self, hidden_NM: Tensor) -> Tensor:
        """The LM head, on what a prefill returns: (N, M) -> (N, V)."""
        if self._packed is None:
            return self.model.logits(hidden_NM)
        return self._packed.logits(hidden_NM)

    def warm_up(self) -> None:
        """Make a step in every bucket, so that no request pays for what a first step allocates."""
        if self.recorded is not None:
            self.recorded.record()
            for B in self.buckets:
                self.recorded.step(B)
                self.recorded.step(B, longest=1)
            return
        for B in self.buckets:
            logits_BV = self._forward([0] * B, [1] * B)
        if self.invariant and not bool((logits_BV == logits_BV[:1]).all()):
            raise ValueError(
                f"equal rows of a step of {B} have different bits on this machine; "
                "serve without invariant, or with another number of rows."
            )

    def join(self, prefill: Prefill, members: Sequence[NewRow]) -> list[Row]:
        """Add sequences, each after a prompt of a finished prefill; there are free rows for all."""
        if self.recorded is not None:
            self.recorded.record()
        free = [index for index, row in enumerate(self.rows) if row is None]
        joined = []
        for new, index in zip(members, free, strict=False):
            length = len(prefill.prompts[new.number])
            end = self.context if new.end is None else min(new.end, self.context)
            joined.append(Row(index, length, new.token, end, new.sampling, new.seed))
        assert len(joined) == len(members)
        if isinstance(self.cache, StaticCache):
            rows, lengths = [row.index for row in joined], [row.length for row in joined]
            self.cache.copy_rows(rows, prefill.cache, [new.number for new in members], lengths)
        for row, new in zip(joined, members, strict=True):
            if isinstance(self.cache, RowCache):
                prefill.copy_into(self.cache, row.index, new.number)
            self.rows[row.index] = row
            self._update_length()  # the columns of this row stay when the next one is copied
        self._arrived = True
        return joined

    def leave(self, row: Row, *, damaged: bool = False) -> None:
        """Free the row of a sequence; ``damaged`` where its keys may not be finite."""
        self.rows[row.index] = None
        if damaged:
            self.cache.clear_row(row.index)
        self._update_length()

    def fit(self) -> int:
        """The rows of the next step, after sequences of the last rows have moved to free ones."""
        active = self.active
        B = next(bucket for bucket in self.buckets if bucket >= len(active))
        for row in active[::-1]:
            if row.index < B:
                break
            to = self.rows.index(None)
            if self.recorded is None:
                self.cache.move_row(row.index, to, row.length)
            else:
                self.recorded.move_row(row.index, to)
                self._changed = self._arrived = True
            self.rows[row.index], self.rows[to] = None, row
            row.index = to
        return B

    def step(self, observe: Observer | None = None) -> Tensor:
        """Read the token of every sequence; logits (B, V), to be indexed by ``Row.index``.

        ``observe`` as in the forward pass of the model. The next step overwrites the logits.
        """
        if any(row.length >= self.context for row in self.active):
            raise ValueError(f"a sequence has all {self.context} tokens of the context; it leaves.")
        if self.recorded is not None:
            return self.launch(observe).logits
        B = self.fit()
        tokens, lengths = [0] * B, [0] * B
        for row in self.active:
            tokens[row.index], lengths[row.index] = row.token, row.length + 1
        logits_BV = self._forward(tokens, lengths, observe)
        for row in self.active:
            row.length += 1
        self._update_length()
        return logits_BV

    def launch(self, observe: Observer | None = None) -> LaunchedStep:
        """A recorded step of all sequences that are not at their end; the next draws are requested.

        A sequence reads ``Row.token``, or -1 for the token that was drawn for it last; afterwards
        that is -1.
        """
        assert self.recorded is not None
        B = self.fit()
        rows = [row for row in self.active if row.length < row.end]
        # A sequence that reaches its end is free for the device from the next step on.
        if self._changed or len(rows) < len(self.active) or any(row.token >= 0 for row in rows):
            numbers: list[int | None] = [None] * self.buckets[-1]
            tokens = [-1] * len(numbers)
            for row in rows:
                numbers[row.index], tokens[row.index] = row.length, row.token
                row.token = -1
            self.recorded.set_rows(numbers, tokens)
            self._changed = False
        if self._arrived:
            free = (GREEDY, 0)
            settings = [free if row is None else (row.sampling, row.seed) for row in self.rows]
            self.recorded.set_sampling(RowSampling.of(settings))
            self._arrived = False
        longest = max((row.length + 1 for row in rows), default=1)
        logits_BV = self.recorded.step(B, observe, longest=longest)
        for row in rows:
            row.length += 1
        drawn_B = self.recorded.drawn_B[:B]
        # The next step overwrites it, on a GPU after the copy to the host that is requested here.
        drawn = PendingTokens.of(drawn_B if drawn_B.is_cuda else drawn_B.clone())
        return LaunchedStep(tuple((row, row.index) for row in rows), logits_BV, drawn)

    def _forward(
        self, tokens: Sequence[int], lengths: Sequence[int], observe: Observer | None = None
    ) -> Tensor:
        """Logits of B tokens; rows have ``lengths`` tokens with the new one, free rows none."""
        assert isinstance(self.cache, RowCache)
        B, token_B = len(tokens), torch.tensor(tokens, device=self.device)
        one = B == 1 and self._uses_cpu_step and not self.invariant
        if self._packed is not None and not one:
            scale, mask_BS = self.model.config.score_scale, None
            if not self.invariant:
                mask_BS = self._token_mask(lengths)
            attention = StepAttention.masked(self.cache, scale, mask_BS, observe, self.dtype)
            if self.invariant:
                attention = attention._replace(lengths=lengths)
            position_B = torch.tensor(lengths).sub_(1).clamp_(min=0)
            return self._packed.step(token_B, position_B, attention)
        if self._uses_cpu_step:
            if B not in self._cpu_steps:
                copy = self._packed is not None
                self._cpu_steps[B] = CpuStep(self.model, self.cache, batch=B, copy=copy)
            step = self._cpu_steps[B].step
            if self.invariant:
                return step(token_B, None, observe, lengths=lengths)
            return step(token_B, self._token_mask(lengths), observe)
        logits_B1V: Tensor = self.model(
            token_B.unsqueeze(1),
            cache=self.cache,
            token_mask_BS=self._token_mask(lengths),
            observe=observe,
            attention_override=attend_row_by_row if self.invariant else None,
            last=True,
        )
        return logits_B1V[:, 0]

    def _token_mask(self, lengths: Sequence[int]) -> Tensor | None:
        """True at the tokens of every row, the new one included; None where no column is masked."""
        S = self.cache.length + 1
        if not self.invariant and all(n in (0, S) for n in lengths):
            return None  # a free row may attend to whatever is in its columns
        first_B = S - torch.tensor(lengths, device=self.device).clamp_(min=1)
        return torch.arange(S, device=self.device) >= first_B.unsqueeze(-1)

    def _update_length(self) -> None:
        self._changed = True
        if isinstance(self.cache, RowCache):
            self.cache.set_length(self.columns)
