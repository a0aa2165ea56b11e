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
"""

import math
from collections.abc import Callable
from functools import lru_cache

import torch
from torch import Tensor

from fenchel.optim.score.line import Factors, Line, by_group

POINTS = 512
"""Points of a line at which the quartic is evaluated at once; twice."""
FAR = 1.001 * (1.0 + math.sqrt(2.0))
ROUNDS = 5
"""Points at which the change is measured by ``reach``, beside t = 0."""
NEAR = 1e-4
"""Relative error of the squared change at which a head is done."""


def crossing(
    parts: Tensor, gamma: Tensor, shrink: Factors | None, limit: Tensor, groups: int
) -> Factors:
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
        return Factors(t, t)
    t_K = by_group(t, groups).amin(2)
    v = torch.stack((torch.ones_like(t), _each(t_K, H)), dim=-1)
    # the change is (e, c t_K) on <q, k> and <q, dk> plus t_Q times (d, t_K) on the two with dq
    still, along = torch.unflatten(w * v.repeat(1, 1, 2), -1, (2, 2)).unsqueeze(-1).unbind(-3)
    a = (still.mT @ parts[..., :2, :2] @ still).flatten(2).squeeze(-1) - gamma.square()
    b = (still.mT @ parts[..., :2, 2:] @ along).flatten(2).squeeze(-1)
    c = (along.mT @ parts[..., 2:, 2:] @ along).flatten(2).squeeze(-1)
    t_Q = ((b.square() - a * c).clamp(min=0.0).sqrt() - b) / c
    return Factors(torch.minimum(torch.where(c > 0, t_Q, t), limit), t_K)


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


def sizes(
    line: Line, gamma: Tensor, shrink: Factors | None, start: Tensor, limit: Tensor
) -> Factors:
    """The same without parts: by points of the line, beginning near ``start`` (L, H)."""

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
