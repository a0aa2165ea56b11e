"""``fenchel learn --freeze``: pages from a folder, in a browser, against the library."""

import json
import os
import re
from collections.abc import Iterator
from functools import partial
from html import unescape
from pathlib import Path
from types import SimpleNamespace

import marimo as mo
import pytest
from selenium.webdriver.common.keys import Keys

from fenchel.cli import main
from fenchel.lessons.course import COURSE, lesson
from fenchel.lessons.notebook_states import Cell, Notebook
from fenchel.lessons.static_html import plain_html
from fenchel.lessons.web_edition import _outputs, hints_of, lesson_page
from tests.browser import PHONE, Browser, needs_browser

NAME = "attention_derivative"
MENUS = ("nudged", "bill", "neighbour")
MOVED = (*MENUS, "size", "step")
NAMESPACES = {"http://www.w3.org/2000/svg", "http://www.w3.org/1998/Math/MathML"}
"""Names that are never fetched."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("edition") / "course"
    assert main(["learn", NAME, "--freeze", str(folder)]) == 0
    return folder


@pytest.fixture(scope="module")
def notebook() -> Notebook:
    return Notebook(NAME)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    session = Browser()
    yield session
    session.driver.quit()


def open_lesson(browser: Browser, folder: Path, state: str = "", width: int = 1280) -> None:
    browser.open("about:blank")
    browser.open(f"{(folder / NAME).as_uri()}.html{state}", width=width)
    browser.until(lambda: browser.run("return document.body.dataset.ready"))


def test_the_folder_has_the_list_the_model_and_the_lesson(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pages = {"index.html", "model.html", "progress.html", f"{NAME}.html"}
    assert {path.name for path in folder.iterdir()} == pages
    index = (folder / "index.html").read_text()
    assert "filled when done: prediction, by pencil, by choice, code." in index
    assert index.index('href="model.html"') < index.index('href="slopes.html"')
    assert all(f'href="{each.name}.html"' in index for each in COURSE)
    for path in folder.iterdir():
        addresses = re.findall(r"https?://[^\s\"'<]*", unescape(path.read_text()))
        assert {each.rstrip("\\") for each in addresses} <= NAMESPACES, path.name
    assert main(["learn", "--freeze", str(folder / "index.html")]) == 2
    assert main(["learn", NAME, "--freeze", str(folder), "--edit"]) == 2
    mine = folder.parent / "mine"
    mine.mkdir()
    (mine / "model.html").write_text("<p>a page of the reader's")
    assert main(["learn", NAME, "--freeze", str(mine)]) == 2
    error = capsys.readouterr().err
    assert "model.html exists and is not a page of fenchel" in error
    assert "Traceback" not in error
    assert [path.name for path in mine.iterdir()] == ["model.html"]


def test_hints_are_what_the_check_says(notebook: Notebook) -> None:
    exercise = notebook.names["exercise"]
    hints = hints_of(exercise)
    assert hints[0].endswith(str(exercise.mark(exercise.starter)))
    assert len(hints) == 5
    assert hints[1] == "Return three tensors: G_Q, G_K, G_V."


def test_sentences_that_follow_a_drawing_are_said_to_stay() -> None:
    """A drawing with handles is a text field of marimo; without places it has no states."""
    drawing = Cell("a", frozenset({"scene"}), frozenset(), ())
    claims = Cell("b", frozenset(), frozenset({"scene"}), ())
    fake = SimpleNamespace(
        names={"scene": mo.ui.text("{}")},
        controls={},
        cells=[drawing, claims],
        outputs=lambda _: [mo.md("shown")],
    )
    assert "stay at its first position" in _outputs(fake, drawing)[0]  # type: ignore[arg-type]
    assert "stay at" not in _outputs(fake, claims)[0]  # type: ignore[arg-type]


@needs_browser
def test_every_control_shows_what_the_library_computed_there(
    browser: Browser, folder: Path, notebook: Notebook
) -> None:
    open_lesson(browser, folder)
    shown = "return [...document.querySelectorAll('.cell')].map((cell) => cell.innerText)"
    for name in MOVED:
        before = browser.run(shown)
        browser.find(f"[data-control={name}]").send_keys(
            Keys.ARROW_DOWN if name in MENUS else Keys.ARROW_RIGHT
        )
        browser.until(lambda: browser.run(shown) != before)  # noqa: B023
    positions = {name: control.start for name, control in notebook.controls.items()}
    for name in MOVED:
        positions[name] = min(positions[name] + 1, len(notebook.controls[name].values) - 1)
    browser.run("document.querySelectorAll('[data-control=guess]')[1].click()")
    positions["guess"] = 2
    compare = """
        const made = document.createElement("div");
        made.innerHTML = arguments[0];
        const charts = (host) => Array.from(
            host.querySelectorAll("[data-chart]"), (chart) => chart.dataset.chart);
        const plain = (host) => {
            const copy = host.cloneNode(true);
            copy.querySelectorAll("[data-chart]").forEach((chart) => chart.replaceChildren());
            return copy.textContent;
        };
        return [...document.querySelectorAll(".cell")].some((cell) =>
            plain(cell) === plain(made) && String(charts(cell)) === String(charts(made)));
    """
    for cell in notebook.cells:
        if not cell.controls or "form" in cell.reads | cell.defines:
            continue  # the exercise has a form of its own
        index = 0
        for name in cell.controls:
            index = index * len(notebook.controls[name].values) + positions[name]
        expected = plain_html(notebook.outputs(cell)[index], notebook.controls)
        if expected:
            browser.expect(lambda: browser.run(compare, expected), True)  # noqa: B023
    # The state is in the address: the same page again shows the same.
    moved = [name for name, place in positions.items() if place != notebook.controls[name].start]
    browser.until(lambda: all(f"{name}=" in browser.driver.current_url for name in moved))
    seen, address = browser.run(shown), browser.driver.current_url
    open_lesson(browser, folder, "#" + address.split("#")[1])
    browser.expect(lambda: browser.run(shown), seen)
    assert browser.console() == []
    assert [each for each in browser.requests() if not each.startswith("file:")] == []


@needs_browser
def test_sentences_follow_a_scene_with_places(
    browser: Browser, folder: Path, notebook: Notebook
) -> None:
    open_lesson(browser, folder)
    scene, address = notebook.controls["own_words"], browser.driver.current_url
    cell = next(each for each in notebook.cells if each.controls == ("own_words",))
    text = "return document.querySelector('main').textContent"
    assert "stay at its first position" not in browser.run(text)
    assert f"It reads: {notebook.names['own_text'].value}" in browser.run(text)
    with browser.frame(browser.find("iframe[data-scene=own_words]")):
        heads = "document.querySelectorAll('input[type=radio]')"
        browser.until(lambda: browser.run(f"return {heads}.length"))
        browser.run(f"{heads}[0].click()")  # head 1.1
    place = scene.labels.index(json.dumps({"head": 0, "word": scene.element.state["word"]}))
    output = plain_html(notebook.outputs(cell)[place], notebook.controls)
    title = re.search(r"Who moves what “[^”]*” takes from head 1\.1", output)
    assert title
    browser.until(lambda: title[0] in browser.run(text))
    assert browser.driver.current_url == address, "a scene begins at its first state"
    assert browser.console() == []


@needs_browser
def test_handles_snap_to_the_places_at_which_sentences_are_stored(
    browser: Browser, tmp_path: Path
) -> None:
    path = tmp_path / "gradient_flow.html"
    path.write_text(lesson_page(lesson("gradient_flow"))[0])
    browser.open("about:blank")
    browser.open(path)
    browser.until(lambda: browser.run("return document.body.dataset.ready"))
    text = "return document.querySelector('main').textContent"
    assert "stay at its first position" not in browser.run(text)

    def follows(rate: float, start: float) -> None:
        end = start * (1 - 2 * rate) ** 12
        sentence = f"12 steps lead from {start:g} to {end:.4g}."
        browser.until(lambda: sentence in browser.run(text))

    frame = "iframe[data-scene=strings]"
    with browser.frame(browser.find(frame)):
        browser.find("[data-handle=rate]").send_keys(Keys.ARROW_RIGHT)  # by 0.01, to the next place
    follows(0.8, 3.0)
    with browser.frame(browser.find(frame)):
        browser.find("[data-handle=start]").send_keys(Keys.ARROW_LEFT)
    follows(0.8, 2.5)
    with browser.frame(browser.find(frame)):
        browser.drag(browser.find("[data-handle=rate]"), 7, 0)  # a little: back to the same place
        said = browser.find("[data-handle=rate]").get_attribute("aria-valuetext")
    assert said == "learning rate 0.80"
    assert browser.console() == []


@needs_browser
def test_charts_are_drawn_and_nothing_is_wider_than_a_phone(browser: Browser, folder: Path) -> None:
    for width in (1280, PHONE):
        open_lesson(browser, folder, width=width)
        charts = browser.find_all("[data-chart]")
        assert charts
        for chart in charts:
            drawn = partial(chart.find_all, "path.curve, rect, circle")
            assert browser.until(drawn), chart.get_attribute("data-chart")
        assert browser.run("return document.documentElement.scrollWidth") <= width
    browser.open(folder / "index.html", width=PHONE)
    assert browser.run("return document.documentElement.scrollWidth") <= PHONE
    assert browser.console() == []


@needs_browser
def test_hints_open_one_by_one_and_progress_is_kept(browser: Browser, folder: Path) -> None:
    open_lesson(browser, folder)
    hidden = (
        "return [...document.querySelectorAll('.exercise .hints li')].map((each) => each.hidden)"
    )
    assert all(browser.run(hidden))
    button = browser.find(".exercise .hint")
    browser.run("arguments[0].scrollIntoView({block: 'center'})", button)
    button.click()
    browser.until(lambda: not browser.run(hidden)[0])
    assert all(browser.run(hidden)[1:])
    browser.find(".exercise textarea").send_keys("# mine")
    following = browser.find(".exercise .following")
    assert not following.is_displayed()
    browser.run("document.querySelector('.exercise input[type=checkbox]').click()")
    browser.until(lambda: "Next: The Lipschitz cone" in following.text)
    browser.open(folder / "index.html")
    browser.until(lambda: browser.text(".count").startswith(f"1 of {len(COURSE)} exercises"))
    marks = browser.find_all(".status.finished")
    assert [mark.is_displayed() for mark in marks] == [each.name == NAME for each in COURSE]
    open_lesson(browser, folder)
    code = browser.find(".exercise textarea")
    browser.until(lambda: "# mine" in code.get_attribute("value"))
    browser.until(lambda: not browser.run(hidden)[0])


EVERY_CONTROL = """
    const still = [], host = document.querySelector("main");
    let slowest = 0;
    const names = new Set(Array.from(host.querySelectorAll("[data-control]"), (e) => e.dataset.control));
    for (const name of names) {
        const input = () => host.querySelector(`[data-control="${name}"]`);
        for (let fold = input().closest("details"); fold; fold = fold.parentElement.closest("details")) fold.open = true;
        const seen = () => { // what a reader sees beside the control itself and its own label
            const copy = host.cloneNode(true);
            for (const e of copy.querySelectorAll("[data-chart]")) e.replaceChildren(); // drawn from its attribute
            for (const e of copy.querySelectorAll("output, [data-control], [hidden], details:not([open]) > :not(summary)")) e.remove();
            return copy.innerHTML;
        };
        const before = seen(), { type, max, options, value } = input();
        const values = options ? Array.from(options, (o) => o.value) : type === "radio" ? [value] : Array.from({ length: +max + 1 }, (_, i) => i);
        let moved = false;
        for (const each of values) {
            if (type === "radio") input().checked = true; else input().value = each;
            const begun = performance.now();
            input().dispatchEvent(new Event("input", { bubbles: true }));
            document.body.offsetHeight; // lays the page out
            slowest = Math.max(slowest, performance.now() - begun);
            moved ||= seen() !== before;
        }
        if (!moved) still.push(name);
    }
    const undrawn = Array.from(host.querySelectorAll("[data-chart]")).filter((chart) => !chart.querySelector("svg"));
    return [still, undrawn.length, slowest];
