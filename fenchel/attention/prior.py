"""Priors over keys: where a query may look, and where it looks by default.

A prior gives every query a measure u over the keys; attention uses its logarithm,

    weights = choice.weights(scale * q k^T, log_prior = log u),

so a mask, padding, a window and a bias are one argument: log u is -inf where a key is forbidden
and finite where it is allowed. Two priors multiply, so their logarithms add: ``a + b``.

Queries are aligned to the END of the keys: the last query sits at the last key, and query t of T
stands at position i = t + S - T among S keys. With T = S this is the usual square; with a cache of
S keys and T new queries it is what decoding needs (one new query sees the whole cache).

Each prior is written once, point by point, and that one definition serves dense tensors, blocks,
FlexAttention and kernels. At a place (b, h, i, j, S), that is sequence b, head h, position i,
key j of S,

    admits(at)                may i see j: bool, or None for always
    bias(at)                  the finite part of log u, or None for 0
    reach(first, last, S)     keys outside [low, high) are forbidden to all positions first..last

b, h, i, j are integer tensors that broadcast against one another. log u broadcasts to (B, H, T, S).
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor


class Place(NamedTuple):
    """Where log u is asked for: integer tensors that broadcast, and the number of keys."""

    b: Tensor
    h: Tensor
    i: Tensor
    j: Tensor
    S: int


class Block(NamedTuple):
    """A part of the (B, H, T, S) square: all of B and H, some rows, some keys."""

    B: int
    H: int
    T: int
    S: int
    rows: slice
    keys: slice
    device: torch.device | str | None

    def place(self) -> Place:
        """Indices (B, 1, 1, 1), (1, H, 1, 1), (1, 1, t, 1), (1, 1, 1, s)."""
        t0, t1, _ = self.rows.indices(self.T)
        s0, s1, _ = self.keys.indices(self.S)
        b = torch.arange(self.B, device=self.device)[:, None, None, None]
        h = torch.arange(self.H, device=self.device)[None, :, None, None]
        i = torch.arange(t0, t1, device=self.device)[None, None, :, None] + (self.S - self.T)
        j = torch.arange(s0, s1, device=self.device)[None, None, None, :]
        return Place(b, h, i, j, self.S)


class Prior(ABC):
    """log u over the keys, for every sequence, head and query."""

    @abstractmethod
    def admits(self, at: Place) -> Tensor | None:
        """Whether the key is open to the position; None when every key is."""

    def bias(self, at: Place) -> Tensor | None:  # noqa: ARG002
        """The finite part of log u; None when it is 0 everywhere."""
        return None

    def reach(self, first: int, last: int, S: int) -> tuple[int, int]:  # noqa: ARG002
        """Half-open range of the keys that positions first..last can see at all."""
        return 0, S

    def tensors(self) -> tuple[Tensor, ...]:
        """The tensors it carries; one that requires a gradient makes the prior learn."""
        return ()

    def check(self, B: int, H: int, T: int, S: int) -> None:  # noqa: B027
        """Refuse, in one sentence, a call that this prior does not fit."""

    def dense(self, block: Block, dtype: torch.dtype) -> Tensor:
        """log u on a block, four axes that broadcast to (B, H, t, s)."""
        at = block.place()
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
        rows: slice = slice(None),
        keys: slice = slice(None),
    ) -> Tensor:
        """log u for T queries on S keys, or some rows and keys of it.

        -> four axes that broadcast to (B, H, T, S)
        """
        self.check(B, H, T, S)
        return self.dense(Block(B, H, T, S, rows, keys, device), dtype)

    def __add__(self, other: "Prior") -> "Prior":
        """Both at once: measures multiply, logarithms add."""
        return Sum((*_parts(self), *_parts(other)))


@dataclass(frozen=True)
class Causal(Prior):
    """Position i sees keys j <= i, or j < i when ``strict``.

    >>> Causal().log(2, 3)[0, 0]
    tensor([[0., 0., -inf],
            [0., 0., 0.]])
    """

    strict: bool = False

    def admits(self, at: Place) -> Tensor:
        """The past, and the present unless strict."""
        return at.j < at.i if self.strict else at.j <= at.i

    def reach(self, first: int, last: int, S: int) -> tuple[int, int]:  # noqa: ARG002
        """Up to the last position."""
        return 0, min(S, max(0, last + (not self.strict)))


@dataclass(frozen=True)
class Window(Prior):
    """Position i sees keys from i - left to i + right; None leaves a side open."""

    left: int | None
    right: int | None = 0

    def __post_init__(self) -> None:
        for side, size in (("left", self.left), ("right", self.right)):
            if size is not None and size < 0:
                raise ValueError(f"a window reaches {side}={size} keys; give 0 or more, or None.")

    def admits(self, at: Place) -> Tensor | None:
        """A band around the diagonal."""
        near = None if self.left is None else at.j >= at.i - self.left
        ahead = None if self.right is None else at.j <= at.i + self.right
        return _both(near, ahead)

    def reach(self, first: int, last: int, S: int) -> tuple[int, int]:
        """From the first position's left edge to the last one's right edge."""
        low = 0 if self.left is None else min(S, max(0, first - self.left))
        high = S if self.right is None else min(S, max(0, last + self.right + 1))
        return low, max(low, high)


@dataclass(frozen=True, eq=False)
class Padding(Prior):
    """Sequence b has ``lengths[b]`` real keys, the first ones or (side="left") the last ones."""

    lengths: Tensor
    side: str = "right"

    def __post_init__(self) -> None:
        if self.side not in ("right", "left"):
            raise ValueError(f'padding stands on side "right" or "left", got {self.side!r}.')
        if self.lengths.dim() != 1 or self.lengths.is_floating_point():
            raise ValueError(
                "padding needs one whole number a sequence, shape (B,), got "
                f"{tuple(self.lengths.shape)} of {self.lengths.dtype}."
            )

    def admits(self, at: Place) -> Tensor:
        """The real keys."""
        real = self.lengths.to(at.b.device)[at.b]
        return at.j < real if self.side == "right" else at.j >= at.S - real

    def check(self, B: int, H: int, T: int, S: int) -> None:  # noqa: ARG002
        """One length a sequence."""
        if len(self.lengths) != B:
            raise ValueError(f"padding gives {len(self.lengths)} lengths for {B} sequences.")


@dataclass(frozen=True, eq=False)
class Dense(Prior):
    """log u entry by entry, finite or -inf; True in a bool tensor means "may look".

    Any shape that broadcasts to (B, H, T, S).
    """

    log_prior: Tensor

    def __post_init__(self) -> None:
        kind = self.log_prior.dtype
        if not (kind == torch.bool or kind.is_floating_point) or self.log_prior.dim() > 4:
            raise ValueError(
                "a dense prior is a float or bool tensor that broadcasts to (B, H, T, S), got "
                f"{tuple(self.log_prior.shape)} of {kind}."
            )

    def admits(self, at: Place) -> Tensor | None:
        """The entry, if entries are bool."""
        return self._at(at) if self.log_prior.dtype == torch.bool else None

    def bias(self, at: Place) -> Tensor | None:
        """The entry, if entries are numbers."""
        return None if self.log_prior.dtype == torch.bool else self._at(at)

    def tensors(self) -> tuple[Tensor, ...]:
        """The given tensor."""
        return (self.log_prior,)

    def check(self, B: int, H: int, T: int, S: int) -> None:
        """A shape that broadcasts."""
        wanted = (B, H, T, S)
        sizes = self._four().shape
        if any(size not in (1, want) for size, want in zip(sizes, wanted, strict=True)):
            raise ValueError(
                f"a dense prior of shape {tuple(self.log_prior.shape)} does not broadcast to "
                f"(B, H, T, S) = {wanted}."
            )

    def dense(self, block: Block, dtype: torch.dtype) -> Tensor:
        """The tensor itself, cut: gathering it point by point would copy it."""
        x = self._four().to(block.device)
        x = x if x.shape[2] == 1 else x[:, :, block.rows]
        x = x if x.shape[3] == 1 else x[:, :, :, block.keys]
        return _forbid(x, dtype) if x.dtype == torch.bool else x.to(dtype)

    def _four(self) -> Tensor:
        x = self.log_prior
        return x[(None,) * (4 - x.dim())]

    def _at(self, at: Place) -> Tensor:
        x = self._four()
        t = at.i - (at.S - x.shape[2])  # from a position among the keys to the number of a query
        places = zip((at.b, at.h, t, at.j), x.shape, strict=True)
        return x[tuple(place if size > 1 else torch.zeros_like(place) for place, size in places)]


@dataclass(frozen=True)
class Sum(Prior):
    """Several priors at once; made by ``a + b``."""

    parts: tuple[Prior, ...]

    def admits(self, at: Place) -> Tensor | None:
        """What all parts admit."""
        found = None
        for part in self.parts:
            found = _both(found, part.admits(at))
        return found

    def bias(self, at: Place) -> Tensor | None:
        """The sum of the parts' biases."""
        total = None
        for part in self.parts:
            one = part.bias(at)
            total = one if total is None else (total if one is None else total + one)
        return total

    def reach(self, first: int, last: int, S: int) -> tuple[int, int]:
        """What all parts reach."""
        ranges = [part.reach(first, last, S) for part in self.parts]
        low = max(low for low, _ in ranges)
        return low, max(low, min(high for _, high in ranges))

    def tensors(self) -> tuple[Tensor, ...]:
        """The tensors of all parts."""
        return tuple(tensor for part in self.parts for tensor in part.tensors())

    def check(self, B: int, H: int, T: int, S: int) -> None:
        """Every part fits."""
        for part in self.parts:
            part.check(B, H, T, S)

    def dense(self, block: Block, dtype: torch.dtype) -> Tensor:
        """Part by part, so that a part with a quicker dense form uses it."""
        first, *rest = (part.dense(block, dtype) for part in self.parts)
        for one in rest:
            first = first + one
        return first


def _parts(prior: Prior) -> tuple[Prior, ...]:
    return prior.parts if isinstance(prior, Sum) else (prior,)


def _both(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    return a if b is None else (b if a is None else a & b)


def _forbid(open_: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.zeros_like(open_, dtype=dtype).masked_fill(~open_, -torch.inf)
