"""Rotation of heads, and second moments of rotated heads, for the score optimisers (optim/score).

    rotate            y_t = R_t x_t
    rotated_moments   A   = sum over (s, t) in the mask of (R_s^T x_t)(R_s^T x_t)^T

R rotates pairs of entries by an angle that grows with the position, (a, b) -> (a c - b s,
b c + a s) (attention/rotary.py), and s runs over a sample of positions. By separate operations a
rotation reads and writes x three times, and once more before that to make the heads contiguous;
here x is read where the product left it and written once, and a program loads the angles of its
positions once for all heads. For the moments, separate operations would write x once per s,
weighted, before the product; here a block of x is rotated in registers and multiplied with itself:
2 T D bytes per head and s, from the L2 cache for all s but one. Sums are float32. Programs write to
separate memory, so the result does not depend on their order.

Shapes: L layers, n sequences, H heads, T positions, D the width of a head, W <= D that of the
angles, S positions in cos, sin and mask.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fenchel.kernels.primitives import padded_width

ROTATE_BLOCK, MOMENT_BLOCK = 32, 64
"""Positions per block."""


def rotate(x: Tensor, cos: Tensor, sin: Tensor, *, layout: str) -> Tensor:
    """x (L, n, H, T, D) of any strides rotated by (L or 1, n or 1, 1, T, W); contiguous."""
    L, n, H, T, D = x.shape
    out = torch.empty(L, n, H, T, D, dtype=x.dtype, device=x.device)
    cos, sin, strides = _contiguous_tables(cos, sin)
    W = cos.shape[-1]
    _rotate[(L * n, triton.cdiv(T, ROTATE_BLOCK))](
        x, cos, sin, out, n, H, T, *x.stride(), *strides, D=D, W=W, PAIRS=_is_interleaved(layout),
        BLOCK=ROTATE_BLOCK, HALF=triton.next_power_of_2(W // 2),
        REST=triton.next_power_of_2(max(1, D - W)),
    )  # fmt: skip
    return out


def rotated_moments(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    mask: Tensor,
    positions: tuple[int, int, int, int],
    *,
    layout: str,
) -> Tensor:
    """Sums over sequences and pairs of the mask, (L, H, D, D) in float32.

    ``x`` (L, n, H, T, D), cos and sin (L or 1, n or 1, 1, S, W), ``mask``
    (L or 1, n or 1, 1, S, T). ``positions`` are (first, step, stride, count): sequence i uses the
    s at first + step (i mod stride + k stride), k < count.
    """
    L, n, H, T, D = x.shape
    *first_step_stride, count = positions
    out = torch.empty(L, n, H, count, D, D, dtype=torch.float32, device=x.device)
    cos, sin, strides = _contiguous_tables(cos, sin)
    _rotated_moments[(L * n * H, count)](
        x.contiguous(), cos, sin, mask, out, n, H, T, *strides, *_outer_strides(mask),
        mask.stride(3), mask.stride(4), *first_step_stride, D=D, W=cos.shape[-1],
        PAIRS=_is_interleaved(layout), BLOCK=MOMENT_BLOCK, WIDTH=padded_width(D),
        PRECISION="ieee" if x.dtype == torch.float32 else "tf32",
    )  # fmt: skip
    return out.sum(dim=(1, 3))


def _contiguous_tables(cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, tuple[int, int]]:
    """Contiguous cos and sin, and their strides over layers and over sequences."""
    cos, sin = cos.contiguous(), sin.contiguous()
    return cos, sin, _outer_strides(cos)


def _outer_strides(x: Tensor) -> Any:
    """Strides of the first two axes, 0 where an axis is broadcast."""
    return tuple(x.stride(axis) if x.shape[axis] > 1 else 0 for axis in (0, 1))


def _is_interleaved(layout: str) -> bool:
    return {"half": False, "pairs": True}[layout]


@triton.jit
def _rotate(
    x_ptr, cos_ptr, sin_ptr, out_ptr, n, H, T, stride_L, stride_n, stride_H, stride_T, stride_D,
    turn_L, turn_n, D: tl.constexpr, W: tl.constexpr, PAIRS: tl.constexpr, BLOCK: tl.constexpr,
    HALF: tl.constexpr, REST: tl.constexpr,
):  # fmt: skip
    layer = (tl.program_id(0) // n).to(tl.int64)
    sequence = tl.program_id(0) % n
    t = (tl.program_id(1) * BLOCK + tl.arange(0, BLOCK))[:, None]
    i = tl.arange(0, HALF)[None, :]
    there = (t < T) & (i < W // 2)
    at = layer * turn_L + sequence * turn_n + t * W + i
    c = tl.load(cos_ptr + at, mask=there, other=0.0).to(tl.float32)
    s = tl.load(sin_ptr + at + W // 2, mask=there, other=0.0).to(tl.float32)  # the half with +
    a_at = i
    b_at = i + W // 2
    if PAIRS:
        a_at = 2 * i
        b_at = 2 * i + 1
    r = W + tl.arange(0, REST)[None, :]

    x_ptr += layer * stride_L + sequence * stride_n + t * stride_T
    out_ptr += ((layer * n + sequence) * H * T + t) * D
    for _ in range(H):
        a = tl.load(x_ptr + a_at * stride_D, mask=there, other=0.0)
        b = tl.load(x_ptr + b_at * stride_D, mask=there, other=0.0)
        x, y = a.to(tl.float32), b.to(tl.float32)
        tl.store(out_ptr + a_at, (x * c - y * s).to(a.dtype), mask=there)
        tl.store(out_ptr + b_at, (y * c + x * s).to(a.dtype), mask=there)
        if W < D:
            rest = tl.load(x_ptr + r * stride_D, mask=(t < T) & (r < D), other=0.0)
            tl.store(out_ptr + r, rest, mask=(t < T) & (r < D))
        x_ptr += stride_H
        out_ptr += T * D


@triton.jit
def _pair(d, W: tl.constexpr, PAIRS: tl.constexpr):
    """The other entry of the pair of d, and the index of its angle; the sine carries the sign."""
    if PAIRS:
        other = d ^ 1
        at = d // 2 + d % 2 * (W // 2)
    else:
        other = (d + W // 2) % W
        at = d
    return tl.where(d < W, other, d), tl.where(d < W, at, 0)


@triton.jit
def _rotated_moments(
    x_ptr, cos_ptr, sin_ptr, open_ptr, out_ptr, n, H, T, turn_L, turn_n, open_L, open_n, open_S,
    open_T, first, step, apart, D: tl.constexpr, W: tl.constexpr, PAIRS: tl.constexpr,
    BLOCK: tl.constexpr, WIDTH: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0).to(tl.int64)
    layer, sequence = head // H // n, head // H % n
    s = first + step * (sequence % apart + tl.program_id(1) * apart)
    d = tl.arange(0, WIDTH)
    other, angle = _pair(d, W, PAIRS)
    at = layer * turn_L + sequence * turn_n + s * W + angle
    cos = tl.load(cos_ptr + at, mask=d < W, other=1.0).to(tl.float32)
    sin = -tl.load(sin_ptr + at, mask=d < W, other=0.0).to(tl.float32)  # back: R_s^T
    open_ptr += layer * open_L + sequence * open_n + s * open_S
    x_ptr += head * T * D

    total = tl.zeros((WIDTH, WIDTH), tl.float32)
    for start in range(0, T, BLOCK):
        t = start + tl.arange(0, BLOCK)
        seen = tl.load(open_ptr + t * open_T, mask=t < T, other=0) != 0
        x = tl.load(x_ptr + t[:, None] * D + d[None, :], mask=seen[:, None] & (d < D), other=0.0)
        y = tl.load(
            x_ptr + t[:, None] * D + other[None, :], mask=seen[:, None] & (d < W), other=0.0
        )
        z = (x.to(tl.float32) * cos[None, :] + y.to(tl.float32) * sin[None, :]).to(x.dtype)
        total = tl.dot(tl.trans(z), z, total, input_precision=PRECISION)
    out_ptr += (head * tl.num_programs(1) + tl.program_id(1)) * D * D
    at = d[:, None] * D + d[None, :]
    tl.store(out_ptr + at, total, mask=(d[:, None] < D) & (d[None, :] < D))
