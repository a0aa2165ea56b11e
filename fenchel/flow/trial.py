"""What a run needs before it begins: a device, room on the disk, its pace and so its steps."""

from dataclasses import replace

import numpy as np
import torch

from fenchel.data import Batches, Ids
from fenchel.files import require_space
from fenchel.flow.config import RunConfig, Watch, settings
from fenchel.model import Transformer
from fenchel.optim import build_optimiser, constant
from fenchel.train import Pace, RunDir, Stepper, measure, seconds

EVALUATION_SHARE = 0.1
"""Part of a time budget that is left to evaluations and checkpoints."""


def batches_of(config: RunConfig, ids: Ids) -> Batches:
    """The batches of a run: nothing but the seed decides their order."""
    return Batches(ids, batch=config.train.batch, context=config.model.context, seed=config.seed)


def model_of(config: RunConfig) -> Transformer:
    """A fresh model of a run: nothing but the seed decides its weights."""
    return Transformer(config.model, generator=torch.Generator().manual_seed(config.seed))


def device_of(name: str) -> torch.device:
    """The device of that name, if it can be used here."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(f"device={name!r} cannot be used here: {reason}") from None
    return torch.device(name)


def require_room(config: RunConfig, run: RunDir) -> None:
    """Refuse to train where not even one checkpoint fits: weights, and two moments of each."""
    with torch.device("meta"):
        parameters = Transformer(config.model).parameters()
    weights = sum(p.numel() * p.element_size() for p in parameters)
    require_space(run.path, int(1.2 * 3 * weights) + 2**20)


def resolve(config: RunConfig, batches: Batches, watch: Watch) -> RunConfig:
    """Threads and, from a time budget, steps: measured once, then part of the settings."""
    pace, parameters = _trial(config, batches)
    steps = config.train.steps
    if steps is None:
        budget = seconds(config.train.budget or "")
        steps = max(1, int(budget * (1.0 - EVALUATION_SHARE) / pace.seconds))
    watch.say(
        f"{parameters:,} parameters; {1e3 * pace.seconds:.0f} ms a step with "
        f"{pace.threads} threads; {steps:,} steps."
    )
    return replace(config, train=replace(config.train, threads=pace.threads, steps=steps))


def _trial(config: RunConfig, batches: Batches) -> tuple[Pace, int]:
    """How fast steps of this run are, on a model that is thrown away, and its parameters."""
    model = model_of(config).to(device_of(config.train.device))
    take = Stepper(
        model,
        batches,
        build_optimiser(model, config.optim),
        constant(),
        config=config.train,
        seed=config.seed,
    )
    pace = measure(lambda: take(0), threads=config.train.threads)
    return pace, sum(p.numel() for p in model.parameters())


def speed() -> tuple[Pace, int]:
    """The pace of the default run on random tokens, and the tokens of one of its steps."""
    config = settings({})
    size = config.train.batch * config.model.context
    ids = np.random.default_rng(0).integers(config.model.vocabulary, size=2 * size)
    return _trial(config, batches_of(config, ids))[0], size
