"""The parts of a lesson: claims, exercises, charts."""

import html
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from fenchel.lessons import completed
from fenchel.lessons.widgets import (
    Exercise,
    answer,
    bar_chart,
    claim,
    header,
    heat_chart,
    line_chart,
    run_picker,
    table,
)


def test_a_claim_that_holds_is_shown_and_another_is_an_error() -> None:
    assert "two and two" in claim("SM-01 E21", "two and two", 2 + 2 == 4).text
    with pytest.raises(AssertionError, match="SM-01: two and two"):
        claim("SM-01", "two and two", torch.tensor(False))
    with pytest.raises(ValueError, match="at least one requirement"):
        claim(" ", "two and two", True)


def test_the_answer_waits_for_a_choice() -> None:
    assert "because" not in answer(None, "a", "because").text
    assert "Right." in answer("a", "a", "because").text
    assert "Not quite: a." in answer("b", "a", "because").text


def test_the_header_links_to_the_lesson_after_it_and_to_those_before() -> None:
    text = header("l07_softmax").text
    assert "Lesson 7 of 21" in text
    assert "../l08_why_softmax/" in text
    assert "../l06_lagrange/" in text
    assert "Next" not in header("l21_whole_flow").text


def doubles(names: Mapping[str, Any]) -> None:
    assert names["double"](4) == 8, "double(4) is 8."


EXERCISE = Exercise(
    lesson="l01_slopes",
    task="Write `double`.",
    starter="def double(x):\n    return x",
    solution="def double(x):\n    return 2 * x",
    check=doubles,
)


@pytest.mark.parametrize(
    ("code", "hint"),
    [
        (EXERCISE.starter, "double(4) is 8."),
        ("", "The name 'double' is not defined."),
        ("def double(x):", "IndentationError"),
        ("def double(x):\n    return x[0]", "TypeError"),
        ("raise SystemExit", "SystemExit"),
    ],
)
def test_a_wrong_answer_gets_a_hint(code: str, hint: str) -> None:
    assert hint in (EXERCISE.mark(code) or "")


def test_code_that_never_ends_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fenchel.lessons.widgets._SECONDS", 0.2)
    assert "more than 0.2 seconds" in (EXERCISE.mark("while True: pass") or "")
    assert "more than 0.2 seconds" in (
        EXERCISE.mark("def double(x):\n    while True:\n        x = x + 1") or ""
    )


def test_a_solved_exercise_is_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    EXERCISE.verdict(EXERCISE.starter)
    assert completed() == set()
    EXERCISE.verdict(EXERCISE.solution)
    assert completed() == {"l01_slopes"}


def test_a_solution_counts_where_nothing_can_be_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    shown = EXERCISE.verdict(EXERCISE.solution).text
    assert "Solved." in shown
    assert "cannot be marked in the list of lessons: [Errno" in shown


def test_what_a_reader_writes_is_escaped() -> None:
    shown = EXERCISE.verdict("raise ValueError('<script>')").text
    found = re.search(r"data-html='(.*?)'", shown)
    assert found
    markup = json.loads(html.unescape(found[1]))
    assert "ValueError: &lt;script&gt;" in markup
    assert "<script>" not in markup


def test_every_chart_has_its_table() -> None:
    rows = [{"x": 1.0, "y": 0.25}, {"x": 2.0, "y": 0.125}]
    charts = (
        line_chart(rows, "x", "y", title="halves"),
        bar_chart(rows, "x", "y", title="halves"),
        heat_chart(torch.tensor([[0.25, 0.125]]), title="halves", rows=["one"]),
    )
    for chart in charts:
        assert "Table: halves" in chart.text
        assert ">0.125</td>" in chart.text.replace("&lt;", "<").replace("&gt;", ">")


def test_cells_are_labelled_by_names_and_equal_names_stay_apart() -> None:
    matrix = torch.tensor([[0.5, 0.25, 0.125], [1.0, 2.0, 4.0]])
    shown = heat_chart(
        matrix, title="halves", columns=["the", "bank", "the"], axes=("query", "key")
    ).text
    found = re.search(r"data-mime='&quot;application/vnd.vegalite.*?data-data='(.*?)'", shown)
    assert found
    spec = json.loads(json.loads(html.unescape(found[1])))
    cells = [(each["query"], each["key"], each["value"]) for each in spec["data"]["values"]]
    across = ["the (0)", "bank", "the (2)"]
    assert cells == [
        (str(i), name, matrix[i, j].item()) for i in range(2) for j, name in enumerate(across)
    ]
    assert [spec["encoding"][axis]["field"] for axis in "yx"] == ["query", "key"]
    for number in ("0.5", "0.125"):
        assert html.unescape(shown).count(f">{number}<") == 1, "once in the table"


def test_numbers_of_a_table_have_four_digits_and_text_is_escaped() -> None:
    text = table([{"name": "<b>", "value": 1 / 3}]).text
    assert ">&lt;b&gt;</td>" in text
    assert ">0.3333</td>" in text


def test_runs_are_found_by_their_settings(tmp_path: Path) -> None:
    for name in ("b", "a"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.toml").touch()
    (tmp_path / "c").mkdir()
    assert list(run_picker(tmp_path).options) == ["a", "b"]
