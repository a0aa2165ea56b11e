"""report/run_list.py: which folders are runs, how each stands, and in which order."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fenchel.files import LOCK, is_locked, locked
from fenchel.report.run_list import DEPTH, ORDERS, RunRow, find, in_order, run_row

Make = Callable[..., Path]


@pytest.fixture
def root(make_run: Make, tmp_path: Path) -> Path:
    """A folder with one finished run, written by hand, with its folder of checkpoints."""
    shutil.copytree(make_run("one"), tmp_path / "one")
    (tmp_path / "one" / "checkpoints").mkdir(exist_ok=True)
    return tmp_path


def copy(root: Path, name: str) -> Path:
    outside = shutil.ignore_patterns("three")  # a copy inside of the run itself
    return Path(shutil.copytree(root / "one", root / name, ignore=outside))


def state(path: Path) -> str:
    return run_row(path, path.parent).state


def test_runs_are_found_at_any_depth_and_not_inside_of_runs(root: Path) -> None:
    copy(root, "a/b/two")
    copy(root, "one/checkpoints/three")
    copy(root, ".hidden/four")
    copy(root, "/".join("deeper"[: DEPTH + 1]) + "/five")
    (root / "link").symlink_to(root / "a")
    (root / "notes").mkdir()
    (root / "notes" / "config.toml").write_text("title = 'of another program'")
    names = [str(path.relative_to(root)) for path in find(root).runs]
    assert names == ["a/b/two", "one"]
    assert find(root / "one").runs == [root / "one"]


def test_a_checkpoint_is_settings_beside_weights(root: Path) -> None:
    for name, files in {
        "adapter": ("adapter_config.json", "adapter_model.safetensors"),
        "llama": ("config.json", "model.safetensors"),
        "sharded": ("config.json", "model.safetensors.index.json"),
        "node": ("config.json", "package.json"),
    }.items():
        (root / name).mkdir()
        for file in files:
            (root / name / file).write_text("{}")
    assert [path.name for path in find(root).checkpoints] == ["adapter", "llama", "sharded"]


def test_a_search_that_would_not_end_is_cut(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fenchel.report.run_list.MOST", 1)
    assert not find(root).complete
    monkeypatch.setattr("fenchel.report.run_list.MOST", 100)
    assert find(root).complete


def test_a_row_has_the_numbers_of_the_summary(root: Path) -> None:
    row = run_row(root / "one", root)
    summary = json.loads((root / "one" / "summary.json").read_text())
    assert (row.path, row.state) == ("one", "finished")
    assert row.bits_per_byte == summary["validation"]["bits_per_byte"]
    assert row.parameters == summary["parameters"]
    assert row.step == summary["step"]
    assert json.loads(json.dumps(row.plain()))["path"] == "one"


def test_a_killed_run_is_stopped_unless_a_process_holds_its_lock(root: Path) -> None:
    path = copy(root, "killed")
    (path / "summary.json").unlink()
    (path / "sample.json").unlink(missing_ok=True)
    with (path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 9')  # a line that was being written
    before = {file.name: file.stat().st_mtime_ns for file in path.iterdir()}
    assert state(path) == "stopped"
    assert {file.name: file.stat().st_mtime_ns for file in path.iterdir()} == before
    with locked(path):
        assert is_locked(path)
        assert state(path) == "running"
    assert not is_locked(path)
    assert state(path) == "stopped"


def test_a_run_of_which_nothing_is_written_yet_was_stopped(root: Path) -> None:
    (root / "begun").mkdir()
    (root / "begun" / LOCK).touch()
    row = run_row(root / "begun", root)
    assert (row.state, row.note) == ("stopped", "It was stopped before it began to train.")


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("summary.json", "{"),
        ("summary.json", "[]"),
        ("config.toml", "seed = = 1"),
        ("config.toml", None),
        ("config.toml", ""),
        ("environment.json", '{"time": '),
        ("metrics.jsonl", "no line of ours\n"),
    ],
)
def test_a_damaged_file_is_named_and_the_rest_is_shown(
    root: Path, file: str, content: str | None
) -> None:
    path = copy(root, "damaged")
    (path / file).unlink()
    if content is not None:
        (path / file).write_text(content)
    row = run_row(path, root)
    assert row.state == "damaged"
    assert file in row.note
    assert state(root / "one") == "finished"


def test_a_file_that_is_a_link_or_a_pipe_is_damage_and_is_not_opened(root: Path) -> None:
    for name in ("link", "pipe"):
        path = copy(root, name)
        (path / "summary.json").unlink()
        if name == "link":
            (path / "summary.json").symlink_to(root / "one" / "summary.json")
        else:
            os.mkfifo(path / "summary.json")
        assert state(path) == "damaged"


@pytest.mark.parametrize("value", ["inf", "nan", 1e308, -3, [], {}, True, "x" * 10_000, "\x1b[2J"])
def test_any_value_in_a_summary_gives_a_row(root: Path, value: Any) -> None:
    path = copy(root, "strange")
    names = "status reason step steps parameters tokens seconds text validation".split()
    (path / "summary.json").write_text(json.dumps(dict.fromkeys(names, value)))
    (path / "environment.json").write_text(json.dumps({"time": value}))
    row = run_row(path, root)
    json.dumps(row.plain(), allow_nan=False)
    words = [word for word in (row.note, row.time, row.text, row.optimiser) if word]
    assert all("\x1b" not in word and len(word) <= 301 for word in words)
    for order in ORDERS:
        assert len(in_order([row, run_row(root / "one", root)], order)) == 2


def test_names_and_words_of_a_run_control_no_terminal(root: Path) -> None:
    path = copy(root, "x\x1b[2J")
    assert "\x1b" not in run_row(path, root).path


def test_rows_are_sorted_newest_largest_or_best_first_and_unknown_ones_last() -> None:
    rows = [
        RunRow(path="a", state="finished", time="2026-01-02", parameters=5.0, bits_per_byte=2.0),
        RunRow(path="c", state="stopped", bits_per_byte=float("nan")),
        RunRow(path="b", state="damaged", time="2026-01-03", parameters=9.0, bits_per_byte=1.5),
    ]
    orders = {by: "".join(row.path for row in in_order(rows, by)) for by in ("time", "name")}
    assert orders == {"time": "bac", "name": "abc"}
    assert [row.path for row in in_order(rows, "parameters")] == ["b", "a", "c"]
    assert [row.path for row in in_order(rows, "bits_per_byte")] == ["b", "a", "c"]
