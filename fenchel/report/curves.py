"""What the training loop measured at each step, as curves: loss, perplexity, rate, norm, speed.

Every curve can be read against steps, tokens seen or time elapsed. A value that is not finite
leaves a gap, and a sentence says at which steps.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from fenchel.report.html import Html, Section, element, format_number, join, notes, picture, table
from fenchel.report.run_data import RunData, Series, chart_series, series, table_rows
from fenchel.report.summary import baselines

_AXES = {"step": "steps", "tokens": "tokens seen", "elapsed": "time"}


@dataclass(frozen=True)
class Chart:
    """A picture of one or two columns of the metrics."""

    name: str
    title: str
    caption: str
    columns: Mapping[str, str]
    """HeadChart of the metrics to its name in the legend."""
    spread: float = 1000.0
    """From what factor between its extremes on a logarithmic scale is used."""
    zero: bool = False
    """Whether the vertical axis begins at zero."""
    width: str = "third"
    """How much of a wide page it takes: "whole", "half" or "third"."""


CHARTS = (
    Chart(
        "loss",
        "Loss",
        "Cross-entropy in nats a token, on the batch just trained on and on held-out text.",
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
        "How many equally likely tokens the model hesitates between, on held-out text.",
        {"validation/perplexity": "validation"},
        spread=1.0,
        width="half",
    ),
    Chart(
        "rate",
        "Learning rate",
        "As the schedule set it.",
        {"train/learning_rate": "rate"},
        spread=math.inf,
        zero=True,
    ),
    Chart(
        "gradient",
        "Gradient norm",
        "Of all parameters together, before clipping.",
        {"train/gradient_norm": "norm"},
        spread=30.0,
    ),
    Chart(
        "speed",
        "Speed",
        "Tokens trained on a second.",
        {"time/tokens_per_second": "tokens a second"},
        spread=math.inf,
        zero=True,
    ),
)


def curves(run: RunData) -> Section:
    """The section of all charts for which there is at least one number."""
    body: list[Html] = [notes(run.troubles.get("metrics.jsonl", ()))]
    pictures: dict[str, Any] = {}
    missing = []
    figures = []
    for chart in CHARTS:
        columns = {label: series(run, key) for key, label in chart.columns.items()}
        if not any(len(column.finite) for column in columns.values()):
            missing.append(chart.title.lower())
            continue
        pictures[chart.name] = _data(run, chart, columns)
        figures.append(_figure(chart, columns, log=pictures[chart.name]["log"]))
    if figures:
        body += [_axis_choice(pictures), element("div", *figures, class_="charts")]
    if missing and run.rows:
        body.append(notes([f"The metrics hold no number yet for: {', '.join(missing)}."]))
    return Section(anchor="learning", title="Learning", body=join(body, "\n"), pictures=pictures)


def _data(run: RunData, chart: Chart, columns: Mapping[str, Series]) -> dict[str, Any]:
    values = np.concatenate([column.finite for column in columns.values()])
    spread = values.min() > 0 and values.max() > chart.spread * values.min()
    references = baselines(run.summary) if chart.name == "bits" else []
    return {
        "view": "lineChart",
        "log": bool(spread),
        "zero": chart.zero,
        "series": [
            {**chart_series(run, label, column), "tone": int(label == "validation")}
            for label, column in columns.items()
            if len(column.steps)
        ],
        "references": [{"name": name, "value": value} for name, value in references],
    }


def _figure(chart: Chart, columns: Mapping[str, Series], *, log: bool) -> Html:
    said = [chart.caption, "Logarithmic scale." if log else ""]
    said += [_gap(label, column) for label, column in columns.items()]
    head = ("step", *columns)
    rows = [[format_number(cell) for cell in row] for row in table_rows(list(columns.values()))]
    caption = " ".join(sentence for sentence in said if sentence)
    told = f"{chart.title}, some of the steps; all are in metrics.jsonl"
    numbers = table(head, rows, caption=told)
    return picture(chart.name, chart.title, caption, numbers, width=chart.width)


def _gap(label: str, column: Series) -> str:
    holes = column.steps[~np.isfinite(column.values)]
    if not len(holes):
        return ""
    first, last = format_number(holes[0]), format_number(holes[-1])
    where = f"at step {first}" if len(holes) == 1 else f"between steps {first} and {last}"
    many = "1 value is" if len(holes) == 1 else f"{len(holes):,} values are"
    return f"{many} not finite ({label}, {where}) and left out of the curve."


def _axis_choice(pictures: Mapping[str, Any]) -> Html:
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
        "fieldset", element("legend", "Read all curves against"), *choices, class_="axis"
    )
