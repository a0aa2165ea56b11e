"""Inner products of the parts of score changes, without storing scores (optim/score/score_line.py).

For every sequence and head, with S_0 .. S_3 = <q, k>, <q, dk>, <dq, k>, <dq, dk> over the pairs
(i, j) of a mask of m sampled queries and T keys,

    out_ab = sum over (i, j) in the mask of S_a,ij S_b,ij        ten different ones, symmetric

A program loads the queries of one head and one block of keys: four products of tiles, whose entries
never leave the registers. Separate operations write, mask and read the four parts, 4 * 4 * 4 m T
bytes per head; here q, dq, k, dk are read, 2 * 2 (m + T) D. Sums are float32. Programs write to
separate memory, so the result does not depend on their order.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from fenchel.kernels.primitives import padded_width

BLOCK = 64
"""Keys per block."""


def score_part_products(q: tuple[Tensor, Tensor], k: tuple[Tensor, Tensor], mask: Tensor) -> Tensor:
    """q and dq (L, n, H, m, D), k and dk (L, n, G, T, D) -> (L, H, 4, 4) in float32.

    ``mask`` (L or 1, n or 1, 1, m, T) is True where a pair counts.
    """
    L, n, H, m, D = q[0].shape
    G, T = k[0].shape[2:4]
    blocks = triton.cdiv(T, BLOCK)
    out = torch.empty(L, n, H, blocks, 16, dtype=torch.float32, device=q[0].device)
    stride_L, stride_n = (mask.stride(axis) if mask.shape[axis] > 1 else 0 for axis in (0, 1))
    _score_part_products[(L * n * H, blocks)](
        *(x.contiguous() for x in (*q, *k)), mask, out, n, H, H // G, m, T, D, stride_L, stride_n,
        mask.stride(3), mask.stride(4), ROWS=padded_width(m), KEYS=BLOCK, WIDTH=padded_width(D),
        num_warps=8,
    )  # fmt: skip
    return out.sum(dim=(1, 3)).view(L, H, 4, 4)


@triton.jit
def _score_part_products(
    q_ptr, dq_ptr, k_ptr, dk_ptr, open_ptr, out_ptr, n, H, group, m, T, D, stride_L, stride_n,
    stride_m, stride_T, ROWS: tl.constexpr, KEYS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0).to(tl.int64)  # (layer, sequence, head)
    sequence = head // H
    shared = sequence * (H // group) + head % H // group  # (layer, sequence, head of keys)
    i = tl.arange(0, ROWS)
    j = tl.program_id(1) * KEYS + tl.arange(0, KEYS)
    d = tl.arange(0, WIDTH)

    at = head * m * D + i[:, None] * D + d[None, :]
    there = (i[:, None] < m) & (d[None, :] < D)
    q = tl.load(q_ptr + at, mask=there, other=0.0)
    dq = tl.load(dq_ptr + at, mask=there, other=0.0)
    at = shared * T * D + j[None, :] * D + d[:, None]
    there = (j[None, :] < T) & (d[:, None] < D)
    k = tl.load(k_ptr + at, mask=there, other=0.0)
    dk = tl.load(dk_ptr + at, mask=there, other=0.0)

    at = (sequence // n) * stride_L + (sequence % n) * stride_n
    at += i[:, None] * stride_m + j[None, :] * stride_T
    seen = tl.load(open_ptr + at, mask=(i[:, None] < m) & (j[None, :] < T), other=0) != 0
    a = tl.where(seen, tl.dot(q, k), 0.0)
    b = tl.where(seen, tl.dot(q, dk), 0.0)
    c = tl.where(seen, tl.dot(dq, k), 0.0)
    e = tl.where(seen, tl.dot(dq, dk), 0.0)

    out_ptr += (head * tl.num_programs(1) + tl.program_id(1)) * 16
    ab, ac, ae = tl.sum(a * b), tl.sum(a * c), tl.sum(a * e)
    bc, be, ce = tl.sum(b * c), tl.sum(b * e), tl.sum(c * e)
    tl.store(out_ptr, tl.sum(a * a))
    tl.store(out_ptr + 5, tl.sum(b * b))
    tl.store(out_ptr + 10, tl.sum(c * c))
    tl.store(out_ptr + 15, tl.sum(e * e))
    tl.store(out_ptr + 1, ab)
    tl.store(out_ptr + 4, ab)
    tl.store(out_ptr + 2, ac)
    tl.store(out_ptr + 8, ac)
    tl.store(out_ptr + 3, ae)
    tl.store(out_ptr + 12, ae)
    tl.store(out_ptr + 6, bc)
    tl.store(out_ptr + 9, bc)
    tl.store(out_ptr + 7, be)
    tl.store(out_ptr + 13, be)
    tl.store(out_ptr + 11, ce)
    tl.store(out_ptr + 14, ce)
