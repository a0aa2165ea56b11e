"""What every lesson is made of: a question, claims, a proof, an exercise, a trained model.

A notebook puts these between its own text, controls and charts:

    header(name)                        number, minutes, what to read before, links
    question(text, options), answer     a prediction, and what is true
    claim(ids, text, holds)             a statement and its check: False is an AssertionError
    proof(school, undergraduate, research)    the same argument at three depths, folded
    Exercise                            questions, then a task in code that the page marks
    run_picker(), no_run()              the model of the lessons, or a run directory of the reader's
    text_field(text), token_ids         a text of the reader's own for it
    words_and_weights(tokens, maps)     its words, with a choice of head and a click on a token
    line_chart, bar_chart, heat_chart   a chart above the table of its numbers
    scene.Scene                         a drawing whose handles are dragged (scene.py)
    details(*parts)                     what a first reading can pass over, folded
    what_breaks(text)                   where the statement ends
    footer(name)                        recap cards and the way on

``claim`` is how the course is checked: running a notebook evaluates every claim. Its ids name the
requirements and errata that the statement answers (tests/coverage.md).
"""

import ast
import inspect
import json
import math
import re
import sys
import textwrap
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import wraps
from html import escape
from pathlib import Path
from types import FrameType, FunctionType, ModuleType
from typing import Any

import altair as alt
import marimo as mo
import torch

import fenchel
from fenchel.lessons.course import COURSE, MODEL, keep, keep_answer, lesson, record_of
from fenchel.lessons.ladder import frame, ladder_html, recap_html
from fenchel.lessons.scene import Scene, all_places

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
_LISTS = ("[The whole model](/model)", "[All lessons](/)")


def header(name: str) -> mo.Html:
    """The title, and the way to the lists and to the lessons before."""
    this = lesson(name)
    needs = ", ".join(f"[{lesson(each).title}](../{each}/)" for each in this.needs)
    title = mo.md(
        f"{_STYLE}\n\n# {this.title}\n\n"
        f"Lesson {this.number} · about {this.minutes} minutes"
        + (" · research, not needed for the other lessons" if this.research else "")
        + f" · {_LISTS[-1]}"
    )
    return mo.vstack([title, mo.accordion({"Read before": mo.md(needs)})]) if needs else title


def footer(name: str) -> mo.Html:
    """The recap and the way on, at the end of the page."""
    return mo.vstack([frame(recap_html(name)), way_on(name)])


def way_on(name: str) -> mo.Html:
    """Links to the next lesson and to the lists."""
    return mo.md(f"---\n\n{_way_on(name)}")


def _way_on(name: str) -> str:
    after = lesson(name).number + 1
    following = [f"[Next: {each.title}](../{each.name}/)" for each in COURSE[after : after + 1]]
    return " · ".join([*following, "[What you have mastered](/progress)", *_LISTS])


def question(text: str, options: Sequence[str]) -> mo.ui.radio:
    """A question to answer before reading on; ``fenchel learn`` keeps what is chosen."""
    options, label = list(options), f"**Predict.** {text}"
    name = Path(sys._getframe(1).f_globals.get("__file__", "")).stem  # that of the notebook
    if mo.app_meta().mode != "run" or name not in {each.name for each in COURSE}:
        return mo.ui.radio(options, label=label, inline=True)

    def kept(choice: str | None) -> None:
        with suppress(OSError):  # a folder that cannot be written to
            keep(name, {"prediction": choice or ""})

    before = record_of(name).prediction
    value = before if before in options else None
    return mo.ui.radio(options, value=value, label=label, inline=True, on_change=kept)


def answer(choice: str | None, right: str, why: str) -> mo.Html:
    """What is true, once the reader has chosen."""
    if choice is None:
        return mo.md("*Choose an answer.*")
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
    return mo.md(f"<span {_CHECKED}>✓</span> {text}")


_CHECKED = 'role="img" aria-label="checked"'


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


