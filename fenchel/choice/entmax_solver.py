"""Entmax without derivatives: the threshold at which the weights sum to one, over many rows.

entmax.py attaches the derivatives. ``solve`` computes the weights and ``jacobian_product`` the
product of their derivative with a vector; ``thresholds`` computes the threshold alone.

**Threshold.** With y_i = (alpha - 1) (x_i - max x) <= 0 and r = 1 / (alpha - 1), find t in (0, 1]
with

    f(t) = sum_i u_i^r = 1,        u_i = (y_i + t)_+ .

t is the u of the largest entry; in the letters of entmax.py, tau = -t after the same shift.

*Newton from above*, for 1 < alpha <= 2. f^(1/r) is the r-norm of u: convex in t, and almost a
straight line. Newton's method on it,

    t <- t - (f - f^(1 - 1/r)) / g,        g = sum over u_i > 0 of u_i^(r - 1),

decreases from t = 1 towards the root and never below it, with no bracket, sort or bisection:

    alpha = 1.5      t <- t - |u| (|u| - 1) / sum(u)
    alpha = 2        t <- t - (sum(u) - 1) / count          Michelot's steps, which are finite

*Bracketed*, for 2 < alpha <= 4. There r < 1, f^(1/r) is no norm and g is infinite wherever an
alternative enters the support; the same step is confined between two bounds and replaced by their
midpoint when it leaves them or stalls. There p = u^r has an infinite slope at u = 0, and a light
weight is lost in the rounding of y + t: with alpha = 4 and eps of float32, an error of eps in u is
one of 5e-3 in p. ``threshold_above_kink`` therefore measures t from the kink c = -y_j of the last
alternative j in the support, with the weight e of j as the unknown, u_i = (y_i + c) + e^(1/r). As a
function of e each u_i^r is a norm of (e, (y_i + c)^r), convex, and Newton's method decreases to the
root again.

``bisect`` is the reference of both: slow, simple, and certain to converge.

*Digits.* For alpha below 1.5, t is near 1 and r is large: u^r = exp(r log1p(y + d)) with d = t - 1
is accurate where pow(y + t, r) is not. From 1.5 on t itself may be tiny, and d = t. All functions
here work with d = t - origin(alpha).

**Rows.** Rows are processed in blocks as large as the caches of all cores together, and torch
parallelises each operation on a block. (One block per Python thread was tried: the threads wait for
the interpreter lock and took two to seven times as long.) Where few entries can have any weight
(those within 1 / (alpha - 1) of the largest), they are packed into a narrow table, and all steps of
the threshold are made there.

Shapes: y is (N, K) and d is (N, 1), except in ``bisect``, ``log_u`` and ``tsallis_weights``, which
take any shape. Every row of y has its largest entry at 0.
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from fenchel.choice.base import FORBIDDEN, float32_or_better, relative

_STEPS = 60  # Newton from above needs 3 to 12; an adversarial row falls back to ``bisect``


def bisect(y: Tensor, alpha: float | Tensor) -> Tensor:
    """d by bisection: (..., K) -> (..., 1).

    At t = 1 the largest entry alone weighs 1; K equal entries would need t = K^(1 - alpha).
    The first steps halve the ratio of the bounds, which finds the magnitude of a tiny t, the
    others their distance, to the precision of the dtype.
    """
    start = origin(alpha)
    high = torch.ones_like(y[..., :1])
    low = high * y.shape[-1] ** (1.0 - torch.as_tensor(alpha, dtype=y.dtype, device=y.device))
    for _ in range(10):
        middle = (low * high).sqrt()
        heavy = tsallis_weights(y + (middle - start), alpha).sum(-1, keepdim=True) >= 1.0
        low, high = torch.where(heavy, low, middle), torch.where(heavy, middle, high)
    low, high = low - start, high - start
    for _ in range(60 if y.dtype == torch.float64 else 30):
        middle = 0.5 * (low + high)
        heavy = tsallis_weights(y + middle, alpha).sum(-1, keepdim=True) >= 1.0
        low, high = torch.where(heavy, low, middle), torch.where(heavy, middle, high)
    return high


def origin(alpha: float | Tensor) -> float | Tensor:
    """The origin of d: 1 for an alpha below 1.5, else 0."""
    if isinstance(alpha, Tensor):
        return (alpha < 1.5).to(alpha.dtype)
    return 1.0 if alpha < 1.5 else 0.0


def log_u(w: Tensor, alpha: float | Tensor) -> Tensor:
    """log of u = (origin + w)_+ for w = y + d, -inf off the support; elementwise."""
    if not isinstance(alpha, Tensor):
        return w.clamp(min=-1.0).log1p() if alpha < 1.5 else w.clamp(min=0.0).log()
    return torch.where(alpha < 1.5, w.clamp(min=-1.0).log1p(), w.clamp(min=0.0).log())


def tsallis_weights(w: Tensor, alpha: float | Tensor) -> Tensor:
    """u^r for w = y + d, elementwise."""
    return (log_u(w, alpha) / (alpha - 1.0)).exp()


def threshold(y: Tensor, alpha: float | Tensor, work: tuple[Tensor, Tensor]) -> Tensor:
    """d: (N, K) -> (N, 1). The two tensors of ``work``, like y in shape, are overwritten."""
    small = bool((alpha <= 2.0).all()) if isinstance(alpha, Tensor) else alpha <= 2.0
    return _newton_from_above(y, alpha, work) if small else _bracketed(y, alpha)


def excess(y: Tensor, t: Tensor, out: Tensor) -> Tensor:
    """u = (y + t)_+, written into ``out``."""
    return torch.add(y, t, out=out).clamp_(min=0.0)


def _newton_from_above(y: Tensor, alpha: float | Tensor, work: tuple[Tensor, Tensor]) -> Tensor:
    """d by Newton's method on the r-norm, from t = 1 downwards."""
    start = origin(alpha)
    d = _guess(y, alpha)
    tolerance = _tolerance(alpha, torch.finfo(y.dtype).eps)
    for count in range(1, _STEPS + 1):
        step = _step(y, d, alpha, work)
        d.sub_(step)
        # The test synchronises a GPU, so it is rare there. nan > tolerance is false: a row with
        # nan in it neither ends nor prolongs the work on the others.
        test = count > 2 if y.device.type == "cpu" else count % 4 == 0
        if test and not bool((step > tolerance * (start + d)).any()):
            return d
    return bisect(y, alpha)


