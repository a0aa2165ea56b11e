"""One step of a stack along a line: its length, the score ball, and its statistics.

    W <- project( shrink W + t U )       t such that the scores move by at most gamma

docs/maths/score_descent.md derives it.

**Length.** Without a norm of queries and keys, and with one t for both, the squared change of the
scores is a quartic y(t), whose coefficients are sums of the products of parts (score_change.py).
POINTS points of the line, and as many between the two that enclose the first crossing of gamma^2,
find it to four parts in a million: all heads of all layers at once, and without a synchronisation
of the device. Heads that share keys share the t of the keys:

    t_K per group     the smallest t at which one of its heads has moved by gamma
    t_Q per head      then the t at which this head has moved by gamma, the keys' part included

so that the scores of every head, not only their mean over the group, move by gamma. As a function
of t_Q only, y is a parabola, which gives t_Q in closed form.

Under a norm of queries and keys q(t) and k(t) are curves, of which two chords give t
(``crossing_by_chords``). Closed sizes take the products of parts as those of independent positions.
ScoreTrust limits the gains of a norm with the weights, by points of the line (``find_crossing``),
the most widely shared first:

    s per layer       the largest share of the whole step, of gains and of weights, at which no head
                      of the layer has moved by more than gamma
    t_K, t_Q          then as above, from s on, with the gains at s

Every share is one at which the change was measured and found to be gamma at most.

**Score ball.** The root mean square r of the scores of a head stays below a radius. Each head has
its own bound,

    bound = max(radius, bound - gamma),      at first  max(radius, r),

so a head that starts outside, for example in a checkpoint trained elsewhere, comes in by gamma per
step instead of all at once. Three things happen, in this order:

    budget   a head that other layers have pushed out by e = r - bound > 0 may move gamma - e
    shrink   S <- S (1 - budget / max(radius, r)), as a part of the move     (soft; ScoreDescent)
    project  S <- S min(1, bound / RMS S), after the move                    (hard)

Scaling W_Q and W_K by sqrt(c) each multiplies every score by c. Where H / G heads share keys, the
keys take the square root of the weakest shrinking of the group and the queries the rest.

A norm of queries and keys undoes any scaling of the weights. There the gains of the norms keep the
scores in the ball, for ScoreDescent: they are scaled before the move, and since all heads of a
layer share them, by the head that is furthest out,

    c = min over heads of min(1, bound / r),      gains of queries and of keys times sqrt(c).

Where only one of the norms is trained it takes all of c, and where none is there is no ball. The
weights then move the scores by gamma, which on the chords, measured before the scaling, is
gamma / c. t is limited so that |t U| <= |W|, and after a move of exactly gamma the weights are
scaled back to their previous norm per head. ScoreTrust has no ball under a norm: its limit holds
for the gains too.

**Statistics.** ``HeadStats`` describes the effect of a step on the scores of each head, on the
step's own sample: RMS and largest absolute value over the sampled pairs, the scores as the softmax
receives them, and the entropy of the softmax per row in nats, averaged over the sampled queries.
Where no pairs were measured (closed sizes) the maxima and the entropy are nan. A step keeps only
what these numbers need; they are computed on demand, from the queries and keys before the step and
the weights after it, on the sample of this process. Root mean squares without a norm and those of
closed sizes are the step's own, which are means over all processes of a run.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from fenchel.attention import entropy
from fenchel.attention.spec import SOFTMAX
from fenchel.optim.cuda_graph import Rate
from fenchel.optim.score.score_change import (
    HeadFactors,
    HeadWeights,
    ScoreLine,
    by_group,
    per_head,
    rms_by_parts,
)

POINTS = 512
"""Points of a line at which the quartic is evaluated at once, in each of two rounds."""
UPPER_FACTOR = 1.001 * (1.0 + math.sqrt(2.0))
"""1 + sqrt 2 of the bound on the first crossing, and a little for rounding."""
STEEPEST = 0.5
"""The largest |f'| by which the end of two chords is extrapolated."""
ROUNDS = 5
"""Points at which ``find_crossing`` measures the change, in addition to t = 0."""
TOLERANCE = 1e-4
"""Relative error of the squared change at which a head has converged."""


