"""How far to go: the first point of a line where the scores have moved by gamma.

The square of the change, y(t), is nearly a parabola: exactly one in the t of the queries alone,
but for a norm of queries and keys. ``reach`` puts one through y(0) and the last two points, goes
to where it meets gamma^2, and keeps a bracket for when it leads astray; all heads of all layers
at once, and without asking the device for a number. Heads that share keys share the keys' t:

    t_K of a group     the smallest t at which one of its heads has moved by gamma
    t_Q of each head   then the t at which this head has, the keys' part included

so that every head's scores, not only the group's mean, move by gamma.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from fenchel.optim.score.line import Factors, Line, by_group

ROUNDS = 5
"""Points at which the change is measured, beside t = 0."""
NEAR = 1e-4
"""Relative error of the squared change at which a head is done."""


def sizes(line: Line, gamma: Tensor, shrink: Factors, start: Tensor, limit: Tensor) -> Factors:
    """Move every head's scores by gamma (L, H), going no further than ``limit`` (L, H)."""

    def common(t: Tensor) -> Tensor:
        return line.move(line.alike(t), shrink)[0]

    if line.group == 1:
        t = reach(common, gamma, start, limit)
        return line.alike(t)

    # keys by the head that they move most
    def grouped(t: Tensor) -> Tensor:
        each = common(t.repeat_interleave(line.group, dim=1)) / gamma.clamp(min=1e-30)
        return by_group(each, t.shape[1]).amax(2)

    groups = start.shape[1] // line.group
    first, most = (by_group(x, groups).amin(2) for x in (start, limit))
    t_K = reach(grouped, torch.ones_like(first), first, most)
    begin = t_K.repeat_interleave(line.group, dim=1)
    t_Q = reach(lambda t: line.move(Factors(t, t_K), shrink)[0], gamma, begin, limit)
    return Factors(t_Q, t_K)


def reach(
    change: Callable[[Tensor], Tensor], gamma: Tensor, start: Tensor, limit: Tensor
) -> Tensor:
    """The t in [0, limit] with change(t) = gamma, near ``start``; ``limit`` if none is."""
    low, high = torch.zeros_like(start), torch.full_like(start, torch.inf)
    y0 = change(low).square()
    wanted = gamma.square() - y0
    t = torch.minimum(start, limit)
    last, slope_at_last = low, torch.full_like(start, torch.nan)
    for _ in range(ROUNDS):
        y = change(t).square()
        below = y <= gamma.square()
        low, high = torch.where(below, t, low), torch.where(below, high, t)
        slope = (y - y0) / t
        last, slope_at_last, guess = t, slope, _meets(wanted, t, slope, last, slope_at_last)
        astray = ~(guess > low) | ~(guess < high)
        safe = torch.where(high.isfinite(), 0.5 * (low + high), 2.0 * t)
        guess = torch.where(astray, safe, guess)
        near = (y / gamma.square() - 1.0).abs() < NEAR  # closer than rounding lets us see
        t = torch.minimum(torch.where(near | ~guess.isfinite(), t, guess), limit)
    return t


def _meets(wanted: Tensor, t: Tensor, slope: Tensor, last: Tensor, slope_at_last: Tensor) -> Tensor:
    """The larger t with y(t) - y(0) = b t + c t^2 = wanted, from (y(t) - y(0)) / t at two points.

    With one point b = 0: the change grows in proportion to t.
    """
    c = (slope - slope_at_last) / (t - last)
    c = torch.where(c.isfinite(), c, slope / t)
    b = slope - c * t
    root = (b.square() + 4.0 * c * wanted).sqrt()
    return torch.where(b > 0, 2.0 * wanted / (b + root), (root - b) / (2.0 * c))
