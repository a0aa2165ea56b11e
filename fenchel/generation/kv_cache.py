"""KV cache: the keys and values of tokens already read, in memory allocated once.

    k_cache = (k_cache, k_new),   v_cache = (v_cache, v_new),   o = attend(q_new, k_cache, v_cache)

The key and value of a token do not change when later tokens arrive, so a new token needs one query
against the cache: O(S D + M^2) work per layer instead of O(S^2 D + S M^2). The tensors have their
final size from the start and are written in place; G heads of keys are stored and never repeated
for the H query heads. Elements per layer: 2 B G R D; with MHA G = H. Keys are stored as they are
used, after their rotation.

**Rows.** Row b is a sequence of n_b tokens, and rows have lengths of their own. A layer has R slots
per row, and token t is in slot t mod R. Without a window R is the number of positions, and slots
are in the order of tokens. A layer whose queries see a window of W keys has W + ``slack`` slots:
token t replaces token t - R, which no query sees again, and

    token in slot s = n - (n - s) mod R,    none where that is negative

is the position of its key for a query at n (``key_positions``). So a prior of distances, a window
and a mask hold for keys in any order. ``select`` is a view of some rows, for a pass over those.

**Several tokens.** A pass over T > 1 tokens gets the keys in order: those that its first query sees
and the new ones. Rows of unequal numbers of new tokens are padded on the right: a causal query sees
no key to its right, and the slots of padding are written again before a query sees them.

**Stores.** How the keys (or the values) of one layer are stored:

    dense    in a dtype of its own; returned as a view when that is the model's dtype
    int8     n = round(x / s), s = max|x| / 127 over the D entries of one token and head;
             returned as s n, whose error is at most s / 2 per entry in float32; a model of
             16 bits rounds s n to its dtype, and the error is s in bfloat16, 0.56 s in float16

What is not stored in the model's dtype is widened into a work space that the layers share, so a
cache of L layers in one byte costs L bytes per entry and the floats of one layer, not of L. A
returned tensor is therefore valid until the next layer reads; where layers share keys and values
(``shared_kv_layers``), which are stored once, it is a copy.

**States.** A layer without keys (gated DeltaNet) has a state per row, of a size that does not grow:
that after the last token read. It is 0 in a row without tokens, and cannot go back. Rows that a
step computes without need (``live``) keep theirs.

**On the device.** A recorded step (generation/fused_step.py) has the same shapes at every token: a
view with ``token_B`` has the numbers of tokens in device memory, and returns all R slots.

Shapes: the keys and values of a layer are (B, G, S, D).
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from copy import copy
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from fenchel.model import ModelConfig
from fenchel.model.delta_net import DeltaState

INT8_MAX = 127
"""The largest int8 whose negative exists too."""
SLACK = 16
"""Slots of a window beyond those that a query sees: as many of the last tokens can be removed."""
Rows = slice | Tensor
"""Consecutive rows, or rows by their numbers."""


class StoreShape(NamedTuple):
    """Sequences, heads of keys, slots and the width of a key."""

    B: int
    G: int
    R: int
    D: int


class Store(ABC):
    """Memory for the keys, or the values, of one layer."""

    @abstractmethod
    def write(self, rows: Rows, slots: slice | Tensor, x: Tensor) -> None:
        """Write x (B, G, T, D) at T slots of all rows, or at a slot (B,) of each where T is 1."""

    @abstractmethod
    def read(self, rows: Rows, start: int, end: int) -> Tensor:
        """The slots ``start`` to ``end`` in the model's dtype: (B, G, end - start, D)."""

    @abstractmethod
    def buffers(self) -> tuple[Tensor, ...]:
        """The stored tensors, rows on the first axis and slots on the third."""

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
        # Zeros: an absent slot has weight zero, and zero times NaN would be NaN.
        self.x = torch.zeros(shape, dtype=dtype, device=device)
        self.work = work
        self._G, self._D, self._stride = shape.G, shape.D, self.x.stride()

    def write(self, rows: Rows, slots: slice | Tensor, x: Tensor) -> None:
        """Round to the dtype of the store."""
        if isinstance(rows, slice) and isinstance(slots, slice):  # few operations per step
            self._slots(rows, slots.start, x.shape[2]).copy_(x)
        else:
            _write(self.x, rows, slots, x)

    def read(self, rows: Rows, start: int, end: int) -> Tensor:
        """A view of consecutive rows, or a widened copy."""
        if isinstance(rows, slice):
            x = self._slots(rows, start, end - start)
        else:
            x = self.x.narrow(2, start, end - start)[rows]
        return x if self.work is None else self.work[: len(x), :, : end - start].copy_(x)

    def _slots(self, rows: slice, start: int, count: int) -> Tensor:
        """``x[rows].narrow(2, start, count)`` in one view: a step makes four per layer."""
        size = rows.stop - rows.start, self._G, count, self._D
        first = rows.start * self._stride[0] + start * self._D
        return self.x.as_strided(size, self._stride, first)

    def buffers(self) -> tuple[Tensor, ...]:
        """The entries."""
        return (self.x,)


