"""The questions of each lesson beside its code: one by pencil, one by choice, three recap cards.

They are in questions.toml, by the name of the lesson, so that no notebook has to repeat them;
ladder.py is their markup. ``check`` is an expression that gives the answer by another way, which
tests/lessons/test_questions.py evaluates.
"""

import tomllib
from functools import cache
from importlib import resources
from typing import Any, NamedTuple


class Pencil(NamedTuple):
    """A question whose answer is a number."""

    ask: str
    answer: float
    tolerance: float
    check: str
    """A Python expression with the value of the answer."""
    hints: tuple[str, ...]
    why: str
    slips: tuple[tuple[float, str], ...] = ()
    """Wrong numbers, each with what is said to it."""


class Choice(NamedTuple):
    """A question with options, one of them right."""

    ask: str
    options: tuple[str, ...]
    right: str
    why: str
    check: str = "True"
    """A Python expression that is true if the right option is."""


class Card(NamedTuple):
    """A question of the recap, and its answer."""

    question: str
    answer: str


class Questions(NamedTuple):
    """What a lesson asks."""

    pencil: Pencil
    choice: Choice
    cards: tuple[Card, ...]
    wrong: tuple[str, ...]
    """What readers get wrong."""


@cache
def all_questions() -> dict[str, Questions]:
    """The questions by the name of the lesson.

    >>> all_questions()["softmax"].pencil.answer
    0.75
    """
    text = resources.files("fenchel.lessons").joinpath("questions.toml").read_text("utf-8")
    return {name: _questions(given) for name, given in tomllib.loads(text).items()}


def questions_of(name: str) -> Questions | None:
    """The questions of a lesson; None if it has none yet."""
    return all_questions().get(name)


def _questions(given: dict[str, Any]) -> Questions:
    slips = tuple((float(at), says) for at, says in given["pencil"].get("slips", ()))
    pencil = {**given["pencil"], "hints": tuple(given["pencil"]["hints"]), "slips": slips}
    choice = {**given["choice"], "options": tuple(given["choice"]["options"])}
    cards = tuple(Card(*each) for each in given["cards"])
    return Questions(Pencil(**pencil), Choice(**choice), cards, tuple(given["wrong"]))
