"""fenchel/optim/cuda_graph.py: a replayed step has the bits of the step itself.

Elsewhere than on a GPU a recorder stands in for a CUDA graph (tests/recorded_graph.py).
"""

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy

from fenchel.model import ModelConfig, Transformer
from fenchel.optim import CombinedOptimiser, OptimConfig, build_optimiser
from fenchel.optim.cuda_graph import (
    Capturable,
    Capture,
    StepGraph,
    capture_steps,
    run_step,
    run_with_scalars,
    why_not_captured,
)
from tests.recorded_graph import record

STEPS = 7


def built(kind: str, device: str, **settings: Any) -> tuple[Transformer, CombinedOptimiser]:
    sizes = {"vocabulary": 31, "context": 24, "width": 32, "layers": 3, "heads": 4, "kv_heads": 2}
    config = ModelConfig(**{**sizes, "qk_norm": kind == "score", **settings})  # type: ignore[arg-type]
    generator = torch.Generator().manual_seed(0)
    model = Transformer(config, generator=generator)
    with torch.no_grad():
        for p in model.parameters():
            if p.ndim == 2:
                p.normal_(0.0, p.shape[1] ** -0.5, generator=generator)
    model.to(device)
    name = kind.partition(" ")[0]
    optimiser = build_optimiser(model, OptimConfig(optimiser=name), steps=40)
    for member in optimiser.members:
        if isinstance(member, Capturable):
            member.runner = run_with_scalars
    return model, optimiser


def take(
    model: Transformer, optimiser: CombinedOptimiser, step: int, *, passes: int = 1, rows: int = 6
) -> None:
    """A training step with a rate of its own."""
    generator = torch.Generator().manual_seed(step)
    for group in optimiser.param_groups:
        group["lr"] = group.setdefault("initial_lr", group["lr"]) * (1.0 - 0.1 * step)
    spare = torch.empty(1 + 37 * step, device=next(model.parameters()).device)  # other addresses
    for _ in range(passes):
        ids = torch.randint(31, (rows, 20), generator=generator).to(spare.device)
        logits = model(ids)
        cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).backward()
    optimiser.step()
    optimiser.zero_grad()


def same_bits(one: CombinedOptimiser, two: CombinedOptimiser, models: Any) -> None:
    for x, y in zip(*(model.parameters() for model in models), strict=True):
        assert torch.equal(x, y)
    for a, b in zip(one.members, two.members, strict=True):
        states = a.state_dict()["state"], b.state_dict()["state"]
        assert states[0].keys() == states[1].keys()
        for index, values in states[0].items():
            assert values.keys() == states[1][index].keys()
            for name, value in values.items():
                assert torch.equal(value, states[1][index][name]), name


@pytest.mark.parametrize(
    ("kind", "passes", "settings"),
    [
        ("muon", 1, {}),
        ("score", 1, {}),
        ("score", 1, {"kv_heads": 4, "bias": True}),
        ("score", 3, {"positions": "learned"}),
        ("score without norm", 1, {}),
        ("score without norm", 2, {"kv_heads": 4}),
    ],
)
def test_a_replayed_step_has_the_bits_of_the_step(
    kind: str, passes: int, settings: dict[str, Any], capture: Capture, device: str
) -> None:
    plain, captured = (built(kind, device, **settings) for _ in range(2))
    graphs = capture_steps(captured[1].members, capture)
    assert len(graphs) == (1 if kind == "muon" else 2)
    for step in range(STEPS):
        for model, optimiser in (plain, captured):
            take(model, optimiser, step, passes=passes)
        if step >= 2:
            assert {graph.reason for graph in graphs.values()} == {None}
    same_bits(plain[1], captured[1], (plain[0], captured[0]))


