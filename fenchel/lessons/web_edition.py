"""The course as files: ``fenchel learn --freeze DIR``.

    index.html            the list, with the progress of this browser
    model.html            the whole model on one screen (model_page.py)
    progress.html         what the reader has mastered
    NAME.html             a lesson: text, formulas, charts, claims, controls, questions, exercise

The files open from a folder and from any web host; nothing is fetched from outside or sent. A
lesson is evaluated here at every position of its controls (notebook_states.py), so each claim of
each state is checked while it is written. A page holds the first outputs as HTML, and all distinct
outputs once, compressed; its script exchanges them (lesson_page.js). What needs Python stays in
``fenchel learn``: the marks of the exercises, runs of the reader's own, and sentences that follow
a drawing whose handles have too many places to list.
"""

import base64
import gzip
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from string import Template
from typing import Any, NamedTuple

import marimo as mo

from fenchel.files import require_output, require_page, write_atomic
from fenchel.lessons.course import COURSE, PARTS, Lesson, Record
from fenchel.lessons.ladder import STEPS, ladder_html, mastery_html, recap_html, step_mark
from fenchel.lessons.model_page import model_page, page_links
from fenchel.lessons.notebook_states import Cell, Notebook
from fenchel.lessons.server import lesson_facts, model_section
from fenchel.lessons.static_html import plain_html
from fenchel.lessons.widgets import Exercise, way_on
from fenchel.report.html import (
    STYLES,
    Html,
    Section,
    data_block,
    element,
    join,
    page_header,
    read_asset,
)

_POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'unsafe-inline'",  # frames of drawings have scripts of their own
        "style-src 'unsafe-inline'",
        "img-src data:",
        "base-uri 'none'",
        "form-action 'none'",
    )
)
_FOOTER = (
    "Written by fenchel. A control shows what the library computed at its position; a drawing "
    "computes in the page, and tests compare it with the library. Nothing is loaded from elsewhere "
    "or sent, and what you do is kept in this browser."
)
_DRAWING = (
    "What you pull moves the picture. The checked sentences below it stay at its first position in "
    "this edition; in fenchel learn they follow."
)


class Written(NamedTuple):
    """A page that was written."""

    name: str
    states: int
    """Outputs of its cells over all positions of their controls."""
    bytes: int
    seconds: float


def write_course(
    folder: Path,
    lessons: Sequence[Lesson] = COURSE,
    report: Callable[[Written], None] = lambda _: None,
) -> list[Written]:
    """Write the list, the page of the model and the lessons into a folder.

    Pages of an earlier edition are replaced; a file of another kind under their names is refused.
    """
    links = page_links(All_lessons="index.html")
    pages: list[tuple[str, Callable[[], tuple[str, int]]]] = [
        ("index.html", lambda: (index_page(), 1)),
        ("model.html", lambda: (model_page(links), 1)),
        ("progress.html", lambda: (progress_page(_address, "index.html"), 1)),
        *((f"{each.name}.html", lambda each=each: lesson_page(each)) for each in lessons),
    ]
    require_output(folder, folder=True)
    folder.mkdir(parents=True, exist_ok=True)
    for name, _ in pages:
        require_page(folder / name)
    written = []
    for name, made in pages:
        begun = time.monotonic()
        page, states = made()
        write_atomic(folder / name, page)
        size = (folder / name).stat().st_size
        written.append(Written(name, states, size, time.monotonic() - begun))
        report(written[-1])
    return written


def index_page() -> str:
    """The list of lessons; its script counts what is solved in the reader's browser."""
    lead = (
        f"{len(COURSE)} lessons. Each begins with a question: predict, move a control, read why, "
        "solve an exercise, and see the same on a trained model. Every statement is computed and "
        "checked."
    )
    mastered = element("a", "What you have mastered", href="progress.html")
    rings = f" The rings at a lesson are filled when done: {', '.join(STEPS.values())}."
    count = element("span", "", class_="count")
    progress = element("p", count, " ", mastered, rings, class_="note")
    sections = [
        model_section("model.html"),
        *(
            Section(anchor=f"part-{i}", title=title, body=join(map(_entry, lessons)))
            for i, (title, lessons) in enumerate(PARTS.items(), start=1)
        ),
        Section(anchor="edition", title="About this edition", body=_about()),
    ]
    body = join(
        [
            element(
                "header",
                page_header("· lessons", "Attention, from slopes to scores", lead, below=progress),
            ),
            element("main", *(_section(part) for part in sections)),
            element(
                "footer",
                element("details", element("summary", "About this page"), element("p", _FOOTER)),
            ),
        ]
    )
    return html_page("fenchel lessons", body, {"name": "index", "controls": {}, "cells": {}}, [])


def progress_page(
    address: Callable[[Lesson], str], start: str, records: Mapping[str, Record] | None = None
) -> str:
    """What the reader has mastered; ``records`` where they are not those of the browser."""
    lead = (
        "A lesson is mastered when its two questions are right and its three cards are known; the "
        "exercises in code count by themselves."
    )
    body = join(
        [
            element("nav", page_links(All_lessons=start)),
            element("header", page_header("· lessons", "What you have mastered", lead)),
            element("main", mastery_html(address)),
        ]
    )
    data: dict[str, Any] = {"name": "progress", "controls": {}, "cells": {}}
    policy = _POLICY
    if records is not None:
        data["records"] = {name: asdict(record) for name, record in records.items()}
        policy += "; connect-src 'self'"  # cards are sent to fenchel learn
    return html_page("What you have mastered · fenchel", body, data, [], policy=policy)


def _address(each: Lesson) -> str:
    return f"{each.name}.html"


