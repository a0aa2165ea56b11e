"""The studies. Each gives a table with one row of plain numbers per rule.

    tuned      every rule at its best rate, on a grid of ratio 1.5, its best decay and the best of
               its other settings, all tuned on seed 0; then measured on fresh seeds beside Muon
    switches   means that keep Muon stable, over one and a half decades around Muon's best rate;
               sensitivity is the mean loss over the rates less the smallest (Wortsman et al., 2023)
    finetune   a checkpoint trained by Muon without QK-norm, fine-tuned on another text at 1 to 30
               times the best rate of each rule, alone, within ScoreTrust, and with its limit on
               the outputs of all layers
    qk_rate    the same with only queries and keys at 1 to 30 times the rate and the rest at the
               best rate: the part of the damage that ScoreTrust can prevent
    copy       steps until the second half of "abc abc" is predicted at 0.5 nats
    lengths    rules at one setting each, the defaults for what moves queries and keys, over lengths
               of the run, two texts and fresh seeds; nothing is tuned. Gains are over Muon and over
               Muon + QK-norm on the same seed. A row per rule, text and length
    rates      the rules of ``lengths`` over one and a half decades of rates, on its first seed, in
               runs that are longer than those of ``switches``
    pace       milliseconds per step and memory of the rules of the contest, each alone
    contest    the rules of 2026, each tuned by itself, at equal steps and at equal time: contest.py

A loss counts as at most log 256, that of a uniform prediction.
"""

import copy as copying
import math
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import cache, partial
from statistics import fmean, median, stdev
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from benchmarks.optimisers import contest as contests
from benchmarks.optimisers.rules import (
    COPY_RULES,
    FINETUNE_RULES,
    LENGTH_RULES,
    OUTPUT_RULES,
    RATE_FACTORS,
    RATE_RULES,
    RULES,
    SWITCHES,
    inside_trust,
)
from benchmarks.optimisers.run_cache import Job, Result, Run, RunCache
from benchmarks.optimisers.runs import (
    measure,
    measure_pace,
    model_of,
    steps_of,
    train_at_length,
    train_from_scratch,
    train_on,
)
from benchmarks.optimisers.sizes import SIZES, text
from fenchel.data import Batch
from fenchel.model import Transformer

RATIO = 1.5
SWITCH_FACTORS = (10**-0.5, 1.0, 10**0.5, 10.0)
UNIFORM = math.log(256.0)
TUNED_FIELDS = ("decay", "radius", "damping", "change", "momentum")
TARGET = 0.5

Row = dict[str, Any]


class Study(NamedTuple):
    """A function that gives a row of the table, and what gets one at a size."""

    row: Callable[[RunCache, str, Any], Row]
    """Cache, size and case to a row of the table."""
    cases: Callable[[str], Iterable[Any]]
    """Size to cases: rules, or rules with a text and a length."""


def tuned(runs: RunCache, size: str, name: str) -> Row:
    """The tuned settings of a rule, and its losses on fresh seeds."""
    best, muon = tune(runs, size, name), tune(runs, size, "muon")
    results = _on_seeds(runs, best)
    losses = _losses(results)
    gains = [a - b for a, b in zip(_losses(_on_seeds(runs, muon)), losses, strict=True)]
    return {
        "rule": name,
        "rate": best.rate,
        **{key: getattr(best, key) if key in RULES[name].tunes else None for key in TUNED_FIELDS},
        "losses": losses,
        "loss": round(fmean(losses), 4),
        "gain_over_muon": round(fmean(gains), 4),
        "spread_of_gain": round(stdev(gains), 4) if len(gains) > 1 else None,
        "max_logit": max(result["max_logit"] for result in results),
        "min_entropy": min(result["min_entropy"] for result in results),
    }


