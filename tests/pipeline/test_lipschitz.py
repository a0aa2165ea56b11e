"""fenchel/pipeline/lipschitz.py: train.lipschitz holds at every step, and is certified again."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from fenchel import pipeline
from fenchel.checkpoints import load_model, run_checkpoint
from fenchel.files import read_sealed_json
from fenchel.inspection import certify_constant
from fenchel.model import Transformer
from fenchel.pipeline.lipschitz import (
    REQUIRED,
    LipschitzCap,
    SpectralCap,
    branches,
    default_settings,
)
from fenchel.sensitivity.layers import LinearLayer, NormLayer, Residual
from fenchel.sensitivity.token_lipschitz import logit_bound, token_bound
from fenchel.train.loss import lower_targets, total_loss
from tests.pipeline.conftest import Remembering

KNOWN = default_settings({"width": 24})
MODEL = {"context": 16, "width": 16, "heads": 2, "layers": 2}
TRAIN = {"batch": 4, "steps": 12, "threads": 1, "precision": "float32", "save_every": 5}


def config_of(text: Path, **train: Any) -> pipeline.RunConfig:
    sections: Mapping[str, Any] = {
        "text": {"vocabulary": 280, "source": str(text)},
        "model": MODEL,
        "train": {**TRAIN, **train},
    }
    return pipeline.settings(sections)


@torch.no_grad()
def certified_constant(model: Transformer) -> float:
    """The constant from the branches that the cap itself measures."""
    scale, last = model.config.branch_scale, model.norm
    assert isinstance(last, torch.nn.LayerNorm | torch.nn.RMSNorm)
    kind = "layer" if isinstance(last, torch.nn.LayerNorm) else "rms"
    norm = NormLayer(last.weight, getattr(last, "bias", None), last.eps, kind)
    stages = [Residual(branch.layer, scale=scale) for branch in branches(model)]
    head = LinearLayer(model.config.logit_scale * model.lm_head_weight.double().mT)
    return logit_bound([*stages, norm], head, model.config.width)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"mlp": "swiglu", "norm": "layer", "norm_parameters": "all", "bias": True},
        {
            "positions": "learned",
            "initial_distances": False,
            "mlp": "gelu",
            "kv_heads": 4,
            "epsilon": 0.1,
            "logit_scale": 0.5,
        },
        {"positions": "rotary", "initial_distances": False, "score_scale": None},
    ],
)
def test_any_weights_are_scaled_to_the_constant_and_then_left_alone(
    build: Callable[..., Transformer], ids: torch.Tensor, changes: dict[str, Any]
) -> None:
    model = build(**{**KNOWN, **changes}).float()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3.0)
    for limit in (100.0, 2.0, 0.5):
        cap = LipschitzCap(model, limit)
        cap()
        constant = certified_constant(model)
        assert 0.0 < constant <= limit
        assert certify_constant(model, ids[0]).certified == pytest.approx(constant, rel=1e-6)
        gains = [float(token_bound(b.layer, model.config.width).gain) for b in branches(model)]
        assert max(gains) <= cap.branch_limit
        if not model.config.gated:  # whose gain is a product of three norms and falls further
            assert max(gains) > 0.999 * cap.branch_limit
        before = {name: x.clone() for name, x in model.state_dict().items()}
        cap()
        assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items())
        X = model.config.embedding_scale * model.embed.weight
        assert float(X.detach().norm(dim=-1).amax()) <= model.config.width**0.5


def test_a_run_keeps_the_constant_reports_it_and_resumes_with_the_same_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = tmp_path / "text.txt"
    text.write_text("she sells sea shells on the sea shore;\n" * 60)
    steps: list[float] = []
    capped = LipschitzCap.__call__

    def measured(self: LipschitzCap) -> None:
        capped(self)
        steps.append(certified_constant(self.model))

    monkeypatch.setattr(LipschitzCap, "__call__", measured)
    whole = Remembering()
    pipeline.begin(config_of(text, lipschitz=3.0), tmp_path / "whole", whole)
    monkeypatch.undo()
    assert len(steps) == 13
    assert max(steps) <= 3.0
    found = read_sealed_json(tmp_path / "whole" / "summary.json")["lipschitz"]
    model = load_model(tmp_path / "whole", which="newest")
    again = certify_constant(model, torch.arange(16))
    assert again.certified == pytest.approx(found["certified"], rel=1e-6)
    assert again.attacked <= again.certified
    assert 0.1 < found["attacked"] <= min(again.certified, found["certified"]) <= 3.0
    assert any("certified" in message for message in whole.messages)
    page = (tmp_path / "whole" / "report.html").read_text()
    assert "Lipschitz constant" in page
    assert "Largest stretch" in page
    with pytest.raises(RuntimeError, match="killed"):
        pipeline.begin(config_of(text, lipschitz=3.0), tmp_path / "stopped", Remembering(8))
    pipeline.resume(tmp_path / "stopped", Remembering(), changes={})
    assert bits(tmp_path / "stopped") == bits(tmp_path / "whole")


def bits(run: Path) -> dict[str, bytes]:
    folder, _ = run_checkpoint.newest(run / "checkpoints")
    assert folder is not None
    return {file.name: file.read_bytes() for file in folder.glob("*.safetensors")}


def test_a_loss_with_a_margin_bounds_the_loss_of_every_text_within_its_radius(
    build: Callable[..., Transformer], ids: torch.Tensor
) -> None:
    limit, radius = 3.0, 0.2
    model = build(**KNOWN).double().requires_grad_(False)
    for parameter in model.parameters():
        parameter.mul_(3.0)
    LipschitzCap(model, limit)()
    inputs, targets = ids[:, :-1], ids[:, 1:]
    move = torch.zeros(*inputs.shape, model.config.width, dtype=torch.float64, requires_grad=True)
    model.blocks[0].register_forward_pre_hook(lambda _, args: (args[0] + move, *args[1:]))
    plain = total_loss(logits := model(inputs), targets)
    bound = total_loss(lower_targets(logits, targets, 2.0 * limit * radius), targets)
    for _ in range(5):  # ascent over moves of every token by the radius
        (slope,) = torch.autograd.grad(total_loss(model(inputs), targets), move)
        move.data = radius * slope / slope.norm(dim=-1, keepdim=True)
    attacked = total_loss(model(inputs), targets)
    assert 1.02 * plain < attacked <= bound
    assert bound <= plain + targets.numel() * 2.0 * limit * radius


def test_training_with_a_margin_has_the_loss_of_its_radius(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("she sells sea shells on the sea shore;\n" * 60)
    first = []
    for number, margin in enumerate((0.0, 0.1)):
        config = config_of(text, lipschitz=3.0, certify_margin=margin, log_every=1, steps=2)
        pipeline.begin(config, tmp_path / str(number), Remembering())
        lines = (tmp_path / str(number) / "metrics.jsonl").read_text().splitlines()
        first.append(json.loads(lines[0])["train/loss"])
    assert 0.1 < first[1] - first[0] < 2.0 * 3.0 * 0.1
    with pytest.raises(ValueError, match=r"certify_margin.*lipschitz"):
        pipeline.settings({"train": {"certify_margin": 0.1}})


def test_a_spectral_cap_reduces_what_is_above_it_and_nothing_else(
    build: Callable[..., Transformer],
) -> None:
    model = build(kv_heads=2).float()
    cap = SpectralCap(model, 1.5)
    sizes = [torch.linalg.svdvals(matrix.detach().double()) for matrix in cap.matrices]
    assert len(sizes) == 7 * model.config.layers  # q, k, v, out, gate, up and down
    assert any(float(s[0]) > 1.5 > float(s[-1]) for s in sizes)
    cap()
    for matrix, before in zip(cap.matrices, sizes, strict=True):
        after = torch.linalg.svdvals(matrix.detach().double())
        assert float(after[0]) <= 1.5
        torch.testing.assert_close(after, before.clamp(max=1.5), rtol=1e-3, atol=1e-3)
    kept = [matrix.clone() for matrix in cap.matrices]
    cap()
    assert all(map(torch.equal, cap.matrices, kept))


def test_a_run_keeps_its_spectral_cap(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("she sells sea shells on the sea shore;\n" * 60)
    pipeline.begin(config_of(text, spectral_cap=0.4), tmp_path / "run", Remembering())
    cap = SpectralCap(load_model(tmp_path / "run", which="newest"), 0.4)
    norms = [float(torch.linalg.matrix_norm(W.detach().double(), 2)) for W in cap.matrices]
    assert 0.39 < max(norms) <= 0.4


def test_settings_that_are_given_stay_and_unknown_constants_are_refused() -> None:
    lipschitz = {"train": {"lipschitz": 10.0}}
    model = pipeline.settings({**lipschitz, "model": {"epsilon": 0.5, "mlp": "relu"}}).model
    assert (model.epsilon, model.mlp, model.tied) == (0.5, "relu", False)
    assert model.score_scale == 1.0 / model.width
    assert pipeline.settings({}).model.epsilon == 1e-5
    rotary = pipeline.settings({**lipschitz, "model": {"positions": "rotary", "heads": 8}}).model
    assert (rotary.positions, rotary.heads, rotary.initial_distances) == ("rotary", 8, False)
    values: Mapping[str, Any] = {
        "tied": True,
        "choice": "sparsemax",
        "mlp": "relu2",
        "norm_place": "post",
        "scores": "l2",
        "qk_norm": True,
        "experts": 4,
        "softcap": 30.0,
    }
    assert values.keys() <= REQUIRED.keys()
    for name, value in values.items():
        with pytest.raises(ValueError, match=rf"no Lipschitz constant for model\.{name}="):
            pipeline.settings({**lipschitz, "model": {name: value}})
    with pytest.raises(ValueError, match=r"lipschitz=-1\.0 should be above 0"):
        pipeline.settings({"train": {"lipschitz": -1}})
    capped = {"train": {"spectral_cap": 1.0}}
    assert pipeline.settings(capped).model.norm_parameters == "none"
    with pytest.raises(ValueError, match="choose one"):
        pipeline.settings({**capped, "model": {"sigma_reparam": True}})
    with pytest.raises(ValueError, match="choose one"):
        pipeline.settings({"train": {"spectral_cap": 1.0, "lipschitz": 1.0}})
    with pytest.raises(ValueError, match="in one process"):
        pipeline.begin(
            pipeline.settings({"train": {"lipschitz": 1.0, "cells": 2}}), Path("x"), Remembering()
        )
