"""The threshold of a Tsallis choice: where the weights sum to one.

With y_i = (alpha - 1) (x_i - max x) <= 0 and r = 1 / (alpha - 1), find t in (0, 1] with

    f(t) = sum_i u_i^r = 1,        u_i = (y_i + t)_+ .

t is the u of the largest entry; in the letters of entmax.py, tau = -t after the same shift.

**Falling**, for 1 < alpha <= 2. f^(1/r) is the r-norm of u: convex in t, and almost a straight
line. Newton's method on it,

    t <- t - (f - f^(1 - 1/r)) / g,        g = sum over u_i > 0 of u_i^(r - 1),

falls from t = 1 towards the root and never past it, with no bracket, sort or bisection:

    alpha = 1.5      t <- t - |u| (|u| - 1) / sum(u)
    alpha = 2        t <- t - (sum(u) - 1) / count          Michelot's steps, which end

**Bracketed**, for 2 < alpha <= 4. There r < 1, f^(1/r) is no norm and g is infinite wherever an
alternative enters the support; the same step is kept between two bounds and replaced by their
middle when it leaves them or stalls.

``bisect`` is the reference of both: slow, simple, sure. choice/entmax_solver.py runs them over
many rows.

Digits. For alpha below 1.5, t is near 1 and r is large: u^r = exp(r log1p(y + d)) with d = t - 1
is right where pow(y + t, r) is not. From 1.5 on t itself may be tiny, and d = t. All functions
here speak of d = t - origin(alpha).

Shapes: y is (N, K) and d is (N, 1), but for ``bisect``, ``log_u`` and ``powers``, which take any.
Every row has its largest entry at 0.

Many rows of a Tsallis choice at once, in blocks that stay in the cache.

``solve`` gives the weights and ``pull`` the product of their derivative with a vector, both with
no derivative of their own and for plain tensors only: tsallis.py attaches the derivatives.

Where few entries can have any weight (those within 1 / (alpha - 1) of the largest), they are
moved to the left of a narrow table, and all the steps of the threshold are made there.

A block is as large as the caches of all cores together, and torch shares out each operation on it.
(Python threads with a block each were tried: they wait for one another at the interpreter's lock
and took two to seven times as long.)
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from fenchel.choice.base import FORBIDDEN, float32_or_better

_STEPS = 60  # falling needs 3 to 12; a row built to resist goes to ``bisect``


def bisect(y: Tensor, alpha: float | Tensor) -> Tensor:
    """d by halving an interval that holds it: (..., K) -> (..., 1).

    At t = 1 the largest entry alone weighs 1; K equal entries would need t = K^(1 - alpha).
    The first halvings are of the ratio of the bounds, which finds the size of a tiny t, the
    others of their distance; stop when the dtype has no more to give.
    """
    start = origin(alpha)
    high = torch.ones_like(y[..., :1])
    low = high * y.shape[-1] ** (1.0 - torch.as_tensor(alpha, dtype=y.dtype, device=y.device))
    for _ in range(10):
        middle = (low * high).sqrt()
        heavy = powers(y + (middle - start), alpha).sum(-1, keepdim=True) >= 1.0
        low, high = torch.where(heavy, low, middle), torch.where(heavy, middle, high)
    low, high = low - start, high - start
    for _ in range(60 if y.dtype == torch.float64 else 30):
        middle = 0.5 * (low + high)
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


def threshold(y: Tensor, alpha: float | Tensor, work: tuple[Tensor, Tensor]) -> Tensor:
    """d: (N, K) -> (N, 1). The two tensors of ``work``, like y in shape, are overwritten."""
    small = bool((alpha <= 2.0).all()) if isinstance(alpha, Tensor) else alpha <= 2.0
    return _fall(y, alpha, work) if small else _bracketed(y, alpha)


def above(y: Tensor, t: Tensor, out: Tensor) -> Tensor:
    """u = (y + t)_+, written into ``out``."""
    return torch.add(y, t, out=out).clamp_(min=0.0)


def _fall(y: Tensor, alpha: float | Tensor, work: tuple[Tensor, Tensor]) -> Tensor:
    """d from above, by Newton's method on the r-norm."""
    start = origin(alpha)
    d = _guess(y, alpha)
    enough = _enough(alpha, torch.finfo(y.dtype).eps)
    for count in range(1, _STEPS + 1):
        step = _step(y, d, alpha, work)
        d.sub_(step)
        # Asking stops a GPU until it has answered, so ask seldom there. nan > enough is false:
        # a row with nan in it neither ends nor prolongs the work on the others.
        ask = count > 2 if y.device.type == "cpu" else count % 4 == 0
        if ask and not bool((step > enough * (start + d)).any()):
            return d
    return bisect(y, alpha)


