"""Every lesson without and with a run, its exercise, a script, and marimo's strict check.

Running a notebook evaluates its claims, and a claim that does not hold raises. A lesson is computed
once: with a run only the cells are repeated that depend on it. The browser is in test_server.py.
"""

import ast
import os
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import marimo as mo
import pytest

from fenchel.cli import main
from fenchel.lessons import course
from fenchel.lessons.course import COURSE, MODEL, NOTEBOOKS, Lesson
from fenchel.lessons.scene import Scene
from fenchel.lessons.static_html import plain_html
from fenchel.lessons.web_edition import hints_of
from fenchel.lessons.widgets import Exercise, recorded_claims
from tests.test_reference import reference

each_lesson = pytest.mark.parametrize("lesson", COURSE, ids=lambda lesson: lesson.name)


def calls(lesson: Lesson) -> list[str]:
    """The names of the functions that the source of a lesson calls."""
    tree = ast.parse(lesson.path.read_text())
    found = [node.func for node in ast.walk(tree) if isinstance(node, ast.Call)]
    return [ast.unparse(function) for function in found]


def test_the_course_and_the_folder_have_the_same_lessons() -> None:
    assert {lesson.name for lesson in COURSE} == {
        path.stem for path in NOTEBOOKS.glob("*.py") if path.stem != "__init__"
    }


@each_lesson
def test_it_has_every_part_of_a_lesson(lesson: Lesson) -> None:
    used = calls(lesson)
    parts = "header question answer claim proof Exercise run_picker what_breaks footer".split()
    assert set(parts) <= set(used)
    assert any(name in used for name in ("mo.ui.slider", "mo.ui.dropdown", "mo.ui.radio"))
    assert any(name.endswith("_chart") for name in used)
    assert used.count("claim") >= 6
    assert used.count("proof") >= 1


@each_lesson
def test_words_come_before_every_displayed_formula(lesson: Lesson) -> None:
    texts = [
        node.args[0].value
        for node in ast.walk(ast.parse(lesson.path.read_text()))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "mo.md"
        if isinstance(node.args[0], ast.Constant)
    ]
    assert texts
    assert all(len(text.split("$$")[0].split()) > 12 for text in texts if "$$" in text)


def named(node: ast.AST) -> set[str]:
    return {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}


def follow(cell: ast.FunctionDef, known: set[str]) -> set[str]:
    """``known`` and the names of a cell that are computed from them."""
    found = set(known)
    for node in ast.walk(cell):
        match node:
            case ast.Assign(targets=targets, value=value) if named(value) & found:
                found |= {name for target in targets for name in named(target)}
            case ast.AugAssign(target=target, value=value) if named(value) & found:
                found |= named(target)
            case ast.For(target=target, iter=value) if named(value) & found:
                found |= named(target)
            case ast.FunctionDef(name=name) if node is not cell and named(node) & found:
                found.add(name)
            case ast.Call(func=ast.Attribute(value=ast.Name(id=name), attr="append")) if (
                named(node) & found
            ):
                found.add(name)
    return found if found == known else follow(cell, found)


def is_drawn(tree: ast.Module, control: str) -> bool:
    """Whether a chart, apart from its title, depends on a control."""
    cells = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    known: set[str] = set()
    after = {control}
    while after != known:
        known = after
        for cell in cells:
            given = {each.arg for each in cell.args.args}
            inside = follow(cell, known & (given | named(cell)))
            after = after | {name for name in inside if not name.startswith("_")}
            for node in ast.walk(cell):
                if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("_chart"):
                    values = [each.value for each in node.keywords if each.arg != "title"]
                    if any(named(value) & inside for value in [*node.args, *values]):
                        return True
    return False


NOT_DRAWN = {
    "attention": ["visible"],
    "lipschitz": ["ball_size"],
}
"""Controls whose answer is a table or a sentence."""


