"""Charts over the steps of a run: curves, and strips of attention per layer and per head.

**Curves**: loss, bits per byte, perplexity, learning rate, gradient norm, speed. Every curve can be
drawn against steps, tokens or time. A value that is not finite leaves a gap, and the caption names
its steps.

**Strips of colour** show statistics of attention. With p the weights of a query over its keys and z
the scores that enter the choice map,

    entropy          H(p) = - sum_k p_k log p_k, in nats: 0 if a query attends to one key only
    effective keys   exp H(p), the number of keys with equal weights of the same entropy
    support          the number of keys with p_k > 0: all admissible ones under softmax
    largest logit    max |z_k|, which grows without bound before a run diverges
    RMS score        root mean square of z over the admissible pairs

Entropy, effective keys and support are means over queries; those of a layer are also means over its
heads. Every number comes from metrics.jsonl; here steps are only gathered into spans that are wide
enough to draw. A model may have hundreds of heads, so the charts of heads show those with the most
extreme values (highest score, lowest entropy) at any step, the same ones in the same order.

Colour scales begin at 0. Those of entropy and effective keys end at the values of uniform causal
attention over T keys, log(T!) / T and (T + 1) / 2, the others at the largest value.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
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
from fenchel.report.run_data import (
    Numbers,
    RunData,
    Series,
    axis_values,
    baselines,
    chart_series,
    evaluated_part,
    even_indices,
    layer_series,
    mapping,
    number,
    series,
    table_rows,
)

_COLUMNS = 240
_TABLE_ROWS = 30
_HEADS = 12
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


@dataclass(frozen=True)
class StripChart:
    """A chart of one strip per layer or head over the steps of a run."""

    name: str
    title: str
    caption: str
    column: str
    peak: bool = False
    """Whether a span of steps shows its maximum instead of its mean."""
    lowest: bool = False
    """Whether the lowest values of heads are the extreme ones."""
    uniform: Callable[[int], float] | None = None
    """Its value for uniform attention by the number of tokens, the end of its colour scale."""


def _uniform_entropy(tokens: int) -> float:
    return math.lgamma(tokens + 1) / tokens


LAYER_CHARTS = (
    StripChart(
        "entropy",
        "Entropy",
        "In nats; 0 if every query attends to one token only.",
        "attention/entropy",
        uniform=_uniform_entropy,
    ),
    StripChart(
        "effective",
        "Effective tokens, mean of exp(entropy)",
        "How many tokens a query attends to, as if evenly: exp of the entropy of each query, then "
        "the mean, which is more than exp of the mean entropy.",
        "attention/effective",
        uniform=lambda tokens: (tokens + 1) / 2,
    ),
    StripChart(
        "max-logit",
        "Largest logit",
        "The largest absolute score before the choice map; unbounded growth is a warning.",
        "attention/max_logit",
        peak=True,
    ),
    StripChart(
        "support",
        "Support",
        "Keys with a positive weight, few under a sparse map.",
        "attention/support",
    ),
)

HEAD_CHARTS = (
    StripChart(
        "head-max-logit",
        "Largest logit per head",
        "The largest absolute score; a head whose scores grow alone diverges first.",
        "attention/head_max_logit",
        peak=True,
    ),
    StripChart(
        "head-rms",
        "RMS score per head",
        "Root mean square of the scores over all admissible pairs.",
        "attention/head_rms",
        peak=True,
    ),
    StripChart(
        "head-entropy",
        "Entropy per head",
        "In nats; at 0 every query attends to one key only.",
        "attention/head_entropy",
        lowest=True,
        uniform=_uniform_entropy,
    ),
)


def layers(run: RunData) -> Section:
    """The section of the charts per layer that have at least one number."""
    charts = []
    for chart in LAYER_CHARTS:
        steps, values = layer_series(run, chart.column)
        if chart.name == "support" and values.size and np.ptp(values) == 0:
            continue  # all admissible keys, as under softmax
        names = [f"layer {layer + 1}" for layer in range(values.shape[1])]
        charts.append((chart, steps, names, values))
    about = (
        "One row per layer, time to the right, the last value at the end of the row. Colours begin "
        "at 0; those of entropy and effective tokens end at uniform attention."
    )
    return _strips(run, charts, anchor="health", title="Attention over training", about=about)


def heads(run: RunData) -> Section:
    """The section of the charts per head that have at least one number."""
    found = [(chart, *head_series(run, chart.column)) for chart in HEAD_CHARTS]
    ranks = [
        [names[i] for i in most_extreme(values, _HEADS, lowest=chart.lowest)]
        for chart, _, names, values in found
    ]
    ranked = dict.fromkeys(name for rank in zip_longest(*ranks) for name in rank)
    chosen = list(filter(None, ranked))[:_HEADS]
    charts = []
    for chart, steps, names, values in found:
        shown = [i for i, name in enumerate(names) if name in chosen]
        charts.append((chart, steps, [names[i] for i in shown], values[:, shown]))
    most = max((len(names) for _, _, names, _ in found), default=0)
    which = (
        f"the {len(chosen)} of {most} with the largest scores or the lowest entropy"
        if most > len(chosen)
        else "all of them"
    )
    about = (
        f"One row per head, {which}, the same in every chart: L2 H1 is head 1 of layer 2. Time to "
        "the right."
    )
    return _strips(run, charts, anchor="heads", title="Scores by head", about=about)


def head_series(run: RunData, key: str) -> tuple[Numbers, list[str], Numbers]:
    """A column with one list per layer: steps (N,), names of the heads, values (N, heads)."""
    steps, per_layer = layer_series(run, key)
    names: list[str] = []
    parts: list[Numbers] = [np.empty((len(steps), 0))]
    for layer in range(per_layer.shape[1]):
        own_steps, values = layer_series(run, f"{key}/{layer}")
        part = np.full((len(steps), values.shape[1]), np.nan)
        part[np.isin(steps, own_steps)] = values[np.isin(own_steps, steps)]
        names += [f"L{layer + 1} H{head + 1}" for head in range(values.shape[1])]
        parts.append(part)
    return steps, names, np.concatenate(parts, axis=1)


def most_extreme(values: Numbers, count: int, *, lowest: bool) -> list[int]:
    """At most ``count`` columns of (N, heads), the most extreme first; NaN is most extreme.

    >>> most_extreme(np.array([[1.0, 5.0, 2.0], [4.0, 3.0, 2.0]]), 2, lowest=False)
    [1, 0]
    """
    if not len(values):
        return []
    peaks = np.min(values, axis=0) if lowest else -np.max(values, axis=0)
    order = np.argsort(np.where(np.isnan(peaks), -np.inf, peaks), kind="stable")
    return [int(i) for i in order[:count]]


def reduce_spans(values: Numbers, count: int, *, peak: bool) -> tuple[list[int], Numbers]:
    """At most ``count`` spans of rows (N, L): the last index and the mean or peak (L,) of each.

    >>> reduce_spans(np.array([[1.0], [3.0], [5.0], [9.0]]), 2, peak=True)
    ([1, 3], array([[3.],
           [9.]]))
    """
    parts = np.array_split(np.arange(len(values)), min(count, len(values)))
    ends = [int(part[-1]) for part in parts]
    reduce = np.max if peak else np.mean  # both keep a NaN, which must stay visible
    with np.errstate(invalid="ignore", over="ignore"):
        return ends, np.stack([reduce(values[part], axis=0) for part in parts])


def _strips(
    run: RunData,
    charts: Sequence[tuple[StripChart, Numbers, list[str], Numbers]],
    *,
    anchor: str,
    title: str,
    about: str,
) -> Section:
    pictures: dict[str, Any] = {}
    figures, missing = [], []
    for chart, steps, names, values in charts:
        if not np.isfinite(values).any():
            missing.append(chart.title)
            continue
        pictures[chart.name] = _strip_data(run, chart, steps, names, values)
        figures.append(_strip_figure(chart, steps, names, values))
    body: list[Html] = []
    if figures:
        body += [element("p", about, class_="about"), element("div", *figures, class_="charts")]
    if missing:
        body.append(notes([f"The metrics contain no values for: {', '.join(missing)}."]))
    return Section(anchor=anchor, title=title, body=join(body, "\n"), pictures=pictures)


def _strip_data(
    run: RunData, chart: StripChart, steps: Numbers, names: list[str], values: Numbers
) -> dict[str, Any]:
    """What ``strips`` of charts.js takes."""
    ends, columns = reduce_spans(values, _COLUMNS, peak=chart.peak)
    most = max(columns[np.isfinite(columns)], default=0.0)
    if chart.uniform is not None and (tokens := _row_length(run)):
        most = max(most, chart.uniform(tokens))
    return {
        "view": "strips",
        "x": axis_values(run, steps[ends]),
        "layers": [json_numbers(strip) for strip in columns.T],
        "names": names,
        "last": json_numbers(values[-1]),
        "least": 0,
        "most": json_numbers([most])[0],
    }


def _row_length(run: RunData) -> int:
    """Tokens per row of a batch; 0 if the settings do not say."""
    for section in ("tune", "model"):
        tokens = number(mapping(run.config.get(section)).get("context"))
        if tokens is not None and 1 <= tokens < 2**31:
            return int(tokens)
    return 0


def _strip_figure(chart: StripChart, steps: Numbers, names: list[str], values: Numbers) -> Html:
    rows = [
        [format_number(steps[index]), *(format_number(value) for value in values[index].tolist())]
        for index in even_indices(len(steps), _TABLE_ROWS)
    ]
    caption = f"{chart.title} at some of the steps; metrics.jsonl has all of them"
    numbers = table(("step", *names), rows, caption=caption)
    return picture(chart.name, chart.title, chart.caption, numbers)
