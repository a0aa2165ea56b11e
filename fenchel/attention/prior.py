"""Priors over keys: masks (mask.py) and biases (bias.py) as one argument of attention.

A prior gives every query a measure u over the keys; attention uses its logarithm,

    weights = choice.weights(scale * q k^T, log_prior = log u),

so a mask, padding, a window and a bias are one argument: log u is -inf where a key is forbidden
and finite where it is allowed. Two priors multiply, so their logarithms add: ``a + b``. Masks may
also be joined, ``a | b``: open where either is.

Queries are aligned to the END of the keys: the last query sits at the last key, and query t of T
is at position i = t + S - T among S keys. With T = S this is the usual square; with a cache of
S keys and T new queries it is what decoding needs (one new query sees the whole cache).

Each prior is written once, point by point, and that one definition serves dense tensors, tiles,
FlexAttention and kernels. At an index (b, h, i, j, S), that is sequence b, head h, position i,
key j of S,

    admits(at)                    whether position i may attend to key j; None for always
    bias(at)                      the finite part of log u; None for 0
    key_range(first, last, S)     [low, high): every other key is forbidden to positions first..last
    zero_range(first, last, S)    [low, high): log u = 0 there for all positions first..last
    band(S, device)               all of it as kernels take it, where they can

b, h, i, j are integer tensors that broadcast against one another. log u broadcasts to (B, H, T, S).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from fenchel.kernels.band import Band


class ScoreIndex(NamedTuple):
    """Entries of the scores: integer tensors that broadcast, and the number of keys."""

    b: Tensor
    """Sequence."""
    h: Tensor
    """Head."""
    i: Tensor
    """Position of the query among the keys."""
    j: Tensor
    """Key."""
    S: int
    """Number of keys; a tensor inside FlexAttention, so that a new length compiles nothing."""


class ScoreBlock(NamedTuple):
    """A part of the (B, H, T, S) square."""

    B: int
    H: int
    T: int
    S: int
    device: torch.device | str | None
    batch: slice
    heads: slice
    rows: slice
    keys: slice

    def score_index(self) -> ScoreIndex:
        """Indices (b, 1, 1, 1), (1, h, 1, 1), (1, 1, t, 1), (1, 1, 1, s)."""
        sizes, parts = self[:4], self[5:]
        along = zip(sizes, parts, strict=True)
        b, h, t, j = (torch.arange(size, device=self.device)[part] for size, part in along)
        i = t + (self.S - self.T)
        return ScoreIndex(
            b.view(-1, 1, 1, 1),
            h.view(1, -1, 1, 1),
            i.view(1, 1, -1, 1),
            j.view(1, 1, 1, -1),
            self.S,
        )

    def cut(self, x: Tensor) -> Tensor:
        """The block's part of a tensor whose four axes broadcast to the square."""
        whole = slice(None)
        return x[tuple(p if n > 1 else whole for p, n in zip(self[5:], x.shape, strict=True))]