@pytest.mark.parametrize("kind", ["muon", "score"])
def test_rates_in_device_memory_are_those_of_the_host(kind: str) -> None:
    """ScoreDescent has the same bits; Muon adds the rounding of one product."""
    (model, optimiser), (other, on_host) = (built(kind, "cpu") for _ in range(2))
    for member in on_host.members:
        if isinstance(member, Capturable):
            member.runner = run_step
    for step in range(3):
        take(model, optimiser, step)
        take(other, on_host, step)
        for x, y in zip(model.parameters(), other.parameters(), strict=True):
            torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-6)


def test_the_rates_of_every_step_reach_the_graph(capture: Capture, device: str) -> None:
    model, optimiser = built("muon", device)
    capture_steps(optimiser.members, capture)
    for step in range(4):
        take(model, optimiser, step)
    for group in optimiser.param_groups:
        group["initial_lr"] = 0.0
    before = [p.clone() for p in model.parameters()]
    take(model, optimiser, 4)
    assert all(torch.equal(x, p) for x, p in zip(before, model.parameters(), strict=True))


def test_a_restored_state_is_captured_anew(capture: Capture, device: str) -> None:
    plain, captured = (built("score", device) for _ in range(2))
    graphs = capture_steps(captured[1].members, capture)
    for step in range(9):
        for model, optimiser in (plain, captured):
            if step == 4:
                optimiser.load_state_dict(deepcopy(optimiser.state_dict()))
            take(model, optimiser, step)
        if step in (4, 8):
            assert {graph.reason is None for graph in graphs.values()} == {step == 8}
    same_bits(plain[1], captured[1], (plain[0], captured[0]))


def test_batches_of_other_sizes_and_a_changed_setting_are_run(
    capture: Capture, device: str
) -> None:
    plain, captured = (built("score", device) for _ in range(2))
    graphs = capture_steps(captured[1].members, capture)
    score, muon = graphs.values()
    for step in range(9):
        for model, optimiser in (plain, captured):
            take(model, optimiser, step, rows=3 if step == 4 else 6)
            if step == 6:
                optimiser.members[1].param_groups[0]["momentum"] = 0.5
        if step == 4:
            assert score.reason is not None
            assert muon.reason is None
        if step == 7:
            assert score.reason is None
            assert muon.reason is not None
    same_bits(plain[1], captured[1], (plain[0], captured[0]))


def test_statistics_are_those_of_the_last_step(capture: Capture, device: str) -> None:
    plain, captured = (built("score", device) for _ in range(2))
    capture_steps(captured[1].members, capture)
    for step in range(STEPS):
        for model, optimiser in (plain, captured):
            take(model, optimiser, step)
        wanted, found = (o.members[0].score_stats() for _, o in (plain, captured))  # type: ignore[attr-defined]
        for name, stats in wanted.items():
            for x, y in zip(stats, found[name], strict=True):
                assert torch.equal(x, y), (step, name)


def test_what_cannot_be_captured_is_run_and_the_reason_is_stated(device: str) -> None:
    def fail(_: Callable[[], None], _device: torch.device) -> Callable[[], None]:
        raise RuntimeError("no room\nfor it")

    plain, captured = (built("score", device) for _ in range(2))
    graphs = capture_steps(captured[1].members, fail)
    for step in range(4):
        for model, optimiser in (plain, captured):
            take(model, optimiser, step)
    assert {graph.reason for graph in graphs.values()} == {"no room"}
    same_bits(plain[1], captured[1], (plain[0], captured[0]))


def test_steps_that_the_host_decides_are_refused(device: str) -> None:
    model, optimiser = built("score", device)
    score: Any = optimiser.members[0]
    score.param_groups[0]["size"] = "closed"
    graph = score.runner = StepGraph(record)
    take(model, optimiser, 0)
    assert graph.reason == "closed sizes are taken without a graph"
    score.param_groups[0] |= {"size": "measured", "norm": "frobenius"}
    take(model, optimiser, 1)
    assert "frobenius" in str(graph.reason)
    score.step()  # nothing has a gradient
    assert graph.reason == why_not_captured(score.prepare()) == "no parameter has a gradient"