def _about() -> Html:
    return element(
        "p",
        "These pages work without Python and without a network. The exercises are marked by ",
        element("code", "fenchel learn"),
        " only, which also shows the lessons on a model of your own and runs the code that you "
        "type; here stand their tasks, hints and solutions. Where sentences below a drawing do not "
        "follow it, the page says so.",
    )


def _entry(each: Lesson) -> Html:
    mark = element("span", "solved", class_="status finished", data_solved=each.name, hidden=True)
    link = element("a", f"{each.number}. {each.title}", href=_address(each))
    return element(
        "article",
        element("h3", link, " ", mark),
        element("p", each.question),
        element(
            "p",
            lesson_facts(each),
            " ",
            element("span", *map(step_mark, STEPS), class_="steps"),
            class_="over",
        ),
        class_="entry",
        data_lesson=each.name,
    )


def _section(part: Section) -> Html:
    return element("section", element("h2", part.title), part.body, id=part.anchor)


def lesson_page(each: Lesson) -> tuple[str, int]:
    """The page of a lesson, and how many outputs it stands for."""
    notebook = Notebook(each.name)
    pieces: dict[str, int] = {}
    cells: dict[str, Any] = {}
    shown: list[str] = []
    states = 0
    for cell in notebook.cells:
        html = _outputs(notebook, cell)
        states += len(html)
        if not any(html):
            continue
        identifier = f"cell-{len(shown)}"
        first = html[notebook.start_of(cell)]
        shown.append(f'<div class="cell" id="{identifier}">{first}</div>')
        if len(set(html)) > 1:
            indices = [pieces.setdefault(piece, len(pieces)) for piece in html]
            cells[identifier] = {"controls": cell.controls, "states": indices}
    controls = {
        name: {"labels": control.labels, "start": control.start}
        for name, control in notebook.controls.items()
    }
    body = join(
        [
            element("main", Html("".join(shown))),
            element(
                "footer",
                element("details", element("summary", "About this page"), element("p", _FOOTER)),
            ),
        ]
    )
    data = {"name": each.name, "controls": controls, "cells": cells}
    return html_page(f"{each.title} · fenchel", body, data, list(pieces)), states


def _outputs(notebook: Notebook, cell: Cell) -> list[str]:
    """The outputs of a cell as HTML; the exercise, the menu of models and its text apart."""
    if "exercise" in cell.defines:
        return [exercise_html(notebook.names["exercise"])]
    if "form" in cell.reads:
        return [""]
    if "footer" in cell.reads:
        return [recap_html(notebook.name) + plain_html(way_on(notebook.name), {})]
    if "picker" in cell.defines:
        return [str(element("p", element("strong", "On the model of the lessons.")))]
    if "own_text" in cell.defines:
        return [str(element("p", "It reads: ", element("em", notebook.names["own_text"].value)))]
    html = [_shipped(plain_html(each, notebook.controls)) for each in notebook.outputs(cell)]
    drawings = {
        name
        for name in cell.defines - notebook.controls.keys()
        if isinstance(notebook.names.get(name), mo.ui.text)
    }
    if any(drawings & other.reads for other in notebook.cells):
        note = element("p", _DRAWING, class_="small")
        html = [each + note for each in html]
    return html


def _shipped(html: str) -> str:
    """The words for a model of the reader's, which is here always that of the lessons."""
    for own, shipped in (("Your model", "The model"), ("your model", "the model")):
        html = html.replace(own, shipped)
    return html


def exercise_html(exercise: Exercise) -> str:
    """The questions; the task with its hints one at a time, a field for code, the solution."""
    hints = [element("li", each, hidden=True) for each in hints_of(exercise)]
    task = plain_html(mo.md(f"**Exercise, in code.** {exercise.task}"), {})
    solution = element("pre", element("code", exercise.solution.strip()))
    marked = element("input", type="checkbox")
    following = plain_html(way_on(exercise.lesson), {})
    return ladder_html(exercise.lesson) + str(
        element(
            "section",
            Html(task),
            element(
                "textarea",
                exercise.starter.strip(),
                spellcheck="false",
                aria_label="Your code, kept in this browser",
            ),
            element("ol", *hints, class_="hints") if hints else None,
            element(
                "div",
                element("button", "A hint", type="button", class_="hint") if hints else None,
                element("label", marked, " I have solved it"),
                class_="buttons",
            ),
            element("div", Html(following), class_="following", hidden=True),
            element("details", element("summary", "Solution"), solution),
            element(
                "p",
                "This page does not run code: ",
                element("code", f"fenchel learn {exercise.lesson}"),
                " does, and marks it.",
                class_="small",
            ),
            class_="exercise",
        )
    )


def hints_of(exercise: Exercise) -> list[str]:
    """What the check says to the code to begin with, then to other wrong answers, in its order."""
    first = exercise.mark(exercise.starter)
    start = [] if first is None else [f"To the code above it says: {first}"]
    return [*start, *(each for each in exercise.hints() if each != first)]


def html_page(
    title: str,
    body: Html,
    data: dict[str, Any],
    pieces: list[str],
    *,
    policy: str = _POLICY,
    style: str = "",
) -> str:
    """A page with the script of the lessons; ``pieces`` are the outputs that it exchanges."""
    packed = gzip.compress(json.dumps(pieces).encode(), 9, mtime=0)
    sheets = "".join(map(read_asset, STYLES)) + "".join(
        read_asset(name, "fenchel.lessons") for name in ("lesson_page.css", "ladder.css")
    )
    return Template(read_asset("page.html", "fenchel.lessons")).substitute(
        policy=policy,
        title=join([title]),
        kind="lesson",
        body=body,
        style=sheets + style,
        script="".join(
            read_asset(name, "fenchel.lessons") for name in ("ladder.js", "lesson_page.js")
        ),
        data=data_block({**data, "pieces": base64.b64encode(packed).decode()}),
    )
