"""fenchel/pipeline/lipschitz.py: train.lipschitz holds at every step, and is certified again."""

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
from fenchel.pipeline.lipschitz import REQUIRED, LipschitzCap, branches, default_settings
from fenchel.sensitivity.layers import LinearLayer, NormLayer, Residual
from fenchel.sensitivity.token_lipschitz import logit_bound, token_bound
from tests.pipeline.conftest import Remembering

KNOWN = default_settings(24)
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
        {"positions": "learned", "kv_heads": 4, "epsilon": 0.1, "logit_scale": 0.5},
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


def test_settings_that_are_given_stay_and_unknown_constants_are_refused() -> None:
    lipschitz = {"train": {"lipschitz": 10.0}}
    model = pipeline.settings({**lipschitz, "model": {"epsilon": 0.5, "mlp": "relu"}}).model
    assert (model.epsilon, model.mlp, model.tied) == (0.5, "relu", False)
    assert model.score_scale == 1.0 / model.width
    assert pipeline.settings({}).model.epsilon == 1e-5
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
    with pytest.raises(ValueError, match="in one process"):
        pipeline.begin(
            pipeline.settings({"train": {"lipschitz": 1.0, "cells": 2}}), Path("x"), Remembering()
        )