def crossing_by_parts(
    parts: Tensor, gamma: Tensor, shrink: HeadFactors | None, limit: Tensor, groups: int
) -> HeadFactors:
    """The t <= ``limit`` at which the scores of each head first move by gamma (L, H), by parts."""
    H = parts.shape[1]
    powers, unshrunk, counts, plain = _constants(parts.device, parts.dtype)
    if shrink is None:
        w, P, powers = plain, parts, unshrunk
    else:
        c, d = shrink.Q, per_head(shrink.K, H)
        w = torch.stack((c * d - 1.0, c, d, torch.ones_like(c)), dim=-1)
        P = parts * w.unsqueeze(-1) * w.unsqueeze(-2)
    t = _first_root(P, gamma, limit, powers, counts)
    if groups == H:
        return HeadFactors(t, t)
    t_K = by_group(t, groups).amin(2)
    v = torch.stack((torch.ones_like(t), per_head(t_K, H)), dim=-1)
    # the change is (e, c t_K) on <q, k> and <q, dk> plus t_Q times (d, t_K) on the two with dq
    still, along = torch.unflatten(w * v.repeat(1, 1, 2), -1, (2, 2)).unsqueeze(-1).unbind(-3)
    a = (still.mT @ parts[..., :2, :2] @ still).flatten(2).squeeze(-1) - gamma.square()
    b = (still.mT @ parts[..., :2, 2:] @ along).flatten(2).squeeze(-1)
    c = (along.mT @ parts[..., 2:, 2:] @ along).flatten(2).squeeze(-1)
    t_Q = ((b.square() - a * c).clamp(min=0.0).sqrt() - b) / c
    return HeadFactors(torch.minimum(torch.where(c > 0, t_Q, t), limit), t_K)


def _first_root(P: Tensor, gamma: Tensor, limit: Tensor, powers: Tensor, counts: Tensor) -> Tensor:
    """The first t at which the quartic of the weighted products P (L, H, 4, 4) reaches gamma^2."""
    y = P.flatten(-2) @ powers  # coefficients, from the highest; then |J|^2
    c4, c3, c2, c1, c0, J2 = y.unsqueeze(-2).unbind(-1)
    g = gamma + c0.squeeze(-1).clamp(min=0.0).sqrt()
    by_J, by_R = 4.0 * g.square() / J2.squeeze(-1), g / c4.squeeze(-1).sqrt()
    upper = UPPER_FACTOR * torch.minimum(by_J, by_R).sqrt()
    top = torch.minimum(upper, limit).nan_to_num(nan=0.0, posinf=0.0)  # 0 where U moves no score
    c0 = c0 - gamma.square().unsqueeze(-1)
    t, step = torch.zeros_like(top), top
    for _ in range(2):
        step = step / POINTS
        grid = torch.addcmul(t.unsqueeze(-1), step.unsqueeze(-1), counts)
        over = torch.addcmul(c3, c4, grid)
        for c in (c2, c1, c0):
            over = torch.addcmul(c, over, grid)
        before = (over <= 0.0).cumprod(-1, dtype=counts.dtype).sum(-1)
        t = torch.addcmul(t, step, before)
    return torch.minimum(t, top)


