"""Kernels that add in a fixed order, so that a run on a GPU repeats bit for bit.

On a CPU with a fixed number of threads torch adds in a fixed order anyway. On a GPU some kernels
do not, the backward pass of fused attention first among them: two runs of the same settings
then differ in the last digits, and soon in all of them. A fixed order costs some time
(docs/log.md), so it can be declined.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def fixed_order(device: torch.device, *, exact: bool) -> Iterator[None]:
    """Inside, a GPU uses only kernels that repeat; one that has none is named and refused."""
    if device.type != "cuda" or not exact:
        yield
        return
    # The matrix library reads this when it first takes work space.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        yield
    except RuntimeError as error:
        if "deterministic" not in str(error):
            raise
        reason = str(error).partition(". ")[0]
        raise ValueError(f"{reason}; give up exact repetition with train.exact=false.") from error
    finally:
        torch.use_deterministic_algorithms(before)
