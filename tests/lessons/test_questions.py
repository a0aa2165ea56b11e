"""The questions of the lessons: every lesson has them, and every key is computed another way."""

import math
import re
from typing import Any

import pytest
import torch

import fenchel
from fenchel.lessons.course import COURSE
from fenchel.lessons.questions import Questions, all_questions

each_lesson = pytest.mark.parametrize("name", all_questions())


def test_every_lesson_has_questions() -> None:
    names = {each.name for each in COURSE}
    assert [each for each in names if each not in all_questions()] == [], (
        "lessons without questions"
    )
    unknown = all_questions().keys() - names
    assert unknown == set(), "questions of lessons that do not exist: rename or delete them"


def value(expression: str) -> Any:
    known = {name: getattr(math, name) for name in dir(math) if not name.startswith("_")}
    return eval(expression, {**known, "torch": torch, "fenchel": fenchel})


@each_lesson
def test_every_key_is_what_another_computation_gives(name: str) -> None:
    pencil, choice, _, _ = all_questions()[name]
    assert abs(value(pencil.check) - pencil.answer) <= pencil.tolerance / 4
    assert value(choice.check) in (True, torch.tensor(True))
    if any(sign.isdigit() for sign in choice.right):
        assert choice.check != "True", "an answer with numbers is computed"
    assert choice.right in choice.options


@each_lesson
def test_slips_are_wrong_and_differ(name: str) -> None:
    pencil = all_questions()[name].pencil
    values = [at for at, _ in pencil.slips]
    assert len(set(values)) == len(values) >= 1
    for at in values:
        assert abs(at - pencil.answer) > 2 * pencil.tolerance


@each_lesson
def test_a_lesson_asks_in_full(name: str) -> None:
    asked = all_questions()[name]
    assert isinstance(asked, Questions)
    assert len(asked.cards) == 3
    assert len(asked.pencil.hints) >= 2
    assert len(asked.choice.options) >= 3
    assert len(set(asked.choice.options)) == len(asked.choice.options)
    assert len(asked.wrong) >= 2
    texts = [asked.pencil.ask, asked.pencil.why, asked.choice.ask, asked.choice.why, *asked.wrong]
    texts += [text for card in asked.cards for text in card]
    for text in texts:
        assert text.strip().endswith((".", "?", ")")), text
        assert text.count("$") % 2 == 0, text
    assert not re.search(r"[A-Z]{2}-\d\d|\bE\d\d\b", " ".join(texts)), "no ids in what is read"


def test_the_tests_of_keys_find_a_wrong_one() -> None:
    pencil = all_questions()["softmax"].pencil
    assert abs(value(pencil.check) - 0.7) > pencil.tolerance / 4
