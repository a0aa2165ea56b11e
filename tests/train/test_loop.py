"""fenchel/train/loop.py: stopped anywhere and resumed, the same bits come out."""

import json
import random
import shutil
import signal
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from fenchel.checkpoints import run_checkpoint
from fenchel.checkpoints.run_checkpoint import folders
from fenchel.files import NoSpace, StorageFailed
from fenchel.train import loop as loop_file
from fenchel.train.loop import STOP_SIGNALS, StopSignals

NAN = float("nan")
IDS = torch.zeros(1, 4, dtype=torch.long)


def lines(s: Any) -> list[dict[str, Any]]:
    """Every line of metrics without the times, which differ."""
    told = map(json.loads, s.run.metrics.read_text().splitlines())
    return [
        {k: v for k, v in line.items() if not k.startswith("time/") and k != "crc"} for line in told
    ]


def kept(s: Any) -> list[str]:
    return sorted(file.name for file in s.run.checkpoints.iterdir())


def stop_at(s: Any, step: int, by: signal.Signals = signal.SIGINT) -> Any:
    """Ask for a stop when ``step`` has been taken, and go on until it is answered."""
    s.ear.at[step] = lambda: signal.raise_signal(by)
    return s.loop().train()


def spoil(s: Any, *steps: int, name: str = "blocks.1.mlp.up.weight") -> None:
    """Make the gradient of ``name`` nan in these steps (numbered from 1)."""
    now = [0]
    gradient = s.stepper._gradient

    def count(batch: Any, step: int) -> float:
        now[0] = step + 1
        return gradient(batch, step)

    s.stepper._gradient = count
    s.model.get_parameter(name).register_hook(lambda g: g * NAN if now[0] in steps else g)


# --- one run


def test_a_run_logs_evaluates_and_saves_by_the_numbers_of_its_steps(
    small: Callable[..., Any],
) -> None:
    s = small(steps=9, log_every=2, evaluate_every=4, save_every=3, keep=9)
    s.validate = lambda _: {"loss": 1.0}  # the first is the best
    outcome = s.loop().train()
    assert outcome.status == "finished"
    assert outcome.progress.step == 9
    assert [x["step"] for x in lines(s) if "train/loss" in x] == [2, 4, 6, 8, 9]
    assert [x["step"] for x in lines(s) if "validation/loss" in x] == [4, 8, 9]
    assert kept(s) == [f"step-{n:06d}" for n in (3, 4, 6, 9)], "4 is the best and saved as such"
    assert s.ear.steps == list(range(1, 10))
    assert s.ear.lines[0].keys() > {"time/elapsed", "time/tokens_per_second"}


def test_intervals_left_out_are_a_tenth_of_the_run(small: Callable[..., Any]) -> None:
    s = small(steps=20, save_every=None, evaluate_every=None, keep=99)
    s.loop().train()
    assert [x["step"] for x in lines(s) if "validation/loss" in x] == list(range(2, 21, 2))
    assert len(folders(s.run.checkpoints)) == 10


def test_the_logged_loss_is_the_mean_since_the_last_line(small: Callable[..., Any]) -> None:
    s = small(steps=4, log_every=2)
    losses: list[float] = []
    gradient = s.stepper._gradient
    s.stepper._gradient = lambda *args: losses.append(gradient(*args)) or losses[-1]
    s.loop().train()
    told = [x["train/loss"] for x in lines(s) if "train/loss" in x]
    assert told == [(losses[0] + losses[1]) / 2, (losses[2] + losses[3]) / 2]


def test_the_newest_and_the_best_are_kept(small: Callable[..., Any]) -> None:
    s = small(steps=12, save_every=2, evaluate_every=2, keep=2)
    values = iter([5.0, 1.0, 2.0, 3.0, NAN, 4.0])
    s.validate = lambda _: {"loss": next(values)}
    outcome = s.loop().train()
    assert (outcome.progress.best, outcome.progress.best_step) == (1.0, 4)
    assert kept(s) == ["step-000004", "step-000010", "step-000012"]


