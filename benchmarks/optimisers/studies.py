"""The four studies. Each gives rows of plain numbers, one a line of its table.

    tuned      every rule at its own best rate, on a grid of ratio 1.5, and its own best decay, both
               found on seed 0; then on fresh seeds, beside Muon on the same seeds
    switches   what keeps Muon stable, at 1, 3 and 10 times Muon's best rate; sensitivity is the
               mean loss over the rates less the best of them (Wortsman et al., 2023)
    finetune   a checkpoint trained by Muon without QK-norm, continued on another text at 1 to 30
               times each rule's best rate, bare and within ScoreTrust
    copy       steps until the second half of "abc abc" is predicted at 0.5 nats

A loss counts at most log 256, that of knowing nothing.
"""

import copy as copying
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from statistics import fmean, stdev
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from benchmarks.optimisers.rules import COPIERS, FINETUNED, RULES, SWITCHES
from benchmarks.optimisers.runs import Job, Ledger, fresh, measured, model_of, steps_of, train_on
from benchmarks.optimisers.sizes import SIZES, text
from fenchel.data import Batch
from fenchel.model import Transformer

RATIO = 1.5
DECAYS = (0.0, 0.1, 0.3)
TIMES = (1.0, 3.0, 10.0)
FURTHER = (1.0, 3.0, 10.0, 30.0)
NOTHING = math.log(256.0)
TARGET = 0.5

Row = dict[str, Any]


def tuned(ledger: Ledger, size: str) -> Iterator[Row]:
    """A row a rule: its best rate and decay, and its losses on fresh seeds."""
    bare = _fresh_losses(ledger, size, "muon")
    for name in RULES:
        best = tune(ledger, size, name)
        found = [ledger(replace(best, seed=seed), fresh) for seed in SIZES[size].seeds]
        losses = [known(result["loss"]) for result in found]
        gains = [a - b for a, b in zip(bare, losses, strict=True)]
        yield {
            "rule": name,
            "rate": best.rate,
            "decay": best.decay,
            "losses": losses,
            "loss": round(fmean(losses), 4),
            "gain_over_muon": round(fmean(gains), 4),
            "spread_of_gain": round(stdev(gains), 4) if len(gains) > 1 else None,
            "max_logit": max(result["max_logit"] for result in found),
            "min_entropy": min(result["min_entropy"] for result in found),
        }


def tune(ledger: Ledger, size: str, name: str) -> Job:
    """The best rate on the grid, walking from the rule's first guess; then the best decay."""
    most = SIZES[size].most

    def job(n: int, decay: float = 0.1) -> Job:
        rate = float(f"{RULES[name].rate * RATIO**n:.4g}")
        return Job(study="tuned", size=size, rule=name, rate=rate, seed=0, decay=decay)

    def loss(job: Job) -> float:
        return known(ledger(job, fresh)["loss"])

    tried = {0: loss(job(0))}
    while len(tried) < most:
        best = min(tried, key=lambda n: tried[n])
        beside = [n for n in (best + 1, best - 1) if n not in tried]
        if not beside:
            break
        tried[beside[0]] = loss(job(beside[0]))
    best = min(tried, key=lambda n: tried[n])
    decays = DECAYS if most > 1 else (0.1,)
    return min((job(best, decay) for decay in decays), key=loss)


def _fresh_losses(ledger: Ledger, size: str, name: str) -> list[float]:
    best = tune(ledger, size, name)
    seeds = SIZES[size].seeds
    return [known(ledger(replace(best, seed=seed), fresh)["loss"]) for seed in seeds]


def switches(ledger: Ledger, size: str) -> Iterator[Row]:
    """A row a switch: losses and largest scores over rates."""
    best = tune(ledger, size, "muon")
    for name in SWITCHES:
        jobs = [
            replace(best, study="switches", rule=name, rate=best.rate * times, seed=1)
            for times in TIMES
        ]
        found = [ledger(job, fresh) for job in jobs]
        losses = [known(result["loss"]) for result in found]
        yield {
            "switch": name,
            "rates": [job.rate for job in jobs],
            "losses": losses,
            "sensitivity": round(fmean(losses) - min(losses), 4),
            "max_logits": [result["max_logit"] for result in found],
        }


def finetune(ledger: Ledger, size: str) -> Iterator[Row]:
    """A row a rule: losses on the other text over rates, and what the checkpoint had there."""
    start = tune(ledger, size, "muon")

    @cache
    def checkpoint() -> Transformer:
        model = model_of(start, SIZES[size].model)
        train_on(start, model, "sotu", SIZES[size].steps)
        return model

    def before(_: Job) -> Row:
        return measured(checkpoint(), text("kjv", SIZES[size].bytes)[1], SIZES[size])

    def go_on(job: Job) -> Row:
        return train_on(job, copying.deepcopy(checkpoint()), "kjv", max(1, SIZES[size].steps // 3))

    at_first = ledger(replace(start, study="finetune", rule="muon", rate=0.0), before)
    for name in FINETUNED:
        base = tune(ledger, size, name.removeprefix("trust(").removesuffix(")"))
        jobs = [
            replace(base, study="finetune", rule=name, rate=base.rate * times, seed=1)
            for times in FURTHER
        ]
        found = [ledger(job, go_on) for job in jobs]
        yield {
            "rule": name,
            "rates": [job.rate for job in jobs],
            "before": at_first["loss"],
            "losses": [known(result["loss"]) for result in found],
            "max_logits": [result["max_logit"] for result in found],
        }


def copy(ledger: Ledger, size: str) -> Iterator[Row]:
    """A row a rule: steps to the target for every seed, and the loss at the end."""
    for name in COPIERS:
        best = tune(ledger, size, name)
        jobs = [replace(best, study="copy", seed=seed) for seed in SIZES[size].copy_seeds]
        found = [ledger(job, copied) for job in jobs]
        reached = [result["reached"] for result in found]
        yield {
            "rule": name,
            "rate": best.rate,
            "reached": reached,
            "mean": round(fmean(reached), 1) if None not in reached else None,
            "losses": [result["loss"] for result in found],
        }


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


def copied(job: Job) -> Row:
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


def known(loss: float) -> float:
    """A loss that counts at most as knowing nothing; one that is no number counts so too."""
    return min(loss, round(NOTHING, 5)) if loss == loss else round(NOTHING, 5)


STUDIES: dict[str, Callable[[Ledger, str], Iterator[Row]]] = {
    "tuned": tuned,
    "switches": switches,
    "finetune": finetune,
    "copy": copy,
}
