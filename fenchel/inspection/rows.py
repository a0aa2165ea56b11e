"""Every row of every head's weights, told in a few numbers; a block of rows at a time.

For query i, with z = scale q k^T under its cap, p = choice.weights(z, log u) and S the keys:

    entropy      -sum_j p_ij log p_ij              sensitivity   lambda_max of dp_i/dz_i, exact
    support      how many p_ij > 0                 max_logit     max over open j of |beta z_ij|
    margin       best less second best of beta z_ij + log u_ij
    first        p_i0                              itself        p_ii
    distance     sum_j p_ij |i - j|                columns       sum_i p_ij, one number a key

``overlap`` compares heads with one another: 1 for two that look alike, 0 for two that share no key.

Memory is O(n d): no more than ``_BLOCK`` weights are held, on a GPU ``_GPU_BLOCK``.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from fenchel.attention.reference import cap
from fenchel.choice import Hard
from fenchel.inspection.subject import Attention

# Weights held at a time, and queries: on a CPU few enough that most of the future is left out.
_BLOCK, _STRIP = 1 << 22, 128
_GPU_BLOCK = 1 << 26


class Rows(NamedTuple):
    """One number a row, (H, T) each; ``columns`` is (H, S)."""

    entropy: Tensor
    support: Tensor
    sensitivity: Tensor
    max_logit: Tensor
    margin: Tensor
    first: Tensor
    itself: Tensor
    distance: Tensor
    columns: Tensor


class _Block(NamedTuple):
    rows: slice
    keys: slice
    z: Tensor
    """beta times the scores: (H, t, s)."""
    log_u: Tensor | None
    p: Tensor


@torch.no_grad()
def rows(call: Attention) -> Rows:
    """All rows of one call of attention."""
    (_, H, T, _), S = call.q.shape, call.k.shape[2]
    columns = call.q.new_zeros(H, S)
    found: list[list[Tensor]] = []
    for block in _blocks(call):
        columns[:, block.keys] += block.p.sum(1)
        found.append(_numbers(call, block, S - T))
    numbers = [torch.cat(parts, 1) for parts in zip(*found, strict=True)]
    return Rows(*numbers, columns)  # type: ignore[call-arg]


@torch.no_grad()
def weights(call: Attention, size: int) -> Tensor:
    """The weights of the first ``size`` queries on the first ``size`` keys: (H, size, size)."""
    H, S = call.q.shape[1], call.k.shape[2]
    found = call.q.new_zeros(H, size, S)
    for block in _blocks(call, size):
        found[:, block.rows, block.keys] = block.p
    return found[..., :size]


@torch.no_grad()
def overlap(call: Attention) -> Tensor:
    """How alike two heads look: mean over rows of sum_j sqrt(p_ij p'_ij), (H, H), 1 for the same.

    Rows that nothing is open to are left out.
    """
    H = call.q.shape[1]
    total, count = call.q.new_zeros(H, H, dtype=torch.float64), 0
    for block in _blocks(call):
        root = block.p.sqrt().flatten(1)
        total += (root @ root.mT).double()
        count += int((block.p[0].sum(-1) > 0).sum())
    return total / max(count, 1)


def _numbers(call: Attention, block: _Block, shift: int) -> list[Tensor]:
    z, p, log_u = block.z, block.p, block.log_u
    H, t, s = z.shape
    open_ = None if log_u is None else log_u > -torch.inf
    size = z.abs() if open_ is None else torch.where(open_, z.abs(), 0.0)
    told = z if log_u is None else z + log_u
    best = told.topk(min(2, s), -1).values
    margin = best[..., 0] - best[..., 1] if s > 1 else best[..., 0] * torch.nan
    margin = torch.where(margin.isfinite(), margin, torch.nan)  # a row with one open key
    i = torch.arange(block.rows.start, block.rows.stop, device=z.device) + shift
    j = torch.arange(block.keys.start, block.keys.stop, device=z.device)
    itself = (p * (i[:, None] == j)).sum(-1)
    first = p[..., 0] if block.keys.start == 0 else p.new_zeros(H, t)
    return [
        torch.special.entr(p).sum(-1),
        (p > 0).sum(-1).to(p.dtype),
        call.choice.sensitivity(p),
        size.amax(-1),
        margin,
        first,
        itself,
        (p * (i[:, None] - j).abs()).sum(-1),
    ]


def _blocks(call: Attention, last: int | None = None) -> Iterator[_Block]:
    q, k, prior = call.q[0].float(), call.k[0].float(), call.prior
    (H, T, _), (G, S, _) = q.shape, k.shape
    k = k if G == H else k.repeat_interleave(H // G, 0)
    beta = 1.0 if isinstance(call.choice, Hard) else call.choice.beta
    near = q.device.type == "cpu"
    most = min(_STRIP, _BLOCK // (H * S)) if near else _GPU_BLOCK // (H * S)
    step, shift = max(1, most), S - T
    for start in range(0, T if last is None else last, step):
        some = slice(start, min(start + step, T if last is None else last))
        low, high = 0, S
        if prior is not None:
            low, high = prior.reach(some.start + shift, some.stop - 1 + shift, S)
        keys = slice(low, max(high, low + 1))
        z = cap(call.scale * (q[:, some] @ k[:, keys].mT), call.softcap)
        log_u = None
        if prior is not None:
            log_u = prior.log(T, S, B=1, H=H, device=z.device, dtype=z.dtype, rows=some, keys=keys)[
                0
            ]
        yield _Block(some, keys, z * beta, log_u, call.choice.weights(z, log_u))