def test_a_checkpoint_holds_the_step_it_is_named_for(small: Callable[..., Any]) -> None:
    s = small(steps=6, keep=9)
    s.loop().train()
    other = small("other", steps=6)
    for step in range(3):
        other.stepper(step)
    third = small("third")
    folder = s.run.checkpoints / "step-000003"
    progress = run_checkpoint.restore(folder, third.model, third.optimiser, third.settings)
    assert progress.step == 3
    assert third.bits() == other.bits()


# --- stopping and going on


@pytest.mark.parametrize("by", STOP_SIGNALS)
def test_a_signal_ends_the_run_after_its_step_with_a_checkpoint(
    small: Callable[..., Any], by: signal.Signals
) -> None:
    s = small()
    outcome = stop_at(s, 7, by)
    assert (outcome.status, outcome.signal) == ("interrupted", by)
    assert outcome.reason == f"stopped by {by.name} after step 7"
    assert "step-000007" in kept(s)


def test_twenty_random_schedules_of_stops_end_with_the_same_bits(
    small: Callable[..., Any],
) -> None:
    """F19: also twice at one place, right after the start, and just before the end."""
    settings = {"steps": 13, "accumulate": 2}
    whole = small("whole", **settings)
    assert whole.loop().train().status == "finished"
    draw = random.Random(19)
    for schedule in range(20):
        stops = sorted(draw.choices(range(1, 13), k=draw.randint(1, 3)))
        for stop in stops:
            s = small(f"{schedule}", **settings)
            assert stop_at(s, stop).status in ("interrupted", "finished")
        s = small(f"{schedule}", **settings)
        assert s.loop().train().status == "finished"
        assert s.bits() == whole.bits(), stops
        assert lines(s) == lines(whole), stops
        assert kept(s)[-1] == "step-000013"
        shutil.rmtree(s.run.path)