def _guess(y: Tensor, alpha: float | Tensor) -> Tensor:
    """The start: t = 1, or in long rows the threshold of every eighth entry, each counted 8 times.

    A guess below the root does no harm: the first step from there leads above it.
    """
    d = torch.ones_like(y[:, :1]) - origin(alpha)
    if y.shape[-1] < 512:
        return d
    sample = y[:, ::8].clone(memory_format=torch.contiguous_format)
    sample[:, 0] = 0.0  # the largest entry always belongs to the sample
    work = (torch.empty_like(sample), torch.empty_like(sample))
    for _ in range(4):
        d.sub_(_step(sample, d, alpha, work, each=8.0))
    return d


def _tolerance(alpha: float | Tensor, eps: float) -> float | Tensor:
    """The relative step in t below which the iteration has converged."""
    if not isinstance(alpha, Tensor) and alpha <= 1.5:
        # r >= 2: f is smooth across the edge of the support, and a step squares the error
        return float(eps**0.5) / 32.0
    # f is right to a few eps and f / g <= t: no step is right to less than this
    return 16.0 * eps * (alpha - 1.0)


def _step(
    y: Tensor, d: Tensor, alpha: float | Tensor, work: tuple[Tensor, Tensor], each: float = 1.0
) -> Tensor:
    """(f - f^(1 - 1/r)) / g, where every entry counts ``each`` times."""
    if isinstance(alpha, Tensor) or alpha not in (1.5, 2.0):
        f, g = _sums(y, d, alpha)
        f.mul_(each)
        return (f - f.pow(2.0 - alpha)).div_(g.mul_(each))
    u = excess(y, d, work[0])
    if alpha == 2.0:
        count = torch.sign(u, out=work[1]).sum(-1, keepdim=True)
        return u.sum(-1, keepdim=True).sub_(1.0 / each).div_(count)
    # torch sums pairwise; a norm or a dot product does not, and its error would delay convergence
    f = torch.mul(u, u, out=work[1]).sum(-1, keepdim=True)
    root = (f if each == 1.0 else f / each).sqrt()
    return f.sub_(root).div_(u.sum(-1, keepdim=True))


