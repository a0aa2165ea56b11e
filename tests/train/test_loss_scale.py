"""fenchel/train/loss_scale.py: float16 loses no gradient, and overflow loses no step."""

import json
import signal
from collections.abc import Callable
from typing import Any

import pytest
import torch

from fenchel.model import ModelConfig
from fenchel.train.loss_scale import LossScale

CALM = ModelConfig(vocabulary=31, context=8, width=8, layers=2, heads=2)  # without dropout


def gradient(s: Any, step: int) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}

    def look() -> None:
        found.update((name, p.grad.clone()) for name, p in s.model.named_parameters())

    s.optimiser.step = look
    s.stepper(step)
    return found


def test_the_worked_example_a_gradient_of_1e_8_survives_times_65536() -> None:
    assert torch.tensor(1e-8).half() == 0
    assert (torch.tensor(1e-8) * 65536).half().item() == pytest.approx(6.6e-4, rel=0.01)


def test_activations_are_half_and_weights_and_gradients_are_not(small: Callable[..., Any]) -> None:
    s = small(precision="float16")
    seen: list[torch.dtype] = []
    s.model.blocks[0].mlp.up.register_forward_hook(lambda _m, _i, out: seen.append(out.dtype))
    assert s.stepper(0).broken is None
    assert seen == [torch.float16]
    assert {p.dtype for p in s.model.parameters()} == {torch.float32}


@pytest.mark.parametrize("rule", ["muon", "adamw", "score", "trust"])
def test_the_optimiser_gets_the_gradient_without_the_scale(
    small: Callable[..., Any], rule: str
) -> None:
    optim = {"optimiser": rule}
    half = small("1", model=CALM, optim=optim, precision="float16")
    full = small("2", model=CALM, optim=optim)
    a, b = gradient(half, 0), gradient(full, 0)
    for name, expected in b.items():
        assert (a[name] - expected).norm() <= 0.01 * expected.norm() + 1e-5, name


def test_a_step_that_overflows_is_taken_again_at_half_the_scale_until_it_does_not(
    small: Callable[..., Any],
) -> None:
    s, lower = small("1", precision="float16"), small("2", precision="float16")
    s.stepper.scaling.scale = LossScale(2.0**40, 7)
    result = s.stepper(0)
    assert result.broken is None
    factor, age = s.stepper.scaling.scale
    assert factor < 2.0**30
    assert age == 1
    assert result.metrics["loss_scale"] == factor
    lower.stepper.scaling.scale = LossScale(factor, 0)
    lower.stepper(0)
    assert s.bits() == lower.bits()  # the tries before have left nothing behind


def test_what_is_broken_at_every_scale_leaves_the_scale_as_it_was(
    small: Callable[..., Any],
) -> None:
    s = small(precision="float16")
    s.stepper.scaling.scale = LossScale(1024.0, 3)
    s.model.blocks[1].mlp.up.weight.register_hook(lambda g: g * float("nan"))
    before = s.bits()
    assert "blocks.1.mlp.up.weight" in (s.stepper(0).broken or "")
    assert s.stepper.scaling.scale == LossScale(1024.0, 3)
    assert s.bits() == before


def test_a_loss_that_is_not_finite_is_read_once(small: Callable[..., Any]) -> None:
    s = small(precision="float16")
    calls: list[int] = []

    def spoil(_m: object, _i: object, output: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        return output * torch.inf

    s.model.blocks[0].mlp.up.register_forward_hook(spoil)
    assert s.stepper(0).broken
    assert len(calls) == 2  # once for the step, once to say where


def test_the_scale_grows_when_it_is_old_enough(small: Callable[..., Any]) -> None:
    s = small(precision="float16")
    s.stepper.scaling.scale = LossScale(256.0, 1999)
    s.stepper(0)
    assert s.stepper.scaling.scale == LossScale(512.0, 0)


def test_a_run_in_float16_is_resumed_bit_for_bit_with_its_scale(
    small: Callable[..., Any],
) -> None:
    def build(name: str) -> Any:
        s = small(name, precision="float16")
        s.stepper.scaling.scaler.set_growth_interval(2)  # so that it changes within twelve steps,
        s.stepper.scaling.scale = LossScale(2.0**14, 0)  # up to what overflows and down again
        return s

    whole, parted = build("1"), build("2")
    whole.loop().train()
    parted.ear.at[6] = lambda: signal.raise_signal(signal.SIGINT)
    assert parted.loop().train().status == "interrupted"
    again = build("2")
    again.loop().train()
    assert again.bits() == whole.bits()
    assert again.stepper.scaling.scale == whole.stepper.scaling.scale
    told = [json.loads(line) for line in whole.run.metrics.read_text().splitlines()]
    scales = [line["train/loss_scale"] for line in told if "train/loss_scale" in line]
    assert len(set(scales)) > 2
    assert scales != sorted(scales)
    told = [json.loads(line) for line in again.run.metrics.read_text().splitlines()]
    assert [line["train/loss_scale"] for line in told if "train/loss_scale" in line] == scales


def test_other_precisions_are_not_scaled(small: Callable[..., Any]) -> None:
    for precision in ("float32", "bfloat16"):
        s = small(precision, precision=precision)
        assert s.stepper.scaling is None
        assert s.stepper(0).metrics == {}