def details(*parts: mo.Html, title: str = "Checked details") -> mo.Html:
    """What a first reading can pass over, folded: claims, or a section with its text and charts.

    The label ends with the number of claims inside.
    """
    held = mo.vstack(list(parts))
    checked = held.text.count(_CHECKED)
    return mo.accordion({f"{title} ({checked})" if checked else title: held})


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
        """The questions, then the editor with its button and the code that was checked last."""
        editor = mo.ui.code_editor(
            record_of(self.lesson).code or self.starter.strip(), min_height=140
        )
        return _Ladder(self.lesson, editor, label=f"**Exercise, in code.** {self.task}")

    def hints(self) -> list[str]:
        """What the check says to wrong answers, in its order, where it holds for any answer."""
        try:
            tree = ast.parse(textwrap.dedent(inspect.getsource(self.check)))
        except (OSError, SyntaxError):  # a check whose text is not known
            return []
        said = [
            node.msg.value
            for node in ast.walk(tree)
            if isinstance(node, ast.Assert)
            and isinstance(node.msg, ast.Constant)
            and isinstance(node.msg.value, str)
        ]
        return list(dict.fromkeys(said))

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
            return self._wrong_type(names.returned) or said
        return None

    def _wrong_type(self, values: Sequence[tuple[str, Any]]) -> str | None:
        """A sentence about the value on which the check failed, by what the solution gives."""
        right = _Answers({"torch": torch, "math": math, "fenchel": fenchel})
        exec(compile(self.solution, _ANSWER, "exec"), right)
        self.check(right.recorded())
        if not values or len(values) > len(right.returned):
            return None
        (name, value), (_, other) = values[-1], right.returned[len(values) - 1]
        if _kind(value) == _kind(other):
            return None
        missing = " Does it end with `return`?" if value is None else ""
        return f"`{name}` returned {_kind(value)}; the task asks for {_kind(other)}.{missing}"

    def verdict(self, code: str | None) -> mo.Html:
        """What to show below the editor."""
        if code is None:
            kept = record_of(self.lesson)
            return self._help(kept.tries, kept.solved)
        hint = self.mark(code)
        try:
            kept = keep_answer(self.lesson, code, solved=hint is None)
            said = "It is marked in the list of lessons."
        except OSError as error:
            kept = replace(record_of(self.lesson), tries=_TRIES)  # tries cannot be counted
            said = f"It cannot be marked in the list of lessons: {escape(str(error))}"
        if hint is None:
            shown = mo.callout(mo.md(f"**Solved.** {said} {_way_on(self.lesson)}"), kind="success")
        else:
            shown = mo.callout(mo.md(f"**Not yet.** {escape(hint)}"), kind="danger")
        return mo.vstack([shown, self._help(kept.tries, hint is None or kept.solved)])

    def _help(self, tries: int, solved: bool) -> mo.Html:
        hints = self.hints()
        folded: dict[str, mo.Html] = {}
        for number, hint in reversed([*enumerate(hints, start=1)]):  # each inside the one before
            shown = mo.md(escape(hint))
            inner = mo.vstack([shown, mo.accordion(folded)]) if folded else shown
            folded = {f"Hint {number} of {len(hints)}": inner}
        parts = {"The code to begin with": self.starter} if tries or solved else {}
        if tries >= _TRIES or solved:
            parts["Solution"] = self.solution
        folded |= {title: mo.md(f"```python\n{code.strip()}\n```") for title, code in parts.items()}
        left = _TRIES - tries
        note = mo.md(f"*The solution opens after {left} {'try' if left == 1 else 'tries'}.*")
        closed = [] if "Solution" in parts else [note]
        return mo.vstack([mo.accordion(folded), *closed] if folded else closed)


class _Ladder(mo.ui.form[Any, Any]):
    """An exercise: questions by pencil and by choice, then the code."""

    def __init__(self, name: str, editor: mo.ui.code_editor, *, label: str) -> None:
        self._questions = frame(ladder_html(name)).text
        super().__init__(editor, submit_button_label="Check", label=label)

    @property
    def text(self) -> str:
        """The frame of the questions above the form."""
        return f"<div>{self._questions}{super().text}</div>"


class _Answers(dict[str, Any]):
    """The names that an answer defines, and what their functions returned to the check."""

    def __init__(self, names: Mapping[str, Any]) -> None:
        super().__init__(names)
        self.returned: list[tuple[str, Any]] = []

    def recorded(self) -> Mapping[str, Any]:
        """The same names; what their functions return is recorded."""

        def recorded(name: str, function: FunctionType) -> Callable[..., Any]:
            @wraps(function)
            def call(*given: Any, **named: Any) -> Any:
                value = function(*given, **named)
                self.returned.append((name, value))
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


