"""What every lesson is made of: a question, claims, a proof, an exercise, the reader's own run.

A notebook puts these between its own text, controls and charts:

    header(name)                        number, minutes, what to read before, links
    question(text, options), answer     a prediction, and what is true
    claim(ids, text, holds)             a statement and its check: False is an AssertionError
    proof(school, undergraduate, research)    the same argument at three depths, folded
    Exercise                            a task in code that the page marks
    run_picker(), no_run()              a run directory of the reader's
    line_chart, bar_chart, heat_chart   a chart above the table of its numbers
    what_breaks(text)                   where the statement ends

``claim`` is how the course is checked: running a notebook evaluates every claim. Its ids name the
requirements and errata that the statement answers (docs/coverage.md).
"""

import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from html import escape
from pathlib import Path
from types import FrameType
from typing import Any

import altair as alt
import marimo as mo
import torch

import fenchel
from fenchel.lessons.course import COURSE, complete, lesson

_SECONDS = 5.0
"""How long the code of a reader may run."""
_ANSWER = "<your answer>"


def header(name: str) -> mo.Html:
    """The title, the question, and the way to the lessons before and after."""
    this = lesson(name)
    number = COURSE.index(this) + 1
    needs = ", ".join(f"[{lesson(each).title}](../{each}/)" for each in this.needs)
    following = COURSE[number : number + 1]
    links = ["[All lessons](/)", *(f"[Next: {each.title}](../{each.name}/)" for each in following)]
    return mo.md(
        f"# {this.title}\n\n"
        f"Lesson {number} of {len(COURSE)} · about {this.minutes} minutes"
        + (f" · read before: {needs}" if needs else "")
        + f"\n\n{' · '.join(links)}"
    )


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
        """The editor with its button."""
        editor = mo.ui.code_editor(self.starter.strip(), min_height=140)
        return editor.form(submit_button_label="Check", label=f"**Exercise.** {self.task}")

    def mark(self, code: str) -> str | None:
        """None if the code solves the task, else a hint."""
        names: dict[str, Any] = {"torch": torch, "math": math, "fenchel": fenchel}
        try:
            with _Deadline(_SECONDS):
                exec(compile(code, _ANSWER, "exec"), names)
                self.check(names)
        except AssertionError as error:
            return str(error) or "The check does not hold yet."
        except KeyError as error:
            return f"The name {error} is not defined."
        except (Exception, SystemExit) as error:  # whatever a reader writes
            return f"{type(error).__name__}: {error}"
        return None

    def verdict(self, code: str | None) -> mo.Html:
        """What to show below the editor."""
        if code is None:
            return mo.accordion({"Solution": mo.md(f"```python\n{self.solution.strip()}\n```")})
        hint = self.mark(code)
        if hint is not None:
            return mo.callout(mo.md(f"**Not yet.** {escape(hint)}"), kind="danger")
        try:
            complete(self.lesson)
            said = "It is marked in the list of lessons."
        except OSError as error:
            said = f"It cannot be marked in the list of lessons: {escape(str(error))}"
        return mo.callout(mo.md(f"**Solved.** {said}"), kind="success")


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
    """A menu of the run directories below a folder; its value is a path, or None."""
    found = sorted(path.parent for path in Path(folder).glob("*/config.toml"))
    options = {path.name: str(path) for path in found}
    return mo.ui.dropdown(options, label="**Your own run.**", allow_select_none=True)


def no_run() -> mo.Html:
    """What to show while no run is chosen."""
    return mo.md("Choose a run to see the same on it. `fenchel train` makes one, in `runs/`.")


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
) -> mo.Html:
    """Lines through the rows, one per series, above the table of the rows."""
    encoding: dict[str, Any] = {
        "x": alt.X(x, type="quantitative", scale=_scale(log_x)),
        "y": alt.Y(y, type="quantitative", scale=_scale(log_y)),
    }
    if series is not None:
        encoding["color"] = _colour(series)
        encoding["strokeDash"] = alt.StrokeDash(series, type="nominal")
    return _chart(alt.Chart(_data(rows)).mark_line(point=points).encode(**encoding), rows, title)


