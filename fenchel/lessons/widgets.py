"""What every lesson is made of: a question, claims, a proof, an exercise, a trained model.

A notebook puts these between its own text, controls and charts:

    header(name)                        number, minutes, what to read before, links
    question(text, options), answer     a prediction, and what is true
    claim(ids, text, holds)             a statement and its check: False is an AssertionError
    proof(school, undergraduate, research)    the same argument at three depths, folded
    Exercise                            a task in code that the page marks
    run_picker(), no_run()              the model of the lessons, or a run directory of the reader's
    line_chart, bar_chart, heat_chart   a chart above the table of its numbers
    scene.Scene                         a drawing whose handles are dragged (scene.py)
    details(*claims)                    checks that a first reading can pass over, folded
    what_breaks(text)                   where the statement ends
    footer(name)                        the way on

``claim`` is how the course is checked: running a notebook evaluates every claim. Its ids name the
requirements and errata that the statement answers (docs/coverage.md).
"""

import json
import math
import re
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from html import escape
from pathlib import Path
from types import FrameType, FunctionType, ModuleType
from typing import Any

import altair as alt
import marimo as mo
import torch

import fenchel
from fenchel.lessons.course import COURSE, MODEL, keep_answer, kept_answer, lesson

_SECONDS = 5.0
"""How long the code of a reader may run."""
_ANSWER = "<your answer>"
_TRIES = 2
"""After so many wrong answers the solution can be opened."""


_STYLE = (
    "<style>@media (max-width: 640px) "
    '{[data-testid="notebook-actions-dropdown"] {display: none}}</style>'
)
"""On a phone marimo's menu lies over the text."""


def header(name: str) -> mo.Html:
    """The title, the question, and the way to the lessons before and after."""
    this = lesson(name)
    number = COURSE.index(this) + 1
    needs = ", ".join(f"[{lesson(each).title}](../{each}/)" for each in this.needs)
    return mo.md(
        f"{_STYLE}\n\n# {this.title}\n\n"
        f"Lesson {number} of {len(COURSE)} · about {this.minutes} minutes"
        + (" · research, not needed for the other lessons" if this.research else "")
        + (f" · read before: {needs}" if needs else "")
        + f"\n\n{_way_on(name)}"
    )


def footer(name: str) -> mo.Html:
    """The way on, at the end of the page."""
    return mo.md(f"---\n\n{_way_on(name)}")


def _way_on(name: str) -> str:
    number = COURSE.index(lesson(name)) + 1
    following = [f"[Next: {each.title}](../{each.name}/)" for each in COURSE[number : number + 1]]
    return " · ".join([*following, "[The whole model](/model)", "[All lessons](/)"])


def question(text: str, options: Sequence[str]) -> mo.ui.radio:
    """A question to answer before reading on."""
    return mo.ui.radio(list(options), label=f"**Predict.** {text}")


def answer(choice: str | None, right: str, why: str) -> mo.Html:
    """What is true, once the reader has chosen."""
    if choice is None:
        return mo.md("*Choose an answer to see what is true.*")
    verdict = "Right." if choice == right else f"Not quite: {right}."
    return mo.callout(mo.md(f"**{verdict}** {why}"), kind="success" if choice == right else "info")


def claim(ids: str, text: str, holds: Any) -> mo.Html:
    """A statement of the lesson, shown with a check mark if ``holds`` and an error otherwise.

    ``ids`` names, apart by spaces, the requirements and errata that the statement answers.
    """
    if not ids.split():
        raise ValueError("a claim names at least one requirement")
    if not bool(holds):
        raise AssertionError(f"{ids}: {text}")
    text = _without_exponents(text)
    if _record is not None:
        _record.append((ids, text))
    return mo.md(f'<span role="img" aria-label="checked">✓</span> {text}')


_record: list[tuple[str, str]] | None = None


@contextmanager
def recorded_claims() -> Iterator[list[tuple[str, str]]]:
    """The claims that are evaluated meanwhile, as (ids, text)."""
    global _record
    _record = []
    try:
        yield _record
    finally:
        _record = None


def proof(*, school: str, undergraduate: str, research: str) -> mo.Html:
    """Why it is true, folded, for three readers."""
    return mo.accordion(
        {
            "Why, with school mathematics": mo.md(school),
            "Proof, with calculus and linear algebra": mo.md(undergraduate),
            "Context, for a researcher": mo.md(research),
        },
        multiple=True,
    )


