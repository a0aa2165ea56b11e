"""How the keys (or the values) of one layer lie in memory.

    plain    in a dtype of its own; handed out as a view when that is the model's dtype
    int8     n = round(x / s), s = max|x| / 127 over the D entries of one token and head;
             handed out as s n, which is off by at most s / 2 an entry

What is not held in the model's dtype is widened on the way out into a work space that every
layer writes over in turn, so a cache of L layers in one byte costs L bytes an entry and one
layer's worth of float, not L. What was handed out is therefore good until the next layer asks.

Shapes: x is (B, G, T, D), written at places ``start`` to ``start + T`` of the R there are.
"""

from abc import ABC, abstractmethod
from typing import NamedTuple

import torch
from torch import Tensor

LARGEST = 127
"""The largest whole number of int8 that also exists below zero."""


class Room(NamedTuple):
    """How much memory: sequences, heads of keys, places and the width of a key."""

    B: int
    G: int
    R: int
    D: int


class Shelf(ABC):
    """Places for what one layer has computed."""

    @abstractmethod
    def write(self, start: int, x: Tensor) -> None:
        """Put x (B, G, T, D) at ``start``."""

    @abstractmethod
    def read(self, start: int, end: int) -> Tensor:
        """What stands at ``start`` to ``end``, in the model's dtype: (B, G, end - start, D)."""

    @abstractmethod
    def held(self) -> tuple[Tensor, ...]:
        """The memory itself, places on the third axis."""

    def slide(self, start: int, end: int) -> None:
        """Move what stands at ``start`` to ``end`` to the front."""
        for x in self.held():
            x.narrow(2, 0, end - start).copy_(x.narrow(2, start, end - start).clone())

    @property
    def bytes(self) -> int:
        """Memory that is held, without the shared work space."""
        return sum(x.numel() * x.element_size() for x in self.held())


class Plain(Shelf):
    """Numbers as they came, or in fewer bits than the model's."""

    def __init__(
        self,
        room: Room,
        *,
        dtype: torch.dtype,
        device: torch.device | str,
        work: Tensor | None = None,
    ) -> None:
        self.x = torch.empty(room, dtype=dtype, device=device)
        self.work = work

    def write(self, start: int, x: Tensor) -> None:
        """Round to the shelf's dtype."""
        self.x.narrow(2, start, x.shape[2]).copy_(x)

    def read(self, start: int, end: int) -> Tensor:
        """A view, or a widened copy."""
        x = self.x.narrow(2, start, end - start)
        return x if self.work is None else self.work.narrow(2, 0, end - start).copy_(x)

    def held(self) -> tuple[Tensor, ...]:
        """The numbers."""
        return (self.x,)


class Int8(Shelf):
    """One byte an entry and one scale a token and head."""

    def __init__(self, room: Room, *, device: torch.device | str, work: Tensor) -> None:
        self.n = torch.empty(room, dtype=torch.int8, device=device)
        self.s = torch.empty((*room[:3], 1), dtype=torch.float32, device=device)
        self.work = work

    def write(self, start: int, x: Tensor) -> None:
        """Round to the grid of each token and head."""
        n, s = quantised(x)
        self.n.narrow(2, start, x.shape[2]).copy_(n)
        self.s.narrow(2, start, x.shape[2]).copy_(s)

    def read(self, start: int, end: int) -> Tensor:
        """s n, in the work space."""
        x = self.work.narrow(2, 0, end - start)
        # Widened before it is scaled: a product of int8 and float would widen into new memory.
        x.copy_(self.n.narrow(2, start, end - start))
        return x.mul_(self.s.narrow(2, start, end - start))

    def held(self) -> tuple[Tensor, ...]:
        """Bytes and scales."""
        return self.n, self.s


def quantised(x: Tensor) -> tuple[Tensor, Tensor]:
    """(n, s) with x close to s n: (..., D) -> int8 (..., D), float32 (..., 1)."""
    x = x.float()
    s = x.abs().amax(-1, keepdim=True) / LARGEST
    # A row of zeros has s = 0 and any n will do; one of 1e-43 has s = 0 too.
    n = torch.where(s > 0, x / s, 0.0).round_().clamp_(-LARGEST, LARGEST)
    return n.to(torch.int8), s
