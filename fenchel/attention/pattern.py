"""Sparse patterns: masks under which a query sees a few keys of many.

    Window(w) | Strided(m)              local and every m-th key (Child et al. 2019)
    Window(w, w) | Global(n)            local and a few global tokens (Beltagy et al. 2020)
    (Window(w) | Strided(m)) + Causal() the same, without the future

Fewer open keys save time only where a back end can skip whole blocks of them (``reach``, or the
block mask of FlexAttention); elsewhere they are scored and then weigh nothing.
"""

from dataclasses import dataclass

from torch import Tensor

from fenchel.attention.prior import Place, Prior


@dataclass(frozen=True)
class Strided(Prior):
    """Position i sees the keys at distance 0, m, 2m, ... on both sides, m = ``stride``."""

    stride: int

    def __post_init__(self) -> None:
        if self.stride < 1:
            raise ValueError(f"a stride is 1 or more, got {self.stride}.")

    def admits(self, at: Place) -> Tensor:
        """Distances that the stride divides."""
        return (at.i - at.j) % self.stride == 0


@dataclass(frozen=True)
class Global(Prior):
    """The first ``tokens`` positions see every key, and every position sees them."""

    tokens: int

    def __post_init__(self) -> None:
        if self.tokens < 0:
            raise ValueError(f"a number of global tokens is 0 or more, got {self.tokens}.")

    def admits(self, at: Place) -> Tensor:
        """Rows and columns of the global tokens."""
        return (at.i < self.tokens) | (at.j < self.tokens)
