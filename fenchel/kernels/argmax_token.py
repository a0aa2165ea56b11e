"""The likeliest token of every row of logits, chosen and stored on the device.

    token_b        = the first v with z_bv = max_v z_bv
    tokens[b, n]   = token_b, or -1 where the largest logit is not finite

n, the number of the chosen token, is read from device memory, and ``token`` is where the next step
reads its input. One program per row, since a row is short (64 kB for 32,000 in bfloat16): a pass in
which every lane keeps its maximum, then a reduction over the lanes.

Shapes: z (B, V), token (B,) and tokens (B, P) of int64, n (1,).
"""

import triton
import triton.language as tl
from torch import Tensor

from fenchel.kernels.primitives import pdl_launch

BLOCK = 8192
"""Entries of a row per iteration: two loads of 16 bytes in flight per thread."""
WARPS = 16


def argmax_token(z_BV: Tensor, n_1: Tensor, token_B: Tensor, tokens_BP: Tensor) -> None:
    """Write the likeliest token of every row into ``token_B`` and column n of ``tokens_BP``."""
    B, V = z_BV.shape
    block = min(BLOCK, max(16, triton.next_power_of_2(V)))
    sizes = {"BLOCK": block, "num_warps": WARPS if block == BLOCK else 4}
    _argmax_token[(B,)](
        z_BV, n_1, token_B, tokens_BP, V, tokens_BP.stride(0), **sizes, **pdl_launch(z_BV)
    )


@triton.jit  # type: ignore[untyped-decorator]
def _argmax_token(  # type: ignore[no-untyped-def]
    z_ptr, n_ptr, token_ptr, said_ptr, V, stride, BLOCK: tl.constexpr, AHEAD: tl.constexpr
):
    b = tl.program_id(0).to(tl.int64)
    z_ptr += b * V
    lane = tl.arange(0, BLOCK)
    full = V // BLOCK * BLOCK
    if AHEAD:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()

    # The last block first, so that only it has a mask; an equal entry before it wins.
    tail = full + lane
    best = tl.load(z_ptr + tail, mask=tail < V, other=-float("inf")).to(tl.float32)
    where = tl.minimum(tail, V - 1)
    sound = best == best
    for start in range(0, full, BLOCK):
        z = tl.load(z_ptr + start + lane).to(tl.float32)
        sound = sound & (z == z)
        better = (z > best) | ((z == best) & (start + lane < where))
        best = tl.where(better, z, best)
        where = tl.where(better, start + lane, where)
    highest = tl.max(best, 0)
    chosen = tl.min(tl.where(best == highest, where, V - 1), 0)
    fine = (tl.min(sound.to(tl.int32), 0) == 1) & (tl.abs(highest) < float("inf"))
    tl.store(token_ptr + b, chosen.to(tl.int64))
    said = tl.where(fine, chosen, -1).to(tl.int64)
    tl.store(said_ptr + b * stride + tl.load(n_ptr), said)
