"""The five studies. Each gives a table with one row of plain numbers per rule.

    tuned      every rule at its best rate, on a grid of ratio 1.5, its best decay and the best of
               its other settings, all tuned on seed 0; then measured on fresh seeds beside Muon
    switches   means that keep Muon stable, over one and a half decades around Muon's best rate;
               sensitivity is the mean loss over the rates less the smallest (Wortsman et al., 2023)
    finetune   a checkpoint trained by Muon without QK-norm, fine-tuned on another text at 1 to 30
               times the best rate of each rule, alone and within ScoreTrust
    qk_rate    the same with only queries and keys at 1 to 30 times the rate and the rest at the
               best rate: the part of the damage that ScoreTrust can prevent
    copy       steps until the second half of "abc abc" is predicted at 0.5 nats

A loss counts as at most log 256, that of a uniform prediction.
"""

import copy as copying
import math
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import cache
from statistics import fmean, stdev
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from benchmarks.optimisers.rules import COPY_RULES, FINETUNE_RULES, RATE_FACTORS, RULES, SWITCHES
from benchmarks.optimisers.run_cache import Job, Result, RunCache
from benchmarks.optimisers.runs import measure, model_of, steps_of, train_from_scratch, train_on
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
    """A function that gives a row of the table, and the rules that get one."""

    row: Callable[[RunCache, str, str], Row]
    """Cache, size and rule to a row of the table."""
    rules: Iterable[str]


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
    results = runs(jobs, train_from_scratch)
    losses = _losses(results)
    return {
        "switch": name,
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
    bare = tune(runs, size, name.removeprefix("trust(").removesuffix(")"))
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


STUDIES = {
    "tuned": Study(tuned, RULES),
    "switches": Study(switches, SWITCHES),
    "finetune": Study(finetune, FINETUNE_RULES),
    "qk_rate": Study(qk_rate, FINETUNE_RULES),
    "copy": Study(copy, COPY_RULES),
}


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
