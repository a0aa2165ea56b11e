"""The health of attention, layer by layer, while the model learned.

With p the weights of a query over its keys and z the scores,

    entropy    H(p) = - sum_k p_k log p_k      in nats
    effective  exp H(p)                        the number of tokens it amounts to
    support    how many keys have p_k > 0      all that are open, under softmax
    max logit  the largest |z_k|               grows without end before a run diverges

The first three are means over queries, heads and the batch; the run wrote them, nothing is
computed here but what a narrow picture needs.

The scores of attention head by head, while the model learned.

    largest logit    max |beta z| of a head: the first to grow when a run goes wrong
    RMS score        root mean square of beta z over the pairs it may see
    entropy          mean over its queries, in nats: 0 is a head that looks at one key only

A model may have hundreds of heads, and what matters are those that behave unlike the others, so
each picture shows the heads that came furthest (highest score, lowest entropy) at any step,
named layer.head. The run wrote the numbers; nothing is computed here.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from fenchel.report.html import (
    Html,
    Section,
    element,
    format_number,
    join,
    json_numbers,
    notes,
    picture,
    table,
)
from fenchel.report.run_data import Numbers, RunData, axis_values, even_indices, layer_series

_LAYER_COLUMNS = 240
_LAYER_ROWS = 30


@dataclass(frozen=True)
class LayerChart:
    """A picture of one number a layer over time."""

    name: str
    title: str
    caption: str
    column: str
    peak: bool = False
    """Whether a span too narrow to draw is shown by its largest value, not by its mean."""


LAYER_CHARTS = (
    LayerChart(
        "entropy",
        "Entropy",
        "In nats: 0 when every query looks at one token only.",
        "attention/entropy",
    ),
    LayerChart(
        "effective",
        "Effective tokens",
        "How many tokens a query looks at, counted through its entropy.",
        "attention/effective",
    ),
    LayerChart(
        "max-logit",
        "Largest logit",
        "The greatest score, by size, that enters the choice; growth without end is a warning.",
        "attention/max_logit",
        peak=True,
    ),
    LayerChart(
        "support",
        "Support",
        "How many keys get any weight: all in sight under softmax, few under a sparse map.",
        "attention/support",
    ),
)


def layers(run: RunData) -> Section:
    """The section of all strips for which there is at least one number."""
    pictures: dict[str, Any] = {}
    figures, missing = [], []
    for strip in LAYER_CHARTS:
        steps, values = layer_series(run, strip.column)
        if not np.isfinite(values).any():
            missing.append(strip.title.lower())
            continue
        pictures[strip.name] = _layer_data(run, strip, steps, values)
        figures.append(_layer_figure(strip, steps, values))
    body: list[Html] = []
    if figures:
        told = "Each row is a layer, time runs to the right, the number at the end is the last one."
        body += [element("p", told, class_="about"), element("div", *figures, class_="charts")]
    if missing:
        body.append(notes([f"The metrics hold no number by layer for: {', '.join(missing)}."]))
    return Section(
        anchor="health", title="Attention over training", body=join(body, "\n"), pictures=pictures
    )


def reduce_spans(values: Numbers, count: int, *, peak: bool) -> tuple[list[int], Numbers]:
    """At most ``count`` spans of rows (N, L): where each ends, and its mean or peak (count, L).

    >>> reduce_spans(np.array([[1.0], [3.0], [5.0], [9.0]]), 2, peak=True)
    ([1, 3], array([[3.],
           [9.]]))
    """
    parts = np.array_split(np.arange(len(values)), min(count, len(values)))
    ends = [int(part[-1]) for part in parts]
    gather = np.max if peak else np.mean  # either keeps a NaN, which must be seen
    with np.errstate(invalid="ignore", over="ignore"):
        return ends, np.stack([gather(values[part], axis=0) for part in parts])


def _layer_data(run: RunData, strip: LayerChart, steps: Numbers, values: Numbers) -> dict[str, Any]:
    ends, columns = reduce_spans(values, _LAYER_COLUMNS, peak=strip.peak)
    finite = columns[np.isfinite(columns)]
    least, most = (finite.min(), finite.max()) if len(finite) else (0.0, 0.0)
    return {
        "view": "strips",
        "x": axis_values(run, steps[ends]),
        "layers": [json_numbers(layer) for layer in columns.T],
        "names": [f"layer {layer + 1}" for layer in range(values.shape[1])],
        "last": json_numbers(values[-1]),
        "least": json_numbers([least])[0],
        "most": json_numbers([most])[0],
    }


def _layer_figure(strip: LayerChart, steps: Numbers, values: Numbers) -> Html:
    head = ("step", *(f"layer {layer}" for layer in range(1, values.shape[1] + 1)))
    rows = [
        [format_number(steps[index]), *(format_number(one) for one in values[index].tolist())]
        for index in even_indices(len(steps), _LAYER_ROWS)
    ]
    told = f"{strip.title}, some of the steps; all are in metrics.jsonl"
    return picture(strip.name, strip.title, strip.caption, table(head, rows, caption=told))


_HEAD_COLUMNS = 240
_HEAD_ROWS = 30
_HEADS = 12


@dataclass(frozen=True)
class HeadChart:
    """A picture of one number a head over time."""

    name: str
    title: str
    caption: str
    column: str
    lowest: bool = False
    """Whether the heads to show are those that fell most_extreme, not those that rose."""


HEAD_CHARTS = (
    HeadChart(
        "head-max-logit",
        "Largest logit of a head",
        "The heads with the greatest score, by size; one that grows alone will diverge first.",
        "attention/head_max_logit",
    ),
    HeadChart(
        "head-rms",
        "RMS score of a head",
        "How large its scores are on the whole, over all pairs that it may see.",
        "attention/head_rms",
    ),
    HeadChart(
        "head-entropy",
        "Entropy of a head",
        "The heads whose entropy fell lowest, in nats; at 0 every query reads one key only.",
        "attention/head_entropy",
        lowest=True,
    ),
)


def heads(run: RunData) -> Section:
    """The section of all pictures for which there is at least one number."""
    pictures: dict[str, Any] = {}
    figures, missing = [], []
    for column in HEAD_CHARTS:
        steps, names, values = by_head(run, column.column)
        if not np.isfinite(values).any():
            missing.append(column.title.lower())
            continue
        shown = most_extreme(values, _HEADS, lowest=column.lowest)
        names, values = [names[i] for i in shown], values[:, shown]
        pictures[column.name] = _head_data(run, column, steps, names, values)
        figures.append(_head_figure(column, steps, names, values))
    body: list[Html] = []
    if figures:
        told = "Each row is a head, named layer.head; time runs to the right."
        body += [element("p", told, class_="about"), element("div", *figures, class_="charts")]
    if missing:
        body.append(notes([f"The metrics hold no number by head for: {', '.join(missing)}."]))
    return Section(anchor="heads", title="Scores by head", body=join(body, "\n"), pictures=pictures)


def by_head(run: RunData, key: str) -> tuple[Numbers, list[str], Numbers]:
    """A column with a list a layer: steps (N,), names of heads, values (N, heads)."""
    steps, whole = layer_series(run, key)
    names: list[str] = []
    parts: list[Numbers] = [np.empty((len(steps), 0))]
    for layer in range(whole.shape[1]):
        at, values = layer_series(run, f"{key}/{layer}")
        filled = np.full((len(steps), values.shape[1]), np.nan)
        filled[np.isin(steps, at)] = values[np.isin(at, steps)]
        names += [f"{layer + 1}.{head + 1}" for head in range(values.shape[1])]
        parts.append(filled)
    return steps, names, np.concatenate(parts, axis=1)


def most_extreme(values: Numbers, count: int, *, lowest: bool) -> list[int]:
    """At most ``count`` columns of (N, heads), the most extreme first; NaN is most extreme.

    >>> most_extreme(np.array([[1.0, 5.0, 2.0], [4.0, 3.0, 2.0]]), 2, lowest=False)
    [1, 0]
    """
    peaks = np.min(values, axis=0) if lowest else -np.max(values, axis=0)
    order = np.argsort(np.where(np.isnan(peaks), -np.inf, peaks), kind="stable")
    return [int(i) for i in order[:count]]


def _head_data(
    run: RunData, column: HeadChart, steps: Numbers, names: list[str], values: Numbers
) -> dict[str, Any]:
    ends, drawn = reduce_spans(values, _HEAD_COLUMNS, peak=not column.lowest)
    finite = drawn[np.isfinite(drawn)]
    least, most = (finite.min(), finite.max()) if len(finite) else (0.0, 0.0)
    return {
        "view": "strips",
        "x": axis_values(run, steps[ends]),
        "layers": [json_numbers(head) for head in drawn.T],
        "names": names,
        "last": json_numbers(values[-1]),
        "least": json_numbers([least])[0],
        "most": json_numbers([most])[0],
    }


def _head_figure(column: HeadChart, steps: Numbers, names: list[str], values: Numbers) -> Html:
    rows = [
        [format_number(steps[index]), *(format_number(one) for one in values[index].tolist())]
        for index in even_indices(len(steps), _HEAD_ROWS)
    ]
    told = f"{column.title}, some of the steps; all are in metrics.jsonl"
    numbers = table(("step", *names), rows, caption=told)
    return picture(column.name, column.title, column.caption, numbers)
