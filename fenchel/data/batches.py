"""Ids to batches: the batch of a step is a function of the seed and the step alone.

The N ids are a ring. An epoch covers it with W = N // context windows of context + 1 tokens;
neighbouring windows share one token, so that no target is predicted twice:

    window j starts at  offset + j * context  (mod N),     j = 0, ..., W - 1

``offset`` and the order of the windows come from the Philox generator with the key (seed, epoch).
Example number e = step * batch + row is window order[e mod W] of epoch e // W, so batches continue
across the ends of epochs. To resume, only the step is needed: there is no state. Up to context - 1
tokens are not a target in an epoch; which ones depends on the offset.

A batch has B rows of T = context positions.
"""

from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from fenchel.data.tokens import Ids


class Batch(NamedTuple):
    """Inputs and the token after each of them; int64, all (B, T)."""

    inputs: Tensor
    targets: Tensor
    """-100 where a token is not to be predicted."""
    segments: Tensor | None = None
    """The number of the document that an input belongs to; None where a row is one text."""

    def to(self, device: torch.device) -> "Batch":
        """The batch on a device; the host does not wait for a copy to a GPU."""

        def moved(x: Tensor) -> Tensor:
            if device.type != "cuda" or x.is_cuda:
                return x.to(device)
            return x.pin_memory().to(device, non_blocking=True)

        return self._each(moved)

    def pinned(self) -> "Batch":
        """The batch in memory from which a GPU copies while the host goes on."""
        return self._each(Tensor.pin_memory)

    def _each(self, change: Callable[[Tensor], Tensor]) -> "Batch":
        segments = None if self.segments is None else change(self.segments)
        return Batch(change(self.inputs), change(self.targets), segments)

    def rows(self, first: int, last: int) -> "Batch":
        """Some of its rows."""
        segments = None if self.segments is None else self.segments[first:last]
        return Batch(self.inputs[first:last], self.targets[first:last], segments)


class EvalBatch(NamedTuple):
    """Inputs and targets of an evaluation, and which targets count; all (B, T)."""

    inputs: Tensor
    targets: Tensor
    scored: Tensor
    """True where the target counts; elsewhere it is context and counted in an earlier window."""


class BatchSource(Protocol):
    """What training reads: the batch of a step is a function of the step alone."""

    batch: int
    """Rows per step."""

    def at(self, step: int) -> Batch:
        """The batch of a step."""


class Batches:
    """Batches of ``batch`` windows of ``context`` tokens, by step.

    >>> Batches(np.arange(100), batch=2, context=4, seed=0).at(step=7).inputs.shape
    torch.Size([2, 4])
    """

    def __init__(self, ids: Ids, *, batch: int, context: int, seed: int) -> None:
        _require_positive(batch=batch, context=context)
        if not 0 <= seed < 2**64:
            raise ValueError(f"seed={seed} is outside 0 to 2^64 - 1.")
        if len(ids) < context + 1:
            raise ValueError(
                f"the text has {len(ids)} tokens and context={context} needs {context + 1}; "
                "use more text or a shorter context."
            )
        self.ids, self.batch, self.context, self.seed = ids, batch, context, seed
        self.per_epoch = len(ids) // context
        """Windows in an epoch, W."""
        self._epoch = lru_cache(maxsize=2)(self._draw)  # a batch rarely spans more than two

    def at(self, step: int) -> Batch:
        """The batch of a step: (batch, context)."""
        if step < 0:
            raise ValueError(f"step={step} should be at least 0.")
        return _batch(self._read(np.arange(step * self.batch, (step + 1) * self.batch)))

    def _read(self, examples: Ids) -> Ids:
        """Windows by example number: (B,) -> (B, T + 1)."""
        epochs, positions = np.divmod(examples, self.per_epoch)
        starts = np.empty_like(examples)
        for epoch in np.unique(epochs):
            here = epochs == epoch
            starts[here] = self._epoch(int(epoch))[positions[here]]
        window = np.arange(self.context + 1)
        return self.ids[(starts[:, None] + window) % len(self.ids)]

    def _draw(self, epoch: int) -> Ids:
        """The starts of the windows of an epoch in their order: (W,)."""
        # numpy guarantees the raw words of a bit generator across versions, but not the results
        # of its drawing methods. Sorting random words gives a random order.
        philox = np.random.Philox(key=np.array([self.seed, epoch], dtype=np.uint64))
        offset = int(philox.random_raw()) % len(self.ids)
        order = np.argsort(philox.random_raw(self.per_epoch), kind="stable")
        return offset + order * self.context


def windows(
    ids: Ids, *, context: int, stride: int | None = None, batch: int = 1
) -> Iterator[EvalBatch]:
    """Windows in which every id except the first is a target that counts exactly once.

    The first window counts all its targets, each later one the next ``stride`` (by default
    ``context``), so that a counted target has at least context - stride tokens before its own
    input, except at the start. The last window ends with the text; a text shorter than a window
    gives one shorter window.

    >>> [int(window.scored.sum()) for window in windows(np.arange(10), context=4, stride=2)]
    [4, 2, 2, 1]
    """
    stride = context if stride is None else stride
    _require_positive(context=context, stride=stride, batch=batch)
    if stride > context:
        raise ValueError(f"stride={stride} would skip tokens between windows of {context}.")
    if len(ids) < 2:
        raise ValueError(f"the text has {len(ids)} tokens; a prediction needs at least 2.")
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
        scored = torch.from_numpy(position[:-1] >= begin[:, None])
        yield EvalBatch(block.inputs, block.targets, scored)


def _batch(block: Ids) -> Batch:
    ids = np.asarray(block, dtype=np.int64)
    inputs, targets = np.ascontiguousarray(ids[:, :-1]), np.ascontiguousarray(ids[:, 1:])
    return Batch(torch.from_numpy(inputs), torch.from_numpy(targets))


def _require_positive(**sizes: int) -> None:
    for name, size in sizes.items():
        if size < 1:
            raise ValueError(f"{name}={size} should be at least 1.")