def _bracketed(y: Tensor, alpha: float | Tensor) -> Tensor:
    """d between two bounds, by the same step where it stays inside and by bisection elsewhere."""
    start, eps = origin(alpha), torch.finfo(y.dtype).eps
    t = high = last = torch.ones_like(y[:, :1])
    low = high * y.shape[-1] ** (1.0 - torch.as_tensor(alpha, dtype=y.dtype, device=y.device))
    for _ in range(_STEPS):
        f, g = _sums(y, t - start, alpha)
        low, high = torch.where(f < 1.0, t, low), torch.where(f < 1.0, high, t)
        done = ((f - 1.0).abs() <= 8.0 * eps) | (high - low <= 2.0 * eps * high) | f.isnan()
        if bool(done.all()):
            return t - start
        trial = t - (f - f.pow(2.0 - alpha)) / g
        middle = torch.where(high > 4.0 * low, (low * high).sqrt(), 0.5 * (low + high))
        inside = (trial > low) & (trial < high) & ((trial - t).abs() <= 0.5 * last)
        moved = torch.where(done, t, torch.where(inside, trial, middle))
        last, t = (moved - t).abs(), moved
    return bisect(y, alpha)


def threshold_above_kink(y: Tensor, d: Tensor, alpha: float | Tensor) -> tuple[Tensor, Tensor]:
    """(c, d - c) to more digits than d has, (N, 1) each: c is the last kink up to d, for alpha > 2.

    Rows whose alpha is 2 or less return (0, d).
    """
    rate, eps = alpha - 1.0, torch.finfo(y.dtype).eps
    # f(d) is 1 to 8 eps, so t is within 8 alpha eps of d. A kink beyond t has f > 1 there: take the
    # one before it. All weights grow with t, so each is then off by less than f - 1.
    c = torch.where(-y <= d * (1.0 + 16.0 * alpha * eps), -y, 0.0).amax(-1, keepdim=True)
    for _ in range(_STEPS):
        above_j = (y + c).clamp_(min=0.0).pow_(1.0 / rate)
        base = above_j.sum(-1, keepdim=True)
        over = base > 1.0 + 2.0 * eps
        if not bool(over.any()):
            break
        c = torch.where(over, torch.where(-y < c, -y, 0.0).amax(-1, keepdim=True), c)
    gap = (y + c).masked_fill_(y + c < 0.0, torch.nan)  # nan: not in the support
    e = (1.0 - base).clamp_(min=0.0) / (gap == 0.0).sum(-1, keepdim=True)
    guess = (d - c).clamp_(min=0.0).pow_(1.0 / rate)  # from below, a step leads above the root
    e = torch.where((guess > 0.0) & (guess < e), guess, e)
    for _ in range(_STEPS):
        p = (gap + e.pow(rate)).pow_(1.0 / rate)
        slope = (e / p).pow_(rate - 1.0).nansum(-1, keepdim=True)
        step = ((p.nansum(-1, keepdim=True) - 1.0) / slope).masked_fill_(e == 0.0, 0.0)
        e = (e - step).clamp_(min=0.0)
        if not bool((step > 2.0 * eps * e).any()):
            break
    light = e.pow(rate)
    if not isinstance(alpha, Tensor):
        return c, light
    return torch.where(alpha > 2.0, c, 0.0), torch.where(alpha > 2.0, light, d)


