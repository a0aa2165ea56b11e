"""Logits to the errors of their softmax, in place: the middle of train/loss.py, in one kernel.

With a the smoothing and V the vocabulary, for every row z of logits and its target t,

    loss = logsumexp(z) - (1 - a) z_t - a mean(z)
    z   <- softmax(z) - (1 - a) onehot(t) - a / V

One program per row: a pass for the largest entry and the sum, running per thread as in online
softmax and reduced at the end, and a pass that writes. Bytes: two reads and one write of z,
3 * 2 V per row in bfloat16, where the second read may hit the L2 cache; separate operations in
float32 make twelve passes of twice the width. Exponentials: two per entry, and one per thread and
block for the running sum. Programs share nothing, so the result does not depend on their order.

Only the last block of a row is masked: a mask that may end anywhere makes the compiler load entry
by entry.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from fenchel.kernels.primitives import FLOOR

EACH, WARPS = 8, 16
"""Entries per thread and iteration (one load of 16 bytes in bfloat16), and warps per program.
Measured on an H200 for 65,536 rows of 50,257: 4, 8, 16, 32 warps take 6.3, 6.5, 5.4, 6.1 ms; with
16 entries all take 8."""


def softmax_errors(z_RV: Tensor, targets_R: Tensor, smoothing: float) -> Tensor:
    """The loss of every row, (R,) in float32; z is overwritten by the errors."""
    R, V = z_RV.shape
    loss_R = torch.empty(R, dtype=torch.float32, device=z_RV.device)
    warps = min(WARPS, triton.next_power_of_2(triton.cdiv(V, 32 * EACH)))
    _softmax_errors[(R,)](
        z_RV, targets_R, loss_R, V, z_RV.stride(0), smoothing, LANES=32 * warps, EACH=EACH,
        num_warps=warps,
    )  # fmt: skip
    return loss_R


@triton.jit
def _softmax_errors(
    z_ptr, target_ptr, loss_ptr, V, stride, a, LANES: tl.constexpr, EACH: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    z_ptr += row * stride
    target = tl.load(target_ptr + row)
    reached = tl.load(z_ptr + target).to(tl.float32)
    lane = tl.arange(0, LANES)[:, None] * EACH + tl.arange(0, EACH)[None, :]
    full = V // (LANES * EACH) * (LANES * EACH)

    # The last block first. A lane that it leaves empty starts at a floor: inf - inf is nan.
    tail = full + lane
    z = tl.load(z_ptr + tail, mask=tail < V, other=-float("inf")).to(tl.float32)
    top = tl.maximum(tl.max(z, 1), FLOOR)
    total = tl.sum(tl.exp(z - top[:, None]), 1)
    plain = tl.sum(tl.where(tail < V, z, 0.0), 1)
    for start in range(0, full, LANES * EACH):
        z = tl.load(z_ptr + start + lane).to(tl.float32)
        higher = tl.maximum(top, tl.max(z, 1))
        total = total * tl.exp(top - higher) + tl.sum(tl.exp(z - higher[:, None]), 1)
        plain += tl.sum(z, 1)
        top = higher
    highest = tl.max(top, 0)
    total = tl.sum(total * tl.exp(top - highest), 0)
    loss = highest + tl.log(total) - (1.0 - a) * reached - a * tl.sum(plain, 0) / V
    tl.store(loss_ptr + row, loss)

    even = a / V
    share = 1.0 / total
    for start in range(0, full, LANES * EACH):
        at = start + lane
        z = tl.load(z_ptr + at).to(tl.float32)
        e = tl.exp(z - highest) * share - even
        e = tl.where(at == target, e - (1.0 - a), e)
        tl.store(z_ptr + at, e.to(z_ptr.dtype.element_ty))
    z = tl.load(z_ptr + tail, mask=tail < V, other=0.0).to(tl.float32)
    e = tl.exp(z - highest) * share - even
    e = tl.where(tail == target, e - (1.0 - a), e)
    tl.store(z_ptr + tail, e.to(z_ptr.dtype.element_ty), mask=tail < V)
