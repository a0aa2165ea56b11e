"""One path through every lesson: few open claims, room between words, frames that do not move.

A lesson is a question, a picture, a control, a few claims and an exercise; the rest is folded
(``details``). What needs every position of every control, or the height of a page, is read from the
web edition in the folder FENCHEL_COURSE, which .ci/run writes.
"""

import ast
import base64
import gzip
import json
import os
import re
from collections.abc import Iterator, Sequence
from html import unescape
from pathlib import Path
from typing import Any

import pytest

from fenchel.lessons.course import COURSE, Lesson
from tests.browser import Browser, needs_browser
from tests.lessons.test_notebooks import calls, each_lesson, follow, named

MOST_OPEN = 8
"""Claims outside folds, with that of the trained model."""
MOST_WORDS = 150
"""Words per screen of 900 pixels, 1280 wide, with the folds closed."""
OTHER_PICTURE = {("slopes", "curve")}
"""Menus that choose another subject, with a frame of its own."""
CALM = (
    "slopes",
    "softmax",
    "priors_and_budgets",
    "attention",
    "lipschitz",
    "lens",
    "model",
)
"""Pages with fewer words on every screen, those of pictures' margins and of controls counted."""
in_the_edition = pytest.mark.skipif(
    "FENCHEL_COURSE" not in os.environ, reason="FENCHEL_COURSE names no folder"
)


def claims_outside_folds(source: str) -> int:
    """How many claims of a notebook a reader sees without opening a fold."""
    tree = ast.parse(source)
    shown = [node for node in ast.walk(tree) if _calls(node, "claim")]
    folded = {
        id(inner)
        for node in ast.walk(tree)
        if _calls(node, "details") or (isinstance(node, ast.Assign) and named(node) >= {"_"})
        for inner in ast.walk(node)
    }  # "_ = claim(...)" is evaluated and not shown
    return sum(id(node) not in folded for node in shown)


def _calls(node: ast.AST, name: str) -> bool:
    return isinstance(node, ast.Call) and ast.unparse(node.func) == name


@each_lesson
def test_a_lesson_has_a_spine_of_a_few_claims(lesson: Lesson) -> None:
    assert 3 <= claims_outside_folds(lesson.path.read_text()) <= MOST_OPEN


@each_lesson
def test_numbers_that_follow_a_control_have_a_frame(lesson: Lesson) -> None:
    """By its source: the rows of a chart depend on a control only if its range is given."""
    tree = ast.parse(lesson.path.read_text())
    cells = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    known: set[str] = set()
    after = {
        target.id
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign)
        and (_calls(node.value, "mo.ui.slider") or _calls(node.value, "mo.ui.dropdown"))
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    assert after, "a lesson has a control"
    while after != known:
        known = after
        for cell in cells:
            given = {each.arg for each in cell.args.args}
            inside = follow(cell, known & (given | named(cell)))
            after = after | {name for name in inside if not name.startswith("_")}
    for cell in cells:
        inside = follow(cell, known & {each.arg for each in cell.args.args})
        for node in ast.walk(cell):
            if any(_calls(node, f"{kind}_chart") for kind in ("line", "bar", "heat")):
                assert isinstance(node, ast.Call)
                ranges = {each.arg for each in node.keywords} & {"y_range", "of_range"}
                assert ranges or not named(node.args[0]) & inside, ast.unparse(node)[:300]


def test_every_lesson_has_a_control_and_a_picture() -> None:
    for each in COURSE:
        used = calls(each)
        assert {"mo.ui.slider", "mo.ui.dropdown"} & {*used}, each.name
        assert any(name == "Scene" or name.endswith("_chart") for name in used), each.name


def frame_of(chart: dict[str, Any]) -> tuple[Any, ...]:
    """The ranges that the axes of a chart of the web edition show, as lesson_page.js has them."""
    if chart["kind"] == "heat":
        return ("heat", *chart["domain"])
    if chart["kind"] == "bar":
        values = [value for line in chart["lines"] for value in line["values"]]
        return ("bar", *_range(chart["y"], [0.0, *values]))
    points = [point for line in chart["lines"] for point in line["points"]]
    points += [*chart.get("cloud", []), *chart.get("here", [])]
    across = [point[0] for point in [*points, *chart.get("walls", [])]]
    up = [point[1] for point in points]
    return ("line", *_range(chart["x"], across), *_range(chart["y"], up))


def _range(axis: dict[str, Any], values: Sequence[float | None]) -> tuple[float, float]:
    if axis["domain"]:
        return tuple(axis["domain"])
    good = [value for value in values if value is not None and (value > 0 or not axis["log"])]
    return min(good), max(good)


