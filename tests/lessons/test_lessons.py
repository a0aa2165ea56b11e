"""Every lesson runs, and its claims hold: each asserts its own."""

import runpy
from pathlib import Path

import pytest

import fenchel.lessons

LESSONS = sorted(Path(fenchel.lessons.__file__).parent.glob("l[0-9]*.py"))


@pytest.mark.parametrize("lesson", LESSONS, ids=lambda path: path.stem)
def test_the_claims_of_the_lesson_hold(lesson: Path) -> None:
    runpy.run_path(str(lesson))


def test_there_is_a_lesson() -> None:
    assert LESSONS