class Int8Store(Store):
    """One byte per entry and one scale per token and head.

    With ``slots_last`` the bytes are (B, G, D, R') in memory with R' >= R, as
    kernels/decode_attention.py reads values.
    """

    def __init__(
        self,
        shape: StoreShape,
        *,
        device: torch.device | str,
        work: Tensor,
        slots_last: int | None = None,
    ) -> None:
        B, G, R, D = shape
        size = shape if slots_last is None else (B, G, D, slots_last)
        self.memory = torch.zeros(size, dtype=torch.int8, device=device)
        self.n = self.memory if slots_last is None else self.memory.mT[:, :, :R]
        self.s = torch.zeros((B, G, R, 1), dtype=torch.float32, device=device)
        self.work = work

    def write(self, rows: Rows, slots: slice | Tensor, x: Tensor) -> None:
        """Round to the grid of each token and head."""
        n, s = quantise_int8(x)
        _write(self.n, rows, slots, n)
        _write(self.s, rows, slots, s)

    def read(self, rows: Rows, start: int, end: int) -> Tensor:
        """s n, in the work space."""
        n, s = (x.narrow(2, start, end - start)[rows] for x in (self.n, self.s))
        # Widened before it is scaled: a product of int8 and float would widen into new memory.
        return self.work[: len(n), :, : end - start].copy_(n).mul_(s)

    def buffers(self) -> tuple[Tensor, ...]:
        """Bytes and scales."""
        return self.n, self.s


def _write(memory: Tensor, rows: Rows, slots: slice | Tensor, x: Tensor) -> None:
    if isinstance(slots, Tensor) and isinstance(rows, slice):
        rows = torch.arange(*rows.indices(len(memory)), device=memory.device)
    if isinstance(slots, Tensor):
        assert isinstance(rows, Tensor)
        memory[rows, :, slots] = x[:, :, 0].to(memory.dtype)
    elif isinstance(rows, slice):
        memory[rows, :, slots].copy_(x)
    else:
        memory[rows, :, slots] = x.to(memory.dtype)


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


class LayerCache(NamedTuple):
    """The memory of one layer."""

    keys: Store
    values: Store
    slots: int
    lookback: int | None
    """How many tokens before its own a query sees; None is all."""