def test_a_stop_before_the_first_step_loses_nothing_and_keeps_nothing(
    small: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Asked(StopSignals):
        def __init__(self) -> None:
            super().__init__()
            self.first = signal.SIGTERM

    monkeypatch.setattr(loop_file, "StopSignals", Asked)
    s = small()
    outcome = s.loop().train()
    assert (outcome.status, outcome.progress.step) == ("interrupted", 0)
    assert kept(s) == []


def test_a_second_stop_at_once_writes_no_second_checkpoint(small: Callable[..., Any]) -> None:
    stop_at(small(), 4)
    s = small()
    before = (s.run.checkpoints / "step-000004").stat().st_mtime_ns
    loop = s.loop()
    assert loop._interrupted(signal.SIGINT).status == "interrupted"
    assert (s.run.checkpoints / "step-000004").stat().st_mtime_ns == before


def test_after_the_end_nothing_is_done(small: Callable[..., Any]) -> None:
    s = small()
    s.loop().train()
    again = small()
    loop = again.loop()
    loop.stepper = lambda _: pytest.fail("a step was taken")
    assert loop.train() == ("finished", loop.progress, "", None)
    assert lines(again) == lines(s)


def test_validating_probing_logging_and_saving_move_no_bit(small: Callable[..., Any]) -> None:
    """F21: the noise of training is training's own."""
    quiet = small("quiet", log_every=99, evaluate_every=99, save_every=99)
    busy = small("busy", log_every=1, evaluate_every=1, save_every=1)
    busy.probe = lambda batch: {"drawn": float(torch.rand(()) + busy.model(batch[0]).norm())}
    busy.validate = lambda model: {
        "loss": float(torch.rand(()) + model.train()(IDS).detach().norm())
    }
    quiet.loop().train()
    busy.loop().train()
    assert quiet.bits() == busy.bits()


# --- what is not finite


def test_a_step_that_broke_is_counted_logged_and_survived(small: Callable[..., Any]) -> None:
    """F11: a gradient of nan at step 7."""
    s = small(steps=12)
    spoil(s, 7)
    outcome = s.loop().train()
    assert outcome.status == "finished"
    assert outcome.progress.skipped == (7,)
    assert outcome.progress.tokens == 11 * 4 * 8
    says = "the gradient of blocks.1.mlp.up.weight is the first that is not finite"
    assert {"step": 7, "train/broken": says} in lines(s)
    assert s.ear.said == [f"Step 7 is skipped: {says}."]
    assert lines(s)[-2]["train/skipped"] == 1


def test_a_run_with_a_skipped_step_resumes_with_the_same_bits(small: Callable[..., Any]) -> None:
    whole = small("whole")
    spoil(whole, 7, 10, 11)
    whole.loop().train()
    for stop in (7, 8, 10):
        s = small("cut")
        spoil(s, 7, 10, 11)
        stop_at(s, stop)
    s = small("cut")
    spoil(s, 7, 10, 11)
    assert s.loop().train().progress.skipped == (7, 10, 11)
    assert s.bits() == whole.bits()
    assert lines(s) == lines(whole)


def test_three_in_a_row_end_the_run_with_the_last_good_checkpoint(
    small: Callable[..., Any],
) -> None:
    s = small(save_every=3, evaluate_every=99)
    spoil(s, 5, 7, 8, 9, name="blocks.0.attention.qkv.weight")
    outcome = s.loop().train()
    assert outcome.status == "diverged"
    assert outcome.progress.step == 9
    assert outcome.reason == (
        "3 steps in a row were not finite: the gradient of blocks.0.attention.qkv.weight is the "
        "first that is not finite; the last good checkpoint is step-000006. "
        "Try a lower learning rate."
    )
    assert kept(s) == ["step-000003", "step-000006"]


def test_the_limit_of_nonfinite_steps_is_a_setting_and_counts_over_a_resume(
    small: Callable[..., Any],
) -> None:
    s = small(max_nonfinite_steps=4)
    spoil(s, 4, 5, 6, 7)
    stop_at(s, 5)
    s = small(max_nonfinite_steps=4)
    spoil(s, 4, 5, 6, 7)
    outcome = s.loop().train()
    assert outcome.status == "diverged"
    assert "4 steps in a row" in outcome.reason


def test_while_steps_are_skipped_nothing_is_saved_and_nothing_rotated_away(
    small: Callable[..., Any],
) -> None:
    """What made them break may lie in the weights already: the last good ones must stay."""
    settings = {"steps": 8, "save_every": 1, "keep": 1, "evaluate_every": 99}
    s = small(**settings)
    spoil(s, 4, 5)
    seen: dict[int, list[str]] = {}
    loop = s.loop()

    def look(step: int) -> None:
        loop.writer.wait()
        seen[step] = kept(s)

    for step in range(1, 9):
        s.ear.at[step] = partial(look, step)
    loop.train()
    assert seen[3] == seen[4] == seen[5] == ["step-000003"]
    assert seen[6] == ["step-000006"]
    stopped = small("stopped", **settings)
    spoil(stopped, 4, 5)
    stop_at(stopped, 5)
    assert kept(stopped) == ["step-000003", "step-000005"]


def test_a_run_whose_last_step_broke_is_saved_nevertheless(small: Callable[..., Any]) -> None:
    s = small(steps=6)
    spoil(s, 6)
    assert s.loop().train().status == "finished"
    assert "step-000006" in kept(s)


@pytest.mark.parametrize("ended_by", ["saving", "a signal"])
def test_weights_that_are_not_finite_are_never_saved(
    small: Callable[..., Any], ended_by: str
) -> None:
    """Finite gradients, and a step too large: the optimiser itself broke the weights."""
    s = small(steps=9, save_every=3, evaluate_every=99, max_nonfinite_steps=9)

    def overflow() -> None:
        with torch.no_grad():
            s.model.blocks[1].mlp.down.weight[0, :2] = torch.inf
        if ended_by == "a signal":
            signal.raise_signal(signal.SIGTERM)

    s.ear.at[4] = overflow
    outcome = s.loop().train()
    assert outcome.status == "diverged"
    assert "the weights blocks.1.mlp.down.weight hold 2 nan or inf" in outcome.reason
    assert "the last good checkpoint is step-000003" in outcome.reason
    assert kept(s) == ["step-000003"]


def test_a_run_that_diverges_before_its_first_checkpoint_names_none(
    small: Callable[..., Any],
) -> None:
    s = small(save_every=9)
    spoil(s, 1, 2, 3)
    assert "there is no checkpoint. " in s.loop().train().reason


# --- full disks


def full(monkeypatch: pytest.MonkeyPatch, *, free: int = 0) -> None:
    usage = shutil.disk_usage("/")._replace(free=free)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)


