"""Softmax attention with its tangent in one pass, and the gradients of both.

With z = scale q k^T + log u, p = softmax(z) along the keys and tangents tq, tk, tv of q, k, v,

    tz = scale (tq k^T + q tk^T)              the tangent of z
    mu = sum_j p_j tz_j                       one number per row
    o  = p v
    to = (p (tz - mu)) v + p tv = (p tz) v + p tv - mu o

**Forward.** Online softmax: with m the running maximum of a row, the sums over keys of e^(z - m),
e^(z - m) tz, e^(z - m) v and e^(z - m) (tz v + tv) are rescaled when m grows. (p tz) v and p tv go
into one accumulator, so two of the width of a head are enough: six products of tiles per block of
keys, fewer where a tangent is absent. Where o and lse = log sum_j e^z_j are known (the second
pass), p = e^(z - lse) needs no maximum, and o is not computed again: five products.

**Reverse.** For gradients go of o and gto of to, with the numbers per row

    b = <gto, o>,       a = <go, o> + <gto, to>

    A   = go v^T + gto tv^T,          B = gto v^T
    gtz = p (B - b)                   the gradient of tz
    gz  = p (A - a) + gtz (tz - mu)   the gradient of z
    gq  = scale (gz k + gtz tk)       gtq = scale gtz k
    gk  = scale (gz^T q + gtz^T tq)   gtk = scale gtz^T q
    gv  = p^T go + (p (tz - mu))^T gto         gtv = p^T gto

Without tangents and without gto this is the gradient of plain attention. With go the tangent of a
gradient g and gto = g it is the tangent of that gradient, and with go = 0 and gto = g the gradient
of <J x, g> along x = (tq, tk, tv): both second derivatives of attention are this one product.

One kernel runs over blocks of rows and writes gq and gtq, one over blocks of keys and writes gk,
gv, gtk and gtv; each adds in a fixed order, so results are the same in every run. Nothing of size
T S is stored. The weights are computed again in each kernel, 21 products where 15 are different.
Query heads that share keys write their gradients apart, and these are added at the end.

**Masks.** With T queries and S keys, key j is open to position i = t + S - T of query t where
i - left <= j <= i + right and start_b <= j < stop_b. Blocks that lie inside need no mask and have
none; blocks outside are not visited. Slopes m_h add -m_h |i - j|, a bias adds its entry, -inf
included. A row with no open key has o = to = 0, lse = inf and zero gradients.

**Precision.** z, tz, p tz and all sums are float32. p, p tz, gz and gtz are rounded to the dtype of
the values before they are multiplied. A float32 tensor is the sum of three of bfloat16, and
products of two of them are the six largest products of those ("bf16x6"), with the error of float32
and on the matrix units; "tf32x3" has that error too, and "ieee" is float32 itself.

Shapes: q, tq, gq (B, H, T, D); k, tk (B, G, S, D); v, tv (B, G, S, E); o, to, go, gto (B, H, T, E);
lse, mu (B, H, T) in float32. D and E up to 128, in float32 up to 64.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from fenchel.kernels.band import Band
from fenchel.kernels.primitives import LOG2_E, band_range, padded_width


class Tangents(NamedTuple):
    """Of q, k and v, or of their gradients; None is 0."""

    q: Tensor | None = None
    k: Tensor | None = None
    v: Tensor | None = None


class ForwardResult(NamedTuple):
    """What the forward pass gives; ``to`` and ``mu`` are None where no input has a tangent."""

    o: Tensor
    to: Tensor | None
    lse: Tensor
    mu: Tensor | None


class Tile(NamedTuple):
    """Rows and keys per tile, warps and pipeline stages of one launch."""

    rows: int
    keys: int
    warps: int
    stages: int

    def keywords(self) -> dict[str, int]:
        """The keyword arguments of the launch."""
        launch = {"num_warps": self.warps, "num_stages": self.stages}
        return {"ROWS": self.rows, "KEYS": self.keys, **launch}


def tangent_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    tangents: Tangents = Tangents(),  # noqa: B008
    *,
    scale: float,
    band: Band = Band(),  # noqa: B008
    known: tuple[Tensor, Tensor] | None = None,
    precision: str = "bf16x6",
    tile: Tile | None = None,
) -> ForwardResult:
    """Outputs and their tangent; ``known`` are (o, lse) of the same call, for the second pass."""
    q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    tq, tk, tv = (None if x is None else x.contiguous() for x in tangents)
    B, H, T, D = q.shape
    E = v.shape[3]
    moving = any(x is not None for x in tangents)
    rows = q.new_empty(B, H, T, dtype=torch.float32)
    if known is None:
        o, lse = q.new_empty(B, H, T, E), rows
    else:
        o, lse = known[0].contiguous(), known[1].contiguous()
    to = torch.empty_like(o) if moving else None
    mu = torch.empty_like(rows) if moving else None
    if (moving or known is None) and B * H * T:
        tile = tile or forward_tile(q.dtype, max(D, E), second=known is not None)
        given, keywords = _shared(q, k, v, scale, band, precision)
        _tangent_rows[(triton.cdiv(T, tile.rows) * B * H,)](
            q, k, v, tq, tk, tv, o, to, lse, mu, *given,
            SECOND=known is not None, **tile.keywords(), **keywords,
        )  # fmt: skip
    return ForwardResult(o, to, lse, mu)


def tangent_attention_vjp(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    tangents: Tangents,
    found: ForwardResult,
    go: Tensor | None,
    gto: Tensor | None,
    *,
    scale: float,
    band: Band = Band(),  # noqa: B008
    of_tangents: bool = True,
    precision: str = "bf16x6",
    tiles: tuple[Tile, Tile, Tile | None] | None = None,
) -> tuple[Tangents, Tangents]:
    """The gradients of <go, o> + <gto, to> in (q, k, v) and in those tangents that are not None.

    ``found`` is the result of ``tangent_attention``; ``of_tangents`` False skips their gradients.
    """
    q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    tq, tk, tv = (None if x is None else x.contiguous() for x in tangents)
    go, gto = (None if x is None else x.to(q.dtype).contiguous() for x in (go, gto))
    o, to, lse, mu = found
    B, H, T, D = q.shape
    G, S, E = v.shape[1:]
    gq, gk, gv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    follow = of_tangents and gto is not None
    gtq, gtk, gtv = (
        torch.empty_like(like) if follow and x is not None else None
        for like, x in zip((q, k, v), (tq, tk, tv), strict=True)
    )
    grads, grads_of_tangents = Tangents(gq, gk, gv), Tangents(gtq, gtk, gtv)
    if of_tangents and gto is None:
        zeros = (None if x is None else torch.zeros_like(x) for x in (tq, tk, tv))
        grads_of_tangents = Tangents(*zeros)
    if gto is None:  # <go, o> does not depend on the tangents
        tq = tk = tv = mu = None
    if tq is None and tk is None:
        mu = None  # tz is 0
    a = lse.new_empty(B, H, T)
    b = None if gto is None else lse.new_empty(B, H, T)
    of_rows, of_keys, of_values = tiles or reverse_tiles(
        q.dtype, max(D, E), tangent=gto is not None
    )
    given, keywords = _shared(q, k, v, scale, band, precision)
    if B * H * T:
        _rows_vjp[(triton.cdiv(T, of_rows.rows) * B * H,)](
            q, k, v, tq, tk, tv, o, to, lse, mu, go, gto, a, b, gq, gtq, *given,
            **of_rows.keywords(), **keywords,
        )  # fmt: skip
    # Query heads that share keys are added at the end, in float32.
    of_heads = [gk, gv, gtk, gtv]
    if G < H:
        of_heads = [
            None if x is None else lse.new_empty(B, H, *x.shape[2:]) for x in (gk, gv, gtk, gtv)
        ]
    passes = [(of_keys, True, of_values is None)]
    passes += [] if of_values is None else [(of_values, False, True)]
    for tile, for_keys, for_values in passes:
        if B * H * S:
            _keys_vjp[(triton.cdiv(S, tile.keys) * B * H,)](
                q, k, v, tq, tk, tv, lse, mu, go, gto, a, b, *of_heads, *given,
                FOR_KEYS=for_keys, FOR_VALUES=for_values, **tile.keywords(), **keywords,
            )  # fmt: skip
    if G < H:
        for grad, heads in zip((gk, gv, gtk, gtv), of_heads, strict=True):
            if grad is not None and heads is not None:
                grad.copy_(heads.view(B, G, H // G, *grad.shape[2:]).sum(2))
    return grads, grads_of_tangents


def forward_tile(dtype: torch.dtype, width: int, *, second: bool) -> Tile:
    """The tile of the forward kernel: the quickest of four measured on an H200 for each width."""
    if dtype == torch.float32:
        return Tile(128, 64, 8, 2) if second else Tile(128, 32, 8, 2)
    if width <= 64:
        return Tile(128, 64, 8, 3) if second else Tile(64, 64, 4, 3)
    return Tile(128, 64, 8, 2)


def reverse_tiles(
    dtype: torch.dtype, width: int, *, tangent: bool
) -> tuple[Tile, Tile, Tile | None]:
    """The tiles of gq and gtq, of gk and gtk, and of gv and gtv.

    The last is None where one kernel computes the gradients of keys and values together, which
    saves three products and needs registers for four sums; at a width of 128 there are too few.
    """
    if dtype == torch.float32:
        if not tangent:
            return Tile(128, 64, 8, 2), Tile(64, 128, 8, 1), None
        return Tile(64, 32, 4, 1), Tile(16, 64, 4, 1), Tile(16, 64, 4, 1)
    if not tangent:
        return Tile(128, 64, 8, 2), Tile(64 if width <= 64 else 32, 128, 8, 2), None
    if width <= 64:
        return Tile(64, 64, 4, 2), Tile(32, 64, 4, 2), None
    return Tile(128, 32, 8, 2), Tile(32, 128, 8, 2), Tile(32, 128, 8, 2)


def _shared(
    q: Tensor, k: Tensor, v: Tensor, scale: float, band: Band, precision: str
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of all kernels behind their tensors, and their keywords."""
    (B, H, T, D), (S, E), bias = q.shape, v.shape[2:], band.bias
    strides: tuple[int, ...] = (0, 0, 0, 0)
    if bias is not None:
        bias = bias.expand(B, H, T, S)
        strides = tuple(bias.stride())
    left, right = (0 if x is None else x for x in (band.left, band.right))
    given = (left, right, band.start, band.stop, band.slopes, bias, *strides, scale, T, S, H)
    # The interpreter multiplies bfloat16 wrongly, without a word, and float32 in one way alone.
    interpreted = q.device.type == "cpu"
    if interpreted or q.dtype != torch.float32:
        precision = "ieee" if interpreted else "tf32"
    return (*given, H // k.shape[1]), {
        "D": D,
        "E": E,
        "WIDTH_D": padded_width(D),
        "WIDTH_E": padded_width(E),
        "HAS_LEFT": band.left is not None,
        "HAS_RIGHT": band.right is not None,
        "PRECISION": precision,
        "UPCAST": interpreted,
    }