class Prior:
    """log u over the keys, for every sequence, head and query; 0 everywhere in this base."""

    band_fields: ClassVar[tuple[str, ...] | None] = ()
    """The fields of ``Band`` that ``band`` fills; None for a prior that is no band."""

    def __init_subclass__(cls) -> None:
        # Not inherited: a subclass with another mask would be computed as its parent.
        cls.band_fields = cls.__dict__.get("band_fields")

    def band(self, S: int, device: torch.device) -> Band:  # noqa: ARG002
        """The prior over S keys as kernels take it."""
        return Band()

    @property
    def fixed_keys(self) -> int:
        """How many keys in front are constants that no input moves: 1 under a sink."""
        return 0

    def summands(self) -> "tuple[Prior, ...]":
        """The priors of which this is the sum."""
        return (self,)

    def admits(self, at: ScoreIndex) -> Tensor | None:  # noqa: ARG002
        """Whether the key is open to the position; None when every key is."""
        return None

    def bias(self, at: ScoreIndex) -> Tensor | None:  # noqa: ARG002
        """The finite part of log u; None when it is 0 everywhere."""
        return None

    def key_range(self, first: int, last: int, S: int) -> tuple[int, int]:  # noqa: ARG002
        """Half-open range of the keys that are open to some position of first..last."""
        return 0, S

    def zero_range(self, first: int, last: int, S: int) -> tuple[int, int]:  # noqa: ARG002
        """Half-open range of keys at which log u is 0 for all positions first..last."""
        return 0, 0

    def varies(self) -> tuple[bool, bool]:
        """Whether log u differs between sequences, and whether it differs between heads."""
        return False, False

    def tensors(self) -> tuple[Tensor, ...]:
        """The tensors it carries, which may learn."""
        return ()

    def with_tensors(self, tensors: Sequence[Tensor]) -> "Prior":  # noqa: ARG002
        """The same prior with other tensors in place of ``tensors()``."""
        return self

    def with_tables(self, device: torch.device) -> "Prior":  # noqa: ARG002
        """The same prior with per-head functions replaced by lookup tables, for kernels."""
        return self

    def check(self, B: int, H: int, T: int, S: int) -> None:
        """Raises ValueError for a call that this prior does not fit."""

    def dense(self, block: ScoreBlock, dtype: torch.dtype) -> Tensor:
        """log u on a block, four axes that broadcast to (b, h, t, s)."""
        at = block.score_index()
        open_, bias = self.admits(at), self.bias(at)
        if bias is None:
            if open_ is None:
                return torch.zeros(1, 1, 1, 1, dtype=dtype, device=block.device)
            return _forbid(open_, dtype)
        return bias.to(dtype) if open_ is None else torch.where(open_, bias.to(dtype), -torch.inf)

    def log(
        self,
        T: int,
        S: int,
        *,
        B: int = 1,
        H: int = 1,
        device: torch.device | str | None = None,
        dtype: torch.dtype = torch.float32,
        rows: slice | None = None,
        keys: slice | None = None,
    ) -> Tensor:
        """log u for T queries on S keys, or for some rows and keys of them.

        -> four axes that broadcast to (B, H, T, S)
        """
        self.check(B, H, T, S)
        whole = slice(None)
        rows, keys = rows or whole, keys or whole
        return self.dense(ScoreBlock(B, H, T, S, device, whole, whole, rows, keys), dtype)

    def __add__(self, other: "Prior | Tensor") -> "Prior":
        """Both at once: measures multiply, logarithms add."""
        return PriorSum((*_parts(self, PriorSum), *_parts(other, PriorSum)))

    def __or__(self, other: "Prior | Tensor") -> "Prior":
        """Masks joined: open where either is open."""
        return MaskUnion((*_parts(self, MaskUnion), *_parts(other, MaskUnion)))


@dataclass(frozen=True, eq=False)
class Dense(Prior):
    """log u entry by entry, finite or -inf; True in a bool tensor means "may attend".

    Any shape that broadcasts to (B, H, T, S).
    """

    log_prior: Tensor
    band_fields = ("bias",)

    def __post_init__(self) -> None:
        kind = self.log_prior.dtype
        if not (kind == torch.bool or kind.is_floating_point) or self.log_prior.dim() > 4:
            raise ValueError(
                "a dense prior is a float or bool tensor that broadcasts to (B, H, T, S), got "
                f"{tuple(self.log_prior.shape)} of {kind}; mask.bool() may attend where it is True."
            )

    def admits(self, at: ScoreIndex) -> Tensor | None:
        return self._at(at) if self.log_prior.dtype == torch.bool else None

    def bias(self, at: ScoreIndex) -> Tensor | None:
        return None if self.log_prior.dtype == torch.bool else self._at(at)

    def varies(self) -> tuple[bool, bool]:
        B, H = self._four().shape[:2]
        return B != 1, H != 1

    def tensors(self) -> tuple[Tensor, ...]:
        return () if self.log_prior.dtype == torch.bool else (self.log_prior,)

    def with_tensors(self, tensors: Sequence[Tensor]) -> Prior:
        return Dense(*tensors) if tensors else self

    def check(self, B: int, H: int, T: int, S: int) -> None:
        scores = (B, H, T, S)
        sizes = self._four().shape
        if any(size not in (1, n) for size, n in zip(sizes, scores, strict=True)):
            raise ValueError(
                f"a dense prior of shape {tuple(self.log_prior.shape)} does not broadcast to "
                f"(B, H, T, S) = {scores}."
            )

    def dense(self, block: ScoreBlock, dtype: torch.dtype) -> Tensor:
        """A view of the tensor: gathering it point by point would copy it."""
        x = block.cut(self._four()).to(block.device)
        return _forbid(x, dtype) if x.dtype == torch.bool else x.to(dtype)

    def band(self, S: int, device: torch.device) -> Band:  # noqa: ARG002
        x = self._four().to(device)
        return Band(bias=_forbid(x, torch.float32) if x.dtype == torch.bool else x.float())

    def _four(self) -> Tensor:
        x = self.log_prior
        return x if x.dim() == 4 else x[(None,) * (4 - x.dim())]

    def _at(self, at: ScoreIndex) -> Tensor:
        x = self._four()
        t = at.i - (at.S - x.shape[2])  # from a position among the keys to the number of a query
        index = zip((at.b, at.h, t, at.j), x.shape, strict=True)
        return x[tuple(i if size > 1 else torch.zeros_like(i) for i, size in index)]


