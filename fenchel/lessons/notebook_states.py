"""The outputs of a notebook at every position of its controls.

A notebook is a graph of cells. A cell depends on the controls (sliders, menus, radio buttons,
scenes with places) that it or a cell before it reads, and on nothing else, so its output is a
function of their positions.
``Notebook.outputs`` tabulates it: with n_1, ..., n_k positions of the k controls of a cell, n_1 ...
n_k outputs, the last control running fastest. A cell is executed once per position of *its own*
controls, whatever the cells after it need.

    notebook = Notebook("softmax")
    notebook.controls["temperature"].labels      ["0.1", "0.2", ...]
    notebook.cells[7].controls                   ("temperature", "third")
    notebook.outputs(notebook.cells[7])          143 outputs

The menu of models is no control: its value is the model of the lessons. Other inputs, such as the
form of an exercise, stay at their first values. Cells, their order and their code are read from
parts of marimo that are not documented, in ``Notebook`` alone.
"""

import json
from collections.abc import Sequence
from functools import cached_property
from importlib import import_module
from itertools import product
from math import prod
from typing import Any, NamedTuple

import marimo as mo
from marimo._runtime.control_flow import MarimoStopError

from fenchel.lessons.scene import Scene

MOST_STATES = 2000
"""Outputs of one cell, a limit against a control that was forgotten."""
_MENU = "picker"


class Control(NamedTuple):
    """A slider, a menu, radio buttons, or a scene with places."""

    element: Any
    values: Sequence[Any]
    labels: Sequence[str]
    start: int
    """Its position at first."""


class Cell(NamedTuple):
    """A cell of a notebook, in the order of the page."""

    name: str
    defines: frozenset[str]
    reads: frozenset[str]
    controls: tuple[str, ...]
    """Those on which its output depends, in the order of the page."""


class _Result(NamedTuple):
    output: Any
    names: dict[str, Any]


class Notebook:
    """A lesson with all positions of its controls."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.module = import_module(f"fenchel.lessons.notebooks.{name}")
        app: Any = self.module.app
        app._maybe_initialize()
        self._code: dict[str, Any] = app._graph.cells
        self._defined_by = {
            defined: key for key, code in self._code.items() for defined in code.defs
        }
        self.controls: dict[str, Control] = {}
        self._controls_of: dict[str, frozenset[str]] = {}
        self._results: dict[tuple[str, tuple[int, ...]], _Result] = {}
        for key in app._execution_order:
            self._first(key)
        on_page = [key for key in app._cell_manager.cell_ids() if key in self._code]
        self.controls = {
            name: self.controls[name]
            for key in on_page
            for name in sorted(self._code[key].defs, key=self._place(key))
            if name in self.controls
        }
        self.cells = [self._cell(key) for key in on_page]

    @cached_property
    def names(self) -> dict[str, Any]:
        """Everything that the cells define, with the controls as they stand at first."""
        start = {name: control.start for name, control in self.controls.items()}
        found: dict[str, Any] = {}
        for key in self._code:
            found |= self._result(key, start).names
        return found

    def outputs(self, cell: Cell) -> list[Any]:
        """What a cell shows at each position of its controls."""
        sizes = [len(self.controls[name].values) for name in cell.controls]
        if prod(sizes) > MOST_STATES:
            raise ValueError(
                f"a cell of {self.module.__name__} has {prod(sizes):,} states, by its controls "
                f"{', '.join(cell.controls)}: more than {MOST_STATES:,}."
            )
        found = []
        for positions in product(*map(range, sizes)):
            state = dict(zip(cell.controls, positions, strict=True))
            found.append(self._result(cell.name, state).output)
        self._move(dict.fromkeys(cell.controls))
        return found

    def start_of(self, cell: Cell) -> int:
        """Which of the outputs of a cell stands at the first positions of its controls."""
        index = 0
        for name in cell.controls:
            index = index * len(self.controls[name].values) + self.controls[name].start
        return index

    def _cell(self, key: str) -> Cell:
        code = self._code[key]
        mine = tuple(name for name in self.controls if name in self._controls_of[key])
        return Cell(key, frozenset(code.defs), frozenset(code.refs), mine)

    def _place(self, key: str) -> Any:
        """The order in which the text of a cell names its controls."""
        return lambda name: self._code[key].code.find(name)

    def _first(self, key: str) -> None:
        """Execute a cell as the page opens, and learn on which controls it depends."""
        mine: set[str] = set()
        for name in self._code[key].refs & self._defined_by.keys():
            if name in self.controls:
                mine.add(name)
            else:
                mine |= self._controls_of[self._defined_by[name]]
        self._controls_of[key] = frozenset(mine)
        start = {name: self.controls[name].start for name in mine}
        for name, value in self._result(key, start).names.items():
            control = None if name == _MENU else _control(value)
            if control is not None:
                self.controls[name] = control

    def _result(self, key: str, state: dict[str, int]) -> _Result:
        mine = sorted(self._controls_of[key])
        known = (key, tuple(state[name] for name in mine))
        if known not in self._results:
            names = {"__name__": self.module.__name__, "__file__": self.module.__file__}
            for name in self._code[key].refs & self._defined_by.keys():
                before = self._result(self._defined_by[name], state).names
                if name not in before:  # the cell that defines it was stopped, so this one is too
                    self._results[known] = _Result(None, {})
                    return self._results[known]
                names[name] = before[name]
            self._move({name: state[name] for name in mine})
            self._results[known] = _execute(self._code[key], names)
        return self._results[known]

    def _move(self, positions: dict[str, int | None]) -> None:
        """Set controls; None is their first position."""
        for name, position in positions.items():
            control = self.controls[name]
            control.element._value = control.values[control.start if position is None else position]


def _execute(code: Any, names: dict[str, Any]) -> _Result:
    try:
        exec(code.body, names)
        output = None if code.last_expr is None else eval(code.last_expr, names)
    except MarimoStopError as stop:
        return _Result(stop.output, {})
    return _Result(output, {name: names[name] for name in code.defs if name in names})


def _control(value: Any) -> Control | None:
    if isinstance(value, mo.ui.slider):
        step = value.step or 1
        count = round((value.stop - value.start) / step) + 1
        steps = list(value.steps or (value.start + i * step for i in range(count)))
        whole = all(isinstance(each, int) for each in steps)
        steps = steps if whole else [round(float(each), 12) for each in steps]
        return Control(value, steps, [f"{each:g}" for each in steps], steps.index(value.value))
    if isinstance(value, mo.ui.dropdown | mo.ui.radio):
        values, labels = list(value.options.values()), list(value.options)
        if value.value is None:  # nothing is chosen at first
            values, labels = [None, *values], ["", *labels]
        return Control(value, values, labels, values.index(value.value))
    if isinstance(value, Scene) and value.places is not None:
        states = [json.dumps({**value.state, **place}) for place in value.places]
        return Control(
            value, states, list(map(json.dumps, value.places)), states.index(value.value)
        )
    return None
