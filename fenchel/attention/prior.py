"""Priors over keys: where a query may look, and where it looks by default.

A prior gives every query a measure u over the keys; attention uses its logarithm,

    weights = choice.weights(scale * q k^T, log_prior = log u),

so a mask, padding, a window and a bias are one argument: log u is -inf where a key is forbidden
and finite where it is allowed. Two priors multiply, so their logarithms add: ``a + b``.

Queries are aligned to the END of the keys: the last query sits at the last key, and query t of T
stands at position i = t + S - T among S keys. With T = S this is the usual square; with a cache of
S keys and T new queries it is what decoding needs (one new query sees the whole cache).

Each prior is written once, point by point, and that one definition serves dense tensors, blocks,
FlexAttention and kernels:

    admits(b, h, i, j, S)     may sequence b, head h, position i see key j: bool, or None for always
    bias(b, h, i, j, S)       the finite part of log u, or None for 0
    reach(first, last, S)     keys outside [low, high) are forbidden to all positions first..last

b, h, i, j are integer tensors that broadcast against one another. log u broadcasts to (B, H, T, S).
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor


class Prior(ABC):
    """log u over the keys, for every sequence, head and query."""

    @abstractmethod
    def admits(self, b: Tensor, h: Tensor, i: Tensor, j: Tensor, S: int) -> Tensor | None:
        """Whether key j is open to position i; None when every key is."""

    def bias(self, b: Tensor, h: Tensor, i: Tensor, j: Tensor, S: int) -> Tensor | None:  # noqa: ARG002
        """The finite part of log u; None when it is 0 everywhere."""
        return None

    def reach(self, first: int, last: int, S: int) -> tuple[int, int]:  # noqa: ARG002
        """Half-open range of keys that positions first..last can see at all."""
        return 0, S

    def tensors(self) -> tuple[Tensor, ...]:
        """The tensors it carries; one that requires a gradient makes the prior learn."""
        return ()

    def check(self, B: int, H: int, T: int, S: int) -> None:  # noqa: B027
        """Refuse, in one sentence, a call that this prior does not fit."""

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
        """log u for T queries on S keys, or the block ``rows`` x ``keys`` of it.

        -> four axes that broadcast to (B, H, t, s).
        """
        self.check(B, H, T, S)
        b, h, i, j = _places(B, H, T, S, device, rows, keys)
        return _dense(self, b, h, i, j, S, dtype)

    def __add__(self, other: "Prior") -> "Prior":
        """Both at once: measures multiply, logarithms add."""
        return Sum((*_parts(self), *_parts(other)))


@dataclass(frozen=True)
class Causal(Prior):
    """Position i sees keys j <= i, or j < i when ``strict``.

    >>> Causal().log(2, 3)
    tensor([[[[0., 0., -inf],
              [0., 0., 0.]]]])
    """

    strict: bool = False

    def admits(self, b: Tensor, h: Tensor, i: Tensor, j: Tensor, S: int) -> Tensor:  # noqa: ARG002
        return j < i if self.strict else j <= i

    def reach(self, first: int, last: int, S: int) -> tuple[int, int]:  # noqa: ARG002
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

    def admits(self, b: Tensor, h: Tensor, i: Tensor, j: Tensor, S: int) -> Tensor | None:  # noqa: ARG002
        near = None if self.left is None else j >= i - self.left
        if self.right is None:
            return near
        ahead = j <= i + self.right
        return ahead if near is None else near & ahead

    def reach(self, first: int, last: int, S: int) -> tuple[int, int]:
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

    def admits(self, b: Tensor, h: Tensor, i: Tensor, j: Tensor, S: int) -> Tensor:  # noqa: ARG002
        real = self.lengths[b]
        return j < real if self.side == "right" else j >= S - real

    def check(self, B: int, H: int, T: int, S: int) -> None:  # noqa: ARG002
        if len(self.lengths) != B:
            raise ValueError(f"padding gives {len(self.lengths)} lengths for {B} sequences.")


@dataclass(frozen=True, eq=False)
class Dense(Prior):
    """log u given entry by entry, finite or -inf; True in a bool tensor means "may look".

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

    def admits(self, b: Tensor, h: Tensor, i: Tensor, j: Tensor, S: int) -> Tensor | None:
        return self._at(b, h, i, j, S) if self.log_prior.dtype == torch.bool else None

    def bias(self, b: Tensor, h: Tensor, i: Tensor, j: Tensor, S: int) -> Tensor | None:
        return None if self.log_prior.dtype == torch.bool else self._at(b, h, i, j, S)

    def tensors(self) -> tuple[Tensor, ...]:
        return (self.log_prior,)

    def check(self, B: int, H: int, T: int, S: int) -> None:
        wanted = (B, H, T, S)
        sizes = self._four().shape
        if any(size not in (1, want) for size, want in zip(sizes, wanted, strict=True)):
            raise ValueError(
                f"a dense prior of shape {tuple(self.log_prior.shape)} does not broadcast to "
                f"(B, H, T, S) = {wanted}."
            )

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
        """The tensor itself, cut: gathering it point by point would copy it."""
        self.check(B, H, T, S)
        x = self._four()
        x = x if x.shape[2] == 1 else x[:, :, rows]
        x = x if x.shape[3] == 1 else x[:, :, :, keys]
        if x.dtype == torch.bool:
            return _forbid(x.to(device) if device else x, dtype)
        return x.to(device=device, dtype=dtype)

    def _four(self) -> Tensor:
        x = self.log_prior
        return x[(None,) * (4 - x.dim())]

    def _at(self, b: Tensor, h: Tensor, i: Tensor, j: Tensor, S: int) -> Tensor:
        x = self._four()
        t = i - (S - x.shape[2])  # from a position among the keys back to the number of a query
        places = zip((b, h, t, j), x.shape, strict=True)
        return x[tuple(place if size > 1 else torch.zeros_like(place) for place, size in places)]