def _guess(y: Tensor, alpha: float | Tensor) -> Tensor:
    """Where to start: t = 1, or in long rows what one entry in eight says, each counting eightfold.

    A guess below the root does no harm: the first step from there leads above it.
    """
    d = torch.ones_like(y[:, :1]) - origin(alpha)
    if y.shape[-1] < 512:
        return d
    sample = y[:, ::8].clone(memory_format=torch.contiguous_format)
    sample[:, 0] = 0.0  # the largest entry is always one of them
    work = (torch.empty_like(sample), torch.empty_like(sample))
    for _ in range(4):
        d.sub_(_step(sample, d, alpha, work, each=8.0))
    return d


def _enough(alpha: float | Tensor, eps: float) -> float | Tensor:
    """The step, relative to t, after which no other is needed."""
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
    u = above(y, d, work[0])
    if alpha == 2.0:
        count = torch.sign(u, out=work[1]).sum(-1, keepdim=True)
        return u.sum(-1, keepdim=True).sub_(1.0 / each).div_(count)
    # torch sums in pairs; a norm or a dot product does not, and its error would delay the end
    f = torch.mul(u, u, out=work[1]).sum(-1, keepdim=True)
    root = (f if each == 1.0 else f / each).sqrt()
    return f.sub_(root).div_(u.sum(-1, keepdim=True))


def _bracketed(y: Tensor, alpha: float | Tensor) -> Tensor:
    """d between two bounds, by the same step where it serves and by halving where not."""
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
        serves = (trial > low) & (trial < high) & ((trial - t).abs() <= 0.5 * last)
        moved = torch.where(done, t, torch.where(serves, trial, middle))
        last, t = (moved - t).abs(), moved
    return bisect(y, alpha)


def _sums(y: Tensor, d: Tensor, alpha: float | Tensor) -> tuple[Tensor, Tensor]:
    """f = sum u^r and g = sum over the support of u^(r - 1)."""
    w = y + d
    log = log_u(w, alpha)
    power = log.div_(alpha - 1.0).exp_()
    u = w.add_(origin(alpha)).clamp_(min=0.0)
    # off the support both are 0, and 0 / 0 is nan
    g = (power / u).masked_fill_(u == 0.0, 0.0).sum(-1, keepdim=True)
    return power.sum(-1, keepdim=True), g


_BLOCK = 1 << 17  # entries of a block for each core: half a MiB in float32, and two work spaces
_FEW = 8  # one entry in so many may be near the largest for the narrow table to pay


def solve(x: Tensor, alpha: float | Tensor) -> Tensor:
    """The weights for the scores x, halves solved in float32: (..., K) -> (..., K)."""
    if (wide := float32_or_better(x)).dtype != x.dtype:
        return solve(wide, alpha).to(x.dtype)
    rows = x.reshape(-1, x.shape[-1])
    weights = torch.zeros_like(rows)
    few = []
    for block in _blocks(rows, alpha, x.shape):
        found = _solve(rows[block.part], block, weights[block.part])
        if found is not None:
            few.append(found)
    if few:
        at, y = (torch.cat(pieces) for pieces in zip(*few, strict=True))
        weights.view(-1)[at] = _solve_few(at, y, alpha, rows.shape, x.shape)
    return weights.view(x.shape)


