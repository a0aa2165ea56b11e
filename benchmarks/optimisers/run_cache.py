"""The cache of runs on disk, and the scheduler of the runs that it lacks.

A run is a function of its ``Job``, so its result is appended to a file, one line per run, as soon
as the run ends, and a job in the file is not run again: a study can be stopped at any time and
continues from there. Delete the file to begin anew. Long runs can be stopped between two steps too:
they are given a ``Pause``, the time to stop at and a folder for their state.

A study is a function that calls the cache with a list of jobs and computes with their results. If
results are missing, the cache records their jobs and raises ``MissingResult``, which ends the call.
``run_missing`` calls every study, runs the recorded jobs, in several processes if there are several
workers, and repeats until no result is missing.
"""

import hashlib
import json
import math
import multiprocessing
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import MISSING, asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch

Result = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Job:
    """Everything that a run depends on."""

    study: str
    size: str
    rule: str
    rate: float
    seed: int
    decay: float = 0.1
    radius: float | None = 6.0
    """Constant radius of the score ball, for rules that have one; None is the default ball."""
    damping: float | None = 1.0
    """Damping of the whitening, for rules that whiten; None is the default."""
    change: float | None = 0.2
    """Peak change of the scores per head and step, for rules that set or limit it; None is what
    follows from the default of score_total."""
    momentum: float = 0.95
    """Momentum of Muon and of ScoreDescent."""
    start: tuple[float, float, float] | None = None
    """Muon's rate, decay and momentum for the checkpoint that is fine-tuned."""
    text: str = "sotu"
    """The text of a run from scratch."""
    steps: int | None = None
    """The length of a run from scratch; None is that of the size."""
    batch: int | None = None
    """Sequences per step of a run from scratch; None is that of the size."""
    other_rate: float | None = None
    """Rate of AdamW for what is no matrix of a block; None is ``rate``."""
    warmup: float = 0.1
    """Share of the steps in which the rates rise."""
    beta2: float = 0.95
    """Decay of second moments: of the rows of NorMuon, of SOAP, of Adam."""
    total: float | None = None
    """score_total, where ``change`` is None; None is its default."""
    initial: str | None = None
    """Initialisation of the model; None is that of the rule."""


Run = Callable[[Job], Result]


class MissingResult(Exception):
    """The cache lacks a result; it has recorded the job."""


class OutOfTime(Exception):
    """The time limit is reached; finished runs are in the cache."""


@dataclass(frozen=True)
class Pause:
    """When a run should stop, and where it stores its state to go on from."""

    deadline: float
    """In seconds since the epoch, which is the same in every process; inf for never."""
    folder: Path

    def due(self) -> bool:
        """Whether the time is over."""
        return time.time() > self.deadline

    def file(self, job: Job) -> Path:
        """The file of the state of a run."""
        return self.folder / f"{hashlib.sha256(_key(asdict(job)).encode()).hexdigest()[:16]}.pt"


class RunCache:
    """Results by job, in memory and as lines of a file."""

    def __init__(
        self, path: Path, *, minutes: float, about: Mapping[str, Any] | None = None
    ) -> None:
        """``about`` is what else a line of the file says: the commit, the device."""
        self.path, self.deadline = path, time.monotonic() + 60.0 * minutes
        self.about = dict(about or {})
        self.pause = Pause(time.time() + 60.0 * minutes, path.parent / "paused")
        lines = path.read_text().splitlines() if path.exists() else []
        self.results = {_key(line["job"]): line["result"] for line in map(json.loads, lines)}
        self.missing: dict[Job, Run] = {}

    def __call__(self, jobs: Sequence[Job], run: Run) -> list[Result]:
        """The results of ``jobs``; ``run`` computes those that are missing."""
        keys = [_key(asdict(job)) for job in jobs]
        pairs = zip(jobs, keys, strict=True)
        missing = {job: run for job, key in pairs if key not in self.results}
        if missing:
            self.missing |= missing
            raise MissingResult
        return [self.results[key] for key in keys]

    def add(self, job: Job, result: Result) -> None:
        """Append a result to the file and print it."""
        self.results[_key(asdict(job))] = result
        self.path.parent.mkdir(exist_ok=True)
        with self.path.open("a") as file:
            file.write(json.dumps({"job": asdict(job), "result": result, **self.about}) + "\n")
        metrics = ", ".join(f"{name} {value}" for name, value in result.items())
        fields = {k: v for k, v in asdict(job).items() if k not in ("study", "size", "rule")}
        how = " ".join(f"{name} {value}" for name, value in fields.items() if value is not None)
        print(f"  {job.study:9s} {job.rule:16s} {how}: {metrics}", flush=True)


def run_missing(cache: RunCache, studies: Sequence[Callable[[], object]], *, workers: int) -> None:
    """Run the jobs that ``studies`` need and the cache lacks, until none is missing."""
    while jobs := _missing_jobs(cache, studies):
        if workers == 1:
            if time.monotonic() > cache.deadline:
                raise OutOfTime
            job, run = next(iter(jobs.items()))
            cache.add(job, _timed(run, job))
        else:
            _run_in_pool(cache, studies, workers)


def _missing_jobs(cache: RunCache, studies: Iterable[Callable[[], object]]) -> dict[Job, Run]:
    cache.missing = {}
    for study in studies:
        try:
            study()
        except MissingResult:
            continue
    return cache.missing


def _run_in_pool(cache: RunCache, studies: Sequence[Callable[[], object]], workers: int) -> None:
    """Run several jobs at a time; a result may lead its study to further jobs."""
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, spawn, torch.set_num_threads, (1,)) as pool:
        running: dict[Job, Future[Result]] = {}
        while jobs := _missing_jobs(cache, studies):
            if time.monotonic() < cache.deadline:
                for job, run in jobs.items():
                    if job not in running:
                        running[job] = pool.submit(_timed, run, job)
            else:  # runs under way finish, the others do not start
                running = {job: future for job, future in running.items() if not future.cancel()}
            if not running:
                raise OutOfTime
            for job in _done(running):
                try:
                    cache.add(job, running.pop(job).result())
                except OutOfTime:  # its state is stored; the other runs under way end or pause
                    cache.deadline = -math.inf


def _done(running: dict[Job, Future[Result]]) -> Iterator[Job]:
    ended = wait(running.values(), return_when=FIRST_COMPLETED, timeout=1.0).done
    return iter([job for job, future in running.items() if future in ended])


def _timed(run: Run, job: Job) -> Result:
    started = time.monotonic()
    return {**run(job), "seconds": round(time.monotonic() - started, 1)}


def _key(job: dict[str, Any]) -> str:
    """The fields of a job that are not at their defaults, so that new fields keep old results."""
    given = {name: value for name, value in job.items() if value != _DEFAULTS.get(name, _REQUIRED)}
    return json.dumps(given, sort_keys=True)


_REQUIRED = object()
_DEFAULTS = {f.name: f.default for f in fields(Job) if f.default is not MISSING}
