"""The range of <c, weights(z)> over a box of scores, for every separable choice map.

    upper = max <c, weights(z)>,    lower = min <c, weights(z)>        over  low_i <= z_i <= high_i

The weights of a separable map are p_i = phi(x_i - nu), where x = beta z + log u, phi is continuous,
non-decreasing and 0 or positive, and nu makes the sum 1. Order c_1 >= ... >= c_K, write l and h for
the ends of x, and call *path* the K edges from x = l on which coordinate 1 rises from l_1 to h_1,
then coordinate 2, and so on.

**The maximum lies on the path** (docs/maths/choice.md). For a fixed nu, y_i = phi(x_i - nu) is
between a_i = phi(l_i - nu) and b_i = phi(h_i - nu), so <c, weights(z)> is at most the value of the
fractional knapsack max <c, y> over sum y = 1, a <= y <= b, whose greedy solution is a point of the
path. The minimum lies on the path of the reverse order.

*Softmax* moves monotonically along an edge, so the K + 1 vertices of the path suffice. They are
prefix sums. For other maps the maximum can lie inside an edge.

*Search over nu.* By duality the knapsack's value is the least over k of

    F_k(nu) = c_k + sum_{i<k} (c_i - c_k) b_i - sum_{i>k} (c_k - c_i) a_i,

so any k bounds it from above, and the maximum over an interval of nu is at most that of one F_k,

    F_k(nu) <= A(nu_1) - B(nu_2)                    both sums decrease as nu grows
    F_k(nu) <= F_k(m) + max of |F_k'| times the distance from the middle m,

whichever is smaller. The intervals whose bound exceeds the best value of a path point by more than
_TOLERANCE of the span of c are divided. Every part of the range of nu ends in an interval with a
bound, and ``upper`` is the largest of them: it holds however the search went.

*Over the box* of weights (Sigmoid) there is no nu: the ends are sum_i c_i phi(e_i), where e_i is
h_i for the upper end and l_i for the lower one if c_i > 0, and the other way round if not.

Rounding. All in float64, which has float32 exactly. A phi(x_i - nu) has a relative error of
(r + 8) eps and one of |log p| eps, r = 1 / (alpha - 1); x_i - nu adds nothing, since nu is a number
of the dtype. The sums add K eps. These are added to every bound, the ends of x are rounded outward,
and the result is rounded outward to the dtype of the inputs.

Shapes: c, low and high are (..., K) and broadcast; lower and upper are (...).
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from fenchel.choice.base import FORBIDDEN, Choice
from fenchel.choice.capped import Capped
from fenchel.choice.entmax import Entmax, Sparsemax
from fenchel.choice.sigmoid import Sigmoid
from fenchel.choice.softmax import Softmax

_EPS = torch.finfo(torch.float64).eps
_TOLERANCE = 1e-12
_PARTS = 4  # of an interval that is divided
_LEVELS = 80
_INTERVALS = 256  # per row; a search that needs more ends with the bounds that it has
_ENTRIES = 1 << 22  # scores evaluated at once


def range_over_box(
    choice: Choice, c: Tensor, low: Tensor, high: Tensor, log_prior: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """(lower, upper) of <c, weights(z)> over low <= z <= high, exact up to rounding outward: (...).

    A score of -inf at both ends, or in ``log_prior``, forbids an alternative; where all are
    forbidden the range is (0, 0). For values c that lie in a box themselves take the upper end of
    the range of their upper ends, and the lower end of that of their lower ends: no weight is
    negative.

    >>> import torch
    >>> from fenchel.choice import Sparsemax, range_over_box
    >>> c, z = torch.tensor([2.0, 1.0, 0.0]), torch.tensor([0.2, 0.1, 0.0])
    >>> range_over_box(Sparsemax(), c, z - 0.1, z + 0.1)
    (tensor(1.0000), tensor(1.4000))
    """
    dtype = torch.float32
    for t in (c, low, high):
        if not t.is_floating_point():
            raise ValueError(f"values and scores must be floating point, got {t.dtype}.")
        dtype = torch.promote_types(dtype, t.dtype)
    shapes = [t.shape for t in (c, low, high) + (() if log_prior is None else (log_prior,))]
    shape = torch.broadcast_shapes(*shapes)  # type: ignore[no-untyped-call]
    c, low, high = (t.detach().double().expand(shape) for t in (c, low, high))
    if shape[-1] == 0:
        zero = c.new_zeros(shape[:-1]).to(dtype)
        return zero, zero.clone()
    _require_box(c, low, high)
    prior = None if log_prior is None else log_prior.detach().double().expand(shape)
    left, right = (_scores(choice, z, prior, sign) for z, sign in ((low, -1.0), (high, 1.0)))
    allowed = right > FORBIDDEN
    if isinstance(choice, Sigmoid):
        lower, upper = _apart(choice, c, left, right)
        return _outward(lower, dtype, -1.0), _outward(upper, dtype, 1.0)
    response = _response(choice)
    rows = tuple(t.reshape(-1, shape[-1]) for t in (c, left, right, allowed))
    find = _at_vertices if isinstance(choice, Softmax) else _search
    upper = find(response, *rows).view(shape[:-1])
    lower = -find(response, -rows[0], *rows[1:]).view(shape[:-1])
    some = allowed.any(-1)
    lower, upper = (torch.where(some, end, 0.0) for end in (lower, upper))
    return _outward(lower, dtype, -1.0), _outward(upper, dtype, 1.0)


class _Response(NamedTuple):
    """p = min(cap, phi(x - nu)), elementwise."""

    phi: Callable[[Tensor], Tensor]
    spread: Callable[[Tensor], Tensor]
    """phi' as a function of p > 0."""
    cap: float
    steep: float
    """Roundings of phi: r for entmax, 1 for an exponential."""
    reach: float
    """A weight is at most 1, so nu is at least the largest score minus this."""
    falls: bool = False
    """Whether phi' falls with p and is unbounded at 0."""


