"""Memory that runs out, in every part of a step and of a save: one sentence, nothing lost."""

import os
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from fenchel import report
from fenchel.checkpoints import run_checkpoint
from fenchel.cli import LESS_MEMORY, main
from fenchel.model import Transformer
from fenchel.optim import CombinedOptimiser
from fenchel.train.hardware import out_of_memory

ON_GPU = "CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has a total capacity of 16 GiB"
PLACES: dict[str, tuple[Any, str]] = {
    "forward": (Transformer, "forward"),
    "backward": (torch.Tensor, "backward"),
    "optimiser": (CombinedOptimiser, "step"),
    "save": (run_checkpoint, "save"),
}


def fails(place: str, after: int) -> Callable[[], None]:
    """Run out of a GPU's memory at ``place``, once ``after`` calls of it have gone well."""

    def prepare() -> None:
        owner, name = PLACES[place]
        there, calls = getattr(owner, name), 0

        def watched(*args: Any, **kwargs: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls > after:
                raise torch.OutOfMemoryError(ON_GPU)
            return there(*args, **kwargs)

        setattr(owner, name, watched)

    return prepare


@pytest.mark.parametrize(("place", "after"), [("forward", 40), ("backward", 20), ("optimiser", 9)])
def test_a_step_that_runs_out_leaves_a_run_that_resumes_exactly(
    place: str, after: int, lab: Any, whole: dict[str, Any], tmp_path: Path
) -> None:
    run = tmp_path / "run"
    ended = lab.begin(run, mischief=fails(place, after))
    assert ended.code == 2
    assert "20.00 GiB were needed on the GPU" in ended.said
    assert "train.accumulate" in ended.said
    assert f"--resume {run}" in ended.said
    assert lab.resume(run).code == 0
    assert lab.story(run) == whole


@pytest.mark.parametrize(("recompute", "advised"), [("none", True), ("block", False)])
def test_recomputation_is_advised_only_where_it_is_off(
    recompute: str, advised: bool, lab: Any, tmp_path: Path
) -> None:
    run, given = tmp_path / "run", f'train.recompute="{recompute}"'
    ended = lab.begin(run, "--set", given, mischief=fails("optimiser", 9))
    assert ended.code == 2
    assert "memory ran out (20.00 GiB were needed on the GPU)" in ended.said
    assert ('train.recompute="block"' in ended.said) == advised
    assert "needs less" in ended.said


@pytest.mark.parametrize("command", ["train", "tune"])
def test_recomputation_is_not_advised_where_the_settings_are_not_known(command: str) -> None:
    assert "recompute" not in LESS_MEMORY[command]


def test_a_save_that_runs_out_leaves_the_checkpoint_before_it(
    lab: Any, whole: dict[str, Any], tmp_path: Path
) -> None:
    run = tmp_path / "run"
    ended = lab.begin(run, mischief=fails("save", 2))
    assert ended.code == 2
    assert f"--resume {run}" in ended.said
    assert lab.kept(run) == [5, 10]
    assert not lab.left_over(run)
    assert lab.resume(run).code == 0
    assert lab.story(run) == whole


def test_a_model_too_large_for_the_memory_is_refused_and_leaves_nothing(
    lab: Any, tmp_path: Path
) -> None:
    def limited() -> None:
        used = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
        resource.setrlimit(resource.RLIMIT_AS, (used + 300 * 2**20,) * 2)

    run = tmp_path / "run"
    # More than the address space of a process of the tests, which the limit is 300 MiB above.
    ended = lab.begin(run, "--set", "model.width=8192", "--set", "model.layers=8", mischief=limited)
    assert ended.code == 2
    assert "a step needs 72.1 GiB of memory at least" in ended.said
    assert not run.exists()


def test_any_command_reports_that_memory_ran_out(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def wants_too_much() -> None:
        torch.empty(2**60)

    monkeypatch.setattr(report, "page", lambda _: wants_too_much())
    assert main(["report", "runs"]) == 2
    assert "bytes were needed" in capsys.readouterr().err


def test_other_errors_are_not_taken_for_it() -> None:
    assert out_of_memory(RuntimeError("shapes do not match")) is None
    assert out_of_memory(MemoryError()) is not None
