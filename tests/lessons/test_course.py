"""The list of lessons and the reader's progress."""

from pathlib import Path

import pytest

from fenchel.lessons.course import COURSE, PARTS, completed, keep_answer, kept_answer, lesson


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    return tmp_path / "fenchel" / "lessons.json"


def test_a_lesson_needs_only_lessons_before_it() -> None:
    names = [each.name for each in COURSE]
    for place, each in enumerate(COURSE):
        assert set(each.needs) <= set(names[:place])


def test_numbers_of_the_names_are_their_places() -> None:
    for number, each in enumerate(COURSE, start=1):
        assert each.name.startswith(f"l{number:02}_")


def test_the_parts_are_the_course() -> None:
    assert tuple(each for part in PARTS.values() for each in part) == COURSE


def test_a_lesson_is_found_by_number_name_and_beginning() -> None:
    assert lesson("7") is lesson("l07_softmax") is lesson("softmax") is lesson("softm")


@pytest.mark.parametrize("name", ["0", "22", "", "s", "transformer"])
def test_any_other_name_is_refused_with_the_names_there_are(name: str) -> None:
    with pytest.raises(ValueError, match=r"names (no|more than one) lesson: l\d\d_"):
        lesson(name)


def test_no_lesson_needs_one_of_research() -> None:
    research = {each.name for each in COURSE if each.research}
    assert research == {"l17_score_descent"}
    assert not any(research & set(each.needs) for each in COURSE)


def test_progress_is_kept(state: Path) -> None:
    assert completed() == set()
    assert keep_answer("l07_softmax", "wrong", solved=False).tries == 1
    assert completed() == set()
    keep_answer("l07_softmax", "right", solved=True)
    keep_answer("l01_slopes", "right", solved=True)
    keep_answer("l07_softmax", "worse", solved=False)
    assert completed() == {"l01_slopes", "l07_softmax"}, "what was solved stays solved"
    assert kept_answer("l07_softmax") == ("worse", 2, True)
    assert kept_answer("l02_gradient_flow") == ("", 0, False)
    assert [path.name for path in state.parent.iterdir()] == [state.name]


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{",
        "7",
        '{"l01_slopes": 1}',
        '["l01_slopes"]',
        '{"l01_slopes": {"tries": "many", "solved": true}}',
        '{"l01_slopes": {"other": 1}}',
    ],
)
def test_a_damaged_file_of_progress_is_no_progress(state: Path, content: str) -> None:
    state.parent.mkdir(parents=True)
    state.write_text(content)
    assert completed() == set()
    keep_answer("l01_slopes", "right", solved=True)
    assert completed() == {"l01_slopes"}
