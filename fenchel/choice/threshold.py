"""The threshold of a Tsallis choice: where the weights sum to one.

With y_i = (alpha - 1) (x_i - max x) <= 0 and r = 1 / (alpha - 1), find t in (0, 1] with

    f(t) = sum_i u_i^r = 1,        u_i = (y_i + t)_+ .

t is the u of the largest entry; in the letters of entmax.py, tau = -t after the same shift.

**Climbing down**, for 1 < alpha <= 2. f^(1/r) is the r-norm of u: convex in t, and almost a
straight line. Newton's method on it,

    t <- t - (f - f^(1 - 1/r)) / g,        g = sum over u_i > 0 of u_i^(r - 1),

falls from t = 1 towards the root and never past it, with no bracket, sort or bisection:

    alpha = 1.5      t <- t - |u| (|u| - 1) / sum(u)
    alpha = 2        t <- t - (sum(u) - 1) / count          Michelot's steps, which end

**Bracketed**, for 2 < alpha <= 4. There r < 1, f^(1/r) is no norm and g is infinite wherever an
alternative enters the support; the same step is kept between two bounds and replaced by their
middle when it leaves them or stalls.

Rows go through in blocks that stay in the cache. ``bisect`` is the reference of all this: slow,
simple, sure.

Digits. For alpha below 1.5, t is near 1 and r is large: u^r = exp(r log1p(y + d)) with d = t - 1
is right where pow(y + t, r) is not. From 1.5 on t itself may be tiny, and d = t. All functions
here speak of d = t - origin(alpha).
"""

from typing import NamedTuple

import torch
from torch import Tensor

FORBIDDEN = float("-inf")
_BLOCK = 1 << 18  # entries: a block and its copy are 2 MiB in float32, the caches of two cores
_FEW = 8  # one entry in so many may be near the top for the narrow table to pay
_STEPS = 60  # climbing needs 3 to 12; a row built to resist goes to ``bisect``


def bisect(y: Tensor, alpha: float | Tensor) -> Tensor:
    """d by halving an interval that holds it: (..., K) -> (..., 1).

    At t = 1 the largest entry alone weighs 1; K equal entries would need t = K^(1 - alpha).
    Halving the ratio of the bounds first finds the size of a tiny t, halving the distance
    then finds its digits; stop when the dtype has no more to give.
    """
    bits = 60 if y.dtype == torch.float64 else 30
    high = torch.ones_like(y[..., :1])
    low = high * y.shape[-1] ** (1.0 - torch.as_tensor(alpha, dtype=y.dtype))
    low, high = low - origin(alpha), high - origin(alpha)
    for step in range(bits + 10):
        middle = 0.5 * (low + high)
        if step < 10:
            near_zero = origin(alpha) + high > 4.0 * (origin(alpha) + low)
            ratio = ((origin(alpha) + low) * (origin(alpha) + high)).sqrt() - origin(alpha)
            middle = torch.where(near_zero, ratio, middle)
        heavy = powers(y + middle, alpha).sum(-1, keepdim=True) >= 1.0
        low, high = torch.where(heavy, low, middle), torch.where(heavy, middle, high)
    return high


def origin(alpha: float | Tensor) -> float | Tensor:
    """What d is measured from: 1 for an alpha below 1.5, else 0."""
    if isinstance(alpha, Tensor):
        return (alpha < 1.5).to(alpha.dtype)
    return 1.0 if alpha < 1.5 else 0.0


def log_u(w: Tensor, alpha: float | Tensor) -> Tensor:
    """log of u = (origin + w)_+ for w = y + d, -inf off the support; elementwise."""
    if not isinstance(alpha, Tensor):
        return w.clamp(min=-1.0).log1p() if alpha < 1.5 else w.clamp(min=0.0).log()
    return torch.where(alpha < 1.5, w.clamp(min=-1.0).log1p(), w.clamp(min=0.0).log())


def powers(w: Tensor, alpha: float | Tensor) -> Tensor:
    """u^r for w = y + d, elementwise."""
    return (log_u(w, alpha) / (alpha - 1.0)).exp()


