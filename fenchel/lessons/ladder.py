"""The markup of the questions of a lesson, of its recap, and of the page of what was mastered.

    ladder_html(name)      a question by pencil and one by choice, before the code of the exercise
    recap_html(name)       three cards of this lesson, and those of earlier ones that come back
    mastery_html(address)  what this reader has mastered, and which cards are weak
    frame(body)            one of these as a page of its own, for a frame of ``fenchel learn``

Every sentence is in the markup; ladder.js shows it when its time comes. In a lesson of ``fenchel
learn`` the parts are frames, as scenes are, because marimo runs no script of a cell; the pages of
the web edition hold them directly.
"""

from collections.abc import Callable
from dataclasses import asdict
from functools import cache

import marimo as mo

from fenchel.lessons.course import COURSE, Lesson, lesson, records
from fenchel.lessons.questions import Card, Choice, Pencil, questions_of
from fenchel.lessons.scene import frame_page
from fenchel.lessons.static_html import inline_html, plain_html
from fenchel.report.html import Html, element, read_asset

STEPS = {
    "prediction": "prediction",
    "pencil": "by pencil",
    "choice": "by choice",
    "code": "code",
}
"""What a reader does in a lesson, by the names of ``progress.steps`` in ladder.js."""
_UNKEPT = "What you do here cannot be kept: the storage of this page is closed."


def ladder_html(name: str) -> Html:
    """The questions before the code of an exercise; nothing for a lesson that has none."""
    asked = questions_of(name)
    if asked is None:
        return Html("")
    return element(
        "section",
        _pencil(asked.pencil),
        _choice(asked.choice),
        _unkept(),
        class_="ladder",
        data_lesson=name,
    )


def recap_html(name: str) -> Html:
    """The cards of a lesson, below those of earlier lessons, which the script chooses."""
    asked = questions_of(name)
    if asked is None:
        return Html("")
    place = lesson(name).number
    earlier = [
        _card(each, number, card, hidden=True)
        for each in COURSE[:place]
        for number, card in _cards(each)
    ]
    return element(
        "section",
        element("h2", "Recap"),
        element(
            "div",
            element("h3", "From earlier lessons"),
            *earlier,
            class_="earlier",
            hidden=True,
        ),
        element("h3", "From this lesson"),
        *(_card(lesson(name), number, card) for number, card in _cards(lesson(name))),
        _unkept(),
        class_="recap",
        data_lesson=name,
        data_place=place,
    )


def mastery_html(address: Callable[[Lesson], str]) -> Html:
    """The lessons with what was done in each, the questions that are open, and the weak cards."""
    head = ("lesson", *STEPS.values(), "cards known")
    rows = (
        element(
            "tr",
            element("th", element("a", each.title, href=address(each)), scope="row"),
            *(element("td", step_mark(step)) for step in STEPS),
            element("td", "", class_="known", data_of=len(list(_cards(each)))),
            class_="entry",
            data_lesson=each.name,
        )
        for each in COURSE
    )
    table = element(
        "table",
        element("thead", element("tr", *(element("th", text, scope="col") for text in head))),
        element("tbody", *rows),
    )
    missed = [
        element(
            "li",
            element("a", each.title, href=address(each)),
            f", {STEPS[kind]}: ",
            _line(ask),
            data_lesson=each.name,
            data_step=kind,
            hidden=True,
        )
        for each in COURSE
        if (asked := questions_of(each.name)) is not None
        for kind, ask in (("pencil", asked.pencil.ask), ("choice", asked.choice.ask))
    ]
    cards = [
        _card(each, number, card, hidden=True) for each in COURSE for number, card in _cards(each)
    ]
    return element(
        "div",
        element("p", "", class_="sum lead"),
        element("p", "", class_="count note"),
        element("div", table, class_="scroll"),
        element(
            "section",
            element("h2", "Questions that are open"),
            element("ul", *missed),
            class_="missed-questions",
            hidden=True,
        ),
        element(
            "section", element("h2", "Cards that are weak"), *cards, class_="weak", hidden=True
        ),
        class_="mastery",
    )