class KVCache:
    """Keys and values of ``batch`` rows of up to ``positions`` tokens, in every layer.

    ``dtype`` is that of the model, in which keys and values are appended and returned. A window has
    ``slack`` slots beyond those that a query sees. ``kernel_layout`` is that of
    kernels/decode_attention.py.

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
        slack: int = SLACK,
        kernel_layout: bool = False,
    ) -> None:
        if kind not in get_args(CacheKind):
            raise ValueError(f"cache={kind!r} should be one of {', '.join(get_args(CacheKind))}.")
        self.positions, self.device = positions, torch.device(device)
        self.starts = [0] * batch
        self.counts: Sequence[int] | None = None
        """How many of the T new tokens each row has, where a pass is padded; None is all."""
        self.per_row = False
        self.token_B: Tensor | None = None
        """The same as ``starts`` in device memory, for recorded steps."""
        self.live: Sequence[bool] | None = None
        """Which rows of this view read a token that counts; None is all."""
        self._rows: Rows = slice(0, batch)
        self._cross: dict[int, tuple[Tensor, Tensor]] = {}
        self._placed: dict[object, Tensor] = {}
        windows = [config.window(layer) for layer in range(config.layers)]
        sizes = [positions if w is None else min(positions, w + slack) for w in windows]
        self.states: dict[int, DeltaState] = {}
        for layer in filter(config.is_delta, range(config.layers)):
            sizes[layer], windows[layer] = 0, None
            wide = torch.promote_types(dtype, torch.float32)
            taps = batch, 2 * config.delta_keys + config.delta_values, config.delta_kernel - 1
            heads = config.delta_value_heads, config.delta_key_width, config.delta_value_width
            self.states[layer] = DeltaState(
                torch.zeros(taps, dtype=dtype, device=device),
                torch.zeros(batch, *heads, dtype=wide, device=device),
            )
        shapes = [(c.groups, c.head_width) for c in map(config.at_layer, range(config.layers))]
        widened = kind == "int8" or (kind == "float16" and dtype != torch.float16)
        self._work: dict[tuple[int, int], list[Tensor]] = {}
        for shape in dict.fromkeys(shapes if widened else ()):
            G, D = shape
            slots = max(R for R, own in zip(sizes, shapes, strict=True) if own == shape)
            size = (batch, G, slots, D)
            self._work[shape] = [torch.empty(size, dtype=dtype, device=device) for _ in "kv"]

        def store(layer: int, which: int) -> Store:
            R, (G, D) = sizes[layer], shapes[layer]
            shape, work = StoreShape(batch, G, R, D), self._work[G, D][which] if widened else None
            if kind != "int8":
                stored = torch.float16 if kind == "float16" else dtype
                return DenseStore(shape, dtype=stored, device=device, work=work)
            assert work is not None
            padded = None
            if kernel_layout and which:
                from fenchel.kernels.decode_attention import padded_slots

                padded = padded_slots(R)
            return Int8Store(shape, device=device, work=work, slots_last=padded)

        self.layers: list[LayerCache] = []
        for layer, window in enumerate(windows):
            source = config.kv_source(layer)
            if source is not None and source < layer:
                self.layers.append(self.layers[source])
                continue
            lookback = None if window is None else window - 1
            self.layers.append(LayerCache(store(layer, 0), store(layer, 1), sizes[layer], lookback))
        self._kept = bool(config.shared_kv_layers) and widened

    # A view of rows, for one pass or more

    def select(
        self,
        rows: slice | Sequence[int],
        starts: Sequence[int],
        *,
        per_row: bool = False,
        token_B: Tensor | None = None,
    ) -> "KVCache":
        """The same memory as a cache of some rows that have ``starts`` tokens.

        With ``per_row`` the keys that a row gets depend on its own number of tokens alone.
        ``token_B`` has the numbers in device memory instead.
        """
        view = copy(self)
        view._rows = rows if isinstance(rows, slice) else _consecutive(rows, self.device)
        view.starts, view.per_row, view.token_B = list(starts), per_row, token_B
        view._cross, view._placed = {}, {}
        return view

    @property
    def starts(self) -> list[int]:
        """How many tokens each row of this view has before the pass."""
        return self._starts

    @starts.setter
    def starts(self, starts: list[int]) -> None:
        self._starts, self._longest = starts, max(starts)  # read several times per layer
        self._one_length = min(starts) == self._longest

    @property
    def length(self) -> int:
        """Tokens of the longest row."""
        return self._longest if self.token_B is None else self.positions - 1

    @property
    def _equal(self) -> bool:
        """Whether all rows have the same number of tokens, which the host knows."""
        return self._one_length and self.token_B is None and not self.per_row

    def new_positions(self, T: int) -> Tensor | None:
        """The positions of T new tokens of every row, (B, T); None where all rows have the same."""
        if self._equal or (T > 1 and self._one_length):
            return None
        return self._number_B1() + torch.arange(T, device=self.device)

    def positions_of(self, layer: int, S: int, T: int) -> Tensor:
        """The positions of the S keys that T new queries see: (B or 1, S)."""
        placed = self.key_positions(layer) if T == 1 else None
        if placed is not None:
            return placed
        end = self.length + T
        return torch.arange(end - S, end, device=self.device).unsqueeze(0)

    def append(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Store new keys and values, (B, G, T, D); returns those that queries see, (B, G, S, D).

        The order is that of ``key_positions``.
        """
        keys, values, R, _ = self.layers[layer]
        T, n, rows = k.shape[2], self.length, self._rows
        if self.token_B is None and n + T > self.positions:
            raise ValueError(f"the cache has room for {self.positions} positions, not {n + T}.")
        if T > 1 and n + T > R:
            return self._append_in_order(layer, k, v)
        slots: slice | Tensor = slice(n % R, n % R + T)
        if T > 1:
            self._require_equal()
        elif not self._equal:
            slots = self._number_B1().squeeze(-1) % R
        keys.write(rows, slots, k)
        values.write(rows, slots, v)
        first, end = self.span(layer, T)
        k, v = keys.read(rows, first, end), values.read(rows, first, end)
        return (k.clone(), v.clone()) if self._kept else (k, v)

    def key_positions(self, layer: int) -> Tensor | None:
        """The positions of the keys that ``append`` returns for one token, -1 for an absent one.

        (B, S), or (1, S) where all rows have the same; None where the keys are consecutive and the
        last is the newest, as they always are for several tokens.
        """
        R = self.layers[layer].slots
        if self._equal and self.length < R:
            return None
        _, S = self.span(layer)
        if (R, S) not in self._placed:
            n_B1 = self._number_B1()
            t_BS = n_B1 - (n_B1 - torch.arange(S, device=self.device)) % R
            self._placed[R, S] = t_BS.clamp_(min=-1)
        return self._placed[R, S]

    def visible(self, layer: int) -> Tensor | None:
        """Which of the keys of ``append`` the query of one token sees, (B, S); None is all."""
        _, _, R, lookback = self.layers[layer]
        full = lookback is not None and lookback + 1 == R and self._equal
        t_BS = None if full else self.key_positions(layer)
        if t_BS is None:
            return None
        key = (R, t_BS.shape[1], lookback)
        if key not in self._placed:
            first_B1: Tensor | int = 0
            if lookback is not None:
                first_B1 = (self._number_B1() - lookback).clamp_(min=0)
            self._placed[key] = t_BS >= first_B1
        return self._placed[key]

    @property
    def new_tokens(self) -> Tensor | None:
        """How many of the T new tokens each row has, (B,); None is all."""
        counts = self.counts
        if counts is None or len(set(counts)) == 1:
            return None
        return torch.tensor(counts, device=self.device)

    def state(self, layer: int) -> DeltaState:
        """The state of a layer without keys, 0 in rows that have no token: (B, ...)."""
        taps, memory = (x[self._rows] for x in self.states[layer])
        if min(self.starts) == 0:
            old = torch.tensor([n > 0 for n in self.starts], device=self.device)[:, None, None]
            taps, memory = taps.where(old, 0.0), memory.where(old.unsqueeze(-1), 0.0)
        return DeltaState(taps, memory)

    def set_state(self, layer: int, state: DeltaState) -> None:
        """The state after the new tokens, in rows that are live."""
        for memory, x in zip(self.states[layer], state, strict=True):
            if self.live is not None:
                live = torch.tensor(self.live, device=self.device)
                x = torch.where(live.view(-1, *[1] * (x.dim() - 1)), x, memory[self._rows])
            memory[self._rows] = x.detach().to(memory.dtype)

    def advance(self, positions: int) -> None:
        """Count tokens that every layer has appended."""
        self._placed = {}
        if self.token_B is not None:
            return  # counted by the recorded step
        counts = [positions] * len(self.starts) if self.counts is None else self.counts
        self.starts = [n + new for n, new in zip(self.starts, counts, strict=True)]
        self.counts = None

    def cross_kv(
        self, layer: int, compute: Callable[[], tuple[Tensor, Tensor]]
    ) -> tuple[Tensor, Tensor]:
        """The k and v of the encoder's output, computed at the first call."""
        if layer not in self._cross:
            self._cross[layer] = compute()
        return self._cross[layer]

    def clear_cross_kv(self) -> None:
        """Compute the k and v of the encoder's output anew: its rows are others."""
        self._cross = {}

    def restart(self, starts: list[int]) -> None:
        """The rows of this view have so many tokens."""
        self.starts, self._placed = starts, {}

    def can_rewind(self, length: int, read: int) -> bool:
        """Whether a row of ``read`` tokens has all that queries after its first ``length`` see."""
        if self.states and length != read:
            return False
        return length <= read and all(
            seen is None
            or self.positions == R
            or length - min(length, seen) >= max(0, read + 1 - R)
            for _, _, R, seen in self.layers
        )

    def copy_row(self, row: int, to: int) -> None:
        """Copy the slots of a row into those of another."""
        for x in self._buffers():
            x[to].copy_(x[row])

    def clear_row(self, row: int) -> None:
        """Overwrite a row with zeros: entries that are not finite would spoil its next sequence."""
        for x in self._buffers():
            x[row].zero_()

    @property
    def bytes(self) -> int:
        """All memory of the cache, the work space included."""
        work = (x for pair in self._work.values() for x in pair)
        return sum(x.numel() * x.element_size() for x in (*self._buffers(), *work))

    def _buffers(self) -> list[Tensor]:
        stores = {id(store): store for layer in self.layers for store in layer[:2]}  # shared once
        keys = [x for store in stores.values() for x in store.buffers()]
        return [*keys, *(x for state in self.states.values() for x in state)]

    def _number_B1(self) -> Tensor:
        """The number of tokens of every row before the pass, (B, 1); (1, 1) for equal rows."""
        if self.token_B is not None:
            return self.token_B.clamp(min=0).unsqueeze(-1)
        if "n" not in self._placed:
            numbers = self.starts[:1] if self._equal else self.starts
            self._placed["n"] = torch.tensor(numbers, device=self.device).unsqueeze(-1)
        return self._placed["n"]

    def span(self, layer: int, T: int = 1) -> tuple[int, int]:
        """The slots that ``append`` returns, for one token or T tokens that fit into the slots."""
        _, _, R, lookback = self.layers[layer]
        n = self.length
        if self.token_B is not None or n + T > R:
            return 0, R
        in_order = self._equal or T > 1
        first = max(0, n - lookback) if in_order and lookback is not None else 0
        return first, n + T

    def _require_equal(self) -> None:
        if not self._one_length or self.token_B is not None:
            raise ValueError("rows of unequal lengths take one token at a time.")

    def _append_in_order(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """More new keys than a window has slots left: those before them, and all the new ones."""
        keys, values, R, lookback = self.layers[layer]
        self._require_equal()
        assert lookback is not None  # a layer without a window has a slot for every position
        T, n, rows = k.shape[2], self.length, self._rows
        seen = torch.arange(n - min(n, lookback), n, device=self.device) % R
        whole = min(n, R)
        returned = []
        for store, x in ((keys, k), (values, v)):
            before = store.read(rows, 0, whole)[:, :, seen] if n else x[:, :, :0]
            returned.append(torch.cat((before, x), dim=2))
            self._write_last(store, x, [T] * len(x) if self.counts is None else self.counts)
        return returned[0], returned[1]

    def _write_last(self, store: Store, x: Tensor, counts: Sequence[int]) -> None:
        """Store the last tokens of every row, as many as there are slots."""
        n, (B, _, R, _) = self.length, store.buffers()[0].shape
        numbers = torch.arange(B, device=self.device)[self._rows]
        parts = [(x, numbers, counts[0])]
        if len(set(counts)) > 1:
            parts = [*zip(torch.split(x, 1), torch.split(numbers, 1), counts, strict=True)]
        for part, rows, count in parts:
            end = n + count
            first = end - min(count, R)
            turn = max(first, end // R * R)  # the first token of the last lap of the slots
            for begin, stop in ((first, turn), (turn, end)):
                if stop > begin:
                    slots = slice(begin % R, begin % R + stop - begin)
                    store.write(rows, slots, part[:, :, begin - n : stop - n])


def _consecutive(rows: Sequence[int], device: torch.device) -> Rows:
    """A slice where the rows are consecutive, so that they are read without a copy."""
    if list(rows) == list(range(rows[0], rows[0] + len(rows))):
        return slice(rows[0], rows[0] + len(rows))
    return torch.tensor(rows, device=device)
