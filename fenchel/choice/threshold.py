"""The threshold of a Tsallis choice: where the weights sum to one.

With x the scores times (alpha - 1), less their maximum, and r = 1 / (alpha - 1), find

    tau  such that  f(tau) = sum_i (x_i - tau)_+ ^ r = 1,        tau in [-1, 0).

``bisect`` is the reference: slow, simple, sure.
"""

import torch
from torch import Tensor


def bisect(x: Tensor, alpha: float | Tensor) -> Tensor:
    """tau by halving an interval that holds it: (..., K) -> (..., 1).

    At -1 the largest entry alone weighs 1, at 0 it weighs nothing. Each halving buys one bit;
    stop when the dtype has no more to give.
    """
    low = torch.full_like(x[..., :1], -1.0)
    width = torch.ones_like(low)
    for _ in range(60 if x.dtype == torch.float64 else 30):
        width = width / 2
        total = powers(x - low - width, alpha).sum(-1, keepdim=True)
        low = torch.where(total >= 1.0, low + width, low)
    return low


def powers(u: Tensor, alpha: float | Tensor) -> Tensor:
    """u_+ ^ (1 / (alpha - 1)), elementwise."""
    return u.clamp(min=0.0).pow(1.0 / (alpha - 1.0))
