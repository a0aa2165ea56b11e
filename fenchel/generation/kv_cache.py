"""KV cache: the keys and values of positions already read, in memory allocated once.

    k_cache = (k_cache, k_new),   v_cache = (v_cache, v_new),   o = attend(q_new, k_cache, v_cache)

The key and value of a position do not change when later positions arrive, so a new token needs one
query against the cache: O(S D + M^2) work per layer instead of O(S^2 D + S M^2). The tensors have
their final size from the start and are written in place; G heads of keys are stored and never
repeated for the H query heads. Elements per layer: 2 B G S D; with MHA G = H. Keys are stored as
they are used, after their rotation.

**Windows.** A layer whose queries see a window of W keys stores no more than it may still need. The
keys are in order, as a prior over distances requires: new ones are written after the old ones, and
when the capacity is full the last W - 1 move to the front. The capacity is a quarter larger than
the window, so that each key moves four times at most.

**Stores.** How the keys (or the values) of one layer are stored:

    dense    in a dtype of its own; returned as a view when that is the model's dtype
    int8     n = round(x / s), s = max|x| / 127 over the D entries of one token and head;
             returned as s n, whose error is at most s / 2 per entry

What is not stored in the model's dtype is widened into a work space that the layers share, so a
cache of L layers in one byte costs L bytes per entry and the floats of one layer, not of L. A
returned tensor is therefore valid until the next layer reads.

Shapes: the keys and values of a layer are (B, G, S, D); R is the capacity of a store.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from fenchel.model import ModelConfig

INT8_MAX = 127
"""The largest int8 whose negative exists too."""


class StoreShape(NamedTuple):
    """Sequences, heads of keys, capacity and the width of a key."""

    B: int
    G: int
    R: int
    D: int


class Store(ABC):
    """Memory for the keys, or the values, of one layer."""

    @abstractmethod
    def write(self, start: int, x: Tensor) -> None:
        """Write x (B, G, T, D) at ``start``."""

    @abstractmethod
    def read(self, start: int, end: int) -> Tensor:
        """The entries ``start`` to ``end``, in the model's dtype: (B, G, end - start, D)."""

    @abstractmethod
    def buffers(self) -> tuple[Tensor, ...]:
        """The stored tensors, positions on the third axis."""

    @abstractmethod
    def first_rows(self, B: int) -> "Store":
        """The same memory as a store of the first ``B`` sequences."""

    def slide(self, start: int, end: int, to: int = 0) -> None:
        """Move the entries ``start`` to ``end`` to ``to``, the front by default."""
        for x in self.buffers():
            x.narrow(2, to, end - start).copy_(x.narrow(2, start, end - start).clone())

    @property
    def bytes(self) -> int:
        """Memory of the store, without the shared work space."""
        return sum(x.numel() * x.element_size() for x in self.buffers())


class DenseStore(Store):
    """Entries in a floating-point dtype: the model's, or a smaller one."""

    def __init__(
        self,
        shape: StoreShape,
        *,
        dtype: torch.dtype,
        device: torch.device | str,
        work: Tensor | None = None,
    ) -> None:
        self.x = torch.empty(shape, dtype=dtype, device=device)
        self.work = work

    def write(self, start: int, x: Tensor) -> None:
        """Round to the dtype of the store."""
        self.x.narrow(2, start, x.shape[2]).copy_(x)

    def read(self, start: int, end: int) -> Tensor:
        """A view, or a widened copy."""
        x = self.x.narrow(2, start, end - start)
        return x if self.work is None else self.work.narrow(2, 0, end - start).copy_(x)

    def buffers(self) -> tuple[Tensor, ...]:
        """The entries."""
        return (self.x,)

    def first_rows(self, B: int) -> "DenseStore":
        """Views of the first sequences."""
        store = copy(self)
        store.x, store.work = self.x[:B], None if self.work is None else self.work[:B]
        return store


