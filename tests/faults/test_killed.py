"""kill -9 at any moment: every resume succeeds and ends with the same bits.

A moment is a number of calls of functions, of Python's and of C's, counted by the interpreter's
profiler: a seed gives the same moments on every machine, and they fall between any two calls,
those of a checkpoint being written among them. Some kills come from outside by the clock as well.
"""

import os
import random
import shutil
import signal
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from fenchel import files, report
from fenchel.checkpoints import run_checkpoint
from fenchel.pipeline import run as pipeline_run
from fenchel.pipeline import task

INTERVAL = 5


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def after_calls(count: int) -> None:
    """Die when so many calls and returns of functions have passed."""
    passed = 0

    def look(*_: object) -> None:
        nonlocal passed
        passed += 1
        if passed == count:
            die()

    sys.setprofile(look)


def in_a_save(number: int, count: int) -> Callable[[], None]:
    """Die in the ``number``-th checkpoint to be written, after ``count`` calls in it."""

    def prepare() -> None:
        save, saves = run_checkpoint.save, 0

        def watched(*args: Any) -> Path:
            nonlocal saves
            saves += 1
            if saves == number:
                after_calls(count)
            try:
                return save(*args)
            finally:
                sys.setprofile(None)

        run_checkpoint.save = watched

    return prepare


def measure_calls(lab: Any, run: Path) -> tuple[int, int]:
    """How many calls a whole run and one checkpoint take."""
    told = run.with_name("calls")

    def count() -> None:
        total = [0, 0]
        save = run_checkpoint.save

        def look(*_: object) -> None:
            total[0] += 1

        def look_at_save(*_: object) -> None:
            total[1] += 1

        def watched(*args: Any) -> Path:
            total[1] = 0
            sys.setprofile(look_at_save)  # of this thread, not of the one that trains
            try:
                return save(*args)
            finally:
                sys.setprofile(None)
                told.write_text(f"{total[0]} {total[1]}")

        run_checkpoint.save = watched
        sys.setprofile(look)

    assert lab.begin(run, mischief=count).code == 0
    whole, one = told.read_text().split()
    return int(whole), int(one)


