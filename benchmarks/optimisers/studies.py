"""The five studies: a row of plain numbers for every rule, one a line of its table.

    tuned      every rule at its own best rate, on a grid of ratio 1.5, its own best decay and what
               else it tunes, all found on seed 0; then on fresh seeds, beside Muon on the same
    switches   what keeps Muon stable, over one and a half decades around Muon's best rate;
               sensitivity is the mean loss over the rates less the best of them (Wortsman et al.,
               2023)
    finetune   a checkpoint trained by Muon without QK-norm, continued on another text at 1 to 30
               times each rule's best rate, bare and within ScoreTrust
    haste      the same with only queries and keys at 1 to 30 times the rate, the rest at the best:
               what ScoreTrust can answer for
    copy       steps until the second half of "abc abc" is predicted at 0.5 nats

A loss counts at most log 256, that of knowing nothing.
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

from benchmarks.optimisers.ledger import Job, Ledger, Result
from benchmarks.optimisers.rules import COPIERS, FINETUNED, FURTHER, RULES, SWITCHES
from benchmarks.optimisers.runs import fresh, measured, model_of, steps_of, train_on
from benchmarks.optimisers.sizes import SIZES, text
from fenchel.data import Batch
from fenchel.model import Transformer

RATIO = 1.5
TIMES = (10**-0.5, 1.0, 10**0.5, 10.0)
NOTHING = math.log(256.0)
TUNED = ("decay", "radius", "damping", "change", "momentum")
TARGET = 0.5

Row = dict[str, Any]


class Study(NamedTuple):
    """A row for every rule."""

    row: Callable[[Ledger, str, str], Row]
    """Ledger, size and rule to a line of the table."""
    rules: Iterable[str]


def tuned(ledger: Ledger, size: str, name: str) -> Row:
    """Its best rate and decay, and its losses on fresh seeds."""
    best, bare = tune(ledger, size, name), tune(ledger, size, "muon")
    found = _on_seeds(ledger, best)
    losses = _losses(found)
    gains = [a - b for a, b in zip(_losses(_on_seeds(ledger, bare)), losses, strict=True)]
    return {
        "rule": name,
        "rate": best.rate,
        **{key: getattr(best, key) if key in RULES[name].tunes else None for key in TUNED},
        "losses": losses,
        "loss": round(fmean(losses), 4),
        "gain_over_muon": round(fmean(gains), 4),
        "spread_of_gain": round(stdev(gains), 4) if len(gains) > 1 else None,
        "max_logit": max(result["max_logit"] for result in found),
        "min_entropy": min(result["min_entropy"] for result in found),
    }


def tune(ledger: Ledger, size: str, name: str) -> Job:
    """The best rate on the grid, walking from a first guess; then what else the rule tunes."""
    rule, most = RULES[name], SIZES[size].most

    def job(n: int) -> Job:
        rate = float(f"{SIZES[size].scale * rule.rate * RATIO**n:.4g}")
        return Job(study="tuned", size=size, rule=name, rate=rate, seed=0)

    def best_of(jobs: list[Job]) -> Job:
        losses = _losses(ledger(jobs, fresh))
        return min(zip(losses, jobs, strict=True), key=lambda pair: pair[0])[1]

    if most == 1:
        return best_of([job(0)])
    low, high = -1, 1
    while high - low + 1 < most:
        best = best_of([job(n) for n in range(low, high + 1)])
        if best not in (job(low), job(high)):
            break
        low, high = (low - 1, high) if best == job(low) else (low, high + 1)
    best = best_of([job(n) for n in range(low, high + 1)])
    for key in rule.tunes:
        best = best_of(
            [replace(best, **{key: to}) for to in SIZES[size].tries.get(key, ())] or [best]
        )
    return best


def switches(ledger: Ledger, size: str, name: str) -> Row:
    """Losses and largest scores over rates."""
    best = tune(ledger, size, "muon")
    jobs = [
        replace(best, study="switches", rule=name, rate=_rounded(best.rate * times), seed=1)
        for times in TIMES
    ]
    found = ledger(jobs, fresh)
    losses = _losses(found)
    return {
        "switch": name,
        "rates": [job.rate for job in jobs],
        "losses": losses,
        "sensitivity": round(fmean(losses) - min(losses), 4),
        "max_logits": [result["max_logit"] for result in found],
    }


def finetune(ledger: Ledger, size: str, name: str) -> Row:
    """Losses on the other text over rates, and what the checkpoint had there."""
    base = _continued(ledger, size, name, "finetune")
    jobs = [replace(base, rule=name, rate=_rounded(base.rate * times)) for times in FURTHER]
    return _over(ledger, name, jobs, rates=[job.rate for job in jobs])


def haste(ledger: Ledger, size: str, name: str) -> Row:
    """The same over rates of queries and keys alone."""
    base = _continued(ledger, size, name, "haste")
    jobs = [replace(base, rule=f"{name} x{times:g}") for times in FURTHER]
    return _over(ledger, name, jobs, times=list(FURTHER))


def _continued(ledger: Ledger, size: str, name: str, study: str) -> Job:
    """A job that continues Muon's checkpoint at the best rate of the rule, without its ball."""
    origin = tune(ledger, size, "muon")
    start = (origin.rate, origin.decay, origin.momentum)
    bare = tune(ledger, size, name.removeprefix("trust(").removesuffix(")"))
    return replace(bare, study=study, start=start, seed=1)


