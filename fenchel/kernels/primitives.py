"""What several kernels share: constants, launch keywords, widths of tiles, terms of entmax.

Functions under ``triton.jit`` are compiled into the kernels that call them.
"""

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

LOG2_E = tl.constexpr(math.log2(math.e))
FLOOR = tl.constexpr(-1e30)
"""Initial maximum of a row: -inf - -inf is nan."""
PDL = True
"""Whether a kernel starts before the previous one has ended, on devices that can (Hopper on)."""


def pdl_launch(x: Tensor) -> dict[str, Any]:
    """Keyword arguments of a programmatic dependent launch, where the device of x has it."""
    ahead = PDL and x.is_cuda and torch.cuda.get_device_capability(x.device) >= (9, 0)
    return {"AHEAD": True, "launch_pdl": True} if ahead else {"AHEAD": False}


def padded_width(D: int) -> int:
    """The width of a tile of D columns: a power of two, 16 at least for ``tl.dot``."""
    return max(16, 1 << (D - 1).bit_length())


def entmax_kind(alpha: float) -> int:
    """0 and 1 for alpha = 1.5 and 2, which have formulas of their own; 2 by exp2 and log2."""
    return {1.5: 0, 2.0: 1}.get(alpha, 2)


@triton.jit
def wait_for_previous(AHEAD: tl.constexpr):
    """Let the next kernel start, and wait for what the previous ones write."""
    if AHEAD:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()


@triton.jit
def entmax_terms(u, power, KIND: tl.constexpr):
    """(p, s) = (u^r, u^(r - 1)) for u >= 0, with power = r - 1 and r = 1 / (alpha - 1)."""
    if KIND == 0:
        s = u
    elif KIND == 1:
        s = tl.where(u > 0.0, 1.0, 0.0)
    else:
        s = tl.exp2(power * tl.log2(u))
    return s * u, s


@triton.jit
def entmax_weight(u, r, KIND: tl.constexpr):
    """p = u^r for u >= 0, where s is not needed."""
    if KIND == 0:
        p = u * u
    elif KIND == 1:
        p = u
    else:
        p = tl.exp2(r * tl.log2(u))
    return p


@triton.jit
def entmax_newton(f, g, rate, otherwise, KIND: tl.constexpr):
    """Newton's step (f - f^(2 - alpha)) / g of the threshold; ``otherwise`` where g is 0."""
    return tl.where(g > 0.0, (f - entmax_root(f, rate, KIND)) / g, otherwise)


@triton.jit
def entmax_root(f, rate, KIND: tl.constexpr):
    """f^(2 - alpha), with rate = alpha - 1."""
    if KIND == 0:
        x = tl.sqrt(f)
    elif KIND == 1:
        x = f * 0.0 + 1.0
    else:
        x = tl.exp2((1.0 - rate) * tl.log2(f))
    return x


@triton.jit
def band_range(start_ptr, stop_ptr, b, S):
    """The first key of a sequence and the one after its last (``Band.start``, ``Band.stop``)."""
    start = 0
    stop = S
    if start_ptr is not None:
        start = tl.maximum(tl.load(start_ptr + b), 0)
    if stop_ptr is not None:
        stop = tl.minimum(tl.load(stop_ptr + b), S)
    return start, stop