def test_killed_at_25_moments_a_run_ends_with_the_bits_of_one_never_killed(
    lab: Any, whole: dict[str, Any], tmp_path: Path
) -> None:
    draw = random.Random(25)
    calls, calls_of_save = measure_calls(lab, tmp_path / "measured")
    assert lab.story(tmp_path / "measured") == whole
    kills = inside = runs = 0
    while kills < 25:
        run, runs = tmp_path / f"run-{runs}", runs + 1
        for wanted in (*[True] * min(5, 25 - kills), False):
            saving = 2 * inside <= kills  # a run that ends before its kill counts for neither
            mischief = None
            if wanted and saving:
                mischief = in_a_save(draw.randint(1, 3), draw.randrange(1, calls_of_save))
            elif wanted:
                mischief = partial(after_calls, draw.randrange(1, calls // 2))
            ended, before = go_on(lab, run, mischief)
            if ended.code == 0:
                break
            assert ended.code == -signal.SIGKILL, ended.said
            kills, inside = kills + 1, inside + saving
            committed = max(lab.kept(run), default=0)
            assert committed >= before
            assert ended.step + 1 - committed <= 2 * INTERVAL  # the newest may be half written
        assert lab.story(run) == whole
        assert not lab.left_over(run)
    assert inside >= 12


def go_on(lab: Any, run: Path, mischief: Callable[[], None] | None) -> tuple[Any, int]:
    """Resume, or give the first command again if it was killed before there was a run."""
    if (run / "config.toml").exists():
        before = max(lab.kept(run), default=0)
        return lab.resume(run, mischief=mischief), before
    return lab.begin(run, mischief=mischief), 0


def test_killed_from_outside_by_the_clock(lab: Any, whole: dict[str, Any], tmp_path: Path) -> None:
    draw = random.Random(5)
    run = tmp_path / "run"
    child = lab.start(*lab.beginning(run))
    for _ in range(5):
        metrics = run / "metrics.jsonl"
        size = metrics.stat().st_size if metrics.exists() else 0
        while child.alive() and (not metrics.exists() or metrics.stat().st_size == size):
            time.sleep(0.002)
        time.sleep(draw.uniform(0.0, 0.1))
        os.kill(child.pid, signal.SIGKILL)
        child.wait()
        child = lab.start("--resume", run)
    assert child.wait().code == 0
    assert lab.story(run) == whole
    assert not lab.left_over(run)


# --- named moments


def around(owner: Any, name: str, when: str, matches: Callable[..., bool] = lambda *_: True) -> Any:
    """Die ``before`` or ``after`` the first call of a function whose arguments match."""

    def prepare() -> None:
        function = getattr(owner, name)

        def watched(*args: Any, **others: Any) -> Any:
            if matches(*args) and when == "before":
                die()
            result = function(*args, **others)
            if matches(*args) and when == "after":
                die()
            return result

        setattr(owner, name, watched)

    return prepare


def writes(name: str) -> Callable[..., bool]:
    return lambda *args: Path(args[-1] if len(args) > 1 else args[0]).name == name


def is_step(_path: Path, target: Path) -> bool:
    return target.name.startswith("step-") and target.name[5:].isdigit()


def is_trash(_path: Path, target: Path) -> bool:
    return target.name.startswith("step-") and ".tmp-" in target.name


def in_a_deletion() -> None:
    """Die when a rotation has deleted two files of an old checkpoint."""
    rotate, deleted = run_checkpoint.rotate, 0

    def second(*_: object) -> bool:
        nonlocal deleted
        deleted += 1
        return deleted == 4  # asked before and after each

    def armed(*args: Any, **others: Any) -> None:
        around(os, "unlink", "after", second)()
        rotate(*args, **others)

    run_checkpoint.rotate = armed


COMMITTED = "committed"
POINTS = {
    "after the weights are written": around(
        run_checkpoint, "write_tensors", "after", writes("model.safetensors")
    ),
    "after the optimiser is written": around(
        run_checkpoint, "write_tensors", "after", writes("optimiser.safetensors")
    ),
    "before a file is synced": around(files, "sync", "before", writes("config.json")),
    "after a file is synced": around(files, "sync", "after", writes("state.json")),
    "before the manifest": around(
        files, "write_atomic", "before", lambda path, _: path.name == "manifest.json"
    ),
    "before the manifest has its name": around(Path, "replace", "before", writes("manifest.json")),
    "after the manifest": around(
        files, "write_atomic", "after", lambda path, _: path.name == "manifest.json"
    ),
    "before the rename": around(Path, "replace", "before", is_step),
    "after the rename": (COMMITTED, around(Path, "replace", "after", is_step)),
    "before the rotation": (COMMITTED, around(run_checkpoint, "rotate", "before")),
    "in the rotation, before a rename": (COMMITTED, around(Path, "replace", "before", is_trash)),
    "in the rotation, after a rename": (COMMITTED, around(Path, "replace", "after", is_trash)),
    "in the middle of a deletion": (COMMITTED, in_a_deletion),
}


def test_killed_at_every_named_point_of_a_save(
    lab: Any, whole: dict[str, Any], tmp_path: Path
) -> None:
    """F2: the newest committed checkpoint is the one that is gone on from."""
    run = tmp_path / "run"
    assert lab.begin(run, mischief=lab.signalled(11)).code == 128 + signal.SIGTERM
    for point, mischief in POINTS.items():
        after = isinstance(mischief, tuple)
        before = max(lab.kept(run))
        ended = lab.resume(run, mischief=mischief[1] if after else mischief)
        assert ended.code == -signal.SIGKILL, (point, ended)
        assert f"Resuming from step-{before:06d}" in ended.said
        assert (max(lab.kept(run)) > before) == after, point
        folder, wrong = run_checkpoint.newest(run / "checkpoints")
        assert folder is not None, point
        assert not wrong, point
    assert lab.resume(run).code == 0
    assert lab.story(run) == whole
    assert not lab.left_over(run)


@pytest.mark.parametrize("when", ["before", "after"])
def test_killed_while_the_settings_are_written(
    lab: Any, whole: dict[str, Any], tmp_path: Path, when: str
) -> None:
    """Before they have their name the folder is no run, and the same command begins it again."""
    run = tmp_path / "run"
    ended = lab.begin(run, mischief=around(Path, "replace", when, writes("config.toml")))
    assert ended.code == -signal.SIGKILL
    if when == "before":
        refused = lab.resume(run)
        assert refused.code == 2
        assert "was stopped before it began to train; give the command that began it" in (
            refused.said
        )
        assert lab.begin(run).code == 0
    else:
        assert lab.resume(run).code == 0
    assert lab.story(run) == whole
    assert not lab.left_over(run)


def test_killed_after_the_last_step_the_report_is_made_by_a_resume(
    lab: Any, whole: dict[str, Any], half: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    shutil.copytree(half, run)
    (run / "report.html").unlink()
    ended = lab.resume(run, mischief=around(task, "sample", "before"))
    assert ended.code == -signal.SIGKILL
    assert not (run / "report.html").exists()
    ended = lab.resume(run)
    assert ended.code == 0
    assert "already finished" in ended.said
    assert (run / "report.html").exists()
    assert lab.story(run) == whole


@pytest.mark.parametrize("name", ["sample", "page"])
@pytest.mark.parametrize("when", ["before", "after"])
def test_killed_while_the_last_page_is_written_a_resume_makes_that_of_the_last_step(
    lab: Any, whole: dict[str, Any], halfway: Path, name: str, when: str
) -> None:
    """Audit F1: the run was interrupted before, so that an older sample and page are there."""
    older = (halfway / "report.html").read_text()
    owner = {"sample": task, "page": pipeline_run}[name]
    ended = lab.resume(halfway, mischief=around(owner, name, when))
    assert ended.code == -signal.SIGKILL
    assert lab.resume(halfway).code == 0
    assert lab.story(halfway) == whole
    page = (halfway / "report.html").read_text()
    assert page != older
    assert "stopped by SIGTERM" not in page
    assert report.page(halfway).read_text() == page


def test_killed_in_preparation_the_folder_may_be_begun_again_with_other_settings(
    lab: Any, tmp_path: Path
) -> None:
    """Audit A15: its token files are of another vocabulary."""
    run = tmp_path / "run"
    killed = lab.begin(run, mischief=around(pipeline_run, "resolve_steps", "before"))
    assert killed.code == -signal.SIGKILL
    assert (run / "tokens").is_dir()
    refused = lab.resume(run)
    assert refused.code == 2
    assert f"give the command that began it again, with --out {run}" in refused.said
    ended = lab.begin(run, "--set", "text.vocabulary=290", "--steps", "5")
    assert ended.code == 0, ended.said
    assert not lab.left_over(run)