def moving_frames(page: str) -> Iterator[tuple[str, str]]:
    """The controls of a page of the web edition that move the frame of a chart, and where."""
    found = re.search(r'id="data">(.*?)</script>', page, re.DOTALL)
    assert found
    data = json.loads(found[1])
    pieces = json.loads(gzip.decompress(base64.b64decode(data["pieces"])))
    for cell in data["cells"].values():
        frames = []
        for index in cell["states"]:
            charts = re.findall(r'data-chart="([^"]*)"', pieces[index])
            frames.append([frame_of(json.loads(unescape(chart))) for chart in charts])
        sizes = [len(data["controls"][name]["labels"]) for name in cell["controls"]]
        step = 1
        for name, size in reversed([*zip(cell["controls"], sizes, strict=True)]):
            for i, frame in enumerate(frames):
                if (i // step) % size and frame != frames[i - step]:
                    yield name, f"{frames[i - step]} to {frame}"
                    break
            step *= size


@in_the_edition
@each_lesson
def test_no_position_of_the_whole_course_moves_a_frame(lesson: Lesson) -> None:
    page = (Path(os.environ["FENCHEL_COURSE"]) / f"{lesson.name}.html").read_text()
    moved = dict(moving_frames(page))
    assert {(lesson.name, name) for name in moved} <= OTHER_PICTURE, moved


WORDS = r"""
    const text = (node) => {
        if (node.nodeType === 3) return node.data;
        if (node.nodeType !== 1 || ["math", "svg", "textarea", "select", "iframe"].includes(node.localName)) return " ";
        if (node.localName === "details") return ` ${text(node.querySelector("summary"))} `;
        const { display } = getComputedStyle(node);
        if (display === "none") return "";
        const inside = Array.from(node.childNodes).map(text).join("");
        return display === "inline" ? inside : ` ${inside} `;
    };
    const main = document.querySelector("main");
    const words = text(main).split(/\s+/).filter((word) => /\p{L}/u.test(word)).length;
    const count = (kind) => main.querySelectorAll(kind).length;
    return [words, main.getBoundingClientRect().height / 900, count("input[type=range], select, iframe"), count("[aria-label=checked]")];
"""  # noqa: E501


@needs_browser
@in_the_edition
def test_the_whole_course_leaves_room_between_words_and_time_to_read_them() -> None:
    browser = Browser()
    rows = []
    try:
        for each in COURSE:
            browser.open(Path(os.environ["FENCHEL_COURSE"]).resolve() / f"{each.name}.html")
            browser.until(lambda: browser.run("return document.body.dataset.ready"), seconds=30)
            words, screens, controls, checks = browser.run(WORDS)
            claims = claims_outside_folds(each.path.read_text())
            rows.append((each, claims, words, screens, words / 110 + checks / 2 + controls + 20))
    finally:
        browser.driver.quit()
    print("\n| lesson | open claims | words | screens | words per screen | minutes |")
    print("| --- | --- | --- | --- | --- | --- |")
    for each, claims, words, screens, _ in rows:
        density = f"{words / screens:.0f} | {each.minutes}"
        print(f"| `{each.name}` | {claims} | {words:,} | {screens:.1f} | {density} |")
    assert [each.name for each, _, words, screens, _ in rows if words >= MOST_WORDS * screens] == []
    late = [(each.name, rule) for each, *_, rule in rows if abs(each.minutes - rule) > 6]
    assert [name for name, _ in late] == ["score_descent"], late  # research takes longer


ON_SCREENS = r"""
    const screens = [], hidden = "math, svg, textarea, select, script, style, [hidden]";
    const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
    for (let node; (node = walker.nextNode());) {
        const fold = node.parentElement.closest("details:not([open])");
        const label = fold && node.parentElement.closest("summary") && !fold.parentElement.closest("details:not([open])");
        if (node.parentElement.closest(hidden) || (fold && !label)) continue;
        if (getComputedStyle(node.parentElement).visibility === "hidden") continue;
        for (const { 0: word, index } of node.data.matchAll(/\S+/g)) {
            if (!/\p{L}/u.test(word)) continue;
            const range = document.createRange();
            range.setStart(node, index);
            range.setEnd(node, index + word.length);
            const box = range.getBoundingClientRect(), screen = Math.floor((box.top + scrollY) / 900);
            if (!box.width) continue;
            while (screens.length <= screen) screens.push(0);
            screens[screen]++;
        }
    }
    return screens;
"""  # noqa: E501


def words_on_screens(page: Path) -> list[int]:
    """The words of each screen of 1280 by 900 pixels, as a new reader opens the page."""
    browser = Browser()
    try:
        browser.open(page)
        done = (
            "return document.body.dataset.ready || document.querySelector('#check')?.dataset.worst"
        )
        browser.until(lambda: browser.run(done))
        frames = (
            "return [...document.querySelectorAll('iframe')].every((each) => each.style.height)"
        )
        browser.until(lambda: browser.run(frames))
        return browser.run(ON_SCREENS)
    finally:
        browser.driver.quit()


@needs_browser
def test_words_are_counted_on_the_screen_that_shows_them(tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    folded = "<details><summary>one label</summary>not this</details><p hidden>nor this</p>"
    page.write_text(
        f"<body data-ready=yes style='margin:0'><div style='height:900px'>two words, 3 {folded}"
        "<i style='visibility:hidden'>nor that</i><textarea>not these</textarea></div>"
        "<p>on the next screen"
    )
    assert words_on_screens(page) == [4, 4]


@needs_browser
@in_the_edition
@pytest.mark.parametrize("name", CALM)
def test_no_screen_of_a_calm_page_of_the_whole_course_is_full_of_words(name: str) -> None:
    screens = words_on_screens(Path(os.environ["FENCHEL_COURSE"]).resolve() / f"{name}.html")
    print(f"\n{name}: {', '.join(map(str, screens))}")
    assert max(screens) < MOST_WORDS