def bar_chart(
    rows: Sequence[Row], x: str, y: str, series: str | None = None, *, title: str
) -> mo.Html:
    """Bars in the order of the rows, side by side where there is a series."""
    encoding: dict[str, Any] = {
        "x": alt.X(x, type="nominal", sort=None, axis=_BELOW),
        "y": alt.Y(y, type="quantitative"),
    }
    if series is not None:
        encoding["color"] = _colour(series)
        encoding["xOffset"] = alt.XOffset(series, type="nominal", sort=None)
    return _chart(alt.Chart(_data(rows)).mark_bar().encode(**encoding), rows, title)


def heat_chart(
    values: torch.Tensor,
    *,
    title: str,
    rows: Sequence[str] | None = None,
    columns: Sequence[str] | None = None,
    axes: tuple[str, str] = ("row", "column"),
) -> mo.Html:
    """A matrix as coloured cells, above the table of its numbers.

    Rows and columns are labelled by their names, by default positions from 0; ``axes`` says what a
    row and a column are, such as ("query", "key").
    """
    matrix = values.detach().tolist()
    down = _distinct(rows or [str(i) for i in range(len(matrix))])
    across = _distinct(columns or [str(j) for j in range(len(matrix[0]))])
    angle = 0 if max(map(len, across)) <= 2 else 270  # numbers upright, words along the columns
    cells = [
        {axes[0]: name, axes[1]: other, "value": value}
        for name, line in zip(down, matrix, strict=True)
        for other, value in zip(across, line, strict=True)
    ]
    chart = (
        alt.Chart(_data(cells))
        .mark_rect()
        .encode(
            x=alt.X(axes[1], type="nominal", sort=None, axis=alt.Axis(labelAngle=angle)),
            y=alt.Y(axes[0], type="nominal", sort=None),
            color=alt.Color("value", type="quantitative", scale=alt.Scale(scheme="viridis")),
            tooltip=[alt.Tooltip(name, type="nominal") for name in (*axes, "value")],
        )
    )
    named = [
        {axes[0]: name} | dict(zip(across, line, strict=True))
        for name, line in zip(down, matrix, strict=True)
    ]
    return _chart(chart, named, title)


def table(rows: Sequence[Row]) -> mo.Html:
    """A table of the rows; numbers to four digits."""
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
_COLOURS = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#8a7a00", "#56b4e9", "#7f7f7f"]
"""Okabe and Ito's, which the common kinds of colour blindness keep apart."""


# A phone is 390 pixels wide: there a title must wrap, which that of a chart does not; labels break
# at their spaces; and a legend stands below the lines, not beside them.
_BELOW = alt.Axis(labelAngle=0, labelExpr="split(datum.label, ' ')")


def _chart(chart: alt.Chart, rows: Sequence[Row], title: str) -> mo.Html:
    drawn = chart.properties(width="container", height=260)
    return mo.vstack([mo.md(f"**{title}**"), drawn, mo.accordion({f"Table: {title}": table(rows)})])


def _distinct(names: Sequence[str]) -> list[str]:
    """The names; one that occurs twice with its position, else its cells would be drawn as one."""
    return [f"{name} ({i})" if names.count(name) > 1 else name for i, name in enumerate(names)]


def _data(rows: Sequence[Row]) -> alt.Data:
    return alt.Data(values=[dict(row) for row in rows])  # type: ignore[no-untyped-call]


def _colour(series: str) -> alt.Color:
    """One colour per series; the legend below, where it leaves a phone the width of the chart."""
    legend = alt.Legend(orient="bottom", columns=2, labelLimit=240)
    return alt.Color(series, type="nominal", scale=alt.Scale(range=_COLOURS), legend=legend)


def _scale(log: bool) -> alt.Scale:
    return alt.Scale(type="log", nice=False) if log else alt.Scale(zero=False)


def _text(value: Any) -> str:
    return f"{value + 0.0:.4g}" if isinstance(value, float) else str(value)  # no -0