def tune(runs: RunCache, size: str, name: str) -> Job:
    """Tune the rate on the grid, from the initial one outwards; then the other settings."""
    rule, max_rates = RULES[name], SIZES[size].max_rates

    def job(n: int) -> Job:
        rate = float(f"{SIZES[size].scale * rule.rate * RATIO**n:.4g}")
        return Job(study="tuned", size=size, rule=name, rate=rate, seed=0)

    def best_of(jobs: list[Job]) -> Job:
        losses = _losses(runs(jobs, train_from_scratch))
        return min(zip(losses, jobs, strict=True), key=lambda pair: pair[0])[1]

    if max_rates == 1:
        return best_of([job(0)])
    low, high = -1, 1
    while high - low + 1 < max_rates:
        best = best_of([job(n) for n in range(low, high + 1)])
        if best not in (job(low), job(high)):
            break
        low, high = (low - 1, high) if best == job(low) else (low, high + 1)
    best = best_of([job(n) for n in range(low, high + 1)])
    for key in rule.tunes:
        best = best_of(
            [replace(best, **{key: value}) for value in SIZES[size].grid.get(key, ())] or [best]
        )
    return best


def switches(runs: RunCache, size: str, name: str) -> Row:
    """Losses and largest scores of a rule over rates."""
    best = tune(runs, size, "muon")
    jobs = [
        replace(best, study="switches", rule=name, rate=_rounded(best.rate * times), seed=1)
        for times in SWITCH_FACTORS
    ]
    return {"switch": name, **_over_rates(jobs, runs(jobs, train_from_scratch))}


def _over_rates(jobs: list[Job], results: list[Result]) -> Row:
    losses = _losses(results)
    return {
        "rates": [job.rate for job in jobs],
        "losses": losses,
        "sensitivity": round(fmean(losses) - min(losses), 4),
        "max_logits": [result["max_logit"] for result in results],
    }


def finetune(runs: RunCache, size: str, name: str) -> Row:
    """Losses on the other text over rates, and the loss of the checkpoint there."""
    base = _finetune_job(runs, size, name, "finetune")
    jobs = [replace(base, rule=name, rate=_rounded(base.rate * times)) for times in RATE_FACTORS]
    return _finetune_row(runs, name, jobs, rates=[job.rate for job in jobs])


def qk_rate(runs: RunCache, size: str, name: str) -> Row:
    """The same over rates of queries and keys alone."""
    base = _finetune_job(runs, size, name, "qk_rate")
    jobs = [replace(base, rule=f"{name} x{times:g}") for times in RATE_FACTORS]
    return _finetune_row(runs, name, jobs, times=list(RATE_FACTORS))


def _finetune_job(runs: RunCache, size: str, name: str, study: str) -> Job:
    """A job that continues Muon's checkpoint at the best rate of the rule, without its ball."""
    origin = tune(runs, size, "muon")
    start = (origin.rate, origin.decay, origin.momentum)
    bare = tune(runs, size, inside_trust(name))
    return replace(bare, study=study, start=start, seed=1)


def _finetune_row(runs: RunCache, name: str, jobs: list[Job], **along: list[float]) -> Row:
    no_steps = replace(jobs[0], study="finetune", rule="muon", rate=0.0, decay=0.0)
    (before,) = runs([no_steps], evaluate_checkpoint)
    results = runs(jobs, finetune_checkpoint)
    losses = _losses(results)
    return {
        "rule": name,
        **along,
        "before": before["loss"],
        "losses": losses,
        "excess": round(max(losses) - min(losses), 4),
        "max_logits": [result["max_logit"] for result in results],
    }


def copy(runs: RunCache, size: str, name: str) -> Row:
    """Steps to the target for every seed, and the loss at the end."""
    best = tune(runs, size, name)
    jobs = [replace(best, study="copy", seed=seed) for seed in SIZES[size].copy_seeds]
    results = runs(jobs, train_to_copy)
    reached = [result["reached"] for result in results]
    return {
        "rule": name,
        "rate": best.rate,
        "reached": reached,
        "mean": round(fmean(reached), 1) if None not in reached else None,
        "losses": [result["loss"] for result in results],
    }