def _sums(y: Tensor, d: Tensor, alpha: float | Tensor) -> tuple[Tensor, Tensor]:
    """f = sum u^r and g = sum over the support of u^(r - 1)."""
    w = y + d
    log = log_u(w, alpha)
    power = log.div_(alpha - 1.0).exp_()
    u = w.add_(origin(alpha)).clamp_(min=0.0)
    # off the support both are 0, and 0 / 0 is nan
    g = (power / u).masked_fill_(u == 0.0, 0.0).sum(-1, keepdim=True)
    return power.sum(-1, keepdim=True), g


_BLOCK = 1 << 17  # entries per block and core: half a MiB in float32, and two work buffers
_SPARSE = 8  # the narrow table pays when at most one entry in 8 can have weight


def solve(x: Tensor, alpha: float | Tensor) -> Tensor:
    """The weights for the scores x, halves solved in float32: (..., K) -> (..., K)."""
    if (wide := float32_or_better(x)).dtype != x.dtype:
        return solve(wide, alpha).to(x.dtype)
    rows = x.reshape(-1, x.shape[-1]).contiguous()  # a table of columns has no flat indices
    weights = torch.zeros_like(rows)
    sparse = []
    for block in _blocks(rows, alpha, x.shape):
        entries = _solve(rows[block.part], block, weights[block.part])
        if entries is not None:
            sparse.append(entries)
    if sparse:
        at, y = (torch.cat(pieces) for pieces in zip(*sparse, strict=True))
        weights.view(-1)[at] = _solve_sparse(at, y, alpha, rows.shape, x.shape)
    return weights.view(x.shape)


def thresholds(y: Tensor, alpha: float | Tensor) -> tuple[Tensor, Tensor]:
    """(j, d) with u_i = origin + (y_i - y_j) + d, for rows whose largest entry is 0: (..., 1) each.

    j is the index of the largest entry, and for alpha > 2 that of the last one in the support.
    """
    rows = y.reshape(-1, y.shape[-1])
    d = torch.empty_like(rows[:, :1])
    j = torch.empty_like(d, dtype=torch.int64)
    for block in _blocks(rows, alpha, y.shape):
        part = rows[block.part]
        c, d[block.part] = _threshold_from(part, block.alpha, block.space)
        j[block.part] = (part == -c).to(torch.uint8).argmax(-1, keepdim=True)
    return j.view(*y.shape[:-1], 1), d.view(*y.shape[:-1], 1)


def jacobian_product(p: Tensor, v: Tensor, alpha: float | Tensor) -> Tensor:
    """(diag(s) - s s^T / sum(s)) v, s = p^(2 - alpha) on the support: (..., K) -> (..., K)."""
    rows, vectors = p.reshape(-1, p.shape[-1]), v.reshape(-1, p.shape[-1])
    product = torch.empty_like(rows)
    for block in _blocks(rows, alpha, p.shape):
        v, out = vectors[block.part], product[block.part]
        s = _spread(rows[block.part], block.alpha, block.space[0])
        if isinstance(block.alpha, Tensor) or block.alpha > 2.0:
            v = relative(s, v)
        total = s.sum(-1, keepdim=True)
        total.masked_fill_(total == 0.0, 1.0)
        mean = torch.mul(s, v, out=out).sum(-1, keepdim=True).div_(total)
        torch.sub(v, mean, out=out).mul_(s)
    return product.view(p.shape)


class _Block(NamedTuple):
    """A range of rows of (N, K), the flat index of its first entry, its alpha, and work buffers.

    All blocks share the buffers: fresh memory per block would cost more than the arithmetic.
    """

    part: slice
    start: int
    alpha: float | Tensor
    space: tuple[Tensor, Tensor]