@lru_cache
def _constants(device: torch.device, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Powers of t of the products of parts, with and without S; a grid; (e, c, d, 1) unshrunk."""
    power = (0, 1, 1, 2)  # of t before <q, k>, <q, dk>, <dq, k>, <dq, dk>
    rows = [
        [float(a + b == n) for n in (4, 3, 2, 1, 0)] + [float(a == b == 1)]
        for a in power
        for b in power
    ]
    counts = torch.arange(1, POINTS + 1, device=device, dtype=dtype)
    plain = torch.tensor([0.0, 1.0, 1.0, 1.0], dtype=dtype)
    powers = torch.tensor(rows, dtype=dtype)
    unshrunk = powers * (plain.unsqueeze(-1) * plain).view(16, 1)
    return powers.to(device), unshrunk.to(device), counts, plain.to(device)


def crossing_by_chords(
    line: ScoreLine, chord: Tensor, t_0: HeadFactors, gamma: Tensor, limit: Tensor
) -> HeadFactors:
    """The t <= ``limit`` at which the scores of each head move by gamma (L, H) under a norm.

    ``chord`` has the products of parts on the first chord, which ends at t_0 and should be close to
    the tangent. On the chord to t the scores have moved by gamma at the share x of it; where they
    do so on the curve, f(t) = x t has a fixed point, which two values of f give by extrapolation.
    """

    def f(t: HeadFactors, chord: Tensor) -> HeadFactors:
        shares = crossing_by_parts(chord, gamma, None, limit / t.Q, t.K.shape[1])
        return _times(t, shares)

    t_1 = f(t_0, chord)
    t_2 = f(t_1, line.chord(t_1))
    t = HeadFactors(*map(_fixed_point, t_0, t_1, t_2))
    most_K = by_group(limit, t.K.shape[1]).amin(2)
    return HeadFactors(torch.minimum(t.Q, limit), torch.minimum(t.K, most_K))


def _fixed_point(t_0: Tensor, t_1: Tensor, t_2: Tensor) -> Tensor:
    """Where the line through (t_0, t_1) and (t_1, t_2) meets the diagonal."""
    slope = ((t_2 - t_1) / (t_1 - t_0)).nan_to_num(0.0, 0.0, 0.0).clamp(-STEEPEST, STEEPEST)
    return t_1 + (t_2 - t_1) / (1.0 - slope)


def shares_by_search(
    line: ScoreLine, gamma: Tensor, shrink: HeadFactors | None, scale: Tensor
) -> tuple[HeadFactors, Tensor | None]:
    """Shares (t, s) of U and of the move of the gains at which no head moves by more than gamma.

    ``scale`` (L, H) is a t that moves the weights by about their own size.
    """
    (L, H), G = gamma.shape, gamma.shape[1] // line.group
    most = gamma.clamp(min=torch.finfo(gamma.dtype).tiny)

    def ratio(t_Q: Tensor, t_K: Tensor, s: Tensor | None) -> Tensor:
        return line.move(HeadFactors(t_Q, t_K), shrink, s)[0] / most

    s, base = None, torch.zeros_like(gamma)
    if line.gains is not None:

        def whole_layer(s: Tensor) -> Tensor:
            return ratio(s.expand(L, H), s.expand(L, G), s.squeeze(1)).amax(1, keepdim=True)

        share = largest_share(whole_layer, base[:, :1], scale.amin(1, keepdim=True))
        s, base = share.squeeze(1), share.expand(L, H)
    if line.group == 1:
        t = largest_share(lambda t: ratio(t, t, s), base, scale)
        return HeadFactors(t, t), s

    def whole_group(t: Tensor) -> Tensor:
        return by_group(ratio(per_head(t, H), t, s), G).amax(2)

    t_K = largest_share(whole_group, base[:, :: line.group], by_group(scale, G).amin(2))
    t_Q = largest_share(lambda t: ratio(t, t_K, s), per_head(t_K, H), scale)
    return HeadFactors(t_Q, t_K), s


def largest_share(change: Callable[[Tensor], Tensor], base: Tensor, scale: Tensor) -> Tensor:
    """The t in [base, 1] with change(t) = 1, or 1 where change(1) <= 1; change(base) <= 1.

    The result is one of the points where the change was measured, and was 1 at most.
    """
    one = torch.ones_like(base)
    whole = change(one) <= 1.0
    if bool(whole.all()):
        return one
    y0 = change(base)
    # how fast the change grows at base: at 1 it may have levelled off, as it does under a norm
    eps = torch.minimum(PROBING * torch.where(base > 0.0, base, scale), 1.0 - base)
    rate = (change(base + eps) - y0) / eps
    start = torch.where(rate > 0.0, (1.0 - y0).clamp(min=0.0) / rate, eps)
    start = torch.where(whole, 1.0 - base, start)
    beyond = find_crossing(
        lambda t: change(base + t), one, start, 1.0 - base, y0=y0.square(), from_below=True
    )
    return torch.where(whole, one, base + beyond)


def find_crossing(
    change: Callable[[Tensor], Tensor],
    gamma: Tensor,
    start: Tensor,
    limit: Tensor,
    *,
    y0: Tensor | None = None,
    from_below: bool = False,
) -> Tensor:
    """The t in [0, limit] with change(t) = gamma, near ``start``; ``limit`` where there is none.

    A parabola through the squared changes at 0 and at the last two points gives the next one, and a
    bracket is kept for when the fit fails.

    ``y0`` is change(0)^2 where it is known already. With ``from_below`` the result is a point where
    the change was measured and is at most gamma, to TOLERANCE.
    """
    low, high = torch.zeros_like(start), torch.full_like(start, torch.inf)
    y0 = change(low).square() if y0 is None else y0
    target = gamma.square() - y0
    t = torch.minimum(start, limit)
    last, slope_at_last = low, torch.full_like(start, torch.nan)
    for _ in range(ROUNDS):
        y = change(t).square()
        below = y <= gamma.square()
        low, high = torch.where(below, t, low), torch.where(below, high, t)
        near = (y / gamma.square() - 1.0).abs() < TOLERANCE  # rounding hides more
        if bool((near | (below & (t >= limit))).all()):
            return t
        slope = (y - y0) / t
        last, slope_at_last, guess = t, slope, _parabola_root(target, t, slope, last, slope_at_last)
        outside = ~(guess > low) | ~(guess < high)
        safe = torch.where(high.isfinite(), 0.5 * (low + high), 2.0 * t)
        guess = torch.where(outside, safe, guess)
        t = torch.minimum(torch.where(near | ~guess.isfinite(), t, guess), limit)
    if not from_below:
        return t
    over = change(t).square() / gamma.square() - 1.0
    return torch.where(over < TOLERANCE, t, low)


def _parabola_root(
    target: Tensor, t: Tensor, slope: Tensor, last: Tensor, slope_at_last: Tensor
) -> Tensor:
    """The larger t with y(t) - y(0) = b t + c t^2 = target, from (y(t) - y(0)) / t at two points.

    With one point b = 0: the change grows in proportion to t.
    """
    c = (slope - slope_at_last) / (t - last)
    c = torch.where(c.isfinite(), c, slope / t)
    b = slope - c * t
    root = (b.square() + 4.0 * c * target).sqrt()
    return torch.where(b > 0, 2.0 * target / (b + root), (root - b) / (2.0 * c))


class ScoreBall(NamedTuple):
    """The conditions of the score ball on a step, each (L, H)."""

    bound: Tensor
    """The bound on the RMS of the scores after the step."""
    budget: Tensor
    """The largest change of the scores."""
    shrink: Tensor | None
    """Factor on the scores before the move; None where they do not shrink."""


def score_ball(
    r: Tensor, before: Tensor | None, gamma: Rate, radius: Rate, *, soft: bool
) -> ScoreBall:
    """The ball for scores of RMS ``r`` and the bound ``before`` the step, (L, H); None at first."""
    outside = r.clamp(min=radius)
    bound = outside if before is None else (before - gamma).clamp(min=radius)
    budget = (gamma - (r - bound).clamp(min=0.0)).clamp(min=0.0)
    shrink = (1.0 - budget / outside).clamp(min=0.0) if soft else None
    return ScoreBall(bound, budget, shrink)


def projection(r: Tensor, bound: Tensor) -> Tensor:
    """The factor on the scores that brings their RMS r down to the bound, (L, H)."""
    return (bound / r.clamp(min=torch.finfo(r.dtype).tiny)).clamp(max=1.0)


def scaling(c: Tensor, groups: int) -> HeadFactors:
    """Factors on the weights that multiply the scores of each head by c (L, H)."""
    if c.shape[1] == groups:
        root = c.sqrt()
        return HeadFactors(root, root)
    shared = by_group(c, groups).amax(2).sqrt()
    each = shared.repeat_interleave(c.shape[1] // groups, dim=1)
    return HeadFactors(c / each.clamp(min=torch.finfo(c.dtype).tiny), shared)


class HeadStats(NamedTuple):
    """The effect of a step on the scores of each head: (H,) each, (L, H) inside the optimiser."""

    rms_change: Tensor
    max_change: Tensor
    rms_score: Tensor
    max_score: Tensor
    entropy: Tensor
    capped: Tensor
    """True where the ball scaled the head back or the step was shortened."""


class StepRecord(NamedTuple):
    """A step of the weights of a stack along a line."""

    line: ScoreLine
    t: HeadFactors
    shrink: HeadFactors | None
    """Factors on the weights before the move; None where they do not shrink."""
    projection: HeadFactors | None
    """Factors on the weights after the move; None without a ball."""
    score_factor: Tensor | None
    """The factor of the projection on the scores, (L, H); None without a ball."""
    measured: tuple[Tensor, Tensor] | None
    """(RMS change, RMS score), (L, H) each, of a closed size, which has no pairs."""
    shortens: bool
    """Whether t < 1 means a shortened step (ScoreTrust)."""
    gain_share: Tensor | None = None
    """The share of the move of the gains, (L,); None where they do not move."""
    gain_factor: Tensor | None = None
    """The factor of the ball on the scores through the gains, (L,); None without one."""

    def stats(self, W: HeadWeights) -> HeadStats:
        """Statistics stacked over layers; W are the weights after the step."""
        capped = self.t.Q.lt(1.0 if self.shortens else 0.0)
        if self.score_factor is not None:
            capped = capped | (self.score_factor < 1.0)
        for of_gains in (self.gain_share, self.gain_factor):
            if of_gains is not None:
                capped = capped | (of_gains < 1.0).unsqueeze(1)
        if self.measured is not None:
            change, score = self.measured
            score = score if self.score_factor is None else score * self.score_factor
            unknown = torch.full_like(change, torch.nan)
            return HeadStats(change, unknown, score, unknown, unknown, capped)
        after = ScoreLine(self.line.pairs, self.line.inputs, W)
        start = self.line.scores(self.line.start_q, self.line.start_k)  # anew: a graph writes there
        S, dS = after.start, after.start - start
        if self.line.parts is None:
            change, score = (after.sample_mean_square(x).sqrt() for x in (dS, S))
        else:
            change, score = self.line.move(
                _times(self.t, self.projection),
                self.projection if self.shrink is None else _times(self.shrink, self.projection),
            )
        return HeadStats(change, _largest(dS), score, _largest(S), _mean_entropy(after), capped)


def _times(x: HeadFactors, y: HeadFactors | None) -> HeadFactors:
    return x if y is None else HeadFactors(x.Q * y.Q, x.K * y.K)


def _largest(S: Tensor) -> Tensor:
    return S.abs().amax(dim=(1, 3, 4))


def _mean_entropy(line: ScoreLine) -> Tensor:
    """Of the softmax per row, over the rows in which a query may attend to any key: (L, H)."""
    mask = line.inputs.grid.mask
    p = SOFTMAX.weights(line.start.masked_fill(~mask, -torch.inf))
    rows = mask.any(-1).expand(p.shape[0], p.shape[1], 1, -1).sum(dim=(1, 3))
    return entropy(p).sum(dim=(1, 3)) / rows.clamp(min=1)


PROBING = 1e-3
"""Share of the weights at which the change per unit of t is first measured."""


@dataclass(frozen=True)
class StepLimits:
    """The limits of a step in the scores."""

    gamma: Rate
    """RMS change of the scores per head, as they enter the softmax."""
    radius: Rate
    """RMS of the scores per head; inf for no ball."""
    exact: bool
    """Move by gamma, shrinking softly (ScoreDescent), or by at most U (ScoreTrust)."""


class WeightUpdate(NamedTuple):
    """The weights after a step, the new bound, and the record of the step."""

    W: HeadWeights
    bound: Tensor | None
    """The score bound of each head, (L, H); None as long as there was no ball."""
    record: StepRecord


def take_step(
    line: ScoreLine, W: HeadWeights, U: HeadWeights, before: Tensor | None, limits: StepLimits
) -> WeightUpdate:
    """Move from W along U, where ``line`` runs; ``before`` is the score bound."""
    groups = W.K.shape[1]
    if line.has_qk_norm and limits.exact:
        return _take_step_under_norm(line, W, U, before, limits)
    if not line.inputs.from_batch or line.has_qk_norm:  # no ball
        gamma = _filled(_norm(W.Q), limits.gamma)
        t, s = _step_lengths(line, W, U, gamma, None, limits)
        new = _updated_weights(W, U, t, None, None)
        measured = line.move(t, None, s) if line.closed else None
        record = StepRecord(line, t, None, None, None, measured, not limits.exact, s)
        return WeightUpdate(new, before, record)
    ball = score_ball(line.start_rms, before, limits.gamma, limits.radius, soft=limits.exact)
    shrink = None if ball.shrink is None else scaling(ball.shrink, groups)
    t, _ = _step_lengths(line, W, U, ball.budget, shrink, limits)
    measured = line.move(t, shrink) if line.closed else None
    assert line.parts is not None  # there is no norm
    c = projection(rms_by_parts(line.parts, t, shrink), ball.bound)
    back = scaling(c, groups)
    record = StepRecord(line, t, shrink, back, c, measured, not limits.exact)
    return WeightUpdate(_updated_weights(W, U, t, shrink, back), ball.bound, record)


def _take_step_under_norm(
    line: ScoreLine, W: HeadWeights, U: HeadWeights, before: Tensor | None, limits: StepLimits
) -> WeightUpdate:
    """Scale the gains so that the scores are in the ball, then move the weights by gamma."""
    longest = _longest(line, W, U)
    t_0 = line.same_for_keys(PROBING * longest)
    chord = line.chord(t_0)
    gamma, factor = _filled(longest, limits.gamma), None
    if line.scales_gains and not line.closed:
        r = chord[..., 0, 0].clamp(min=0.0).sqrt()
        before = score_ball(r, before, limits.gamma, limits.radius, soft=False).bound
        factor = projection(r, before).amin(1)
        gamma = gamma / factor.unsqueeze(1)
    t = crossing_by_chords(line, chord, t_0, gamma, longest)
    new = _updated_weights(W, U, t, None, None)
    new = HeadWeights(*(_with_norm_of(to, old) for to, old in zip(new, W, strict=True)))
    measured = line.move(t, None) if line.closed else None
    record = StepRecord(line, t, None, None, None, measured, False, gain_factor=factor)
    return WeightUpdate(new, before, record)


def _longest(line: ScoreLine, W: HeadWeights, U: HeadWeights) -> Tensor:
    """The t (L, H) at which U is as large as W, in queries or in keys."""
    ratio = torch.minimum(
        _norm(W.Q) / _norm(U.Q).clamp(min=1e-30),
        (_norm(W.K) / _norm(U.K).clamp(min=1e-30)).repeat_interleave(line.group, dim=1),
    )
    return torch.where(ratio > 0, ratio, 1.0)


def _step_lengths(
    line: ScoreLine,
    W: HeadWeights,
    U: HeadWeights,
    gamma: Tensor,
    shrink: HeadFactors | None,
    limits: StepLimits,
) -> tuple[HeadFactors, Tensor | None]:
    """The distances along U, and the share of the move of the gains."""
    if line.parts is not None:
        limit = torch.full_like(gamma, torch.inf if limits.exact else 1.0)
        return crossing_by_parts(line.parts, gamma, shrink, limit, W.K.shape[1]), None
    return shares_by_search(line, gamma, shrink, _longest(line, W, U).clamp(max=1.0))


def _updated_weights(
    W: HeadWeights,
    U: HeadWeights,
    t: HeadFactors,
    shrink: HeadFactors | None,
    back: HeadFactors | None,
) -> HeadWeights:
    """back (shrink W + t U)."""
    moved = []
    for n, (w, u) in enumerate(zip(W, U, strict=True)):
        along, by = t[n], None if shrink is None else shrink[n]
        if back is not None:
            along, by = along * back[n], back[n] if by is None else by * back[n]
        start = w if by is None else w * _over_matrices(by)
        moved.append(torch.addcmul(start, u, _over_matrices(along)))
    return HeadWeights(*moved)


def _filled(like: Tensor, value: Rate) -> Tensor:
    """``value`` in the shape of ``like``."""
    if isinstance(value, Tensor):
        return value.expand_as(like)
    return torch.full_like(like, value)


def _over_matrices(x: Tensor) -> Tensor:
    return x[..., None, None]


def _norm(W: Tensor) -> Tensor:
    size: Tensor = torch.linalg.matrix_norm(W)
    return size


def _with_norm_of(new: Tensor, old: Tensor) -> Tensor:
    return new * _over_matrices(_norm(old) / _norm(new).clamp(min=1e-30))
