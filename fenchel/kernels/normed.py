"""The norm of a row, as plain values and plain operations: what product.py computes on its way.

    rms      r x g,              r = (mean(x^2) + epsilon)^(-1/2)
    layer    r (x - m) g + h,    m = mean(x),  r = (mean((x - m)^2) + epsilon)^(-1/2)

Here it is computed in float32 or better and rounded once, to the dtype of x. Shapes: (..., M).
"""

from typing import NamedTuple

import torch
from torch import Tensor


class Norm(NamedTuple):
    """g, h, epsilon, and whether m is taken off."""

    gain: Tensor
    shift: Tensor | None
    epsilon: float
    centred: bool


def normed(x: Tensor, norm: Norm) -> Tensor:
    """(..., M) -> (..., M), the dtype of x."""
    y = x.to(torch.promote_types(x.dtype, torch.float32))
    if norm.centred:
        y = y - y.mean(-1, keepdim=True)
    y = y * (y.square().mean(-1, keepdim=True) + norm.epsilon).rsqrt() * norm.gain
    return (y if norm.shift is None else y + norm.shift).to(x.dtype)
