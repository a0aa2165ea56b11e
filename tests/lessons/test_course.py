"""The list of lessons, references to them, and the reader's progress."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

import fenchel
from fenchel.lessons.course import (
    COURSE,
    Record,
    completed,
    keep,
    keep_answer,
    lesson,
    record_of,
    records,
)


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    return tmp_path / "fenchel" / "lessons.json"


def test_a_lesson_needs_only_lessons_before_it() -> None:
    names = [each.name for each in COURSE]
    for place, each in enumerate(COURSE):
        assert set(each.needs) <= set(names[:place])


def test_a_lesson_is_found_by_number_name_and_beginning() -> None:
    assert lesson("7") is lesson("softmax") is lesson("softm")
    assert lesson("attention").name == "attention"


@pytest.mark.parametrize("name", ["-1", str(len(COURSE)), "", "s", "transformer"])
def test_any_other_name_is_refused_with_the_names_there_are(name: str) -> None:
    with pytest.raises(ValueError, match=r"names (no|more than one) lesson: s"):
        lesson(name)


def test_prose_names_a_lesson_and_never_its_number() -> None:
    """A number is a place in the course: it changes when a lesson is added."""
    root = Path(fenchel.__file__).parents[1]
    dated = {root / "docs" / "log.md", *(root / "docs" / "log").iterdir()}
    pages = {root / "README.md", *(root / "docs").rglob("*.md")} - dated
    for path in [*pages, *(root / "fenchel").rglob("*.py")]:
        found = re.findall(r"\blessons? \d+", path.read_text(encoding="utf-8"), re.IGNORECASE)
        assert not found, (path, found)


def test_a_link_leads_to_a_lesson() -> None:
    for each in COURSE:
        for name in re.findall(r"\]\(\.\./(\w+)/\)", each.path.read_text(encoding="utf-8")):
            assert lesson(name).name == name, (each.name, name)
            assert name != each.name, "a lesson does not refer to itself"


def test_no_lesson_needs_one_of_research() -> None:
    research = {each.name for each in COURSE if each.research}
    assert research == {"score_descent"}
    assert not any(research & set(each.needs) for each in COURSE)


def test_progress_is_kept(state: Path) -> None:
    assert completed() == set()
    assert keep_answer("softmax", "wrong", solved=False).tries == 1
    assert completed() == set()
    keep_answer("softmax", "right", solved=True)
    keep_answer("slopes", "right", solved=True)
    keep_answer("softmax", "worse", solved=False)
    assert completed() == {"slopes", "softmax"}, "what was solved stays solved"
    assert record_of("softmax") == Record(code="worse", tries=2, solved=True)
    assert record_of("gradient_flow") == Record()
    assert [path.name for path in state.parent.iterdir()] == [state.name]


def test_what_is_done_without_code_counts(state: Path) -> None:
    keep("softmax", {"prediction": "in neither: they are equal"})
    keep("softmax", {"pencil": "0.75", "pencil_right": True})
    done = keep("softmax", {"cards": {"1": {"box": 2, "due": "2026-11-21"}}})
    assert done.steps == {"prediction": True, "pencil": True, "choice": False, "code": False}
    assert record_of("softmax") == done
    assert completed() == set()
    assert json.loads(state.read_text()).keys() == {"softmax"}


@pytest.mark.parametrize(
    "fields",
    [
        {"other": 1},
        {"tries": "many"},
        {"tries": True},
        {"pencil_right": 0},
        {"cards": {"0": {"box": "x", "due": "2026-11-21"}}},
        {"cards": {"7": {"box": 1, "due": "2026-11-21"}}},
        {"cards": {"0": {"box": 1, "due": "tomorrow"}}},
    ],
)
def test_a_field_of_another_type_is_refused(state: Path, fields: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="no such value of"):
        keep("slopes", fields)
    for name in ("transformer", "softm", "7"):
        with pytest.raises(ValueError, match="names no lesson"):
            keep(name, {"solved": True})
    assert not state.exists()


@pytest.mark.parametrize("content", ["{", "7", '["slopes"]', "\xff", "[" * 100_000])
def test_a_file_that_cannot_be_read_is_put_aside(state: Path, content: str) -> None:
    state.parent.mkdir(parents=True)
    state.write_text(content, encoding="latin-1")
    assert completed() == set()
    keep_answer("slopes", "right", solved=True)
    assert completed() == {"slopes"}
    assert state.with_suffix(".damaged").read_text(encoding="latin-1") == content


@pytest.mark.parametrize(
    "damaged", [1, None, {"tries": "many", "pencil": "3"}, {"other": 1}, {"cards": 7}]
)
def test_a_damaged_record_loses_nothing_else(state: Path, damaged: Any) -> None:
    """Other lessons, other fields, and what another version has written stay."""
    state.parent.mkdir(parents=True)
    newer = {"solved": True, "field": 1}
    state.write_text(json.dumps({"slopes": damaged, "softmax": newer, "newer": {"a": 1}}))
    assert completed() == {"softmax"}
    kept = keep("slopes", {"choice": "6"})
    assert kept.choice == "6"
    if isinstance(damaged, dict):
        assert kept.pencil == damaged.get("pencil", "")
    assert records()["slopes"] == kept
    written = json.loads(state.read_text())
    assert (written["softmax"], written["newer"]) == (newer, {"a": 1})
