"""Means over the processes of a run, so that all of them take the same step.

Every process probes its own part of a batch. What is measured there is averaged before anything
is decided by it; processes that hold the same weights and the same gradients then move alike.
"""

import torch.distributed as dist
from torch import Tensor


def mean_over_processes(x: Tensor) -> Tensor:
    """``x`` itself in a run of one process, else its mean over all of them."""
    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        return x
    total = x.clone()
    dist.all_reduce(total)
    return total / dist.get_world_size()
