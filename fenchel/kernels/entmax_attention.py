"""Entmax attention and its derivatives in memory O(T + S), sparse in tiles of scores.

With x = scale beta q k^T + log u, rate = alpha - 1 in (0, 1] and r = 1 / rate, for every query

    y_j = rate x_j,    u_j = (y_j - tau)_+ ,    p_j = u_j^r ,   sum_j p_j = 1,    o = sum_j p_j v_j
    s_j = u_j^(r - 1) = p_j^(2 - alpha),        C = sum_j s_j v_j / sum_j s_j

    gp = g v^T,        gx = s (gp - <g, C>)
    gq = scale beta gx k,       gk = scale beta gx^T q,       gv = p^T g

and along tangents dq, dk, dv, with dx = scale beta (dq k^T + q dk^T) and h = sum_j s_j dx_j,

    do = choosing + values,     choosing = sum_j s_j dx_j v_j - h C,     values = sum_j p_j dv_j

**tau.** N(t) = (sum_j (y_j - t)_+^r)^(1/r) is a norm, convex and decreasing in t, and N(tau) = 1.
Newton's method on it,

    t <- t + (f - f^(2 - alpha)) / g,      f = sum_j u_j^r,   g = sum_j u_j^(r - 1)   at t,

never exceeds tau from a start below it, and from a start above it lands below it in one step. So
every t but the first is a lower bound of tau, and so is max y - 1. A tile of scores whose entries
are all <= such a bound has no weight, for certain: it is never visited again.

**Passes.** One program per block of BM queries of one head:

    A    all tiles: max, sum and sum of squares of y; tiles with an entry above running max - 1 are
         kept
    B    kept tiles: f, g at t, Newton's step; those with u > 0 are kept. Until it has converged
    C    kept tiles: sum p v, sum s v, f, g; one more Newton step d, applied to the sums:
         o = (sum p v - r d sum s v) / (f - r d g), so that the weights sum to 1 exactly

A and B are one kernel (``_thresholds``), C is ``_outputs``: B needs few registers, so that two of
its programs share a multiprocessor. B begins at the tau of a normal distribution with the mean, the
variance and the number of the y of the row (``gaussian_start``), which is close for the
near-uniform rows that need most steps from max - 1. Where that lies beyond the largest possible
tau, the row is not normal: B begins at max - 1, and its second pass (alpha = 1.5 and 2) at the tau
of a normal distribution with the moments of the y above max - 1, which the first pass has summed.

The list of kept tiles never leaves the device. The gradients of q are summed over the list of a
block of queries, those of k and v over the transposed list of a block of keys, the heads of a group
one after another. No atomic operations: bits repeat.

**Cost** in products of T x S x D, with a, b, s the parts of tiles kept after A, while in B, and in
the end: forward 1 + a + b + ... + 3 s, backward 7 s, along tangents 5 s after a forward pass.

**Masks.** Position i = t + S - T of query t sees keys from i - left to i + right that lie in
[start, end) of its sequence. Tiles that no mask cuts are visited without one: in every list the
tiles that a mask cuts come first, then the others. A bias is -slope |i - j|, a slope per head.

**Precision.** Products in the dtype of q with sums in float32 (float32: ``ieee``), the rest in
float32. In C a row is scaled to max u = 1, so that weights of long near-uniform rows are no
subnormal numbers of float16. A row with no open key has tau = inf, o = 0 and no gradient. A row
with a score that is not finite has tau = nan and o = nan.

**Layout.** Inputs may have any strides. Outputs and gradients lie in memory as q does: positions
within heads, (B, H, T, E), or heads within positions, (B, T, H, E), as a projection of the stream
leaves them and as the next one reads them.

Memory beside the outputs: tau, max y and <g, C> per query; C, as large as o; 3 bytes per tile.

Shapes: q (B, H, T, D), k (B, G, S, D), v (B, G, S, E), o and C (B, H, T, E), tau (B, H, T).
"""

import math
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from fenchel.kernels.band import Band
from fenchel.kernels.primitives import (
    FLOOR,
    band_range,
    entmax_kind,
    entmax_newton,
    entmax_root,
    entmax_terms,
    padded_width,
)

WORD = tl.constexpr(32)
"""Tiles whose flags fit into one integer per row."""
STEPS = 30
"""Newton steps at most; 1 to 4 from ``gaussian_start`` for most rows."""
DEGREE = 10
"""Of the polynomial of ``gaussian_start``: z is right within .01."""
_TOLERANCES = {torch.float32: 3e-4, torch.float16: 0.02, torch.bfloat16: 0.05}
"""The last Newton step of B in units of max y - tau: the next one, in C, is about its square. Twice
and a half as strict above alpha = 1.5, where the weights have a kink at u = 0 or nearly so."""
LARGE = (9, 10)
"""Compute capabilities with 227 KiB of shared memory per program; others have 99 to 163."""
LENGTHS = ("T", "S", "left", "right")
"""Arguments for whose values no kernel is compiled anew."""


class Saved(NamedTuple):
    """What the backward pass needs beside q, k, v."""

    C: Tensor
    tau: Tensor
    tiles: Tensor
    """(B, H, query blocks, key blocks) of int16: the kept tiles of a block of queries, in front."""
    counts: Tensor
    """(B, H, query blocks, 2) of int32: how many of them a mask cuts, and how many there are."""
    hits: Tensor
    """(B, H, query blocks, key blocks) of int8: whether a tile is kept."""


class Launch(NamedTuple):
    """How one kernel is compiled."""

    warps: int
    stages: int
    registers: int | None = None
    """At most so many per thread, so that more programs share a multiprocessor; None for any."""

    def options(self) -> dict[str, int]:
        """The arguments of a launch."""
        limit = {} if self.registers is None else {"maxnreg": self.registers}
        return {"num_warps": self.warps, "num_stages": self.stages, **limit}


class Tiling(NamedTuple):
    """The tiles of scores, and how the kernels are compiled."""

    BM: int
    """Queries of a tile."""
    BN: int
    """Keys of a tile."""
    rows: int
    """Queries that ``_key_gradients`` takes at a time, a part of BM."""
    thresholds: Launch
    outputs: Launch
    queries: Launch
    keys: Launch
    tangents: Launch


def tiling(width: int, dtype: torch.dtype, large: bool) -> Tiling:
    """The tiles for heads that are ``width`` wide, a power of two.

    ``large`` GPUs have 227 KiB of shared memory. Measured on an H200, but for the tiles of float32
    and of other GPUs, and the launches of ``_tangents``.
    """
    if dtype == torch.float32:
        return Tiling(32, 32, 32, *[Launch(4, 1)] * 5)
    if not large:
        return Tiling(64, 32, 32, *[Launch(4, 2)] * 5)
    many = Launch(8, 3)
    if width <= 64:
        few = Launch(8, 3, 128)
        return Tiling(128, 64, 64, few, many, few, Launch(4, 3), many)
    return Tiling(128, 64, 32, many, many, many, Launch(4, 3), Launch(8, 2))


