"""How fast this machine takes a step, and with how many threads.

More threads are not always faster: on busy cores they wait for each other, and small models
gain nothing from a second one. So a few are tried on real steps and the fastest is kept.
"""

import os
import time
from collections.abc import Callable
from statistics import median
from typing import NamedTuple

import torch


class Pace(NamedTuple):
    """What was measured."""

    threads: int
    seconds: float
    """Seconds a step."""


def measure(step: Callable[[], object], *, threads: int | None = None, repeats: int = 3) -> Pace:
    """Time ``step`` with ``threads``, or with 1, 2, 4, ... up to the cores; leave the best set."""
    cores = _cores()
    counts = [threads] if threads else sorted({min(2**n, cores) for n in range(8)})
    paces = []
    for count in counts:
        torch.set_num_threads(count)
        step()  # the first one takes memory and wakes the threads
        paces.append(Pace(count, median(_time(step) for _ in range(repeats))))
    best = min(paces, key=lambda pace: pace.seconds)
    torch.set_num_threads(best.threads)
    return best


def _time(step: Callable[[], object]) -> float:
    start = time.perf_counter()
    step()
    return time.perf_counter() - start


def _cores() -> int:
    """Cores this process may use, where the system tells; else all there are."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
