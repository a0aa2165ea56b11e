"""fenchel/train/step.py: a model is trained by what it offers, not by its class."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fenchel.checkpoints import Progress, run_checkpoint
from fenchel.data import Batches
from fenchel.model import Transformer
from fenchel.optim import OptimConfig, build_optimiser, build_schedule
from fenchel.train import Loop, RunDir, Stepper, Trainable, TrainConfig
from tests.conftest import Ear

V, M = 13, 6


class Bigram(nn.Module):
    """The next token from the last one alone: hidden = E[id], logits = hidden W^T + b."""

    def __init__(self, *, bias: bool, tied: bool) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.table = nn.Embedding(V, M)
        nn.init.normal_(self.table.weight, generator=generator)
        self.head = None if tied else nn.Parameter(0.3 * torch.randn(V, M, generator=generator))
        self.bias = nn.Parameter(torch.zeros(V)) if bias else None

    def forward(self, ids_BT: Tensor, *, return_hidden: bool = False) -> Tensor:
        hidden: Tensor = self.table(ids_BT)
        return hidden if return_hidden else self.logits(hidden)

    def logits(self, x_BTM: Tensor) -> Tensor:
        return nn.functional.linear(x_BTM, self.lm_head_weight, self.bias)

    @property
    def lm_head_weight(self) -> Tensor:
        return self.table.weight if self.head is None else self.head

    @property
    def lm_head_is_linear(self) -> bool:
        return self.bias is None

    @property
    def tied_embedding(self) -> nn.Embedding | None:
        return self.table if self.head is None else None

    def balance(self) -> None:
        return None


def loop_of(model: nn.Module, path: Any, ear: Ear, progress: Progress, **train: Any) -> Loop:
    """Twelve steps on a text in which token n + 1 follows token n."""
    ids = (np.arange(400) % V).astype("uint16")
    optim = OptimConfig(optimiser="adamw", learning_rate=0.1)
    stepper = Stepper(
        model,
        Batches(ids, batch=4, context=8, seed=0),
        build_optimiser(model, optim, steps=12),
        build_schedule(optim, steps=12),
        config=TrainConfig(**{"steps": 12, "batch": 4, "precision": "float32", **train}),
        seed=0,
    )
    return Loop(
        stepper,
        steps=12,
        run=RunDir(path),
        settings={"kind": "bigram"},
        validate=lambda model: {"loss": model(torch.arange(V)[None]).square().mean().item()},
        probe=lambda _: {},
        callback=ear,
        progress=progress,
    )


@pytest.mark.parametrize("loss", ["cross_entropy", "entmax"])
@pytest.mark.parametrize(("bias", "tied"), [(False, False), (True, False), (False, True)])
def test_a_model_of_another_kind_is_trained_stopped_and_resumed_to_the_bit(
    bias: bool, tied: bool, loss: str, tmp_path: Any
) -> None:
    assert not isinstance(Bigram(bias=bias, tied=tied), Transformer)
    runs = {}
    for name in ("whole", "halves"):
        model, ear, path = Bigram(bias=bias, tied=tied), Ear(), tmp_path / name
        RunDir(path).create()
        loop = loop_of(model, path, ear, Progress(), loss=loss, save_every=6)
        if name == "halves":
            loop.steps = 6
            assert loop.train().progress.step == 6
            model = Bigram(bias=bias, tied=tied)
            loop = loop_of(model, path, ear, Progress(), loss=loss, save_every=6)
            folder, _ = run_checkpoint.newest(RunDir(path).checkpoints)
            assert folder is not None
            loop.progress = run_checkpoint.restore(
                folder, model, loop.stepper.optimiser, loop.settings
            )
        assert loop.train().status == "finished"
        runs[name] = model, [line["train/loss"] for line in ear.lines if "train/loss" in line]
    whole, losses = runs["whole"]
    for name, p in runs["halves"][0].named_parameters():
        assert torch.equal(p, whole.get_parameter(name))
    assert losses[-1] < 0.6 * losses[0]  # or nothing was learnt


@pytest.mark.parametrize("accumulate", [1, 2])
def test_its_step_is_that_of_autograd(accumulate: int, tmp_path: Any) -> None:
    model = Bigram(bias=True, tied=False)
    loop = loop_of(model, tmp_path, Ear(), Progress(), accumulate=accumulate, clip=1e9)
    batch = loop.stepper.batches.at(0)
    wanted = nn.functional.cross_entropy(model(batch.inputs).flatten(0, 1), batch.targets.flatten())
    slopes = torch.autograd.grad(wanted, list(model.parameters()))
    result = loop.stepper(0)
    assert result.loss == pytest.approx(wanted.item(), rel=1e-6)
    norm = torch.stack([g.norm() for g in slopes]).norm().item()
    assert result.gradient_norm == pytest.approx(norm, rel=1e-5)


def test_what_a_model_lacks_is_named(small: Callable[..., Any]) -> None:
    class Plain(nn.Linear):
        def logits(self, x: Tensor) -> Tensor:
            return x

    s = small()
    with pytest.raises(TypeError, match="Plain cannot be trained: it lacks lm_head_weight, lm_hea"):
        Stepper(Plain(2, 3), s.batches, s.optimiser, s.stepper.schedule, config=s.config, seed=0)
    assert isinstance(s.model, Trainable)


@pytest.mark.parametrize("settings", [{"qk_clip": 5.0}, {"entropy_floor": 0.5}])
def test_switches_of_attention_refuse_a_model_that_shows_none(
    settings: dict[str, float], tmp_path: Any
) -> None:
    model = Bigram(bias=False, tied=False)
    with pytest.raises(ValueError, match="a model with attention_layers and config, which Big"):
        loop_of(model, tmp_path, Ear(), Progress(), **settings)
