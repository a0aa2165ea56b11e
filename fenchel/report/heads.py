"""The scores of attention head by head, while the model learned.

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

from fenchel.report.document import Part, picture
from fenchel.report.layers import spans
from fenchel.report.markup import Html, element, join, notes, table
from fenchel.report.quantities import figure, plain
from fenchel.report.run import Run
from fenchel.report.series import Numbers, evenly, layered, places

_COLUMNS = 240
_ROWS = 30
_HEADS = 12


@dataclass(frozen=True)
class Column:
    """A picture of one number a head over time."""

    name: str
    title: str
    caption: str
    column: str
    lowest: bool = False
    """Whether the heads to show are those that fell furthest, not those that rose."""


COLUMNS = (
    Column(
        "head-max-logit",
        "Largest logit of a head",
        "The heads with the greatest score, by size; one that grows alone will diverge first.",
        "attention/head_max_logit",
    ),
    Column(
        "head-rms",
        "RMS score of a head",
        "How large its scores are on the whole, over all pairs that it may see.",
        "attention/head_rms",
    ),
    Column(
        "head-entropy",
        "Entropy of a head",
        "The heads that closed furthest, in nats; at 0 a head looks at one key only.",
        "attention/head_entropy",
        lowest=True,
    ),
)


def heads(run: Run) -> Part:
    """The section of all pictures for which there is at least one number."""
    pictures: dict[str, Any] = {}
    figures, missing = [], []
    for column in COLUMNS:
        steps, names, values = by_head(run, column.column)
        if not np.isfinite(values).any():
            missing.append(column.title.lower())
            continue
        shown = furthest(values, _HEADS, lowest=column.lowest)
        names, values = [names[i] for i in shown], values[:, shown]
        pictures[column.name] = _data(run, column, steps, names, values)
        figures.append(_figure(column, steps, names, values))
    body: list[Html] = []
    if figures:
        told = "Each row is a head, named layer.head; time runs to the right."
        body += [element("p", told, class_="about"), element("div", *figures, class_="charts")]
    if missing:
        body.append(notes([f"The metrics hold no number by head for: {', '.join(missing)}."]))
    return Part(anchor="heads", title="Scores by head", body=join(body, "\n"), pictures=pictures)


def by_head(run: Run, key: str) -> tuple[Numbers, list[str], Numbers]:
    """A column with a list a layer: steps (N,), names of heads, values (N, heads)."""
    steps, whole = layered(run, key)
    names: list[str] = []
    parts: list[Numbers] = [np.empty((len(steps), 0))]
    for layer in range(whole.shape[1]):
        at, values = layered(run, f"{key}/{layer}")
        filled = np.full((len(steps), values.shape[1]), np.nan)
        filled[np.isin(steps, at)] = values[np.isin(at, steps)]
        names += [f"{layer + 1}.{head + 1}" for head in range(values.shape[1])]
        parts.append(filled)
    return steps, names, np.concatenate(parts, axis=1)


def furthest(values: Numbers, count: int, *, lowest: bool) -> list[int]:
    """At most ``count`` columns of (N, heads), the most extreme first; NaN is most extreme.

    >>> furthest(np.array([[1.0, 5.0, 2.0], [4.0, 3.0, 2.0]]), 2, lowest=False)
    [1, 0]
    """
    peaks = np.min(values, axis=0) if lowest else -np.max(values, axis=0)
    order = np.argsort(np.where(np.isnan(peaks), -np.inf, peaks), kind="stable")
    return [int(i) for i in order[:count]]


def _data(
    run: Run, column: Column, steps: Numbers, names: list[str], values: Numbers
) -> dict[str, Any]:
    ends, drawn = spans(values, _COLUMNS, peak=not column.lowest)
    finite = drawn[np.isfinite(drawn)]
    least, most = (finite.min(), finite.max()) if len(finite) else (0.0, 0.0)
    return {
        "view": "strips",
        "x": places(run, steps[ends]),
        "layers": [plain(head) for head in drawn.T],
        "names": names,
        "last": plain(values[-1]),
        "least": plain([least])[0],
        "most": plain([most])[0],
    }


def _figure(column: Column, steps: Numbers, names: list[str], values: Numbers) -> Html:
    rows = [
        [figure(steps[index]), *(figure(one) for one in values[index].tolist())]
        for index in evenly(len(steps), _ROWS)
    ]
    told = f"{column.title}, some of the steps; all are in metrics.jsonl"
    numbers = table(("step", *names), rows, caption=told)
    return picture(column.name, column.title, column.caption, numbers)