@lru_cache(maxsize=64)
def gaussian_start(alpha: float) -> tuple[float, ...]:
    """(centre, half width, coefficients): z in [-3, 5] with h(z) = w as a polynomial in log w.

    For n scores with mean mu and standard deviation sigma of a normal distribution,
    n E (y - t)_+^r = 1 at t = mu + sigma z with h(z) = E (x - z)_+^r = 1 / (n sigma^r).
    """
    r = 1.0 / (alpha - 1.0)
    z = np.linspace(-3.0, 5.0, 161)
    points, weights = np.polynomial.legendre.leggauss(200)
    half = 0.5 * (12.0 - z[:, None])  # x beyond 12 has no mass
    u = half * (points + 1.0)
    h = (half * weights * u**r * np.exp(-0.5 * (u + z[:, None]) ** 2)).sum(1)
    log_h = np.log(h / math.sqrt(2.0 * math.pi))
    low, high = float(log_h.min()), float(log_h.max())
    centre, reach = (low + high) / 2.0, (high - low) / 2.0
    fit = np.polynomial.chebyshev.chebfit((log_h - centre) / reach, z, DEGREE)
    return centre, reach, *map(float, np.polynomial.chebyshev.cheb2poly(fit))


def attend_entmax(
    q: Tensor, k: Tensor, v: Tensor, alpha: float, factor: float, band: Band
) -> tuple[Tensor, Saved]:
    """The outputs, and what the backward pass needs; ``factor`` is scale times beta, 0 or more."""
    B, H = q.shape[:2]
    out, *rest = allocate(q, v)
    inside, saved = heads_inside(q), Saved(*rest)
    q, k, v = map(_unit_stride, (q, k, v))
    C, tau, kept, counts, hits = saved
    if out.numel() == 0 or k.shape[2] == 0:
        return out.zero_(), saved
    tiles, rows, top = _tiling(q, v), hits.shape[2], torch.empty_like(tau)
    shared = _shared(q, k, v, alpha, factor, band, tiles)
    grid = (B * H * rows,)
    _thresholds[grid](
        *(q, k, tau, top, kept, counts, hits, band.start, band.stop, band.slopes),
        *gaussian_start(alpha),
        **shared,
        STEPS=STEPS,
        TOLERANCE=_TOLERANCES[q.dtype] * (1.0 if alpha <= 1.5 else 0.4),
        **tiles.thresholds.options(),
    )
    _outputs[grid](
        *(q, k, v, out, C, tau, top, kept, counts, band.start, band.stop, band.slopes),
        **shared,
        **_values(v),
        INSIDE=inside,
        **tiles.outputs.options(),
    )
    return out, saved


