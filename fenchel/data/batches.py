"""Ids to batches: what is read at a step is a function of the seed and the step alone.

The N ids are taken as a ring. An epoch tiles it with W = N // context windows of context + 1
tokens, neighbours sharing one token so that no target is predicted twice:

    window j begins at  offset + j * context  (mod N),     j = 0, ..., W - 1

``offset`` and the order of the windows come from the Philox generator with the key
(seed, epoch). Example number e = step * batch + row is window order[e mod W] of epoch e // W,
so that batches run on across the ends of epochs and nothing is left over. To go on from a
step one needs the step: there is no state. Up to context - 1 tokens of an epoch are no
target in it; where they lie changes with the offset.

B rows of a batch, T = context positions.
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from fenchel.data.tokens import Ids


class Batch(NamedTuple):
    """Windows and what follows each position of them; int64, both (B, T)."""

    inputs: Tensor
    targets: Tensor


class EvalBatch(NamedTuple):
    """Windows for evaluation, and which of their targets to count; all (B, T)."""

    inputs: Tensor
    targets: Tensor
    scored: Tensor
    """True where the target is counted here; elsewhere it is context, counted before."""


class Batches:
    """Batches of ``batch`` windows of ``context`` tokens.

    With ``world`` processes each takes its own rows of the same global batch.
    """

    def __init__(
        self, ids: Ids, *, batch: int, context: int, seed: int, rank: int = 0, world: int = 1
    ) -> None:
        _require_positive(batch=batch, context=context, world=world)
        if not 0 <= rank < world:
            raise ValueError(f"rank={rank} is not one of world={world} processes.")
        if not 0 <= seed < 2**64:
            raise ValueError(f"seed={seed} is outside 0 to 2^64 - 1.")
        if len(ids) < context + 1:
            raise ValueError(
                f"the text has {len(ids)} tokens and context={context} needs {context + 1}; "
                "use more text or a shorter context."
            )
        self.ids, self.batch, self.context, self.seed = ids, batch, context, seed
        self.rank, self.world = rank, world
        self.per_epoch = len(ids) // context
        """Windows in an epoch, W."""
        self._starts: dict[int, Ids] = {}

    def at(self, step: int) -> Batch:
        """This process's rows of the batch of a step: (batch / world, context)."""
        return self.micro(step, 0, 1)

    def micro(self, step: int, part: int, parts: int) -> Batch:
        """The same in ``parts`` equal parts, to add up gradients over: part 0, 1, ..."""
        shares = self.world * parts
        if parts < 1 or self.batch % shares:
            raise ValueError(
                f"batch={self.batch} does not split over {self.world} processes "
                f"in {parts} parts each; make it a multiple of {shares}."
            )
        if step < 0 or not 0 <= part < parts:
            raise ValueError(f"there is no part {part} of {parts} of step {step}.")
        rows = self.batch // shares
        first = step * self.batch + (self.rank * parts + part) * rows
        return _batch(self._read(np.arange(first, first + rows)))

    def _read(self, examples: Ids) -> Ids:
        """Windows by their number in the endless row of epochs: (B,) -> (B, T + 1)."""
        epochs, places = np.divmod(examples, self.per_epoch)
        starts = np.empty_like(examples)
        for epoch in np.unique(epochs):
            here = epochs == epoch
            starts[here] = self._epoch(int(epoch))[places[here]]
        window = np.arange(self.context + 1)
        return self.ids[(starts[:, None] + window) % len(self.ids)]

    def _epoch(self, epoch: int) -> Ids:
        """Where the windows of an epoch begin, in the order they are read: (W,)."""
        if epoch not in self._starts:
            if len(self._starts) > 1:  # a batch seldom spans more than two
                self._starts.clear()
            self._starts[epoch] = self._draw(epoch)
        return self._starts[epoch]

    def _draw(self, epoch: int) -> Ids:
        # Raw words of the bit generator are the same in every version of numpy, which its
        # methods for drawing do not promise; sorting random words is a random order.
        philox = np.random.Philox(key=np.array([self.seed, epoch], dtype=np.uint64))
        offset = int(philox.random_raw()) % len(self.ids)
        order = np.argsort(philox.random_raw(self.per_epoch), kind="stable")
        return offset + order * self.context


def windows(
    ids: Ids, *, context: int, stride: int | None = None, batch: int = 1
) -> Iterator[EvalBatch]:
    """Windows in which every id but the very first is a target that counts exactly once.

    The first window counts all its targets, each later one the next ``stride`` (``context``
    unless given), so that a counted target sees at least context - stride tokens before its
    own input, except at the start. The last window is moved back to end with the text; ids
    that fill no window make one shorter one.
    """
    stride = context if stride is None else stride
    _require_positive(context=context, stride=stride, batch=batch)
    if stride > context:
        raise ValueError(f"stride={stride} would pass over tokens between windows of {context}.")
    if len(ids) < 2:
        raise ValueError(f"the text has {len(ids)} tokens; to predict one takes at least 2.")
    return _windows(ids, context, stride, batch)


def _windows(ids: Ids, context: int, stride: int, batch: int) -> Iterator[EvalBatch]:
    count = len(ids) - 1  # target t is ids[t + 1]
    width = min(context, count)
    # The window whose last target is end - 1 counts from the end of the window before.
    ends = np.minimum(np.arange(width, count + stride, stride), count)
    counted = np.concatenate([[0], ends[:-1]])
    position = np.arange(width + 1)
    for first in range(0, len(ends), batch):
        starts = ends[first : first + batch] - width
        block = _batch(ids[starts[:, None] + position])
        begin = counted[first : first + batch] - starts
        yield EvalBatch(*block, torch.from_numpy(position[:-1] >= begin[:, None]))


def _batch(block: Ids) -> Batch:
    whole = np.asarray(block, dtype=np.int64)
    inputs, targets = np.ascontiguousarray(whole[:, :-1]), np.ascontiguousarray(whole[:, 1:])
    return Batch(torch.from_numpy(inputs), torch.from_numpy(targets))


def _require_positive(**sizes: int) -> None:
    for name, size in sizes.items():
        if size < 1:
            raise ValueError(f"{name}={size} should be at least 1.")