def text_field(start: str) -> mo.ui.text_area:
    """A field for a text that the chosen model reads; the web edition has its first text."""
    label = "**Your text.** Change it and click beside it."
    return mo.ui.text_area(start, label=label, rows=2, full_width=True)


def token_ids(text: str, tokenizer: Any, most: int) -> list[int]:
    """The tokens of a text from a field, at most so many; stops the cell below two."""
    ids: list[int] = tokenizer.encode_whole(text)[:most]
    mo.stop(len(ids) < 2, mo.md("*Type a few words.*"))
    return ids


def words_and_weights(tokens: Sequence[str], maps: torch.Tensor, *, causal: bool) -> Scene:
    """Tokens joined by the weights (layers, H, T, T) of a chosen head, from a chosen token.

    Names count from 1, layer.head, as in the commands. The last token of the last head is chosen
    at first; ``state["head"]`` counts all heads from 0.
    """
    heads = [
        {
            "name": f"{n}.{h}",
            "weights": [
                [round(w, 7) for w in row[: i + 1 if causal else None]]
                for i, row in enumerate(rows)
            ],
        }
        for n, layer in enumerate(maps.tolist(), 1)
        for h, rows in enumerate(layer, 1)
    ]
    return Scene(
        "words_and_weights",
        {"text": 0, "head": len(heads) - 1, "word": len(tokens) - 1, "map": "softmax", "T": 1.0},
        places=all_places(head=range(len(heads)), word=range(len(tokens))),
        texts=[{"name": "own", "tokens": list(tokens), "heads": heads}],
        causal=causal,
        maps=False,
    )


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
    ``y``, a vertical line for one with ``x`` alone. ``cloud`` is drawn as dots, small where there
    are many. A map is ``square``: its two axes need the same scale.
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
        size, opacity = (12, 0.5) if len(cloud) > 50 else (60, 1.0)
        mark = alt.Chart(_data(cloud)).mark_circle
        dots = mark(size=size, color="#7f7f7f", opacity=opacity, clip=True)
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
            mo.accordion({"Its numbers": table(rows)}),
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

    >>> number(1.82e9, 3), number(4.1e8, 1), number(2512, 2), number(2.2e-16, 2), number(-0.0)
    ('1.82 billion', '400 million', '2500', '2.2·10⁻¹⁶', '0')
    """
    size = abs(value)
    if (size >= 1e15 and math.isfinite(size)) or 0 < size < 1e-4:
        digits_of, exponent = f"{value:.{digits - 1}e}".split("e")
        plain = digits_of.rstrip("0").rstrip(".") if "." in digits_of else digits_of
        return f"{plain}·10{str(int(exponent)).translate(_RAISED)}"
    for unit, name in ((1e12, "trillion"), (1e9, "billion"), (1e6, "million")):
        if size >= unit and math.isfinite(size):
            return f"{float(f'{value / unit:.{digits}g}'):g} {name}"
    if 1e4 <= size < 1e6:
        return f"{value:,.0f}"
    return f"{float(f'{value + 0.0:.{digits}g}'):.{max(digits, 5)}g}"  # no -0


def _without_exponents(text: str) -> str:
    """A text with its numbers such as 1.82e+09 as ``number`` writes them, and true minus signs.

    Code stays as it is.

    >>> _without_exponents("-2 to 2e-16, $x = 3e-07$, `tol=1e-9`")
    '−2 to 2·10⁻¹⁶, $x = 3 \\\\cdot 10^{-7}$, `tol=1e-9`'
    """

    def written(part: str) -> str:
        if part.startswith("`"):
            return part
        if part.startswith("$"):
            return _EXPONENT.sub(lambda m: rf"{m[1]} \cdot 10^{{{int(m[2])}}}", part)
        part = _EXPONENT.sub(lambda m: number(float(m[0]), len(m[1].lstrip("-")) or 1), part)
        return _MINUS.sub("−", part)

    return "".join(map(written, re.split(r"(`[^`]*`|\$[^$]*\$)", text)))


_EXPONENT = re.compile(r"(?<![\w.])(-?\d(?:\.\d+)?)e([+-]\d+)(?!\w)")
_MINUS = re.compile(r"(?<![\w.)\]-])-(?=\d)")
_RAISED = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


def _text(value: Any) -> str:
    return number(value).replace("-", "−") if isinstance(value, float) else str(value)