def _response(choice: Choice) -> _Response:
    if isinstance(choice, Softmax):
        return _Response(torch.exp, lambda p: p, 1.0, 1.0, 0.0)
    if isinstance(choice, Capped):
        return _Response(torch.exp, lambda p: p, choice.cap, 1.0, 0.0)
    if not isinstance(choice, Entmax | Sparsemax):
        raise ValueError(
            "the range over a box is known for Softmax, Entmax, Sparsemax, Capped and Sigmoid, got "
            f"{choice!r}; the weights of Hard jump."
        )
    alpha = choice.alpha if isinstance(choice, Entmax) else 2.0
    if isinstance(alpha, Tensor):
        if alpha.numel() != 1:
            raise ValueError(
                "the range over a box takes one alpha per call, got a tensor of shape "
                f"{tuple(alpha.shape)}."
            )
        alpha = float(alpha)
    rate, r = alpha - 1.0, 1.0 / (alpha - 1.0)

    def phi(y: Tensor) -> Tensor:
        return (rate * y).clamp(min=0.0).pow(r)

    def spread(p: Tensor) -> Tensor:
        return p.pow(2.0 - alpha)

    return _Response(phi, spread, 1.0, r, r, falls=alpha > 2.0)


def _require_box(c: Tensor, low: Tensor, high: Tensor) -> None:
    if bool(
        (c.isnan() | low.isnan() | high.isnan() | (low == math.inf) | (high == math.inf)).any()
    ):
        raise ValueError("values and the ends of a box are finite numbers, or -inf to forbid.")
    if bool(((low > high) | ((low == FORBIDDEN) & (high > FORBIDDEN))).any()):
        raise ValueError(
            "a box has low <= high, and both -inf where an alternative is forbidden; got "
            "an entry with low above high or with low = -inf alone."
        )
    if not bool(c[high > FORBIDDEN].isfinite().all()):
        raise ValueError("the values c of allowed alternatives are finite numbers.")


def _scores(choice: Choice, z: Tensor, log_prior: Tensor | None, sign: float) -> Tensor:
    """x = beta z + log u, rounded downward or upward by the sign."""
    x, _ = choice.scores(z, log_prior, -1)
    if log_prior is None and not isinstance(choice.beta, Tensor) and choice.beta == 1.0:
        return x
    terms = (choice.beta * z).abs() + x.abs()
    terms = terms if log_prior is None else terms + log_prior.abs()
    return torch.where(x.isfinite(), x + sign * 4.0 * _EPS * terms, x)


def _outward(end: Tensor, dtype: torch.dtype, sign: float) -> Tensor:
    """The number of ``dtype`` next to a float64, not within it."""
    rounded = end.to(dtype)
    beyond = torch.nextafter(rounded, torch.full_like(rounded, sign * math.inf))
    inside = rounded.double() < end if sign > 0 else rounded.double() > end
    return torch.where(inside, beyond, rounded)


