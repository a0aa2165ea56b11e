"""How far to go: the first point of a line where the scores have moved by gamma.

Without a norm of queries and keys, and with one t for both, the square of the change is a quartic,

    y(t) = |e S + t J + t^2 R|^2,     S = <q, k>,  J = c <q, dk> + d <dq, k>,  R = <dq, dk>,

c and d the shrinking of queries and keys, e = c d - 1; all five coefficients are sums of the
products of parts. y reaches gamma^2 at or before the t with |t J + t^2 R| = g = gamma + |e S|, and

    t <= (1 + sqrt 2) min(2 g / |J|, sqrt(g / |R|)),

never more than a small factor beyond it. POINTS points between 0 and there, and as many between
the two that hold the first crossing, find it to four parts in a million; all heads of all layers at
once, and without asking the device for a number. Heads that share keys share the keys' t:

    t_K of a group     the smallest t at which one of its heads has moved by gamma
    t_Q of each head   then the t at which this head has, the keys' part included

so that every head's scores, not only the group's mean, move by gamma. In the t of the queries alone
y is a parabola, which gives t_Q in closed form.

Where there are no parts (a norm of queries and keys, closed sizes) y is still nearly a parabola:
``reach`` puts one through y(0) and the last two points, goes to where it meets gamma^2, and keeps a
bracket for when it leads astray.

The score ball: the root mean square of a head's scores stays below a radius.

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

What a step did to the scores of each head, on the step's own sample.

RMS and largest absolute value run over the sampled open pairs; the scores are those the softmax
sees, scale included. The entropy is that of the softmax of a row, in nats, averaged over the
sampled queries. Where no pairs were looked at (closed-form sizes) the maxima and the entropy are
nan.

A step keeps only what these need, and they are computed when they are asked for: the root mean
squares from what was measured for the step, in a run of several processes over all of them; the
rest on the process's own sample, from the queries and keys before the step and the weights after.

One move of the weights of a stack: sized, kept in the ball, and counted.

    W <- project( shrink W + t U )       t so that the scores move by at most gamma (size.py),
                                         shrink and project by the ball (ball.py)

Under a norm of queries and keys scores do not depend on the size of W: there is no ball, t is
limited so that |t U| <= |W|, and a move of exactly gamma is followed by bringing each head back
to the norm it had, since steps of one size on growing weights would have to grow for ever.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from fenchel.optim.score.score_line import HeadFactors, HeadWeights, ScoreLine, by_group

POINTS = 512
"""Points of a line at which the quartic is evaluated at once; twice."""
FAR = 1.001 * (1.0 + math.sqrt(2.0))
ROUNDS = 5
"""Points at which the change is measured by ``reach``, beside t = 0."""
NEAR = 1e-4
"""Relative error of the squared change at which a head is done."""


def crossing_by_parts(
    parts: Tensor, gamma: Tensor, shrink: HeadFactors | None, limit: Tensor, groups: int
) -> HeadFactors:
    """Move every head's scores by gamma (L, H) by their parts, going no further than ``limit``."""
    H = parts.shape[1]
    powers, unshrunk, counts, plain = _constants(parts.device, parts.dtype)
    if shrink is None:
        w, P, powers = plain, parts, unshrunk
    else:
        c, d = shrink.Q, _each(shrink.K, H)
        w = torch.stack((c * d - 1.0, c, d, torch.ones_like(c)), dim=-1)
        P = parts * w.unsqueeze(-1) * w.unsqueeze(-2)
    t = _first_root(P, gamma, limit, powers, counts)
    if groups == H:
        return HeadFactors(t, t)
    t_K = by_group(t, groups).amin(2)
    v = torch.stack((torch.ones_like(t), _each(t_K, H)), dim=-1)
    # the change is (e, c t_K) on <q, k> and <q, dk> plus t_Q times (d, t_K) on the two with dq
    still, along = torch.unflatten(w * v.repeat(1, 1, 2), -1, (2, 2)).unsqueeze(-1).unbind(-3)
    a = (still.mT @ parts[..., :2, :2] @ still).flatten(2).squeeze(-1) - gamma.square()
    b = (still.mT @ parts[..., :2, 2:] @ along).flatten(2).squeeze(-1)
    c = (along.mT @ parts[..., 2:, 2:] @ along).flatten(2).squeeze(-1)
    t_Q = ((b.square() - a * c).clamp(min=0.0).sqrt() - b) / c
    return HeadFactors(torch.minimum(torch.where(c > 0, t_Q, t), limit), t_K)


