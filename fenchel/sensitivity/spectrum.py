"""The largest singular values of an operator, with their vectors.

A block of k random vectors at once, so that a value of multiplicity up to k is returned as often as
it occurs: the Krylov space of J^T J is spanned by orthonormal blocks V, T = V^T J^T J V is its
small image, and the top eigenvectors of T give the right vectors. In the end J is applied to them
once more and a small decomposition of the result gives values, left and right vectors that fit:

    J right_i = value_i left_i       J^T left_i = value_i right_i + (a residual of length error_i)

so some singular value of J lies within error_i of value_i. That these are the largest ones holds
with high probability: the start is random (fenchel/sensitivity/golub_kahan.py has the
probability).
"""

from typing import NamedTuple

import torch
from torch import Tensor

from fenchel.sensitivity.golub_kahan import Basis, gaussian, length, scaled, unit_scale
from fenchel.sensitivity.operator import Matrix, Operator, Scaled


class SingularValues(NamedTuple):
    """The top k singular values, largest first, after the axes of the operator's batch."""

    values: Tensor
    """(*batch, k)."""
    error: Tensor
    """(*batch, k); a singular value lies this near to each of ``values``."""
    left: Tensor
    """(k, *shape of the output), orthonormal."""
    right: Tensor | tuple[Tensor, ...]
    """(k, *shape of the input), orthonormal."""
    iterations: int


def singular_values(
    J: Operator | Tensor,
    k: int,
    *,
    tol: float = 1e-8,
    iterations: int = 60,
    generator: torch.Generator | None = None,
) -> SingularValues:
    """The k largest singular values of J, until every error is below tol times the largest.

    >>> top = singular_values(torch.diag(torch.tensor([3.0, 3.0, 1.0], dtype=torch.float64)), 2)
    >>> print(*(round(float(s), 6) for s in top.values))
    3.0 3.0
    """
    J = Matrix(J) if isinstance(J, Tensor) else J
    n, most = J.domain.size, min(J.shape)
    if not 1 <= k <= most:
        raise ValueError(
            f"an operator of shape {J.shape} has 1 to {most} singular values, got k={k}."
        )
    block = torch.stack([gaussian(J, generator) for _ in range(k)])
    v = scaled(block[0], length(block[0]))
    f = unit_scale(J, v, length(J.apply(v[None])[0]))
    J = J if f is None else Scaled(J, f)
    run = _BlockKrylov(J)
    for step in range(1, iterations + 1):  # noqa: B007
        block = run.step(block)
        values, vectors = torch.linalg.eigh(run.image())
        tops = vectors[..., -k:]
        # The part of J^T J times a Ritz vector outside the space comes only from the last block.
        rest = tops[..., -len(block) :, :].mT @ block.movedim(0, -2).double()
        if bool((length(rest) <= tol * values[..., -1:]).all()) or run.basis.count >= n:
            break
    top = _fitting(J, run.basis, tops.flip(-1), step)
    if f is None:
        return top
    f = f.unsqueeze(-1)
    return top._replace(values=(top.values.double() / f).to(top.values), error=top.error / f)


class _BlockKrylov:
    """A growing orthonormal basis and the image T of J^T J in it."""

    def __init__(self, J: Operator) -> None:
        self.J = J
        self.basis = Basis()
        self.columns: list[Tensor] = []

    def step(self, block: Tensor) -> Tensor:
        """Add a block to the basis; returns J^T J times it, outside the space: (b, *batch, n)."""
        first = self.basis.count
        added = []
        for w in block[: self.J.domain.size - first]:
            # A direction that is already in the space becomes 0 and has no further effect.
            w = self.basis.without(w)
            added.append(scaled(w, length(w)))
            self.basis.append(added[-1])
        back = self.J.adjoint(self.J.apply(torch.stack(added)))
        self.columns += [self.basis.along(w).double() for w in back]
        return torch.stack([self.basis.without(w) for w in back])

    def image(self) -> Tensor:
        """T, (*batch, count, count), from its upper triangle."""
        count = self.basis.count
        wide = [torch.nn.functional.pad(c, (0, count - c.shape[-1])) for c in self.columns]
        upper = torch.stack(wide, -1).triu()
        return upper + upper.triu(1).mT


def _fitting(J: Operator, basis: Basis, vectors: Tensor, iterations: int) -> SingularValues:
    """Values with matching left and right vectors, from the right space."""
    V = torch.stack([basis.combine(y) for y in vectors.movedim(-1, 0)])
    W = J.apply(V).movedim(0, -1)  # (*batch, m, k)
    left, values, turn = torch.linalg.svd(W, full_matrices=False)
    right = (V.movedim(0, -1) @ turn.mT).movedim(-1, 0)
    left = left.movedim(-1, 0)
    rest = J.adjoint(left) - values.movedim(-1, 0).unsqueeze(-1) * right
    error = length(rest).movedim(0, -1) + J.error * values[..., :1]
    return SingularValues(
        values,
        error,
        J.codomain.write(left, "stack"),  # type: ignore[arg-type]
        J.domain.write(right, "stack"),
        iterations,
    )
