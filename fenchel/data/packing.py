"""Documents to batches: whole documents side by side in rows of T positions, none mixed.

A document of n tokens has n - 1 positions: at each, an input and the token after it. Documents of
up to T positions stay whole. A longer one is divided; the parts after the first begin with the
tokens that begin every text (b of them), and then with the last input of the part before, so that
every token of the document is a target exactly once:

    part 0     d_0 ... d_{T-1}                        targets d_1 ... d_T
    part k     begin, d_s ... d_{s+T-b-1}             targets -100 ..., d_{s+1} ... d_{s+T-b}

or it is cut off (``divide=False``), as a chat is, whose later half is no conversation of its own.

Parts are packed into rows by best fit, the longest first: a part goes into the row with the least
room that it fits into. ``Batch.segments`` numbers the parts of a row; a model that attends within
a segment and counts positions from its beginning reads each as if it stood alone, so which parts
share a row has no effect on a loss and the rows are made once. Their order in an epoch comes from
the Philox generator with the key (seed, epoch): the batch of a step is a function of the seed and
the step alone. Places that no part fills hold ``pad`` and have no target.
"""

from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch

from fenchel.data.batches import Batch
from fenchel.data.document_tokens import DocumentIds
from fenchel.data.tokens import Ids

IGNORED = -100
"""The target of a position whose next token is not to be predicted, as in torch."""


class _Part(NamedTuple):
    """A part of a document."""

    start: int
    """Of its first input, among all ids."""
    length: int
    """Inputs, without those that begin a text."""
    continues: bool
    """Whether it begins with the tokens that begin a text, put before its own."""


class PackedBatches:
    """Batches of ``batch`` rows of ``context`` positions, by step.

    >>> documents = DocumentIds(np.arange(9), np.array([0, 4, 6, 9]))
    >>> batches = PackedBatches(documents, batch=1, context=4, seed=0)
    >>> row = batches.rows[0]
    >>> row.inputs.tolist(), row.segments.tolist()
    ([0, 1, 2, 4], [0, 0, 0, 1])
    """

    def __init__(
        self,
        documents: DocumentIds,
        *,
        batch: int,
        context: int,
        seed: int,
        begin: Sequence[int] = (),
        pad: int = 0,
        divide: bool = True,
    ) -> None:
        for name, size in (("batch", batch), ("context", context)):
            if size < 1:
                raise ValueError(f"{name}={size} should be at least 1.")
        if not 0 <= seed < 2**64:
            raise ValueError(f"seed={seed} is outside 0 to 2^64 - 1.")
        if context <= len(begin) and divide:
            raise ValueError(
                f"context={context} has no room beside the {len(begin)} tokens that begin a text."
            )
        self.documents, self.batch, self.context, self.seed = documents, batch, context, seed
        self.begin, self.pad = tuple(begin), pad
        self.cut_off = 0
        """Targets beyond the ends of documents that were not divided."""
        parts = self._parts(divide)
        if not parts:
            raise ValueError("no document of the text has a token to predict; use more text.")
        self.targets = sum(map(self._targets, parts))
        """Tokens that are predicted in an epoch."""
        self.rows = _Rows(self, pack([self._size(part) for part in parts], context), parts)
        self._order = lru_cache(maxsize=2)(self._draw)  # a batch rarely spans more than two

    def at(self, step: int) -> Batch:
        """The batch of a step: (batch, context)."""
        if step < 0:
            raise ValueError(f"step={step} should be at least 0.")
        examples = range(step * self.batch, (step + 1) * self.batch)
        numbers = [divmod(example, len(self.rows)) for example in examples]
        return stack([self.rows[int(self._order(epoch)[at])] for epoch, at in numbers])

    def in_order(self) -> Iterator[Batch]:
        """Every row once, in batches: what an evaluation reads."""
        for first in range(0, len(self.rows), self.batch):
            last = min(first + self.batch, len(self.rows))
            yield stack([self.rows[number] for number in range(first, last)])

    def _parts(self, divide: bool) -> list[_Part]:
        T, b, parts = self.context, len(self.begin), []
        scored = self.documents.scored
        starts = self.documents.starts.tolist()
        for start, stop in pairwise(starts):
            positions = stop - start - 1
            whole = [_Part(start, min(T, positions), continues=False)]
            if divide:
                whole += [
                    _Part(at, min(T - b, stop - 1 - at), continues=True)
                    for at in range(start + T, stop - 1, T - b)
                ]
            elif positions > T:
                beyond = slice(start + T + 1, stop)
                self.cut_off += positions - T if scored is None else int(scored[beyond].sum())
            parts += [part for part in whole if self._targets(part)]
        return parts

    def _targets(self, part: _Part) -> int:
        scored = self.documents.scored
        first, last = part.start + 1, part.start + part.length + 1
        return part.length if scored is None else int(scored[first:last].sum())

    def _size(self, part: _Part) -> int:
        return part.length + len(self.begin) * part.continues

    def _draw(self, epoch: int) -> Ids:
        """The order of the rows in an epoch."""
        philox = np.random.Philox(key=np.array([self.seed, epoch], dtype=np.uint64))
        return np.argsort(philox.random_raw(len(self.rows)), kind="stable")


class _Rows:
    """The rows of ``PackedBatches``, made when they are read: each a Batch of (T,)."""

    def __init__(self, batches: PackedBatches, rows: list[list[int]], parts: list[_Part]) -> None:
        self.batches, self.numbers, self.parts = batches, rows, parts

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, row: int) -> Batch:
        documents, T = self.batches.documents, self.batches.context
        begin = self.batches.begin
        inputs = np.full(T, self.batches.pad, np.int64)
        targets = np.full(T, IGNORED, np.int64)
        segments = np.full(T, len(self.numbers[row]), np.int64)
        end = 0
        for number, part in enumerate(self.numbers[row]):
            start, length, continues = self.parts[part]
            first = end
            if continues:
                end += len(begin)
                inputs[first:end] = begin
            inputs[end : end + length] = documents.ids[start : start + length]
            after = slice(start + 1, start + length + 1)
            following = documents.ids[after].astype(np.int64)
            if documents.scored is not None:
                following = np.where(documents.scored[after], following, IGNORED)
            targets[end : end + length] = following
            end += length
            segments[first:end] = number
        return Batch(*(torch.from_numpy(part) for part in (inputs, targets, segments)))


def stack(rows: Sequence[Batch]) -> Batch:
    """Rows (T,) to a batch (B, T)."""
    return Batch(*(torch.stack(parts) for parts in zip(*rows, strict=True)))


def pack(sizes: Sequence[int], room: int) -> list[list[int]]:
    """Best fit, the largest first: the numbers of the sizes that share a row of ``room``.

    >>> pack([3, 5, 2, 4], 6)
    [[1], [3, 2], [0]]
    """
    rows: list[list[int]] = []
    rooms: list[int] = []  # that some row has left, sorted
    with_room: dict[int, list[int]] = {}
    for number in sorted(range(len(sizes)), key=lambda n: (-sizes[n], n)):
        size = sizes[number]
        at = bisect_left(rooms, size)
        if at == len(rooms):
            left, row = room, len(rows)
            rows.append([])
        else:
            left = rooms[at]
            row = with_room[left].pop()
            if not with_room[left]:
                del with_room[left], rooms[at]
        rows[row].append(number)
        if left > size:
            if left - size not in with_room:
                insort(rooms, left - size)
            with_room.setdefault(left - size, []).append(row)
    return rows
