"""The list of lessons and the reader's progress."""

from pathlib import Path

import pytest

from fenchel.lessons.course import COURSE, PARTS, complete, completed, lesson


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


def test_progress_is_kept(state: Path) -> None:
    assert completed() == set()
    complete("l07_softmax")
    complete("l01_slopes")
    complete("l07_softmax")
    assert completed() == {"l01_slopes", "l07_softmax"}
    assert [path.name for path in state.parent.iterdir()] == [state.name]


@pytest.mark.parametrize("content", ["", "{", "7", '{"l01_slopes": 1}', '["no such lesson", 3]'])
def test_a_damaged_file_of_progress_is_no_progress(state: Path, content: str) -> None:
    state.parent.mkdir(parents=True)
    state.write_text(content)
    assert completed() == set()
    complete("l01_slopes")
    assert completed() == {"l01_slopes"}
