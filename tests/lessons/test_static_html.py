"""What marimo shows as plain HTML, element by element."""

import html
import json
import re
from typing import Any

import marimo as mo
import pytest
import torch

from fenchel.lessons.notebook_states import Control
from fenchel.lessons.static_html import mathml, plain_html
from fenchel.lessons.widgets import bar_chart, heat_chart, line_chart, proof, what_breaks


def chart_of(output: Any) -> dict[str, Any]:
    found = re.search(r'data-chart="([^"]*)"', plain_html(output, {}))
    assert found is not None
    data: dict[str, Any] = json.loads(html.unescape(found[1]))
    return data


def test_text_formulas_and_folds() -> None:
    shown = plain_html(proof(school="if $a<b$", undergraduate="$$x^2$$", research="`1 < 2`"), {})
    assert shown.count("<details><summary>") == 3
    assert "Why, with school mathematics" in shown
    assert '<math xmlns="http://www.w3.org/1998/Math/MathML" display="inline">' in shown
    assert "<code>1 &lt; 2</code>" in shown
    assert "marimo" not in shown
    assert "<summary><" not in shown, "no block inside a summary"
    assert '<aside class="callout warn">' in plain_html(what_breaks("Size."), {})


def test_a_formula_on_several_lines_is_a_table() -> None:
    text = r"""
    $$\begin{aligned} a &= b \\[0.4em] c &= \operatorname{rank} d \end{aligned}$$
    """
    shown = plain_html(mo.md(text), {})
    assert shown.count("<mtr>") == 2
    signs = re.sub("<[^>]*>", "", shown)
    assert "&amp;" not in signs
    assert "0.4em" not in signs


def test_inputs_are_named_by_their_controls() -> None:
    slider = mo.ui.slider(steps=[1, 2, 4], value=2, label="Rate $r$")
    menu = mo.ui.dropdown({"one": 1, "<two>": 2}, value="one", label="Menu")
    radio = mo.ui.radio(["$p$", "q"], label="Which?")
    controls = {
        "rate": Control(slider, [1, 2, 4], ["1", "2", "4"], 1),
        "menu": Control(menu, [1, 2], ["one", "<two>"], 0),
        "guess": Control(radio, [None, "$p$", "q"], ["", "$p$", "q"], 0),
    }
    shown = plain_html(mo.vstack([slider, menu, radio]), controls)
    assert 'data-control="rate" min="0" max="2" step="1" value="1"' in shown
    assert "<output>2</output>" in shown
    assert '<option value="0" selected>one</option><option value="1">&lt;two&gt;' in shown
    assert shown.count('type="radio" name="guess"') == 2, "nothing is chosen at first"
    assert "<mi>p</mi>" in shown


def test_a_line_chart_keeps_its_numbers_and_frame() -> None:
    rows = [{"x": x, "y": y, "what": s} for s in "ab" for x, y in ((1.0, 2.0), (2.0, 1 / 3))]
    chart = chart_of(
        line_chart(
            rows,
            "x",
            "y",
            "what",
            title="t",
            log_x=True,
            y_range=(0, 5),
            here=[{"x": 1.0, "y": 2.0}, {"x": 1.5}],
            cloud=[{"x": 1.2, "y": 1.1}],
        )
    )
    assert chart["lines"][1] == {"name": "b", "points": [[1.0, 2.0], [2.0, 0.333333]]}
    assert chart["x"]["log"]
    assert chart["y"]["domain"] == [0, 5]
    assert (chart["here"], chart["walls"], chart["cloud"]) == ([[1.0, 2.0]], [[1.5]], [[1.2, 1.1]])


def test_a_bar_chart_and_a_heat_map_keep_their_numbers() -> None:
    rows = [{"n": n, "share": 0.25 * i} for i, n in enumerate("abc")]
    bars = chart_of(bar_chart(rows, "n", "share", title="t", y_range=(0, 1), here="b"))
    assert bars["names"] == ["a", "b", "c"]
    assert bars["lines"] == [{"name": "", "values": [0.0, 0.25, 0.5]}]
    assert bars["here"] == 1
    heat = chart_of(heat_chart(torch.tensor([[0.5, -1.0]]), title="t", axes=("query", "key")))
    assert heat["values"] == [[0.5, -1.0]]
    assert heat["domain"] == [-1.0, 1.0]


def test_a_frame_is_carried_over_as_it_is() -> None:
    page = "<!doctype html><p>1 &lt; 2</p><script>let a = '<b>';</script>"
    shown = plain_html(mo.iframe(page), {})
    assert html.unescape(shown.split('srcdoc="')[1].split('"')[0]) == page
    assert "onload" not in shown


def test_an_element_without_a_form_is_refused() -> None:
    with pytest.raises(ValueError, match="the web edition has no form for marimo-"):
        plain_html(mo.ui.table([{"a": 1}]), {})


def test_a_function_stands_apart_from_its_number() -> None:
    assert '<mi>log</mi><mspace width="0.167em" /><mn>3</mn>' in mathml(r"||(2 \log 3||)")
