"""Attention of the newest token over a cache of fixed size, reading q, k, v of one product.

    q, k = R q, R k                      (a, b) -> (a c - b s, b c + a s) at the token's position
    keys[slot], values[slot] = k, v      slot = R - 1 - n mod R
    o    = sum_s p_s values_s,           p = softmax(scale q . keys_s) over the present slots

n, the number of the token, and ``fill``, the number of padding slots before a sequence, are read
from device memory, so that the same launch serves every token. Token t is in slot R - 1 - t mod R
(generation/cuda_graph.py), so the present slots are the last min(n + 1, R) of the R, except the
fill. The position of the token is n - fill.

One program per query head. The program computes the newest key and value itself: the first head of
a group writes them, and no other head of the group reads that slot, so programs need no
synchronisation. Every slot of a block has its own running maximum, sum and mix, as in online
softmax, and they are combined at the end; the loop starts at the oldest token. Bytes: 4 n D in
bfloat16 for the keys and values of a head, from the L2 cache for all heads of a group but one; for
300 tokens that is less than a hundredth of the weights of a layer, and latency dominates: each
block is loaded before the previous one is used. For n of many thousands one program per head is too
few.

Rotated entries are rounded where fenchel/attention/rotary.py rounds; the softmax is in float32.

Shapes: qkv (B, (H + 2 G) D), keys and values (B, G, R, D), cos and sin (positions, D) as
``Angles``, token (1,) and fill (B,) of int64, o (B, H D).
"""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from fenchel.kernels.thin_matmul import overlap

SLOTS = 128
"""Slots per iteration: at D = 64 four loads of 16 bytes per thread for keys, four for values."""
WARPS = 8
FLOOR = tl.constexpr(-1e30)
"""Initial maximum of a slot: inf - inf is nan."""


class DecodePosition(NamedTuple):
    """The number of the newest token (1,) and of padding slots per sequence (B,), on the device."""

    token: Tensor
    fill: Tensor


def attend_decode(
    qkv_BC: Tensor,
    keys_BGRD: Tensor,
    values_BGRD: Tensor,
    place: DecodePosition,
    o_BC: Tensor,
    *,
    angles: tuple[Tensor, Tensor] | None,
    scale: float,
) -> None:
    """Write the newest key and value into the cache and the attention output into o."""
    B, G, R, D = keys_BGRD.shape
    H = o_BC.shape[1] // D
    cos, sin = angles or (None, None)
    _attend_decode[(B * H,)](
        qkv_BC,
        cos,
        sin,
        keys_BGRD,
        values_BGRD,
        place.token,
        place.fill,
        o_BC,
        R,
        scale,
        H=H,
        G=G,
        D=D,
        BLOCK=max(16, triton.next_power_of_2(D)),
        SLOTS=min(SLOTS, max(16, triton.next_power_of_2(R))),
        num_warps=WARPS,
        **overlap(qkv_BC),
    )


@triton.jit  # type: ignore[untyped-decorator]
def _load_rotated(x_ptr, d, cos_ptr, sin_ptr, D: tl.constexpr):  # type: ignore[no-untyped-def]
    """Load and rotate one head: with sin = (-s, s) each half adds the other times its own sine."""
    x = tl.load(x_ptr + d, mask=d < D, other=0.0)
    if cos_ptr is not None:
        cos = tl.load(cos_ptr + d, mask=d < D, other=0.0)
        sin = tl.load(sin_ptr + d, mask=d < D, other=0.0)
        other = tl.load(x_ptr + (d + D // 2) % D, mask=d < D, other=0.0)
        kept = (x.to(tl.float32) * cos.to(tl.float32)).to(x.dtype)
        x = (kept.to(tl.float32) + other.to(tl.float32) * sin.to(tl.float32)).to(x.dtype)
    return x


@triton.jit  # type: ignore[untyped-decorator]
def _load_slots(  # type: ignore[no-untyped-def]
    keys_ptr, values_ptr, start, oldest, place, fill, R, d, SLOTS: tl.constexpr, D: tl.constexpr
):
    """Keys and values of the slots from ``start`` on, and which of them are present."""
    slot = start + tl.arange(0, SLOTS)
    there = (slot >= oldest) & (slot < R) & (slot != place) & (R - 1 - slot >= fill)
    at = slot[:, None] * D + d[None, :]
    mask = there[:, None] & (d < D)[None, :]
    keys = tl.load(keys_ptr + at, mask=mask, other=0.0)
    values = tl.load(values_ptr + at, mask=mask, other=0.0)
    return keys, values, there


@triton.jit  # type: ignore[untyped-decorator]
def _attend_decode(  # type: ignore[no-untyped-def]
    qkv_ptr,
    cos_ptr,
    sin_ptr,
    keys_ptr,
    values_ptr,
    token_ptr,
    fill_ptr,
    o_ptr,
    R,
    scale,
    H: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
    SLOTS: tl.constexpr,
    AHEAD: tl.constexpr,
):
    b = tl.program_id(0) // H
    h = tl.program_id(0) % H
    g = h // (H // G)
    d = tl.arange(0, BLOCK)
    if AHEAD:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    n = tl.load(token_ptr).to(tl.int32)
    fill = tl.load(fill_ptr + b).to(tl.int32)
    place = R - 1 - n % R
    if cos_ptr is not None:
        cos_ptr += (n - fill) * D
        sin_ptr += (n - fill) * D

    qkv_ptr += b * (H + 2 * G) * D
    q = _load_rotated(qkv_ptr + h * D, d, cos_ptr, sin_ptr, D)
    k = _load_rotated(qkv_ptr + (H + g) * D, d, cos_ptr, sin_ptr, D)
    v = tl.load(qkv_ptr + (H + G + g) * D + d, mask=d < D, other=0.0)
    base = (b * G + g).to(tl.int64) * R * D
    keys_ptr += base
    values_ptr += base
    if h % (H // G) == 0:
        tl.store(keys_ptr + place * D + d, k, mask=d < D)
        tl.store(values_ptr + place * D + d, v, mask=d < D)
    q = q.to(tl.float32) * scale
    own = tl.sum(q * k.to(tl.float32), 0)

    oldest = tl.maximum(R - 1 - n, 0)
    top = tl.full((SLOTS,), FLOOR, tl.float32)
    total = tl.zeros((SLOTS,), tl.float32)
    mix = tl.zeros((SLOTS, BLOCK), tl.float32)
    start = oldest // SLOTS * SLOTS
    keys, values, there = _load_slots(
        keys_ptr, values_ptr, start, oldest, place, fill, R, d, SLOTS, D
    )
    while start < R:
        start += SLOTS
        # loaded before the previous block is used, so that only the first load is waited for
        next_keys, next_values, next_there = _load_slots(
            keys_ptr, values_ptr, start, oldest, place, fill, R, d, SLOTS, D
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
    tl.store(o_ptr + tl.program_id(0) * D + d, o.to(o_ptr.dtype.element_ty), mask=d < D)
