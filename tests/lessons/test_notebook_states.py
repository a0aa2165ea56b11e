"""A notebook at every position of its controls, against marimo's own runs of it."""

from types import SimpleNamespace

import pytest

from fenchel.lessons import notebook_states
from fenchel.lessons.notebook_states import Cell, Notebook
from fenchel.lessons.static_html import plain_html

BOTH = frozenset({"steepness", "exponent"})


@pytest.fixture(scope="module")
def notebook() -> Notebook:
    return Notebook("l09_sparse_choice")


def test_controls_have_their_positions_and_the_menu_of_models_is_none(notebook: Notebook) -> None:
    assert sorted(notebook.controls) == ["cap", "exponent", "guess", "steepness"]
    guess = notebook.controls["guess"]
    assert guess.start == 0
    assert guess.values[0] is None, "nothing is chosen at first"
    assert len(guess.values) == 4
    exponent = notebook.controls["exponent"]
    assert exponent.values[exponent.start] == exponent.element.value
    assert exponent.labels == [f"{value:g}" for value in exponent.values]


def test_a_cell_knows_the_controls_behind_it(notebook: Notebook) -> None:
    found = {frozenset(cell.controls) for cell in notebook.cells}
    assert found == {frozenset(), frozenset({"guess"}), BOTH, frozenset({"cap"})}


def test_the_output_of_a_state_is_what_marimo_shows_there(notebook: Notebook) -> None:
    """``app.run`` with other values of the controls in the place of their cell."""
    for positions in ({"steepness": 0, "exponent": 0}, {"steepness": 5, "exponent": 3}):
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
            assert len(tabulated) == sizes[0] * sizes[1] == 30
            first, second = (positions[name] for name in cell.controls)
            assert plain_html(tabulated[first * sizes[1] + second], notebook.controls) in shown
            start = tabulated[notebook.start_of(cell)]
            assert plain_html(start, notebook.controls) not in shown


def test_nearly_every_position_shows_something_else(notebook: Notebook) -> None:
    for cell in notebook.cells:
        if cell.controls and "guess" not in cell.controls:
            shown = [plain_html(output, notebook.controls) for output in notebook.outputs(cell)]
            assert len(set(shown)) > 0.8 * len(shown)
    values = [control.element.value for control in notebook.controls.values()]
    firsts = [control.values[control.start] for control in notebook.controls.values()]
    assert values == firsts, "the controls are back where they were"


def test_a_cell_with_too_many_states_is_refused(
    notebook: Notebook, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(notebook_states, "MOST_STATES", 29)
    cell = Cell("", frozenset(), frozenset(), ("steepness", "exponent"))
    with pytest.raises(ValueError, match="30 states, by its controls steepness, exponent"):
        notebook.outputs(cell)