def details(*claims: mo.Html) -> mo.Html:
    """Claims that a first reading can pass over, folded."""
    return mo.accordion({f"Checked details ({len(claims)})": mo.vstack(list(claims))})


def what_breaks(text: str) -> mo.Html:
    """Where the statement ends: the condition that is easily lost."""
    return mo.callout(mo.md(f"**What would break this?** {text}"), kind="warn")


@dataclass(frozen=True)
class Exercise:
    """A task in code. ``check`` gets the names that the code defines and fails with a hint.

    The starter must fail and the solution must pass (tests/lessons/test_notebooks.py). The code
    runs with ``torch``, ``math`` and ``fenchel`` at hand, for at most five seconds.
    """

    lesson: str
    task: str
    starter: str
    solution: str
    check: Callable[[Mapping[str, Any]], None]

    def form(self) -> mo.ui.form[Any, Any]:
        """The editor with its button. It holds the last answer that was checked."""
        kept = kept_answer(self.lesson)
        editor = mo.ui.code_editor(kept.code or self.starter.strip(), min_height=140)
        return editor.form(submit_button_label="Check", label=f"**Exercise.** {self.task}")

    def mark(self, code: str) -> str | None:
        """None if the code solves the task, else a hint."""
        names = _Answers({"torch": torch, "math": math, "fenchel": fenchel})
        try:
            with _Deadline(_SECONDS):
                exec(compile(code, _ANSWER, "exec"), names)
                self.check(names.recorded())
        except AssertionError as error:
            return str(error) or "The check does not hold yet."
        except KeyError as error:
            if not _line(error):
                return f"The name {error} is not defined."
            return f"Line {_line(error)}: KeyError: {error}"
        except (Exception, SystemExit) as error:  # whatever a reader writes
            said = f"{type(error).__name__}: {error}"
            if line := _line(error):
                return f"Line {line}: {said}"
            return f"{names.last} ({said})" if names.last else said
        return None

    def verdict(self, code: str | None) -> mo.Html:
        """What to show below the editor."""
        if code is None:
            kept = kept_answer(self.lesson)
            return self._help(kept.tries, kept.solved)
        hint = self.mark(code)
        try:
            kept = keep_answer(self.lesson, code, solved=hint is None)
            said = "It is marked in the list of lessons."
        except OSError as error:
            kept = kept_answer(self.lesson)._replace(tries=_TRIES)  # tries cannot be counted
            said = f"It cannot be marked in the list of lessons: {escape(str(error))}"
        if hint is None:
            shown = mo.callout(mo.md(f"**Solved.** {said} {_way_on(self.lesson)}"), kind="success")
        else:
            shown = mo.callout(mo.md(f"**Not yet.** {escape(hint)}"), kind="danger")
        return mo.vstack([shown, self._help(kept.tries, hint is None or kept.solved)])

    def _help(self, tries: int, solved: bool) -> mo.Html:
        parts = {"The code to begin with": self.starter} if tries or solved else {}
        if tries >= _TRIES or solved:
            parts["Solution"] = self.solution
        folded = {title: mo.md(f"```python\n{code.strip()}\n```") for title, code in parts.items()}
        if "Solution" in parts:
            return mo.accordion(folded)
        left = _TRIES - tries
        note = mo.md(f"*The solution opens after {left} {'try' if left == 1 else 'tries'}.*")
        return mo.vstack([note, mo.accordion(folded)]) if folded else note


class _Answers(dict[str, Any]):
    """The names that an answer defines, and what was last taken from them."""

    last = ""
    """A sentence about the last value that the check got; it says why the check failed on it."""

    def recorded(self) -> Mapping[str, Any]:
        """The same names; what their functions return is recorded."""

        def recorded(name: str, function: FunctionType) -> Callable[..., Any]:
            @wraps(function)
            def call(*given: Any, **named: Any) -> Any:
                self.last = ""
                value = function(*given, **named)
                missing = " Does it end with `return`?" if value is None else ""
                self.last = (
                    f"`{name}` returned {_kind(value)}, not what the task asks for.{missing}"
                )
                return value

            return call

        return {
            name: recorded(name, value)
            if isinstance(value, FunctionType)
            else _not_callable(name, value)
            for name, value in self.items()
            if not name.startswith("__")
        }


def _not_callable(name: str, value: Any) -> Any:
    if callable(value) or isinstance(value, ModuleType):
        return value

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError(f"`{name}` is {_kind(value)}; it should be a function.")

    return refuse


