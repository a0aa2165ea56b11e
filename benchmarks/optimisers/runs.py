"""One training run: the model of a ``Job``, trained and measured.

loss         mean over validation bytes, in nats; inf if the run diverged
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

from benchmarks.optimisers.rules import QK_RATE_RULES, RULES, SWITCHES, Rule
from benchmarks.optimisers.run_cache import Job, Result
from benchmarks.optimisers.sizes import SIZES, Size, text
from fenchel.data import Batches
from fenchel.evaluate import attention_health, score
from fenchel.model import ModelConfig, Transformer
from fenchel.optim import CombinedOptimiser, OptimConfig, build_schedule
from fenchel.train import Stepper, TrainConfig

PATIENCE = 3


def rule_of(job: Job) -> Rule:
    """The rule of a job, by its name in the study of the job."""
    return {"switches": SWITCHES, "qk_rate": QK_RATE_RULES}.get(job.study, RULES)[job.rule]


def model_of(job: Job, config: ModelConfig) -> Transformer:
    """A fresh model with the settings of the rule and the seed of the job."""
    config = ModelConfig(**{**asdict(config), **rule_of(job).model})
    device = SIZES[job.size].device
    return Transformer(config, generator=torch.Generator().manual_seed(job.seed)).to(device)


class StudyConfig(OptimConfig):
    """Settings of which the rules of a study read other ones than the optimiser they begin from."""

    USES = ()


def optimiser_of(job: Job, model: nn.Module) -> tuple[CombinedOptimiser, OptimConfig]:
    """The optimiser of the rule, with the settings of the job."""
    rule = rule_of(job)
    config = StudyConfig(
        optimiser=rule.optimiser,
        learning_rate=job.rate,
        matrix_learning_rate=job.rate,
        weight_decay=job.decay,
        momentum=job.momentum,
        score_rate=job.change,
        score_radius=job.radius,
        score_opening=0.0,
        score_damping=job.damping,
        schedule="linear",
        warmup=0.1,
    )
    return rule.build(model, config), config


def steps_of(
    job: Job, model: Transformer, batches: Any, steps: int, **train: Any
) -> Iterator[float]:
    """Train, and yield the loss of every step; inf ends a run that diverged."""
    size = SIZES[job.size]
    optimiser, config = optimiser_of(job, model)
    switches = rule_of(job).train
    torch.compiler.reset()  # graphs of earlier models would only add guard checks
    settings = {"precision": size.precision, "exact": False, **switches, **train}
    settings["compile"] = size.device == "cuda" and not switches  # they observe the forward pass
    stepper = Stepper(
        model,
        batches,
        optimiser,
        build_schedule(config, steps),
        config=TrainConfig(steps=steps, batch=size.batch, **settings),
        seed=job.seed,
    )
    broken = 0
    for step in range(steps):
        result = stepper(step)
        broken = broken + 1 if result.broken else 0
        if broken == PATIENCE:
            yield math.inf
            return
        yield result.loss


def train_on(job: Job, model: Transformer, source: str, steps: int) -> Result:
    """Train on a text and measure on its validation bytes."""
    size = SIZES[job.size]
    ids, validation = text(source, size.bytes)
    batches = Batches(ids, batch=size.batch, context=size.model.context, seed=job.seed)
    (last,) = deque(steps_of(job, model, batches, steps), 1)
    return measure(model, validation, size) if math.isfinite(last) else diverged()


def measure(model: Transformer, validation: Any, size: Size) -> Result:
    """Loss, largest score and lowest entropy on validation bytes."""
    part, context = validation[: size.validation], size.model.context
    loss = score(model, part, bytes=len(part), context=context).loss
    device = next(model.parameters()).device
    sample = torch.from_numpy(part[: 2 * context].astype(np.int64)).view(2, context)
    health = attention_health(model, sample.to(device))
    return {
        "loss": round(loss, 5) if math.isfinite(loss) else math.inf,
        "max_logit": round(max(health["attention/max_logit"]), 2),
        "min_entropy": round(min(map(min, health["attention/head_entropy"])), 3),
    }


def diverged() -> Result:
    """The result of a run whose loss was not finite three times in a row."""
    return {"loss": math.inf, "max_logit": math.inf, "min_entropy": 0.0}


def train_from_scratch(job: Job) -> Result:
    """A fresh model trained on the messages of presidents."""
    size = SIZES[job.size]
    return train_on(job, model_of(job, size.model), "sotu", size.steps)