def threshold(y: Tensor, alpha: float | Tensor) -> Tensor:
    """d, fast: (..., K) -> (..., 1). Any number for a row that is -inf throughout."""
    rows = y.reshape(-1, y.shape[-1])
    d = torch.empty_like(rows[:, :1])
    for part, exponent in blocks(rows, alpha, y.shape):
        d[part] = _threshold(rows[part], exponent, torch.empty_like(rows[part]))
    return d.view(*y.shape[:-1], 1)


def solve(x: Tensor, alpha: float | Tensor) -> Tensor:
    """The weights for the scores x, with no derivative: (..., K) -> (..., K)."""
    rows = x.reshape(-1, x.shape[-1])
    weights = torch.zeros_like(rows)
    parts = blocks(rows, alpha, x.shape)
    # one work space for all blocks: fresh memory would cost more than the arithmetic in it
    space = torch.empty_like(rows[parts[0][0]]) if parts else rows
    few = []
    for part, exponent in parts:
        found = _solve(rows[part], exponent, weights[part], space[: weights[part].shape[0]])
        if found is not None:
            few.append(_Few(found.at + part.start * rows.shape[1], found.y))
    if few:
        at, y = (torch.cat(t) for t in zip(*few, strict=True))
        weights.view(-1)[at] = _solve_among(at, y, rows.shape, alpha)
    return weights.view(x.shape)


