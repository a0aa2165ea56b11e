"""A disk that is full at the start, in the middle, at the end; and one that is gone."""

import errno
import json
import os
import resource
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors import SafetensorError

from fenchel import report
from fenchel.checkpoints import run_checkpoint
from fenchel.report import run_data


def no_room(free: int = 0) -> None:
    usage = shutil.disk_usage("/")._replace(free=free)
    shutil.disk_usage = lambda _: usage


def test_no_room_at_the_start_is_one_sentence_and_leaves_nothing(lab: Any, tmp_path: Path) -> None:
    ended = lab.begin(tmp_path / "run", mischief=lambda: no_room(600_000))
    assert ended.code == 2
    assert "fenchel: no space: " in ended.said
    assert "0.6 MiB free and" in ended.said
    assert not (tmp_path / "run").exists()


def test_no_room_at_a_resume_is_one_sentence_and_changes_nothing(lab: Any, halfway: Path) -> None:
    before = lab.kept(halfway)
    ended = lab.resume(halfway, mischief=lambda: no_room(600_000))
    assert ended.code == 2
    assert "no space" in ended.said
    assert lab.kept(halfway) == before


def weights_do_not_fit() -> None:
    def write(*_: object) -> None:
        raise SafetensorError("Error while serializing: I/O error: No space left (os error 28)")

    run_checkpoint.save_file = write


def no_file_fits(name: str) -> Callable[[], None]:
    """The disk fills just when the file of this name is written."""

    def fill() -> None:
        for call in ("write_text", "write_bytes"):
            write = getattr(Path, call)

            def torn(path: Path, content: Any, *rest: Any, write: Any = write, **how: Any) -> None:
                if path.name.startswith(name):
                    write(path, content[: len(content) // 2], *rest, **how)
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
                write(path, content, *rest, **how)

            setattr(Path, call, torn)

    return fill


FULL = {
    "told beforehand": no_room,
    "at the weights": weights_do_not_fit,
    "at the state": no_file_fits("state.json"),
    "at the manifest": no_file_fits("manifest.json"),
}


def restored() -> Callable[[], None]:
    """Undo what fills a disk."""
    before = shutil.disk_usage, run_checkpoint.save_file, Path.write_text, Path.write_bytes

    def undo() -> None:
        shutil.disk_usage, run_checkpoint.save_file, Path.write_text, Path.write_bytes = before

    return undo


@pytest.mark.parametrize("moment", FULL)
def test_a_full_disk_is_reported_and_the_run_ends_with_the_same_bits(
    lab: Any, whole: dict[str, Any], halfway: Path, moment: str
) -> None:
    """F5: full from step 24 to step 30; then there is room again."""
    seen = halfway.with_name("seen")

    def look() -> None:
        there = sorted(path.name for path in (halfway / "checkpoints").iterdir())
        seen.write_text(json.dumps(there))

    def mischief() -> None:
        lab.written_at_once()
        lab.at_step(24, FULL[moment])()
        lab.at_step(31, restored())()
        lab.at_step(32, look)()

    before = sorted(path.name for path in (halfway / "checkpoints").iterdir())
    ended = lab.resume(halfway, mischief=mischief)
    assert ended.code == 0
    assert ended.said.count("no space: ") == 2
    assert ended.said.count("The run goes on without this checkpoint.") == 2
    assert json.loads(seen.read_text()) == before, "no temporary, no loss"
    assert lab.kept(halfway)[-2:] == [35, 40]
    assert lab.story(halfway) == whole


def test_a_last_checkpoint_that_does_not_fit_ends_with_code_4(
    lab: Any, whole: dict[str, Any], halfway: Path
) -> None:
    """A real limit on the size of files, of half a checkpoint; every save is torn by it."""

    def mischief() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (25_000, resource.RLIM_INFINITY))

    ended = lab.resume(halfway, mischief=mischief)
    assert ended.code == 4
    assert "a checkpoint of 0.2 MiB does not fit" in ended.said
    assert "Make room and go on with --resume" in ended.said
    assert "the last good checkpoint is step-000023." in ended.said
    assert lab.kept(halfway)[-1] == 23
    assert not lab.left_over(halfway)
    assert lab.resume(halfway).code == 0
    assert lab.story(halfway) == whole


def test_a_signal_whose_checkpoint_does_not_fit_ends_with_code_4(lab: Any, halfway: Path) -> None:
    def mischief() -> None:
        lab.at_step(24, no_room)()
        lab.signalled(24)()

    assert lab.resume(halfway, mischief=mischief).code == 4


def test_a_disk_that_fills_after_the_last_checkpoint_loses_only_the_report(
    lab: Any, whole: dict[str, Any], halfway: Path
) -> None:
    ended = lab.resume(halfway, mischief=no_file_fits("summary.json.tmp"))
    assert ended.code == 2, "it never began"
    ended = lab.resume(halfway, mischief=lambda: lab.at_step(39, no_file_fits("report.html"))())
    assert ended.code == 4
    assert "the last good checkpoint is step-000040, go on with --resume" in ended.said
    assert lab.resume(halfway).code == 0
    assert lab.story(halfway) == whole


@pytest.mark.parametrize("trouble", ["deleted", "not writable"])
def test_a_folder_that_is_lost_under_the_run_is_one_sentence_and_code_4(
    lab: Any, halfway: Path, trouble: str
) -> None:
    """F6."""

    def refuse(*_: object) -> None:
        raise SafetensorError("I/O error: Permission denied (os error 13)")

    def lose() -> None:
        if trouble == "deleted":
            shutil.rmtree(halfway)
        else:
            run_checkpoint.save_file = refuse

    ended = lab.resume(halfway, mischief=lab.at_step(24, lose))
    assert ended.code == 4
    assert "Traceback" not in ended.said
    if trouble == "deleted":
        assert ended.said.endswith(f"{halfway} is not there.")
        halfway.mkdir()
    else:
        assert "the last good checkpoint is step-000023" in ended.said


def test_a_read_error_does_not_become_part_of_the_page_of_a_run(
    lab: Any, whole: dict[str, Any], halfway: Path
) -> None:
    """A page of any directory leaves out what cannot be read; the run writes its own later."""

    def mischief() -> None:
        def fail(path: Path) -> Any:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE), str(path))

        run_data._lines = fail

    ended = lab.resume(halfway, mischief=mischief)
    assert ended.code == 4
    assert "metrics.jsonl: too many open files; the last good checkpoint is step-000040" in (
        ended.said
    )
    assert lab.resume(halfway).code == 0
    assert lab.story(halfway) == whole
    assert report.page(halfway).read_text().count("could not be read") == 0
