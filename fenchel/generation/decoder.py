"""Rows of sequences that decode together: prompts are read, sequences join, step and leave.

    row = decoder.take(prompt)             a free row, with what its cache has of the prompt already
    x   = decoder.read([row], [tokens])    the rest of the prompt, or a chunk of it
    z   = decoder.step()                   one token of every row that decodes: logits (B, V)
    decoder.leave(row)

It knows nothing of requests, draws and texts (generation/scheduler.py).

**Prefixes.** A row that is left keeps its keys and the ids of their tokens. The next prompt takes
the row that shares the longest beginning with it, and reads only what follows; a beginning that a
row in use has is copied. Of the tokens that were read, the common ones stay. A layer with a window
may have dropped keys of that prefix; then everything is read again. The logits are the same as
without, but for rounding: what single steps have read is not read again as part of a prompt. Rows
that are steered differently (generation/steering.py) have different keys, and share none.

**Context.** Every token is read once, and a row holds as many as the context. ``slide`` begins a
row anew with the newest half: text of any length comes out, each token with at least half a context
before it.

**Buckets.** A step computes 1, 2, 4, 8, 16, ... rows, the fewest that hold all sequences. When the
sequences fit into a smaller bucket, those in the last rows move into free rows before them. A free
row reads token 0, its result is not used, and what that writes is behind the tokens that it keeps.

**Invariance.** Rounding depends on the shapes of the products: the number of rows, of keys, of
tokens in a prefill. With ``invariant`` all of them are fixed or follow from the sequence alone: the
largest bucket; every prompt read alone and from its beginning, in chunks of the same size;
attention row by row over the keys of the row. The logits of a sequence are then the same bits
whatever the other rows do, and in whatever row it is. A library of products may treat the last rows
differently, so the bucket is a multiple of ``INVARIANT_MULTIPLE``, and ``warm_up`` compares all
rows.

**Recorded steps** (generation/fused_step.py) draw tokens on the device: ``launch`` returns before
they are there, and may be called again before they are read.

B rows of a step, T tokens of a prompt, M width of the stream, V vocabulary.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from fenchel.generation.cpu_step import CpuForward
from fenchel.generation.fused_step import (
    PendingTokens,
    RecordedStep,
    StepRecorder,
    capture_graph,
)
from fenchel.generation.kv_cache import SLACK, CacheKind, KVCache
from fenchel.generation.sampling import RowSampling, Sampling
from fenchel.generation.steering import (
    ChoiceTable,
    Steering,
    stacked_choices,
    stacked_vectors,
)
from fenchel.generation.steps import (
    DecodeCall,
    EncoderOutput,
    ModelStep,
    SteeredAttention,
    step_kind,
)
from fenchel.model import Transformer
from fenchel.model.forward_context import Observer

INVARIANT_MULTIPLE = 8
"""Divides the rows of an invariant step. Of 1 to 64 rows in either layout, MKL 2024.2 on an EPYC
gives different bits to equal rows only for 5, 6 and 7 rows whose results are transposed."""
CHUNK, GPU_CHUNK = 128, 2048
"""Tokens of prompts that are read between two steps. On a GPU the launches of a pass take some ten
milliseconds, in which it could compute about so many tokens of a billion parameters (an estimate
from 450 TFLOP/s, not timed)."""
LEAST_COPY = 16
"""Tokens from which a common beginning is copied from a row in use."""
GREEDY = Sampling(temperature=0.0)


def row_buckets(rows: int) -> tuple[int, ...]:
    """The numbers of rows that a step may have, the last one ``rows``.

    >>> row_buckets(32), row_buckets(3)
    ((1, 2, 4, 8, 16, 32), (1, 2, 3))
    """
    return (*(2**i for i in range((rows - 1).bit_length())), rows)


@dataclass(eq=False)
class Row:
    """A sequence in the batch."""

    index: int
    ids: list[int]
    """The tokens that were read, whose keys the cache has."""
    token: int | None = None
    """The one to read next: None while a prompt is read, -1 for the one drawn on the device."""
    end: int = 0
    """How many tokens a recorded step reads at most."""
    left: int = 0
    """Tokens of the sequence before the first of ``ids``."""
    sampling: Sampling = GREEDY
    seed: int = 0
    encoded: Tensor | None = None
    """The output of the encoder, (S, M)."""
    steering: Steering | None = None
    """What is added to its stream."""
    prior: "Row | None" = None
    """The unsteered row whose law limits that of this one, where the device draws."""

    @property
    def length(self) -> int:
        """How many tokens were read."""
        return len(self.ids)


class LaunchedStep(NamedTuple):
    """A step whose tokens are drawn on the device, perhaps not yet."""

    rows: tuple[tuple[Row, int], ...]
    """The sequences that it reads, and the row of each at that time."""
    logits: Tensor
    """(B, V); the next step overwrites them."""
    tokens: PendingTokens


class Decoder:
    """Up to ``rows`` sequences of up to ``positions`` tokens that decode together.

    ``step`` names a kind of step (generation/steps.py). ``tokens`` is how many are to be read where
    that is known, for "auto". ``slack`` is how many of the last tokens can be removed at least from
    layers with windows. Without ``prefixes`` no keys are used again. ``one_bucket`` always computes
    all rows. Recorded steps add vectors to the stream after the layers ``steered``, from 1.
    """

    def __init__(
        self,
        model: Transformer,
        *,
        rows: int = 1,
        cache: CacheKind = "model",
        invariant: bool = False,
        step: str = "auto",
        tokens: int | None = None,
        positions: int | None = None,
        chunk: int | None = None,
        slack: int = 0,
        prefixes: bool = True,
        one_bucket: bool = False,
        steered: Collection[int] = (),
        record: StepRecorder = capture_graph,
    ) -> None:
        if model.config.kind == "encoder":
            raise ValueError("an encoder reads whole texts and cannot continue one; use a decoder.")
        if rows < 1:
            raise ValueError(f"rows={rows} should be at least 1.")
        call = DecodeCall(model, cache, invariant, rows, tokens, record)
        self.kind = step_kind(call, step)
        self.model, self.invariant, self._record = model, invariant, record
        self.steered = frozenset(steered)
        plain = model.config.kind == "decoder" and not model.config.has_delta
        self.prefixes = prefixes and not invariant and plain  # a state has no beginning to keep
        self.context = min(model.config.context, positions or model.config.context)
        self.buckets = (rows,) if one_bucket else row_buckets(rows)
        if invariant:
            self.buckets = (-(-rows // INVARIANT_MULTIPLE) * INVARIANT_MULTIPLE,)
        table = model.lm_head_weight
        self.device = table.device
        self.chunk = chunk or (GPU_CHUNK if table.is_cuda else CHUNK)
        on_cpu = self.kind.name in ("cpu", "packed")
        self.cache = KVCache(
            model.config,
            batch=self.buckets[-1],
            positions=self.context,
            dtype=torch.float32 if on_cpu and table.dtype.itemsize < 4 else table.dtype,
            device=table.device,
            kind=cache,
            slack=0 if self.kind.name == "fused" else max(SLACK, slack),
            kernel_layout=self.kind.name == "fused",
        )
        self.forward: ModelStep | CpuForward = ModelStep(model, invariant=invariant)
        if on_cpu:
            packed = self.kind.name == "packed"
            self.forward = CpuForward(model, packed=packed, invariant=invariant)
        self.rows: list[Row | None] = [None] * rows
        self._kept: list[list[int]] = [[] for _ in range(self.buckets[-1])]
        """The ids whose keys are in every row of the cache, in use or not."""
        self._steered_by: list[bytes | None] = [None] * self.buckets[-1]
        """What those keys were steered by (``Steering.key``)."""
        self._views: dict[int, KVCache] = {}
        self._left_at = [0] * rows
        self._leaves = 0
        self._recorded: RecordedStep | None = None
        self._changed = self._arrived = True
        """Whether the numbers of rows, or their settings, are not yet those on the device."""
        self._encoded: tuple[tuple[Row | None, ...], EncoderOutput] | None = None

    @property
    def active(self) -> list[Row]:
        """The sequences that decode, by row."""
        return [row for row in self.rows if row is not None and row.token is not None]

    @property
    def free(self) -> int:
        """How many more sequences can be taken."""
        return self.rows.count(None)

    @property
    def columns(self) -> int:
        """The length of the longest sequence."""
        return max((row.length for row in self.active), default=0)

    def forget(self) -> None:
        """Keep no keys of rows that are free: a pass that was cut off may have changed them."""
        self._kept = [
            [] if index >= len(self.rows) or self.rows[index] is None else ids
            for index, ids in enumerate(self._kept)
        ]

    def attach(self, model: Transformer) -> None:
        """Read prompts by this model, whose weights the fused step has."""
        self.model, self.forward = model, ModelStep(model)

    def detach(self) -> None:
        """Hold no reference to the model until ``attach``."""
        self.forget()
        del self.model, self.forward

    # Prompts

    def take(
        self, prompt: Sequence[int], *, reuse: bool = True, steering: Steering | None = None
    ) -> Row:
        """A free row for a sequence that begins with ``prompt``; there is one.

        Its ids are those of the prompt that need not be read, never all of them.
        """
        if self.kind.recorded:  # recording runs steps, which write into rows without a sequence
            self._recorded_step()
        free = [index for index, row in enumerate(self.rows) if row is None]
        common = self._common(prompt, steering) if reuse else [0] * len(self._kept)
        to = max(free, key=lambda i: (common[i], -self._left_at[i], -i))
        source = max(range(len(self.rows)), key=lambda i: common[i])
        if common[source] > common[to] and common[source] >= LEAST_COPY:
            self.cache.copy_row(source, to)
            common[to] = common[source]
        row = Row(to, list(prompt[: common[to]]), steering=steering)
        self.rows[to], self._kept[to] = row, row.ids
        self._steered_by[to] = None if steering is None else steering.key
        self._changed = True
        return row

    def reusable(self, prompt: Sequence[int], steering: Steering | None = None) -> int:
        """How many tokens of a prompt need not be read."""
        common = self._common(prompt, steering)
        free = [n for n, row in zip(common, self.rows, strict=False) if row is None]
        best = max(common)
        return max(best if best >= LEAST_COPY else 0, *free, 0)

    def _common(self, prompt: Sequence[int], steering: Steering | None) -> list[int]:
        """Tokens of a prompt, without its last, that each row has and can go back to."""
        key = None if steering is None else steering.key
        if not self.prefixes:
            return [0] * len(self._kept)
        counts = []
        for kept, steered_by in zip(self._kept, self._steered_by, strict=True):
            most = min(len(kept), len(prompt) - 1) if steered_by == key else 0
            pairs = enumerate(zip(kept, prompt, strict=False))
            n = min(most, next((i for i, (old, new) in pairs if old != new), most))
            counts.append(n if n and self.cache.can_rewind(n, len(kept)) else 0)
        return counts

    def fits(self, rows: Sequence[tuple[int, int]]) -> bool:
        """Whether prompts are read together: pairs of tokens that a row has, and tokens to read.

        What is computed is one chunk at most; the model needs rows of the same length.
        """
        lengths = [new for _, new in rows]
        if isinstance(self.forward, CpuForward):
            return sum(lengths) <= self.chunk
        return len({old for old, _ in rows}) == 1 and len(rows) * max(lengths) <= self.chunk

    def encode(self, row: Row, source: Sequence[int]) -> None:
        """Run the encoder of an encoder-decoder on the source of one row."""
        row.encoded = self.model.encode(torch.tensor([source], device=self.device))[0]

    def read(
        self,
        rows: Sequence[Row],
        parts: Sequence[Sequence[int]],
        *,
        every: bool = False,
        observe: Observer | None = None,
    ) -> Tensor:
        """Read more tokens of some rows; what the LM head takes at the last of each.

        With ``every``, for one row, at all of its tokens. -> (P or T, M)
        """
        starts = [row.length for row in rows]
        self._changed = True
        steerings, like = [row.steering for row in rows], self.model.embed.weight
        choices = self._choices(rows)
        if isinstance(self.forward, CpuForward):
            caches = [
                self.cache.select([row.index], [n]) for row, n in zip(rows, starts, strict=True)
            ]
            steer = stacked_vectors(steerings, like, [len(part) for part in parts])
            x = self.forward.read(
                caches, parts, every=every, observe=observe, steer=steer, choices=choices
            )
        else:
            encoded = None
            if rows[0].encoded is not None:
                encoded = EncoderOutput(rows[0].encoded.unsqueeze(0))
            cache = self.cache.select([row.index for row in rows], starts)
            steer = stacked_vectors(steerings, like)
            x = self.forward.read(
                cache,
                parts,
                every=every,
                observe=observe,
                encoded=encoded,
                steer=steer,
                choices=choices,
            )
        for row, part in zip(rows, parts, strict=True):
            row.ids += part
        return x

    def logits(self, hidden_NM: Tensor) -> Tensor:
        """The LM head, on what ``read`` returns: (N, M) -> (N, V)."""
        return self.forward.logits(hidden_NM)

    def copy(self, row: Row) -> Row:
        """Another row with the same tokens; there is a free one."""
        to = self.rows.index(None)
        self.cache.copy_row(row.index, to)
        other = Row(to, [*row.ids], left=row.left, encoded=row.encoded, steering=row.steering)
        self.rows[to], self._kept[to] = other, other.ids
        self._steered_by[to] = self._steered_by[row.index]
        self._changed = True
        return other

    def rewind(self, row: Row, length: int) -> None:
        """Remove the tokens of a row after the first ``length``."""
        if not self.cache.can_rewind(length, row.length):
            raise ValueError(f"a row of {row.length} tokens cannot go back to {length}.")
        del row.ids[length:]
        self._changed = True

    def slide(self, row: Row, ids: Sequence[int]) -> list[int]:
        """Empty a full row; returns what it is to read, half a context of the newest ids."""
        row.ids.clear()
        newest = list(ids[-max(1, self.context // 2) :])
        row.left, row.token = len(ids) - len(newest), None
        self._changed = True
        return newest

    def leave(self, row: Row, ids: Sequence[int] = (), *, damaged: bool = False) -> None:
        """Free the row of a sequence; ``damaged`` where its keys may not be finite.

        ``ids`` is the whole sequence, whose tokens a recorded step has read without the host.
        """
        self.rows[row.index] = None
        if self.kind.recorded:
            row.ids[:] = ids[: min(row.length, self.context - 1)]
        if damaged:
            self.cache.clear_row(row.index)
        if damaged or row.left or not self.prefixes:
            self._kept[row.index] = []
        self._leaves += 1
        self._left_at[row.index] = self._leaves
        self._changed = True

    def arrived(self) -> None:
        """The settings of a row are new."""
        self._changed = self._arrived = True

    # Steps

    def warm_up(self) -> None:
        """Make a step in every bucket, so that no request pays for what a first step allocates."""
        if self.model.config.kind != "decoder":
            return
        if self.kind.recorded:
            recorded = self._recorded_step()
            for B in self.buckets:
                for longest in (1, self.context):
                    recorded.step(B, longest=longest)
            return
        for B in self.buckets:
            tokens = torch.zeros(B, dtype=torch.long, device=self.device)
            logits_BV = self.forward.step(self._view(B, [0] * B), tokens)
        if self.invariant and not bool((logits_BV == logits_BV[:1]).all()):
            raise ValueError(
                f"equal rows of a step of {B} have different bits on this machine; "
                "serve without invariant, or with another number of rows."
            )

    def fit(self) -> int:
        """The rows of the next step, after sequences of the last rows have moved to free ones."""
        decoding = self.active
        B = next(bucket for bucket in self.buckets if bucket >= len(decoding))
        if not decoding or decoding[-1].index < B:
            return B
        for row in decoding[::-1]:
            if row.index < B:
                break
            if None not in self.rows[:B]:  # a prompt that is being read has a row in between
                return next(bucket for bucket in self.buckets if bucket > row.index)
            free = (index for index in range(B) if self.rows[index] is None)
            to = min(free, key=lambda index: len(self._kept[index]))
            self.cache.copy_row(row.index, to)
            if self._recorded is not None:  # the token drawn last may be on the device only
                self._recorded.rows.token[to] = self._recorded.rows.token[row.index]
            self._kept[row.index], self._kept[to] = [], row.ids
            self._steered_by[to] = self._steered_by[row.index]
            self.rows[row.index], self.rows[to] = None, row
            row.index = to
            self._changed = self._arrived = True
        return B

    def step(self, observe: Observer | None = None) -> Tensor:
        """Read the token of every sequence; logits (B, V), to be indexed by ``Row.index``.

        ``observe`` as in the forward pass of the model. The next step overwrites the logits.
        """
        if self.kind.recorded:
            return self.launch(observe).logits
        B, active = self.fit(), self.active
        tokens = [0] * B
        for row in active:
            if row.length >= self.context:
                raise ValueError(f"a sequence has all {self.context} tokens of the context.")
            tokens[row.index] = row.token or 0
        token_B = torch.tensor(tokens, device=self.device)
        rows, steer, choices = self._rows(B), None, None
        if any(row.steering is not None for row in active):
            steerings = [None if row is None else row.steering for row in rows]
            steer = stacked_vectors(steerings, self.model.embed.weight)
            choices = self._choices(rows)
        if isinstance(self.forward, CpuForward):
            logits_BV = self.forward.step(self.view(B), token_B, observe, steer, choices)
        else:
            encoded, view = self._encoder_outputs(B)
            view.live = [row is not None and row.token is not None for row in rows]
            logits_BV = self.forward.step(view, token_B, observe, encoded, steer, choices)
        for row in active:
            row.ids.append(row.token or 0)
        return logits_BV

    def _rows(self, B: int) -> list[Row | None]:
        """The sequences of the first B rows."""
        return [*self.rows, *[None] * (B - len(self.rows))][:B]

    def _choices(self, rows: Sequence[Row | None]) -> ChoiceTable | None:
        pairs = [(None, 0) if row is None else (row.steering, row.left) for row in rows]
        return stacked_choices(pairs, self.model.config.heads)

    def view(self, B: int) -> KVCache:
        """The first B rows of the cache with the numbers of tokens that they have now."""
        if self.kind.recorded:
            return self._recorded_step().caches[B]
        starts = self._numbers()[:B]
        for index in range(B):
            row = self.rows[index] if index < len(self.rows) else None
            if row is None and not (starts[index] or self.invariant):
                starts[index] = self.columns  # as long as the others: one mask less
        return self._view(B, starts)

    def _numbers(self) -> list[int]:
        """How many tokens the rows have, each with a slot behind them that a step may write.

        A row that does not decode may be full: what a step writes for it is in its last slot.
        """
        for index, row in enumerate(self.rows):
            if row is None:
                del self._kept[index][self.context - 1 :]
        return [min(len(kept), self.context - 1) for kept in self._kept]

    def _view(self, B: int, starts: list[int]) -> KVCache:
        if B not in self._views:
            self._views[B] = self.cache.select(slice(0, B), starts, per_row=self.invariant)
        self._views[B].restart(starts)
        return self._views[B]

    def _encoder_outputs(self, B: int) -> tuple[EncoderOutput | None, KVCache]:
        """The outputs of the encoder for B rows, and a cache with their keys and values."""
        view = self.view(B)
        if self.model.config.kind == "decoder":
            return None, view
        rows = tuple(self.rows[:B])
        if self._encoded is None or self._encoded[0] != rows:
            some = next(row.encoded for row in rows if row is not None and row.encoded is not None)
            each = [some[:1] if r is None or r.encoded is None else r.encoded for r in rows]
            self._encoded = rows, EncoderOutput.stack(each)
            view.clear_cross_kv()
        return self._encoded[1], view

    def launch(self, observe: Observer | None = None) -> LaunchedStep:
        """A recorded step of all sequences that are not at their end; the next draws are requested.

        A sequence reads ``Row.token``, or -1 for the token that was drawn for it last; afterwards
        that is -1.
        """
        recorded, B = self._recorded_step(), self.fit()
        rows = [row for row in self.active if row.length < row.end]
        # A sequence that reaches its end is free for the device from the next step on.
        ending = len(rows) < len(self.active)
        if self._changed or ending or any(row.token != -1 for row in rows):
            numbers, tokens = self._numbers(), [-1] * self.buckets[-1]
            left, on = [0] * len(numbers), [False] * len(numbers)
            for row in rows:
                left[row.index], on[row.index] = row.left, True
                tokens[row.index] = -1 if row.token is None else row.token
                row.token = -1
            recorded.set_rows(numbers, left, on, tokens)
            self._changed = False
        if self._arrived:
            free = (GREEDY, 0)
            settings = [free if row is None else (row.sampling, row.seed) for row in self.rows]
            budgets = {
                row.index: (row.prior.index, row.steering.budget)
                for row in self.active
                if row.prior is not None and row.steering is not None and row.steering.budget
            }
            recorded.set_sampling(RowSampling.of(settings, budgets))
            if self.steered:
                like = self.model.embed.weight
                steerings = [None if row is None else row.steering for row in self.rows]
                recorded.set_vectors(stacked_vectors(steerings, like) or {})
            self._arrived = False
        longest = max((row.length + 1 for row in rows), default=1)
        choices, override = self._choices(self._rows(B)), None
        if choices is not None:
            override = SteeredAttention(choices, recorded.caches[B])
        if observe is None and override is None:
            logits_BV = recorded.step(B, longest=longest)
        else:
            logits_BV = recorded.model_step(self.model, B, observe, override)
        for row in rows:
            row.ids.append(-1)  # until its token is read
        drawn = PendingTokens.of(recorded.rows.drawn[:B])
        return LaunchedStep(tuple((row, row.index) for row in rows), logits_BV, drawn)

    def _recorded_step(self) -> RecordedStep:
        if self._recorded is None:
            self._recorded = RecordedStep(
                self.model,
                self.cache,
                self.buckets,
                fused=self.kind.name == "fused",
                steered=self.steered,
                record=self._record,
            )
        return self._recorded
