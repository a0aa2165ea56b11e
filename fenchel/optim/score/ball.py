"""The score ball: the root mean square of a head's scores stays below a radius.

r is the RMS of a head's scores before the step, gamma the step. A head keeps its own bound

    reach = max(radius, reach - gamma),      at first  max(radius, r),

so one that starts outside, such as a head of a checkpoint trained elsewhere, comes in by gamma a
step instead of all at once. Three things happen, in this order:

    budget   a head that other layers have pushed out by e = r - reach > 0 may move gamma - e
    shrink   S <- S (1 - budget / max(radius, r)), as a part of the move     (soft; ScoreDescent)
    project  S <- S min(1, reach / RMS S), after the move                    (hard)

Shrinking or scaling W_Q and W_K by sqrt(c) each multiplies every score by c, rotation and biases
included. Projection on a ball moves no two points apart, so a head that was inside moves by at
most gamma, projection included; one that was pushed out by e, by at most max(gamma, e). A norm
of queries and keys undoes any scaling of the weights: such heads have no ball, their scores are
bounded by the gains of the norm.

Where H / G heads share keys, the keys take the square root of the weakest shrinking of the group
and the queries the rest.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from fenchel.optim.score.line import Factors, by_group


class Ball(NamedTuple):
    """What the ball asks of a step, each (L, H)."""

    reach: Tensor
    """The bound on the RMS of the scores after the step."""
    budget: Tensor
    """How far the scores may move."""
    shrink: Tensor | None
    """Factor on the scores, from the weights before they move; None where they do not shrink."""


def ball(r: Tensor, before: Tensor | None, gamma: float, radius: float, *, soft: bool) -> Ball:
    """``r`` and the bound ``before`` the step, (L, H); None at the first step."""
    outside = r.clamp(min=radius)
    reach = outside if before is None else (before - gamma).clamp(min=radius)
    budget = (gamma - (r - reach).clamp(min=0.0)).clamp(min=0.0)
    shrink = (1.0 - budget / outside).clamp(min=0.0) if soft else None
    return Ball(reach, budget, shrink)


def projection(r: Tensor, reach: Tensor) -> Tensor:
    """The factor on the scores that brings RMS r into reach, (L, H)."""
    return (reach / r.clamp(min=torch.finfo(r.dtype).tiny)).clamp(max=1.0)


def scaling(c: Tensor, groups: int) -> Factors:
    """Factors on the weights that multiply the scores of every head by c (L, H)."""
    if c.shape[1] == groups:
        root = c.sqrt()
        return Factors(root, root)
    shared = by_group(c, groups).amax(2).sqrt()
    each = shared.repeat_interleave(c.shape[1] // groups, dim=1)
    return Factors(c / each.clamp(min=torch.finfo(c.dtype).tiny), shared)
