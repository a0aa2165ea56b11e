"""The largest eigenvalue of a choice's Jacobian, exactly, in O(K) a row.

For s >= 0 with s_1 >= s_2 >= ... , R = s_2 + ... + s_K, the matrix diag(s) - s s^T / sum(s)
has its largest eigenvalue at the root in [s_2, s_1] of the secular equation

    sum_i s_i / (s_i - lambda) = 0,   that is   lambda + s_1 / phi(lambda) = s_1,
    phi(lambda) = sum over i >= 2 of s_i / (lambda - s_i).

1 / phi is concave and almost linear, so Newton's method climbs to the root from any point
below it, never over it; it starts at the larger of

    s_1 R / (s_1 + R)            the Rayleigh quotient of the first corner,
    2 s_1 s_2 / (s_1 + s_2)      the root with only s_2 left of the sum,

which is more than half the root. R is a sum of the others and never 1 - s_1: in a saturated
row that difference has no correct digit.

Golub (1973), Some modified matrix eigenvalue problems.
"""

import torch
from torch import Tensor

_STEPS = 8  # from a start within a factor 2, on a function this close to a line


def largest_eigenvalue(s: Tensor) -> Tensor:
    """The largest eigenvalue of diag(s) - s s^T / sum(s), differentiable: (..., K) -> (...)."""
    if s.shape[-1] < 2:
        return s.sum(-1) * 0.0
    s = s.double()
    top = s.topk(2, dim=-1)
    first, second = top.values.unbind(-1)
    is_rest = torch.ones_like(s).scatter(-1, top.indices[..., :1], 0.0)
    tied = first == second  # the root is first itself, and the equation is singular there
    lone = second == 0.0
    regular = ~(tied | lone)
    # Rows without an inner root solve a harmless equation instead, and are put right below.
    plain = torch.tensor([2.0, 1.0], dtype=s.dtype, device=s.device)
    a = torch.where(regular, first, plain[0])
    b = torch.where(regular, second, plain[1])
    rest = torch.where(regular.unsqueeze(-1), s * is_rest, is_rest)
    with torch.no_grad():
        R = rest.sum(-1)
        root = torch.maximum(a * R / (a + R), 2.0 * a * b / (a + b))
        for _ in range(_STEPS):
            root = _newton(root, a, rest)
    for _ in range(2):  # from the root itself: two steps carry two derivatives
        root = _newton(root, a, rest)
    return torch.where(regular, root, torch.where(lone, 0.0 * second, first))


def _newton(root: Tensor, first: Tensor, rest: Tensor) -> Tensor:
    terms = rest / (root.unsqueeze(-1) - rest)
    squares = rest / (root.unsqueeze(-1) - rest).square()
    phi, steepness = terms.sum(-1), squares.sum(-1)
    excess = root + first / phi - first
    return root - excess / (1.0 + first * steepness / phi.square())