def _solve(x: Tensor, block: _Block, out: Tensor) -> tuple[Tensor, Tensor] | None:
    """One block of ``solve``, written into ``out``.

    Where few entries can have weight, ``out`` stays zero and these entries are returned: their
    flat indices and x minus its maximum.
    """
    alpha, space = block.alpha, block.space
    top = x.amax(-1, keepdim=True)
    empty = top == FORBIDDEN
    y = torch.sub(x, top.masked_fill_(empty, 0.0), out=space[0])  # -inf - -inf would be nan
    if y.device.type == "cpu":
        # numpy finds few entries among many seven times as fast as torch.nonzero
        reach = 1.0 / (alpha - 1.0)
        near = y.numpy() > (-reach.numpy() if isinstance(reach, Tensor) else -reach)
        if np.count_nonzero(near) * _SPARSE <= near.size:
            at = torch.from_numpy(np.flatnonzero(near))
            return at + block.start, y.view(-1)[at]
    some_empty = bool(empty.any())
    y.mul_(alpha - 1.0)
    if some_empty:
        y.masked_fill_(empty, 0.0)
    _write_weights(y, alpha, out, space[1])
    if some_empty:
        out.masked_fill_(empty, 0.0)
    return None


def _solve_sparse(
    at: Tensor, y: Tensor, alpha: float | Tensor, table_of: torch.Size, shape: torch.Size
) -> Tensor:
    """The weights of the entries at the flat indices ``at``; all others are 0."""
    N, K = table_of
    row = at // K
    counts = row.bincount(minlength=N)
    first = counts.cumsum(0) - counts
    width = max(1, int(counts.max()))
    place = torch.arange(at.numel(), device=at.device) + (width * row - first[row])
    table = y.new_full((N, width), FORBIDDEN)
    table[:, 0] = 0.0  # for rows with no entry here; never read
    table.view(-1)[place] = y
    weights = torch.empty_like(table)
    for block in _blocks(table, alpha, shape):
        y = table[block.part].mul_(block.alpha - 1.0)
        _write_weights(y, block.alpha, weights[block.part], block.space[0])
    return weights.view(-1)[place]


def _write_weights(y: Tensor, alpha: float | Tensor, out: Tensor, work: Tensor) -> None:
    """The weights of rows whose largest entry is 0, written into ``out``."""
    c, d = _threshold_from(y, alpha, (out, work))
    if isinstance(alpha, Tensor) or alpha not in (1.5, 2.0):
        out.copy_(tsallis_weights(y + c + d, alpha))
    else:
        excess(y, d, out)
        if alpha == 1.5:
            out.square_()
    out.div_(out.sum(-1, keepdim=True))


def _threshold_from(
    y: Tensor, alpha: float | Tensor, work: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor]:
    """(c, d) with u = origin + (y + c) + d, where c = 0 up to alpha = 2."""
    d = threshold(y, alpha, work)
    if bool((alpha > 2.0).any()) if isinstance(alpha, Tensor) else alpha > 2.0:
        return threshold_above_kink(y, d, alpha)
    return torch.zeros_like(d), d


def _spread(p: Tensor, alpha: float | Tensor, out: Tensor) -> Tensor:
    """p^(2 - alpha) on the support and 0 off it, written into ``out``."""
    if not isinstance(alpha, Tensor) and alpha == 1.5:
        return torch.sqrt(p, out=out)
    if not isinstance(alpha, Tensor) and alpha == 2.0:
        return torch.sign(p, out=out)
    return torch.pow(p, 2.0 - alpha, out=out).masked_fill_(p == 0.0, 0.0)


def _blocks(rows: Tensor, alpha: float | Tensor, shape: torch.Size) -> Iterator[_Block]:
    """Cut (N, K) rows, and with them an alpha that broadcasts against ``shape``, into blocks."""
    N, K = rows.shape
    height = N  # one block on a GPU
    if rows.device.type == "cpu":
        height = max(1, torch.get_num_threads() * _BLOCK // K)
    if isinstance(alpha, Tensor):
        alpha = alpha.to(rows.dtype).expand(*shape[:-1], 1).reshape(-1, 1)
    space = (torch.empty_like(rows[:height]), torch.empty_like(rows[:height]))
    for start in range(0, N, height or 1):
        part = slice(start, start + height)
        left = min(height, N - start)
        exponent = alpha[part] if isinstance(alpha, Tensor) else alpha
        yield _Block(part, start * K, exponent, (space[0][:left], space[1][:left]))
