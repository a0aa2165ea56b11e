"""One training run: the model of a ``Job``, trained and measured.

loss         mean over validation bytes, in nats; inf if the run diverged
max_logit    largest |score| of any head on a validation batch
min_entropy  lowest mean entropy of a head there
ms_per_step  median over the steps of a run of a given length; with several workers the runs slow
             each other down, and ``measure_pace`` does not
"""

import math
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from torch import nn

from benchmarks.optimisers.rules import (
    CONTEST,
    OUTPUT_RULES,
    QK_RATE_RULES,
    RULES,
    SWITCHES,
    Rule,
)
from benchmarks.optimisers.run_cache import Job, OutOfTime, Pause, Result
from benchmarks.optimisers.sizes import SIZES, Size, fresh_text, text, text_hash
from fenchel.data import Batches
from fenchel.evaluate import attention_health, score
from fenchel.model import ModelConfig, Transformer
from fenchel.optim import CombinedOptimiser, OptimConfig, build_schedule
from fenchel.train import Stepper, TrainConfig

PATIENCE = 3


def rule_of(job: Job) -> Rule:
    """The rule of a job, by its name in the study of the job."""
    own = {
        "switches": SWITCHES,
        "qk_rate": QK_RATE_RULES,
        "finetune": {**RULES, **OUTPUT_RULES},
        **dict.fromkeys(("search", "pace", "contest"), CONTEST),
    }
    return own.get(job.study, RULES)[job.rule]


def model_of(job: Job, config: ModelConfig) -> Transformer:
    """A fresh model with the settings of the rule and the seed of the job."""
    own = {} if job.initial is None else {"initial": job.initial}
    config = ModelConfig(**{**asdict(config), **rule_of(job).model, **own})
    device = SIZES[job.size].device
    return Transformer(config, generator=torch.Generator().manual_seed(job.seed)).to(device)


class StudyConfig(OptimConfig):
    """Settings of which the rules of a study read other ones than the optimiser they begin from."""

    USES = ()


def optimiser_of(
    job: Job, model: nn.Module, steps: int | None = None
) -> tuple[CombinedOptimiser, OptimConfig]:
    """The optimiser of the rule, with the settings of the job, for a run of ``steps`` steps."""
    rule = rule_of(job)
    own: dict[str, Any] = {}
    if job.radius is not None:
        own |= {"score_radius": job.radius, "score_opening": 0.0}
    if job.damping is not None:
        own["score_damping"] = job.damping
    if job.total is not None:
        own["score_total"] = job.total
    config = StudyConfig(
        optimiser=rule.optimiser,
        learning_rate=job.rate if job.other_rate is None else job.other_rate,
        matrix_learning_rate=job.rate,
        beta2=job.beta2,
        weight_decay=job.decay,
        momentum=job.momentum,
        score_rate=job.change,
        schedule="linear",
        warmup=job.warmup,
        **own,
        **rule.optim,
    )
    return rule.build(model, config, steps=steps), config


def stepper_of(job: Job, model: Transformer, batches: Any, steps: int, **train: Any) -> Stepper:
    """What takes the steps of a job."""
    size = SIZES[job.size]
    optimiser, config = optimiser_of(job, model, steps)
    switches = rule_of(job).train
    torch.compiler.reset()  # graphs of earlier models would only add guard checks
    settings = {"precision": size.precision, "deterministic": False, **switches, **train}
    # the switches observe the forward pass
    settings |= dict.fromkeys(("compile", "cuda_graph"), size.device == "cuda" and not switches)
    return Stepper(
        model,
        batches,
        optimiser,
        build_schedule(config, steps),
        config=TrainConfig(steps=steps, batch=job.batch or size.batch, **settings),
        seed=job.seed,
    )


def steps_of(
    job: Job, model: Transformer, batches: Any, steps: int, **train: Any
) -> Iterator[float]:
    """Train, and yield the loss of every step; inf ends a run that diverged."""
    stepper, broken = stepper_of(job, model, batches, steps, **train), 0
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


