"""fenchel/train/gradient_graph.py: a replayed pass has the bits of the pass itself.

Elsewhere than on a GPU a recorder stands in for a CUDA graph (tests/recorded_graph.py).
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from fenchel.data import Batch
from fenchel.model import ModelConfig, Transformer
from fenchel.optim import OptimConfig, build_optimiser, constant
from fenchel.optim.cuda_graph import Capturable, Capture, capture_graph, run_with_scalars
from fenchel.train import Stepper, TrainConfig
from fenchel.train.gradient_graph import GradientGraph, _tensors_on
from tests.recorded_graph import record, record_pass

STEPS = 6
SIZES: dict[str, Any] = {"vocabulary": 31, "context": 24, "width": 32, "layers": 2, "heads": 4}


@pytest.fixture
def capture(device: str) -> Capture:
    return capture_graph if device == "cuda" else record_pass


class Source(NamedTuple):
    """Batches of random ids, with what a test changes in some."""

    change: Callable[[int, Batch], Batch]
    batch: int = 6

    def at(self, step: int) -> Batch:
        generator = torch.Generator().manual_seed(step)
        ids = torch.randint(31, (self.batch, 21), generator=generator)
        return self.change(step, Batch(ids[:, :-1].clone(), ids[:, 1:].clone()))


def same(_: int, batch: Batch) -> Batch:
    return batch


def stepper(
    device: str,
    optimiser: str = "muon",
    change: Callable[[int, Batch], Batch] = same,
    train: dict[str, Any] | None = None,
    **settings: Any,
) -> Stepper:
    # On a CPU a tied embedding has a sparse gradient without a graph, and a dense one with it.
    config = ModelConfig(**{**SIZES, "tied": device == "cuda", **settings})
    model = Transformer(config, generator=torch.Generator().manual_seed(0)).to(device)
    found = build_optimiser(model, OptimConfig(optimiser=optimiser), steps=40)
    for member in found.members:
        if isinstance(member, Capturable):
            member.runner = run_with_scalars
    config_ = TrainConfig(
        steps=40, batch=6, device=device, **{"precision": "float32"} | (train or {})
    )
    return Stepper(model, Source(change), found, constant(), config=config_, seed=3)


def steps_alike(plain: Stepper, captured: Stepper, steps: int = STEPS) -> list[str | None]:
    """Take the same steps with both, compare every bit, and return the reasons."""
    reasons = []
    for step in range(steps):
        one, two = plain(step), captured(step)
        assert one[1:] == two[1:], step
        for p, q in zip(plain.model.parameters(), captured.model.parameters(), strict=True):
            assert torch.equal(p, q), step
            assert q.grad is None
        assert captured.graph is not None
        reasons.append(captured.graph.reason)
    return reasons


def packed(_: int, batch: Batch) -> Batch:
    segments = (torch.arange(20) >= 9).long().expand(6, 20)
    return batch._replace(segments=segments.contiguous())


@pytest.mark.parametrize(
    ("optimiser", "settings", "change"),
    [
        ("muon", {}, same),
        ("adamw", {"dropout": 0.2}, same),
        ("score", {"qk_norm": True, "kv_heads": 2}, same),
        ("score", {"positions": "rotary", "dropout": 0.1}, packed),
        ("muon", {"positions": "rotary", "windows": (4, 0), "sinks": True}, same),
        ("muon", {"positions": "alibi", "gate": "head"}, same),
    ],
)
def test_a_replayed_pass_has_the_bits_of_the_pass(
    optimiser: str, settings: dict[str, Any], change: Any, capture: Capture, device: str
) -> None:
    plain, captured = (stepper(device, optimiser, change, **settings) for _ in range(2))
    captured.capture(capture)
    reasons = steps_alike(plain, captured)
    assert reasons == ["no two passes were alike yet"] + [None] * (STEPS - 1)


def test_a_step_with_another_number_of_targets_is_run(capture: Capture, device: str) -> None:
    def change(step: int, batch: Batch) -> Batch:
        if step == 2:
            batch.targets[0, :3] = -100
        return batch

    plain, captured = (stepper(device, change=change) for _ in range(2))
    captured.capture(capture)
    found = [reason is None for reason in steps_alike(plain, captured)]
    assert found == [False, True, False, False, True, True]


def test_weights_at_other_addresses_are_captured_anew(capture: Capture, device: str) -> None:
    plain, captured = (stepper(device, "adamw") for _ in range(2))
    captured.capture(capture)
    assert steps_alike(plain, captured, 3)[-1] is None
    for p in captured.model.parameters():
        p.data = p.data.clone()
    found = [reason is None for reason in steps_alike(plain, captured, 3)]
    assert found == [False, True, True]


def test_the_result_of_a_step_that_is_not_finite_is_the_same(capture: Capture, device: str) -> None:
    plain, captured = (stepper(device) for _ in range(2))
    captured.capture(capture)
    steps_alike(plain, captured, 3)
    for one in (plain, captured):
        one.model.blocks[1].mlp.down.weight.data[0, 0] = torch.inf  # type: ignore[index, union-attr]
    results = [one(3) for one in (plain, captured)]
    assert results[0].broken == results[1].broken
    assert "weights blocks.1.mlp.down" in str(results[1].broken)


def test_a_pass_that_reads_numbers_of_the_device_is_run(device: str) -> None:
    """As the solver of entmax does where its kernels are not taken."""
    strict = capture_graph if device == "cuda" else record
    plain, captured = (stepper(device, "score", choice="entmax") for _ in range(2))
    captured.capture(strict)
    assert None not in steps_alike(plain, captured)


def test_what_cannot_be_captured_is_run_and_the_reason_is_stated(device: str) -> None:
    def fail(run: Callable[[], None], there: torch.device) -> Callable[[], None]:
        record_pass(run, there)
        raise RuntimeError("the pass waits for the device\nsomewhere")

    plain, captured = (stepper(device, "score", qk_norm=True) for _ in range(2))
    captured.capture(fail)
    assert steps_alike(plain, captured, 4)[1:] == ["the pass waits for the device"] * 3


@pytest.mark.parametrize(
    ("train", "settings", "reason"),
    [
        ({"accumulate": 2}, {}, "several micro-batches"),
        ({"recompute": "block"}, {}, "computes blocks again"),
        ({"entropy_floor": 0.1}, {}, "observed"),
        ({}, {"sigma_reparam": True}, "singular vectors"),
        ({}, {"optimiser": "trust"}, "ScoreTrust"),
    ],
)
def test_steps_of_other_kinds_are_not_captured(
    train: dict[str, Any], settings: dict[str, Any], reason: str, capture: Capture, device: str
) -> None:
    one = stepper(device, train=train, **settings)
    one.capture(capture)
    assert one.graph is None
    assert reason in str(one.why_not_captured())
    assert one(0).broken is None


def test_a_graph_refers_to_every_tensor_that_it_may_read(device: str) -> None:
    """A table that the model replaces after the capture stays where the graph reads it."""
    table = {"angles": torch.ones(7, device=device)}
    assert table["angles"].data_ptr() in [
        x.data_ptr() for x in _tensors_on(torch.device(table["angles"].device))
    ]
    freed: list[Tensor] = []

    def capture(run: Callable[[], None], _: torch.device) -> Callable[[], None]:
        freed.append(table.pop("angles"))
        run()
        return run

    p = torch.nn.Parameter(torch.ones(7, device=device))
    graph = GradientGraph([p], capture=capture)
    batch = Batch(torch.zeros(1, 1, device=device), torch.zeros(1, 1, device=device))
    for _ in range(2):
        graph(lambda _: p.sum().detach(), batch, None)
    assert graph.reason is None
    address = freed.pop().data_ptr()
    assert address in [x.data_ptr() for x in _tensors_on(p.device)]
