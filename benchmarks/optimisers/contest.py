"""The contest: every rule at its own best settings, per step, per second and per byte of state.

1. *Pace.* Milliseconds per step and memory of every rule, alone on the machine (``--workers 1``).
2. *Search.* Coordinate search on seed 0, measured on bytes that the comparison does not use:
   along one field of a ``Job`` after the other, both neighbours of the best value so far are tried
   until none is better, then the next field, round and round until a whole round gains nothing or
   the runs of the size are used up. All rules have the same number of runs at most; a row says how
   many there were and whether the search ended by itself.
3. *Comparison.* Held-out seeds and bytes, each run to the end of its own schedule. "steps" gives
   every rule the steps of the row; "time" gives it as many as take the time of REFERENCE at that
   length, at the pace of 1. Gains are over REFERENCE at the same length on the same seed, with
   their standard error, the deviation of the gains over the root of their number.

A text is read once at most: ``epochs`` of the results is below 1 where the sizes are as they are.
"""

import math
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from statistics import fmean, stdev
from typing import Any, NamedTuple

from benchmarks.optimisers.rules import CONTEST, REFERENCE
from benchmarks.optimisers.run_cache import Job, Result, RunCache
from benchmarks.optimisers.runs import measure_pace, train_at_length
from benchmarks.optimisers.sizes import SIZES

RATIOS = {"rate": 1.5, "other_rate": 2.0}
GRID: dict[str, tuple[Any, ...]] = {
    "decay": (0.0, 0.03, 0.1, 0.3, 1.0, 3.0),
    "momentum": (0.8, 0.9, 0.95, 0.98),
    "beta2": (0.9, 0.95, 0.98),
    "warmup": (0.02, 0.1, 0.25),
    "initial": ("zero", "xavier"),
    "total": (1.1, 1.6, 2.3, 3.2, 4.5),
}
"""Values of the fields that are no rates, in order."""
Row = dict[str, Any]


class Bout(NamedTuple):
    """A row of the contest."""

    rule: str
    text: str
    steps: int
    by: str


class Found(NamedTuple):
    """The result of a search."""

    job: Job
    runs: int
    """Of all searches up to it: those at the lengths and sizes before it too."""
    finished: bool
    """Whether no move gained any more; False where the runs were used up."""


def bouts(size: str) -> list[Bout]:
    """Rows in the order of the size, equal steps before equal time."""
    return [
        Bout(rule, text, steps, by)
        for text, steps, _ in SIZES[size].contest
        for by in ("steps", "time")
        for rule in CONTEST
    ]


def pace(runs: RunCache, size: str, rule: str) -> Row:
    """Time and memory of a rule."""
    text, *_ = SIZES[size].contest[0]
    (result,) = runs([_first(size, rule, text, study="pace")], measure_pace)
    return {"rule": rule, **{key: value for key, value in result.items() if key != "seconds"}}


def pace_cases(size: str) -> Iterable[str]:
    """The rules, where there is a contest."""
    return CONTEST if SIZES[size].contest else ()


def contest(runs: RunCache, size: str, bout: Bout) -> Row:
    """Losses of a rule on fresh seeds beside REFERENCE, with what it took to find its settings."""
    found = search(runs, size, bout.rule, bout.text, bout.steps)
    reference = search(runs, size, REFERENCE, bout.text, bout.steps)
    paces = {rule: pace(runs, size, rule) for rule in (bout.rule, REFERENCE)}
    share = paces[REFERENCE]["ms_per_step"] / paces[bout.rule]["ms_per_step"]
    steps = max(2, round(bout.steps * share)) if bout.by == "time" else bout.steps
    results = _on_seeds(runs, replace(found.job, steps=steps))
    losses, others = _losses(results), _losses(_on_seeds(runs, reference.job))
    gains = [a - b for a, b in zip(others, losses, strict=True)]
    own = RATIOS.keys() | GRID.keys()
    return {
        **bout._asdict(),
        "steps_taken": steps,
        "epochs": results[0]["epochs"],
        "losses": losses,
        "loss": round(fmean(losses), 4),
        "gain": round(fmean(gains), 4),
        "error": round(stdev(gains) / math.sqrt(len(gains)), 4) if len(gains) > 1 else None,
        "ms_per_step": paces[bout.rule]["ms_per_step"],
        "state_bytes": paces[bout.rule]["state_bytes"],
        "peak_gib": paces[bout.rule]["peak_gib"],
        "max_logit": max(result["max_logit"] for result in results),
        "search_runs": found.runs,
        "search_ended": found.finished,
        "settings": " ".join(
            f"{key}={getattr(found.job, key)}" for key in CONTEST[bout.rule].tunes if key in own
        ),
        "text_sha256": results[0]["text_sha256"],
    }


