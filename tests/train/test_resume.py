"""A run that is stopped and resumed has the bits of one that was not: every optimiser and device.

A checkpoint lies between two steps, so there is no half-accumulated gradient to save: micro-batches
belong to one step. On a GPU the same laws hold there, with its own attention kernels and compiler.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fenchel.checkpoints import Progress, run_checkpoint
from fenchel.data import Batches
from fenchel.model import ModelConfig, Transformer
from fenchel.optim import OptimConfig, build_optimiser, build_schedule
from fenchel.train import Stepper, TrainConfig
from fenchel.train.loss_scale import LossScale

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
TRUST = {
    "optimiser": "trust",
    "matrix_learning_rate": 0.1,
    "score_rate": 0.01,
    "score_radius": 0.02,  # heads begin outside the ball, so that its bound matters
}
OPTIMISERS: dict[str, dict[str, Any]] = {
    "adamw": {"optimiser": "adamw"},
    "muon": {"optimiser": "muon"},
    "score": {"optimiser": "score"},
    "trust": TRUST,
    "trust with outputs": {**TRUST, "output_change": 0.02},
}
STEPS, SAVED = 6, 3
Start = Callable[..., Stepper]


def start(
    optim: dict[str, Any], seed: int, device: str, *, model: dict[str, Any], **train: Any
) -> Stepper:
    sizes = {"vocabulary": 31, "context": 16, "width": 32, "layers": 2, "heads": 4, "kv_heads": 2}
    config = ModelConfig(**{**sizes, "bias": True, "dropout": 0.1, **model})
    network = Transformer(config, generator=torch.Generator().manual_seed(seed)).to(device)
    ids = np.random.default_rng(0).integers(31, size=600)
    settings = OptimConfig(**optim)
    return Stepper(
        network,
        Batches(ids, batch=4, context=16, seed=1),
        build_optimiser(network, settings, steps=STEPS),
        build_schedule(settings, STEPS),
        config=TrainConfig(
            **{"steps": STEPS, "batch": 4, "accumulate": 2, "precision": "float32", **train}
        ),
        seed=1,
    )


def bits(stepper: Stepper) -> dict[str, Any]:
    """Every tensor of the model and of the optimiser."""
    tensors, rest = run_checkpoint.flatten(stepper.optimiser.state_dict())
    every = {**stepper.model.state_dict(), **tensors}
    return {**{name: t.cpu().clone() for name, t in every.items()}, **rest}


def require_same_bits(whole: Stepper, resumed: Stepper) -> None:
    ends = bits(whole), bits(resumed)
    assert ends[0].keys() == ends[1].keys()
    for name, value in ends[0].items():
        other = ends[1][name]
        same = torch.equal(value, other) if isinstance(value, torch.Tensor) else value == other
        assert same, name


def stopped_and_resumed(begin: Start, folder: Path) -> tuple[Stepper, Stepper]:
    """A run of all steps, and one that goes on from a checkpoint, with other fresh weights."""
    whole, begun, resumed = begin(seed=0), begin(seed=0), begin(seed=7)
    for step in range(STEPS):
        assert whole(step).broken is None
    for step in range(SAVED):
        begun(step)
    factor, age = (None, 0) if begun.scaling is None else begun.scaling.scale
    progress = Progress(step=SAVED, loss_scale=factor, loss_scale_age=age)
    saved = run_checkpoint.save(
        folder, progress, begun.model.state_dict(), begun.optimiser.state_dict(), {}
    )
    progress = run_checkpoint.restore(saved, resumed.model, resumed.optimiser, {})
    if resumed.scaling is not None and progress.loss_scale is not None:
        resumed.scaling.scale = LossScale(progress.loss_scale, progress.loss_scale_age)
    for step in range(SAVED, STEPS):
        resumed(step)
    return whole, resumed


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("choice", ["softmax", "entmax"])
@pytest.mark.parametrize("name", OPTIMISERS)
def test_every_optimiser_resumes_with_the_same_bits(
    name: str, choice: str, device: str, tmp_path: Path
) -> None:
    begin = partial(start, OPTIMISERS[name], device=device, model={"choice": choice})
    require_same_bits(*stopped_and_resumed(begin, tmp_path))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ["muon", "trust with outputs"])
def test_learned_exponents_resume_with_the_same_bits(
    name: str, device: str, tmp_path: Path
) -> None:
    model = {"choice": "entmax", "entmax_alpha_learned": True}
    begin = partial(start, OPTIMISERS[name], device=device, model=model)
    whole, resumed = stopped_and_resumed(begin, tmp_path)
    require_same_bits(whole, resumed)
    fresh = dict(begin(seed=0).model.named_parameters())
    for key, p in whole.model.named_parameters():
        assert "alpha" not in key or not torch.equal(p, fresh[key])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("precision", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", ["score", "trust with outputs"])
def test_half_precision_and_the_loss_scale_resume_with_the_same_bits(
    name: str, precision: str, device: str, tmp_path: Path
) -> None:
    begin = partial(start, OPTIMISERS[name], device=device, model={}, precision=precision)
    whole, resumed = stopped_and_resumed(begin, tmp_path)
    require_same_bits(whole, resumed)
    if precision == "float16":
        assert whole.scaling is not None
        assert resumed.scaling is not None
        assert whole.scaling.scale == resumed.scaling.scale


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ["score", "trust with outputs"])
def test_a_compiled_run_resumes_with_the_same_bits(
    name: str, device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if device == "cpu":  # the graphs and hooks of the compiler without a minute of C++
        monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    torch.compiler.reset()
    model = {"layers": 1, "dropout": 0.0}
    begin = partial(start, OPTIMISERS[name], device=device, model=model, compile=True)
    require_same_bits(*stopped_and_resumed(begin, tmp_path))


@pytest.mark.parametrize("name", OPTIMISERS)
def test_state_is_whole_tensors_in_the_order_of_the_parameters(name: str) -> None:
    """No shape and no key of a checkpoint depends on the number of processes."""
    taken = start(OPTIMISERS[name], seed=0, device="cpu", model={})
    for step in range(2):
        taken(step)
    heads = {"score_bound": (4,), "query_momentum": (4, 8, 33), "key_momentum": (2, 8, 33)}
    seen = set()
    for member, state in taken.optimiser.state_dict().items():
        groups = taken.optimiser.members[int(member)].param_groups
        own = [p for group in groups for p in group["params"]]
        for index, values in state["state"].items():
            for key, value in values.items():
                seen.add(key)
                if key != "step":
                    assert value.shape == heads.get(key, own[index].shape), (member, index, key)
    expected = {"score": set(heads), "trust": {"score_bound"}}.get(OPTIMISERS[name]["optimiser"])
    assert seen >= (expected or {"exp_avg"})