def _kind(value: Any) -> str:
    """What a value is, in words."""
    if value is None:
        return "None"
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {tuple(value.shape)} and type {value.dtype}"
    if isinstance(value, tuple):
        return f"a tuple of {len(value)}"
    name = {"str": "text", "float": "a number", "int": "a whole number"}.get(type(value).__name__)
    return name or f"a value of type {type(value).__name__}"


def _line(error: BaseException) -> int:
    """The line of the answer in which an error arose; 0 if it arose in the check."""
    lines = [
        step.lineno
        for step in traceback.extract_tb(error.__traceback__)
        if step.filename == _ANSWER
    ]
    return lines[-1] or 0 if lines else 0


class _Deadline:
    """Raises TimeoutError in an answer of this thread that runs for too long."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def __enter__(self) -> None:
        self.end = time.monotonic() + self.seconds
        self.before = sys.gettrace()
        sys.settrace(self._trace)

    def __exit__(self, *_: object) -> None:
        sys.settrace(self.before)

    def _trace(self, frame: FrameType, event: str, argument: Any) -> Any:  # noqa: ARG002
        if frame.f_code.co_filename != _ANSWER:
            return None  # the library at full speed
        frame.f_trace_opcodes = True  # a loop in one line has no events of lines
        if time.monotonic() > self.end:
            raise TimeoutError(f"the code ran for more than {self.seconds:g} seconds")
        return self._trace


def run_picker(folder: str | Path = "runs") -> mo.ui.dropdown:
    """A menu of models; its value is a path, or None.

    The model of the lessons is chosen at first; below it are the run directories in a folder.
    """
    found = sorted(path.parent for path in Path(folder).glob("*/config.toml"))
    options = {_SHIPPED: str(MODEL)} | {path.name: str(path) for path in found}
    label = "**On a trained model.** Runs of your own, in `runs/`, are in the menu too."
    return mo.ui.dropdown(options, value=_SHIPPED, label=label, allow_select_none=True)


_SHIPPED = "the model of the lessons"


def no_run() -> mo.Html:
    """What to show while no model is chosen."""
    return mo.md("Choose a model to see the same on it. `fenchel train` makes one, in `runs/`.")


Row = Mapping[str, Any]


def line_chart(
    rows: Sequence[Row],
    x: str,
    y: str,
    series: str | None = None,
    *,
    title: str,
    log_x: bool = False,
    log_y: bool = False,
    points: bool = False,
    x_range: tuple[float, float] | None = None,
    y_range: tuple[float, float] | None = None,
    here: Sequence[Row] = (),
    cloud: Sequence[Row] = (),
    square: bool = False,
) -> mo.Html:
    """Lines through the rows, one per series, above the table of the rows.

    The first series is drawn solid. A range fixes the frame, so that a control moves the lines and
    not the axes. ``here`` marks the present value of a control: a dot for a row with ``x`` and
    ``y``, a vertical line for one with ``x`` alone. ``cloud`` is drawn as small dots. A map is
    ``square``: its two axes need the same scale.
    """
    assert all({x} <= set(row) <= {x, y} for row in here), here
    across = alt.X(x, type="quantitative", scale=_scale(log_x, x_range), title=_title(x))
    up = alt.Y(y, type="quantitative", scale=_scale(log_y, y_range), title=_title(y))
    encoding: dict[str, Any] = {"x": across, "y": up, "order": alt.Order("order:Q")}
    if series is not None:
        encoding["color"] = _colour(series)
        encoding["strokeDash"] = alt.StrokeDash(series, type="nominal", sort=None)
    # The order of the rows, else a walk that turns round is joined from left to right.
    ordered = [{**row, "order": i} for i, row in enumerate(rows)]
    marked = alt.Chart(_data(ordered)).mark_line(point=points, clip=True, color=_COLOURS[0])
    lines = marked.encode(**encoding)
    layers = [lines]
    if cloud:
        dots = alt.Chart(_data(cloud)).mark_circle(size=12, color="#7f7f7f", opacity=0.5, clip=True)
        layers.insert(0, dots.encode(x=across, y=up))
    if places := [row for row in here if y in row]:
        dots = alt.Chart(_data(places)).mark_point(size=110, filled=True, color=_HERE, clip=True)
        layers.append(dots.encode(x=across, y=up))
    if walls := [row for row in here if y not in row]:
        wall = alt.Chart(_data(walls)).mark_rule(size=2, color=_HERE, clip=True)
        layers.append(wall.encode(x=across))
    drawn = alt.layer(*layers) if len(layers) > 1 else lines
    return _chart(drawn, rows, title, here=bool(here), square=square)


def bar_chart(
    rows: Sequence[Row],
    x: str,
    y: str,
    series: str | None = None,
    *,
    title: str,
    y_range: tuple[float, float] | None = None,
    here: Any = None,
) -> mo.Html:
    """Bars in the order of the rows, side by side where there is a series.

    ``y_range`` fixes the frame; the bar of which ``x`` is ``here`` stands out.
    """
    scale = alt.Undefined if y_range is None else alt.Scale(domain=y_range, nice=False)
    encoding: dict[str, Any] = {
        "x": alt.X(x, type="nominal", sort=None, axis=_BELOW, title=_title(x)),
        "y": alt.Y(y, type="quantitative", scale=scale, title=_title(y)),
    }
    if series is not None:
        encoding["color"] = _colour(series)
        encoding["xOffset"] = alt.XOffset(series, type="nominal", sort=None)
    if here is not None:
        assert any(row[x] == here for row in rows), here
        chosen = f"datum[{json.dumps(x)}] === {json.dumps(here)}"
        encoding["color"] = alt.condition(chosen, alt.value(_HERE), alt.value(_COLOURS[0]))
    bars = alt.Chart(_data(rows)).mark_bar(clip=True, color=_COLOURS[0]).encode(**encoding)
    return _chart(bars, rows, title, here=here is not None)


def heat_chart(
    values: torch.Tensor,
    *,
    title: str,
    rows: Sequence[str] | None = None,
    columns: Sequence[str] | None = None,
    axes: tuple[str, str] = ("row", "column"),
    of: str = "value",
    of_range: tuple[float, float] | None = None,
) -> mo.Html:
    """A matrix as coloured cells, above the table of its numbers.

    Rows and columns are labelled by their names, by default positions from 0; ``axes`` says what a
    row and a column are, such as ("query", "key"), and ``of`` what a cell is. Where a number is
    negative, colours go two ways from 0.
    """
    matrix = values.detach().tolist()
    down = _distinct(rows or [str(i) for i in range(len(matrix))])
    across = _distinct(columns or [str(j) for j in range(len(matrix[0]))])
    angle = 0 if max(map(len, across)) <= 2 else 270  # numbers upright, words along the columns
    cells = [
        {axes[0]: name, axes[1]: other, of: value}
        for name, line in zip(down, matrix, strict=True)
        for other, value in zip(across, line, strict=True)
    ]
    largest = max(abs(cell[of]) for cell in cells)
    if any(cell[of] < 0 for cell in cells):
        scale = alt.Scale(scheme="blueorange", domain=(-largest, largest))
    else:
        scale = alt.Scale(scheme="viridis", domain=of_range or (0.0, largest))
    chart = (
        alt.Chart(_data(cells))
        .mark_rect()
        .encode(
            x=alt.X(axes[1], type="nominal", sort=None, axis=alt.Axis(labelAngle=angle)),
            y=alt.Y(axes[0], type="nominal", sort=None),
            color=alt.Color(of, type="quantitative", scale=scale, title=_title(of)),
            tooltip=[alt.Tooltip(name, type="nominal") for name in (*axes, of)],
        )
    )
    named = [
        {axes[0]: name} | dict(zip(across, line, strict=True))
        for name, line in zip(down, matrix, strict=True)
    ]
    return _chart(chart, named, title)


def table(rows: Sequence[Row]) -> mo.Html:
    """A table of the rows; numbers as ``number`` writes them."""
    heads = list(dict.fromkeys(key for row in rows for key in row))
    top = "".join(f'<th scope="col" style="{_CELL}">{escape(str(head))}</th>' for head in heads)
    lines = (
        "".join(f'<td style="{_CELL}">{escape(_text(row.get(head, "")))}</td>' for head in heads)
        for row in rows
    )
    body = "".join(f"<tr>{line}</tr>" for line in lines)
    return mo.Html(
        f'<div style="overflow-x:auto"><table><thead><tr>{top}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>"
    )


_CELL = "padding: 0.15em 1em 0.15em 0; text-align: left; vertical-align: bottom"
"""Written into each cell: a notebook carries no style sheet."""
_COLOURS = ["#2086c8", "#d55e00", "#009e73", "#cc79a7", "#8a7a00", "#56b4e9", "#7f7f7f"]
"""Okabe and Ito's, which the common kinds of colour blindness keep apart; the blue is lighter, so
that it is seen on a dark page too."""
_HERE = "#e0408a"
"""The present value of a control."""


# A phone is 390 pixels wide: there a title must wrap, which that of a chart does not; labels break
# at their spaces; and a legend stands below the lines, not beside them.
_BELOW = alt.Axis(labelAngle=0, labelExpr="split(datum.label, ' ')")


def _chart(
    chart: Any,
    rows: Sequence[Row],
    title: str,
    *,
    here: bool = False,
    square: bool = False,
) -> mo.Html:
    # Without a background the page shows through, in the dark as in the light.
    size: dict[str, Any] = {"width": "container", "height": 260}
    size = {"width": 280, "height": 280} if square else size
    drawn = chart.properties(**size, background="transparent")
    note = f' <span style="color: {_HERE}">● your setting</span>' if here else ""
    return mo.vstack(
        [
            mo.md(f"**{_without_exponents(title)}**{note}"),
            drawn,
            mo.accordion({f"Table: {title}": table(rows)}),
        ]
    )


def _distinct(names: Sequence[str]) -> list[str]:
    """The names; one that occurs twice with its position, else its cells would be drawn as one."""
    return [f"{name} ({i})" if names.count(name) > 1 else name for i, name in enumerate(names)]


def _data(rows: Sequence[Row]) -> alt.Data:
    return alt.Data(values=[dict(row) for row in rows])  # type: ignore[no-untyped-call]


def _colour(series: str) -> alt.Color:
    """One colour per series; the legend below, where it leaves a phone the width of the chart."""
    legend = alt.Legend(orient="bottom", columns=2, labelLimit=240, title=_title(series))
    colours = alt.Scale(range=_COLOURS)
    return alt.Color(series, type="nominal", sort=None, scale=colours, legend=legend)


def _title(field: str) -> str | None:
    """The title of an axis or a legend; None for a field whose name says nothing."""
    return None if field in {"what", "which", "line", "value"} else field


def _scale(log: bool, frame: tuple[float, float] | None) -> alt.Scale:
    domain = alt.Undefined if frame is None else list(frame)
    if log:
        return alt.Scale(type="log", nice=False, domain=domain)
    return alt.Scale(domain=domain) if frame else alt.Scale(zero=False)


def number(value: float, digits: int = 4) -> str:
    """A number for a sentence or a table, without the exponent of a program.

    >>> number(1.82e9, 3), number(47123.4), number(2.2e-16, 2), number(-0.0)
    ('1.82 billion', '47,123', '2.2·10⁻¹⁶', '0')
    """
    size = abs(value)
    if (size >= 1e15 and math.isfinite(size)) or 0 < size < 1e-4:
        digits_of, exponent = f"{value:.{digits - 1}e}".split("e")
        plain = digits_of.rstrip("0").rstrip(".") if "." in digits_of else digits_of
        return f"{plain}·10{str(int(exponent)).translate(_RAISED)}"
    for unit, name in ((1e12, "trillion"), (1e9, "billion"), (1e6, "million")):
        if size >= unit and math.isfinite(size):
            return f"{value / unit:.{digits}g} {name}"
    return f"{value:,.0f}" if 1e4 <= size < 1e6 else f"{value + 0.0:.{digits}g}"  # no -0


def _without_exponents(text: str) -> str:
    """A text with its numbers such as 1.82e+09 as ``number`` writes them; code stays as it is.

    >>> _without_exponents("to 2e-16, $x = 3e-07$, `tol=1e-9`")
    'to 2·10⁻¹⁶, $x = 3 \\\\cdot 10^{-7}$, `tol=1e-9`'
    """

    def written(part: str) -> str:
        if part.startswith("`"):
            return part
        if part.startswith("$"):
            return _EXPONENT.sub(lambda m: rf"{m[1]} \cdot 10^{{{int(m[2])}}}", part)
        return _EXPONENT.sub(lambda m: number(float(m[0]), len(m[1].lstrip("-")) or 1), part)

    return "".join(map(written, re.split(r"(`[^`]*`|\$[^$]*\$)", text)))


_EXPONENT = re.compile(r"(?<![\w.])(-?\d(?:\.\d+)?)e([+-]\d+)(?!\w)")
_RAISED = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


def _text(value: Any) -> str:
    return number(value) if isinstance(value, float) else str(value)
