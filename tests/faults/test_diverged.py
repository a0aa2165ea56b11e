"""Gradients that are not finite, in a whole run."""

import json
from pathlib import Path
from typing import Any

from fenchel.train.step import Stepper

NAN = float("nan")


def poisoned(name: str, *steps: int) -> Any:
    """The gradient of ``name`` is nan in these steps (numbered from 1)."""

    def prepare() -> None:
        gradient = Stepper._gradient

        def poison(stepper: Stepper, batch: Any, step: int) -> float:
            handle = None
            if step + 1 in steps:
                parameter = stepper.model.get_parameter(name)
                handle = parameter.register_hook(lambda g: g * NAN)
            loss = gradient(stepper, batch, step)
            if handle is not None:
                handle.remove()
            return loss

        Stepper._gradient = poison

    return prepare


def summary(run: Path) -> dict[str, Any]:
    return dict(json.loads((run / "summary.json").read_text()))


def test_a_broken_step_is_skipped_reported_and_counted(lab: Any, halfway: Path) -> None:
    ended = lab.resume(halfway, mischief=poisoned("blocks.0.attention.qkv.weight", 27))
    assert ended.code == 0
    says = "the gradient of blocks.0.attention.qkv.weight is the first that is not finite"
    assert f"Step 27 is skipped: {says}." in ended.said
    assert summary(halfway)["skipped"] == [27]
    assert {"step": 27, "train/broken": says} in lab.story(halfway)["metrics"]


def test_three_in_a_row_end_with_code_3_a_report_and_the_last_good_checkpoint(
    lab: Any, whole: dict[str, Any], halfway: Path
) -> None:
    ended = lab.resume(halfway, mischief=poisoned("embed.weight", 27, 28, 29))
    assert ended.code == 3
    assert "The run diverged: 3 steps in a row were not finite: the gradient of embed.weight" in (
        ended.said
    )
    assert "the last good checkpoint is step-000025" in ended.said
    assert summary(halfway)["status"] == "diverged"
    assert (halfway / "report.html").exists()
    assert lab.kept(halfway)[-1] == 25
    assert lab.resume(halfway).code == 0, "the trouble was not in the run itself"
    assert lab.story(halfway) == whole


def test_a_learning_rate_beyond_reason_ends_with_code_3_and_finite_weights_on_disk(
    lab: Any, halfway: Path
) -> None:
    rates = ("--set", "optim.learning_rate=1e38", "--set", "optim.matrix_learning_rate=1e38")
    ended = lab.resume(halfway, *rates)
    assert ended.code == 3
    assert "Try a lower learning rate." in ended.said
    assert lab.kept(halfway)[-1] == 23
    ended = lab.resume(
        halfway, "--set", "optim.learning_rate=1e-3", "--set", "optim.matrix_learning_rate=1e-3"
    )
    assert ended.code == 0
