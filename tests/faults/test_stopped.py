"""Ctrl-C, kill and a closed terminal: once is a request, twice is an order."""

import fcntl
import os
import pty
import signal
import termios
from pathlib import Path
from typing import Any

import pytest

from fenchel.checkpoints import run_checkpoint
from fenchel.operating_system import SYSTEM

INT, TERM, HUP = signal.SIGINT, signal.SIGTERM, signal.SIGHUP


def test_one_signal_finishes_the_step_saves_reports_and_names_the_resume_command(
    lab: Any, whole: dict[str, Any], tmp_path: Path
) -> None:
    """F4, at odd steps, each signal after the other, and after them the same bits."""
    run = tmp_path / "run"
    for step, by in ((3, INT), (7, TERM), (8, SYSTEM.hangup or INT), (21, TERM), (39, INT)):
        stop = lab.signalled(step, by)
        ended = lab.resume(run, mischief=stop) if run.exists() else lab.begin(run, mischief=stop)
        assert ended.code == 128 + by
        assert max(lab.kept(run)) == step
        assert f"The run was interrupted: stopped by {by.name} after step {step}" in ended.said
        assert "fenchel train --resume" in ended.said
        assert (run / "report.html").exists()
        (run / "report.html").unlink()
        assert not lab.left_over(run)
    assert lab.resume(run).code == 0
    assert lab.story(run) == whole


def twice(by: signal.Signals) -> Any:
    """A second signal while the first one's checkpoint is being written."""

    def prepare() -> None:
        save = run_checkpoint.write_tensors

        def interrupted(*args: Any) -> None:
            run_checkpoint.write_tensors = save
            save(*args)
            os.kill(os.getpid(), by)

        run_checkpoint.write_tensors = interrupted

    return prepare


def test_twice_stops_at_once_and_harms_no_checkpoint(
    lab: Any, whole: dict[str, Any], halfway: Path
) -> None:
    """The checkpoint that is being written is completed; all others stay as they are."""
    for by, step in ((INT, 24), (TERM, 25)):
        before = {p: p.read_bytes() for p in (halfway / "checkpoints").rglob("*.*")}

        def mischief(by: signal.Signals = by, step: int = step) -> None:
            lab.signalled(step, by)()
            twice(by)()

        ended = lab.resume(halfway, mischief=mischief)
        assert ended.code == 128 + by
        assert "stopped at once; what was saved before is unchanged." in ended.said
        after = {p: p.read_bytes() for p in (halfway / "checkpoints").rglob("*.*")}
        assert all(after[path] == before[path] for path in before.keys() & after.keys())
        assert before.keys() & after.keys()
        assert lab.kept(halfway)[-1] == step
        assert not lab.left_over(halfway)
    assert lab.resume(halfway).code == 0
    assert lab.story(halfway) == whole


@pytest.mark.needs_posix("hang-ups")
def test_two_hangups_of_a_terminal_stop_as_one_does(
    lab: Any, whole: dict[str, Any], halfway: Path
) -> None:
    """Once by the kernel and once by the shell, the second time while a checkpoint is written."""

    def mischief() -> None:
        lab.signalled(24, HUP)()
        twice(HUP)()

    assert lab.resume(halfway, mischief=mischief).code == 128 + HUP
    assert max(lab.kept(halfway)) == 24
    assert lab.resume(halfway).code == 0
    assert lab.story(halfway) == whole


@pytest.mark.needs_posix("hang-ups")
@pytest.mark.parametrize("term", ["xterm", "dumb"])  # a live bar, or plain lines
def test_a_closed_terminal_stops_the_run_as_a_signal_does(
    lab: Any, whole: dict[str, Any], halfway: Path, term: str
) -> None:
    ours, theirs = pty.openpty()

    def mischief() -> None:
        os.close(ours)
        os.setsid()
        fcntl.ioctl(theirs, termios.TIOCSCTTY, 0)
        for number in (0, 1, 2):
            os.dup2(theirs, number)
        os.environ["TERM"] = term
        lab.at_step(25, lambda: os.kill(os.getpid(), signal.SIGSTOP))()

    child = lab.start("--resume", halfway, mischief=mischief)
    os.close(theirs)
    os.waitid(os.P_PID, child.pid, os.WSTOPPED | os.WNOWAIT)
    os.close(ours)  # the terminal is gone: SIGHUP, and every word to it is an error
    os.kill(child.pid, signal.SIGCONT)
    assert child.wait().code == 128 + HUP
    assert max(lab.kept(halfway)) == 25
    assert (halfway / "report.html").exists()
    assert lab.resume(halfway).code == 0
    assert lab.story(halfway) == whole


@pytest.mark.parametrize("also_errors", [False, True])
def test_a_closed_pipe_does_not_end_a_run(
    lab: Any, whole: dict[str, Any], halfway: Path, also_errors: bool
) -> None:
    """Audit F6: fenchel train | head -1, with and without 2>&1."""

    def mischief() -> None:
        ours, theirs = os.pipe()
        os.close(ours)
        os.dup2(theirs, 1)
        if also_errors:
            os.dup2(theirs, 2)

    ended = lab.resume(halfway, mischief=mischief)
    assert ended.code == 0
    if not also_errors:
        says = "standard output cannot be written (broken pipe); the run goes on without it."
        assert ended.said == f"fenchel: {says}"
    assert lab.story(halfway) == whole


@pytest.mark.needs_posix("hang-ups")
def test_a_run_under_nohup_outlives_its_terminal(
    lab: Any, whole: dict[str, Any], halfway: Path
) -> None:
    def mischief() -> None:
        signal.signal(HUP, signal.SIG_IGN)
        lab.signalled(30, HUP)()

    assert lab.resume(halfway, mischief=mischief).code == 0
    assert lab.story(halfway) == whole


@pytest.mark.parametrize("by", [INT, pytest.param(HUP, marks=pytest.mark.needs_posix("hang-ups"))])
def test_a_stop_before_training_leaves_no_half_made_folder(
    lab: Any, tmp_path: Path, by: signal.Signals
) -> None:
    """F24: Ctrl-C while the text is being read, or its terminal closes."""
    import fenchel.pipeline

    def mischief() -> None:
        def interrupted(*_: object, **__: object) -> None:
            os.kill(os.getpid(), by)

        fenchel.pipeline.task.prepare = interrupted

    ended = lab.begin(tmp_path / "run", mischief=mischief)
    assert ended.code == 128 + by
    assert "stopped at once; what was saved before is unchanged." in ended.said
    assert not (tmp_path / "run").exists()


def test_a_resume_of_a_finished_run_changes_nothing(lab: Any, whole: dict[str, Any]) -> None:
    run = lab.folder / "whole"
    before = {p: (p.stat().st_mtime_ns, p.stat().st_size) for p in run.rglob("*.*")}
    ended = lab.resume(run)
    assert ended.code == 0
    assert "is already finished: 40 of 40 steps" in ended.said
    after = {p: (p.stat().st_mtime_ns, p.stat().st_size) for p in run.rglob("*.*")}
    assert {p for p in after if after[p] != before.get(p)} == {run / "run.lock"}
    assert lab.story(run) == whole
