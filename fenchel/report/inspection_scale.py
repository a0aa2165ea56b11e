"""Whether a number of an inspection is usual: ranges of healthy models, and what to do outside.

The ranges are measured, not derived: two runs of earlier default settings (1.3 million parameters,
394 and 350 steps on the built-in text), before their first step and at their end, on 128 tokens
(benchmarks/inspection_scale.py, results in benchmarks/results/inspection_scale_cpu.json). Larger
models differ. A value outside both ranges is a reason to look closer and not yet a fault.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from fenchel.inspection_result import Head, Inspection
from fenchel.report.html import (
    Section,
    element,
    format_number,
    join,
    join_words,
    notes,
    scrolled,
    table,
)
from fenchel.report.measures import head_measure, head_name

Labelled = list[tuple[str, float]]
"""Values with the head, the layer or the network they belong to."""

_NAMED = 6  # heads or layers that a remark names
_MARGIN = 1.5  # a value this many times beyond the ranges is worth a remark
_TOKENS = 16


@dataclass(frozen=True, kw_only=True)
class Scale:
    """One measure, its ranges in healthy models, and advice beyond them."""

    name: str
    about: str
    of: Callable[[Inspection], Labelled]
    fresh: tuple[float, float]
    """Least and greatest value before the first step."""
    trained: tuple[float, float]
    """Least and greatest value after training."""
    low: str = ""
    """What a value below both ranges means; "" where it means nothing."""
    high: str = ""
    """The same above both ranges."""
    training: str = ""
    """What to change in a run that trains again, above both ranges where ``high`` is given, else
    below; of no use to the holder of a checkpoint."""
    largest_usual: float = 0.0
    """No remark is made of a value below this one."""

    @property
    def usual(self) -> str:
        """The range after training, as text."""
        return _range(self.trained)


def _finite(values: Labelled) -> Labelled:
    return [(label, value) for label, value in values if math.isfinite(value)]


def _per_head(of: Callable[[Head], float]) -> Callable[[Inspection], Labelled]:
    return lambda result: _finite([(head_name(head), of(head)) for head in result.heads])


def _entropy_share(result: Inspection) -> Labelled:
    """Mean entropy per head, divided by that of uniform attention."""
    n = len(result.tokens)
    causal = result.subject.get("causal", True)
    even = math.lgamma(n + 1) / n if causal else math.log(n)  # mean of log i, i = 1..n
    if n < 2:
        return []
    return [
        (name, value / even) for name, value in _per_head(head_measure("entropy").number)(result)
    ]


def _first_token(result: Inspection) -> Labelled:
    """None for a text of a few tokens, on which even attention weighs the first one much."""
    return (
        _per_head(head_measure("on the first").number)(result)
        if len(result.tokens) >= _TOKENS
        else []
    )


def _blocks(result: Inspection) -> Labelled:
    return _finite([(f"layer {layer.layer}", layer.block.lower) for layer in result.layers])


def _exponent(result: Inspection) -> Labelled:
    return _finite([("the network", result.network.exponent)] if result.network else [])


SCALES = (
    Scale(
        name="entropy share",
        about="Mean entropy per head over that of uniform attention: 0 is one key, 1 is uniform.",
        of=_entropy_share,
        fresh=(0.886, 0.904),
        trained=(0.271, 1.0),
        low="Each query attends to hardly more than one key, so the scores have almost no gradient "
        "and the head can hardly be trained further.",
        training="Early in training, lower the rate of queries and keys, or set "
        "train.entropy_floor or model.qk_norm.",
    ),
    Scale(
        name="largest logit",
        about="Largest absolute score per head, before the choice map.",
        of=_per_head(head_measure("largest logit").number),
        fresh=(3.41, 4.83),
        trained=(0.217, 20.0),
        high="Scores of this size saturate the choice map, and scores that keep growing come "
        "before divergence.",
        training="train.qk_clip, model.qk_norm, model.softcap and optim.optimiser=trust bound "
        "them.",
    ),
    Scale(
        name="weight on the first token",
        about="Mean weight on the first token, per head.",
        of=_first_token,
        fresh=(0.0362, 0.0478),
        trained=(0.0193, 0.0538),
        largest_usual=0.3,
        high="An attention sink: the head puts its weight on the first token where no other is "
        "relevant. Most large checkpoints have such heads, and the loss is no worse for it; the "
        "key of that token should keep its precision.",
        training="model.sinks trains a sink that is no token.",
    ),
    Scale(
        name="sigma of a head",
        about="Largest factor by which a head magnifies a change of its queries, keys and values.",
        of=_per_head(head_measure("sigma all").number),
        fresh=(4.37, 5.79),
        trained=(1.63, 14.4),
        high="Small changes of the input change the output of the head many times over. Where it "
        "is dominated by queries or keys, its scores are too sharp (see the largest logit); where "
        "by mixing, many queries read one token (see the column sum).",
    ),
    Scale(
        name="sigma of a block",
        about="Largest factor by which a block magnifies a change of the stream.",
        of=_blocks,
        fresh=(1.0, 1.0),
        trained=(4.78, 89.3),
        high="In the first layer this is mostly the norm in front of a small embedding (1/s in the "
        "table of norms); elsewhere --branches shows which branch magnifies.",
    ),
    Scale(
        name="Lyapunov exponent",
        about="log of the network's gain per layer: above 0 changes grow with depth.",
        of=_exponent,
        fresh=(0.0, 0.0),
        trained=(1.35, 1.35),
        high="Changes, and gradients with them, grow by a constant factor per layer.",
        training='model.residual_scale="depth" and model.initial="zero" keep a deep model near 0 '
        "at its start.",
        low="Changes die out with depth, so that late layers hardly depend on early ones.",
    ),
)
"""The measures that have a scale."""


def scale(name: str) -> Scale:
    """The scale of a measure by its name."""
    return next(one for one in SCALES if one.name == name)


def meaning(result: Inspection) -> Section:
    """The section that sets the numbers of an inspection beside those of healthy models."""
    rows, remarks = [], []
    family = str(result.subject["family"])  # "fenchel, softmax" of a run, "llama" of a checkpoint
    for one in SCALES:
        values = one.of(result)
        if not values:
            continue
        ends = min(v for _, v in values), max(v for _, v in values)
        rows.append((one.name, _range(ends), _range(one.fresh), one.usual, one.about))
        remarks += _remarks(one, values, trainable=family.startswith("fenchel"))
    if not remarks:
        remarks = ["No measure lies far outside the ranges of the healthy models."]
    about = (
        "Is a number high? The last columns are ranges of healthy models: two runs of a small "
        "decoder (1.3 million parameters, about 370 steps), before their first step and at their "
        "end, on 128 tokens. Larger models differ: a value outside is a reason to look closer and "
        "not yet a fault."
    )
    head = ("measure", "this model", "before training", "trained", "meaning")
    scales = table(head, rows, caption="Least to greatest value", numeric=False)
    body = [
        element("p", about, class_="about"),
        notes(remarks),
        scrolled(scales, "Healthy ranges"),
    ]
    return Section(anchor="meaning", title="What the numbers mean", body=join(body, "\n"))


def _remarks(one: Scale, values: Sequence[tuple[str, float]], *, trainable: bool) -> list[str]:
    least = min(one.fresh[0], one.trained[0])
    most = max(one.fresh[1], one.trained[1])
    least -= (_MARGIN - 1.0) * abs(least)
    most = max(most + (_MARGIN - 1.0) * abs(most), one.largest_usual)
    below = [(n, v) for n, v in values if v < least]
    above = [(n, v) for n, v in values if v > most]
    sentences = []
    for beyond, advice, word, end in (
        (sorted(below, key=lambda pair: pair[1]), one.low, "below", least),
        (sorted(above, key=lambda pair: -pair[1]), one.high, "above", most),
    ):
        if beyond and advice:
            names = [f"{name} ({format_number(value, 3)})" for name, value in beyond[:_NAMED]]
            more = len(beyond) - _NAMED
            names += [f"{more} more"] if more > 0 else []
            sentences.append(
                f"{one.name[0].upper()}{one.name[1:]}: {join_words(names)}, {word} "
                f"{format_number(end, 3)}. {advice}"
                + (f" {one.training}" if trainable and advice == (one.high or one.low) else "")
            )
    return sentences


def _range(ends: tuple[float, float]) -> str:
    low, high = (format_number(end, 3) for end in ends)
    return low if low == high else f"{low} to {high}"
