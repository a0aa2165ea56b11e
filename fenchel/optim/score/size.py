"""How far to go: the first point of a line where the scores have moved by gamma.

The change of a head's scores along W + t U rises with t, almost in proportion. ``reach`` brackets
the wanted point and closes in by the secant through its ends, for all heads of all layers at
once and without asking the device for a number. Heads that share keys share the keys' t:

    t_K of a group     the smallest t at which one of its heads has moved by gamma
    t_Q of each head   then the t at which this head has, the keys' part included

so that every head's scores, not only the group's mean, move by gamma.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from fenchel.optim.score.line import Factors, Line, by_group

ROUNDS = 6
"""Points at which the change is measured; the secant's error falls faster than fourfold each."""


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
    at_low, at_high = torch.zeros_like(start), torch.full_like(start, torch.inf)
    t = torch.minimum(start, limit)
    for _ in range(ROUNDS):
        moved = change(t)
        below = moved <= gamma
        low, at_low = torch.where(below, t, low), torch.where(below, moved, at_low)
        high, at_high = torch.where(below, high, t), torch.where(below, at_high, moved)
        between = low + (gamma - at_low) * (high - low) / (at_high - at_low)
        further = t * (gamma / moved).clamp(1.0, 4.0)
        t = torch.where(high.isfinite(), between, further)
        t = torch.minimum(torch.where(t.isfinite(), t, low), limit)
    return t