class Case(NamedTuple):
    """A row of the study of lengths."""

    rule: str
    text: str
    steps: int


def length_cases(size: str) -> list[Case]:
    """Short runs first, so that a study that is stopped has whole tables of them."""
    return [
        Case(rule, text, steps)
        for steps in SIZES[size].lengths
        for text in ("sotu", "code")
        for rule in LENGTH_RULES
    ]


def rate_cases(size: str) -> list[Case]:
    """Rules on two texts at one length."""
    steps = SIZES[size].rate_steps
    texts = () if steps is None else ("sotu", "code")
    return [Case(rule, text, steps or 0) for text in texts for rule in RATE_RULES]


def lengths(runs: RunCache, size: str, case: Case) -> Row:
    """Losses of a rule on one text at one length, beside Muon and Muon + QK-norm."""
    results = _at_length(runs, size, case)
    losses = _losses(results)
    row = {
        **case._asdict(),
        "batch": SIZES[size].length_batches.get(case.steps, SIZES[size].batch),
        "epochs": results[0]["epochs"],
        "losses": losses,
        "loss": round(fmean(losses), 4),
    }
    for name, base in (("muon", "muon"), ("qk_norm", "muon + qk-norm")):
        others = _losses(_at_length(runs, size, case._replace(rule=base)))
        gains = [a - b for a, b in zip(others, losses, strict=True)]
        row[f"gain_over_{name}"] = round(fmean(gains), 4)
        row[f"spread_over_{name}"] = round(stdev(gains), 4) if len(gains) > 1 else None
    hashes = {result["text_sha256"] for result in results}
    return {
        **row,
        "max_logit": max(result["max_logit"] for result in results),
        "ms_per_step": round(median(result["ms_per_step"] for result in results), 1),
        "text_sha256": hashes.pop() if len(hashes) == 1 else "several texts",
    }


def rates(runs: RunCache, size: str, case: Case) -> Row:
    """Losses and largest scores of a rule on one text over rates."""
    jobs = rate_jobs(size, case)
    return {**case._asdict(), **_over_rates(jobs, runs(jobs, partial(train_at_length, runs.pause)))}


def rate_jobs(size: str, case: Case) -> list[Job]:
    """The job of the first seed at every rate."""
    first = replace(length_jobs(size, case)[0], batch=SIZES[size].rate_batch)
    return [replace(first, rate=_rounded(first.rate * times)) for times in SWITCH_FACTORS]


def _at_length(runs: RunCache, size: str, case: Case) -> list[Result]:
    return runs(length_jobs(size, case), partial(train_at_length, runs.pause))


def length_jobs(size: str, case: Case) -> list[Job]:
    """A job per fresh seed, at the defaults of what moves queries and keys."""
    defaults = {"radius": None, "damping": None, "change": None}
    batch = SIZES[size].length_batches.get(case.steps)
    given = {**case._asdict(), "batch": batch, **SIZES[size].fixed, **defaults}
    return [
        Job(study="lengths", size=size, seed=seed, **given)  # type: ignore[arg-type]
        for seed in SIZES[size].length_seeds
    ]


STUDIES = {
    "tuned": Study(tuned, lambda _: RULES),
    "switches": Study(switches, lambda _: SWITCHES),
    "finetune": Study(finetune, lambda _: (*FINETUNE_RULES, *OUTPUT_RULES)),
    "qk_rate": Study(qk_rate, lambda _: FINETUNE_RULES),
    "copy": Study(copy, lambda _: COPY_RULES),
    "lengths": Study(lengths, length_cases),
    "rates": Study(rates, rate_cases),
    "pace": Study(contests.pace, contests.pace_cases),
    "contest": Study(contests.contest, contests.bouts),
}