class Int8Store(Store):
    """One byte per entry and one scale per token and head."""

    def __init__(self, shape: StoreShape, *, device: torch.device | str, work: Tensor) -> None:
        self.n = torch.empty(shape, dtype=torch.int8, device=device)
        self.s = torch.empty((*shape[:3], 1), dtype=torch.float32, device=device)
        self.work = work

    def write(self, start: int, x: Tensor) -> None:
        """Round to the grid of each token and head."""
        n, s = quantise_int8(x)
        self.n.narrow(2, start, x.shape[2]).copy_(n)
        self.s.narrow(2, start, x.shape[2]).copy_(s)

    def read(self, start: int, end: int) -> Tensor:
        """s n, in the work space."""
        x = self.work.narrow(2, 0, end - start)
        # Widened before it is scaled: a product of int8 and float would widen into new memory.
        x.copy_(self.n.narrow(2, start, end - start))
        return x.mul_(self.s.narrow(2, start, end - start))

    def buffers(self) -> tuple[Tensor, ...]:
        """Bytes and scales."""
        return self.n, self.s

    def first_rows(self, B: int) -> "Int8Store":
        """Views of the first sequences."""
        store = copy(self)
        store.n, store.s, store.work = self.n[:B], self.s[:B], self.work[:B]
        return store


def quantise_int8(x: Tensor) -> tuple[Tensor, Tensor]:
    """(n, s) with x close to s n: (..., D) -> int8 (..., D), float32 (..., 1)."""
    x = x.float()
    s = x.abs().amax(-1, keepdim=True) / INT8_MAX
    # A row of zeros has s = 0 and any n will do; one of 1e-43 has s = 0 too.
    n = torch.where(s > 0, x / s, 0.0).round_().clamp_(-INT8_MAX, INT8_MAX)
    return n.to(torch.int8), s


CacheKind = Literal["model", "float16", "int8"]
"""What keys and values are stored in: the model's dtype, half precision, or one byte per entry.

Half precision saves nothing for a model that is itself in half precision."""


class LayerStores(NamedTuple):
    """The memory of one layer."""

    keys: Store
    values: Store


def allocate_stores(
    config: ModelConfig,
    capacities: Sequence[int],
    *,
    batch: int,
    dtype: torch.dtype,
    device: torch.device | str,
    kind: CacheKind,
) -> tuple[list[LayerStores], tuple[Tensor, ...]]:
    """Stores of every layer with its capacity, and the work space that they share, if any."""
    if kind not in get_args(CacheKind):
        raise ValueError(f"cache={kind!r} should be one of {', '.join(get_args(CacheKind))}.")
    size = (batch, config.groups, max(capacities), config.head_width)
    work: tuple[Tensor, ...] = ()
    if kind == "int8" or (kind == "float16" and dtype != torch.float16):
        work = tuple(torch.empty(size, dtype=dtype, device=device) for _ in "kv")

    def store(capacity: int, which: int) -> Store:
        shape = StoreShape(batch, config.groups, capacity, config.head_width)
        if kind == "int8":
            return Int8Store(shape, device=device, work=work[which])
        stored = torch.float16 if kind == "float16" else dtype
        return DenseStore(shape, dtype=stored, device=device, work=work[which] if work else None)

    return [LayerStores(store(R, 0), store(R, 1)) for R in capacities], work


@dataclass
class _LayerCache:
    """The keys and values of one layer; their first entry is that of slot ``first_slot``."""

    keys: Store
    values: Store
    capacity: int
    lookback: int | None
    """How many slots before its own a query sees; None is all."""
    first_slot: int = 0


