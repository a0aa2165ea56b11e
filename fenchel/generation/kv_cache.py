"""How the keys (or the values) of one layer lie in memory.

    plain    in a dtype of its own; handed out as a view when that is the model's dtype
    int8     n = round(x / s), s = max|x| / 127 over the D entries of one token and head;
             handed out as s n, which is off by at most s / 2 an entry

What is not held in the model's dtype is widened on the way out into a work space that every
layer writes over in turn, so a cache of L layers in one byte costs L bytes an entry and one
layer's worth of float, not L. What was handed out is therefore good until the next layer asks.

Shapes: x is (B, G, T, D), written at places ``start`` to ``start + T`` of the R there are.

Keys and values of positions already read, in memory taken once.

    k_cache = (k_cache, k_new),   v_cache = (v_cache, v_new),   o = attend(q_new, k_cache, v_cache)

A position's key and value do not change when later positions arrive, so a new token needs one
query against what is held: O(S D + M^2) work a layer instead of O(S^2 D + S M^2). The tensors
have their final size from the start and are written in place; G heads of keys are held, and
never repeated for the H heads that ask. Elements a layer: 2 B G S D; with MHA G = H.

A layer whose queries see a window of W keys holds no more than those it may still need. They
lie in order, as a prior over distances wants them: new ones are written behind the old ones,
and when the room is full the last W - 1 move to the front. The room is a quarter larger than
the window, so that each key moves four times at the most.

Keys are held as they are used, rotated where positions are; how they lie in memory is in
fenchel/generation/kv_cache.py.

Shapes: a layer's keys and values are (B, G, S, D).
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from fenchel.model import ModelConfig

LARGEST = 127
"""The largest whole number of int8 that also exists below zero."""


class Room(NamedTuple):
    """How much memory: sequences, heads of keys, places and the width of a key."""

    B: int
    G: int
    R: int
    D: int


class Store(ABC):
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


class DenseStore(Store):
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


class Int8Store(Store):
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


Kind = Literal["model", "float16", "int8"]
"""What keys and values are held in: the model's dtype, half precision, or one byte an entry.

Half precision saves nothing for a model that is itself in half precision."""


@dataclass
class _Layer:
    """One layer's keys and values; place 0 holds slot number ``gone``."""

    keys: Store
    values: Store
    room: int
    reach: int | None
    """How many slots before itself a query sees; None is all."""
    gone: int = 0


class KVCache:
    """Room for ``positions`` keys and values of every layer.

    ``dtype`` is that of the model, in which keys and values come and go. The last ``spare``
    slots can be taken back by ``rewind``.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        batch: int,
        positions: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        kind: Kind = "model",
        spare: int = 0,
    ) -> None:
        if kind not in get_args(Kind):
            raise ValueError(f"cache={kind!r} should be one of {', '.join(get_args(Kind))}.")
        self.positions, self.length, self.spare = positions, 0, spare
        self._memory: dict[int, tuple[Tensor, Tensor]] = {}
        reaches = [_reach(config, layer) for layer in range(config.layers)]
        rooms = [_room(reach, positions, spare) for reach in reaches]
        size = (batch, config.groups, max(rooms), config.head_width)
        self.work: tuple[Tensor, ...] = ()
        if kind == "int8" or (kind == "float16" and dtype != torch.float16):
            self.work = tuple(torch.empty(size, dtype=dtype, device=device) for _ in "kv")

        def shelf(room: int, which: int) -> Store:
            there = Room(batch, config.groups, room, config.head_width)
            if kind == "int8":
                return Int8Store(there, device=device, work=self.work[which])
            work = self.work[which] if self.work else None
            held = torch.float16 if kind == "float16" else dtype
            return DenseStore(there, dtype=held, device=device, work=work)

        self.layers = [
            _Layer(shelf(room, 0), shelf(room, 1), room, reach)
            for room, reach in zip(rooms, reaches, strict=True)
        ]

    def append(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Write (B, G, T, D) behind what a layer holds; give back what the new queries may see.

        That is all of it, or the last of it where the layer has a window: (B, G, S, D).
        """
        here = self.layers[layer]
        T = k.shape[2]
        start = self.length - here.gone
        if start + T > here.room:
            start = self._make_room(here, T)
            if start + T > here.room:
                return self._pass_through(here, start, k, v)
        here.keys.write(start, k)
        here.values.write(start, v)
        first = 0 if here.reach is None else max(0, start - here.reach)
        return here.keys.read(first, start + T), here.values.read(first, start + T)

    def cross_kv(
        self, layer: int, compute: Callable[[], tuple[Tensor, Tensor]]
    ) -> tuple[Tensor, Tensor]:
        """The k and v of what an encoder read, made at the first call and kept as they are."""
        if layer not in self._memory:
            self._memory[layer] = compute()
        return self._memory[layer]

    def advance(self, positions: int) -> None:
        """Count positions that every layer has appended."""
        self.length += positions

    def rewind(self, length: int) -> None:
        """Forget what was read after the first ``length`` positions."""
        for here in self.layers:
            needed = length if here.reach is None else min(length, here.reach)
            if not here.gone + needed <= length <= self.length:
                raise ValueError(
                    f"the cache has read {self.length} positions and can take back "
                    f"{self.spare} of them; it cannot go back to {length}."
                )
        self.length = length

    def clear(self) -> None:
        """Forget every position; keep the room, and what an encoder read."""
        self.length = 0
        for here in self.layers:
            here.gone = 0

    @property
    def bytes(self) -> int:
        """All memory that is held, the work space included."""
        shelves = sum(here.keys.bytes + here.values.bytes for here in self.layers)
        return shelves + sum(x.numel() * x.element_size() for x in self.work)

    def _make_room(self, here: _Layer, T: int) -> int:
        """Let go of what no query will see again; the place where new keys go."""
        if self.length + T > self.positions:
            raise ValueError(
                f"the cache has room for {self.positions} positions, not {self.length + T}."
            )
        assert here.reach is not None  # a layer without a window has room for all positions
        start = self.length - here.gone
        keep = min(start, here.reach + self.spare)
        here.keys.slide(start - keep, start)
        here.values.slide(start - keep, start)
        here.gone += start - keep
        return keep

    def _pass_through(
        self, here: _Layer, start: int, k: Tensor, v: Tensor
    ) -> tuple[Tensor, Tensor]:
        """More new keys than the window has room for: all are seen now, the last are held."""
        assert here.reach is not None
        total = start + k.shape[2]
        first, keep = max(0, start - here.reach), min(total, here.reach + self.spare)
        seen = []
        for shelf, x in ((here.keys, k), (here.values, v)):
            all_ = torch.cat((shelf.read(0, start), x), dim=2)
            shelf.write(0, all_.narrow(2, total - keep, keep))
            seen.append(all_.narrow(2, first, total - first))
        here.gone += total - keep
        return seen[0], seen[1]


def _reach(config: ModelConfig, layer: int) -> int | None:
    """How many slots before its own a query of this layer sees; None is all."""
    window = config.window(layer)
    return None if window is None else window - 1


def _room(reach: int | None, positions: int, spare: int) -> int:
    """Places a layer needs: all, or those of a window and as many as make moving rare."""
    if reach is None:
        return positions
    return min(positions, reach + spare + max(16, reach // 4))
