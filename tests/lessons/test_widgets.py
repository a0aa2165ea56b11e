"""The parts of a lesson: claims, exercises, charts."""

import html
import json
import re
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import marimo as mo
import pytest
import torch
from marimo._runtime.control_flow import MarimoStopError

from fenchel.lessons import completed
from fenchel.lessons.course import MODEL
from fenchel.lessons.widgets import (
    Exercise,
    answer,
    bar_chart,
    claim,
    details,
    footer,
    header,
    heat_chart,
    line_chart,
    number,
    run_picker,
    table,
    text_field,
    token_ids,
    words_and_weights,
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


def test_the_header_links_to_the_lessons_before_and_the_footer_to_the_next() -> None:
    text = header("softmax").text
    assert "Lesson 7 ·" in text
    assert '"/model"' in footer("softmax").text
    assert "../priors_and_budgets/" not in text, "the way on is at the end"
    assert "../lagrange/" in text
    assert "../priors_and_budgets/" in footer("softmax").text
    last = header("whole_flow").text + footer("whole_flow").text
    assert "Next:" not in last
    assert '"/progress"' in last, "the last page leads to what was mastered"


def doubles(names: Mapping[str, Any]) -> None:
    assert names["double"](4) - 8 == 0, "double(4) is 8."


EXERCISE = Exercise(
    lesson="slopes",
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
            "`double` returned None; the task asks for a whole number. Does it end with `return`?",
        ),
        (
            "def double(x):\n    return '8'",
            "`double` returned text; the task asks for a whole number.",
        ),
        (
            "def double(x):\n    return torch.ones(2)",
            "`double` returned a tensor of shape (2,) and type torch.float32; the task asks for",
        ),
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
    assert completed() == {"slopes"}


def test_the_solution_opens_after_two_tries_and_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert EXERCISE.hints() == ["double(4) is 8."]
    for left in ("2 tries", "1 try"):
        shown = EXERCISE.verdict(None).text
        assert f"opens after {left}" in shown
        assert "Hint 1 of 1" in shown
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
        assert "Its numbers" in chart.text
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


def test_a_text_of_the_reader_becomes_tokens_and_an_empty_one_stops_the_cell() -> None:
    tokenizer = SimpleNamespace(encode_whole=lambda text: [ord(sign) for sign in text])
    assert text_field("the people").value == "the people"
    assert token_ids("abcd", tokenizer, most=3) == [97, 98, 99]
    with pytest.raises(MarimoStopError) as stopped:
        token_ids("a", tokenizer, most=3)
    assert "Type a few words" in mo.as_html(stopped.value.output).text


@pytest.mark.parametrize("causal", [True, False])
def test_words_and_weights_have_every_head_and_begin_at_the_last_token(causal: bool) -> None:
    maps = torch.rand(2, 3, 4, 4, generator=torch.Generator().manual_seed(0)).double()
    scene = words_and_weights(["we", "the", "people", "of"], maps, causal=causal)
    assert (scene.state["head"], scene.state["word"]) == (5, 3)
    found = re.search(r'id="data">(.*?)</script>', scene.page, re.DOTALL)
    assert found
    heads = json.loads(found[1])["texts"][0]["heads"]
    assert [head["name"] for head in heads] == ["1.1", "1.2", "1.3", "2.1", "2.2", "2.3"]
    for i, row in enumerate(heads[4]["weights"]):
        assert row == pytest.approx(maps[1, 1, i, : i + 1 if causal else 4].tolist(), abs=1e-7)


def test_a_fold_says_how_many_claims_it_holds() -> None:
    claims = [claim("SM-01", text, True) for text in ("One.", "Two.")]
    assert "Checked details (2)" in details(*claims).text
    assert "More (1)" in details(mo.md("words"), claims[0], title="More").text
    assert "More (" not in details(mo.md("words"), title="More").text
