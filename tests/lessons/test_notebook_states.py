"""A notebook at every position of its controls, against marimo's own runs of it."""

import json
from types import SimpleNamespace

import marimo as mo
import pytest

from fenchel.lessons import notebook_states
from fenchel.lessons.notebook_states import Cell, Notebook
from fenchel.lessons.static_html import plain_html

BOTH = frozenset({"nudged", "size"})


@pytest.fixture(scope="module")
def notebook() -> Notebook:
    return Notebook("attention_derivative")


def test_controls_have_their_positions_and_the_menu_of_models_is_none(notebook: Notebook) -> None:
    names = ["bill", "guess", "neighbour", "nudged", "own_words", "size", "step"]
    assert sorted(notebook.controls) == names
    guess = notebook.controls["guess"]
    assert guess.start == 0
    assert guess.values[0] is None, "nothing is chosen at first"
    assert len(guess.values) == 4
    size = notebook.controls["size"]
    assert size.values[size.start] == size.element.value
    assert size.labels == [f"{value:g}" for value in size.values]


def test_a_scene_with_stops_is_a_control_with_a_state_per_place(notebook: Notebook) -> None:
    scene = notebook.controls["own_words"]
    tokens = len(scene.values) // 6
    assert json.loads(scene.labels[tokens + 2]) == {"head": 1, "word": 2}
    assert json.loads(scene.values[tokens + 2]) == {**scene.element.state, "head": 1, "word": 2}
    assert scene.start == len(scene.values) - 1
    cell = next(each for each in notebook.cells if each.controls == ("own_words",))
    assert "from head 2.1" in mo.as_html(notebook.outputs(cell)[2 * tokens]).text


def test_a_cell_knows_the_controls_behind_it(notebook: Notebook) -> None:
    found = {frozenset(cell.controls) for cell in notebook.cells}
    alone = {frozenset({name}) for name in ("guess", "bill", "neighbour", "own_words")}
    assert found == {frozenset(), *alone, BOTH, frozenset({"bill", "step"})}


def test_the_output_of_a_state_is_what_marimo_shows_there(notebook: Notebook) -> None:
    """``app.run`` with other values of the controls in the place of their cell."""
    for positions in ({"nudged": 0, "size": 0}, {"nudged": 3, "size": 5}):
        given = {
            name: SimpleNamespace(value=notebook.controls[name].values[position])
            for name, position in positions.items()
        }
        outputs, _ = notebook.module.app.run(defs={**given, "run_path": None})
        shown = {plain_html(output, notebook.controls) for output in outputs}
        for cell in notebook.cells:
            if set(cell.controls) != BOTH:
                continue
            sizes = [len(notebook.controls[name].values) for name in cell.controls]
            tabulated = notebook.outputs(cell)
            assert len(tabulated) == sizes[0] * sizes[1] == 24
            first, second = (positions[name] for name in cell.controls)
            assert plain_html(tabulated[first * sizes[1] + second], notebook.controls) in shown
            start = tabulated[notebook.start_of(cell)]
            assert plain_html(start, notebook.controls) not in shown


def test_every_position_shows_something_else_where_it_matters(notebook: Notebook) -> None:
    for cell in notebook.cells:
        if set(cell.controls) == BOTH:
            shown = [plain_html(output, notebook.controls) for output in notebook.outputs(cell)]
            assert len(set(shown)) == 24
    values = [control.element.value for control in notebook.controls.values()]
    firsts = [control.values[control.start] for control in notebook.controls.values()]
    assert values == firsts, "the controls are back where they were"


def test_a_cell_with_too_many_states_is_refused(
    notebook: Notebook, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(notebook_states, "MOST_STATES", 23)
    cell = Cell("", frozenset(), frozenset(), ("nudged", "size"))
    with pytest.raises(ValueError, match="24 states, by its controls nudged, size"):
        notebook.outputs(cell)