def train_at_length(pause: Pause, job: Job) -> Result:
    """A fresh model trained for the steps of the job, or on from where ``pause`` stopped it."""
    size, steps = SIZES[job.size], job.steps
    assert steps is not None
    ids, held_out = fresh_text(job.text, size.bytes)
    if job.study == "search":  # settings are chosen on other bytes than they are compared on
        _, held_out = text(job.text, size.bytes)
    model = model_of(job, size.model)
    batch, context = job.batch or size.batch, size.model.context
    batches = Batches(ids, batch=batch, context=context, seed=job.seed)
    stepper, file = stepper_of(job, model, batches, steps), pause.file(job)
    about = {
        "text_sha256": text_hash(job.text, size.bytes),
        "epochs": round(steps * batch * context / len(ids), 2),
    }
    state = _resume(file, stepper, about["text_sha256"])
    while state["step"] < steps:
        started = time.perf_counter()
        result = stepper(state["step"])
        state["ms"].append(1e3 * (time.perf_counter() - started))
        state["step"] += 1
        state["broken"] = state["broken"] + 1 if result.broken else 0
        if state["broken"] == PATIENCE:
            break
        if pause.due() and state["step"] < steps:
            _store(file, stepper, {**state, "text_sha256": about["text_sha256"]})
            raise OutOfTime
    file.unlink(missing_ok=True)
    ms = {"ms_per_step": round(median(state["ms"]), 2)}
    ended = diverged() if state["broken"] == PATIENCE else measure(model, held_out, size)
    return {**ended, **about, **ms}


def measure_pace(job: Job) -> Result:
    """Milliseconds per step, and bytes of the state of the optimiser per parameter.

    The median of blocks of steps, so that what a rule does every ten steps counts. On a CPU it is
    the time of the processor, which is less disturbed by what else runs; give it one thread.
    """
    size = SIZES[job.size]
    ids, _ = fresh_text(job.text, size.bytes)
    model = model_of(job, size.model)
    batches = Batches(ids, batch=job.batch or size.batch, context=size.model.context, seed=job.seed)
    block, blocks = size.pace_steps, 5
    stepper = stepper_of(job, model, batches, block * (blocks + 1))
    on_gpu = size.device == "cuda"
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    clock = time.perf_counter if on_gpu else time.process_time
    times = [0.0] * blocks
    for n in range(-1, blocks):
        started = clock()
        for step in range(block):
            stepper((n + 1) * block + step)
        if on_gpu:
            torch.cuda.synchronize()
        if n >= 0:  # the first block compiles
            times[n] = 1e3 * (clock() - started) / block
    state = [
        value
        for member in stepper.optimiser.members
        for values in member.state.values()
        for value in values.values()
        if isinstance(value, torch.Tensor)
    ]
    numbers = sum(p.numel() for p in model.parameters())
    peak = torch.cuda.max_memory_allocated() / 2**30 if on_gpu else None
    return {
        "ms_per_step": round(median(times), 3),
        "ms_spread": round(max(times) - min(times), 3),
        "state_bytes": round(sum(value.nbytes for value in state) / numbers, 2),
        "peak_gib": peak and round(peak, 3),
        "parameters": numbers,
    }


def _store(file: Path, stepper: Stepper, state: Result) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    part = file.with_suffix(".part")  # a call that is killed while it writes leaves the old file
    torch.save(
        {
            **state,
            "model": stepper.model.state_dict(),
            "optimiser": stepper.optimiser.state_dict(),
        },
        part,
    )
    part.replace(file)


def _resume(file: Path, stepper: Stepper, text_sha256: str) -> dict[str, Any]:
    """The steps taken, non-finite losses in a row and times; of a run of another text, none."""
    if file.exists():
        saved = torch.load(file, map_location="cpu", weights_only=True)
        if saved.pop("text_sha256") == text_sha256:
            stepper.model.load_state_dict(saved.pop("model"))
            stepper.optimiser.load_state_dict(saved.pop("optimiser"))
            return dict(saved)
    return {"step": 0, "broken": 0, "ms": []}


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