def _first_root(P: Tensor, gamma: Tensor, limit: Tensor, powers: Tensor, counts: Tensor) -> Tensor:
    """Where the quartic of the weighted products of parts P (L, H, 4, 4) first meets gamma^2."""
    y = P.flatten(-2) @ powers  # coefficients, from the highest; then |J|^2
    c4, c3, c2, c1, c0, J2 = y.unsqueeze(-2).unbind(-1)
    g = gamma + c0.squeeze(-1).clamp(min=0.0).sqrt()
    by_J, by_R = 4.0 * g.square() / J2.squeeze(-1), g / c4.squeeze(-1).sqrt()
    far = FAR * torch.minimum(by_J, by_R).sqrt()
    top = torch.minimum(far, limit).nan_to_num(nan=0.0, posinf=0.0)  # what moves nothing stays
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
    """Which products of parts make which coefficient, with and without S; a grid; (e, c, d, 1)."""
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


def _each(x: Tensor, H: int) -> Tensor:
    """Of every group, for each of its heads: (L, G) -> (L, H)."""
    return x if x.shape[1] == H else x.repeat_interleave(H // x.shape[1], dim=1)


def crossing_by_search(
    line: ScoreLine, gamma: Tensor, shrink: HeadFactors | None, start: Tensor, limit: Tensor
) -> HeadFactors:
    """The same without parts: by points of the line, beginning near ``start`` (L, H)."""

    def common(t: Tensor) -> Tensor:
        return line.move(line.same_for_keys(t), shrink)[0]

    if line.group == 1:
        t = reach(common, gamma, start, limit)
        return line.same_for_keys(t)

    # keys by the head that they move most
    def grouped(t: Tensor) -> Tensor:
        each = common(t.repeat_interleave(line.group, dim=1)) / gamma.clamp(min=1e-30)
        return by_group(each, t.shape[1]).amax(2)

    groups = start.shape[1] // line.group
    first, most = (by_group(x, groups).amin(2) for x in (start, limit))
    t_K = reach(grouped, torch.ones_like(first), first, most)
    begin = t_K.repeat_interleave(line.group, dim=1)
    t_Q = reach(lambda t: line.move(HeadFactors(t, t_K), shrink)[0], gamma, begin, limit)
    return HeadFactors(t_Q, t_K)


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
        last, slope_at_last, guess = t, slope, _parabola_root(wanted, t, slope, last, slope_at_last)
        astray = ~(guess > low) | ~(guess < high)
        safe = torch.where(high.isfinite(), 0.5 * (low + high), 2.0 * t)
        guess = torch.where(astray, safe, guess)
        near = (y / gamma.square() - 1.0).abs() < NEAR  # closer than rounding lets us see
        t = torch.minimum(torch.where(near | ~guess.isfinite(), t, guess), limit)
    return t


def _parabola_root(
    wanted: Tensor, t: Tensor, slope: Tensor, last: Tensor, slope_at_last: Tensor
) -> Tensor:
    """The larger t with y(t) - y(0) = b t + c t^2 = wanted, from (y(t) - y(0)) / t at two points.

    With one point b = 0: the change grows in proportion to t.
    """
    c = (slope - slope_at_last) / (t - last)
    c = torch.where(c.isfinite(), c, slope / t)
    b = slope - c * t
    root = (b.square() + 4.0 * c * wanted).sqrt()
    return torch.where(b > 0, 2.0 * wanted / (b + root), (root - b) / (2.0 * c))


class ScoreBall(NamedTuple):
    """What the ball asks of a step, each (L, H)."""

    reach: Tensor
    """The bound on the RMS of the scores after the step."""
    budget: Tensor
    """How far the scores may move."""
    shrink: Tensor | None
    """Factor on the scores, from the weights before they move; None where they do not shrink."""


def ball(r: Tensor, before: Tensor | None, gamma: float, radius: float, *, soft: bool) -> ScoreBall:
    """``r`` and the bound ``before`` the step, (L, H); None at the first step."""
    outside = r.clamp(min=radius)
    reach = outside if before is None else (before - gamma).clamp(min=radius)
    budget = (gamma - (r - reach).clamp(min=0.0)).clamp(min=0.0)
    shrink = (1.0 - budget / outside).clamp(min=0.0) if soft else None
    return ScoreBall(reach, budget, shrink)


def projection(r: Tensor, reach: Tensor) -> Tensor:
    """The factor on the scores that brings RMS r into reach, (L, H)."""
    return (reach / r.clamp(min=torch.finfo(r.dtype).tiny)).clamp(max=1.0)


def scaling(c: Tensor, groups: int) -> HeadFactors:
    """Factors on the weights that multiply the scores of every head by c (L, H)."""
    if c.shape[1] == groups:
        root = c.sqrt()
        return HeadFactors(root, root)
    shared = by_group(c, groups).amax(2).sqrt()
    each = shared.repeat_interleave(c.shape[1] // groups, dim=1)
    return HeadFactors(c / each.clamp(min=torch.finfo(c.dtype).tiny), shared)


class HeadStats(NamedTuple):
    """One number a head, (H,) each; stacked over layers inside the optimiser."""

    rms_change: Tensor
    max_change: Tensor
    rms_score: Tensor
    max_score: Tensor
    entropy: Tensor
    capped: Tensor
    """True where the ball scaled the head back or the step was cut to its limit."""


class StepRecord(NamedTuple):
    """A move of the weights of a stack along a line."""

    line: ScoreLine
    t: HeadFactors
    shrink: HeadFactors | None
    """None where nothing shrank, as ``back`` where there is no ball."""
    back: HeadFactors | None
    scaled: Tensor | None
    """The factor of the ball on the scores, (L, H)."""
    measured: tuple[Tensor, Tensor] | None
    """(RMS change, RMS score), (L, H) each, where there are no parts to tell them."""
    cuts: bool
    """Whether t < 1 is a cut of a step."""

    def stats(self, W: HeadWeights) -> HeadStats:
        """Stacked over layers; W are the weights after the move."""
        capped = self.t.Q.lt(1.0 if self.cuts else 0.0)
        if self.scaled is not None:
            capped = capped | (self.scaled < 1.0)
        change, score = self.measured or self.line.move(
            _times(self.t, self.back),
            self.back if self.shrink is None else _times(self.shrink, self.back),
        )
        if self.line.closed:
            score = score if self.scaled is None else score * self.scaled
            unknown = torch.full_like(change, torch.nan)
            return HeadStats(change, unknown, score, unknown, unknown, capped)
        after = ScoreLine(self.line.pairs, self.line.at, W)
        S, dS = after.start, after.start - self.line.start
        return HeadStats(change, _largest(dS), score, _largest(S), _entropy(after), capped)


def _times(x: HeadFactors, back: HeadFactors | None) -> HeadFactors:
    return x if back is None else HeadFactors(x.Q * back.Q, x.K * back.K)


def _largest(S: Tensor) -> Tensor:
    return S.abs().amax(dim=(1, 3, 4))


def _entropy(line: ScoreLine) -> Tensor:
    open_ = line.at.grid.open
    log_p = line.start.masked_fill(~open_, -torch.inf).log_softmax(-1)
    entropy = -(log_p.exp() * log_p.masked_fill(~open_, 0.0)).sum(-1)
    some = open_.any(-1).expand(entropy.shape[0], entropy.shape[1], 1, -1)
    return entropy.masked_fill(~some, 0.0).sum(dim=(1, 3)) / some.sum(dim=(1, 3)).clamp(min=1)


PROBING = 1e-3
"""Share of the weights at which the change per unit of t is first measured."""


@dataclass(frozen=True)
class StepLimits:
    """What a move of the weights must keep to."""

    gamma: float
    """RMS change of a head's scores, as the softmax sees them."""
    radius: float
    """RMS score of a head, likewise; inf for no ball."""
    exactly: bool
    """Move by gamma, shrinking softly (ScoreDescent), or by U where that is less (ScoreTrust)."""


class WeightUpdate(NamedTuple):
    """The weights after a move, and what is remembered of it."""

    W: HeadWeights
    reach: Tensor | None
    """The ball's bound on every head, (L, H); None as long as there was no ball."""
    moved: StepRecord


def take_step(
    line: ScoreLine, W: HeadWeights, U: HeadWeights, before: Tensor | None, rule: StepLimits
) -> WeightUpdate:
    """Move from W along U; ``line`` runs along the same two, ``before`` is the ball's bound."""
    groups = W.K.shape[1]
    if not line.at.real or line.has_qk_norm:  # no ball
        t = _step_lengths(line, W, U, torch.full_like(line.start_rms, rule.gamma), None, rule)
        new = _updated_weights(W, U, t, None, None)
        if line.has_qk_norm and rule.exactly:
            new = HeadWeights(*(_with_norm_of(to, old) for to, old in zip(new, W, strict=True)))
        moved = StepRecord(line, t, None, None, None, line.move(t, None), not rule.exactly)
        return WeightUpdate(new, before, moved)
    held = ball(line.start_rms, before, rule.gamma, rule.radius, soft=rule.exactly)
    shrink = None if held.shrink is None else scaling(held.shrink, groups)
    t = _step_lengths(line, W, U, held.budget, shrink, rule)
    seen = None if line.parts is not None else line.move(t, shrink)
    after = line.rms_score(t, shrink) if seen is None else seen[1]
    c = projection(after, held.reach)
    back = scaling(c, groups)
    moved = StepRecord(line, t, shrink, back, c, seen, not rule.exactly)
    return WeightUpdate(_updated_weights(W, U, t, shrink, back), held.reach, moved)


def _step_lengths(
    line: ScoreLine,
    W: HeadWeights,
    U: HeadWeights,
    gamma: Tensor,
    shrink: HeadFactors | None,
    rule: StepLimits,
) -> HeadFactors:
    one = torch.ones_like(gamma)
    if line.parts is not None:
        limit = torch.full_like(gamma, torch.inf) if rule.exactly else one
        return crossing_by_parts(line.parts, gamma, shrink, limit, W.K.shape[1])
    if not rule.exactly:  # the whole of U, or less of it
        return crossing_by_search(line, gamma, shrink, one, one)
    ratio = torch.minimum(
        _norm(W.Q) / _norm(U.Q).clamp(min=1e-30),
        (_norm(W.K) / _norm(U.K).clamp(min=1e-30)).repeat_interleave(line.group, dim=1),
    )
    ratio = torch.where(ratio > 0, ratio, 1.0)
    limit = ratio if line.has_qk_norm else torch.full_like(ratio, torch.inf)
    eps = PROBING * ratio
    rate = line.move(line.same_for_keys(eps), None)[0] / eps
    start = torch.where(rate > 0, gamma / rate.clamp(min=1e-30), 0.0)
    return crossing_by_search(line, gamma, shrink, start, limit)


def _updated_weights(
    W: HeadWeights,
    U: HeadWeights,
    t: HeadFactors,
    shrink: HeadFactors | None,
    back: HeadFactors | None,
) -> HeadWeights:
    """back (shrink W + t U); a head that is neither shrunk nor scaled back and has t = 1, W + U."""
    made = []
    for n, (w, u) in enumerate(zip(W, U, strict=True)):
        along, by = t[n], None if shrink is None else shrink[n]
        if back is not None:
            along, by = along * back[n], back[n] if by is None else by * back[n]
        start = w if by is None else w * _heads(by)
        made.append(torch.addcmul(start, u, _heads(along)))
    return HeadWeights(*made)


def _heads(x: Tensor) -> Tensor:
    return x[..., None, None]


def _norm(W: Tensor) -> Tensor:
    size: Tensor = torch.linalg.matrix_norm(W)
    return size


def _with_norm_of(new: Tensor, old: Tensor) -> Tensor:
    return new * _heads(_norm(old) / _norm(new).clamp(min=1e-30))
