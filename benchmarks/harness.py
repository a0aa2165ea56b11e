"""Timing side by side, and a record of what was measured where.

A shared machine is noisy and drifts, so contenders run in turn within one process: round r
times each of them once, and what is reported is the median over rounds of the ratio within a
round. A slow minute then slows everybody, and one interrupted round moves nothing.
"""

import gc
import json
import multiprocessing
import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch._dynamo.exc import TorchDynamoException

from fenchel.train.machine import commit, device_name

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


Maker = Callable[[], Callable[[], object]]
"""Builds a contender; it must travel to another process, as a partial of a function does."""


def race_apart(
    makers: Mapping[str, Maker], *, rounds: int, warmup: int = 2
) -> tuple[Race, dict[str, str]]:
    """As ``race``, but each contender in a process of its own, as its users have it.

    Nobody's memory or caches are in another's way. Second come those that could not run here, with
    their reason.
    """
    spawn = multiprocessing.get_context("spawn")
    lanes: dict[str, Any] = {}
    refused: dict[str, str] = {}
    for name, make in makers.items():
        ours, theirs = spawn.Pipe()
        spawn.Process(target=_lane, args=(theirs, make), daemon=True).start()
        reason = ours.recv()
        if reason is None:
            lanes[name] = ours
        else:
            refused[name] = reason

    def lap(lane: Any) -> float:
        lane.send(True)
        return float(lane.recv())

    seconds: dict[str, list[float]] = {name: [] for name in lanes}
    for r in range(warmup + rounds):
        for name in list(lanes) if r % 2 else reversed(lanes):
            taken = lap(lanes[name])
            if r >= warmup:
                seconds[name].append(taken)
    for lane in lanes.values():
        lane.send(False)
    return Race(seconds), refused


def _lane(pipe: Any, make: Maker) -> None:
    """Build, say whether it runs, and then run whenever asked to, telling the time it took."""
    try:
        way = make()
        way()
    except TorchDynamoException as error:  # torch.compile wants a compiler
        pipe.send(str(error).strip().splitlines()[0][:200])
        return
    pipe.send(None)
    while pipe.recv():
        started = _clock()
        way()
        pipe.send(_clock() - started)


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
