"""How a run begins: what is decided once, what it may be written over, who else listens."""

import os
import signal
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import fenchel.data.token_files
import fenchel.pipeline
from fenchel.train import StepTime
from fenchel.train.loop import Loop

STOPPED = 128 + signal.SIGTERM


def paced(seconds: float) -> Any:
    def prepare() -> None:
        fenchel.pipeline.preparation.time_steps = lambda *_, **__: StepTime(1, seconds)

    return prepare


def test_a_time_becomes_steps_that_a_resume_keeps(lab: Any, tmp_path: Path) -> None:
    run = tmp_path / "run"
    flags = [word for word in map(str, lab.beginning(run)) if word != "--set"]
    words = [w for w in flags if not w.startswith("train.steps")]
    settings = [x for w in words[4:] for x in ("--set", w)]

    def mischief() -> None:
        paced(0.1)()
        # A machine that is busy would otherwise plan fewer steps meanwhile.
        Loop._affordable_steps = lambda *_: 1000  # type: ignore[method-assign]
        lab.signalled(2)()

    ended = lab.start(*words[:4], *settings, "--budget", "0.1m", mischief=mischief).wait()
    assert ended.code == STOPPED
    assert tomllib.loads((run / "config.toml").read_text())["train"]["steps"] == 57

    def slower() -> None:
        paced(9.0)()
        lab.signalled(4)()

    assert lab.resume(run, mischief=slower).code == STOPPED
    assert tomllib.loads((run / "config.toml").read_text())["train"]["steps"] == 57


def test_a_folder_with_other_files_is_left_unchanged(lab: Any, tmp_path: Path) -> None:
    for name in ("tokenizer.json", "draft.tmp-1"):
        (tmp_path / name).write_text("mine")
    ended = lab.begin(tmp_path)
    assert ended.code == 2
    assert "holds other files" in ended.said
    assert {p.name: p.read_text() for p in tmp_path.iterdir()} == {
        "tokenizer.json": "mine",
        "draft.tmp-1": "mine",
    }


def test_a_start_that_comes_second_does_not_write_over_the_first(
    lab: Any, halfway: Path, tmp_path: Path
) -> None:
    """It asked whether the folder was free before the first had begun, and was slow since."""
    run = tmp_path / "new"
    run.mkdir()
    started = tmp_path / "started"

    def slow() -> None:
        locked = fenchel.pipeline.run.locked

        def late(path: Path) -> Any:
            halfway.rename(tmp_path / "gone")
            for file in (tmp_path / "gone").iterdir():
                file.rename(run / file.name)
            started.touch()
            return locked(path)

        fenchel.pipeline.run.locked = late

    ended = lab.begin(run, mischief=slow)
    (tmp_path / "gone").rename(halfway)
    assert started.exists()
    assert ended.code == 2
    assert "holds a run already" in ended.said
    assert lab.kept(run)[-1] == 23


def test_tensorboard_logs_with_its_flag_and_is_named_when_missing(
    lab: Any, whole: dict[str, Any], tmp_path: Path
) -> None:
    run = tmp_path / "run"
    ended = lab.begin(run, "--log", "tensorboard", mischief=lab.signalled(12))
    assert ended.code == STOPPED

    def missing() -> None:
        sys.modules["torch.utils.tensorboard"] = None  # type: ignore[assignment]

    ended = lab.resume(run, mischief=missing)
    assert ended.code == 2
    assert "pip install 'fenchel[log]'" in ended.said
    assert lab.resume(run).code == 0
    assert lab.story(run) == whole
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    # File by file: two that began in the same second are ordered by their process ids.
    files = [EventAccumulator(str(file)).Reload() for file in (run / "tensorboard").iterdir()]
    assert len(files) == 2
    for name in ("train/loss", "attention/entropy/layer_1"):
        steps = [event.step for events in files for event in events.Scalars(name)]
        assert sorted(steps) == list(range(5, 41, 5))

    ended = lab.begin(tmp_path / "other", "--log", "tensorboard", mischief=missing)
    assert ended.code == 2
    assert not os.path.exists(tmp_path / "other")


def test_token_files_may_be_shared_between_runs(
    lab: Any, whole: dict[str, Any], tmp_path: Path
) -> None:
    shared = tmp_path / "shared"
    for name in ("one", "two"):
        ended = lab.begin(
            tmp_path / name, "--set", f"text.prepared={shared}", mischief=lab.signalled(6)
        )
        assert ended.code == STOPPED
        assert not (tmp_path / name / "tokens").exists()
    assert (shared / "train.bin").is_file()
    assert lab.resume(tmp_path / "two").code == 0
    assert lab.story(tmp_path / "two") == whole


def while_encoding(act: Callable[[], object]) -> Callable[[], None]:
    """Do something when the first token file is half made."""

    def mischief() -> None:
        encode = fenchel.data.token_files._require_exact

        def watched(*args: Any) -> None:
            fenchel.data.token_files._require_exact = encode
            act()
            encode(*args)

        fenchel.data.token_files._require_exact = watched

    return mischief


@pytest.mark.needs_posix("locked folders")
def test_what_a_killed_run_left_beside_shared_token_files_is_removed_by_the_next(
    lab: Any, whole: dict[str, Any], tmp_path: Path
) -> None:
    folder = tmp_path / "folder"
    sharing = ("--set", f"text.prepared={folder / 'shared'}")
    killed = lab.begin(
        tmp_path / "one",
        *sharing,
        mischief=while_encoding(lambda: os.kill(os.getpid(), signal.SIGKILL)),
    )
    assert killed.code == -signal.SIGKILL
    assert ".tmp-" in "".join(os.listdir(folder))
    assert lab.begin(tmp_path / "two", *sharing).code == 0
    assert os.listdir(folder) == ["shared"]
    assert lab.story(tmp_path / "two") == whole


def test_a_run_that_is_still_making_shared_token_files_is_not_disturbed(
    lab: Any, whole: dict[str, Any], tmp_path: Path
) -> None:
    folder = tmp_path / "folder"
    sharing = ("--set", f"text.prepared={folder / 'shared'}")
    pause = while_encoding(lambda: os.kill(os.getpid(), signal.SIGSTOP))
    first = lab.start(*lab.beginning(tmp_path / "one"), *sharing, mischief=pause)
    os.waitid(os.P_PID, first.pid, os.WSTOPPED | os.WNOWAIT)
    assert lab.begin(tmp_path / "two", *sharing, mischief=lab.signalled(6)).code == STOPPED
    assert len(os.listdir(folder)) == 2
    os.kill(first.pid, signal.SIGCONT)
    assert first.wait().code == 0
    assert os.listdir(folder) == ["shared"]
    assert lab.story(tmp_path / "one") == whole


def test_two_runs_that_begin_in_one_second_get_two_folders(tmp_path: Path) -> None:
    first = fenchel.pipeline.new_run_path(tmp_path, "sotu")
    first.mkdir()
    assert fenchel.pipeline.new_run_path(tmp_path, "sotu") != first
