"""One move of the weights of a stack: sized, kept in the ball, and counted.

    W <- project( shrink W + t U )       t so that the scores move by at most gamma (size.py),
                                         shrink and project by the ball (ball.py)

Under a norm of queries and keys scores do not depend on the size of W: there is no ball, t is
limited so that |t U| <= |W|, and a move of exactly gamma is followed by bringing each head back
to the norm it had, since steps of one size on growing weights would have to grow for ever.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from fenchel.optim.score.ball import ball, projection, scaling
from fenchel.optim.score.line import Factors, Heads, Line
from fenchel.optim.score.size import crossing, sizes
from fenchel.optim.score.stats import Moved

PROBING = 1e-3
"""Share of the weights at which the change per unit of t is first measured."""


@dataclass(frozen=True)
class Rule:
    """What a move of the weights must keep to."""

    gamma: float
    """RMS change of a head's scores, as the softmax sees them."""
    radius: float
    """RMS score of a head, likewise; inf for no ball."""
    exactly: bool
    """Move by gamma, shrinking softly (ScoreDescent), or by U where that is less (ScoreTrust)."""


class Settled(NamedTuple):
    """The weights after a move, and what is remembered of it."""

    W: Heads
    reach: Tensor | None
    """The ball's bound on every head, (L, H); None as long as there was no ball."""
    moved: Moved


def settle(line: Line, W: Heads, U: Heads, before: Tensor | None, rule: Rule) -> Settled:
    """Move from W along U; ``line`` runs along the same two, ``before`` is the ball's bound."""
    groups = W.K.shape[1]
    if not line.at.real or line.normed:  # no ball
        t = _sizes(line, W, U, torch.full_like(line.start_rms, rule.gamma), None, rule)
        new = _new(W, U, t, None, None)
        if line.normed and rule.exactly:
            new = Heads(*(_same_norm(to, old) for to, old in zip(new, W, strict=True)))
        moved = Moved(line, t, None, None, None, line.move(t, None), not rule.exactly)
        return Settled(new, before, moved)
    held = ball(line.start_rms, before, rule.gamma, rule.radius, soft=rule.exactly)
    shrink = None if held.shrink is None else scaling(held.shrink, groups)
    t = _sizes(line, W, U, held.budget, shrink, rule)
    seen = None if line.parts is not None else line.move(t, shrink)
    after = line.there(t, shrink) if seen is None else seen[1]
    c = projection(after, held.reach)
    back = scaling(c, groups)
    moved = Moved(line, t, shrink, back, c, seen, not rule.exactly)
    return Settled(_new(W, U, t, shrink, back), held.reach, moved)


def _sizes(
    line: Line, W: Heads, U: Heads, gamma: Tensor, shrink: Factors | None, rule: Rule
) -> Factors:
    one = torch.ones_like(gamma)
    if line.parts is not None:
        limit = torch.full_like(gamma, torch.inf) if rule.exactly else one
        return crossing(line.parts, gamma, shrink, limit, W.K.shape[1])
    if not rule.exactly:  # the whole of U, or less of it
        return sizes(line, gamma, shrink, one, one)
    ratio = torch.minimum(
        _norm(W.Q) / _norm(U.Q).clamp(min=1e-30),
        (_norm(W.K) / _norm(U.K).clamp(min=1e-30)).repeat_interleave(line.group, dim=1),
    )
    ratio = torch.where(ratio > 0, ratio, 1.0)
    limit = ratio if line.normed else torch.full_like(ratio, torch.inf)
    eps = PROBING * ratio
    rate = line.move(line.alike(eps), None)[0] / eps
    start = torch.where(rate > 0, gamma / rate.clamp(min=1e-30), 0.0)
    return sizes(line, gamma, shrink, start, limit)


def _new(W: Heads, U: Heads, t: Factors, shrink: Factors | None, back: Factors | None) -> Heads:
    """back (shrink W + t U); a head that is neither shrunk nor scaled back and has t = 1, W + U."""
    made = []
    for n, (w, u) in enumerate(zip(W, U, strict=True)):
        along, by = t[n], None if shrink is None else shrink[n]
        if back is not None:
            along, by = along * back[n], back[n] if by is None else by * back[n]
        start = w if by is None else w * _heads(by)
        made.append(torch.addcmul(start, u, _heads(along)))
    return Heads(*made)


def _heads(x: Tensor) -> Tensor:
    return x[..., None, None]


def _norm(W: Tensor) -> Tensor:
    size: Tensor = torch.linalg.matrix_norm(W)
    return size


def _same_norm(new: Tensor, old: Tensor) -> Tensor:
    return new * _heads(_norm(old) / _norm(new).clamp(min=1e-30))
