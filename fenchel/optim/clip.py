"""Global-norm clipping: one factor for all gradients, so that their common direction stays.

    |g|^2 = sum over all parameters of the squares of their gradients,     g <- g min(1, c / |g|)

A gradient of 0 stays 0: torch divides by |g| + 1e-6, so the clipped norm is c or a hair below
it. When |g| is inf or nan no factor would help, and the product would spread the nan: the gradients
are left as they are, for whoever asks which of them it was (fenchel/train/guard.py).
"""

import math
from collections.abc import Iterable

from torch import Tensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm


def clip_(parameters: Iterable[Tensor], largest: float) -> float:
    """Shorten the gradients together to at most ``largest``; the norm they had before."""
    moved = [p for p in parameters if p.grad is not None]
    norm = get_total_norm([p.grad for p in moved if p.grad is not None])
    length = norm.item()
    if math.isfinite(length):
        clip_grads_with_norm_(moved, largest, norm)
    return length