@triton.jit
def _dot(a, b, c, PRECISION: tl.constexpr, UPCAST: tl.constexpr):
    if UPCAST:
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, c, input_precision=PRECISION)


@triton.jit
def _load(ptr, row, limit, W: tl.constexpr, WIDTH: tl.constexpr, WHOLE: tl.constexpr):
    """Rows of a (limit, W) matrix, zeros outside; WHOLE where all rows are inside."""
    d = tl.arange(0, WIDTH)
    at = row[:, None] * W + d[None, :]
    if W == WIDTH:
        if WHOLE:
            return tl.load(ptr + at)
        return tl.load(ptr + at, mask=(row < limit)[:, None], other=0.0)
    if WHOLE:
        return tl.load(ptr + at, mask=(d < W)[None, :], other=0.0)
    return tl.load(ptr + at, mask=(row < limit)[:, None] & (d < W)[None, :], other=0.0)


@triton.jit
def _load_numbers(ptr, t, T, other, WHOLE: tl.constexpr):
    """One number per row."""
    if WHOLE:
        return tl.load(ptr + t)
    return tl.load(ptr + t, mask=t < T, other=other)


@triton.jit
def _store(ptr, row, limit, x, W: tl.constexpr, WIDTH: tl.constexpr):
    d = tl.arange(0, WIDTH)
    at = row[:, None] * W + d[None, :]
    mask = (row < limit)[:, None] & (d < W)[None, :]
    tl.store(ptr + at, x.to(ptr.dtype.element_ty), mask=mask)


