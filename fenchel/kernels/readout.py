"""Logits to the errors of their softmax, in place: the middle of train/readout.py, in one kernel.

With a the smoothing and V the vocabulary, for every row z of logits and its target t,

    loss = logsumexp(z) - (1 - a) z_t - a mean(z)
    z   <- softmax(z) - (1 - a) onehot(t) - a / V

One program a row: a pass for the largest entry and the sum, kept running as in online softmax, and
a pass that writes. Bytes: two reads and one write of z, 3 * 2 V a row in bfloat16; done by separate
operations in float32 it is twelve passes of twice the width. Programs share nothing, so the result
does not depend on their order.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096
"""Entries of a row at a time."""


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
    top, total, plain = -float("inf"), 0.0, 0.0
    for start in range(0, V, BLOCK):
        at = start + tl.arange(0, BLOCK)
        z = tl.load(z_ptr + at, mask=at < V, other=-float("inf")).to(tl.float32)
        higher = tl.maximum(top, tl.max(z, 0))
        total = total * tl.exp(top - higher) + tl.sum(tl.exp(z - higher), 0)
        plain += tl.sum(tl.where(at < V, z, 0.0), 0)
        top = higher
    reached = tl.load(z_ptr + target).to(tl.float32)
    loss = top + tl.log(total) - (1.0 - a) * reached - a * plain / V
    tl.store(loss_ptr + row, loss)
    for start in range(0, V, BLOCK):
        at = start + tl.arange(0, BLOCK)
        z = tl.load(z_ptr + at, mask=at < V, other=0.0).to(tl.float32)
        e = tl.exp(z - top) / total - a / V
        e = tl.where(at == target, e - (1.0 - a), e)
        tl.store(z_ptr + at, e.to(z_ptr.dtype.element_ty), mask=at < V)
