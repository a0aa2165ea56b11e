"""fenchel/report/run_data.py: what can be read of a run is read, and the rest is said."""

import json
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fenchel.report import run_data as reader
from fenchel.report.run_data import CONSEQUENCES, RunData, number, read_run

MakeRun = Callable[..., Path]


def of_lines(folder: Path, *lines: Any, end: str = "\n") -> RunData:
    text = "\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines)
    (folder / "metrics.jsonl").write_text(text + end)
    return read_run(folder)


def test_a_complete_run_has_no_errors(make_run: MakeRun) -> None:
    run = read_run(make_run())
    assert not run.troubles
    assert run.name == "demo"
    assert run.config["model"]["layers"] == 4
    assert run.last_step == 1000
    assert run.summary["status"] == "finished"
    assert len(run.sample["tokens"]) == run.sample["attention"]["size"]


@pytest.mark.parametrize("name", CONSEQUENCES)
@pytest.mark.parametrize("state", ["missing", "empty", "a link", "not a plain file"])
def test_an_unreadable_file_is_reported_under_its_name(
    make_run: MakeRun, name: str, state: str
) -> None:
    folder = make_run(steps=20)
    file = folder / name
    kept = file.read_bytes()
    file.unlink()
    if state == "empty":
        file.touch()
    elif state == "a link":
        (folder / "elsewhere").write_bytes(kept)
        file.symlink_to(folder / "elsewhere")
    elif state == "not a plain file":
        os.mkfifo(file)  # opening it would wait for ever
    run = read_run(folder)
    assert run.troubles.keys() == {name}
    assert state in run.troubles[name][0]
    assert CONSEQUENCES[name] in run.troubles[name][0]


@pytest.mark.parametrize("name", ["environment.json", "summary.json", "sample.json"])
@pytest.mark.parametrize(
    "text",
    ["{", "[1]", "7", '{"a": 1, "a": 2}', "[" * 100_000, '{"a": ' + "9" * 5000 + "}", "\x00"],
)
def test_what_is_not_an_object_is_left_out(make_run: MakeRun, name: str, text: str) -> None:
    folder = make_run(steps=20)
    (folder / name).write_text(text)
    run = read_run(folder)
    assert run.troubles.keys() == {name}
    assert getattr(run, name.removesuffix(".json")) == {}


def test_sentences_do_not_contain_the_path_of_the_run(make_run: MakeRun) -> None:
    folder = make_run(steps=20)
    for name in CONSEQUENCES:
        (folder / name).write_text("{")
    said = " ".join(sentence for some in read_run(folder).troubles.values() for sentence in some)
    assert len(read_run(folder).troubles) == len(CONSEQUENCES)
    assert str(folder.parent) not in said


def test_settings_that_are_not_toml_are_kept_as_text(make_run: MakeRun) -> None:
    folder = make_run(steps=20)
    (folder / "config.toml").write_text("[model\nwidth = 3")
    run = read_run(folder)
    assert run.config == {}
    assert run.config_text == "[model\nwidth = 3"
    assert "TOML" in run.troubles["config.toml"][0]


def test_a_last_line_cut_by_a_kill_is_left_out_and_reported(make_run: MakeRun) -> None:
    run = of_lines(make_run(steps=20), {"step": 1}, {"step": 2}, '{"step": 3, "train/lo', end="")
    assert [row["step"] for row in run.rows] == [1, 2]
    assert "cut short" in run.troubles["metrics.jsonl"][0]


def test_a_last_line_that_only_lacks_its_end_counts(make_run: MakeRun) -> None:
    run = of_lines(make_run(steps=20), {"step": 1}, {"step": 2}, end="")
    assert [row["step"] for row in run.rows] == [1, 2]
    assert not run.troubles


def test_unreadable_lines_between_good_ones_are_counted(make_run: MakeRun) -> None:
    bad = [
        "[]",
        "nonsense",
        '{"train/loss": 1}',
        '{"step": -1}',
        '{"step": 1e300}',
        '{"step": true}',
    ]
    run = of_lines(make_run(steps=20), {"step": 1}, *bad, "", {"step": 2})
    assert [row["step"] for row in run.rows] == [1, 2]
    assert run.troubles["metrics.jsonl"] == (
        "6 lines of metrics.jsonl could not be read, the first is line 2.",
    )


def test_numbers_that_are_not_finite_are_kept_as_such(make_run: MakeRun) -> None:
    line = (
        '{"step": 1, "a": NaN, "b": "inf", "c": -Infinity, "d": 1e400, "e": [1, "nan", null, "x"]}'
    )
    (row,) = of_lines(make_run(steps=20), line).rows
    assert math.isnan(number(row["a"]) or 0)
    assert (row["b"], row["c"], row["d"]) == (math.inf, -math.inf, math.inf)
    entries = row["e"]
    assert isinstance(entries, tuple)
    assert entries[0] == 1
    assert all(math.isnan(one) for one in entries[1:])


@pytest.mark.parametrize("value", [1e101, 10**400])
def test_a_number_too_large_to_draw_counts_as_infinite(value: float) -> None:
    assert number(value) == math.inf
    assert number(-value) == -math.inf
    assert number(1e99) == 1e99


def test_what_is_no_number_is_no_measurement(make_run: MakeRun) -> None:
    line = {"step": 1, "a": "word", "b": None, "c": {"d": 1}, "e": True, "f": 2}
    (row,) = of_lines(make_run(steps=20), line).rows
    assert row == {"step": 1, "f": 2}


def test_lines_of_one_step_are_joined(make_run: MakeRun) -> None:
    run = of_lines(
        make_run(steps=20), {"step": 5, "train/loss": 2}, {"step": 5, "validation/loss": 3}
    )
    assert run.rows == ({"step": 5, "train/loss": 2, "validation/loss": 3},)


def test_a_resumed_run_replaces_what_it_repeats(make_run: MakeRun) -> None:
    before = [{"step": step, "a": 1} for step in (10, 20, 30, 40)]
    run = of_lines(make_run(steps=20), *before, {"step": 20, "b": 2}, {"step": 30, "b": 2})
    assert [row["step"] for row in run.rows] == [10, 20, 30]
    assert "a" not in run.rows[-1]


def test_a_large_file_is_read_in_strides_but_every_evaluation_counts(
    make_run: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines: list[Any] = [{"step": step, "train/loss": 1.0} for step in range(1000)]
    lines[501] = {"step": 501, "validation/loss": 2.0}
    folder = make_run(steps=20)
    whole = of_lines(folder, *lines)
    size = (folder / "metrics.jsonl").stat().st_size
    monkeypatch.setattr(reader, "_METRICS_LIMIT", size // 10 + 1)
    run = read_run(folder)
    assert len(whole.rows) == 1000
    assert len(run.rows) == 101
    assert any("validation/loss" in row for row in run.rows)
    assert "one training line in 10" in run.troubles["metrics.jsonl"][0]


def test_a_line_without_end_is_not_taken_into_memory(
    make_run: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reader, "_LINE_LIMIT", 64)
    run = of_lines(
        make_run(steps=20), {"step": 1}, '{"step": 2, "a": "' + "x" * 500 + '"}', {"step": 3}
    )
    assert [row["step"] for row in run.rows] == [1, 3]


def test_a_folder_that_is_no_run_is_refused_in_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"holds none of config\.toml"):
        read_run(tmp_path)
    with pytest.raises(ValueError, match="is not a folder"):
        read_run(tmp_path / "absent")