def run_of(job: Job, cache: RunCache) -> Run:
    """The function that computes the result of a job."""
    if job.study in ("lengths", "rates", "search", "contest"):
        return partial(train_at_length, cache.pause)
    if job.study == "finetune" and job.rate == 0.0:
        return evaluate_checkpoint
    return {
        "pace": measure_pace,
        "copy": train_to_copy,
        "finetune": finetune_checkpoint,
        "qk_rate": finetune_checkpoint,
    }.get(job.study, train_from_scratch)


def _on_seeds(runs: RunCache, best: Job) -> list[Result]:
    return runs([replace(best, seed=seed) for seed in SIZES[best.size].seeds], train_from_scratch)


def _losses(results: list[Result]) -> list[float]:
    """Losses, at most that of a uniform prediction, which also replaces nan."""
    worst = round(UNIFORM, 5)
    return [min(r["loss"], worst) if r["loss"] == r["loss"] else worst for r in results]


def _rounded(rate: float) -> float:
    return float(f"{rate:.4g}")


# --- runs of the studies of fine-tuning and copying


@cache
def checkpoint(size: str, rate: float, decay: float, momentum: float) -> Transformer:
    """A model trained by Muon without QK-norm, in this process."""
    job = Job(
        study="tuned", size=size, rule="muon", rate=rate, decay=decay, momentum=momentum, seed=0
    )
    model = model_of(job, SIZES[size].model)
    train_on(job, model, "sotu", SIZES[size].steps)
    return model


def evaluate_checkpoint(job: Job) -> Result:
    """The loss of the checkpoint on the other text, before fine-tuning."""
    assert job.start is not None
    size = SIZES[job.size]
    return measure(checkpoint(job.size, *job.start), text("kjv", size.bytes)[1], size)


def finetune_checkpoint(job: Job) -> Result:
    """The checkpoint fine-tuned on the other text by the rule of the job."""
    assert job.start is not None
    model = copying.deepcopy(checkpoint(job.size, *job.start))
    return train_on(job, model, "kjv", max(1, SIZES[job.size].steps // 3))


class Copies:
    """Batches of random letters followed by the same letters, by step, from a seed."""

    def __init__(self, *, batch: int, context: int, letters: int, seed: int) -> None:
        self.batch, self.half, self.letters, self.seed = batch, context // 2, letters, seed

    def at(self, step: int) -> Batch:
        """The batch of a step; targets from ``half`` on can be predicted."""
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + step)
        once = torch.randint(self.letters, (self.batch, self.half), generator=generator)
        twice = torch.cat((once, once, once[:, :1]), 1)
        return Batch(twice[:, :-1], twice[:, 1:])


def train_to_copy(job: Job) -> Result:
    """Train two layers to copy: the step that reaches the target, and the last loss."""
    size = SIZES[job.size]
    context = min(64, size.model.context)
    model = model_of(job, replace(size.model, layers=2, vocabulary=32, context=context))
    batches = Copies(batch=size.batch, context=context, letters=32, seed=job.seed)
    fresh_batch = Copies(batch=64, context=context, letters=32, seed=10**6 + job.seed).at(0)
    reached, last, every = None, math.inf, max(1, size.copy_steps // 60)
    for step, loss in enumerate(steps_of(job, model, batches, size.copy_steps), 1):
        if step % every == 0 or step == size.copy_steps:
            last = repeated_loss(model, fresh_batch) if math.isfinite(loss) else math.inf
            if reached is None and last < TARGET:
                reached = step
    return {"reached": reached, "loss": round(last, 4)}


@torch.no_grad()
def repeated_loss(model: Transformer, batch: Batch) -> float:
    """Mean loss on the second half of the sequences."""
    device = next(model.parameters()).device
    logits: Tensor = model.eval()(batch.inputs.to(device))
    half = batch.targets.shape[1] // 2
    targets = batch.targets[:, half:].to(device)
    return cross_entropy(logits[:, half:].float().flatten(0, 1), targets.flatten()).item()