def search(runs: RunCache, size: str, rule: str, text: str, steps: int) -> Found:
    """The settings of a rule at a row of the size, by coordinate search from the row before."""
    rows = SIZES[size].contest
    row = next(n for n, (t, s, _) in enumerate(rows) if (t, s) == (text, steps))
    limit = rows[row][2]
    if row > 0:
        before = search(runs, size, rule, *rows[row - 1][:2])
        start = replace(before.job, text=text, steps=steps)
    elif (origin := SIZES[size].contest_from) is not None:
        elsewhere = RunCache(runs.path.with_name(f"optim_{origin[0]}.jsonl"), minutes=0.0)
        before = search(elsewhere, origin[0], rule, *origin[1:])
        start = replace(before.job, size=size, text=text, steps=steps)
    else:
        before = Found(_first(size, rule, text), 0, finished=True)
        start = replace(before.job, steps=steps)
    if limit == 0:
        return before._replace(job=start)
    best, count, ended = coordinate_search(runs, start, CONTEST[rule].tunes, limit)
    return Found(best, before.runs + count, before.finished and ended)


def coordinate_search(
    runs: RunCache, start: Job, fields: Iterable[str], limit: int
) -> tuple[Job, int, bool]:
    """The best job found, the runs that took, and whether nothing gained any more."""

    def losses_of(jobs: list[Job]) -> list[float]:
        return _losses(runs(jobs, partial(train_at_length, runs.pause)))

    best, seen, gained = start, {start}, True
    least = losses_of([start])[0]
    while gained:
        gained = False
        for name in fields:
            while fresh := [job for job in neighbours(best, name) if job not in seen]:
                fresh = fresh[: limit - len(seen)]
                if not fresh:
                    return best, len(seen), False
                seen |= set(fresh)
                loss, near = min(zip(losses_of(fresh), fresh, strict=True), key=lambda p: p[0])
                if loss >= least:
                    break
                best, least, gained = near, loss, True
    return best, len(seen), True


def neighbours(job: Job, name: str) -> list[Job]:
    """The job with the next smaller and the next larger value of a field."""
    value = getattr(job, name)
    if name in RATIOS:
        first = _first_rate(job.size, job.rule, name)  # one grid: a way back meets what was run
        at = round(math.log(value / first, RATIOS[name]))
        around = [float(f"{first * RATIOS[name] ** (at + by):.4g}") for by in (1, -1)]
    else:
        values = GRID[name]
        at = values.index(value)
        around = [values[n] for n in (at + 1, at - 1) if 0 <= n < len(values)]
    return [replace(job, **{name: near}) for near in around]


def _first(size: str, rule: str, text: str, study: str = "search") -> Job:
    """Where the search of a rule begins at the first row of a size."""
    given = {"rate": 0.0, "radius": None, "damping": None, "change": None, "total": 2.3}
    given |= CONTEST[rule].starts
    given |= {name: float(f"{_first_rate(size, rule, name):.4g}") for name in RATIOS}
    if "total" not in CONTEST[rule].tunes:
        given["total"] = None
    return Job(study=study, size=size, rule=rule, seed=0, text=text, **given)


def _first_rate(size: str, rule: str, name: str) -> float:
    """The first value of a rate; on spheres it is relative, and the same at every size."""
    if name == "rate":
        on_sphere = "initial" in CONTEST[rule].tunes
        return CONTEST[rule].rate * (1.0 if on_sphere else SIZES[size].scale)
    return float(CONTEST[rule].starts[name]) * SIZES[size].scale


def _on_seeds(runs: RunCache, job: Job) -> list[Result]:
    jobs = [replace(job, study="contest", seed=seed) for seed in SIZES[job.size].contest_seeds]
    return runs(jobs, partial(train_at_length, runs.pause))


def _losses(results: list[Result]) -> list[float]:
    """Losses, at most that of a uniform prediction, which also replaces nan."""
    worst = round(math.log(256.0), 5)
    return [min(r["loss"], worst) if r["loss"] == r["loss"] else worst for r in results]