@triton.jit
def _open(i, j, left, right, start, stop, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr):
    """Whether key j is open to position i; both broadcast."""
    seen = (j >= start) & (j < stop) & (i == i)
    if HAS_LEFT:
        seen = seen & (j >= i - left)
    if HAS_RIGHT:
        seen = seen & (j <= i + right)
    return seen


@triton.jit
def _scores(
    z, scale, t, i, j, band, bias, bias_ptr, T, S, SLOPES: tl.constexpr, MASKED: tl.constexpr,
    HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr,
):  # fmt: skip
    """q k^T to scale q k^T + log u in units of log 2; t, i and j broadcast."""
    slope, stride_T, stride_S = bias
    z = z * (scale * LOG2_E)
    if SLOPES:
        z -= slope * tl.abs(i - j).to(tl.float32)
    if bias_ptr is not None:
        at = t.to(tl.int64) * stride_T + j.to(tl.int64) * stride_S
        z += LOG2_E * tl.load(bias_ptr + at, mask=(t < T) & (j < S), other=0.0)
    if MASKED:
        left, right, start, stop = band
        z = tl.where(_open(i, j, left, right, start, stop, HAS_LEFT, HAS_RIGHT), z, -float("inf"))
    return z


@triton.jit
def _rows_over_keys(
    sums, q, tq, k_ptr, v_ptr, tk_ptr, tv_ptr, t, first, last, band, bias, bias_ptr, scale, T, S,
    D: tl.constexpr, E: tl.constexpr, WIDTH_D: tl.constexpr, WIDTH_E: tl.constexpr,
    KEYS: tl.constexpr, SLOPES: tl.constexpr, MASKED: tl.constexpr, SECOND: tl.constexpr,
    HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, PRECISION: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """The sums of the forward pass over the keys from ``first`` to ``last``, multiples of KEYS."""
    m, total, r, acc, g = sums
    i = t + S - T
    for j0 in range(first, last, KEYS):
        j = j0 + tl.arange(0, KEYS)
        k = _load(k_ptr, j, S, D, WIDTH_D, not MASKED)
        z = _dot(q, tl.trans(k), None, PRECISION, UPCAST)
        tz = None
        if tq is not None:
            tz = _dot(tq, tl.trans(k), None, PRECISION, UPCAST)
        if tk_ptr is not None:
            tk = _load(tk_ptr, j, S, D, WIDTH_D, not MASKED)
            tz = _dot(q, tl.trans(tk), tz, PRECISION, UPCAST)
        v = _load(v_ptr, j, S, E, WIDTH_E, not MASKED)
        z = _scores(
            z, scale, t[:, None], i[:, None], j[None, :], band, bias, bias_ptr, T, S, SLOPES,
            MASKED, HAS_LEFT, HAS_RIGHT,
        )  # fmt: skip
        if SECOND:
            p = tl.exp2(z - m[:, None])
        else:
            higher = tl.maximum(m, tl.max(z, 1))
            finite = tl.where(higher == -float("inf"), 0.0, higher)
            p = tl.exp2(z - finite[:, None])
            fade = tl.exp2(m - finite)
            m = higher
            total = total * fade + tl.sum(p, 1)
            acc = acc * fade[:, None]
            acc = _dot(p.to(v.dtype), v, acc, PRECISION, UPCAST)
            if tz is not None:
                r = r * fade
                g = g * fade[:, None]
            elif tv_ptr is not None:
                g = g * fade[:, None]
        if tz is not None:
            h = p * (tz * scale)
            r += tl.sum(h, 1)
            g = _dot(h.to(v.dtype), v, g, PRECISION, UPCAST)
        if tv_ptr is not None:
            tv = _load(tv_ptr, j, S, E, WIDTH_E, not MASKED)
            g = _dot(p.to(v.dtype), tv, g, PRECISION, UPCAST)
    return m, total, r, acc, g


@triton.jit
def _key_ends(
    t0, b, start_ptr, stop_ptr, left, right, T, S,
    ROWS: tl.constexpr, KEYS: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr,
):  # fmt: skip
    """(start, stop) of the sequence, and the keys of a block of rows in multiples of KEYS.

    Every key outside [first, last) is forbidden to all rows, every key inside [inner, outer) is
    open to all of them.
    """
    start, stop = band_range(start_ptr, stop_ptr, b, S)
    first, last, inner, outer = start, stop, start, stop
    top, bottom = t0 + S - T, tl.minimum(t0 + ROWS, T) - 1 + S - T
    if HAS_LEFT:
        first = tl.maximum(first, top - left)
        inner = tl.maximum(inner, bottom - left)
    if HAS_RIGHT:
        last = tl.minimum(last, bottom + right + 1)
        outer = tl.minimum(outer, top + right + 1)
    first = first // KEYS * KEYS
    last = tl.maximum((last + KEYS - 1) // KEYS * KEYS, first)
    inner = tl.minimum((inner + KEYS - 1) // KEYS * KEYS, last)
    outer = tl.maximum(outer // KEYS * KEYS, inner)
    return start, stop, first, inner, tl.minimum(outer, last), last


@triton.jit
def _row_block(T, H, group, ROWS: tl.constexpr, HAS_RIGHT: tl.constexpr):
    """(head, sequence, head of the sequence, head of its keys, first row) of this program."""
    blocks = tl.cdiv(T, ROWS)
    head = (tl.program_id(0) // blocks).to(tl.int64)
    b, h = head // H, head % H
    block = tl.program_id(0) % blocks
    if HAS_RIGHT:  # the last rows see the most keys: they begin first
        block = blocks - 1 - block
    return head, b, h, b * (H // group) + h // group, block * ROWS


@triton.jit
def _tangent_rows(
    q_ptr, k_ptr, v_ptr, tq_ptr, tk_ptr, tv_ptr, o_ptr, to_ptr, lse_ptr, mu_ptr, left, right,
    start_ptr, stop_ptr, slopes_ptr, bias_ptr, stride_B, stride_H, stride_T, stride_S, scale, T, S,
    H, group,
    D: tl.constexpr, E: tl.constexpr, WIDTH_D: tl.constexpr, WIDTH_E: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, SECOND: tl.constexpr, HAS_LEFT: tl.constexpr,
    HAS_RIGHT: tl.constexpr, PRECISION: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    head, b, h, shared, t0 = _row_block(T, H, group, ROWS, HAS_RIGHT)
    t = t0 + tl.arange(0, ROWS)
    k_ptr += shared * S * D
    v_ptr += shared * S * E
    q = _load(q_ptr + head * T * D, t, T, D, WIDTH_D, False)
    tq = None
    if tq_ptr is not None:
        tq = _load(tq_ptr + head * T * D, t, T, D, WIDTH_D, False)
    if tk_ptr is not None:
        tk_ptr += shared * S * D
    if tv_ptr is not None:
        tv_ptr += shared * S * E
    SLOPES: tl.constexpr = slopes_ptr is not None
    slope = 0.0
    if SLOPES:
        slope = tl.load(slopes_ptr + h) * LOG2_E
    if bias_ptr is not None:
        bias_ptr += b * stride_B + h * stride_H
    bias = (slope, stride_T, stride_S)

    r = tl.zeros((ROWS,), tl.float32)
    acc, g, total = r, r, r  # in place of what is not computed: a loop carries no None
    if to_ptr is not None:
        g = tl.zeros((ROWS, WIDTH_E), tl.float32)
    if SECOND:
        m = tl.load(lse_ptr + head * T + t, mask=t < T, other=float("inf")) * LOG2_E
    else:
        m = tl.full((ROWS,), -float("inf"), tl.float32)
        total = tl.zeros((ROWS,), tl.float32)
        acc = tl.zeros((ROWS, WIDTH_E), tl.float32)
    start, stop, first, inner, outer, last = _key_ends(
        t0, b, start_ptr, stop_ptr, left, right, T, S, ROWS, KEYS, HAS_LEFT, HAS_RIGHT
    )
    sums = (m, total, r, acc, g)
    band = (left, right, start, stop)
    # Masked blocks before, blocks that are open to every row, masked blocks after.
    for part in tl.static_range(3):
        if part > 0 or HAS_LEFT or start_ptr is not None:
            begin = first if part == 0 else (inner if part == 1 else outer)
            end = inner if part == 0 else (outer if part == 1 else last)
            sums = _rows_over_keys(
                sums, q, tq, k_ptr, v_ptr, tk_ptr, tv_ptr, t, begin, end, band, bias, bias_ptr,
                scale, T, S, D, E, WIDTH_D, WIDTH_E, KEYS, SLOPES, part != 1, SECOND, HAS_LEFT,
                HAS_RIGHT, PRECISION, UPCAST,
            )  # fmt: skip
    m, total, r, acc, g = sums

    o_ptr += head * T * E
    if SECOND:
        o = _load(o_ptr, t, T, E, WIDTH_E, False).to(tl.float32)
    else:
        seen = total > 0.0
        total = tl.where(seen, total, 1.0)
        share = 1.0 / total
        o = acc * share[:, None]
        r = r * share
        lse = tl.where(seen, (m + tl.log2(total)) / LOG2_E, float("inf"))
        _store(o_ptr, t, T, o, E, WIDTH_E)
        tl.store(lse_ptr + head * T + t, lse, mask=t < T)
    if to_ptr is not None:
        if not SECOND:
            g = g * share[:, None]
        if tq_ptr is not None or tk_ptr is not None:
            g -= r[:, None] * o
        _store(to_ptr + head * T * E, t, T, g, E, WIDTH_E)
        tl.store(mu_ptr + head * T + t, r, mask=t < T)


@triton.jit
def _rows_vjp_over_keys(
    sums, q, tq, go, gto, m, mu, a, b, k_ptr, v_ptr, tk_ptr, tv_ptr, gtq_ptr, t, first, last,
    band, bias, bias_ptr, scale, T, S,
    D: tl.constexpr, E: tl.constexpr, WIDTH_D: tl.constexpr, WIDTH_E: tl.constexpr,
    KEYS: tl.constexpr, SLOPES: tl.constexpr, MASKED: tl.constexpr, HAS_LEFT: tl.constexpr,
    HAS_RIGHT: tl.constexpr, PRECISION: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    gq, gtq = sums
    i = t + S - T
    for j0 in range(first, last, KEYS):
        j = j0 + tl.arange(0, KEYS)
        k = _load(k_ptr, j, S, D, WIDTH_D, not MASKED)
        v = _load(v_ptr, j, S, E, WIDTH_E, not MASKED)
        z = _scores(
            _dot(q, tl.trans(k), None, PRECISION, UPCAST), scale, t[:, None], i[:, None],
            j[None, :], band, bias, bias_ptr, T, S, SLOPES, MASKED, HAS_LEFT, HAS_RIGHT,
        )  # fmt: skip
        p = tl.exp2(z - m[:, None])
        A, tz, tk = None, None, None
        if tq is not None:
            tz = _dot(tq, tl.trans(k), None, PRECISION, UPCAST)
        if tk_ptr is not None:
            tk = _load(tk_ptr, j, S, D, WIDTH_D, not MASKED)
            tz = _dot(q, tl.trans(tk), tz, PRECISION, UPCAST)
        if go is not None:
            A = _dot(go, tl.trans(v), None, PRECISION, UPCAST)
        if gto is not None and tv_ptr is not None:
            tv = _load(tv_ptr, j, S, E, WIDTH_E, not MASKED)
            A = _dot(gto, tl.trans(tv), A, PRECISION, UPCAST)
        gz = -a[:, None]
        if A is not None:
            gz = A - a[:, None]
        gz = p * gz
        if gto is not None:
            gtz = p * (_dot(gto, tl.trans(v), None, PRECISION, UPCAST) - b[:, None])
            if tz is not None:
                gz += gtz * (tz * scale - mu[:, None])
            if tk is not None:
                gq = _dot(gtz.to(k.dtype), tk, gq, PRECISION, UPCAST)
            if gtq_ptr is not None:
                gtq = _dot(gtz.to(k.dtype), k, gtq, PRECISION, UPCAST)
        gq = _dot(gz.to(k.dtype), k, gq, PRECISION, UPCAST)
    return gq, gtq


@triton.jit
def _rows_vjp(
    q_ptr, k_ptr, v_ptr, tq_ptr, tk_ptr, tv_ptr, o_ptr, to_ptr, lse_ptr, mu_ptr, go_ptr, gto_ptr,
    a_ptr, b_ptr, gq_ptr, gtq_ptr, left, right, start_ptr, stop_ptr, slopes_ptr, bias_ptr,
    stride_B, stride_H, stride_T, stride_S, scale, T, S, H, group,
    D: tl.constexpr, E: tl.constexpr, WIDTH_D: tl.constexpr, WIDTH_E: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr,
    PRECISION: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    head, batch, h, shared, t0 = _row_block(T, H, group, ROWS, HAS_RIGHT)
    t = t0 + tl.arange(0, ROWS)
    k_ptr += shared * S * D
    v_ptr += shared * S * E
    q = _load(q_ptr + head * T * D, t, T, D, WIDTH_D, False)
    tq, go, gto = None, None, None
    a = tl.zeros((ROWS,), tl.float32)
    b, mu = a, a
    o = _load(o_ptr + head * T * E, t, T, E, WIDTH_E, False).to(tl.float32)
    if go_ptr is not None:
        go = _load(go_ptr + head * T * E, t, T, E, WIDTH_E, False)
        a += tl.sum(go.to(tl.float32) * o, 1)
    if gto_ptr is not None:
        gto = _load(gto_ptr + head * T * E, t, T, E, WIDTH_E, False)
        b = tl.sum(gto.to(tl.float32) * o, 1)
        if to_ptr is not None:
            to = _load(to_ptr + head * T * E, t, T, E, WIDTH_E, False).to(tl.float32)
            a += tl.sum(gto.to(tl.float32) * to, 1)
        tl.store(b_ptr + head * T + t, b, mask=t < T)
    tl.store(a_ptr + head * T + t, a, mask=t < T)
    if mu_ptr is not None:
        mu = tl.load(mu_ptr + head * T + t, mask=t < T, other=0.0)
    if tq_ptr is not None:
        tq = _load(tq_ptr + head * T * D, t, T, D, WIDTH_D, False)
    if tk_ptr is not None:
        tk_ptr += shared * S * D
    if tv_ptr is not None:
        tv_ptr += shared * S * E
    SLOPES: tl.constexpr = slopes_ptr is not None
    slope = 0.0
    if SLOPES:
        slope = tl.load(slopes_ptr + h) * LOG2_E
    if bias_ptr is not None:
        bias_ptr += batch * stride_B + h * stride_H
    bias = (slope, stride_T, stride_S)
    m = tl.load(lse_ptr + head * T + t, mask=t < T, other=float("inf")) * LOG2_E

    gtq = a  # in place of what is not computed
    if gtq_ptr is not None:
        gtq = tl.zeros((ROWS, WIDTH_D), tl.float32)
    start, stop, first, inner, outer, last = _key_ends(
        t0, batch, start_ptr, stop_ptr, left, right, T, S, ROWS, KEYS, HAS_LEFT, HAS_RIGHT
    )
    sums = (tl.zeros((ROWS, WIDTH_D), tl.float32), gtq)
    band = (left, right, start, stop)
    for part in tl.static_range(3):
        if part > 0 or HAS_LEFT or start_ptr is not None:
            begin = first if part == 0 else (inner if part == 1 else outer)
            end = inner if part == 0 else (outer if part == 1 else last)
            sums = _rows_vjp_over_keys(
                sums, q, tq, go, gto, m, mu, a, b, k_ptr, v_ptr, tk_ptr, tv_ptr, gtq_ptr, t,
                begin, end, band, bias, bias_ptr, scale, T, S, D, E, WIDTH_D, WIDTH_E, KEYS, SLOPES,
                part != 1, HAS_LEFT, HAS_RIGHT, PRECISION, UPCAST,
            )  # fmt: skip
    gq, gtq = sums
    _store(gq_ptr + head * T * D, t, T, gq * scale, D, WIDTH_D)
    if gtq_ptr is not None:
        _store(gtq_ptr + head * T * D, t, T, gtq * scale, D, WIDTH_D)


@triton.jit
def _keys_vjp_over_rows(
    sums, k, v, tk, tv, q_ptr, tq_ptr, lse_ptr, mu_ptr, go_ptr, gto_ptr, a_ptr, b_ptr, gtk_ptr,
    gtv_ptr, j, first, last, band, bias, bias_ptr, scale, T, S,
    D: tl.constexpr, E: tl.constexpr, WIDTH_D: tl.constexpr, WIDTH_E: tl.constexpr,
    ROWS: tl.constexpr, SLOPES: tl.constexpr, MASKED: tl.constexpr, FOR_KEYS: tl.constexpr,
    FOR_VALUES: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr,
    PRECISION: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Transposed tiles (keys, rows). Sums of a key are its own: keys outside are dropped later."""
    gk, gv, gtk, gtv = sums
    for t0 in range(first, last, ROWS):
        t = t0 + tl.arange(0, ROWS)
        i = t + S - T
        q = _load(q_ptr, t, T, D, WIDTH_D, not MASKED)
        z = _scores(
            _dot(k, tl.trans(q), None, PRECISION, UPCAST), scale, t[None, :], i[None, :],
            j[:, None], band, bias, bias_ptr, T, S, SLOPES, MASKED, HAS_LEFT, HAS_RIGHT,
        )  # fmt: skip
        # Rows outside have lse = inf, so p = 0. Numbers per row are loaded where they are used: a
        # thread has one of each for every column of the tile that it holds.
        m = _load_numbers(lse_ptr, t, T, float("inf"), not MASKED) * LOG2_E
        p = tl.exp2(z - m[None, :])
        A, B, tz, tq, go, gto = None, None, None, None, None, None
        if tq_ptr is not None:
            tq = _load(tq_ptr, t, T, D, WIDTH_D, not MASKED)
            tz = _dot(k, tl.trans(tq), None, PRECISION, UPCAST)
        if tk is not None:
            tz = _dot(tk, tl.trans(q), tz, PRECISION, UPCAST)
        if tz is not None:
            mu = _load_numbers(mu_ptr, t, T, 0.0, not MASKED)
            tz = tz * scale - mu[None, :]
        if go_ptr is not None:
            go = _load(go_ptr, t, T, E, WIDTH_E, not MASKED)
        if gto_ptr is not None:
            gto = _load(gto_ptr, t, T, E, WIDTH_E, not MASKED)
        if FOR_VALUES:
            if go is not None:
                gv = _dot(p.to(k.dtype), go, gv, PRECISION, UPCAST)
            if gto is not None:
                if gtv_ptr is not None:
                    gtv = _dot(p.to(k.dtype), gto, gtv, PRECISION, UPCAST)
                if tz is not None:
                    gv = _dot((p * tz).to(k.dtype), gto, gv, PRECISION, UPCAST)
        if FOR_KEYS:
            if go is not None:
                A = _dot(v, tl.trans(go), None, PRECISION, UPCAST)
            if gto is not None:
                if tv is not None:
                    A = _dot(tv, tl.trans(gto), A, PRECISION, UPCAST)
                B = _dot(v, tl.trans(gto), None, PRECISION, UPCAST)
            a = _load_numbers(a_ptr, t, T, 0.0, not MASKED)
            gz = -a[None, :]
            if A is not None:
                gz = A - a[None, :]
            gz = p * gz
            if gto is not None:
                b = _load_numbers(b_ptr, t, T, 0.0, not MASKED)
                gtz = p * (B - b[None, :])
                if tz is not None:
                    gz += gtz * tz
                if tq is not None:
                    gk = _dot(gtz.to(k.dtype), tq, gk, PRECISION, UPCAST)
                if gtk_ptr is not None:
                    gtk = _dot(gtz.to(k.dtype), q, gtk, PRECISION, UPCAST)
            gk = _dot(gz.to(k.dtype), q, gk, PRECISION, UPCAST)
    return gk, gv, gtk, gtv


@triton.jit
def _keys_vjp(
    q_ptr, k_ptr, v_ptr, tq_ptr, tk_ptr, tv_ptr, lse_ptr, mu_ptr, go_ptr, gto_ptr, a_ptr, b_ptr,
    gk_ptr, gv_ptr, gtk_ptr, gtv_ptr, left, right, start_ptr, stop_ptr, slopes_ptr, bias_ptr,
    stride_B, stride_H, stride_T, stride_S, scale, T, S, H, group,
    D: tl.constexpr, E: tl.constexpr, WIDTH_D: tl.constexpr, WIDTH_E: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, FOR_KEYS: tl.constexpr, FOR_VALUES: tl.constexpr,
    HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, PRECISION: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    blocks = tl.cdiv(S, KEYS)
    head = (tl.program_id(0) // blocks).to(tl.int64)
    batch, h = head // H, head % H
    shared = batch * (H // group) + h // group
    j0 = tl.program_id(0) % blocks * KEYS
    j = j0 + tl.arange(0, KEYS)
    start, stop = band_range(start_ptr, stop_ptr, batch, S)
    k = _load(k_ptr + shared * S * D, j, S, D, WIDTH_D, False)
    v, tk, tv = None, None, None
    none = tl.zeros((KEYS,), tl.float32)
    gk, gv, gtk, gtv = none, none, none, none  # in place of what is not computed
    if tk_ptr is not None:
        tk = _load(tk_ptr + shared * S * D, j, S, D, WIDTH_D, False)
    if FOR_KEYS:
        v = _load(v_ptr + shared * S * E, j, S, E, WIDTH_E, False)
        if tv_ptr is not None:
            tv = _load(tv_ptr + shared * S * E, j, S, E, WIDTH_E, False)
        gk = tl.zeros((KEYS, WIDTH_D), tl.float32)
        if gtk_ptr is not None:
            gtk = tl.zeros((KEYS, WIDTH_D), tl.float32)
    if FOR_VALUES:
        gv = tl.zeros((KEYS, WIDTH_E), tl.float32)
        if gtv_ptr is not None:
            gtv = tl.zeros((KEYS, WIDTH_E), tl.float32)

    # Rows outside [first, last) see none of the keys, rows inside [inner, outer) see all of them.
    first, last, inner, outer = 0, T, 0, T
    if HAS_RIGHT:
        first = tl.maximum(first, j0 - right - (S - T))
        inner = tl.maximum(inner, j0 + KEYS - 1 - right - (S - T))
    if HAS_LEFT:
        last = tl.minimum(last, j0 + KEYS + left - (S - T))
        outer = tl.minimum(outer, j0 + left + 1 - (S - T))
    if (j0 >= stop) | (j0 + KEYS <= start):
        last = 0
    first = first // ROWS * ROWS
    last = tl.maximum((last + ROWS - 1) // ROWS * ROWS, first)
    inner = tl.minimum((inner + ROWS - 1) // ROWS * ROWS, last)
    outer = tl.maximum(outer // ROWS * ROWS, inner)
    outer = tl.minimum(outer, last)
    SLOPES: tl.constexpr = slopes_ptr is not None
    slope = 0.0
    if SLOPES:
        slope = tl.load(slopes_ptr + h) * LOG2_E
    if bias_ptr is not None:
        bias_ptr += batch * stride_B + h * stride_H
    bias = (slope, stride_T, stride_S)
    q_ptr += head * T * D
    lse_ptr += head * T
    a_ptr += head * T
    if tq_ptr is not None:
        tq_ptr += head * T * D
    if go_ptr is not None:
        go_ptr += head * T * E
    if gto_ptr is not None:
        gto_ptr += head * T * E
        b_ptr += head * T
    if mu_ptr is not None:
        mu_ptr += head * T
    sums = (gk, gv, gtk, gtv)
    band = (left, right, 0, S)
    for part in tl.static_range(3):
        if part > 0 or HAS_RIGHT:
            begin = first if part == 0 else (inner if part == 1 else outer)
            end = inner if part == 0 else (outer if part == 1 else last)
            sums = _keys_vjp_over_rows(
                sums, k, v, tk, tv, q_ptr, tq_ptr, lse_ptr, mu_ptr, go_ptr, gto_ptr, a_ptr,
                b_ptr, gtk_ptr, gtv_ptr, j, begin, end, band, bias, bias_ptr, scale, T, S, D, E,
                WIDTH_D, WIDTH_E, ROWS, SLOPES, part != 1, FOR_KEYS, FOR_VALUES, HAS_LEFT,
                HAS_RIGHT, PRECISION, UPCAST,
            )  # fmt: skip
    gk, gv, gtk, gtv = sums
    there = ((j >= start) & (j < stop))[:, None]
    if FOR_KEYS:
        _store(gk_ptr + head * S * D, j, S, tl.where(there, gk * scale, 0.0), D, WIDTH_D)
        if gtk_ptr is not None:
            _store(gtk_ptr + head * S * D, j, S, tl.where(there, gtk * scale, 0.0), D, WIDTH_D)
    if FOR_VALUES:
        _store(gv_ptr + head * S * E, j, S, tl.where(there, gv, 0.0), E, WIDTH_E)
        if gtv_ptr is not None:
            _store(gtv_ptr + head * S * E, j, S, tl.where(there, gtv, 0.0), E, WIDTH_E)