def step_mark(step: str) -> Html:
    """A sign that the script fills when a step is done; a screen reader reads the words."""
    state = element("span", "open", class_="state")
    return element(
        "span", f"{STEPS[step]}: ", state, class_="step-mark", data_done=step, title=STEPS[step]
    )


def frame(body: Html) -> mo.Html:
    """A part of a lesson in ``fenchel learn``, with the progress of this reader."""
    data = {"records": {name: asdict(record) for name, record in records().items()}}
    page = frame_page(
        "questions",
        body=body,
        style=read_asset("ladder.css", "fenchel.lessons"),
        script=read_asset("ladder.js", "fenchel.lessons"),
        data=data,
    )
    return mo.iframe(page)


def _pencil(asked: Pencil) -> Html:
    field = element(
        "input", type="text", inputmode="decimal", autocomplete="off", aria_label="Your number"
    )
    slips = [
        element("li", _line(says), data_value=repr(at), hidden=True) for at, says in asked.slips
    ]
    return element(
        "article",
        element("h3", "By pencil"),
        _text(asked.ask),
        element(
            "div",
            field,
            element("button", "Check", type="button", class_="check"),
            element("button", "A hint", type="button", class_="hint"),
            class_="buttons",
        ),
        element("p", "", class_="said", role="status"),
        element("ul", *slips, class_="slips"),
        element(
            "ol", *(element("li", _line(each), hidden=True) for each in asked.hints), class_="hints"
        ),
        _reveal(),
        element(
            "div",
            element("p", element("strong", f"The answer: {asked.answer:g}.")),
            _text(asked.why),
            class_="why",
            hidden=True,
        ),
        data_step="pencil",
        data_answer=repr(asked.answer),
        data_tolerance=repr(asked.tolerance),
    )


def _choice(asked: Choice) -> Html:
    options = (
        element(
            "label",
            element("input", type="radio", name="choice", value=each),
            element("span", _line(each)),
        )
        for each in asked.options
    )
    return element(
        "article",
        element("h3", "By choice"),
        _text(asked.ask),
        element("fieldset", element("legend", "Your answer"), *options),
        element("div", element("button", "Check", type="button", class_="check"), class_="buttons"),
        element("p", "", class_="said", role="status"),
        _reveal(),
        element(
            "div",
            element("p", element("strong", "The answer: ", _line(asked.right), ".")),
            _text(asked.why),
            class_="why",
            hidden=True,
        ),
        data_step="choice",
        data_right=asked.right,
    )


def _reveal() -> Html:
    return element("button", "Show the answer", type="button", class_="reveal", hidden=True)


def _cards(each: Lesson) -> list[tuple[int, Card]]:
    asked = questions_of(each.name)
    return [] if asked is None else list(enumerate(asked.cards))


def _card(each: Lesson, number: int, card: Card, *, hidden: bool = False) -> Html:
    return element(
        "article",
        element("p", each.title, class_="from"),
        _text(card.question),
        element("button", "Show the answer", type="button", class_="turn"),
        element(
            "div",
            _text(card.answer),
            element(
                "div",
                element("button", "I knew it", type="button", data_known="yes"),
                element("button", "Not yet", type="button", data_known="no"),
                class_="buttons",
            ),
            element("p", "", class_="said", role="status"),
            class_="back",
            hidden=True,
        ),
        class_="card",
        data_lesson=each.name,
        data_card=number,
        data_place=each.number,
        hidden=hidden,
    )


def _unkept() -> Html:
    return element("p", _UNKEPT, class_="unkept", hidden=True)


@cache
def _text(text: str) -> Html:
    """A paragraph of Markdown; formulas are MathML."""
    return Html(plain_html(mo.md(text), {}))


@cache
def _line(text: str) -> Html:
    """The same without a block around it."""
    return Html(inline_html(text))
