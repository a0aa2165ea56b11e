"""Linear maps given by their products with vectors.

    J @ v      (m, n) times n          J.T @ u      the adjoint, n from m

An operator takes a tensor of the shape of its input and returns one of the shape of its output; a
map of several tensors takes a tuple. The same numbers may also be given in a flat layout:

    shaped like the input            -> shaped like the output
    (k, *shape of the input)         -> (k, *shape of the output), a stack of k vectors
    (n,)  or  (n, k)                 -> (m,)  or  (m, k), as for a matrix

An operator may be a batch of operators, one per index of the leading axes ``batch``: every rule
above then applies after those axes, and a spectral norm is one number per index. ``A @ B``,
``A + B`` are operators again, so a block of a network is written as its
formula: ``identity(x) + attention @ norm``.

Inside, vectors are flat: (k, *batch, n).
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Union, final, overload

import torch
from torch import Tensor

from fenchel.sensitivity.rounding import above, frobenius

Tensors = Tensor | Sequence[Tensor]
Shape = tuple[int, ...]


@dataclass(frozen=True)
class Space:
    """The shapes of one or several tensors, and their layout as one flat vector."""

    shapes: tuple[Shape, ...]
    """One shape per tensor, without the axes of ``batch``."""
    batch: Shape = ()
    several: bool = False
    """Whether they come as a tuple."""

    @property
    def size(self) -> int:
        """Numbers in one vector."""
        return sum(prod(shape) for shape in self.shapes)

    def read(self, v: Tensors) -> tuple[Tensor, str]:
        """``v`` as (k, *batch, size), and the name of its layout."""
        if not isinstance(v, Tensor):
            return self._read_tuple(tuple(v))
        vector, b = (*self.batch, self.size), len(self.batch)
        if not self.several:
            shaped = (*self.batch, *self.shapes[0])
            if v.shape == shaped:
                return v.reshape(1, *vector), "shaped"
        if v.shape == vector:
            return v.unsqueeze(0), "vector"
        if v.shape[:-1] == vector and v.dim() == b + 2:
            return v.movedim(-1, 0), "columns"
        if not self.several and v.shape[1:] == shaped:
            return v.reshape(-1, *vector), "stack"
        raise ValueError(f"this operator takes {self._accepted()}; got {tuple(v.shape)}.")

    def _read_tuple(self, v: tuple[Tensor, ...]) -> tuple[Tensor, str]:
        shaped = [(*self.batch, *shape) for shape in self.shapes]
        got = [tuple(x.shape) for x in v]
        if self.several and got == shaped:
            return self.flatten([x.unsqueeze(0) for x in v]), "shaped"
        if self.several and [shape[1:] for shape in got] == shaped:
            return self.flatten(v), "stack"
        raise ValueError(f"this operator takes {self._accepted()}; got shapes {got}.")

    def write(self, flat: Tensor, layout: str) -> Tensor | tuple[Tensor, ...]:
        """The inverse of ``read``: (k, *batch, size) -> the named layout."""
        if layout == "vector":
            return flat[0]
        if layout == "columns":
            return flat.movedim(0, -1)
        parts = self.unflatten(flat)
        if layout == "shaped":
            parts = tuple(part[0] for part in parts)
        return parts if self.several else parts[0]

    def flatten(self, parts: Sequence[Tensor]) -> Tensor:
        """Tensors (k, *batch, *shape) concatenated: (k, *batch, size)."""
        lead = 1 + len(self.batch)
        flats = [part.reshape(*part.shape[:lead], -1) for part in parts]
        return flats[0] if len(flats) == 1 else torch.cat(flats, -1)

    def unflatten(self, flat: Tensor) -> tuple[Tensor, ...]:
        """(k, *batch, size) -> the tensors (k, *batch, *shape)."""
        pieces = torch.split_with_sizes(flat, [prod(shape) for shape in self.shapes], -1)
        return tuple(
            piece.reshape(*flat.shape[:-1], *shape)
            for piece, shape in zip(pieces, self.shapes, strict=True)
        )

    def _accepted(self) -> str:
        shaped = [(*self.batch, *shape) for shape in self.shapes]
        vector = f"tensors of shapes {shaped}" if self.several else f"a tensor of shape {shaped[0]}"
        return f"{vector}, a stack of them, or a flat {(*self.batch, self.size)}"


class Operator(ABC):
    """A linear map, or a batch of them, from ``domain`` to ``codomain``."""

    domain: Space
    codomain: Space
    dtype: torch.dtype
    device: torch.device
    rounding: float = 0.0
    """Error of |J v| for a unit v in addition to ``error``: by cancellation, by underflow."""

    @abstractmethod
    def apply(self, v: Tensor) -> Tensor:
        """J v for a stack of flat vectors: (k, *batch, n) -> (k, *batch, m)."""

    @abstractmethod
    def adjoint(self, u: Tensor) -> Tensor:
        """J^T u for a stack of flat vectors: (k, *batch, m) -> (k, *batch, n)."""

    @property
    def error(self) -> float:
        """How far J v may be off, relative to the norm of J times that of v."""
        return 32.0 * torch.finfo(self.dtype).eps

    def ceiling(self) -> Tensor | None:
        """A certain upper bound on the spectral norm, rounded up: ``batch``; None if unknown."""
        return None

    def single(self) -> "Operator | None":
        """The same operator in float32; None where there is none."""
        return None

    @property
    def batch(self) -> Shape:
        """The leading axes of a batch of operators."""
        return self.domain.batch

    @property
    def shape(self) -> tuple[int, int]:
        """(m, n) of each operator."""
        return self.codomain.size, self.domain.size

    @property
    def T(self) -> "Operator":
        """The adjoint."""
        return Transpose(self)

    @overload
    def __matmul__(self, other: "Operator") -> "Operator": ...
    @overload
    def __matmul__(self, other: Tensors) -> Any: ...
    def __matmul__(self, other: Union["Operator", Tensors]) -> Any:
        """J @ v for a vector in any accepted layout, or the product with another operator."""
        if isinstance(other, Operator):
            return Product(self, other)
        flat, layout = self.domain.read(other)
        return self.codomain.write(self.apply(flat.to(self.device, self.dtype)), layout)

    def __add__(self, other: "Operator") -> "Operator":
        """v -> A v + B v."""
        return Sum(self, other)

    def dense(self, columns: int = 64) -> Tensor:
        """The matrix (*batch, m, n), for small operators, ``columns`` at a time."""
        n = self.domain.size
        blocks = []
        for first in range(0, n, columns):
            unit = torch.zeros(min(columns, n - first), n, dtype=self.dtype, device=self.device)
            unit[:, first:].fill_diagonal_(1.0)
            unit = unit.view(-1, *(1,) * len(self.batch), n)
            blocks.append(self.apply(unit.expand(-1, *self.batch, n)))
        return torch.cat(blocks).movedim(0, -1)


@final
class Transpose(Operator):
    """The adjoint of an operator J."""

    def __init__(self, inner: Operator) -> None:
        self.inner = inner
        self.domain, self.codomain = inner.codomain, inner.domain
        self.dtype, self.device = inner.dtype, inner.device
        self.rounding = inner.rounding

    def apply(self, v: Tensor) -> Tensor:
        return self.inner.adjoint(v)

    def adjoint(self, u: Tensor) -> Tensor:
        return self.inner.apply(u)

    @property
    def error(self) -> float:
        return self.inner.error

    def ceiling(self) -> Tensor | None:
        return self.inner.ceiling()

    @property
    def T(self) -> Operator:
        return self.inner


@final
class Product(Operator):
    """v -> A (B v)."""

    def __init__(self, left: Operator, right: Operator) -> None:
        inner, output = left.domain, right.codomain
        if (inner.size, inner.batch) != (output.size, output.batch):
            raise ValueError(
                f"A @ B needs the input of A to be the output of B; got {inner.shapes} and "
                f"{output.shapes} with batches {inner.batch} and {output.batch}."
            )
        self.left, self.right = left, right
        self.domain, self.codomain = right.domain, left.codomain
        self.dtype = torch.promote_types(left.dtype, right.dtype)
        self.device = left.device

    def apply(self, v: Tensor) -> Tensor:
        inner = self.right.apply(v.to(self.right.dtype)).to(self.left.dtype)
        return self.left.apply(inner).to(self.dtype)

    def adjoint(self, u: Tensor) -> Tensor:
        inner = self.left.adjoint(u.to(self.left.dtype)).to(self.right.dtype)
        return self.right.adjoint(inner).to(self.dtype)

    @property
    def error(self) -> float:
        """The sum of both, as if the product had the norm of its factors."""
        return self.left.error + self.right.error

    def ceiling(self) -> Tensor | None:
        a, b = self.left.ceiling(), self.right.ceiling()
        return None if a is None or b is None else above(a.double() * b.double())


@final
class Sum(Operator):
    """v -> A v + B v."""

    def __init__(self, left: Operator, right: Operator) -> None:
        for a, b in ((left.domain, right.domain), (left.codomain, right.codomain)):
            if (a.size, a.batch) != (b.size, b.batch):
                raise ValueError(
                    f"A + B needs two operators of one size; got {left.shape} in {left.batch} "
                    f"and {right.shape} in {right.batch}."
                )
        self.left, self.right = left, right
        self.domain, self.codomain = left.domain, left.codomain
        self.dtype = torch.promote_types(left.dtype, right.dtype)
        self.device = left.device
        self.rounding = left.rounding + right.rounding

    def apply(self, v: Tensor) -> Tensor:
        a, b = self.left, self.right
        return a.apply(v.to(a.dtype)).to(self.dtype) + b.apply(v.to(b.dtype))

    def adjoint(self, u: Tensor) -> Tensor:
        a, b = self.left, self.right
        return a.adjoint(u.to(a.dtype)).to(self.dtype) + b.adjoint(u.to(b.dtype))

    @property
    def error(self) -> float:
        return self.left.error + self.right.error

    def ceiling(self) -> Tensor | None:
        a, b = self.left.ceiling(), self.right.ceiling()
        return None if a is None or b is None else above(a.double() + b.double())


@final
class Scaled(Operator):
    """v -> J (c v), for a number c or one per operator of the batch."""

    def __init__(self, inner: Operator, factor: float | Tensor) -> None:
        self.inner = inner
        self.factor = torch.as_tensor(factor, dtype=torch.float64, device=inner.device)
        self.domain, self.codomain = inner.domain, inner.codomain
        self.dtype, self.device = inner.dtype, inner.device
        self.rounding = float(self.factor.abs().max()) * inner.rounding

    def apply(self, v: Tensor) -> Tensor:
        return self.inner.apply(v * self.factor.unsqueeze(-1).to(v.dtype))

    def adjoint(self, u: Tensor) -> Tensor:
        return self.inner.adjoint(u * self.factor.unsqueeze(-1).to(u.dtype))

    @property
    def error(self) -> float:
        return self.inner.error

    def ceiling(self) -> Tensor | None:
        inner = self.inner.ceiling()
        return None if inner is None else above(self.factor.abs() * inner.double())


@final
class Matrix(Operator):
    """A matrix (*batch, m, n) as an operator."""

    def __init__(self, A: Tensor) -> None:
        if A.dim() < 2 or not A.is_floating_point():
            raise ValueError(
                f"a matrix has two or more axes of floating point, got {tuple(A.shape)} of "
                f"{A.dtype}."
            )
        batch = tuple(A.shape[:-2])
        self.A = A
        self.domain = Space(((A.shape[-1],),), batch)
        self.codomain = Space(((A.shape[-2],),), batch)
        self.dtype, self.device = A.dtype, A.device

    def apply(self, v: Tensor) -> Tensor:
        return torch.einsum("...mn,k...n->k...m", self.A, v)

    def adjoint(self, u: Tensor) -> Tensor:
        return torch.einsum("...mn,k...m->k...n", self.A, u)

    def ceiling(self) -> Tensor:
        return frobenius(self.A)


@final
class Identity(Operator):
    """v -> v."""

    def __init__(self, space: Space, dtype: torch.dtype, device: torch.device) -> None:
        self.domain = self.codomain = space
        self.dtype, self.device = dtype, device

    def apply(self, v: Tensor) -> Tensor:
        return v

    def adjoint(self, u: Tensor) -> Tensor:
        return u

    def ceiling(self) -> Tensor:
        return torch.ones(self.batch, dtype=self.dtype, device=self.device)


def identity(x: Tensor, *, batch: int = 0) -> Operator:
    """v -> v on tensors of the shape of ``x``; the first ``batch`` axes are those of a batch."""
    space = Space((tuple(x.shape[batch:]),), tuple(x.shape[:batch]))
    return Identity(space, x.dtype, x.device)
