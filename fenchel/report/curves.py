"""Curves of training: loss, bits per byte, perplexity, learning rate, gradient norm, speed.

Every curve can be drawn against steps, tokens or time. A value that is not finite leaves a gap, and
the caption names its steps.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fenchel.report.html import Html, Section, element, format_number, join, notes, picture, table
from fenchel.report.run_data import (
    RunData,
    Series,
    baselines,
    chart_series,
    evaluated_part,
    series,
    table_rows,
)

_AXES = {"step": "steps", "tokens": "tokens", "elapsed": "time"}


@dataclass(frozen=True)
class Chart:
    """A chart of one or two columns of the metrics."""

    name: str
    title: str
    caption: str
    columns: Mapping[str, str]
    """Column of the metrics to its label in the legend."""
    spread: float = 1000.0
    """The ratio of largest to smallest value beyond which the scale is logarithmic."""
    zero: bool = False
    """Whether the vertical axis starts at zero."""
    width: str = "third"
    """Its share of a wide page: "whole", "half" or "third"."""


CHARTS = (
    Chart(
        "loss",
        "Loss",
        "Nats per token, on the training batch of the step and on held-out text.",
        {"train/loss": "training", "validation/loss": "validation"},
        width="whole",
    ),
    Chart(
        "bits",
        "Bits per byte",
        "Of held-out text, with the baselines as dashed lines.",
        {"validation/bits_per_byte": "validation"},
        width="half",
    ),
    Chart(
        "perplexity",
        "Perplexity",
        "exp of the loss on held-out text: the number of equally likely tokens of the same loss.",
        {"validation/perplexity": "validation"},
        spread=1.0,
        width="half",
    ),
    Chart(
        "rate",
        "Learning rate",
        "Set by the schedule.",
        {"train/learning_rate": "rate"},
        spread=math.inf,
        zero=True,
    ),
    Chart(
        "gradient",
        "Gradient norm",
        "Over all parameters, before clipping.",
        {"train/gradient_norm": "norm"},
        spread=30.0,
    ),
    Chart(
        "speed",
        "Speed",
        "Training tokens per second.",
        {"time/tokens_per_second": "tokens per second"},
        spread=math.inf,
        zero=True,
    ),
)


def curves(run: RunData) -> Section:
    """The section of the charts that have at least one number."""
    body: list[Html] = [notes(run.troubles.get("metrics.jsonl", ()))]
    pictures: dict[str, Any] = {}
    missing = []
    figures = []
    for chart in CHARTS:
        columns = {label: series(run, key) for key, label in chart.columns.items()}
        if not any(len(column.finite) for column in columns.values()):
            missing.append(chart.title.lower())
            continue
        tones = {label: int(label == "validation") for label in columns}
        drawn = [(run, label, column, tones[label]) for label, column in columns.items()]
        pictures[chart.name] = line_chart(chart, drawn)
        if chart.name == "bits":
            references = baselines(run.summary)
            pictures[chart.name]["references"] = [
                {"name": name, "value": value} for name, value in references
            ]
        figures.append(_figure(chart, columns, log=pictures[chart.name]["log"]))
    if figures:
        body += [
            notes(filter(None, [evaluated_part(run)])),
            axis_choice(pictures),
            element("div", *figures, class_="charts"),
        ]
    if missing and run.rows:
        body.append(notes([f"The metrics contain no values yet for: {', '.join(missing)}."]))
    return Section(anchor="learning", title="Learning", body=join(body, "\n"), pictures=pictures)


def line_chart(chart: Chart, columns: Sequence[tuple[RunData, str, Series, int]]) -> dict[str, Any]:
    """What ``lineChart`` of charts.js takes; of every column its run, label, values and tone."""
    values = np.concatenate([column.finite for _, _, column, _ in columns])
    spread = values.min() > 0 and values.max() > chart.spread * values.min()
    return {
        "view": "lineChart",
        "log": bool(spread),
        "zero": chart.zero,
        "series": [
            {**chart_series(run, label, column), "tone": tone}
            for run, label, column, tone in columns
            if len(column.steps)
        ],
        "references": [],
    }


def _figure(chart: Chart, columns: Mapping[str, Series], *, log: bool) -> Html:
    sentences = [chart.caption, "Logarithmic scale." if log else ""]
    sentences += [_gap(label, column) for label, column in columns.items()]
    head = ("step", *columns)
    rows = [[format_number(cell) for cell in row] for row in table_rows(list(columns.values()))]
    caption = " ".join(filter(None, sentences))
    about = f"{chart.title} at some of the steps; metrics.jsonl has all of them"
    numbers = table(head, rows, caption=about)
    return picture(chart.name, chart.title, caption, numbers, width=chart.width)


def _gap(label: str, column: Series) -> str:
    holes = column.steps[~np.isfinite(column.values)]
    if not len(holes):
        return ""
    first, last = format_number(holes[0]), format_number(holes[-1])
    where = f"at step {first}" if len(holes) == 1 else f"between steps {first} and {last}"
    count = "1 value is" if len(holes) == 1 else f"{len(holes):,} values are"
    return f"{count} not finite ({label}, {where}) and left out of the curve."


def axis_choice(pictures: Mapping[str, Any]) -> Html:
    """Radio buttons for the horizontal axis of all curves of a page."""
    known = {axis for data in pictures.values() for one in data["series"] for axis in one["x"]}
    choices = (
        element(
            "label",
            element("input", type="radio", name="axis", value=axis, checked=axis == "step"),
            element("span", label),
        )
        for axis, label in _AXES.items()
        if axis in known
    )
    return element(
        "fieldset", element("legend", "Horizontal axis of all curves"), *choices, class_="axis"
    )
