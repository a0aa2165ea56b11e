"""Many rows of a Tsallis choice at once, in blocks that stay in the cache.

``solve`` gives the weights and ``pull`` the product of their derivative with a vector, both with
no derivative of their own and for plain tensors only: tsallis.py attaches the derivatives.

Where few entries can have any weight (those within 1 / (alpha - 1) of the largest), they are
moved to the left of a narrow table, and all the steps of the threshold are made there.
"""

import numpy as np
import torch
from torch import Tensor

from fenchel.choice.base import FORBIDDEN
from fenchel.choice.threshold import above, powers, threshold

_BLOCK = 1 << 17  # entries a core works on at once: half a MiB in float32, one of three such
_FEW = 8  # one entry in so many may be near the largest for the narrow table to pay


def solve(x: Tensor, alpha: float | Tensor) -> Tensor:
    """The weights for the scores x: (..., K) -> (..., K)."""
    rows = x.reshape(-1, x.shape[-1])
    weights = torch.zeros_like(rows)
    # One work space for all blocks: fresh memory would cost more than the arithmetic in it.
    space = [torch.empty_like(rows[: _height(rows)]) for _ in range(2)]
    few = []
    for part, exponent in _blocks(rows, alpha, x.shape):
        work = [s[: rows[part].shape[0]] for s in space]
        near = _solve(rows[part], exponent, weights[part], (work[0], work[1]))
        if near is not None:
            few.append((near + part.start * rows.shape[1], work[0].view(-1)[near]))
    if few:
        at, y = (torch.cat(pieces) for pieces in zip(*few, strict=True))
        weights.view(-1)[at] = _solve_few(at, y, rows.shape, alpha, x.shape)
    return weights.view(x.shape)


def thresholds(y: Tensor, alpha: float | Tensor) -> Tensor:
    """d of threshold.py, for y whose rows have their largest entry at 0: (..., K) -> (..., 1)."""
    rows = y.reshape(-1, y.shape[-1])
    d = torch.empty_like(rows[:, :1])
    for part, exponent in _blocks(rows, alpha, y.shape):
        work = (torch.empty_like(rows[part]), torch.empty_like(rows[part]))
        d[part] = threshold(rows[part], exponent, work)
    return d.view(*y.shape[:-1], 1)


def pull(p: Tensor, v: Tensor, alpha: float | Tensor) -> Tensor:
    """(diag(s) - s s^T / sum(s)) v, s = p^(2 - alpha) on the support: (..., K) -> (..., K)."""
    rows, vectors = p.reshape(-1, p.shape[-1]), v.reshape(-1, p.shape[-1])
    product = torch.empty_like(rows)
    space = torch.empty_like(rows[: _height(rows)])
    for part, exponent in _blocks(rows, alpha, p.shape):
        s = _spread(rows[part], exponent, space[: rows[part].shape[0]])
        out = product[part]
        total = s.sum(-1, keepdim=True)
        total.masked_fill_(total == 0.0, 1.0)
        mean = torch.mul(s, vectors[part], out=out).sum(-1, keepdim=True).div_(total)
        torch.sub(vectors[part], mean, out=out).mul_(s)
    return product.view(p.shape)


def _solve(
    x: Tensor, alpha: float | Tensor, out: Tensor, work: tuple[Tensor, Tensor]
) -> Tensor | None:
    """One block of ``solve``, written into ``out``; or, where few matter, their flat positions.

    ``work[0]`` is left holding x less its maximum.
    """
    top = x.amax(-1, keepdim=True)
    empty = top == FORBIDDEN
    y = torch.sub(x, top.masked_fill_(empty, 0.0), out=work[0])  # -inf - -inf would be nan
    if y.device.type == "cpu":
        # numpy finds the few among many seven times as fast as torch.nonzero does
        reach = 1.0 / (alpha - 1.0)
        near = y.numpy() > (-reach.numpy() if isinstance(reach, Tensor) else -reach)
        if np.count_nonzero(near) * _FEW <= near.size:
            return torch.from_numpy(np.flatnonzero(near))
    some_empty = bool(empty.any())
    y.mul_(alpha - 1.0)
    if some_empty:
        y.masked_fill_(empty, 0.0)
    _weigh(y, alpha, out, work[1])
    if some_empty:
        out.masked_fill_(empty, 0.0)
    return None


def _solve_few(
    at: Tensor, y: Tensor, table_of: torch.Size, alpha: float | Tensor, shape: torch.Size
) -> Tensor:
    """The weights of the entries at the flat positions ``at``, the only ones to have any."""
    N, K = table_of
    row = at // K
    counts = row.bincount(minlength=N)
    first = counts.cumsum(0) - counts
    width = max(1, int(counts.max()))
    place = torch.arange(at.numel()) + (width * row - first[row])
    table = y.new_full((N, width), FORBIDDEN)
    table[:, 0] = 0.0  # for rows with no entry here; nobody fetches it
    table.view(-1)[place] = y
    weights = torch.empty_like(table)
    for part, exponent in _blocks(table, alpha, shape):
        rows = table[part].mul_(exponent - 1.0)
        _weigh(rows, exponent, weights[part], torch.empty_like(rows))
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


def _height(rows: Tensor) -> int:
    """Rows in a block; a GPU takes all at once."""
    N, K = rows.shape
    if rows.device.type != "cpu":
        return N
    return max(1, torch.get_num_threads() * _BLOCK // max(K, 1))


def _blocks(
    rows: Tensor, alpha: float | Tensor, shape: torch.Size
) -> list[tuple[slice, float | Tensor]]:
    """Cut (N, K) rows, and with them an alpha that broadcasts against ``shape``, into blocks."""
    height = max(1, _height(rows))
    parts = [slice(i, i + height) for i in range(0, rows.shape[0], height)]
    if not isinstance(alpha, Tensor):
        return [(part, alpha) for part in parts]
    per_row = alpha.to(rows.dtype).expand(*shape[:-1], 1).reshape(-1, 1)
    return [(part, per_row[part]) for part in parts]
