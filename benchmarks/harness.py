"""Timing side by side, and a record of what was measured where.

A shared machine is noisy and drifts, so contenders run in turn within one process: round r
times each of them once, and what is reported is the median over rounds of the ratio within a
round. A slow minute then slows everybody, and one interrupted round moves nothing.
"""

import gc
import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import torch

from fenchel.train.environment import commit, device_name

RESULTS = Path(__file__).parent / "results"


class Race(NamedTuple):
    """Seconds of every contender, round by round."""

    seconds: dict[str, list[float]]

    def median(self, name: str) -> float:
        """Seconds of one call."""
        return statistics.median(self.seconds[name])

    def ratio(self, ours: str, peer: str) -> float:
        """How many times as fast as ``peer`` ``ours`` is; above 1 is faster."""
        rounds = zip(self.seconds[peer], self.seconds[ours], strict=True)
        return statistics.median(theirs / mine for theirs, mine in rounds)

    def spread(self, ours: str, peer: str) -> tuple[float, float]:
        """The ratio's quartiles over the rounds."""
        rounds = zip(self.seconds[peer], self.seconds[ours], strict=True)
        low, _, high = statistics.quantiles((theirs / mine for theirs, mine in rounds), n=4)
        return low, high


def race(contenders: Mapping[str, Callable[[], object]], *, rounds: int, warmup: int = 2) -> Race:
    """Call every contender ``rounds`` times, in turn, after ``warmup`` rounds nobody counts."""
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    order = list(contenders)
    collected = gc.isenabled()
    gc.disable()  # a collection would land on whoever happens to be running
    try:
        for r in range(warmup + rounds):
            for name in order if r % 2 else reversed(order):  # nobody is always first
                started = _clock()
                contenders[name]()
                if r >= warmup:
                    seconds[name].append(_clock() - started)
            gc.collect()
    finally:
        if collected:
            gc.enable()
    return Race(seconds)


def record(
    name: str,
    rows: Sequence[Mapping[str, Any]],
    packages: Sequence[str] = (),
    *,
    folder: Path = RESULTS,
) -> Path:
    """Write results/NAME.json: the rows, the machine, the versions and the commit."""
    page = {
        "benchmark": name,
        "date": time.strftime("%Y-%m-%d"),
        "commit": commit(),
        "device": _device(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "versions": {package: version(package) for package in ("torch", *packages)},
        "rows": list(rows),
    }
    folder.mkdir(exist_ok=True)
    path = folder / f"{name}.json"
    path.write_text(json.dumps(page, indent=1) + "\n")
    return path


def _clock() -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def _device() -> str:
    if torch.cuda.is_available():
        return device_name(torch.device("cuda"))
    capability = torch.backends.cpu.get_cpu_capability()
    return f"{device_name(torch.device('cpu'))}, {os.cpu_count()} cores, {capability}"
