"""Masks: priors whose log u is 0 or -inf, 0 where a query may attend.

    Causal()                 keys up to the query
    Window(left, right)      keys at most ``left`` before and ``right`` after the query
    Padding(lengths)         the keys of every sequence that are tokens
    Segments(numbers)        the keys of the query's own document, where several share a row
    Strided(m), Global(n)    every m-th key; the first n keys

Sparse patterns are masks under which a query sees a few keys of many:

    Window(w) | Strided(m)              local and every m-th key (Child et al. 2019)
    Window(w, w) | Global(n)            local and a few global tokens (Beltagy et al. 2020)
    (Window(w) | Strided(m)) + Causal() the same, without the future

They save time only where a back end skips whole blocks of keys (``key_range``, or the block mask of
FlexAttention); elsewhere all keys are scored and the forbidden ones get weight 0.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from fenchel.attention.prior import Prior, ScoreIndex, intersection
from fenchel.kernels.band import Band


@dataclass(frozen=True)
class Causal(Prior):
    """Position i sees keys j <= i, or j < i when ``strict``.

    >>> Causal().log(2, 3)[0, 0]
    tensor([[0., 0., -inf],
            [0., 0., 0.]])
    """

    strict: bool = False
    band_fields = ("right",)

    def admits(self, at: ScoreIndex) -> Tensor:
        return at.j < at.i if self.strict else at.j <= at.i

    def key_range(self, first: int, last: int, S: int) -> tuple[int, int]:  # noqa: ARG002
        return 0, min(S, max(0, last + (not self.strict)))

    def zero_range(self, first: int, last: int, S: int) -> tuple[int, int]:  # noqa: ARG002
        return 0, min(S, max(0, first + (not self.strict)))

    def band(self, S: int, device: torch.device) -> Band:  # noqa: ARG002
        return Band(right=-1 if self.strict else 0)


@dataclass(frozen=True)
class Window(Prior):
    """Position i sees keys from i - left to i + right; None leaves a side open.

    >>> Window(1).log(3, 3)[0, 0]
    tensor([[0., -inf, -inf],
            [0., 0., -inf],
            [-inf, 0., 0.]])
    """

    left: int | None
    right: int | None = 0
    band_fields = ("left", "right")

    def __post_init__(self) -> None:
        for side, size in (("left", self.left), ("right", self.right)):
            if size is not None and size < 0:
                raise ValueError(f"a window reaches {side}={size} keys; give 0 or more, or None.")

    def admits(self, at: ScoreIndex) -> Tensor | None:
        near = None if self.left is None else at.j >= at.i - self.left
        ahead = None if self.right is None else at.j <= at.i + self.right
        return intersection(near, ahead)

    def key_range(self, first: int, last: int, S: int) -> tuple[int, int]:
        """From the first position's left edge to the last one's right edge."""
        low = 0 if self.left is None else min(S, max(0, first - self.left))
        high = S if self.right is None else min(S, max(0, last + self.right + 1))
        return low, max(low, high)

    def zero_range(self, first: int, last: int, S: int) -> tuple[int, int]:
        """From the last position's left edge to the first one's right edge."""
        low = 0 if self.left is None else min(S, max(0, last - self.left))
        high = S if self.right is None else min(S, max(0, first + self.right + 1))
        return low, max(low, high)

    def band(self, S: int, device: torch.device) -> Band:  # noqa: ARG002
        return Band(self.left, self.right)


@dataclass(frozen=True, eq=False)
class Padding(Prior):
    """Sequence b has ``lengths[b]`` real keys, the first ones or (side="left") the last ones.

    >>> import torch
    >>> Padding(torch.tensor([1, 2])).log(1, 2, B=2)[:, 0, 0]
    tensor([[0., -inf],
            [0., 0.]])
    """

    lengths: Tensor
    side: str = "right"
    band_fields = ("start", "stop")

    def __post_init__(self) -> None:
        if self.side not in ("right", "left"):
            raise ValueError(f'padding stands on side "right" or "left", got {self.side!r}.')
        if self.lengths.dim() != 1 or self.lengths.is_floating_point():
            raise ValueError(
                "padding needs one whole number per sequence, shape (B,), got "
                f"{tuple(self.lengths.shape)} of {self.lengths.dtype}."
            )

    def admits(self, at: ScoreIndex) -> Tensor:
        real = self.lengths.to(at.b.device)[at.b]
        return at.j < real if self.side == "right" else at.j >= at.S - real

    def band(self, S: int, device: torch.device) -> Band:
        real = self.lengths.to(device, torch.int32)
        return Band(stop=real) if self.side == "right" else Band(start=S - real)

    def varies(self) -> tuple[bool, bool]:
        return True, False

    def check(self, B: int, H: int, T: int, S: int) -> None:  # noqa: ARG002
        if len(self.lengths) != B:
            raise ValueError(f"padding gives {len(self.lengths)} lengths for {B} sequences.")


@dataclass(frozen=True, eq=False)
class Segments(Prior):
    """Position i sees the keys that have its own number in ``numbers``, (B, S).

    A row of documents one after another has a number per document: with ``Causal()`` each is then
    read as if it stood alone.

    >>> import torch
    >>> Segments(torch.tensor([[0, 0, 1]])).log(3, 3)[0, 0]
    tensor([[0., 0., -inf],
            [0., 0., -inf],
            [-inf, -inf, 0.]])
    """

    numbers: Tensor

    def __post_init__(self) -> None:
        if self.numbers.dim() != 2 or self.numbers.is_floating_point():
            raise ValueError(
                "segments are whole numbers of shape (B, S), got "
                f"{tuple(self.numbers.shape)} of {self.numbers.dtype}."
            )

    def admits(self, at: ScoreIndex) -> Tensor:
        numbers = self.numbers.to(at.b.device)
        return numbers[at.b, at.i] == numbers[at.b, at.j]

    def varies(self) -> tuple[bool, bool]:
        return True, False

    def check(self, B: int, H: int, T: int, S: int) -> None:  # noqa: ARG002
        if tuple(self.numbers.shape) != (B, S):
            raise ValueError(
                f"segments of shape {tuple(self.numbers.shape)} do not number the {S} keys of "
                f"{B} sequences."
            )


@dataclass(frozen=True)
class Strided(Prior):
    """Position i sees the keys at distance 0, m, 2m, ... on both sides, m = ``stride``."""

    stride: int

    def __post_init__(self) -> None:
        if self.stride < 1:
            raise ValueError(f"a stride is 1 or more, got {self.stride}.")

    def admits(self, at: ScoreIndex) -> Tensor:
        return (at.i - at.j) % self.stride == 0


@dataclass(frozen=True)
class Global(Prior):
    """The first ``tokens`` positions see every key, and every position sees them."""

    tokens: int

    def __post_init__(self) -> None:
        if self.tokens < 0:
            raise ValueError(f"a number of global tokens is 0 or more, got {self.tokens}.")

    def admits(self, at: ScoreIndex) -> Tensor:
        return (at.i < self.tokens) | (at.j < self.tokens)
