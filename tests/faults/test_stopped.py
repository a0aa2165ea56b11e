"""Ctrl-C, kill and a closed terminal: once is a request, twice is an order."""

import os
import signal
from pathlib import Path
from typing import Any

from fenchel.train import checkpoint

INT, TERM, HUP = signal.SIGINT, signal.SIGTERM, signal.SIGHUP


def test_once_finishes_the_step_saves_reports_and_says_how_to_go_on(
    lab: Any, whole: dict[str, Any], tmp_path: Path
) -> None:
    """F4, at odd steps, each signal after the other, and after them the same bits."""
    run = tmp_path / "run"
    for step, by in ((3, INT), (7, TERM), (8, HUP), (21, TERM), (39, INT)):
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
        save = checkpoint._save_file

        def interrupted(*args: Any) -> None:
            save(*args)
            os.kill(os.getpid(), by)

        checkpoint._save_file = interrupted

    return prepare


def test_twice_stops_at_once_and_harms_no_checkpoint(
    lab: Any, whole: dict[str, Any], halfway: Path
) -> None:
    before = {p: p.stat().st_mtime_ns for p in (halfway / "checkpoints").rglob("*")}
    for by in (INT, TERM, HUP):

        def mischief(by: signal.Signals = by) -> None:
            lab.signalled(24, by)()
            twice(by)()

        ended = lab.resume(halfway, mischief=mischief)
        assert ended.code == 128 + by
        assert "stopped at once; what was saved before is intact." in ended.said
        after = {p: p.stat().st_mtime_ns for p in (halfway / "checkpoints").rglob("*")}
        assert after == before
    assert lab.resume(halfway).code == 0
    assert lab.story(halfway) == whole


def test_a_run_under_nohup_outlives_its_terminal(
    lab: Any, whole: dict[str, Any], halfway: Path
) -> None:
    def mischief() -> None:
        signal.signal(HUP, signal.SIG_IGN)
        lab.signalled(30, HUP)()

    assert lab.resume(halfway, mischief=mischief).code == 0
    assert lab.story(halfway) == whole


def test_a_stop_before_training_leaves_no_half_made_folder(lab: Any, tmp_path: Path) -> None:
    """F24: Ctrl-C while the text is being read."""
    import fenchel.flow

    def mischief() -> None:
        def interrupted(*_: object, **__: object) -> None:
            os.kill(os.getpid(), INT)

        fenchel.flow.run.prepare = interrupted

    ended = lab.begin(tmp_path / "run", mischief=mischief)
    assert ended.code == 130
    assert not (tmp_path / "run").exists()


def test_after_the_end_a_resume_says_so_and_changes_nothing(
    lab: Any, whole: dict[str, Any]
) -> None:
    run = lab.folder / "whole"
    before = {p: (p.stat().st_mtime_ns, p.stat().st_size) for p in run.rglob("*.*")}
    ended = lab.resume(run)
    assert ended.code == 0
    assert "is already finished: 40 of 40 steps" in ended.said
    after = {p: (p.stat().st_mtime_ns, p.stat().st_size) for p in run.rglob("*.*")}
    assert {p for p in after if after[p] != before.get(p)} == {run / "run.lock"}
    assert lab.story(run) == whole