@dataclass(frozen=True)
class Sum(Prior):
    """Several priors at once; made by ``a + b``."""

    parts: tuple[Prior, ...]

    def admits(self, b: Tensor, h: Tensor, i: Tensor, j: Tensor, S: int) -> Tensor | None:
        found = None
        for part in self.parts:
            one = part.admits(b, h, i, j, S)
            found = one if found is None else (found if one is None else found & one)
        return found

    def bias(self, b: Tensor, h: Tensor, i: Tensor, j: Tensor, S: int) -> Tensor | None:
        total = None
        for part in self.parts:
            one = part.bias(b, h, i, j, S)
            total = one if total is None else (total if one is None else total + one)
        return total

    def reach(self, first: int, last: int, S: int) -> tuple[int, int]:
        ranges = [part.reach(first, last, S) for part in self.parts]
        low = max(low for low, _ in ranges)
        return low, max(low, min(high for _, high in ranges))

    def tensors(self) -> tuple[Tensor, ...]:
        return tuple(tensor for part in self.parts for tensor in part.tensors())

    def check(self, B: int, H: int, T: int, S: int) -> None:
        for part in self.parts:
            part.check(B, H, T, S)

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
        """Part by part, so that a part with a quicker dense form uses it."""
        cut = {"B": B, "H": H, "device": device, "dtype": dtype, "rows": rows, "keys": keys}
        first, *rest = self.parts
        total = first.log(T, S, **cut)  # type: ignore[arg-type]
        for part in rest:
            total = total + part.log(T, S, **cut)  # type: ignore[arg-type]
        return total


def _parts(prior: Prior) -> tuple[Prior, ...]:
    return prior.parts if isinstance(prior, Sum) else (prior,)


def _places(
    B: int, H: int, T: int, S: int, device: torch.device | str | None, rows: slice, keys: slice
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Indices (B, 1, 1, 1), (1, H, 1, 1), (1, 1, t, 1), (1, 1, 1, s) of a block."""
    t0, t1, _ = rows.indices(T)
    s0, s1, _ = keys.indices(S)
    b = torch.arange(B, device=device)[:, None, None, None]
    h = torch.arange(H, device=device)[:, None, None]
    i = torch.arange(t0 + S - T, t1 + S - T, device=device)[:, None]
    j = torch.arange(s0, s1, device=device)
    return b, h[None], i[None, None], j[None, None, None]


def _dense(
    prior: Prior, b: Tensor, h: Tensor, i: Tensor, j: Tensor, S: int, dtype: torch.dtype
) -> Tensor:
    open_ = prior.admits(b, h, i, j, S)
    bias = prior.bias(b, h, i, j, S)
    if bias is None:
        return i.new_zeros(1, 1, 1, 1, dtype=dtype) if open_ is None else _forbid(open_, dtype)
    bias = bias.to(dtype)
    return bias if open_ is None else torch.where(open_, bias, -torch.inf)


def _forbid(open_: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.zeros_like(open_, dtype=dtype).masked_fill(~open_, -torch.inf)
