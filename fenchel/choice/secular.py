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

**Bounds.** s_1 / (s_1 - lambda) - phi(lambda) increases on (s_2, s_1), so its sign at a trial value
tells on which side of it the root lies. A difference of two floating-point numbers is correct to
one rounding, and both sums have no negative term: the two sides are known to K roundings, and a
sign that is clear beyond them is a proof. Where it is not, s_2 <= lambda <= s_1 remains. Of many
entries only the largest are taken one by one; the others, at most s_m each and T together, add to
phi at least T / lambda and at most T / (lambda - s_m), which gives a root on either side.

Golub (1973), Some modified matrix eigenvalue problems.
"""

import torch
from torch import Tensor

from fenchel.torch_internals import off_mps, to_float64

_WIDTH = 1e-9
"""Relative distance of the two bounds from the root; rounding is a thousand times smaller."""
_LARGEST = 32
"""Entries that the bounds take one by one."""
_STEPS = 3  # and two more below; on an almost straight line these reach the last digit


def largest_eigenvalue(s: Tensor) -> Tensor:
    """The largest eigenvalue of diag(s) - s s^T / sum(s), differentiable: (..., K) -> (...)."""
    if s.shape[-1] < 2:
        return s.sum(-1) * 0.0
    s = to_float64(s)
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


@torch.no_grad()
def eigenvalue_bounds(s: Tensor) -> tuple[Tensor, Tensor]:
    """Bounds of ``largest_eigenvalue(s)`` that hold after rounding: (..., K) -> two of (...)."""
    K = s.shape[-1]
    if K < 2:
        zero = to_float64(s.sum(-1)) * 0.0
        return zero, zero
    s = off_mps(s)
    top = s.topk(min(K, _LARGEST), dim=-1)
    values = top.values.double()
    first, second = values[..., 0], values[..., 1]
    regular = (second > 0.0) & (second < first)
    # The two equations: with the small entries at 0 and at the least of the large ones.
    at = torch.stack((torch.zeros_like(second), values[..., -1]))
    tail = torch.zeros_like(second)
    if K > _LARGEST:
        tail = s.scatter(-1, top.indices, 0.0).sum(-1, dtype=torch.float64)
    large = values[..., 1:]

    def sides(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """s_1 / (s_1 - x), phi(x) and -phi'(x), the first two to K roundings."""
        room, far = x.unsqueeze(-1) - large, x - at
        terms, last = large / room, tail / far
        return first / (first - x), terms.sum(-1) + last, (terms / room).sum(-1) + last / far

    R = large.sum(-1) + tail
    start = torch.maximum(first * R / (first + R), 2.0 * first * second / (first + second))
    x = start.expand(2, *start.shape)
    for _ in range(_STEPS + 2):
        _, phi, steepness = sides(x)
        x = x - (x - first + first / phi) / (1.0 + first * steepness / phi.square())
    away = torch.tensor([1.0 - _WIDTH, 1.0 + _WIDTH], dtype=x.dtype, device=x.device)
    x = x * away.view(2, *(1,) * start.dim())
    left, phi, _ = sides(x)
    margin = (K + 16) * torch.finfo(x.dtype).eps
    inside = regular & (x > second) & (x < first)
    below = inside[0] & (left[0] * (1.0 + margin) < phi[0] * (1.0 - margin))
    above = inside[1] & (left[1] * (1.0 - margin) > phi[1] * (1.0 + margin))
    largest = torch.where(second == 0.0, 0.0, first)
    return torch.where(below, x[0], second), torch.where(above, x[1], largest)


def _newton(d: Tensor, ratio: Tensor, gap: Tensor, rest: Tensor) -> Tensor:
    """One step on d * ratio - gap + 1 / phi = 0, the equation divided by the first."""
    room = d.unsqueeze(-1) + (1.0 - rest)
    phi, steepness = (rest / room).sum(-1), (rest / room.square()).sum(-1)
    excess = d * ratio - gap + 1.0 / phi
    return d - excess / (ratio + steepness / phi.square())