"""  # noqa: E501


@needs_browser
@pytest.mark.skipif("FENCHEL_COURSE" not in os.environ, reason="FENCHEL_COURSE names no folder")
def test_the_whole_course_as_it_was_written(browser: Browser) -> None:
    """Minutes to write, so a step of its own in .ci/run: every control of every lesson."""
    course = Path(os.environ["FENCHEL_COURSE"]).resolve()
    lessons = [course / f"{each.name}.html" for each in COURSE]
    assert {*lessons} == {*course.glob("*.html")} - {
        course / f"{name}.html" for name in ("index", "model", "progress")
    }
    assert sum(path.stat().st_size for path in course.iterdir()) < 60e6
    for path in lessons:
        browser.open(path, width=PHONE)
        browser.until(lambda: browser.run("return document.body.dataset.ready"), seconds=30)
        assert browser.run("return document.documentElement.scrollWidth") <= PHONE, path.name
        still, undrawn, slowest = browser.run(EVERY_CONTROL)
        print(f"{path.name}: a control answers within {slowest:.0f} ms")
        assert (still, undrawn) == ([], 0), path.name
        assert browser.run("return document.documentElement.scrollWidth") <= PHONE, path.name
        assert browser.console() == [], path.name
        assert [each for each in browser.requests() if not each.startswith("file:")] == []