@dataclass(frozen=True, eq=False)
class Positioned(Prior):
    """A prior between one query per sequence and keys that have positions, in any order.

    ``key_positions`` (B, S) or (1, S) is -1 for an absent key; the query is at the largest.
    """

    prior: Prior
    key_positions: Tensor

    def admits(self, at: ScoreIndex) -> Tensor:
        """The keys that are there and that the prior admits at their positions."""
        inner = self._at(at)
        there = inner.j >= 0
        open_ = self.prior.admits(inner)
        return there if open_ is None else open_ & there

    def bias(self, at: ScoreIndex) -> Tensor | None:
        return self.prior.bias(self._at(at))

    def varies(self) -> tuple[bool, bool]:
        return len(self.key_positions) > 1, self.prior.varies()[1]

    def tensors(self) -> tuple[Tensor, ...]:
        return self.prior.tensors()

    def with_tensors(self, tensors: Sequence[Tensor]) -> Prior:
        return Positioned(self.prior.with_tensors(tensors), self.key_positions)

    def _at(self, at: ScoreIndex) -> ScoreIndex:
        b = at.b if len(self.key_positions) > 1 else torch.zeros_like(at.b)
        return at._replace(i=self.key_positions.amax(-1)[b], j=self.key_positions[b, at.j])


PriorLike = Prior | type[Prior] | Tensor | None
"""What ``as_prior`` accepts."""


def as_prior(prior: PriorLike) -> Prior | None:
    """A prior from itself, from its class, or from a tensor, which becomes ``Dense``.

    >>> as_prior(torch.tensor([True, False]))
    Dense(log_prior=tensor([ True, False]))
    """
    if prior is None or isinstance(prior, Prior):
        return prior
    if isinstance(prior, Tensor):
        return Dense(prior)
    if isinstance(prior, type) and issubclass(prior, Prior):
        try:
            return prior()
        except TypeError:
            raise TypeError(
                f"prior={prior.__name__} is a class that needs arguments; pass an instance of it."
            ) from None
    raise TypeError(
        "prior is a Prior such as Causal(), or a tensor that broadcasts to (B, H, T, S): bool, "
        "True where a query may attend, or float, added to the scores; got "
        f"{type(prior).__name__}."
    )


class Combined(Prior):
    """The base of priors made of several parts."""

    parts: tuple[Prior, ...]

    def varies(self) -> tuple[bool, bool]:
        each = [part.varies() for part in self.parts]
        return any(batch for batch, _ in each), any(heads for _, heads in each)

    def tensors(self) -> tuple[Tensor, ...]:
        return tuple(tensor for part in self.parts for tensor in part.tensors())

    def with_tensors(self, tensors: Sequence[Tensor]) -> Prior:
        left = list(tensors)
        parts = []
        for part in self.parts:
            count = len(part.tensors())
            parts.append(part.with_tensors(left[:count]))
            left = left[count:]
        return type(self)(tuple(parts))  # type: ignore[call-arg]

    def with_tables(self, device: torch.device) -> Prior:
        return type(self)(tuple(part.with_tables(device) for part in self.parts))  # type: ignore[call-arg]

    def check(self, B: int, H: int, T: int, S: int) -> None:
        for part in self.parts:
            part.check(B, H, T, S)


@dataclass(frozen=True)
class PriorSum(Combined):
    """Several priors at once; made by ``a + b``."""

    parts: tuple[Prior, ...]

    def summands(self) -> tuple[Prior, ...]:
        return self.parts

    def admits(self, at: ScoreIndex) -> Tensor | None:
        open_ = None
        for part in self.parts:
            open_ = intersection(open_, part.admits(at))
        return open_

    def bias(self, at: ScoreIndex) -> Tensor | None:
        total = None
        for part in self.parts:
            bias = part.bias(at)
            total = bias if total is None else (total if bias is None else total + bias)
        return total

    def key_range(self, first: int, last: int, S: int) -> tuple[int, int]:
        return _common([part.key_range(first, last, S) for part in self.parts])

    def zero_range(self, first: int, last: int, S: int) -> tuple[int, int]:
        return _common([part.zero_range(first, last, S) for part in self.parts])

    def dense(self, block: ScoreBlock, dtype: torch.dtype) -> Tensor:
        """Part by part, so that a part with a quicker dense form uses it."""
        total, *rest = (part.dense(block, dtype) for part in self.parts)
        for log_u in rest:
            total = total + log_u
        return total