def test_a_full_disk_is_reported_and_the_run_goes_on(
    small: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = small("whole")
    whole.loop().train()
    s = small(evaluate_every=99)
    loop = s.loop()

    def finish_then(act: Callable[[], None]) -> None:
        loop._finish_write(must=False)
        act()

    s.ear.at = {
        4: lambda: finish_then(lambda: full(monkeypatch)),
        7: lambda: finish_then(monkeypatch.undo),
    }
    assert loop.train().status == "finished"
    assert kept(s) == ["step-000003", "step-000009", "step-000012"]
    assert len(s.ear.said) == 1
    assert s.ear.said[0].startswith("no space: ")
    assert s.ear.said[0].endswith("are needed. The run goes on without this checkpoint.")
    assert s.bits() == whole.bits()


@pytest.mark.parametrize("last", [True, False], ids=["at the end", "at a signal"])
def test_a_last_checkpoint_that_does_not_fit_is_a_failure(
    small: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, last: bool
) -> None:
    s = small(steps=6, evaluate_every=99)
    loop = s.loop()

    def fill() -> None:
        loop.writer.wait()
        full(monkeypatch)
        if not last:
            signal.raise_signal(signal.SIGTERM)

    s.ear.at = {4: fill}
    with pytest.raises(
        StorageFailed,
        match=r"Make room and go on with .*; the last good checkpoint is step-000003\.$",
    ):
        loop.train()
    assert kept(s) == ["step-000003"]


def test_metrics_kept_back_by_a_full_disk_are_all_there_at_the_end(
    small: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = small("whole")
    whole.loop().train()
    s = small()

    def refuse(**_: object) -> None:
        raise NoSpace("no space: not a byte")

    s.ear.at = {3: lambda: monkeypatch.setattr(s.run, "_append", refuse), 7: monkeypatch.undo}
    s.loop().train()
    assert lines(s) == lines(whole)


def test_another_storage_error_is_raised(
    small: Callable[..., Any],
) -> None:
    s = small()
    loop = s.loop()
    s.ear.at = {4: lambda: (loop.writer.wait(), shutil.rmtree(s.run.path))}
    with pytest.raises(FileNotFoundError, match=str(s.run.path)):
        loop.train()


def test_checkpoints_that_are_deleted_under_the_run_are_followed_by_new_ones(
    small: Callable[..., Any],
) -> None:
    whole = small("whole")
    whole.loop().train()
    s = small()
    loop = s.loop()
    s.ear.at = {4: lambda: (loop.writer.wait(), shutil.rmtree(s.run.checkpoints))}
    assert loop.train().status == "finished"
    assert kept(s)[-1] == kept(whole)[-1]
    assert s.bits() == whole.bits()


# --- a budget


@pytest.mark.parametrize(
    ("budget", "pause", "said"),
    [
        (85.0, 9.0, [5, 6, 7]),
        (75.0, 9.0, [5, 6]),
        (75.0, 20.0, [3]),
        (75.0, 0.0, []),
    ],
)
def test_the_steps_that_a_budget_is_said_to_allow_are_those_that_are_taken(
    budget: float,
    pause: float,
    said: list[int],
    small: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Steps of 10 s by a clock of our own, and a callback that is slow at the first."""
    now, one = [0.0], small(steps=7)
    clock = type("Clock", (), {"perf_counter": staticmethod(lambda: now[0])})
    monkeypatch.setattr(loop_file, "time", clock)

    gradient = one.stepper._gradient

    def wait(seconds: float) -> None:
        now[0] += seconds

    def slow(*of: Any) -> float:
        wait(10.0)
        return gradient(*of)

    one.stepper._gradient = slow
    one.ear.at = {1: partial(wait, pause)}
    plans: list[int] = []
    outcome = one.loop(budget=budget, replan=plans.append).train()
    assert plans == said
    told = [text.partition("allows ")[2] for text in one.ear.said]
    wanted = ["all the 7" if steps == 7 else f"about {steps} of the 7" for steps in said]
    assert told == [f"{words} that were planned." for words in wanted]
    assert outcome.progress.step == [7, *said][-1]
