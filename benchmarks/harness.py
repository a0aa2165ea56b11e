"""Interleaved timing of several contenders, and the record of a benchmark.

A shared machine is noisy and drifts, so contenders run in turn within one process: every round
times each of them once, and the result is the median over rounds of the ratio within a round. A
slow minute then slows all contenders alike, and one interrupted round does not move the median.

Long benchmarks call ``record`` after every case: a run that is stopped keeps the cases it has. The
results of a short form, --quick, are in a file of their own, NAME_quick.json.
"""

import gc
import json
import multiprocessing
import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

import torch

from fenchel.files import write_atomic
from fenchel.torch_internals import compile_error
from fenchel.train.hardware import commit, device_name

RESULTS = Path(__file__).parent / "results"


class Timings(NamedTuple):
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
        """The quartiles of the ratio over the rounds."""
        rounds = zip(self.seconds[peer], self.seconds[ours], strict=True)
        low, _, high = statistics.quantiles((theirs / mine for theirs, mine in rounds), n=4)
        return low, high


def time_interleaved(
    contenders: Mapping[str, Callable[[], object]], *, rounds: int, warmup: int = 2, calls: int = 1
) -> Timings:
    """Time every contender ``rounds`` times, in turn, after ``warmup`` rounds that do not count.

    Seconds are those of one of ``calls`` calls in a row: on a GPU the host prepares all but the
    first while another runs.
    """
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    order = list(contenders)
    collected = gc.isenabled()
    gc.disable()  # a collection would count for the contender that happens to run
    try:
        for r in range(warmup + rounds):
            first = r % len(order)  # the first of a round starts with cold caches: each in its turn
            for name in order[first:] + order[:first]:
                started = _clock()
                for _ in range(calls):
                    contenders[name]()
                if r >= warmup:
                    seconds[name].append((_clock() - started) / calls)
            gc.collect()
    finally:
        if collected:
            gc.enable()
    return Timings(seconds)


Maker = Callable[[], Callable[[], object]]
"""Builds a contender in another process, so it must be picklable, as a partial of a function is."""


def time_in_processes(
    makers: Mapping[str, Maker], *, rounds: int, warmup: int = 2
) -> tuple[Timings, dict[str, str]]:
    """As ``time_interleaved``, but each contender in a process of its own, as its users run it.

    No contender shares memory or caches with another. The second value maps the contenders that
    cannot run on this machine to the reason.
    """
    spawn = multiprocessing.get_context("spawn")
    workers: dict[str, Any] = {}
    refused: dict[str, str] = {}
    for name, make in makers.items():
        ours, theirs = spawn.Pipe()
        spawn.Process(target=_worker, args=(theirs, make), daemon=True).start()
        reason = ours.recv()
        if reason is None:
            workers[name] = ours
        else:
            refused[name] = reason

    def time_call(worker: Any) -> float:
        worker.send(True)
        return float(worker.recv())

    seconds: dict[str, list[float]] = {name: [] for name in workers}
    for r in range(warmup + rounds):
        for name in list(workers) if r % 2 else reversed(workers):
            elapsed = time_call(workers[name])
            if r >= warmup:
                seconds[name].append(elapsed)
    for worker in workers.values():
        worker.send(False)
    return Timings(seconds), refused


def _worker(pipe: Any, make: Maker) -> None:
    """Build a contender, send None or why it cannot run, then send the time of every call."""
    try:
        call = make()
        call()
    except compile_error() as error:  # torch.compile needs a C++ compiler
        pipe.send(str(error).strip().splitlines()[0][:200])
        return
    pipe.send(None)
    while pipe.recv():
        started = _clock()
        call()
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
        "versions": {package: _version(package) for package in ("torch", *packages)},
        "rows": list(rows),
    }
    folder.mkdir(exist_ok=True)
    path = folder / f"{name}.json"
    write_atomic(path, json.dumps(page, indent=1) + "\n")
    return path


def _version(package: str) -> str:
    """Its version; "not installed" for one that is imported from a folder."""
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _clock() -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def _device() -> str:
    if torch.cuda.is_available():
        return device_name(torch.device("cuda"))
    capability = torch.backends.cpu.get_cpu_capability()
    return f"{device_name(torch.device('cpu'))}, {os.cpu_count()} cores, {capability}"