@each_lesson
def test_a_control_moves_something_in_a_chart(lesson: Lesson) -> None:
    tree = ast.parse(lesson.path.read_text())
    controls = [
        node.targets[0].id
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign)
        and isinstance(node.targets[0], ast.Name)
        and isinstance(node.value, ast.Call)
        and ast.unparse(node.value.func) in {"mo.ui.slider", "mo.ui.dropdown"}
    ]
    assert controls
    unmoved = [each for each in controls if not is_drawn(tree, each)]
    assert unmoved == NOT_DRAWN.get(lesson.name, [])


REACHED: dict[str, list[dict[str, Any]]] = {
    "hillside": [{"x": 0.0, "y": 0.0, "angle": 0}, {"x": -2.0, "y": 0.05, "angle": 359}],
    "downhill": [{"rate": 0.02, "start": 0.5}, {"rate": 0.45, "start": 3}],
    "strings": [{"rate": r, "start": 2.9} for r in (0.02, 0.5, 0.99, 1, 1.2)],
    "arrows": [
        {"ux": 0.3, "uy": 0.0, "length": 0.3, "angle": 1.570796},
        {"ux": -2.0, "uy": 0.0, "length": 2.0, "angle": 3.141593},
    ],
    "walk": [{"x": x, "b": 1} for x in (-1.5, -0.05, 0, 1.5)],
    "bound": [{"b": b} for b in (0, 3.75, 4, 4.25, 5)],
    "evenings": [
        {"T": 0.05, "A": 0, "B": 3, "C": 0},
        {"T": 2.5, "A": 1, "B": 1, "C": 1},
        {"T": 0.05, "A": 3, "B": 2.95, "C": 2.95},
    ],
    "leash": [
        {"beta": 0.05, "A": 0.5, "B": 0.3, "C": 0.2},
        {"beta": 5.0, "A": 0.96, "B": 0.04, "C": 0},
        {"beta": 5.0, "A": 0, "B": 0.96, "C": 0.04},
    ],
    "islands": [
        {**dict.fromkeys("ABCDEF", 2.5), "map": "softmax", "beta": 4},
        {**dict.fromkeys("ABCDE", -2.5), "F": 2.5, "map": "entmax", "beta": 0.2},
        {**dict.fromkeys("ABC", 1.0), "D": 0, "E": -1, "F": 2, "map": "sparsemax", "beta": 1.0},
    ],
    "room": [
        {"text": 1, "word": 8, "map": "entmax", "T": 0.1},
        {"text": 0, "word": 6, "map": "sparsemax", "T": 10},
    ],
    "train": [{"L": 0.5, "tip": -3}, {"L": 1, "tip": 0.1}, {"L": 1.5, "tip": 3}],
    "clocks": [{"m": 0, "gap": 200}, {"m": 200, "gap": -200}, {"m": 7, "gap": 0}],
    "seats": [{"m": 0, "gap": 60}, {"m": 60, "gap": -60}, {"m": 7, "gap": 0}],
    "stack": [{"layers": 1}, {"layers": 32}],
    "desk": [{"gear": 1, "angle": 225}, {"gear": 10, "angle": 0}],
    "race": [{"stage": 7}],
    "own_words": [{"head": 0, "word": 0}, {"head": 1, "word": 5}],
}
"""The states of each scene at the ends of what its handles reach, and where a claim may turn."""


def below(app: Any, scene: str) -> set[str]:
    """The names that the cells of a lesson compute from those that one of its cells makes."""
    cells = [cell for _, cell in app._cell_manager.valid_cells()]
    known, after = set[str](), {scene}
    while after != known:
        known = after
        for cell in cells:
            if known & set(cell.refs):
                after = after | set(cell.defs)
    return known


def check_claims_of_controls(app: Any, given: dict[str, Any], names: set[str]) -> None:
    """Claims hold at every item of a menu, and at the ends of what the handles of a scene reach."""
    for name in sorted(names):
        control = given[name]
        states: list[SimpleNamespace] = []
        if isinstance(control, mo.ui.dropdown):
            states = [SimpleNamespace(value=value) for value in control.options.values()]
        elif isinstance(control, Scene):
            assert all(state.keys() <= control.state.keys() for state in REACHED[name])
            states = [SimpleNamespace(state={**control.state, **state}) for state in REACHED[name]]
        if not states:
            continue
        kept = {each: given[each] for each in given if each not in below(app, name)}
        for state in states:
            app.run(defs={**kept, name: state})


