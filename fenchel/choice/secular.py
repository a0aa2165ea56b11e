"""The largest eigenvalue of a choice's Jacobian, exactly, in O(K) per row.

For s >= 0 with s_1 >= s_2 >= ... , R = s_2 + ... + s_K, the matrix diag(s) - s s^T / sum(s)
has its largest eigenvalue at the root in [s_2, s_1] of the secular equation

    sum_i s_i / (s_i - lambda) = 0,   that is   lambda + s_1 / phi(lambda) = s_1,
    phi(lambda) = sum over i >= 2 of s_i / (lambda - s_i).

1 / phi is concave and almost linear, so Newton's method increases to the root from any point
below it and never passes it; it starts at the larger of

    s_1 R / (s_1 + R)            the Rayleigh quotient of the first corner,
    2 s_1 s_2 / (s_1 + s_2)      the root with only s_2 in the sum,

which is more than half the root. R is summed from the other entries and never computed as 1 - s_1:
in a saturated row that difference has no correct digit.

The unknown is d = lambda / s_2 - 1, with the gap g = (s_1 - s_2) / s_1. Where the two largest are a
few units in the last place apart, no number lies between them for lambda, but d and g have all
their digits.

Golub (1973), Some modified matrix eigenvalue problems.
"""

import torch
from torch import Tensor

_STEPS = 3  # and two more below; on an almost straight line these reach the last digit


def largest_eigenvalue(s: Tensor) -> Tensor:
    """The largest eigenvalue of diag(s) - s s^T / sum(s), differentiable: (..., K) -> (...)."""
    if s.shape[-1] < 2:
        return s.sum(-1) * 0.0
    s = s.double()
    top = s.topk(2, dim=-1)
    first, second = top.values.unbind(-1)
    lone, tied = second == 0.0, first == second  # the root is then 0, or first itself
    regular = ~(lone | tied)
    # In units of the second, so that no tiny number is squared. Rows without an inner root solve
    # a harmless equation instead, and are corrected at the end.
    unit, above = torch.where(regular, second, 1.0), torch.where(regular, first, 2.0)
    ratio, gap = unit / above, (above - unit) / above
    rest = torch.ones_like(s).scatter(-1, top.indices[..., :1], 0.0)
    rest = torch.where(regular.unsqueeze(-1), rest * s / unit.unsqueeze(-1), rest)
    with torch.no_grad():
        R = rest.sum(-1)
        d = torch.maximum((R * gap - 1.0) / (1.0 + R * ratio), gap / (1.0 + ratio))
        for _ in range(_STEPS):
            d = _newton(d, ratio, gap, rest)
    for _ in range(2):  # from the root itself: two steps carry two derivatives
        d = _newton(d, ratio, gap, rest)
    return torch.where(regular, unit * (1.0 + d), torch.where(lone, 0.0 * second, first))


def _newton(d: Tensor, ratio: Tensor, gap: Tensor, rest: Tensor) -> Tensor:
    """One step on d * ratio - gap + 1 / phi = 0, the equation divided by the first."""
    room = d.unsqueeze(-1) + (1.0 - rest)
    phi, steepness = (rest / room).sum(-1), (rest / room.square()).sum(-1)
    excess = d * ratio - gap + 1.0 / phi
    return d - excess / (ratio + steepness / phi.square())
