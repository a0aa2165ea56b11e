"""The form of a prior over keys that attention kernels take; needs no Triton."""

from typing import NamedTuple

from torch import Tensor


class Band(NamedTuple):
    """A band of keys around the position of a query, a range of keys per sequence, and a bias.

    Every field is optional. Positions are those of fenchel/attention/prior.py.
    """

    left: int | None = None
    """Keys at most this far before the position are open."""
    right: int | None = None
    """Keys at most this far after the position are open; 0 is causal, -1 leaves itself out."""
    start: Tensor | None = None
    """Sequence b has keys from start[b] on: int32, (B,)."""
    stop: Tensor | None = None
    """Sequence b has keys up to stop[b] - 1: int32, (B,)."""
    slopes: Tensor | None = None
    """ALiBi, log u = -slope |i - j|: float32, (H,)."""
    bias: Tensor | None = None
    """Added to the scores: float32, four axes that broadcast to (B, H, T, S)."""
