"""fenchel/train/logger.py: others who listen."""

import sys
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from fenchel.train.logger import CallbackList, TensorBoard, require_loggers


class Ear:
    def __init__(self) -> None:
        self.heard: list[object] = []

    def step(self, step: int, steps: int) -> None:
        self.heard.append((step, steps))

    def log(self, metrics: object) -> None:
        self.heard.append(metrics)

    def message(self, text: str) -> None:
        self.heard.append(text)


class Closed(Ear):
    """A terminal that has gone away."""

    def step(self, step: int, steps: int) -> None:
        raise BrokenPipeError(32, f"Broken pipe at {step} of {steps}")


def read(folder: Path) -> dict[str, list[tuple[int, float]]]:
    events = EventAccumulator(str(folder)).Reload()
    return {
        tag: [(event.step, round(event.value, 5)) for event in events.Scalars(tag)]
        for tag in events.Tags()["scalars"]
    }


def test_numbers_become_scalars_and_lists_one_a_layer(tmp_path: Path) -> None:
    logger = TensorBoard(tmp_path)
    logger.step(4, 8)
    logger.message("Nothing of this is a number.")
    logger.log({"step": 4, "train/loss": 2.5, "attention/entropy": [1.0, 0.5]})
    logger.log({"step": 8, "train/loss": 1.5, "train/broken": "a phrase"})
    assert read(tmp_path) == {
        "train/loss": [(4, 2.5), (8, 1.5)],
        "attention/entropy/layer_0": [(4, 1.0)],
        "attention/entropy/layer_1": [(4, 0.5)],
    }


def test_a_resumed_run_forgets_what_lies_beyond_its_checkpoint(tmp_path: Path) -> None:
    first = TensorBoard(tmp_path)
    for step in (2, 4, 6):
        first.log({"step": step, "train/loss": float(step)})
    second = TensorBoard(tmp_path, step=4)
    second.log({"step": 6, "train/loss": 60.0})
    assert read(tmp_path) == {"train/loss": [(2, 2.0), (4, 4.0), (6, 60.0)]}


def test_a_missing_package_is_one_sentence_that_names_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    require_loggers(())
    with pytest.raises(ValueError, match=r"pip install 'fenchel\[log\]'"):
        require_loggers(("tensorboard",))
    with pytest.raises(ValueError, match=r"pip install 'fenchel\[log\]'"):
        TensorBoard(tmp_path)


def test_several_callbacks_receive_the_same() -> None:
    ears = Ear(), Ear()
    several = CallbackList(*ears)
    several.step(1, 2)
    several.log({"step": 1})
    several.message("Hear.")
    assert ears[0].heard == ears[1].heard == [(1, 2), {"step": 1}, "Hear."]


def test_a_callback_that_fails_is_left_out_and_reported_to_the_others() -> None:
    closed, ear = Closed(), Ear()
    several = CallbackList(closed, ear)
    several.step(1, 2)
    several.step(2, 2)
    said, *steps = ear.heard
    assert "Closed failed" in str(said)
    assert steps == [(1, 2), (2, 2)]
