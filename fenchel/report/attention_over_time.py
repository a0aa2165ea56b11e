"""Statistics of attention over training, per layer and per head, as strips of colour.

With p the weights of a query over its keys and z the scores that enter the choice map,

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
from collections.abc import Callable, Sequence
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
    axis_values,
    even_indices,
    layer_series,
    mapping,
    number,
)

_COLUMNS = 240
_TABLE_ROWS = 30
_HEADS = 12


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
    return _section(run, charts, anchor="health", title="Attention over training", about=about)


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
    return _section(run, charts, anchor="heads", title="Scores by head", about=about)


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


def _section(
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
        pictures[chart.name] = _data(run, chart, steps, names, values)
        figures.append(_figure(chart, steps, names, values))
    body: list[Html] = []
    if figures:
        body += [element("p", about, class_="about"), element("div", *figures, class_="charts")]
    if missing:
        body.append(notes([f"The metrics contain no values for: {', '.join(missing)}."]))
    return Section(anchor=anchor, title=title, body=join(body, "\n"), pictures=pictures)


def _data(
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


def _figure(chart: StripChart, steps: Numbers, names: list[str], values: Numbers) -> Html:
    rows = [
        [format_number(steps[index]), *(format_number(value) for value in values[index].tolist())]
        for index in even_indices(len(steps), _TABLE_ROWS)
    ]
    caption = f"{chart.title} at some of the steps; metrics.jsonl has all of them"
    numbers = table(("step", *names), rows, caption=caption)
    return picture(chart.name, chart.title, chart.caption, numbers)