@dataclass(frozen=True)
class MaskUnion(Combined):
    """Keys that at least one of several masks admits; made by ``a | b``."""

    parts: tuple[Prior, ...]

    def admits(self, at: ScoreIndex) -> Tensor | None:
        open_ = None
        for part in self.parts:
            mask = part.admits(at)
            if part.bias(at) is not None:
                raise ValueError(f"a | b joins masks, and {type(part).__name__} is a bias; use +.")
            if mask is None:
                return None
            open_ = mask if open_ is None else open_ | mask
        return open_

    def key_range(self, first: int, last: int, S: int) -> tuple[int, int]:
        """From the first key in the range of some part to the last."""
        ranges = [part.key_range(first, last, S) for part in self.parts]
        return min(low for low, _ in ranges), max(high for _, high in ranges)

    def zero_range(self, first: int, last: int, S: int) -> tuple[int, int]:
        """The longest range at which some part is 0."""
        ranges = [part.zero_range(first, last, S) for part in self.parts]
        return max(ranges, key=lambda ends: ends[1] - ends[0])


@dataclass(frozen=True, eq=False)
class PriorSelection(Prior):
    """Some heads of a prior over H heads and, unless None, some rows of its T rows, in order."""

    whole: Prior
    heads: Tensor
    H: int
    rows: Tensor | None = None
    T: int = 0

    @property
    def fixed_keys(self) -> int:
        return self.whole.fixed_keys

    def admits(self, at: ScoreIndex) -> Tensor | None:
        return self.whole.admits(self._original(at))

    def bias(self, at: ScoreIndex) -> Tensor | None:
        return self.whole.bias(self._original(at))

    def key_range(self, first: int, last: int, S: int) -> tuple[int, int]:
        """As the whole prior, unless rows are selected."""
        return self.whole.key_range(first, last, S) if self.rows is None else (0, S)

    def varies(self) -> tuple[bool, bool]:
        return self.whole.varies()

    def check(self, B: int, H: int, T: int, S: int) -> None:  # noqa: ARG002
        self.whole.check(B, self.H, T if self.rows is None else self.T, S)

    def _original(self, at: ScoreIndex) -> ScoreIndex:
        at = at._replace(h=self.heads.to(at.h.device)[at.h])
        if self.rows is None:
            return at
        return at._replace(i=self.rows[at.i - (at.S - len(self.rows))] + (at.S - self.T))


def as_band(prior: Prior | None, S: int, device: torch.device) -> Band:
    """The band of a prior for which ``outside_band`` is None."""
    total = Band()
    for part in () if prior is None else prior.summands():
        both = zip(total, part.band(S, device), _BAND_SUM, strict=True)
        fields: list[Any] = [
            y if x is None else x if y is None else add(x, y) for x, y, add in both
        ]
        total = Band(*fields)
    return total


_BAND_SUM: tuple[Callable[..., Any], ...] = (
    min, min, torch.maximum, torch.minimum, torch.add, torch.add,
)  # fmt: skip
"""How each field of the band of a sum follows from those of two parts."""


def outside_band(prior: Prior | None, fields: Sequence[str] = Band._fields) -> str | None:
    """The kind of the first part of a prior that a band with these fields cannot hold, or None."""
    for part in () if prior is None else prior.summands():
        filled = part.band_fields
        if filled is None or any(field not in fields for field in filled):
            return type(part).__name__
    return None


def _parts(prior: Prior | Tensor, kind: type[Combined]) -> tuple[Prior, ...]:
    part = as_prior(prior)
    assert part is not None
    return part.parts if isinstance(part, kind) else (part,)


def _common(ranges: Sequence[tuple[int, int]]) -> tuple[int, int]:
    low = max(low for low, _ in ranges)
    return low, max(low, min(high for _, high in ranges))


def intersection(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    """Open where both are; None is open everywhere."""
    return a if b is None else (b if a is None else a & b)


def _forbid(open_: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.zeros_like(open_, dtype=dtype).masked_fill(~open_, -torch.inf)
