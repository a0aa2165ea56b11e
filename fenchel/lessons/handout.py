"""A sheet per lesson to print: ``fenchel learn --print DIR``.

The first side is for the class: the question to predict, a picture, the questions by pencil and by
choice, and the exercise. The last page is for the teacher: a plan of the time, what readers get
wrong, and the key. The plan divides the minutes of the lesson; it is not measured in classes. The
picture is the first drawing of the lesson, else its first chart, as it stands when the lesson is
opened; the page draws it when it is opened in a browser, and prints by the browser, on A4.
"""

import re
from collections.abc import Callable, Sequence
from pathlib import Path

import marimo as mo

from fenchel.files import require_output, require_page, write_atomic
from fenchel.lessons.course import COURSE, Lesson
from fenchel.lessons.notebook_states import Notebook
from fenchel.lessons.questions import Questions, questions_of
from fenchel.lessons.static_html import inline_html, plain_html
from fenchel.lessons.web_edition import html_page
from fenchel.lessons.widgets import Exercise
from fenchel.report.html import Html, element, join, read_asset

_SCENE = re.compile(r"<iframe\b.*?</iframe>", re.DOTALL)
_CHART = re.compile(r'<div class="chart" data-chart=".*?"></div>', re.DOTALL)
_TITLE = re.compile(r"<strong>(.*?)</strong>", re.DOTALL)


def write_handouts(
    folder: Path, lessons: Sequence[Lesson] = COURSE, report: Callable[[str], None] = print
) -> None:
    """Write the sheets of the lessons into a folder, each as NAME.html."""
    require_output(folder, folder=True)
    folder.mkdir(parents=True, exist_ok=True)
    for each in lessons:
        require_page(folder / f"{each.name}.html")
    for each in lessons:
        write_atomic(folder / f"{each.name}.html", handout(each))
        report(f"{each.name}.html")


def handout(each: Lesson) -> str:
    """The sheet of a lesson as one file."""
    notebook = Notebook(each.name)
    asked, exercise = questions_of(each.name), notebook.names["exercise"]
    assert isinstance(exercise, Exercise)
    place = f"fenchel · lesson {each.number}"
    sheet = element(
        "section",
        element("p", place, class_="over"),
        element("h1", each.title),
        _prediction(notebook),
        _picture(notebook),
        _questions(asked),
        element("h2", "In code"),
        _text(exercise.task),
        _code(exercise.starter),
        class_="sheet",
    )
    key = element(
        "section",
        element("p", f"{place} · for the teacher", class_="over"),
        element("h1", each.title),
        element("h2", f"A plan for {each.minutes} minutes"),
        element("ul", *(element("li", part) for part in plan(each.minutes))),
        _wrong(asked),
        element("h2", "Key"),
        _predicted(notebook),
        _answers(asked),
        element("p", element("strong", "In code.")),
        _code(exercise.solution),
        class_="teacher",
    )
    style = read_asset("handout.css", "fenchel.lessons")
    body = element("main", sheet, key)
    data = {"name": each.name, "controls": {}, "cells": {}}
    return html_page(f"{each.title} · sheet", body, data, [], style=style)


def plan(minutes: int) -> list[str]:
    """The minutes of a lesson by its parts, in steps of five.

    >>> plan(45)
    ['5 minutes: predict', '20 minutes: picture, controls and reading', '5 minutes: by pencil and by choice', '15 minutes: in code']
    """  # noqa: E501
    code = 5 * round(0.3 * minutes / 5)
    asked = 5 if minutes < 60 else 10
    rest = minutes - 5 - asked - code
    return [
        "5 minutes: predict",
        f"{rest} minutes: picture, controls and reading",
        f"{asked} minutes: by pencil and by choice",
        f"{code} minutes: in code",
    ]


def _prediction(notebook: Notebook) -> Html:
    """The first question with its options, which on paper move nothing."""
    shown = plain_html(notebook.names["guess"], notebook.controls)
    return Html(shown.replace(' data-control="guess"', ""))


def _predicted(notebook: Notebook) -> Html:
    """What the lesson says to the right prediction."""
    for cell in notebook.cells:
        if cell.controls == ("guess",) and "answer" in cell.reads:
            labels = notebook.controls["guess"].labels
            for label, output in zip(labels, notebook.outputs(cell), strict=True):
                said = plain_html(output, {})
                if "<strong>Right.</strong>" in said:
                    right = f"<strong>Predict. {inline_html(label)}.</strong>"
                    return Html(said.replace("<strong>Right.</strong>", right))
    raise ValueError(f"lesson {notebook.name} has no right answer to its first question.")


def _picture(notebook: Notebook) -> Html:
    """The first drawing of the lesson, else its first chart with its title."""
    shown = [
        plain_html(notebook.outputs(cell)[notebook.start_of(cell)], notebook.controls)
        for cell in notebook.cells
        if not {"header", "footer", "form"} & (cell.reads | cell.defines)
    ]
    for html in shown:
        if found := _SCENE.search(html):
            return element("figure", Html(found[0]), class_="still")
    for html in shown:
        if found := _CHART.search(html):
            titles = _TITLE.findall(html[: found.start()])
            caption = element("figcaption", Html(titles[-1])) if titles else None
            return element("figure", caption, Html(found[0]))
    return Html("")


def _questions(asked: Questions | None) -> Html:
    if asked is None:
        return Html("")
    options = (element("li", Html(inline_html(each))) for each in asked.choice.options)
    return join(
        [
            element("h2", "By pencil"),
            _text(asked.pencil.ask),
            element("p", "Answer:", class_="blank"),
            element("h2", "By choice"),
            _text(asked.choice.ask),
            element("ul", *options, class_="options"),
        ]
    )


def _wrong(asked: Questions | None) -> Html:
    if asked is None:
        return Html("")
    wrong = (element("li", Html(inline_html(each))) for each in asked.wrong)
    return join([element("h2", "What readers get wrong"), element("ul", *wrong)])


def _answers(asked: Questions | None) -> Html:
    if asked is None:
        return Html("")
    slips = [element("li", f"{at:g}: ", Html(inline_html(says))) for at, says in asked.pencil.slips]
    return join(
        [
            _text(f"**By pencil. {asked.pencil.answer:g}.** {asked.pencil.why} Usual slips:"),
            element("ul", *slips),
            _text(f"**By choice.** *{asked.choice.right}*. {asked.choice.why}"),
        ]
    )


def _code(text: str) -> Html:
    return element("pre", element("code", text.strip()))


def _text(text: str) -> Html:
    return Html(plain_html(mo.md(text), {}))
