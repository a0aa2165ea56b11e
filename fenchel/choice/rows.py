"""Many rows of a Tsallis choice at once, in blocks that stay in the cache.

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

from fenchel.choice.base import FORBIDDEN
from fenchel.choice.threshold import above, powers, threshold

_BLOCK = 1 << 17  # entries of a block for each core: half a MiB in float32, and two work spaces
_FEW = 8  # one entry in so many may be near the largest for the narrow table to pay


def solve(x: Tensor, alpha: float | Tensor) -> Tensor:
    """The weights for the scores x: (..., K) -> (..., K)."""
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
