"""Jobs that were run, on disk as they come, and the running of those that are missing.

A run is a function of its ``Job``, so each result is kept as one line of a file as soon as it is
there, and a job that stands in the file is not run again: a study can be stopped anywhere and goes
on where it was. Delete the file to begin anew.

A study asks the ledger for the results of several jobs at once and computes with them as if they
had been there all the time. Where one is missing the ledger notes what is wanted and breaks the
study off (``Missing``). ``complete`` asks every study, runs what they want, in several processes if
there are several, and asks again, until nothing is missing.
"""

import json
import multiprocessing
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

Result = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Job:
    """All that a run depends on."""

    study: str
    size: str
    rule: str
    rate: float
    seed: int
    decay: float = 0.1
    radius: float = 6.0
    """Of the score ball; only rules that have one read it."""
    damping: float = 1.0
    """Of the whitening; only rules that whiten read it."""
    change: float = 0.2
    """Of a head's scores in a step; only rules with a score ball read it."""
    momentum: float = 0.95
    """Of Muon and of ScoreDescent."""
    start: tuple[float, float, float] | None = None
    """Muon's rate, decay and momentum for the checkpoint that is fine-tuned."""


Run = Callable[[Job], Result]


class Missing(Exception):
    """A result is not there yet; what was asked for is noted."""


class OutOfTime(Exception):
    """The minutes that were given are over; what was run is kept."""


class Ledger:
    """Results by job."""

    def __init__(self, path: Path, *, minutes: float) -> None:
        self.path, self.ends = path, time.monotonic() + 60.0 * minutes
        lines = path.read_text().splitlines() if path.exists() else []
        self.known = {_key(line["job"]): line["result"] for line in map(json.loads, lines)}
        self.wanted: dict[Job, Run] = {}

    def __call__(self, jobs: Sequence[Job], run: Run) -> list[Result]:
        """The results of ``jobs``; ``run`` gives one if it is not known."""
        keys = [_key(asdict(job)) for job in jobs]
        absent = {job: run for job, key in zip(jobs, keys, strict=True) if key not in self.known}
        if absent:
            self.wanted |= absent
            raise Missing
        return [self.known[key] for key in keys]

    def keep(self, job: Job, result: Result) -> None:
        """Write a result down and say so."""
        self.known[_key(asdict(job))] = result
        self.path.parent.mkdir(exist_ok=True)
        with self.path.open("a") as file:
            file.write(json.dumps({"job": asdict(job), "result": result}) + "\n")
        told = ", ".join(f"{name} {value}" for name, value in result.items())
        what = f"{job.study:9s} {job.rule:16s} rate {job.rate:<8.4g} decay {job.decay:<4g}"
        how = f"radius {job.radius:<3g} damping {job.damping:<4g} change {job.change:<3g}"
        print(f"  {what} {how} momentum {job.momentum:<4g} seed {job.seed}: {told}", flush=True)


def complete(ledger: Ledger, ask: Sequence[Callable[[], object]], *, workers: int) -> None:
    """Run all that ``ask`` wants of the ledger, until nobody misses anything."""
    while jobs := _missing(ledger, ask):
        if workers == 1:
            if time.monotonic() > ledger.ends:
                raise OutOfTime
            job, run = next(iter(jobs.items()))
            ledger.keep(job, _timed(run, job))
        else:
            _together(ledger, ask, workers)


def _missing(ledger: Ledger, ask: Iterable[Callable[[], object]]) -> dict[Job, Run]:
    ledger.wanted = {}
    for one in ask:
        try:
            one()
        except Missing:
            continue
    return ledger.wanted


def _together(ledger: Ledger, ask: Sequence[Callable[[], object]], workers: int) -> None:
    """Several at a time; whoever comes back may have made new jobs known."""
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, spawn, torch.set_num_threads, (1,)) as pool:
        running: dict[Job, Future[Result]] = {}
        while jobs := _missing(ledger, ask):
            if time.monotonic() < ledger.ends:
                for job, run in jobs.items():
                    if job not in running:
                        running[job] = pool.submit(_timed, run, job)
            else:  # those that have begun end, the others do not begin
                running = {job: given for job, given in running.items() if not given.cancel()}
            if not running:
                raise OutOfTime
            for job in _done(running):
                ledger.keep(job, running.pop(job).result())


def _done(running: dict[Job, Future[Result]]) -> Iterator[Job]:
    ended = wait(running.values(), return_when=FIRST_COMPLETED, timeout=1.0).done
    return iter([job for job, given in running.items() if given in ended])


def _timed(run: Run, job: Job) -> Result:
    started = time.monotonic()
    return {**run(job), "seconds": round(time.monotonic() - started, 1)}


def _key(job: dict[str, Any]) -> str:
    return json.dumps(job, sort_keys=True)