def blocks(
    rows: Tensor, alpha: float | Tensor, shape: torch.Size
) -> list[tuple[slice, float | Tensor]]:
    """Cut (N, K) rows, and with them an alpha that broadcasts against ``shape``, into blocks."""
    N, K = rows.shape
    height = max(1, _BLOCK // max(K, 1)) if rows.device.type == "cpu" else max(N, 1)
    parts = [slice(i, i + height) for i in range(0, N, height)]
    if not isinstance(alpha, Tensor) or alpha.numel() == 1:
        return [(part, alpha) for part in parts]
    per_row = alpha.expand(*shape[:-1], 1).reshape(-1, 1)
    return [(part, per_row[part]) for part in parts]


def _solve(x: Tensor, alpha: float | Tensor, out: Tensor, y: Tensor) -> "_Few | None":
    """One block of ``solve`` written into ``out``; or, left for later, its few candidates."""
    top = x.amax(-1, keepdim=True)
    empty = top == FORBIDDEN
    torch.sub(x, top.masked_fill_(empty, 0.0), out=y)  # -inf - -inf would be nan
    if x.device.type == "cpu":
        # u > 0 for some t <= 1. Comparing into floats, then converting, is four times as fast
        # as comparing into booleans.
        near = torch.gt(y, -1.0 / (alpha - 1.0), out=out)
        if float(near.sum()) * _FEW <= near.numel():
            at = near.bool().view(-1).nonzero().squeeze(-1)
            out.zero_()
            return _Few(at, y.view(-1)[at])
    _weigh(y.mul_(alpha - 1.0).masked_fill_(empty, 0.0), alpha, out)
    out.masked_fill_(empty, 0.0)
    return None


class _Few(NamedTuple):
    """The entries of a block that can have any weight: flat positions, and y / (alpha - 1)."""

    at: Tensor
    y: Tensor


def _solve_among(at: Tensor, y: Tensor, shape: torch.Size, alpha: float | Tensor) -> Tensor:
    """The weights of the few entries that can have any, moved to the left of a narrow table."""
    N, K = shape
    row = at // K
    counts = row.bincount(minlength=N)
    first = counts.cumsum(0) - counts
    width = int(counts.max())
    place = torch.arange(at.numel(), device=at.device) + (width * row - first[row])
    table = y.new_full((N, width), FORBIDDEN)
    table[:, 0] = 0.0  # for rows that have no entry here; nobody fetches it
    table.view(-1)[place] = y
    weights = torch.empty_like(table)
    for part, exponent in blocks(table, alpha, shape):
        _weigh(table[part].mul_(exponent - 1.0), exponent, weights[part])
    return weights.view(-1)[place]


def _weigh(y: Tensor, alpha: float | Tensor, out: Tensor) -> None:
    """The weights of whole rows, each with a 0 in it, written into ``out``."""
    d = _threshold(y, alpha, out)
    if _is(alpha, 1.5) or _is(alpha, 2.0):
        _above(y, d, out)
        if _is(alpha, 1.5):
            out.square_()
    else:
        out.copy_(powers(y + d, alpha))
    out.div_(out.sum(-1, keepdim=True))


def _threshold(y: Tensor, alpha: float | Tensor, work: Tensor) -> Tensor:
    if isinstance(alpha, Tensor):
        climbs = bool((alpha <= 2.0).all())
    else:
        climbs = alpha <= 2.0
    return _climb(y, alpha, work) if climbs else _bracketed(y, alpha)


def _climb(y: Tensor, alpha: float | Tensor, work: Tensor) -> Tensor:
    """d from above, by Newton's method on the r-norm; ``work`` is overwritten."""
    start = origin(alpha)
    d = torch.ones_like(y[:, :1]) - start
    enough = _enough(alpha, torch.finfo(y.dtype).eps)
    for count in range(_STEPS):
        step = _step(y, d, alpha, work)
        d -= step
        # Asking stops a GPU until it has answered, so ask seldom there. nan > enough is false:
        # a row with nan in it neither ends nor prolongs the work on the others.
        ask = y.device.type == "cpu" or count % 4 == 3
        if ask and not bool((step > enough * (start + d)).any()):
            return d
    return bisect(y, alpha)


def _enough(alpha: float | Tensor, eps: float) -> float | Tensor:
    """The step, relative to t, after which no other is needed."""
    if not isinstance(alpha, Tensor) and alpha <= 1.5:
        # r >= 2: f is smooth across the edge of the support, and a step squares the error
        return eps**0.5 / 32.0
    # f is right to a few eps and f / g <= t: no step is right to less than this
    return 16.0 * eps * (alpha - 1.0)


def _step(y: Tensor, d: Tensor, alpha: float | Tensor, work: Tensor) -> Tensor:
    if _is(alpha, 1.5):
        u = _above(y, d, work)
        # torch sums in pairs; vector_norm does not, and its error would keep the steps from ending
        f = torch.linalg.vecdot(u, u).unsqueeze(-1)
        return (f - f.sqrt()) / u.sum(-1, keepdim=True)
    if _is(alpha, 2.0):
        u = _above(y, d, work)
        return (u.sum(-1, keepdim=True) - 1.0) / u.count_nonzero(-1).unsqueeze(-1)
    f, g = _sums(y, d, alpha)
    return (f - f.pow(2.0 - alpha)) / g


def _bracketed(y: Tensor, alpha: float | Tensor) -> Tensor:
    """d between two bounds, by the same step where it serves and by halving where not."""
    start, eps = origin(alpha), torch.finfo(y.dtype).eps
    t = torch.ones_like(y[:, :1])
    low, high = t * y.shape[-1] ** (1.0 - torch.as_tensor(alpha, dtype=y.dtype)), t
    last = high
    for _ in range(_STEPS):
        f, g = _sums(y, t - start, alpha)
        low, high = torch.where(f < 1.0, t, low), torch.where(f < 1.0, high, t)
        done = ((f - 1.0).abs() <= 8.0 * eps) | (high - low <= 2.0 * eps * high)
        if not bool((~done & ~f.isnan()).any()):
            return t - start
        trial = t - (f - f.pow(2.0 - alpha)) / g
        middle = torch.where(high > 4.0 * low, (low * high).sqrt(), 0.5 * (low + high))
        serves = (trial > low) & (trial < high) & ((trial - t).abs() <= 0.5 * last)
        moved = torch.where(done, t, torch.where(serves, trial, middle))
        last, t = (moved - t).abs(), moved
    return bisect(y, alpha)


def _sums(y: Tensor, d: Tensor, alpha: float | Tensor) -> tuple[Tensor, Tensor]:
    """f = sum u^r and g = sum over the support of u^(r - 1)."""
    r = 1.0 / (alpha - 1.0)
    log = log_u(y + d, alpha)
    f = (r * log).exp_().sum(-1, keepdim=True)
    # off the support log u = -inf, and u^(r - 1) would be infinite for r < 1
    g = torch.where(log > FORBIDDEN, (r - 1.0) * log, FORBIDDEN).exp_().sum(-1, keepdim=True)
    return f, g


def _above(y: Tensor, t: Tensor, out: Tensor) -> Tensor:
    """u = (y + t)_+, written into ``out``."""
    return torch.add(y, t, out=out).clamp_(min=0.0)


def _is(alpha: float | Tensor, number: float) -> bool:
    return not isinstance(alpha, Tensor) and alpha == number