def _over(ledger: Ledger, name: str, jobs: list[Job], **along: list[float]) -> Row:
    still = replace(jobs[0], study="finetune", rule="muon", rate=0.0, decay=0.0)
    (before,) = ledger([still], started)
    found = ledger(jobs, continued)
    losses = _losses(found)
    return {
        "rule": name,
        **along,
        "before": before["loss"],
        "losses": losses,
        "excess": round(max(losses) - min(losses), 4),
        "max_logits": [result["max_logit"] for result in found],
    }


def copy(ledger: Ledger, size: str, name: str) -> Row:
    """Steps to the target for every seed, and the loss at the end."""
    best = tune(ledger, size, name)
    jobs = [replace(best, study="copy", seed=seed) for seed in SIZES[size].copy_seeds]
    found = ledger(jobs, copied)
    reached = [result["reached"] for result in found]
    return {
        "rule": name,
        "rate": best.rate,
        "reached": reached,
        "mean": round(fmean(reached), 1) if None not in reached else None,
        "losses": [result["loss"] for result in found],
    }


STUDIES = {
    "tuned": Study(tuned, RULES),
    "switches": Study(switches, SWITCHES),
    "finetune": Study(finetune, FINETUNED),
    "haste": Study(haste, FINETUNED),
    "copy": Study(copy, COPIERS),
}


def _on_seeds(ledger: Ledger, best: Job) -> list[Result]:
    return ledger([replace(best, seed=seed) for seed in SIZES[best.size].seeds], fresh)


def _losses(found: list[Result]) -> list[float]:
    """Losses that count at most as knowing nothing; one that is no number counts so too."""
    worst = round(NOTHING, 5)
    return [min(r["loss"], worst) if r["loss"] == r["loss"] else worst for r in found]


def _rounded(rate: float) -> float:
    return float(f"{rate:.4g}")


# --- runs of the last studies


@cache
def checkpoint(size: str, rate: float, decay: float, momentum: float) -> Transformer:
    """A model trained by Muon without QK-norm, in this process."""
    job = Job(
        study="tuned", size=size, rule="muon", rate=rate, decay=decay, momentum=momentum, seed=0
    )
    model = model_of(job, SIZES[size].model)
    train_on(job, model, "sotu", SIZES[size].steps)
    return model


def started(job: Job) -> Result:
    """What the checkpoint knows of the other text."""
    assert job.start is not None
    size = SIZES[job.size]
    return measured(checkpoint(job.size, *job.start), text("kjv", size.bytes)[1], size)


def continued(job: Job) -> Result:
    """The checkpoint trained on the other text by the job's rule."""
    assert job.start is not None
    model = copying.deepcopy(checkpoint(job.size, *job.start))
    return train_on(job, model, "kjv", max(1, SIZES[job.size].steps // 3))


class Copies:
    """Random letters, then the same again; as many steps as wanted, from a seed."""

    def __init__(self, *, batch: int, context: int, letters: int, seed: int) -> None:
        self.batch, self.half, self.letters, self.seed = batch, context // 2, letters, seed

    def at(self, step: int) -> Batch:
        """The batch of a step; the targets from ``half`` on can be known."""
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + step)
        once = torch.randint(self.letters, (self.batch, self.half), generator=generator)
        twice = torch.cat((once, once, once[:, :1]), 1)
        return Batch(twice[:, :-1], twice[:, 1:])


def copied(job: Job) -> Result:
    """Train two layers to copy; when it is done, and how well in the end."""
    size = SIZES[job.size]
    context = min(64, size.model.context)
    model = model_of(job, replace(size.model, layers=2, vocabulary=32, context=context))
    batches = Copies(batch=size.batch, context=context, letters=32, seed=job.seed)
    fresh_batch = Copies(batch=64, context=context, letters=32, seed=10**6 + job.seed).at(0)
    reached, left, every = None, math.inf, max(1, size.copy_steps // 60)
    for step, loss in enumerate(steps_of(job, model, batches, size.copy_steps), 1):
        if step % every == 0 or step == size.copy_steps:
            left = repeated_loss(model, fresh_batch) if math.isfinite(loss) else math.inf
            if reached is None and left < TARGET:
                reached = step
    return {"reached": reached, "loss": round(left, 4)}


@torch.no_grad()
def repeated_loss(model: Transformer, batch: Batch) -> float:
    """Mean loss of the second half."""
    device = next(model.parameters()).device
    logits: Tensor = model.eval()(batch.inputs.to(device))
    half = batch.targets.shape[1] // 2
    wanted = batch.targets[:, half:].to(device)
    return cross_entropy(logits[:, half:].float().flatten(0, 1), wanted.flatten()).item()
