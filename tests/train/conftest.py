"""A training run of two thousand parameters, for every test that needs one."""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fenchel.checkpoints import Progress, run_checkpoint
from fenchel.data import Batches
from fenchel.model import ModelConfig, Transformer
from fenchel.optim import OptimConfig, build_beta2, build_optimiser, build_schedule
from fenchel.train import Loop, RunDir, Stepper, TrainConfig

MODEL = ModelConfig(vocabulary=31, context=8, width=8, layers=2, heads=2, dropout=0.1)


class Ear:
    """A callback that remembers, and does something at a chosen step."""

    def __init__(self) -> None:
        self.steps: list[int] = []
        self.lines: list[Mapping[str, Any]] = []
        self.said: list[str] = []
        self.at: dict[int, Callable[[], object]] = {}

    def step(self, step: int, steps: int) -> None:
        assert step <= steps
        self.steps.append(step)
        self.at.get(step, lambda: None)()

    def log(self, metrics: Mapping[str, Any]) -> None:
        self.lines.append(metrics)

    def message(self, text: str) -> None:
        self.said.append(text)


class Small:
    """A run directory and the parts of a run; ``loop`` goes on from the newest checkpoint."""

    def __init__(
        self,
        path: Path,
        *,
        model: ModelConfig = MODEL,
        optim: Mapping[str, Any] | None = None,
        seed: int = 1,
        probe: Callable[..., Mapping[str, Any]] = lambda *_: {},
        **train: Any,
    ) -> None:
        settings = {"steps": 12, "batch": 4, "save_every": 3, "log_every": 2, "evaluate_every": 4}
        self.config = TrainConfig(**{**settings, "threads": 1, "precision": "float32", **train})
        self.settings = {"width": model.width, "heads": model.heads}
        self.seed, self.probe, self.ear = seed, probe, Ear()
        self.run = RunDir(path)
        if not path.exists():
            self.run.create()
        drawn = np.random.default_rng(0).integers(model.vocabulary, size=200)
        self.batches = Batches(
            drawn.astype("uint16"), batch=self.config.batch, context=model.context, seed=seed
        )
        self.optim = OptimConfig(**(optim or {}))
        self.model = Transformer(model, generator=torch.Generator().manual_seed(seed))
        self.optimiser = build_optimiser(self.model, self.optim)
        self.stepper = Stepper(
            self.model,
            self.batches,
            self.optimiser,
            build_schedule(self.optim, self.steps),
            config=self.config,
            seed=seed,
            beta2=build_beta2(self.optim),
        )

    @property
    def steps(self) -> int:
        assert self.config.steps is not None
        return self.config.steps

    def loop(self) -> Loop:
        folder, wrong = run_checkpoint.newest(self.run.checkpoints)
        assert not wrong
        progress = Progress()
        if folder is not None:
            progress = run_checkpoint.restore(folder, self.model, self.optimiser, self.settings)
        self.run.rewind(progress.metrics_bytes)
        return Loop(
            self.stepper,
            steps=self.steps,
            run=self.run,
            settings=self.settings,
            validate=self.validate,
            probe=self.probe,
            callback=self.ear,
            progress=progress,
        )

    @torch.no_grad()
    def validate(self, model: torch.nn.Module) -> Mapping[str, float]:
        logits = model(self.batches.at(0).inputs)
        return {"loss": float(logits.square().mean())}

    def bits(self) -> dict[str, bytes]:
        """Every tensor of the model and the optimiser, as bytes."""
        tensors, _ = run_checkpoint.flatten(self.optimiser.state_dict())
        every = {**self.model.state_dict(), **tensors}
        return {name: tensor.numpy().tobytes() for name, tensor in every.items()}


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Callable[..., Small]]:
    """``small(name="run", **train)``: a run in its own folder; the same name goes on with it."""

    def build(name: str = "run", **settings: Any) -> Small:
        return Small(tmp_path / name, **settings)

    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # two thousand parameters gain nothing from more
    yield build
    torch.set_num_threads(threads)
