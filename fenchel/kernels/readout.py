"""Logits to the errors of their softmax, in place: the middle of train/readout.py, in one kernel.

With a the smoothing and V the vocabulary, for every row z of logits and its target t,

    loss = logsumexp(z) - (1 - a) z_t - a mean(z)
    z   <- softmax(z) - (1 - a) onehot(t) - a / V

One program a row: a pass for the largest entry and the sum, kept running in every lane as in online
softmax and put together at its end, and a pass that writes. Bytes: two reads and one write of z,
3 * 2 V a row in bfloat16, of which the second read comes from the cache (a row has 100 kB); done by
separate operations in float32 it is twelve passes of twice the width. Programs share nothing, so
the result does not depend on their order.

Only the last block of a row is masked: with a mask that may end anywhere the compiler loads entry
by entry.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024
"""Entries of a row at a time: 4 a thread. With 16 the three running numbers of every lane no longer
fit the registers, and the kernel takes 13.9 ms instead of 5.8 for 65,536 rows of 50,257 (H200)."""
FLOOR = tl.constexpr(-1e30)


def to_errors(z_RV: Tensor, targets_R: Tensor, smoothing: float) -> Tensor:
    """The loss of every row, (R,) in float32; z becomes the errors in place."""
    R, V = z_RV.shape
    loss_R = torch.empty(R, dtype=torch.float32, device=z_RV.device)
    block = min(BLOCK, triton.next_power_of_2(V))
    _errors[(R,)](z_RV, targets_R, loss_R, V, z_RV.stride(0), smoothing, BLOCK=block, num_warps=8)
    return loss_R


@triton.jit  # type: ignore[untyped-decorator]
def _errors(z_ptr, target_ptr, loss_ptr, V, stride, a, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    z_ptr += row * stride
    target = tl.load(target_ptr + row)
    reached = tl.load(z_ptr + target).to(tl.float32)
    lane = tl.arange(0, BLOCK)
    full = V // BLOCK * BLOCK

    # The last block first. A lane that it leaves empty begins at a floor: inf - inf is no number.
    tail = full + lane
    z = tl.load(z_ptr + tail, mask=tail < V, other=-float("inf")).to(tl.float32)
    top = tl.maximum(z, FLOOR)
    total = tl.exp(z - top)
    plain = tl.where(tail < V, z, 0.0)
    for start in range(0, full, BLOCK):
        z = tl.load(z_ptr + start + lane).to(tl.float32)
        higher = tl.maximum(top, z)
        total = total * tl.exp(top - higher) + tl.exp(z - higher)
        plain += z
        top = higher
    highest = tl.max(top, 0)
    total = tl.sum(total * tl.exp(top - highest), 0)
    loss = highest + tl.log(total) - (1.0 - a) * reached - a * tl.sum(plain, 0) / V
    tl.store(loss_ptr + row, loss)

    even = a / V
    share = 1.0 / total
    for start in range(0, full, BLOCK):
        at = start + lane
        z = tl.load(z_ptr + at).to(tl.float32)
        e = tl.exp(z - highest) * share - even
        e = tl.where(at == target, e - (1.0 - a), e)
        tl.store(z_ptr + at, e.to(z_ptr.dtype.element_ty))
    z = tl.load(z_ptr + tail, mask=tail < V, other=0.0).to(tl.float32)
    e = tl.exp(z - highest) * share - even
    e = tl.where(tail == target, e - (1.0 - a), e)
    tl.store(z_ptr + tail, e.to(z_ptr.dtype.element_ty), mask=tail < V)