def test_a_script_evaluates_its_claims(tmp_path: Path) -> None:
    """All lessons end in the same two lines; one with a false claim shows what they do."""
    end = '\n\nif __name__ == "__main__":\n    app.run()\n'
    assert all(lesson.path.read_text().endswith(end) for lesson in COURSE)
    cell = '\n\n@app.cell\ndef _():\n    claim("SM-07", "Two is one.", 2 == 1)\n    return\n'
    softmax, script = course.lesson("softmax"), tmp_path / "script.py"
    script.write_text(softmax.path.read_text().removesuffix(end) + cell + end)
    done = subprocess.run(
        [sys.executable, script],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode != 0
    assert "SM-07: Two is one." in done.stderr, done.stderr[-3000:]


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


NUMBER = re.compile(r"\d[\d,]*\.\d+")


def numbers_of_errata(lesson: Lesson) -> set[str]:
    """Numbers with a point in the errata that only this lesson answers."""
    lessons = reference.lessons_of()
    return {
        number
        for one in reference.errata()
        if {each for name in one.ids for each in lessons.get(name, [])} == {lesson}
        for number in NUMBER.findall(one.true + one.why)
    }


@each_lesson
def test_its_claims_hold_its_exercise_can_be_solved_and_it_reads_a_run(
    lesson: Lesson, own_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # a folder without runs
    module = import_module(f"fenchel.lessons.notebooks.{lesson.name}")
    mo.as_html(1)  # marimo registers its formatters at the first output outside a run
    with recorded_claims() as spoken:
        outputs, defined = module.app.run(defs={"run_path": None})
    names = dict(defined)
    for output in outputs:
        plain_html(output, {})  # the web edition has a form for each of them
    printed = set(NUMBER.findall(" ".join(text for _, text in spoken)))
    assert numbers_of_errata(lesson) - printed == set(), "docs/errata.toml has other numbers"
    assert "own" not in names
    exercise = names["exercise"]
    assert isinstance(exercise, Exercise)
    assert exercise.lesson == lesson.name
    assert exercise.mark(exercise.starter) is not None, "the starter passes"
    assert exercise.mark(exercise.solution) is None
    assert exercise.mark("") is not None
    assert hints_of(exercise)
    functions = re.findall(r"^\s{0,4}def (\w+)", exercise.solution, re.MULTILINE)
    for returned in ("None", "'text'", "torch.ones(2, 5)", "(1.0, 2.0, 3.0, 4.0, 5.0)", "7.0"):
        code = "\n".join(f"def {name}(*_, **__): return {returned}" for name in functions)
        hint = exercise.mark(code)
        assert hint is not None, returned
        assert "Error" not in hint, f"a value of another type gets a sentence: {hint}"
    # The cells of a model, with what the others have computed. Those of the setup stay.
    given = {name: value for name, value in names.items() if not hasattr(module, name)}
    assert given.pop("picker").value == str(MODEL)
    check_claims_of_controls(module.app, given, set(given))
    for model in (MODEL, own_run):
        with recorded_claims() as spoken:
            names = dict(module.app.run(defs={**given, "run_path": str(model)})[1])
        assert spoken, "the cell of the trained model has claims"
        assert "own" in names, "the cell of the trained model defines own"
        known = {name: value for name, value in names.items() if not hasattr(module, name)}
        check_claims_of_controls(module.app, known, set(known) - set(given) - {"picker"})


def test_the_strict_check_of_marimo_finds_nothing() -> None:
    files = [str(lesson.path) for lesson in COURSE]
    command = [sys.executable, "-m", "marimo", "check", "--strict", *files]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
