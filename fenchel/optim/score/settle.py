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
from fenchel.optim.score.size import sizes
from fenchel.optim.score.stats import HeadStats, estimated, measured

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
    whole: Factors
    """Where W is just W + U, nothing cut or scaled: True or False for every head."""
    stats: HeadStats


def settle(line: Line, W: Heads, U: Heads, before: Tensor | None, rule: Rule) -> Settled:
    """Move from W along U; ``line`` runs along the same two, ``before`` is the ball's bound."""
    groups = W.K.shape[1]
    bounded = line.at.real and not line.normed
    radius = rule.radius if bounded else torch.inf
    held = ball(line.start_rms, before, rule.gamma, radius, soft=rule.exactly and bounded)
    shrink = scaling(held.shrink, groups)
    t = _sizes(line, W, U, held.budget, shrink, exactly=rule.exactly)

    change, after = line.move(t, shrink)
    c = projection(after, held.reach)
    back = scaling(c, groups)
    capped = (c < 1.0) if rule.exactly else (c < 1.0) | (t.Q < 1.0)
    if line.closed:
        stats = estimated(change, after * c, capped)
    else:
        S = line.scores(*line.point(t, shrink))
        stats = measured(line, S * c[:, None, :, None, None], capped)

    moved = _moved(W, U, t, shrink, back)
    if line.normed and rule.exactly:
        moved = Heads(*(_same_norm(new, old) for new, old in zip(moved, W, strict=True)))
    whole = Factors(*((a == 1.0) & (b == 1.0) for a, b in zip(t, back, strict=True)))
    return Settled(moved, held.reach if bounded else before, whole, stats)


def _sizes(
    line: Line,
    W: Heads,
    U: Heads,
    gamma: Tensor,
    shrink: Factors,
    *,
    exactly: bool,
) -> Factors:
    one = torch.ones_like(gamma)
    if not exactly:  # the whole of U, or less of it
        return sizes(line, gamma, shrink, one, one)
    ratio = torch.minimum(
        _norm(W.Q) / _norm(U.Q).clamp(min=1e-30),
        (_norm(W.K) / _norm(U.K).clamp(min=1e-30)).repeat_interleave(line.group, dim=1),
    )
    ratio = torch.where(ratio > 0, ratio, 1.0)
    limit = ratio if line.normed else torch.full_like(ratio, torch.inf)
    eps = PROBING * ratio
    rate = line.move(line.alike(eps), line.alike(one))[0] / eps
    start = torch.where(rate > 0, gamma / rate.clamp(min=1e-30), 0.0)
    return sizes(line, gamma, shrink, start, limit)


def _moved(W: Heads, U: Heads, t: Factors, shrink: Factors, back: Factors) -> Heads:
    Q, K = (
        _heads(b) * (_heads(s) * w + _heads(a) * u)
        for w, u, a, s, b in zip(W, U, t, shrink, back, strict=True)
    )
    return Heads(Q, K)


def _heads(x: Tensor) -> Tensor:
    return x[..., None, None]


def _norm(W: Tensor) -> Tensor:
    size: Tensor = torch.linalg.matrix_norm(W)
    return size


def _same_norm(new: Tensor, old: Tensor) -> Tensor:
    return new * _heads(_norm(old) / _norm(new).clamp(min=1e-30))
