"""The health of attention, layer by layer, while the model learned.

With p the weights of a query over its keys and z the scores,

    entropy    H(p) = - sum_k p_k log p_k      in nats
    effective  exp H(p)                        the number of tokens it amounts to
    support    how many keys have p_k > 0      all that are open, under softmax
    max logit  the largest |z_k|               grows without end before a run diverges

The first three are means over queries, heads and the batch; the run wrote them, nothing is
computed here but what a narrow picture needs.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from fenchel.report.document import Part, picture
from fenchel.report.markup import Html, element, join, notes, table
from fenchel.report.quantities import figure, plain
from fenchel.report.run import Run
from fenchel.report.series import Numbers, evenly, layered, places

_COLUMNS = 240
_ROWS = 30


@dataclass(frozen=True)
class Strip:
    """A picture of one number a layer over time."""

    name: str
    title: str
    caption: str
    column: str
    peak: bool = False
    """Whether a span too narrow to draw is shown by its largest value, not by its mean."""


STRIPS = (
    Strip(
        "entropy",
        "Entropy",
        "In nats: 0 when every query looks at one token only.",
        "attention/entropy",
    ),
    Strip(
        "effective",
        "Effective tokens",
        "How many tokens a query looks at, counted through its entropy.",
        "attention/effective",
    ),
    Strip(
        "max-logit",
        "Largest logit",
        "The greatest score, by size, that enters the choice; growth without end is a warning.",
        "attention/max_logit",
        peak=True,
    ),
    Strip(
        "support",
        "Support",
        "How many keys get any weight: all in sight under softmax, few under a sparse map.",
        "attention/support",
    ),
)


def layers(run: Run) -> Part:
    """The section of all strips for which there is at least one number."""
    pictures: dict[str, Any] = {}
    figures, missing = [], []
    for strip in STRIPS:
        steps, values = layered(run, strip.column)
        if not np.isfinite(values).any():
            missing.append(strip.title.lower())
            continue
        pictures[strip.name] = _data(run, strip, steps, values)
        figures.append(_figure(strip, steps, values))
    body: list[Html] = []
    if figures:
        told = "Each row is a layer, time runs to the right, the number at the end is the last one."
        body += [element("p", told, class_="about"), element("div", *figures, class_="charts")]
    if missing:
        body.append(notes([f"The metrics hold no number by layer for: {', '.join(missing)}."]))
    return Part(
        anchor="health", title="Attention over training", body=join(body, "\n"), pictures=pictures
    )


def spans(values: Numbers, count: int, *, peak: bool) -> tuple[list[int], Numbers]:
    """At most ``count`` spans of rows (N, L): where each ends, and its mean or peak (count, L).

    >>> spans(np.array([[1.0], [3.0], [5.0], [9.0]]), 2, peak=True)
    ([1, 3], array([[3.],
           [9.]]))
    """
    parts = np.array_split(np.arange(len(values)), min(count, len(values)))
    ends = [int(part[-1]) for part in parts]
    gather = np.max if peak else np.mean  # either keeps a NaN, which must be seen
    with np.errstate(invalid="ignore", over="ignore"):
        return ends, np.stack([gather(values[part], axis=0) for part in parts])


def _data(run: Run, strip: Strip, steps: Numbers, values: Numbers) -> dict[str, Any]:
    ends, columns = spans(values, _COLUMNS, peak=strip.peak)
    finite = columns[np.isfinite(columns)]
    least, most = (finite.min(), finite.max()) if len(finite) else (0.0, 0.0)
    return {
        "view": "strips",
        "x": places(run, steps[ends]),
        "layers": [plain(layer) for layer in columns.T],
        "names": [f"layer {layer + 1}" for layer in range(values.shape[1])],
        "last": plain(values[-1]),
        "least": plain([least])[0],
        "most": plain([most])[0],
    }


def _figure(strip: Strip, steps: Numbers, values: Numbers) -> Html:
    head = ("step", *(f"layer {layer}" for layer in range(1, values.shape[1] + 1)))
    rows = [
        [figure(steps[index]), *(figure(one) for one in values[index].tolist())]
        for index in evenly(len(steps), _ROWS)
    ]
    told = f"{strip.title}, some of the steps; all are in metrics.jsonl"
    return picture(strip.name, strip.title, strip.caption, table(head, rows, caption=told))