def allocate(q: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    """Memory for the outputs and for ``Saved``; no tile is kept yet."""
    (B, H, T, _), (S, E) = q.shape, v.shape[2:]
    tiles = _tiling(q, v)
    rows, columns = -(-T // tiles.BM), -(-S // tiles.BN)
    return (
        _empty(q, v.shape[3], heads_inside(q)),
        q.new_empty(B, H, T, E),
        q.new_empty(B, H, T, dtype=torch.float32),
        q.new_empty(B, H, rows, columns, dtype=torch.int16),
        q.new_empty(B, H, rows, 2, dtype=torch.int32),
        q.new_zeros(B, H, rows, columns, dtype=torch.int8),
    )


def allocate_gradients(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Memory for the gradients of q, k and v."""
    inside = heads_inside(q)
    gq, gk, gv = (_empty(x, x.shape[3], inside) for x in (q, k, v))
    return gq, gk, gv


def heads_inside(q: Tensor) -> bool:
    """Whether the heads of a position are adjacent in memory, not the positions of a head."""
    return q.stride(1) < q.stride(2)


def _empty(x: Tensor, width: int, inside: bool) -> Tensor:
    """Memory for (B, H, T, width) with the sizes of x."""
    B, H, T, _ = x.shape
    return x.new_empty(B, T, H, width).transpose(1, 2) if inside else x.new_empty(B, H, T, width)


def attend_entmax_backward(
    g: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    saved: Saved,
    alpha: float,
    factor: float,
    band: Band,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of <g, o> in q, k and v."""
    (B, H, T, _), (_, G, S, _) = q.shape, k.shape
    gq, gk, gv = allocate_gradients(q, k, v)
    inside = heads_inside(q)
    if T == 0 or S == 0 or B * H == 0:
        return gq.zero_(), gk.zero_(), gv.zero_()
    g, q, k, v = map(_unit_stride, (g, q, k, v))
    tiles = _tiling(q, v)
    rows, columns = saved.hits.shape[2:]
    shared = _shared(q, k, v, alpha, factor, band, tiles)
    delta = torch.empty_like(saved.tau)
    _query_gradients[(B * H * rows,)](
        *(q, k, v, g, saved.C, saved.tau, delta, gq, saved.tiles, saved.counts),
        *(band.start, band.stop, band.slopes, *g.stride()[:3]),
        **shared,
        **_values(v),
        INSIDE=inside,
        **tiles.queries.options(),
    )
    blocks = torch.empty(B * G * columns, rows, dtype=torch.int16, device=q.device)
    _key_gradients[(B * G * columns,)](
        *(q, k, v, g, saved.tau, delta, gk, gv, saved.hits, blocks),
        *(band.start, band.stop, band.slopes, *g.stride()[:3]),
        **shared,
        **_values(v),
        INSIDE=inside,
        CHUNK=max(16, min(128, triton.next_power_of_2(rows))),
        SUB=tiles.rows,
        **tiles.keys.options(),
    )
    return gq, gk, gv


def attend_entmax_jvp(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    tangents: tuple[Tensor | None, Tensor | None, Tensor | None],
    saved: Saved,
    alpha: float,
    factor: float,
    band: Band,
) -> tuple[Tensor | None, Tensor | None]:
    """(choosing, values), the parts of the derivative along tangents of q, k, v; None is 0."""
    B, H = q.shape[:2]
    dq, dk, dv = (None if x is None else x.to(q.dtype) for x in tangents)
    if dv is not None and not (dq is None and dk is None) and max(q.shape[-1], v.shape[-1]) > 64:
        # Two sums of such width, the scores and their tangents do not fit into registers.
        choosing, _ = attend_entmax_jvp(q, k, v, (dq, dk, None), saved, alpha, factor, band)
        _, values = attend_entmax_jvp(q, k, v, (None, None, dv), saved, alpha, factor, band)
        return choosing, values
    choosing = None if dq is None and dk is None else torch.empty_like(saved.C)
    values = None if dv is None else torch.empty_like(saved.C)
    parts = [x for x in (choosing, values) if x is not None]
    if saved.C.numel() == 0 or k.shape[2] == 0:
        for x in parts:
            x.zero_()
        return choosing, values
    q, k, v = map(_unit_stride, (q, k, v))
    (q, dq), (k, dk), (v, dv) = (_in_one_layout(*pair) for pair in ((q, dq), (k, dk), (v, dv)))
    tiles = _tiling(q, v)
    if parts:
        _tangents[(B * H * saved.hits.shape[2],)](
            *(q, k, v, dq, dk, dv, choosing, values),
            *(saved.C, saved.tau, saved.tiles, saved.counts, band.start, band.stop, band.slopes),
            **_shared(q, k, v, alpha, factor, band, tiles),
            **_values(v),
            **tiles.tangents.options(),
        )
    return choosing, values


def _in_one_layout(x: Tensor, dx: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """A tensor and its tangent with the same strides, since the kernel has one set for both."""
    if dx is None or dx.stride() == x.stride():
        return x, dx
    like = torch.empty_like(x)
    if like.stride() == x.stride():
        return x, like.copy_(dx)
    return x.contiguous(), dx.contiguous()  # x has gaps, as a slice, or repeats itself


def _shared(
    q: Tensor, k: Tensor, v: Tensor, alpha: float, factor: float, band: Band, tiles: Tiling
) -> dict[str, Any]:
    """The arguments that all kernels take, those of the values apart."""
    (_, H, T, D), (_, G, S, _) = q.shape, k.shape
    rate = alpha - 1.0
    return {
        "H": H,
        "group": H // G,
        "T": T,
        "S": S,
        "D": D,
        "left": T + S if band.left is None else min(band.left, T + S),
        "right": T + S if band.right is None else min(band.right, T + S),
        **dict(zip(("q_b", "q_h", "q_t"), q.stride(), strict=False)),
        **dict(zip(("k_b", "k_h", "k_s"), k.stride(), strict=False)),
        "factor": factor,
        "rate": rate,
        "KIND": entmax_kind(alpha),
        "BM": tiles.BM,
        "BN": tiles.BN,
        "BD": padded_width(D),
        "EVEN": padded_width(D) == D and padded_width(v.shape[3]) == v.shape[3],
        "UPCAST": q.device.type == "cpu",  # the interpreter's products of bfloat16 are wrong
    }


def _values(v: Tensor) -> dict[str, int]:
    """The arguments of the kernels that read values."""
    E = v.shape[3]
    strides = zip(("v_b", "v_h", "v_s"), v.stride(), strict=False)
    return {"E": E, "BE": padded_width(E), **dict(strides)}


def _tiling(q: Tensor, v: Tensor) -> Tiling:
    large = q.device.type != "cuda" or torch.cuda.get_device_capability(q.device)[0] in LARGE
    return tiling(padded_width(max(q.shape[-1], v.shape[-1])), q.dtype, large)


def _unit_stride(x: Tensor) -> Tensor:
    """x, copied unless the entries of a head are adjacent."""
    return x if x.stride(-1) == 1 else x.contiguous()


@triton.jit
def _either(a, b):
    return a | b


# Tuples that travel together: a matrix is (pointer, stride of its rows, rows, columns), a band
# (start, end, left, right), a start (centre, half, the coefficients of ``gaussian_start``).


@triton.jit
def _uncut(block, band, T, S, BM: tl.constexpr, BN: tl.constexpr):
    """(low, high) of the tiles that no mask cuts; ``block`` may be a vector."""
    start, end, left, right = band
    first = block * BM + S - T
    last = tl.minimum(block * BM + BM, T) - 1 + S - T
    low = (tl.maximum(start, last - left) + BN - 1) // BN
    high = tl.maximum(tl.minimum(end, first + right + 1), 0) // BN
    return low, high


@triton.jit
def _query_block(T, H, BM: tl.constexpr):
    """(head, sequence, head of the sequence, block of queries, its number) of this program."""
    rows = tl.cdiv(T, BM)
    head = (tl.program_id(0) // rows).to(tl.int64)
    block = rows - 1 - tl.program_id(0) % rows  # under a causal mask the longest first
    return head, head // H, head % H, block, head * rows + block


@triton.jit
def _open(i, j, band):
    """Whether positions i see keys j; both broadcast."""
    start, end, left, right = band
    return (j >= start) & (j < end) & (j >= i - left) & (j <= i + right)


@triton.jit
def _operand(x, UPCAST: tl.constexpr):
    if UPCAST:
        x = x.to(tl.float32)
    return x


@triton.jit
def _load(
    matrix, first, N: tl.constexpr, W: tl.constexpr, TRANSPOSED: tl.constexpr, CUT: tl.constexpr,
    EVEN: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Rows ``first`` to first + N of a matrix, (N, W) or transposed; 0 outside.

    Only where a tile is CUT some rows may lie outside, and columns unless W is EVEN.
    """
    x_ptr, stride, rows, columns = matrix
    n, w = tl.arange(0, N), tl.arange(0, W)
    x_ptr += first.to(tl.int64) * stride
    if TRANSPOSED:
        at = n[None, :] * stride + w[:, None]
        mask = (n[None, :] < rows - first) & (w[:, None] < columns)
    else:
        at = n[:, None] * stride + w[None, :]
        mask = (n[:, None] < rows - first) & (w[None, :] < columns)
    x = tl.load(x_ptr + at, mask=mask, other=0.0) if CUT or not EVEN else tl.load(x_ptr + at)
    return _operand(x, UPCAST)


@triton.jit
def _store(matrix, x, first, N: tl.constexpr, W: tl.constexpr):
    """Write x (N, W) to the rows of a matrix from ``first`` on."""
    x_ptr, stride, rows, columns = matrix
    n, w = tl.arange(0, N), tl.arange(0, W)
    x_ptr += first.to(tl.int64) * stride
    mask = (n[:, None] < rows - first) & (w[None, :] < columns)
    at = n[:, None] * stride + w[None, :]
    tl.store(x_ptr + at, x.to(x_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _dense(x_ptr, b, h, H, T, W, INSIDE: tl.constexpr):
    """The matrix of head h of (B, H, T, W), or of (B, T, H, W) where heads are INSIDE."""
    step = W if INSIDE else T * W
    stride = H * W if INSIDE else W
    return x_ptr + b * H * T * W + h * step, stride, T, W


@triton.jit
def _slope(slopes_ptr, h, rate):
    slope = 0.0
    if slopes_ptr is not None:
        slope = rate * tl.load(slopes_ptr + h)
    return slope


@triton.jit
def _excess(z, c, t, slope, i, j, band, BIASED: tl.constexpr, CUT: tl.constexpr):
    """u = (c z - slope |i - j| - t)_+ for products z = q k^T, 0 where a mask closes j to i."""
    u = z * c - t
    if BIASED:
        u -= slope * tl.abs((i - j).to(tl.float32))
    if CUT:
        u = tl.where(_open(i, j, band), u, 0.0)
    return tl.maximum(u, 0.0)


@triton.jit
def _keep(tiles_ptr, tiles, there, count):
    """Append the tiles that are ``there`` to the list and return its new length."""
    here = there.to(tl.int32)
    tl.store(tiles_ptr + count + tl.cumsum(here, 0) - here, tiles.to(tl.int16), mask=there)
    return count + tl.sum(here, 0)


@triton.jit
def _scan(
    q, keys, tiles_ptr, kept, sums, amount, split, lower, upper, i, band, slope, c,
    BN: tl.constexpr, BD: tl.constexpr, BIASED: tl.constexpr, CUT: tl.constexpr,
    EVEN: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Pass A over ``amount`` tiles: upward from ``upper`` and, from the split on, from ``lower``;
    downward from ``upper`` where no mask cuts them.
    """
    top, total, squares = sums
    lane = tl.arange(0, WORD)
    for word in range(0, amount, WORD):
        flags = tl.zeros_like(top).to(tl.int32)
        stop = tl.minimum(word + WORD, amount)
        for e in range(word, stop):
            tile = tl.where(e < split, upper + e, lower + e - split) if CUT else upper - 1 - e
            k = _load(keys, tile * BN, BN, BD, True, CUT, EVEN, UPCAST)
            y = tl.dot(q, k, input_precision="ieee")
            j = tile * BN + tl.arange(0, BN)
            if BIASED:
                y = y * c - slope * tl.abs((i[:, None] - j[None, :]).to(tl.float32))
            if CUT:
                seen = _open(i[:, None], j[None, :], band)
                largest = tl.max(tl.where(seen, y, -float("inf")), 1)
                y = tl.where(seen, y, 0.0)
            else:
                largest = tl.max(y, 1)
            if not BIASED:  # c >= 0: the factor is applied to the largest and to the sums
                largest = tl.where(largest == -float("inf"), largest, largest * c)
            total += tl.sum(y, 1)
            squares += tl.sum(y * y, 1)
            top = tl.maximum(top, largest)
            flags |= (largest > top - 1.0).to(tl.int32) << (e - word)
        flag = tl.reduce(flags, 0, _either)
        e = word + lane
        tiles = tl.where(e < split, upper + e, lower + e - split) if CUT else upper - 1 - e
        kept = _keep(tiles_ptr, tiles, (e < stop) & ((flag >> lane) & 1 == 1), kept)
    return kept, top, total, squares


@triton.jit
def _evaluate(
    q, keys, tiles_ptr, kept, sums, t, first, last, certain, i, band, slope, c, power,
    KIND: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, BIASED: tl.constexpr,
    CUT: tl.constexpr, EVEN: tl.constexpr, UPCAST: tl.constexpr, THIRD: tl.constexpr,
):  # fmt: skip
    """Pass B over entries ``first`` to ``last`` of the list, which it shortens if t is certain.

    m is the THIRD of the sums of 1, u and u^2 over u > 0, of which f and g are two.
    """
    f, g, m = sums
    lane = tl.arange(0, WORD)
    for word in range(first, last, WORD):
        flags = tl.zeros_like(t).to(tl.int32)
        stop = tl.minimum(word + WORD, last)
        for e in range(word, stop):
            tile = tl.load(tiles_ptr + e).to(tl.int32)
            k = _load(keys, tile * BN, BN, BD, True, CUT, EVEN, UPCAST)
            z = tl.dot(q, k, input_precision="ieee")
            j = tile * BN + tl.arange(0, BN)
            u = _excess(z, c, t[:, None], slope, i[:, None], j[None, :], band, BIASED, CUT)
            p, s = entmax_terms(u, power, KIND)
            part = tl.sum(s, 1)
            f += tl.sum(p, 1)
            g += part
            if THIRD:
                m += tl.sum(tl.where(u > 0.0, 1.0, 0.0) if KIND == 0 else p * p, 1)
            flags |= (part > 0.0).to(tl.int32) << (e - word)
        flag = tl.reduce(flags, 0, _either)
        flag = tl.where(certain, flag, -1)
        e = word + lane
        tiles = tl.load(tiles_ptr + e, mask=e < stop, other=0)
        tl.debug_barrier()  # every thread has read the entries that are about to be overwritten
        kept = _keep(tiles_ptr, tiles, (e < stop) & ((flag >> lane) & 1 == 1), kept)
    return kept, f, g, m


@triton.jit
def _evaluate_all(
    q, keys, tiles_ptr, cut, kept, t, certain, i, band, slope, c, power,
    KIND: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, BIASED: tl.constexpr,
    EVEN: tl.constexpr, UPCAST: tl.constexpr, THIRD: tl.constexpr,
):  # fmt: skip
    """Pass B over the list, and its new lengths: first the tiles that a mask cuts."""
    tl.debug_barrier()  # the list was written by other threads
    nothing = tl.full((), 0, tl.int32)  # not a constant, which a loop could not change
    f, g, m = tl.zeros_like(t), tl.zeros_like(t), tl.zeros_like(t)
    still, f, g, m = _evaluate(
        q, keys, tiles_ptr, nothing, (f, g, m), t, 0, cut, certain, i, band, slope, c, power,
        KIND, BN, BD, BIASED, True, EVEN, UPCAST, THIRD,
    )  # fmt: skip
    all_still, f, g, m = _evaluate(
        q, keys, tiles_ptr, still, (f, g, m), t, cut, kept, certain, i, band, slope, c, power,
        KIND, BN, BD, BIASED, False, EVEN, UPCAST, THIRD,
    )  # fmt: skip
    return still, all_still, f, g, m


@triton.jit
def _newton(t, f, g, top, rate, KIND: tl.constexpr):
    return tl.maximum(t + entmax_newton(f, g, rate, -1.0, KIND), top - 1.0)


@triton.jit
def _far(t, after, top, TOLERANCE: tl.constexpr):
    """Whether a step was too long to be the last one before pass C."""
    near = tl.abs(after - t) <= TOLERANCE * (top - after) + 2.4e-7 * tl.abs(after)
    return near == 0


@triton.jit
def _normal_start(n, mean, square, rate, start):
    """tau of n normal numbers with that mean and mean square, see ``gaussian_start``."""
    centre, half, z0, z1, z2, z3, z4, z5, z6, z7, z8, z9, z10 = start
    sigma = tl.sqrt(tl.maximum(square - mean * mean, 1e-12))
    x = (-tl.log(n) - tl.log(sigma) / rate - centre) / half
    x = tl.minimum(tl.maximum(x, -1.0), 1.0)
    z = z6 + x * (z7 + x * (z8 + x * (z9 + x * z10)))
    z = z0 + x * (z1 + x * (z2 + x * (z3 + x * (z4 + x * (z5 + x * z)))))
    return mean + sigma * z


@triton.jit(do_not_specialize=LENGTHS)
def _thresholds(
    q_ptr, k_ptr, tau_ptr, top_ptr, tiles_ptr, counts_ptr, hits_ptr, start_ptr, stop_ptr,
    slopes_ptr, centre, half, z0, z1, z2, z3, z4, z5, z6, z7, z8, z9, z10,
    H, group, T, S, D, left, right, q_b, q_h, q_t, k_b, k_h, k_s, factor, rate,
    KIND: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr,
    EVEN: tl.constexpr, UPCAST: tl.constexpr, STEPS: tl.constexpr, TOLERANCE: tl.constexpr,
):  # fmt: skip
    head, b, h, block, at = _query_block(T, H, BM)
    columns = tl.cdiv(S, BN)
    keys = (k_ptr + b * k_b + (h // group) * k_h, k_s, S, D)
    tiles_ptr += at * columns
    start, end = band_range(start_ptr, stop_ptr, b, S)
    band = (start, end, left, right)
    c = factor * rate
    power = 1.0 / rate - 1.0
    BIASED: tl.constexpr = slopes_ptr is not None
    slope = _slope(slopes_ptr, h, rate)
    row = block * BM + tl.arange(0, BM)
    i = row + S - T
    queries = (q_ptr + b * q_b + h * q_h, q_t, T, D)
    q = _load(queries, block * BM, BM, BD, False, True, EVEN, UPCAST)

    # Tiles [first, low) and [high, last) are cut by a mask, those in [low, high) are not.
    first = tl.maximum(start, block * BM + S - T - left) // BN
    last = tl.minimum(end, tl.minimum(block * BM + BM, T) + S - T + right)
    last = tl.maximum((tl.maximum(last, 0) + BN - 1) // BN, first)
    low, high = _uncut(block, band, T, S, BM, BN)
    low = tl.minimum(tl.maximum(low, first), last)
    high = tl.minimum(tl.maximum(high, low), last)

    top = tl.where(row < T, FLOOR, -FLOOR)  # rows beyond the last query keep no tile
    total = tl.zeros((BM,), tl.float32)
    squares = tl.zeros((BM,), tl.float32)
    cut = 0
    cut, top, total, squares = _scan(
        q, keys, tiles_ptr, cut, (top, total, squares), last - high + low - first, last - high,
        first, high, i, band, slope, c, BN, BD, BIASED, True, EVEN, UPCAST,
    )  # fmt: skip
    kept = cut
    kept, top, total, squares = _scan(
        q, keys, tiles_ptr, kept, (top, total, squares), high - low, 0, low, high,
        i, band, slope, c, BN, BD, BIASED, False, EVEN, UPCAST,
    )  # fmt: skip

    reached = (top > 0.5 * FLOOR) & (top < -0.5 * FLOOR)
    broken = (row < T) & ((top >= -0.5 * FLOOR) | (total != total))
    n = tl.minimum(end, i + right + 1) - tl.maximum(start, i - left)
    n = tl.maximum(n, 1).to(tl.float32)
    if not BIASED:
        total *= c
        squares *= c * c
    # tau lies in [top - 1, top - n^(1 - alpha)]; a start beyond says that the row is not normal.
    polynomial = (centre, half, z0, z1, z2, z3, z4, z5, z6, z7, z8, z9, z10)
    t = _normal_start(n, total / n, squares / n, rate, polynomial)
    normal = reached & (t < top - tl.exp2(-rate * tl.log2(n)))
    t = tl.where(normal, tl.maximum(t, top - 1.0), top - 1.0)
    t = tl.where(reached, t, float("inf"))
    certain = tl.max(normal.to(tl.int32), 0) == 0
    cut, kept, f, g, m = _evaluate_all(
        q, keys, tiles_ptr, cut, kept, t, certain, i, band, slope, c, power,
        KIND, BN, BD, BIASED, EVEN, UPCAST, KIND < 2,
    )  # fmt: skip
    after = _newton(t, f, g, top, rate, KIND)
    moving = reached & _far(t, after, top, TOLERANCE)
    if KIND < 2:
        # The scores above top - 1 of the other rows may be normal.
        count = tl.maximum(m if KIND == 0 else g, 1.0)
        mean = (g if KIND == 0 else f) / count
        square = (f if KIND == 0 else m) / count
        guess = top - 1.0
        guess += _normal_start(count, mean, square, rate, polynomial)
        guess = tl.where(guess < top - tl.exp2(-rate * tl.log2(count)), guess, after)
        guessed = reached & (normal == 0) & (guess > after)
        after = tl.where(guessed, guess, after)
        certain = tl.max(guessed.to(tl.int32), 0) == 0
        moving |= guessed
    else:
        certain = tl.max(reached.to(tl.int32), 0) >= 0
    t = tl.where(reached, after, t)

    step = 1
    some = tl.max(moving.to(tl.int32), 0)
    while (step < STEPS) & (some > 0):
        cut, kept, f, g, m = _evaluate_all(
            q, keys, tiles_ptr, cut, kept, t, certain | (step > 1), i, band, slope, c, power,
            KIND, BN, BD, BIASED, EVEN, UPCAST, False,
        )  # fmt: skip
        after = _newton(t, f, g, top, rate, KIND)
        some = tl.max((reached & _far(t, after, top, TOLERANCE)).to(tl.int32), 0)
        t = tl.where(reached, after, t)
        step += 1
    tl.debug_barrier()

    t = tl.where(broken, float("nan"), t)
    tl.store(tau_ptr + head * T + row, t, mask=row < T)
    tl.store(top_ptr + head * T + row, top, mask=row < T)
    counts_ptr += at * 2
    tl.store(counts_ptr, cut)
    tl.store(counts_ptr + 1, kept)
    hits_ptr += at * columns
    for e in range(0, kept, BM):
        entry = e + tl.arange(0, BM)
        tiles = tl.load(tiles_ptr + entry, mask=entry < kept, other=0).to(tl.int32)
        tl.store(hits_ptr + tiles, tl.full((BM,), 1, tl.int8), mask=entry < kept)


@triton.jit
def _mix(
    sums, q, keys, values, tiles_ptr, first, last, a, t, slope, i, band, power,
    KIND: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr,
    BIASED: tl.constexpr, CUT: tl.constexpr, EVEN: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Pass C over entries ``first`` to ``last`` of the list; a, t and slope are numbers per row."""
    pv, sv, f, g = sums
    for e in range(first, last):
        tile = tl.load(tiles_ptr + e).to(tl.int32)
        k = _load(keys, tile * BN, BN, BD, True, CUT, EVEN, UPCAST)
        z = tl.dot(q, k, input_precision="ieee")
        i_, j_ = i[:, None], (tile * BN + tl.arange(0, BN))[None, :]
        u = _excess(z, a[:, None], t[:, None], slope[:, None], i_, j_, band, BIASED, CUT)
        p, s = entmax_terms(u, power, KIND)
        f += tl.sum(p, 1)
        g += tl.sum(s, 1)
        v = _load(values, tile * BN, BN, BE, False, CUT, EVEN, False)
        p, s = _operand(p.to(v.dtype), UPCAST), _operand(s.to(v.dtype), UPCAST)
        v = _operand(v, UPCAST)
        pv = tl.dot(p, v, pv, input_precision="ieee")
        sv = tl.dot(s, v, sv, input_precision="ieee")
    return pv, sv, f, g


@triton.jit(do_not_specialize=LENGTHS)
def _outputs(
    q_ptr, k_ptr, v_ptr, out_ptr, C_ptr, tau_ptr, top_ptr, tiles_ptr, counts_ptr, start_ptr,
    stop_ptr, slopes_ptr, H, group, T, S, D, E, left, right, q_b, q_h, q_t, k_b, k_h, k_s,
    v_b, v_h, v_s, factor, rate, KIND: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    BD: tl.constexpr, BE: tl.constexpr, EVEN: tl.constexpr, UPCAST: tl.constexpr,
    INSIDE: tl.constexpr,
):  # fmt: skip
    head, b, h, block, at = _query_block(T, H, BM)
    columns = tl.cdiv(S, BN)
    keys = (k_ptr + b * k_b + (h // group) * k_h, k_s, S, D)
    values = (v_ptr + b * v_b + (h // group) * v_h, v_s, S, E)
    tiles_ptr += at * columns
    start, end = band_range(start_ptr, stop_ptr, b, S)
    band = (start, end, left, right)
    BIASED: tl.constexpr = slopes_ptr is not None
    row = block * BM + tl.arange(0, BM)
    i = row + S - T
    queries = (q_ptr + b * q_b + h * q_h, q_t, T, D)
    q = _load(queries, block * BM, BM, BD, False, True, EVEN, UPCAST)
    tau = tl.load(tau_ptr + head * T + row, mask=row < T, other=float("inf"))
    top = tl.load(top_ptr + head * T + row, mask=row < T, other=0.0)
    # Scaled so that the largest u of a row is 1; a row without keys has u = -1 everywhere.
    finite = tl.abs(tau) < float("inf")
    inverse = tl.where(finite, 1.0 / (top - tau), 0.0)
    t = tl.where(finite, tau * inverse, 1.0)
    a = factor * rate * inverse
    slope = _slope(slopes_ptr, h, rate) * inverse

    power = 1.0 / rate - 1.0
    zero_E, zero = tl.zeros((BM, BE), tl.float32), tl.zeros((BM,), tl.float32)
    sums = (zero_E, zero_E, zero, zero)
    counts_ptr += at * 2
    cut = tl.load(counts_ptr)
    kept = tl.load(counts_ptr + 1)
    for part in tl.static_range(2):  # the tiles that a mask cuts, then the others
        begin, end = (0, cut) if part == 0 else (cut, kept)
        sums = _mix(
            sums, q, keys, values, tiles_ptr, begin, end, a, t, slope, i, band, power,
            KIND, BN, BD, BE, BIASED, part == 0, EVEN, UPCAST,
        )  # fmt: skip
    pv, sv, f, g = sums

    # One step more, in units of top - tau: sum (u - d)^r = inverse^r. At most half of f is moved,
    # which binds only where Newton's method was stopped early.
    some = g > 0.0
    f = tl.where(some, f, 1.0)
    g = tl.where(some, g, 1.0)
    d = tl.minimum((f - entmax_root(f, rate, KIND) * inverse) / g, 0.5 * rate * f / g)
    d = tl.where(some, d, 0.0)
    moved = d / rate
    out = (pv - moved[:, None] * sv) / (f - moved * g)[:, None]
    C = sv / g[:, None]
    broken = tau != tau
    out = tl.where(broken[:, None], float("nan"), out)
    C = tl.where(broken[:, None], float("nan"), C)
    tau = tl.where(finite, tau + d * (top - tau), tau)
    _store(_dense(out_ptr, b, h, H, T, E, INSIDE), out, block * BM, BM, BE)
    _store(_dense(C_ptr, b, h, H, T, E, False), C, block * BM, BM, BE)
    tl.store(tau_ptr + head * T + row, tau, mask=row < T)


@triton.jit
def _move(
    sums, q, dq, keys, values, dk_ptr, dv_ptr, tiles_ptr, first, last, tau, slope, i, band,
    factor, rate, KIND: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr,
    BIASED: tl.constexpr, CUT: tl.constexpr, EVEN: tl.constexpr, UPCAST: tl.constexpr,
    DQ: tl.constexpr,
):  # fmt: skip
    """chosen += sum s dx v, moved += sum p dv, h += sum s dx over entries of the list."""
    chosen, moved, h = sums
    _, k_s, S, D = keys
    _, v_s, _, E = values
    power = 1.0 / rate - 1.0
    for e in range(first, last):
        tile = tl.load(tiles_ptr + e).to(tl.int32)
        k = _load(keys, tile * BN, BN, BD, True, CUT, EVEN, UPCAST)
        z = tl.dot(q, k, input_precision="ieee")
        i_, j_ = i[:, None], (tile * BN + tl.arange(0, BN))[None, :]
        u = _excess(z, factor * rate, tau[:, None], slope, i_, j_, band, BIASED, CUT)
        p, s = entmax_terms(u, power, KIND)
        if DQ or dk_ptr is not None:
            dx = tl.zeros_like(u)
            if DQ:
                dx = tl.dot(dq, k, dx, input_precision="ieee")
            if dk_ptr is not None:
                dk = _load((dk_ptr, k_s, S, D), tile * BN, BN, BD, True, CUT, EVEN, UPCAST)
                dx = tl.dot(q, dk, dx, input_precision="ieee")
            dx *= s * factor
            h += tl.sum(dx, 1)
            v = _load(values, tile * BN, BN, BE, False, CUT, EVEN, False)
            dx = _operand(dx.to(v.dtype), UPCAST)
            chosen = tl.dot(dx, _operand(v, UPCAST), chosen, input_precision="ieee")
        if dv_ptr is not None:
            dv = _load((dv_ptr, v_s, S, E), tile * BN, BN, BE, False, CUT, EVEN, False)
            p = _operand(p.to(dv.dtype), UPCAST)
            moved = tl.dot(p, _operand(dv, UPCAST), moved, input_precision="ieee")
    return chosen, moved, h


@triton.jit(do_not_specialize=LENGTHS)
def _tangents(
    q_ptr, k_ptr, v_ptr, dq_ptr, dk_ptr, dv_ptr, choosing_ptr, values_ptr, C_ptr, tau_ptr,
    tiles_ptr, counts_ptr, start_ptr, stop_ptr, slopes_ptr, H, group, T, S, D, E, left, right,
    q_b, q_h, q_t, k_b, k_h, k_s, v_b, v_h, v_s, factor, rate,
    KIND: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr,
    EVEN: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    head, b, h, block, at = _query_block(T, H, BM)
    columns = tl.cdiv(S, BN)
    q_at, k_at, v_at = b * q_b + h * q_h, b * k_b + (h // group) * k_h, b * v_b + (h // group) * v_h
    keys, values = (k_ptr + k_at, k_s, S, D), (v_ptr + v_at, v_s, S, E)
    if dk_ptr is not None:
        dk_ptr += k_at
    if dv_ptr is not None:
        dv_ptr += v_at
    tiles_ptr += at * columns
    start, end = band_range(start_ptr, stop_ptr, b, S)
    band = (start, end, left, right)
    BIASED: tl.constexpr = slopes_ptr is not None
    slope = _slope(slopes_ptr, h, rate)
    row = block * BM + tl.arange(0, BM)
    i = row + S - T
    q = _load((q_ptr + q_at, q_t, T, D), block * BM, BM, BD, False, True, EVEN, UPCAST)
    DQ: tl.constexpr = dq_ptr is not None
    dq = q
    if DQ:
        dq = _load((dq_ptr + q_at, q_t, T, D), block * BM, BM, BD, False, True, EVEN, UPCAST)
    tau = tl.load(tau_ptr + head * T + row, mask=row < T, other=float("inf"))
    zero_E = tl.zeros((BM, BE), tl.float32)
    sums = (zero_E, zero_E, tl.zeros((BM,), tl.float32))
    counts_ptr += at * 2
    cut = tl.load(counts_ptr)
    kept = tl.load(counts_ptr + 1)
    for part in tl.static_range(2):  # the tiles that a mask cuts, then the others
        begin, end = (0, cut) if part == 0 else (cut, kept)
        sums = _move(
            sums, q, dq, keys, values, dk_ptr, dv_ptr, tiles_ptr, begin, end, tau, slope, i,
            band, factor, rate, KIND, BN, BD, BE, BIASED, part == 0, EVEN, UPCAST, DQ,
        )  # fmt: skip
    chosen, moved, total = sums
    broken = (tau != tau)[:, None]
    if choosing_ptr is not None:
        means = _dense(C_ptr, b, h, H, T, E, False)
        C = _load(means, block * BM, BM, BE, False, True, EVEN, False).to(tl.float32)
        out = tl.where(broken, float("nan"), chosen - total[:, None] * C)
        _store(_dense(choosing_ptr, b, h, H, T, E, False), out, block * BM, BM, BE)
    if values_ptr is not None:
        out = tl.where(broken, float("nan"), moved)
        _store(_dense(values_ptr, b, h, H, T, E, False), out, block * BM, BM, BE)


@triton.jit
def _add_query_gradients(
    gq, q, grad, keys, values, tiles_ptr, first, last, tau, delta, slope, i, band, c, power,
    KIND: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr,
    BIASED: tl.constexpr, CUT: tl.constexpr, EVEN: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    for e in range(first, last):
        tile = tl.load(tiles_ptr + e).to(tl.int32)
        k = _load(keys, tile * BN, BN, BD, False, CUT, EVEN, False)
        dtype = k.dtype
        k = _operand(k, UPCAST)
        v = _load(values, tile * BN, BN, BE, True, CUT, EVEN, UPCAST)
        z = tl.dot(q, tl.trans(k), input_precision="ieee")
        i_, j_ = i[:, None], (tile * BN + tl.arange(0, BN))[None, :]
        u = _excess(z, c, tau[:, None], slope, i_, j_, band, BIASED, CUT)
        _, s = entmax_terms(u, power, KIND)
        gx = s * (tl.dot(grad, v, input_precision="ieee") - delta[:, None])
        gq = tl.dot(_operand(gx.to(dtype), UPCAST), k, gq, input_precision="ieee")
    return gq


@triton.jit(do_not_specialize=LENGTHS)
def _query_gradients(
    q_ptr, k_ptr, v_ptr, g_ptr, C_ptr, tau_ptr, delta_ptr, gq_ptr, tiles_ptr, counts_ptr,
    start_ptr, stop_ptr, slopes_ptr, g_b, g_h, g_t, H, group, T, S, D, E, left, right,
    q_b, q_h, q_t, k_b, k_h, k_s, v_b, v_h, v_s, factor, rate,
    KIND: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr,
    EVEN: tl.constexpr, UPCAST: tl.constexpr, INSIDE: tl.constexpr,
):  # fmt: skip
    head, b, h, block, at = _query_block(T, H, BM)
    columns = tl.cdiv(S, BN)
    keys = (k_ptr + b * k_b + (h // group) * k_h, k_s, S, D)
    values = (v_ptr + b * v_b + (h // group) * v_h, v_s, S, E)
    tiles_ptr += at * columns
    start, end = band_range(start_ptr, stop_ptr, b, S)
    band = (start, end, left, right)
    BIASED: tl.constexpr = slopes_ptr is not None
    slope = _slope(slopes_ptr, h, rate)
    row = block * BM + tl.arange(0, BM)
    i = row + S - T
    queries = (q_ptr + b * q_b + h * q_h, q_t, T, D)
    grads = (g_ptr + b * g_b + h * g_h, g_t, T, E)
    means = _dense(C_ptr, b, h, H, T, E, False)
    q = _load(queries, block * BM, BM, BD, False, True, EVEN, UPCAST)
    grad = _load(grads, block * BM, BM, BE, False, True, EVEN, UPCAST)
    C = _load(means, block * BM, BM, BE, False, True, EVEN, UPCAST)
    tau = tl.load(tau_ptr + head * T + row, mask=row < T, other=float("inf"))
    delta = tl.sum(grad.to(tl.float32) * C.to(tl.float32), 1)
    tl.store(delta_ptr + head * T + row, delta, mask=row < T)

    gq = tl.zeros((BM, BD), tl.float32)
    c, power = factor * rate, 1.0 / rate - 1.0
    counts_ptr += at * 2
    cut = tl.load(counts_ptr)
    kept = tl.load(counts_ptr + 1)
    for part in tl.static_range(2):  # the tiles that a mask cuts, then the others
        begin, end = (0, cut) if part == 0 else (cut, kept)
        gq = _add_query_gradients(
            gq, q, grad, keys, values, tiles_ptr, begin, end, tau, delta, slope, i, band, c, power,
            KIND, BN, BD, BE, BIASED, part == 0, EVEN, UPCAST,
        )  # fmt: skip
    _store(_dense(gq_ptr, b, h, H, T, D, INSIDE), gq * factor, block * BM, BM, BD)


@triton.jit
def _add_key_gradients(
    sums, k, v, queries, grads, tau_ptr, delta_ptr, blocks_ptr, first, last, slope, j, band, S,
    c, power, KIND: tl.constexpr, BM: tl.constexpr, SUB: tl.constexpr, BD: tl.constexpr,
    BE: tl.constexpr, BIASED: tl.constexpr, CUT: tl.constexpr, EVEN: tl.constexpr,
    UPCAST: tl.constexpr,
):  # fmt: skip
    """Transposed tiles (keys, queries), SUB queries at a time."""
    gk, gv = sums
    _, _, T, _ = queries
    for e in range(first * (BM // SUB), last * (BM // SUB)):
        begin = tl.load(blocks_ptr + e // (BM // SUB)).to(tl.int32) * BM + e % (BM // SUB) * SUB
        row = begin + tl.arange(0, SUB)
        q = _load(queries, begin, SUB, BD, False, CUT, EVEN, False)
        grad = _load(grads, begin, SUB, BE, False, CUT, EVEN, False)
        dtype = q.dtype
        q, grad = _operand(q, UPCAST), _operand(grad, UPCAST)
        if CUT:
            tau = tl.load(tau_ptr + row, mask=row < T, other=float("inf"))
            delta = tl.load(delta_ptr + row, mask=row < T, other=0.0)
        else:
            tau = tl.load(tau_ptr + row)
            delta = tl.load(delta_ptr + row)
        z = tl.dot(k, tl.trans(q), input_precision="ieee")
        i_, j_ = (row + S - T)[None, :], j[:, None]
        u = _excess(z, c, tau[None, :], slope, i_, j_, band, BIASED, CUT)
        p, s = entmax_terms(u, power, KIND)
        gp = tl.dot(v, tl.trans(grad), input_precision="ieee")
        gv = tl.dot(_operand(p.to(dtype), UPCAST), grad, gv, input_precision="ieee")
        gx = (s * (gp - delta[None, :])).to(dtype)
        gk = tl.dot(_operand(gx, UPCAST), q, gk, input_precision="ieee")
    return gk, gv


@triton.jit(do_not_specialize=LENGTHS)
def _key_gradients(
    q_ptr, k_ptr, v_ptr, g_ptr, tau_ptr, delta_ptr, gk_ptr, gv_ptr, hits_ptr, blocks_ptr,
    start_ptr, stop_ptr, slopes_ptr, g_b, g_h, g_t, H, group, T, S, D, E, left, right,
    q_b, q_h, q_t, k_b, k_h, k_s, v_b, v_h, v_s, factor, rate,
    KIND: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr,
    EVEN: tl.constexpr, UPCAST: tl.constexpr, INSIDE: tl.constexpr, CHUNK: tl.constexpr,
    SUB: tl.constexpr,
):  # fmt: skip
    rows = tl.cdiv(T, BM)
    columns = tl.cdiv(S, BN)
    pair = (tl.program_id(0) // columns).to(tl.int64)  # (sequence, head of keys)
    tile = tl.program_id(0) % columns  # under a causal mask the longest first
    G = H // group
    b, shared = pair // G, pair % G
    blocks_ptr += tl.program_id(0).to(tl.int64) * rows
    start, end = band_range(start_ptr, stop_ptr, b, S)
    band = (start, end, left, right)
    BIASED: tl.constexpr = slopes_ptr is not None
    keys = (k_ptr + b * k_b + shared * k_h, k_s, S, D)
    values = (v_ptr + b * v_b + shared * v_h, v_s, S, E)
    k = _load(keys, tile * BN, BN, BD, False, True, EVEN, UPCAST)
    v = _load(values, tile * BN, BN, BE, False, True, EVEN, UPCAST)
    j = tile * BN + tl.arange(0, BN)
    gk = tl.zeros((BN, BD), tl.float32)
    gv = tl.zeros((BN, BE), tl.float32)
    c, power = factor * rate, 1.0 / rate - 1.0
    for member in range(group):
        h = shared * group + member
        head = b * H + h
        slope = _slope(slopes_ptr, h, rate)
        # The blocks of queries that keep this tile: those that a mask cuts from the front of the
        # list on, the others from its end on.
        cut = 0
        whole = 0
        tl.debug_barrier()
        for chunk in range(0, rows, CHUNK):
            block = chunk + tl.arange(0, CHUNK)
            at = (head * rows + block) * columns + tile
            hit = tl.load(hits_ptr + at, mask=block < rows, other=0) != 0
            low, high = _uncut(block, band, T, S, BM, BN)
            clear = (tile >= low) & (tile < high) & (block * BM + BM <= T)
            here = (hit & (clear == 0)).to(tl.int32)
            place = cut + tl.cumsum(here, 0) - here
            tl.store(blocks_ptr + place, block.to(tl.int16), mask=here != 0)
            cut += tl.sum(here, 0)
            here = (hit & clear).to(tl.int32)
            place = rows - 1 - whole - (tl.cumsum(here, 0) - here)
            tl.store(blocks_ptr + place, block.to(tl.int16), mask=here != 0)
            whole += tl.sum(here, 0)
        tl.debug_barrier()
        queries = (q_ptr + b * q_b + h * q_h, q_t, T, D)
        grads = (g_ptr + b * g_b + h * g_h, g_t, T, E)
        gk, gv = _add_key_gradients(
            (gk, gv), k, v, queries, grads, tau_ptr + head * T, delta_ptr + head * T, blocks_ptr,
            0, cut, slope, j, band, S, c, power, KIND, BM, SUB, BD, BE, BIASED, True, EVEN, UPCAST,
        )  # fmt: skip
        gk, gv = _add_key_gradients(
            (gk, gv), k, v, queries, grads, tau_ptr + head * T, delta_ptr + head * T, blocks_ptr,
            rows - whole, rows, slope, j, band, S, c, power, KIND, BM, SUB, BD, BE, BIASED, False,
            EVEN, UPCAST,
        )  # fmt: skip
    _store(_dense(gk_ptr, b, shared, G, S, D, INSIDE), gk * factor, tile * BN, BN, BD)
    _store(_dense(gv_ptr, b, shared, G, S, E, INSIDE), gv, tile * BN, BN, BE)
