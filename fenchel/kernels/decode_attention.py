"""Attention of the newest token over a cache of fixed size, reading q, k, v of one product.

    q, k = R q, R k                      (a, b) -> (a c - b s, b c + a s) at the token's position
    keys[slot], values[slot] = k, v      slot = n mod R
    z_s  = scale q . keys_s              over the present slots
    o    = sum_s p_s values_s,           p = softmax(z), or entmax of z at alpha

n, the number of the token of every row and its position, is read from device memory, so that the
same launch serves every token. Token t is in slot t mod R (generation/kv_cache.py), so the present
slots are the first min(n + 1, R) of the R. A row with n < 0 has no token: nothing is written to its
cache and its output is zero.

**int8 cache.** keys = c n with n of one byte and one float32 c per slot and head, as in
generation/kv_cache.py, and values likewise. The factors leave both sums:

    z_s = (scale c_s) (q . n_s),         o = sum_s (p_s c_s) n_s.

The sums themselves are products of bytes: q and p_s c_s are written as c (n + n' / 254) per row,
n and n' of one byte each, which is closer than bfloat16 is, and n and n' are two halves of the rows
of one tile. Widening the cache instead takes five instructions per pair of entries, and an H200
was bound by them: half of the read bandwidth, no faster than bfloat16. At D = 64 the instructions
per score still bound it; conversions between floats and integers, which run at a quarter of the
rate, are additions of ROUND instead. The newest token is rounded like all others, so that a token
has one value from its first use on.

**One program per query head** (``_attend_decode``) for short caches and few rows. The program
computes the newest key and value itself: the first head of a group writes them, and no other head
of the group reads that slot, so programs need no synchronisation. Every slot of a block has its own
running maximum, sum and mix, as in online softmax, and they are combined at the end; the loop
starts at slot 0. Bytes: 4 n D per head in bfloat16 for keys and values, from the L2
cache for all heads of a group but one; for 300 tokens that is less than a hundredth of the weights
of a layer, and latency dominates: each block is loaded before the previous one is used.

**One program per group and split** (``_split_softmax``) else. The M = H / G queries of a group
share every key that is read, as the rows of one tile that is padded to 16 for ``tl.dot``: 16 D
products per key are a quarter of what the tensor cores do while a key of D bfloat16 arrives, so the
padding is free and keys are read once. The present slots are cut into ``splits`` runs of whole
blocks, so that all multiprocessors work whatever B G is; the cut follows n, not R. Each split
writes its maximum m_i, its sum l_i and its mix a_i, and a second kernel combines them:

    o = sum_i e^(m_i - m) a_i / sum_i e^(m_i - m) l_i,       m = max_i m_i.

A last program that combines in the first kernel would save a launch of 2 us where there are
several splits, at the price of a counter that must be zero before every launch; with one split the
first kernel writes o itself.

**Entmax** at alpha, with s = (alpha - 1) z and r = 1 / (alpha - 1): p_s = [s_s - tau]_+^r.

    1  reads the keys; writes s and the largest s of every page of ``PAGE`` slots
    2  solves tau from the stored s, one program per row: f(t) = sum [s - t]_+^r is 1 at tau
    3  reads the pages of values whose largest s is above tau; writes sums and mixes per split
    4  combines the splits, and divides by the sum of p

Newton's method on f^(1/r) = 1, a norm of [s - t]_+ and so convex in t,

    t <- t + (f - f^(1 - 1/r)) / g,      g = sum [s - t]_+^(r - 1),

rises from any t <= tau and never passes tau. The largest scores of the pages are some of the
scores, so their own threshold is at most tau: it comes first, from R / 64 numbers, and the search
for tau then reads only the pages above it. Bytes per slot and group in bfloat16: 2 D for the key,
4 M for s written, 2 D for the value and 4 M for s read where a page is active; softmax reads 4 D.

Rotated entries are rounded where fenchel/attention/rotary.py rounds; scores, thresholds and sums
are in float32, and weights are rounded to the dtype of q before they meet the values.

Shapes: qkv (B, (H + 2 G) D), keys and values (B, G, R, D), their scales (B, G, R) in an int8 cache,
cos and sin (positions, D) as ``Angles``, token (B,) of int64, o (B, H D). D is 256 at most
(WIDEST_HEAD of generation/fused_step.py).
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from fenchel.kernels.primitives import (
    FLOOR,
    LOG2_E,
    entmax_kind,
    entmax_newton,
    entmax_terms,
    entmax_weight,
    padded_width,
    pdl_launch,
    wait_for_previous,
)

SLOTS = 128
"""Slots per iteration: at D = 64 four loads of 16 bytes per thread for keys, four for values."""
WARPS = 8
SHORT = 512
"""Tokens up to which a few rows are served by one program per query head."""
FEW_PROGRAMS = 32
"""B G from which one program per group is faster even without splits: with G = 4 and 96 slots a
step of 22 layers gains 0.14 ms of 2.7 with 8 rows, and loses 0.06 of 0.83 with one."""
PROGRAMS = 1056
"""Programs per launch that splits aim at, eight per multiprocessor of an H200: 94 % of its read
bandwidth at 32k slots of D = 128, against 91 % with four."""
TILE = 8192
"""Entries of a block of keys: 64 slots of D = 128, 128 of D = 64, where 64 give 72 % of the read
bandwidth instead of 85 %."""
PAGE = 64
"""Slots per page of values that entmax reads or skips."""
MULTIPLE = 128
"""The slots of the values of an int8 cache are a multiple of this, so that no block is cut."""
SPLIT_SLOTS = 256
"""Fewest slots of a split."""
MAX_SPLITS = 128
STAGES = 3
"""Blocks of keys and values in flight per program."""
ROWS = tl.constexpr(16)
"""Fewest rows of a tile of queries that ``tl.dot`` takes."""
CHUNK = 1024
"""Pages per iteration of the threshold search."""
GATHER = tl.constexpr(16)
"""Pages of scores per iteration of the threshold search."""
ROUND = tl.constexpr(1.5 * 2.0**23)
"""x + ROUND - ROUND is x rounded to an integer, ties to even, for |x| below 2^22. The lowest byte
of x + ROUND is that integer; adding an integer to the bit pattern of ROUND adds it to its value."""
ROUND_BITS = tl.constexpr(0x4B400000)
"""The bit pattern of ROUND."""
NEWTON_STEPS = tl.constexpr(64)


class CacheTensors(NamedTuple):
    """Keys and values, and in an int8 cache their scales.

    The values of an int8 cache are (B, G, D, R') with R' = ``padded_slots(R)``: the sum over slots
    runs along the memory, as the sum over D does for keys. In rows of D, the pairs of slots that
    the tensor cores take would be gathered byte by byte.
    """

    keys: Tensor
    values: Tensor
    key_scales: Tensor | None = None
    value_scales: Tensor | None = None


def attend_decode(
    qkv_BC: Tensor,
    cache: CacheTensors,
    token_B: Tensor,
    o_BC: Tensor,
    *,
    angles: tuple[Tensor, Tensor] | None,
    scale: float,
    alpha: float = 1.0,
    splits: int | None = None,
    tokens: int | None = None,
) -> None:
    """Write the newest key and value into the cache and the attention output into o.

    ``alpha`` 1 is softmax, above 1 entmax. ``splits`` is chosen by the sizes where it is None.
    ``tokens`` is how many a sequence has at most where that is less than the slots; the result does
    not depend on it but for rounding.
    """
    B, G, R, D = cache.keys.shape
    H = o_BC.shape[1] // D
    dense = cache.key_scales is None
    most = R if tokens is None else min(tokens, R)
    cos, sin = angles or (None, None)
    if splits is None and alpha == 1.0 and dense and one_per_head(B * G, most):
        _attend_decode[(B * H,)](
            qkv_BC, cos, sin, cache.keys, cache.values, token_B, o_BC, R, scale, H=H, G=G, D=D,
            BLOCK=padded_width(D), SLOTS=min(SLOTS, max(16, triton.next_power_of_2(R))),
            num_warps=WARPS, **pdl_launch(qkv_BC),
        )  # fmt: skip
        return
    splits = split_count(B * G, R) if splits is None else splits
    inputs = qkv_BC, cos, sin, *cache, token_B
    sizes = {
        "H": H,
        "G": G,
        "D": D,
        # An int8 cache meets two rows of bytes per query, and 32 bytes per product.
        "GROUP": max(ROWS.value // (1 if dense else 2), triton.next_power_of_2(H // G)),
        "BLOCK": max(16 if dense else 32, padded_width(D)),
        # tl.dot of bfloat16 is wrong in Triton's interpreter, which serves tensors on a CPU.
        "WIDEN": qkv_BC.device.type == "cpu",
    }
    launch = {"num_warps": 4, **pdl_launch(qkv_BC)}
    new, padded, several = qkv_BC.new_empty, padded_slots(R), splits > 1
    mix = new(B * H, splits, D, dtype=torch.float32) if several else o_BC
    total = new(B * H, splits, dtype=torch.float32) if several else None
    top = None
    grid = (B * G, splits)
    if alpha == 1.0:
        top = None if total is None else torch.empty_like(total)
        slots = min(MULTIPLE, max(PAGE, TILE // sizes["BLOCK"])) if dense else MULTIPLE
        _split_softmax[grid](
            *inputs, mix, total, top, R, padded, scale, splits,
            **sizes, SLOTS=slots, STAGES=STAGES, **launch,
        )  # fmt: skip
    else:
        pages, kind = triton.cdiv(R, PAGE), entmax_kind(alpha)
        scores = new(B * H, pages * PAGE, dtype=torch.float32)
        page_tops = new(B * H, pages, dtype=torch.float32)
        highest, tau = (new(B * H, dtype=torch.float32) for _ in range(2))
        listed, listed_by_group = (new(x, pages, dtype=torch.int32) for x in (B * H, B * G))
        _split_scores[grid](
            *inputs, scores, page_tops, R, padded, scale * (alpha - 1.0), splits, pages,
            **sizes, SLOTS=PAGE, STAGES=STAGES, **launch,
        )  # fmt: skip
        _threshold[(B * H,)](
            scores, page_tops, listed, highest, tau, token_B, R, pages, H=H, RATE=alpha - 1.0,
            KIND=kind, CHUNK=min(CHUNK, max(32, triton.next_power_of_2(pages))), SLOTS=PAGE,
            **launch,
        )  # fmt: skip
        _mix_pages[grid](
            cache.values, cache.value_scales, scores, page_tops, highest, tau, listed_by_group,
            token_B, mix, total, R, padded, splits, pages, qkv_BC,
            **sizes, SLOTS=PAGE, RATE=alpha - 1.0, KIND=kind, STAGES=STAGES, **launch,
        )  # fmt: skip
    if several:
        _combine[(B * H,)](
            mix, total, top, o_BC, splits, D=D, BLOCK=sizes["BLOCK"],
            SPLITS=triton.next_power_of_2(splits), **launch,
        )  # fmt: skip


def one_per_head(programs: int, tokens: int) -> bool:
    """Whether softmax over a dense cache has one program per query head, B G being ``programs``."""
    return tokens <= SHORT and programs < FEW_PROGRAMS


def split_count(programs: int, R: int) -> int:
    """Splits per group: enough that all multiprocessors work, and none of a few slots."""
    return max(1, min(-(-PROGRAMS // programs), -(-R // SPLIT_SLOTS), MAX_SPLITS))


def padded_slots(R: int) -> int:
    """Slots of the values of an int8 cache.

    >>> padded_slots(300)
    384
    """
    return -(-R // MULTIPLE) * MULTIPLE


# Below, an argument that may be None is resolved at compile time: code for it is not generated.


@triton.jit
def _load_rotated(x_ptr, d, inside, cos_ptr, sin_ptr, D: tl.constexpr):
    """Load and rotate one head, or a column of heads: with sin = (-s, s) each half adds the other
    times its own sine.
    """
    x = tl.load(x_ptr + d, mask=inside, other=0.0)
    if cos_ptr is not None:
        cos = tl.load(cos_ptr + d, mask=d < D, other=0.0)
        sin = tl.load(sin_ptr + d, mask=d < D, other=0.0)
        other = tl.load(x_ptr + (d + D // 2) % D, mask=inside, other=0.0)
        kept = (x.to(tl.float32) * cos.to(tl.float32)).to(x.dtype)
        x = (kept.to(tl.float32) + other.to(tl.float32) * sin.to(tl.float32)).to(x.dtype)
    return x


@triton.jit
def _load_slots(
    keys_ptr, values_ptr, start, end, newest_slot, d, SLOTS: tl.constexpr, D: tl.constexpr
):
    """Keys and values of the slots from ``start`` on, and which of them are present."""
    slot = start + tl.arange(0, SLOTS)
    there = (slot < end) & (slot != newest_slot)
    at = slot[:, None] * D + d[None, :]
    mask = there[:, None] & (d < D)[None, :]
    keys = tl.load(keys_ptr + at, mask=mask, other=0.0)
    values = tl.load(values_ptr + at, mask=mask, other=0.0)
    return keys, values, there


@triton.jit
def _attend_decode(
    qkv_ptr, cos_ptr, sin_ptr, keys_ptr, values_ptr, token_ptr, o_ptr, R, scale,
    H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr, SLOTS: tl.constexpr,
    AHEAD: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(0) // H
    h = tl.program_id(0) % H
    g = h // (H // G)
    d = tl.arange(0, BLOCK)
    wait_for_previous(AHEAD)
    n, newest_slot, end = _present_slots(token_ptr, b, R)
    if cos_ptr is not None:
        cos_ptr += tl.maximum(n, 0) * D
        sin_ptr += tl.maximum(n, 0) * D

    qkv_ptr += b * (H + 2 * G) * D
    q = _load_rotated(qkv_ptr + h * D, d, d < D, cos_ptr, sin_ptr, D)
    k = _load_rotated(qkv_ptr + (H + g) * D, d, d < D, cos_ptr, sin_ptr, D)
    v = tl.load(qkv_ptr + (H + G + g) * D + d, mask=d < D, other=0.0)
    base = (b * G + g).to(tl.int64) * R * D
    keys_ptr += base
    values_ptr += base
    if (h % (H // G) == 0) & (n >= 0):
        tl.store(keys_ptr + newest_slot * D + d, k, mask=d < D)
        tl.store(values_ptr + newest_slot * D + d, v, mask=d < D)
    q = q.to(tl.float32) * scale
    own = tl.sum(q * k.to(tl.float32), 0)

    top = tl.full((SLOTS,), FLOOR, tl.float32)
    total = tl.zeros((SLOTS,), tl.float32)
    mix = tl.zeros((SLOTS, BLOCK), tl.float32)
    start = 0
    keys, values, there = _load_slots(keys_ptr, values_ptr, start, end, newest_slot, d, SLOTS, D)
    while start < end:
        start += SLOTS
        # loaded before the previous block is used, so that only the first load is waited for
        next_keys, next_values, next_there = _load_slots(
            keys_ptr, values_ptr, start, end, newest_slot, d, SLOTS, D
        )
        z = tl.sum(keys.to(tl.float32) * q[None, :], 1)
        z = tl.where(there, z, -float("inf"))
        higher = tl.maximum(top, z)
        fade, p = tl.exp(top - higher), tl.exp(z - higher)
        total = total * fade + p
        mix = mix * fade[:, None] + p[:, None] * values.to(tl.float32)
        top = higher
        keys, values, there = next_keys, next_values, next_there

    highest = tl.maximum(tl.max(top, 0), own)
    fade, p = tl.exp(top - highest), tl.exp(own - highest)
    o = tl.sum(mix * fade[:, None], 0) + p * v.to(tl.float32)
    o /= tl.sum(total * fade, 0) + p
    o = tl.where(n >= 0, o, 0.0)
    tl.store(o_ptr + tl.program_id(0) * D + d, o.to(o_ptr.dtype.element_ty), mask=d < D)


@triton.jit
def _present_slots(token_ptr, b, R):
    """The number of a row's token, its slot, and the end of the slots that hold a token."""
    n = tl.load(token_ptr + b).to(tl.int32)
    return n, tl.maximum(n, 0) % R, tl.minimum(n + 1, R)


@triton.jit
def _split_pages(last, splits, SLOTS: tl.constexpr):
    """The blocks of this split, of those that hold a token."""
    end = tl.cdiv(last, SLOTS)
    per_split = tl.cdiv(end, splits)
    begin = tl.minimum(tl.program_id(1) * per_split, end)
    return begin, tl.minimum(begin + per_split, end)


@triton.jit
def _quantise(x):
    """(n, c) with x close to c n, as ``quantise_int8`` of generation/kv_cache.py."""
    c = tl.div_rn(tl.max(tl.abs(x), 0), 127.0)
    n = tl.where(c > 0, tl.div_rn(x, tl.where(c > 0, c, 1.0)), 0.0)
    return tl.minimum(tl.maximum(n + ROUND - ROUND, -127.0), 127.0), c


@triton.jit
def _split_bytes(x):
    """Bytes (2 GROUP, N) and scales c (GROUP,) of x (GROUP, N), with x = c (n + n' / 254) per row.

    n is the first half of the rows and n' the second. The error of an entry is at most
    max |x| / 64,516, the maximum over its row.
    """
    largest = tl.max(tl.abs(x), 1)
    y = x * (127.0 / tl.maximum(largest, 1e-30))[:, None]
    high = y + ROUND
    low = (y - (high - ROUND)) * 254.0 + ROUND
    first = (tl.arange(0, 2) == 0)[:, None, None]
    both = tl.where(first, high[None, :, :], low[None, :, :]).to(tl.int32, bitcast=True)
    n = tl.reshape(both.to(tl.int8), (2 * x.shape[0], x.shape[1]))
    return n, largest * (1.0 / 127.0)


@triton.jit
def _join_bytes(x, GROUP: tl.constexpr, N: tl.constexpr):
    """n + n' / 254 (GROUP, N) of products x (2 GROUP, N) with the two halves.

    x is a sum of 256 products at most, below 127^2 * 256 < 2^22.
    """
    y = (x + ROUND_BITS).to(tl.float32, bitcast=True) - ROUND
    weight = tl.where(tl.arange(0, 2) == 0, 1.0, 1.0 / 254.0)[:, None, None]
    return tl.sum(tl.reshape(y, (2, GROUP, N)) * weight, 0)


@triton.jit
def _begin_split(
    qkv_ptr, cos_ptr, sin_ptr, keys_ptr, values_ptr, key_scales_ptr, value_scales_ptr, token_ptr,
    R, padded, splits, H: tl.constexpr, G: tl.constexpr, D: tl.constexpr,
    GROUP: tl.constexpr, BLOCK: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    """The rotated queries of a group (GROUP, BLOCK), and the newest key and value as they are read
    from the cache, in float32; whether there is a newest token, and its slot; the run of present
    slots, and the blocks of this split. The first split stores key and value. The pointers of the
    cache are those of the group.
    """
    b = tl.program_id(0) // G
    g = tl.program_id(0) % G
    n, newest_slot, last = _present_slots(token_ptr, b, R)
    begin, end = _split_pages(last, splits, SLOTS)
    d = tl.arange(0, BLOCK)
    m = tl.arange(0, GROUP)
    if cos_ptr is not None:
        cos_ptr += tl.maximum(n, 0) * D
        sin_ptr += tl.maximum(n, 0) * D
    qkv_ptr += b.to(tl.int64) * (H + 2 * G) * D
    inside = (m < H // G)[:, None] & (d < D)[None, :]
    heads_ptr = qkv_ptr + (g * (H // G) + m[:, None]) * D
    q = _load_rotated(heads_ptr, d[None, :], inside, cos_ptr, sin_ptr, D)
    k = _load_rotated(qkv_ptr + (H + g) * D, d, d < D, cos_ptr, sin_ptr, D)
    v = tl.load(qkv_ptr + (H + G + g) * D + d, mask=d < D, other=0.0)
    k = k.to(tl.float32)
    v = v.to(tl.float32)
    ks = 1.0
    vs = 1.0
    if key_scales_ptr is not None:
        k, ks = _quantise(k)
        v, vs = _quantise(v)
    has_token = n >= 0
    if (tl.program_id(1) == 0) & has_token:
        stored = keys_ptr.dtype.element_ty
        tl.store(keys_ptr + newest_slot * D + d, k.to(stored), mask=d < D)
        if key_scales_ptr is None:
            tl.store(values_ptr + newest_slot * D + d, v.to(stored), mask=d < D)
        else:
            tl.store(values_ptr + d * padded + newest_slot, v.to(stored), mask=d < D)
            tl.store(key_scales_ptr + newest_slot, ks)
            tl.store(value_scales_ptr + newest_slot, vs)
    if key_scales_ptr is not None:
        k *= ks
        v *= vs
    return q, k, v, has_token, newest_slot, last, begin, end


@triton.jit
def _query_operand(q, scale, INT8: tl.constexpr, WIDEN: tl.constexpr):
    """The queries as ``_products`` takes them, and the factor of each of their scores."""
    q_scales = tl.full((q.shape[0],), 1.0, tl.float32)
    if INT8:
        q, q_scales = _split_bytes(q.to(tl.float32))
    elif WIDEN:
        q = q.to(tl.float32)
    return q, q_scales * scale


@triton.jit
def _load_block(x_ptr, slot, there, d, D: tl.constexpr, BLOCK: tl.constexpr):
    mask = there[:, None]
    if D != BLOCK:  # else no mask along a row: one that may end anywhere is loaded entry by entry
        mask = mask & (d < D)[None, :]
    return tl.load(x_ptr + slot[:, None] * D + d[None, :], mask=mask, other=0)


@triton.jit
def _load_values(
    x_ptr, at, there, d, padded, INT8: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr,
    SLOTS: tl.constexpr,
):  # fmt: skip
    """Values of the slots from ``at`` on, (SLOTS, BLOCK).

    Bytes of slots without a token are read too, as no byte is nan and their weight is 0.
    """
    slot = at + tl.arange(0, SLOTS)
    if INT8:
        where = x_ptr + d[:, None] * padded + slot[None, :]
        if D == BLOCK:  # noqa: SIM108
            x = tl.load(where)
        else:
            x = tl.load(where, mask=(d < D)[:, None], other=0)
        x = tl.trans(x)
    else:
        x = _load_block(x_ptr, slot, there, d, D, BLOCK)
    return x


@triton.jit
def _products(q, keys, q_scales, GROUP: tl.constexpr, SLOTS: tl.constexpr):
    """q . k times the scale of the row (GROUP, SLOTS); of bytes where the keys are bytes."""
    if keys.dtype == tl.int8:
        z = tl.dot(q, tl.trans(keys), out_dtype=tl.int32)
        z = _join_bytes(z, GROUP, SLOTS) * q_scales[:, None]
    else:
        z = tl.dot(q, tl.trans(keys.to(q.dtype)), input_precision="ieee") * q_scales[:, None]
    return z


@triton.jit
def _add_bytes(mix, p, values, GROUP: tl.constexpr, BLOCK: tl.constexpr):
    """mix + p values, where the values are bytes."""
    n, c = _split_bytes(p)
    products = tl.dot(n, values, out_dtype=tl.int32)
    return mix + _join_bytes(products, GROUP, BLOCK) * c[:, None]


@triton.jit
def _store_mix(
    mix, total, mix_ptr, total_ptr, row, m, d, splits, rows: tl.constexpr, D: tl.constexpr
):
    """The mix and the sum of a split; without splits o, their ratio."""
    mask = (m < rows)[:, None] & (d < D)[None, :]
    if total_ptr is None:
        o = mix / tl.where(total > 0, total, 1.0)[:, None]
        at = row.to(tl.int64)[:, None] * D + d[None, :]
        tl.store(mix_ptr + at, o.to(mix_ptr.dtype.element_ty), mask=mask)
    else:
        part = row.to(tl.int64) * splits + tl.program_id(1)
        tl.store(total_ptr + part, total, mask=m < rows)
        tl.store(mix_ptr + part[:, None] * D + d[None, :], mix, mask=mask)


@triton.jit
def _split_softmax(
    qkv_ptr, cos_ptr, sin_ptr, keys_ptr, values_ptr, key_scales_ptr, value_scales_ptr, token_ptr,
    mix_ptr, total_ptr, top_ptr, R, padded, scale, splits, H: tl.constexpr,
    G: tl.constexpr, D: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr, SLOTS: tl.constexpr,
    WIDEN: tl.constexpr, STAGES: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    d = tl.arange(0, BLOCK)
    m = tl.arange(0, GROUP)
    wait_for_previous(AHEAD)
    base = tl.program_id(0).to(tl.int64) * R
    keys_ptr += base * D
    values_ptr += base * D if key_scales_ptr is None else tl.program_id(0).to(tl.int64) * padded * D
    if key_scales_ptr is not None:
        key_scales_ptr += base
        value_scales_ptr += base
    q, k_new, v_new, has_token, newest_slot, last, begin, end = _begin_split(
        qkv_ptr, cos_ptr, sin_ptr, keys_ptr, values_ptr, key_scales_ptr, value_scales_ptr,
        token_ptr, R, padded, splits, H, G, D, GROUP, BLOCK, SLOTS,
    )  # fmt: skip
    # Scores in base 2. The first split starts from the newest token, the others from nothing.
    scale *= LOG2_E
    own = (tl.program_id(1) == 0) & has_token
    top = tl.sum(q.to(tl.float32) * k_new[None, :], 1) * scale
    top = tl.where(own, top, FLOOR)
    total = tl.where(own, 1.0, tl.zeros((GROUP,), tl.float32))
    mix = tl.where(own, v_new[None, :], tl.zeros((GROUP, BLOCK), tl.float32))
    q, q_scales = _query_operand(q, scale, key_scales_ptr is not None, WIDEN)
    for page in tl.range(begin, end, num_stages=STAGES):
        at = page * SLOTS
        slot = at + tl.arange(0, SLOTS)
        there = (slot < last) & (slot != newest_slot)
        keys = _load_block(keys_ptr, slot, there, d, D, BLOCK)
        values = _load_values(
            values_ptr, at, there, d, padded, value_scales_ptr is not None, D, BLOCK, SLOTS
        )
        z = _products(q, keys, q_scales, GROUP, SLOTS)
        if key_scales_ptr is not None:
            z *= tl.load(key_scales_ptr + slot, mask=there, other=0.0)[None, :]
        z = tl.where(there[None, :], z, -float("inf"))
        higher = tl.maximum(top, tl.max(z, 1))
        p = tl.exp2(z - higher[:, None])
        fade = tl.exp2(top - higher)
        total = total * fade + tl.sum(p, 1)
        mix *= fade[:, None]
        if value_scales_ptr is not None:
            p *= tl.load(value_scales_ptr + slot, mask=there, other=0.0)[None, :]
            mix = _add_bytes(mix, p, values, GROUP, BLOCK)
        else:
            mix = tl.dot(p.to(q.dtype), values.to(q.dtype), mix, input_precision="ieee")
        top = higher
    row = tl.program_id(0) * (H // G) + m
    if top_ptr is not None:
        part = row.to(tl.int64) * splits + tl.program_id(1)
        tl.store(top_ptr + part, top, mask=m < H // G)
    _store_mix(mix, total, mix_ptr, total_ptr, row, m, d, splits, H // G, D)


@triton.jit
def _combine(
    mix_ptr, total_ptr, top_ptr, o_ptr, splits, D: tl.constexpr, BLOCK: tl.constexpr,
    SPLITS: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, SPLITS)
    d = tl.arange(0, BLOCK)
    wait_for_previous(AHEAD)
    total = tl.load(total_ptr + row * splits + i, mask=i < splits, other=0.0)
    mask = (i < splits)[:, None] & (d < D)[None, :]
    mix = tl.load(mix_ptr + (row * splits + i)[:, None] * D + d[None, :], mask=mask, other=0.0)
    if top_ptr is not None:
        top = tl.load(top_ptr + row * splits + i, mask=i < splits, other=FLOOR)
        fade = tl.exp2(top - tl.max(top, 0))
        total *= fade
        mix *= fade[:, None]
    whole = tl.sum(total, 0)
    o = tl.sum(mix, 0) / tl.where(whole > 0, whole, 1.0)
    tl.store(o_ptr + row * D + d, o.to(o_ptr.dtype.element_ty), mask=d < D)


@triton.jit
def _split_scores(
    qkv_ptr, cos_ptr, sin_ptr, keys_ptr, values_ptr, key_scales_ptr, value_scales_ptr, token_ptr,
    scores_ptr, page_tops_ptr, R, padded, scale, splits, pages, H: tl.constexpr,
    G: tl.constexpr, D: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr, SLOTS: tl.constexpr,
    WIDEN: tl.constexpr, STAGES: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    d = tl.arange(0, BLOCK)
    m = tl.arange(0, GROUP)
    wait_for_previous(AHEAD)
    base = tl.program_id(0).to(tl.int64) * R
    keys_ptr += base * D
    values_ptr += base * D if key_scales_ptr is None else tl.program_id(0).to(tl.int64) * padded * D
    if key_scales_ptr is not None:
        key_scales_ptr += base
        value_scales_ptr += base
    q, k_new, _v_new, _has_token, newest_slot, last, begin, end = _begin_split(
        qkv_ptr, cos_ptr, sin_ptr, keys_ptr, values_ptr, key_scales_ptr, value_scales_ptr,
        token_ptr, R, padded, splits, H, G, D, GROUP, BLOCK, SLOTS,
    )  # fmt: skip
    # The split with the newest token may not be the one that stores it, so all compute its score.
    own = tl.sum(q.to(tl.float32) * k_new[None, :], 1) * scale
    q, q_scales = _query_operand(q, scale, key_scales_ptr is not None, WIDEN)
    row = (tl.program_id(0) * (H // G) + m).to(tl.int64)
    for page in tl.range(begin, end, num_stages=STAGES):
        slot = page * SLOTS + tl.arange(0, SLOTS)
        present = slot < last
        there = present & (slot != newest_slot)
        keys = _load_block(keys_ptr, slot, there, d, D, BLOCK)
        s = _products(q, keys, q_scales, GROUP, SLOTS)
        if key_scales_ptr is not None:
            s *= tl.load(key_scales_ptr + slot, mask=there, other=0.0)[None, :]
        s = tl.where((slot == newest_slot)[None, :], own[:, None], s)
        s = tl.where(present[None, :], s, -float("inf"))
        mask = (m < H // G)[:, None] & (slot >= 0)[None, :]
        tl.store(scores_ptr + row[:, None] * (pages * SLOTS) + slot[None, :], s, mask)
        tl.store(page_tops_ptr + row * pages + page, tl.max(s, 1), mask=m < H // G)


@triton.jit
def _threshold(
    scores_ptr, page_tops_ptr, listed_ptr, highest_ptr, tau_ptr, token_ptr, R, pages,
    H: tl.constexpr, RATE: tl.constexpr, KIND: tl.constexpr, CHUNK: tl.constexpr,
    SLOTS: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """tau of a row, relative to its largest score, which is exact for scores of any size."""
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, CHUNK)
    slot = tl.arange(0, SLOTS)
    wait_for_previous(AHEAD)
    _n, _newest_slot, last = _present_slots(token_ptr, tl.program_id(0) // H, R)
    end = tl.cdiv(last, SLOTS)
    scores_ptr += row * pages * SLOTS
    page_tops_ptr += row * pages
    listed_ptr += row * pages
    top = tl.full((CHUNK,), FLOOR, tl.float32)
    for start in range(0, end, CHUNK):
        x = tl.load(page_tops_ptr + start + lane, mask=start + lane < end, other=FLOOR)
        top = tl.maximum(top, x)
    highest = tl.max(top, 0)

    # The threshold of the largest scores of the pages alone, which is at most tau.
    t = highest * 0.0 - 1.0
    step = t + 2.0
    steps = 0
    while (step > 1e-7) & (steps < NEWTON_STEPS):
        f_lanes = tl.zeros((CHUNK,), tl.float32)
        g_lanes = tl.zeros((CHUNK,), tl.float32)
        for start in range(0, end, CHUNK):
            x = tl.load(page_tops_ptr + start + lane, mask=start + lane < end, other=-float("inf"))
            f, g = entmax_terms(tl.maximum(x - highest - t, 0.0), 1.0 / RATE - 1.0, KIND)
            f_lanes += f
            g_lanes += g
        step = entmax_newton(tl.sum(f_lanes, 0), tl.sum(g_lanes, 0), RATE, 0.0, KIND)
        t += step
        steps += 1

    # A page whose largest score is not above it holds no support.
    t -= 1e-6
    count = 0
    for start in range(0, end, CHUNK):
        x = tl.load(page_tops_ptr + start + lane, mask=start + lane < end, other=-float("inf"))
        above = (x - highest > t).to(tl.int32)
        tl.store(listed_ptr + count + tl.cumsum(above, 0) - 1, start + lane, mask=above > 0)
        count += tl.sum(above, 0)
    tl.debug_barrier()  # the list is read by other threads than wrote it
    step = t * 0.0 + 1.0
    steps = 0
    while (step > 1e-7) & (steps < NEWTON_STEPS):
        f_tile = tl.zeros((GATHER, SLOTS), tl.float32)
        g_tile = tl.zeros((GATHER, SLOTS), tl.float32)
        for start in range(0, count, GATHER):
            i = start + tl.arange(0, GATHER)
            page = tl.load(listed_ptr + i, mask=i < count, other=0)
            s = tl.load(
                scores_ptr + page[:, None] * SLOTS + slot[None, :],
                mask=(i < count)[:, None],
                other=-float("inf"),
            )
            f, g = entmax_terms(tl.maximum(s - highest - t, 0.0), 1.0 / RATE - 1.0, KIND)
            f_tile += f
            g_tile += g
        f_total, g_total = tl.sum(tl.sum(f_tile, 1), 0), tl.sum(tl.sum(g_tile, 1), 0)
        step = entmax_newton(f_total, g_total, RATE, 0.0, KIND)
        t += step
        steps += 1
    tl.store(highest_ptr + row, highest)
    tl.store(tau_ptr + row, t)


@triton.jit
def _mix_pages(
    values_ptr, value_scales_ptr, scores_ptr, page_tops_ptr, highest_ptr, tau_ptr, listed_ptr,
    token_ptr, mix_ptr, total_ptr, R, padded, splits, pages, qkv_ptr, H: tl.constexpr,
    G: tl.constexpr, D: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr, SLOTS: tl.constexpr,
    WIDEN: tl.constexpr, RATE: tl.constexpr, KIND: tl.constexpr,
    STAGES: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """The pages of a split that hold support of any query of the group, listed and then mixed."""
    b = tl.program_id(0) // G
    d = tl.arange(0, BLOCK)
    m = tl.arange(0, GROUP)
    PAGES: tl.constexpr = 32
    lane = tl.arange(0, PAGES)
    wait_for_previous(AHEAD)
    _n, _newest_slot, last = _present_slots(token_ptr, b, R)
    begin, end = _split_pages(last, splits, SLOTS)
    base = tl.program_id(0).to(tl.int64)
    if value_scales_ptr is None:
        values_ptr += base * R * D
    else:
        values_ptr += base * padded * D
        value_scales_ptr += base * R
    row = tl.program_id(0) * (H // G) + m
    wide_row = row.to(tl.int64)
    inside = m < H // G
    # A row of padding has an infinite threshold.
    highest = tl.load(highest_ptr + row, mask=inside, other=0.0)
    tau = tl.load(tau_ptr + row, mask=inside, other=float("inf"))

    listed_ptr += tl.program_id(0).to(tl.int64) * pages + begin
    count = 0
    for start in range(begin, end, PAGES):
        at = start + lane
        mask = inside[:, None] & (at < end)[None, :]
        tops = tl.load(page_tops_ptr + wide_row[:, None] * pages + at[None, :], mask, -float("inf"))
        above = tops - highest[:, None] > tau[:, None]
        active = tl.max(above.to(tl.int32), 0)
        tl.store(listed_ptr + count + tl.cumsum(active, 0) - 1, at, mask=active > 0)
        count += tl.sum(active, 0)
    tl.debug_barrier()  # the list is read by other threads than wrote it

    compute = tl.float32 if WIDEN else qkv_ptr.dtype.element_ty
    total = tl.zeros((GROUP,), tl.float32)
    mix = tl.zeros((GROUP, BLOCK), tl.float32)
    for i in tl.range(0, count, num_stages=STAGES):
        at = tl.load(listed_ptr + i) * SLOTS
        slot = at + tl.arange(0, SLOTS)
        there = slot < last
        values = _load_values(
            values_ptr, at, there, d, padded, value_scales_ptr is not None, D, BLOCK, SLOTS
        )
        score_at = wide_row[:, None] * (pages * SLOTS) + slot[None, :]
        s = tl.load(scores_ptr + score_at, mask=inside[:, None], other=-float("inf"))
        p = entmax_weight(tl.maximum(s - highest[:, None] - tau[:, None], 0.0), 1.0 / RATE, KIND)
        total += tl.sum(p, 1)
        if value_scales_ptr is not None:
            p *= tl.load(value_scales_ptr + slot, mask=there, other=0.0)[None, :]
            mix = _add_bytes(mix, p, values, GROUP, BLOCK)
        else:
            mix = tl.dot(p.to(compute), values.to(compute), mix, input_precision="ieee")
    _store_mix(mix, total, mix_ptr, total_ptr, row, m, d, splits, H // G, D)
