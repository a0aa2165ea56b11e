"""One training run: what a ``Job`` says, trained and measured.

loss         mean over validation bytes, in nats; inf when the run broke off
max_logit    largest |score| of any head on a validation batch
min_entropy  lowest mean entropy of a head there
"""

import math
from collections import deque
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import numpy as np
import torch
from torch import nn

from benchmarks.optimisers.ledger import Job, Result
from benchmarks.optimisers.rules import HASTENED, RULES, SWITCHES, Rule
from benchmarks.optimisers.sizes import SIZES, Size, text
from fenchel.data import Batches
from fenchel.evaluate import attention_health, score
from fenchel.model import ModelConfig, Transformer
from fenchel.optim import CombinedOptimiser, OptimConfig, build_schedule
from fenchel.train import Stepper, TrainConfig

PATIENCE = 3


def rule_of(job: Job) -> Rule:
    """What the job's rule stands for in its study."""
    return {"switches": SWITCHES, "haste": HASTENED}.get(job.study, RULES)[job.rule]


def model_of(job: Job, config: ModelConfig) -> Transformer:
    """A fresh model of the rule's kind, drawn from the job's seed."""
    config = ModelConfig(**{**asdict(config), **rule_of(job).model})
    device = SIZES[job.size].device
    return Transformer(config, generator=torch.Generator().manual_seed(job.seed)).to(device)


def optimiser_of(job: Job, model: nn.Module) -> tuple[CombinedOptimiser, OptimConfig]:
    """The rule at the job's rate and decay."""
    rule = rule_of(job)
    config = OptimConfig(
        optimiser=rule.optimiser,
        learning_rate=job.rate,
        matrix_learning_rate=job.rate,
        weight_decay=job.decay,
        momentum=job.momentum,
        score_rate=job.change,
        score_radius=job.radius,
        score_damping=job.damping,
        schedule="linear",
        warmup=0.1,
    )
    return rule.build(model, config), config


def steps_of(
    job: Job, model: Transformer, batches: Any, steps: int, **train: Any
) -> Iterator[float]:
    """Train; the loss of every step, and inf as the last when the run broke off."""
    size = SIZES[job.size]
    optimiser, config = optimiser_of(job, model)
    switches = rule_of(job).train
    torch.compiler.reset()  # what was compiled for another run's model only costs checks
    settings = {"precision": size.precision, "exact": False, **switches, **train}
    settings["compile"] = size.device == "cuda" and not switches  # which look into the pass
    take = Stepper(
        model,
        batches,
        optimiser,
        build_schedule(config, steps),
        config=TrainConfig(steps=steps, batch=size.batch, **settings),
        seed=job.seed,
    )
    broken = 0
    for step in range(steps):
        taken = take(step)
        broken = broken + 1 if taken.broken else 0
        if broken == PATIENCE:
            yield math.inf
            return
        yield taken.loss


def train_on(job: Job, model: Transformer, source: str, steps: int) -> Result:
    """Train on a text and measure on its validation part."""
    size = SIZES[job.size]
    ids, held = text(source, size.bytes)
    batches = Batches(ids, batch=size.batch, context=size.model.context, seed=job.seed)
    (last,) = deque(steps_of(job, model, batches, steps), 1)
    return measured(model, held, size) if math.isfinite(last) else broken_off()


def measured(model: Transformer, held: Any, size: Size) -> Result:
    """Loss, largest score and lowest entropy on validation bytes."""
    part, context = held[: size.validation], size.model.context
    loss = score(model, part, bytes=len(part), context=context).loss
    device = next(model.parameters()).device
    sample = torch.from_numpy(part[: 2 * context].astype(np.int64)).view(2, context)
    health = attention_health(model, sample.to(device))
    return {
        "loss": round(loss, 5) if math.isfinite(loss) else math.inf,
        "max_logit": round(max(health["attention/max_logit"]), 2),
        "min_entropy": round(min(map(min, health["attention/head_entropy"])), 3),
    }


def broken_off() -> Result:
    """What is known of a run whose loss was not finite three times in a row."""
    return {"loss": math.inf, "max_logit": math.inf, "min_entropy": 0.0}


def fresh(job: Job) -> Result:
    """A model trained from nothing on the messages."""
    size = SIZES[job.size]
    return train_on(job, model_of(job, size.model), "sotu", size.steps)
