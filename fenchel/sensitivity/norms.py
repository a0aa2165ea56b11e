"""Norms of small matrices, of non-negative ones, and of operators token by token.

Small matrices, many at once: ``spectral`` takes the largest eigenvalue of A A^T or A^T A, whichever
is the smaller matrix, which is far quicker than as many singular value decompositions.

A matrix P >= 0 has its spectral norm between numbers that any positive y gives (Collatz, Wielandt):

    |P|_2^2 = lambda_max(P^T P) <= max_j (P^T P y)_j / y_j,

so power steps on y give an upper bound that holds at every step and tends to the norm.

Token by token. For an operator between tokens, with J_ij the block from input token j to output
token i, and |X| = max_i |x_i| the largest token,

    |J d| <= max_i sum_j |J_ij|_2  |d|         an upper bound of the norm in that sense,

and a lower one by Boyd's power method: fix the row where |(J d)_i| is largest, rotate every d_j
towards it, repeat; no step decreases it. ``influence`` gives the numbers |J_ij| themselves: how
far a change at token j can move token i.

Boyd (1974), The power method for l^p norms.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from fenchel.sensitivity.operator import Operator, Space
from fenchel.sensitivity.rounding import outward, unit_size

_POWER_STEPS = 16  # within 1 % on random, saturated and causal weights; a bound after any number


class TokenBracket(NamedTuple):
    """The norm of an operator for |X| = max_i |x_i|, from both sides."""

    lower: Tensor
    upper: Tensor
    direction: Tensor
    """One unit vector per token; it moves some output token by ``lower``."""


def largest(A: Tensor) -> Tensor:
    """The largest eigenvalue of symmetric positive matrices: (..., d, d) -> (...)."""
    if A.shape[-1] == 1:
        return A[..., 0, 0].clamp(min=0.0)
    values: Tensor = torch.linalg.eigvalsh(A)
    return values[..., -1].clamp(min=0.0)


def spectral(A: Tensor) -> Tensor:
    """The spectral norm of small matrices: (..., m, n) -> (...)."""
    if min(A.shape[-2:]) == 0:
        return A.new_zeros(A.shape[:-2])
    A, size = unit_size(A, (-2, -1))
    gram = A @ A.mT if A.shape[-2] <= A.shape[-1] else A.mT @ A
    return largest(gram).sqrt() * size[..., 0, 0]


def nonnegative(P: Tensor, steps: int = _POWER_STEPS) -> Tensor:
    """An upper bound of the spectral norm of P >= 0, close to it: (..., m, n) -> (...)."""
    P, size = unit_size(P, (-2, -1))
    start = torch.ones_like(P[..., 0, :])
    bound = perron(lambda y: (P.mT @ (P @ y.unsqueeze(-1))).squeeze(-1), start, steps)
    return outward(bound, sum(P.shape[-2:])) * size[..., 0, 0]


def perron(step: Callable[[Tensor], Tensor], start: Tensor, steps: int = _POWER_STEPS) -> Tensor:
    """``nonnegative`` for a P given by ``step``, y -> P^T P y; start > 0: (..., n) -> (...)."""
    y = start
    best = y.new_full(y.shape[:-1], torch.inf)
    for _ in range(steps):
        z = step(y)
        best = torch.minimum(best, (z / y).amax(-1))
        top = z.amax(-1, keepdim=True)
        # Any positive y gives a bound; the clamp keeps it positive where z has underflowed.
        y = torch.where(top > 0, z / top, 1.0).clamp(min=1e-6)
    return best.sqrt()


def influence(J: Operator) -> Tensor:
    """|J_ij|_2 for every input token j and output token i: (N_out, N_in).

    N M products, for operators between (N, M) tensors.

    >>> from fenchel.sensitivity import jacobian
    >>> influence(jacobian(lambda X: X.cumsum(0), torch.zeros(2, 3)))
    tensor([[1., 0.],
            [1., 1.]])
    """
    N, M = _tokens(J.domain)
    N_out, M_out = _tokens(J.codomain)
    columns = []
    for j in range(N):
        unit = torch.zeros(M, N, M, dtype=J.dtype, device=J.device)
        unit[:, j].fill_diagonal_(1.0)
        block = J.apply(unit.reshape(M, -1)).reshape(M, N_out, M_out)
        columns.append(spectral(block.movedim(0, -1)))
    return torch.stack(columns, -1)


def token_norm(
    J: Operator, *, steps: int = 20, rows: int = 8, generator: torch.Generator | None = None
) -> TokenBracket:
    """The norm of J for |X| = max_i |x_i|, from both sides; J between (N, M) tensors.

    Boyd's method runs for ``steps`` steps from each of the ``rows`` output tokens with the largest
    upper bounds.
    """
    N, M = _tokens(J.domain)
    N_out, M_out = _tokens(J.codomain)
    sums = influence(J).sum(-1)
    outputs = sums.topk(min(rows, N_out)).indices
    c = len(outputs)
    d = unit_rows(torch.randn(c, N, M, dtype=J.dtype, device=J.device, generator=generator))
    index = torch.arange(c, device=J.device)
    for _ in range(steps):
        moved = J.apply(d.reshape(c, -1)).reshape(c, N_out, M_out)
        pull = torch.zeros_like(moved)
        pull[index, outputs] = unit_rows(moved[index, outputs])
        back = J.adjoint(pull.reshape(c, -1)).reshape(c, N, M)
        d = torch.where(back.norm(dim=-1, keepdim=True) > 0, unit_rows(back), d)
    reached = J.apply(d.reshape(c, -1)).reshape(c, N_out, M_out).norm(dim=-1).amax(-1)
    best = reached.argmax()
    upper = sums.amax() * (1.0 + J.error)
    return TokenBracket(torch.minimum(reached[best], upper), upper, d[best])


def unit_rows(x: Tensor) -> Tensor:
    """Rows of length 1, and 0 where a row is 0: (..., d) -> (..., d)."""
    size = x.norm(dim=-1, keepdim=True)
    return x / torch.where(size > 0, size, 1.0)


def _tokens(space: Space) -> tuple[int, int]:
    shape = space.shapes[0]
    if len(shape) != 2 or space.several or space.batch:
        raise ValueError(
            f"token by token needs one operator between tensors (N, M), got {space.shapes} in a "
            f"batch {space.batch}; take one sequence at a time."
        )
    return shape[0], shape[1]