def thresholds(y: Tensor, alpha: float | Tensor) -> Tensor:
    """d of threshold.py, for y whose rows have their largest entry at 0: (..., K) -> (..., 1)."""
    rows = y.reshape(-1, y.shape[-1])
    d = torch.empty_like(rows[:, :1])
    for block in _blocks(rows, alpha, y.shape):
        d[block.part] = threshold(rows[block.part], block.alpha, block.space)
    return d.view(*y.shape[:-1], 1)


def pull(p: Tensor, v: Tensor, alpha: float | Tensor) -> Tensor:
    """(diag(s) - s s^T / sum(s)) v, s = p^(2 - alpha) on the support: (..., K) -> (..., K)."""
    rows, vectors = p.reshape(-1, p.shape[-1]), v.reshape(-1, p.shape[-1])
    product = torch.empty_like(rows)
    for block in _blocks(rows, alpha, p.shape):
        v, out = vectors[block.part], product[block.part]
        s = _spread(rows[block.part], block.alpha, block.space[0])
        total = s.sum(-1, keepdim=True)
        total.masked_fill_(total == 0.0, 1.0)
        mean = torch.mul(s, v, out=out).sum(-1, keepdim=True).div_(total)
        torch.sub(v, mean, out=out).mul_(s)
    return product.view(p.shape)


class _Block(NamedTuple):
    """Some rows of (N, K), the flat position of the first entry, their alpha, and work space.

    All blocks share the space: fresh memory for each would cost more than the arithmetic in it.
    """

    part: slice
    start: int
    alpha: float | Tensor
    space: tuple[Tensor, Tensor]


def _solve(x: Tensor, block: _Block, out: Tensor) -> tuple[Tensor, Tensor] | None:
    """One block of ``solve``, written into ``out``.

    Where few entries matter it is left as it is, zero, and they are returned: their flat
    positions and x less its maximum.
    """
    alpha, space = block.alpha, block.space
    top = x.amax(-1, keepdim=True)
    empty = top == FORBIDDEN
    y = torch.sub(x, top.masked_fill_(empty, 0.0), out=space[0])  # -inf - -inf would be nan
    if y.device.type == "cpu":
        # numpy finds the few among many seven times as fast as torch.nonzero does
        reach = 1.0 / (alpha - 1.0)
        near = y.numpy() > (-reach.numpy() if isinstance(reach, Tensor) else -reach)
        if np.count_nonzero(near) * _FEW <= near.size:
            at = torch.from_numpy(np.flatnonzero(near))
            return at + block.start, y.view(-1)[at]
    some_empty = bool(empty.any())
    y.mul_(alpha - 1.0)
    if some_empty:
        y.masked_fill_(empty, 0.0)
    _weigh(y, alpha, out, space[1])
    if some_empty:
        out.masked_fill_(empty, 0.0)
    return None


def _solve_few(
    at: Tensor, y: Tensor, alpha: float | Tensor, table_of: torch.Size, shape: torch.Size
) -> Tensor:
    """The weights of the entries at the flat positions ``at``, the only ones to have any."""
    N, K = table_of
    row = at // K
    counts = row.bincount(minlength=N)
    first = counts.cumsum(0) - counts
    width = max(1, int(counts.max()))
    place = torch.arange(at.numel(), device=at.device) + (width * row - first[row])
    table = y.new_full((N, width), FORBIDDEN)
    table[:, 0] = 0.0  # for rows with no entry here; nobody fetches it
    table.view(-1)[place] = y
    weights = torch.empty_like(table)
    for block in _blocks(table, alpha, shape):
        y = table[block.part].mul_(block.alpha - 1.0)
        _weigh(y, block.alpha, weights[block.part], block.space[0])
    return weights.view(-1)[place]


def _weigh(y: Tensor, alpha: float | Tensor, out: Tensor, work: Tensor) -> None:
    """The weights of rows whose largest entry is 0, written into ``out``."""
    d = threshold(y, alpha, (out, work))
    if isinstance(alpha, Tensor) or alpha not in (1.5, 2.0):
        out.copy_(powers(y + d, alpha))
    else:
        above(y, d, out)
        if alpha == 1.5:
            out.square_()
    out.div_(out.sum(-1, keepdim=True))


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
    height = N  # a GPU takes all at once
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
