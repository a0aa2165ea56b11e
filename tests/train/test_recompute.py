"""train.recompute: steps of the same bits as those that keep all activations."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters

from fenchel.model import ModelConfig
from fenchel.optim import OptimConfig, build_optimiser, constant
from fenchel.train import Stepper, TrainConfig

from .test_step_trainable import Bigram

MODEL = ModelConfig(vocabulary=31, context=8, width=8, layers=3, heads=2, dropout=0.1)
ENTMAX = replace(MODEL, choice="entmax", kv_heads=1)
SHARED = replace(MODEL, layers=4, distinct_layers=2)
EXPERTS = replace(MODEL, experts=3, experts_per_token=2)
CASES: dict[str, dict[str, Any]] = {
    "muon, parts": {"accumulate": 2},
    "entmax, untied, bfloat16": {"model": replace(ENTMAX, tied=False), "precision": "bfloat16"},
    "float16": {"precision": "float16"},
    "experts, parts": {"model": EXPERTS, "accumulate": 2, "balance_weight": 1.0},
    "score, parts": {"optim": {"optimiser": "score"}, "accumulate": 4},
    "score, shared": {"optim": {"optimiser": "score"}, "model": SHARED},
    "trust, outputs": {"optim": {"optimiser": "trust", "output_change": 0.01}},
    "trust, outputs, shared": {
        "optim": {"optimiser": "trust", "output_change": 0.01},
        "model": SHARED,
        "accumulate": 2,
    },
    "limits on scores and entropy": {"qk_clip": 0.5, "entropy_floor": 1.5, "accumulate": 2},
    "sigma, parts": {"model": replace(MODEL, sigma_reparam=True), "accumulate": 2},
}


@pytest.mark.parametrize("case", CASES)
def test_a_step_has_the_bits_of_one_that_keeps_everything(
    case: str, small: Callable[..., Any]
) -> None:
    given = {"model": MODEL, **CASES[case]}
    found = []
    for recompute in ("none", "block"):
        s = small(recompute, recompute=recompute, **given)
        with torch.no_grad():
            for n, p in enumerate(s.model.parameters()):
                p.add_(torch.randn(p.shape, generator=torch.Generator().manual_seed(n)), alpha=0.3)
        calls: list[int] = []
        for n, block in enumerate(s.model.blocks):
            block.mlp.register_forward_pre_hook(lambda *_, n=n, calls=calls: calls.append(n))
        results = [s.stepper(step) for step in range(3)]
        assert [r.broken for r in results] == [None] * 3
        rows = [(r.loss, r.gradient_norm, r.metrics) for r in results]
        found.append((rows, s.bits(), len(calls)))
    (rows, bits, calls_kept), (rows_again, bits_again, calls_again) = found
    assert rows_again == rows
    assert bits_again == bits
    assert calls_again == 2 * calls_kept


@pytest.mark.parametrize(
    ("optimiser", "model", "graphs"), [("score", MODEL, 1), ("muon", MODEL, 1), ("muon", SHARED, 2)]
)
def test_a_compiled_block_runs_the_graph_of_its_forward_pass_again(
    optimiser: str,
    model: ModelConfig,
    graphs: int,
    small: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The hooks of "score" are part of it; nothing is compiled for the second pass."""
    compiler = torch.compile
    one_graph = {"backend": "aot_eager", "fullgraph": True}
    monkeypatch.setattr(torch, "compile", lambda function: compiler(function, **one_graph))
    given = {"model": model, "optim": {"optimiser": optimiser}, "accumulate": 2, "compile": True}
    results, counts = [], []
    for s in (small("kept", **given), small("again", recompute="block", **given)):
        torch.compiler.reset()
        counters["stats"].clear()
        losses = [s.stepper(step).loss for step in range(3)]
        results.append((losses, s.bits()))
        counts.append(counters["stats"]["unique_graphs"])
    assert results[0] == results[1]
    assert counts == [graphs, graphs]


def test_a_model_that_cannot_is_named() -> None:
    model = Bigram(bias=False, tied=True)
    config = TrainConfig(batch=2, steps=1, recompute="block")
    optimiser = build_optimiser(model, OptimConfig(optimiser="adamw"))
    with pytest.raises(TypeError, match=r"Bigram cannot be trained with train\.recompute='block'"):
        Stepper(model, None, optimiser, constant(), config=config, seed=0)  # type: ignore[arg-type]


def test_other_words_are_refused() -> None:
    with pytest.raises(ValueError, match=r"recompute='all' should be one of \('none', 'block'\)"):
        TrainConfig(recompute="all")
