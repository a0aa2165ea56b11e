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
from fenchel.lessons.course import MODEL
from fenchel.lessons.widgets import (
    Exercise,
    answer,
    bar_chart,
    claim,
    footer,
    header,
    heat_chart,
    line_chart,
    number,
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
    assert "../l08_why_softmax/" in footer("l07_softmax").text
    assert "Next" not in header("l21_whole_flow").text + footer("l21_whole_flow").text


def doubles(names: Mapping[str, Any]) -> None:
    assert names["double"](4) - 8 == 0, "double(4) is 8."


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
        ("def double(x):\n    return x[0]", "Line 2: TypeError"),
        ("def double(x):\n    return {}['a']", "Line 2: KeyError"),
        (
            "def double(x):\n    2 * x",
            "`double` returned None, not what the task asks for. Does it",
        ),
        ("def double(x):\n    return '8'", "`double` returned text, not what the task asks for."),
        ("double = 8", "`double` is a whole number; it should be a function."),
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


def test_the_solution_opens_after_two_tries_and_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    for left in ("2 tries", "1 try"):
        shown = EXERCISE.verdict(None).text
        assert f"opens after {left}" in shown
        assert "2 * x" not in html.unescape(shown).replace("</span><span>", "")
        EXERCISE.verdict(EXERCISE.starter)
    for code in (None, EXERCISE.starter, EXERCISE.solution, None):
        assert "Solution" in EXERCISE.verdict(code).text
    assert EXERCISE.form().element.value == EXERCISE.solution, "what was checked last is kept"


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


def spec_of(shown: str) -> Any:
    """What a chart hands to Vega-Lite."""
    found = re.search(r"data-mime='&quot;application/vnd.vegalite.*?data-data='(.*?)'", shown)
    assert found
    return json.loads(json.loads(html.unescape(found[1])))


def test_a_range_fixes_the_frame_and_the_setting_is_marked() -> None:
    rows = [{"x": x, "y": x / 2, "curve": name} for name in "ba" for x in (1.0, 2.0)]
    here = [{"x": 1.0, "y": 0.5}, {"x": 1.5}]
    shown = line_chart(
        rows, "x", "y", "curve", title="halves", x_range=(0, 3), y_range=(0, 1), here=here
    ).text
    assert "your setting" in shown
    spec = spec_of(shown)
    lines, dot, rule = spec["layer"]
    marks = [layer["mark"]["type"] for layer in spec["layer"]]
    assert marks == ["line", "point", "rule"]
    assert all(layer["encoding"]["x"]["scale"]["domain"] == [0, 3] for layer in spec["layer"])
    assert lines["encoding"]["y"]["scale"]["domain"] == [0, 1]
    assert lines["encoding"]["strokeDash"]["sort"] is None, "the first series is solid"
    names = [
        spec["datasets"][each["data"]["name"]] if "name" in each["data"] else each["data"]["values"]
        for each in (dot, rule)
    ]
    assert names == [here[:1], here[1:]]
    bars = spec_of(bar_chart(rows[:2], "x", "y", title="halves", y_range=(0, 1), here=2.0).text)
    assert bars["encoding"]["y"]["scale"]["domain"] == [0, 1]
    assert bars["encoding"]["color"]["condition"]["test"] == 'datum["x"] === 2.0'
    with pytest.raises(AssertionError):
        bar_chart(rows[:2], "x", "y", title="halves", here=7.0)


def test_colours_of_signed_numbers_go_two_ways_from_zero() -> None:
    signed = spec_of(heat_chart(torch.tensor([[-0.25, 1.0]]), title="t", of="slope").text)
    assert signed["encoding"]["color"]["scale"] == {"scheme": "blueorange", "domain": [-1.0, 1.0]}
    shares = spec_of(heat_chart(torch.tensor([[0.25, 0.5]]), title="t", of_range=(0, 1)).text)
    assert shares["encoding"]["color"]["scale"]["domain"] == [0, 1]
    assert shares["encoding"]["color"]["title"] is None, "'value' says nothing"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (1.82e9, "1.82 billion"),
        (47123.4, "47,123"),
        (2.2e-16, "2.2·10⁻¹⁶"),
        (-0.0, "0"),
        (1 / 3, "0.3333"),
        (3e20, "3·10²⁰"),
        (float("inf"), "inf"),
        (float("nan"), "nan"),
    ],
)
def test_numbers_are_written_for_a_reader(value: float, text: str) -> None:
    assert number(value) == text


def test_cells_are_labelled_by_names_and_equal_names_stay_apart() -> None:
    matrix = torch.tensor([[0.5, 0.25, 0.125], [1.0, 2.0, 4.0]])
    shown = heat_chart(
        matrix, title="halves", columns=["the", "bank", "the"], axes=("query", "key")
    ).text
    spec = spec_of(shown)
    cells = [(each["query"], each["key"], each["value"]) for each in spec["data"]["values"]]
    across = ["the (0)", "bank", "the (2)"]
    assert cells == [
        (str(i), name, matrix[i, j].item()) for i in range(2) for j, name in enumerate(across)
    ]
    assert [spec["encoding"][axis]["field"] for axis in "yx"] == ["query", "key"]
    for written in ("0.5", "0.125"):
        assert html.unescape(shown).count(f">{written}<") == 1, "once in the table"


def test_numbers_of_a_table_have_four_digits_and_text_is_escaped() -> None:
    text = table([{"name": "<b>", "value": 1 / 3}]).text
    assert ">&lt;b&gt;</td>" in text
    assert ">0.3333</td>" in text


def test_runs_are_found_by_their_settings(tmp_path: Path) -> None:
    for name in ("b", "a"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.toml").touch()
    (tmp_path / "c").mkdir()
    picker = run_picker(tmp_path)
    assert list(picker.options) == ["the model of the lessons", "a", "b"]
    assert picker.value == str(MODEL), "no lesson is empty for a new reader"
