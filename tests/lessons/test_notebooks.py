"""Every lesson as a script, by marimo's strict check, on a run, and by its exercise.

Running a notebook evaluates its claims, and a claim that does not hold raises. The browser is in
test_server.py.
"""

import ast
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

import fenchel
from fenchel.cli import main
from fenchel.lessons.course import COURSE, NOTEBOOKS, Lesson
from fenchel.lessons.widgets import Exercise, recorded_claims

each_lesson = pytest.mark.parametrize("lesson", COURSE, ids=lambda lesson: lesson.name)


def run(lesson: Lesson, **definitions: Any) -> dict[str, Any]:
    """The names that the cells of a lesson define."""
    app = import_module(f"fenchel.lessons.notebooks.{lesson.name}").app
    _, names = app.run(defs=definitions) if definitions else app.run()
    return dict(names)


def calls(lesson: Lesson) -> list[str]:
    """The names of the functions that the source of a lesson calls."""
    tree = ast.parse(lesson.path.read_text())
    found = [node.func for node in ast.walk(tree) if isinstance(node, ast.Call)]
    return [ast.unparse(function) for function in found]


def test_the_course_and_the_folder_have_the_same_lessons() -> None:
    assert [lesson.name for lesson in COURSE] == sorted(
        path.stem for path in NOTEBOOKS.glob("l*.py")
    )


@each_lesson
def test_it_has_every_part_of_a_lesson(lesson: Lesson) -> None:
    used = calls(lesson)
    parts = "header question answer claim proof Exercise run_picker what_breaks".split()
    assert set(parts) <= set(used)
    assert any(name in used for name in ("mo.ui.slider", "mo.ui.dropdown", "mo.ui.radio"))
    assert any(name.endswith("_chart") for name in used)
    assert used.count("claim") >= 6
    assert used.count("proof") >= 1


SCRIPTS = """
import os, runpy, sys, traceback
import fenchel.lessons.widgets, torch._dynamo  # four seconds, for all scripts once

for line in sys.stdin:
    path, folder = line.strip().split("\\t")
    if not (child := os.fork()):
        os.chdir(folder)
        printed = os.open("printed", os.O_CREAT | os.O_WRONLY)
        os.dup2(printed, 1), os.dup2(printed, 2)
        status = 1
        try:
            runpy.run_path(path, run_name="__main__")
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


@pytest.fixture(scope="module")
def scripts() -> Iterator[subprocess.Popen[str]]:
    """A process that runs a script per line "PATH FOLDER", in a process forked for it."""
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPTS],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with process:
        yield process


@each_lesson
def test_its_claims_hold_as_a_script(
    lesson: Lesson, scripts: subprocess.Popen[str], tmp_path: Path
) -> None:
    # In a folder without runs, so that the reader's part waits for a choice.
    assert scripts.stdin
    assert scripts.stdout
    print(lesson.path, tmp_path, sep="\t", file=scripts.stdin, flush=True)
    assert scripts.stdout.readline() == "0\n", (tmp_path / "printed").read_text()[-3000:]


@pytest.fixture(scope="module")
def own_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of a few steps, as the reader's own."""
    folder = tmp_path_factory.mktemp("reader")
    text = folder / "text.txt"
    text.write_text("we the people of the united states form a more perfect union. " * 300)
    path = folder / "runs" / "own"
    small = "text.vocabulary=300 model.context=32 model.width=32 model.layers=2 model.heads=2"
    settings = [f"--set={setting}" for setting in f"{small} train.batch=4 train.steps=20".split()]
    assert main(["train", "--text", str(text), "--out", str(path), *settings]) == 0
    return path


def without_numbers(text: str) -> str:
    """Digits of a rounding error differ between machines."""
    return re.sub(r"\d[\d.,]*(e[-+]?\d+)?", "#", text)


def errata_of(lesson: Lesson) -> list[str]:
    """What docs/errata.md prints as sentences of a lesson, each with what stands before it."""
    page = (Path(fenchel.__file__).parents[1] / "docs" / "errata.md").read_text()
    mark = f" (lesson {COURSE.index(lesson) + 1})"
    found = [each for row in page.splitlines() for each in row.split(mark)[:-1]]
    return [each for each in found if each.endswith((".", ".)"))]  # else a mention in a sentence


@each_lesson
def test_it_reads_the_reader_s_own_run_and_its_exercise_can_be_solved(
    lesson: Lesson, own_run: Path
) -> None:
    with recorded_claims() as spoken:
        names = run(lesson, run_path=str(own_run))
    texts = tuple(without_numbers(text) for _, text in spoken)
    for printed in errata_of(lesson):
        assert without_numbers(printed).endswith(texts), "run python docs/reference.py"
    assert "own" in names, "the cell of the reader's run defines own"
    exercise = names["exercise"]
    assert isinstance(exercise, Exercise)
    assert exercise.lesson == lesson.name
    assert exercise.mark(exercise.starter) is not None, "the starter passes"
    assert exercise.mark(exercise.solution) is None
    assert exercise.mark("") is not None


def test_the_strict_check_of_marimo_finds_nothing() -> None:
    files = [str(lesson.path) for lesson in COURSE]
    command = [sys.executable, "-m", "marimo", "check", "--strict", *files]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