def _apart(choice: Sigmoid, c: Tensor, left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
    """(lower, upper) of a map over the box of weights, whose terms do not depend on each other."""
    low, high = choice.choose(left), choice.choose(right)
    c = torch.where(high > 0, c, 0.0)
    # x + b is off by eps (|x| + |b|), which moves log p by no more; phi and the sums add K + 16
    size = (x.abs().clamp(max=1e3) for x in (left, right))
    b = torch.as_tensor(choice.log_odds).abs()
    error = _EPS * (16.0 + c.shape[-1] + 4.0 * (torch.maximum(*size) + b))
    lost = (c.abs() * (high * error + torch.finfo(high.dtype).tiny)).sum(-1)
    lower = torch.where(c > 0, c * low, c * high).sum(-1)
    upper = torch.where(c > 0, c * high, c * low).sum(-1)
    return lower - lost, upper + lost


def _ordered(
    c: Tensor, left: Tensor, right: Tensor, allowed: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """c in decreasing order, forbidden ones last; both ends of x; max|c|; max c - min c."""
    low = torch.where(allowed, c, math.inf).amin(-1, keepdim=True)
    high = torch.where(allowed, c, -math.inf).amax(-1, keepdim=True)
    low, high = (torch.where(end.isfinite(), end, 0.0) for end in (low, high))
    order = torch.where(allowed, c, -math.inf).argsort(dim=-1, descending=True, stable=True)
    c = torch.where(allowed, c, low).gather(-1, order)
    size = torch.maximum(low.abs(), high.abs())[:, 0]
    return c, left.gather(-1, order), right.gather(-1, order), size, (high - low)[:, 0]


def _at_vertices(
    response: _Response,  # noqa: ARG001
    c: Tensor,
    left: Tensor,
    right: Tensor,
    allowed: Tensor,
) -> Tensor:
    """The largest value of the K + 1 vertices, for softmax: (N, K) -> (N,)."""
    c, left, right, size, span = _ordered(c, left, right, allowed)
    top = right.amax(-1, keepdim=True)
    top = torch.where(top.isfinite(), top, 0.0)
    left, right = left - top, right - top
    least = c[:, -1:]
    gain = (c - least).clamp(min=0.0).log()
    nothing = torch.full_like(c[:, :1], FORBIDDEN)

    def sums(x: Tensor, y: Tensor) -> Tensor:
        """log of the sums of e^x up to k and of e^y from k on: (N, K + 1)."""
        before = torch.cat((nothing, x.logcumsumexp(-1)), -1)
        after = torch.cat((y.flip(-1).logcumsumexp(-1).flip(-1), nothing), -1)
        return torch.logaddexp(before, after)

    total = sums(right, left)
    share = (sums(right + gain, left + gain) - total).exp()
    share = torch.where(total == FORBIDDEN, 0.0, share).amax(-1)
    finite = torch.where(left.isfinite(), left.abs(), 0.0).amax(-1)
    logs = torch.where(gain.isfinite(), gain.abs(), 0.0).amax(-1)
    roundings = 64.0 + 8.0 * c.shape[-1] + 16.0 * (finite + logs)
    value = least[:, 0] + share * (1.0 + roundings * _EPS) + 4.0 * _EPS * size
    return torch.minimum(value, c[:, 0] + 4.0 * _EPS * (size + span))


class _Problem(NamedTuple):
    """Rows in the order of c, (N, K), and what the bounds of all intervals need."""

    c: Tensor
    left: Tensor
    right: Tensor
    cap: Tensor
    span: Tensor
    error: float


class _Bounds(NamedTuple):
    """Of intervals of nu: an upper bound, a value that is attained, the rounding in both."""

    upper: Tensor
    attained: Tensor
    lost: Tensor
    feasible: Tensor
    """False where no nu of the interval belongs to a point of the box."""


def _search(response: _Response, c: Tensor, left: Tensor, right: Tensor, allowed: Tensor) -> Tensor:
    """The largest value on the path, by bounds on intervals of nu: (N, K) -> (N,)."""
    c, left, right, size, span = _ordered(c, left, right, allowed)
    N, K = c.shape
    count = allowed.sum(-1).clamp(min=1).double()
    cap = (1.0 / count).clamp(min=response.cap)
    error = (64.0 + 16.0 * response.steep + 8.0 * K) * _EPS
    problem = _Problem(c, left, right, cap, span, error)
    least, most = left.amax(-1) - response.reach, right.amax(-1) + math.log(K)
    if response.cap < 1.0:  # every alternative may be at the cap
        least = torch.where(left.isfinite(), left, math.inf).amin(-1) - cap.log()
    slack = 1e-9 * (1.0 + least.abs() + most.abs())
    row = allowed.any(-1).nonzero()[:, 0]
    nu = torch.stack((least - slack, most + slack), -1)[row]
    best, upper = (torch.full_like(size, -math.inf) for _ in range(2))
    for level in range(_LEVELS):
        if not len(row):
            break
        inner = torch.linspace(0.0, 1.0, _PARTS + 1, dtype=nu.dtype)[1:-1]
        cuts = torch.cat((nu[:, :1], nu[:, :1] + (nu[:, 1:] - nu[:, :1]) * inner, nu[:, 1:]), -1)
        cuts = cuts.cummax(-1).values.clamp(max=nu[:, 1:])
        nu = torch.stack((cuts[:, :-1], cuts[:, 1:]), -1).flatten(0, 1)
        row = row.repeat_interleave(_PARTS)
        bounds = _interval_bounds(response, problem, row, nu)
        row, nu, bound, attained, lost = (
            t[bounds.feasible] for t in (row, nu, bounds.upper, bounds.attained, bounds.lost)
        )
        best = best.scatter_reduce(0, row, attained, "amax")
        narrow = (nu[:, 1] - nu[:, 0]) <= 4.0 * _EPS * nu.abs().amax(-1)
        done = (bound <= best[row] + _TOLERANCE * span[row] + 4.0 * lost) | narrow
        done = done | (level == _LEVELS - 1) | (len(row) > _INTERVALS * N)
        upper = upper.scatter_reduce(0, row[done], bound[done], "amax")
        row, nu = row[~done], nu[~done]
    return torch.minimum(upper, c[:, 0] + 4.0 * _EPS * (size + span)) + 4.0 * _EPS * size


def _interval_bounds(response: _Response, problem: _Problem, row: Tensor, nu: Tensor) -> _Bounds:
    """Bounds over intervals nu (W, 2) of the rows ``row`` (W,)."""
    parts = [
        _block_bounds(response, problem, row[at], nu[at])
        for at in torch.split(torch.arange(len(row)), max(1, _ENTRIES // problem.c.shape[-1]))
    ]
    return _Bounds(*(torch.cat(ends) for ends in zip(*parts, strict=True)))


def _block_bounds(response: _Response, problem: _Problem, row: Tensor, nu: Tensor) -> _Bounds:
    c, left, right, cap = (t[row] for t in problem[:4])
    cap, error, span = cap[:, None], problem.error, problem.span[row]
    middle = nu[:, 0] + 0.5 * (nu[:, 1] - nu[:, 0])

    def p(x: Tensor, at: Tensor) -> Tensor:
        return torch.minimum(response.phi(x - at[:, None]), cap)

    b_high, b, b_low = (p(right, at) for at in (nu[:, 0], middle, nu[:, 1]))
    a_high, a, a_low = (p(left, at) for at in (nu[:, 0], middle, nu[:, 1]))
    noise = error * (1.0 + a_high.sum(-1) + b_high.sum(-1))
    feasible = (b_high.sum(-1) >= 1.0 - noise) & (a_low.sum(-1) <= 1.0 + noise)
    # the knapsack at the middle: b up to k, a from there on, and coordinate k between them
    filled = b.cumsum(-1) + a.flip(-1).cumsum(-1).flip(-1) - a
    k = (filled < 1.0).sum(-1, keepdim=True).clamp(max=c.shape[-1] - 1)
    c_k = c.gather(-1, k)
    gain, before = (c - c_k).abs(), c > c_k  # equal values have no part in F_k
    rise = torch.where(before, gain, 0.0)
    fall = torch.where(before, 0.0, gain)
    value = c_k[:, 0] + (rise * b).sum(-1) - (fall * a).sum(-1)
    lost = noise * span
    ends = c_k[:, 0] + (rise * b_high).sum(-1) - (fall * a_low).sum(-1)
    b_least, b_most = _spreads(response, b_low, b_high, cap)
    a_least, a_most = _spreads(response, a_low, a_high, cap)
    up = (fall * a_most).nansum(-1) - (rise * b_least).sum(-1)
    down = (rise * b_most).nansum(-1) - (fall * a_least).sum(-1)
    rounding = error * ((fall * a_most).nansum(-1) + (rise * b_most).nansum(-1))
    half = (nu[:, 1] - nu[:, 0]) * 0.5 * (1.0 + 8.0 * _EPS) + 4.0 * _EPS * nu.abs().amax(-1)
    tilt = half * (torch.maximum(up, down).clamp(min=0.0) + rounding)
    upper = torch.fmin(ends, value + tilt) + lost
    possible = (b.sum(-1) >= 1.0) & (a.sum(-1) <= 1.0)
    return _Bounds(upper, torch.where(possible, value - lost, -math.inf), lost, feasible)


def _spreads(response: _Response, low: Tensor, high: Tensor, cap: Tensor) -> tuple[Tensor, Tensor]:
    """The least and the largest phi' between two p, 0 off the support and at the cap."""
    on = low > 0
    at_low = torch.where(on, response.spread(torch.where(on, low, 1.0)), 0.0)
    some = high > 0
    at_high = torch.where(some, response.spread(torch.where(some, high, 1.0)), 0.0)
    if response.falls:
        most = torch.where(on, at_low, torch.where(some, math.inf, 0.0))
        least = torch.where(on & (high < cap), at_high, 0.0)
    else:
        most = at_high
        least = torch.where(high < cap, at_low, 0.0)
    most = torch.where(low >= cap, 0.0, most)
    return least, most