class KVCache:
    """``positions`` keys and values of every layer.

    ``dtype`` is that of the model, in which keys and values are appended and returned. The last
    ``rewindable`` slots can be removed by ``rewind``.

    >>> cache = KVCache(ModelConfig(vocabulary=9), batch=1, positions=4)
    >>> cache.length, cache.bytes
    (0, 16384)
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        batch: int,
        positions: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        kind: CacheKind = "model",
        rewindable: int = 0,
    ) -> None:
        self.positions, self.length, self.rewindable = positions, 0, rewindable
        self._memory: dict[int, tuple[Tensor, Tensor]] = {}
        lookbacks = [lookback(config, layer) for layer in range(config.layers)]
        capacities = [_capacity(seen, positions, rewindable) for seen in lookbacks]
        stores, self.work = allocate_stores(
            config, capacities, batch=batch, dtype=dtype, device=device, kind=kind
        )
        self.layers = [
            _LayerCache(keys, values, capacity, seen)
            for (keys, values), capacity, seen in zip(stores, capacities, lookbacks, strict=True)
        ]

    def append(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Append (B, G, T, D) to a layer; returns the keys and values that the new queries see.

        Those are all, or the last ones where the layer has a window: (B, G, S, D).
        """
        kv = self.layers[layer]
        T = k.shape[2]
        start = self.length - kv.first_slot
        if start + T > kv.capacity:
            start = self._make_room(kv, T)
            if start + T > kv.capacity:
                return self._pass_through(kv, start, k, v)
        kv.keys.write(start, k)
        kv.values.write(start, v)
        first = 0 if kv.lookback is None else max(0, start - kv.lookback)
        return kv.keys.read(first, start + T), kv.values.read(first, start + T)

    def cross_kv(
        self, layer: int, compute: Callable[[], tuple[Tensor, Tensor]]
    ) -> tuple[Tensor, Tensor]:
        """The k and v of the encoder's output, computed at the first call."""
        if layer not in self._memory:
            self._memory[layer] = compute()
        return self._memory[layer]

    def advance(self, positions: int) -> None:
        """Count positions that every layer has appended."""
        self.length += positions

    def can_rewind(self, length: int) -> bool:
        """Whether the first ``length`` positions are there, or what later queries see of them."""
        return length <= self.length and all(
            kv.first_slot + (length if kv.lookback is None else min(length, kv.lookback)) <= length
            for kv in self.layers
        )

    def rewind(self, length: int) -> None:
        """Remove all positions after the first ``length``."""
        if not self.can_rewind(length):
            raise ValueError(
                f"the cache has {self.length} positions and can remove the last "
                f"{self.rewindable} of them; it cannot go back to {length}."
            )
        self.length = length

    def clear(self) -> None:
        """Remove every position; the memory and the keys of the encoder's output stay."""
        self.length = 0
        for kv in self.layers:
            kv.first_slot = 0

    @property
    def bytes(self) -> int:
        """All memory of the cache, the work space included."""
        stores = sum(kv.keys.bytes + kv.values.bytes for kv in self.layers)
        return stores + sum(x.numel() * x.element_size() for x in self.work)

    def _make_room(self, kv: _LayerCache, T: int) -> int:
        """Drop keys that no query will see again; returns where new keys go."""
        if self.length + T > self.positions:
            raise ValueError(
                f"the cache has room for {self.positions} positions, not {self.length + T}."
            )
        assert kv.lookback is not None  # a layer without a window stores all positions
        start = self.length - kv.first_slot
        keep = min(start, kv.lookback + self.rewindable)
        kv.keys.slide(start - keep, start)
        kv.values.slide(start - keep, start)
        kv.first_slot += start - keep
        return keep

    def _pass_through(
        self, kv: _LayerCache, start: int, k: Tensor, v: Tensor
    ) -> tuple[Tensor, Tensor]:
        """More new keys than a window stores: all are returned now, the last are stored."""
        assert kv.lookback is not None
        total = start + k.shape[2]
        first = max(0, start - kv.lookback)
        keep = min(total, kv.lookback + self.rewindable)
        returned = []
        for store, x in ((kv.keys, k), (kv.values, v)):
            all_ = torch.cat((store.read(0, start), x), dim=2)
            store.write(0, all_.narrow(2, total - keep, keep))
            returned.append(all_.narrow(2, first, total - first))
        kv.first_slot += total - keep
        return returned[0], returned[1]


def lookback(config: ModelConfig, layer: int) -> int | None:
    """How many slots before its own a query of this layer sees; None is all."""
    window = config.window(layer)
    return None if window is None else window - 1


def _capacity(seen: int | None, positions: int, rewindable: int) -> int:
    """How many positions a layer stores: all, or a window and a quarter."""
    return positions if seen is None else min(positions, seen + rewindable + slack(seen))


def slack(seen: int) -> int:
    """Entries beyond those that a query sees: as many are appended before the others move."""
    return max(16, seen // 4)
