"""The section of a run that tunes a checkpoint: held-out text and attention before and after."""

from collections.abc import Mapping, Sequence
from typing import Any

from fenchel.inspection_result import Interval
from fenchel.report.html import (
    Html,
    Section,
    clean,
    details,
    element,
    format_number,
    join,
    shorten,
    table,
)
from fenchel.report.measures import format_value
from fenchel.report.run_data import RunData, mapping, number

_LAYERS, _LAWS = 256, 64
_ROWS = (
    ("loss", "loss, nats per token"),
    ("perplexity", "perplexity, per token"),
    ("bits_per_byte", "bits per byte"),
    ("accuracy", "accuracy of the most probable token"),
    ("confidence", "its mean probability"),
    ("ece", "calibration error (ECE)"),
    ("brier", "Brier score"),
)
_LAYER_ROWS = (
    ("entropy", "entropy, nats"),
    ("effective", "keys in use"),
    ("max_logit", "largest score"),
)


def before_and_after(run: RunData) -> Section | None:
    """The measures of the checkpoint and of the tuned model; None where nothing was tuned."""
    tuning = mapping(run.summary.get("tuning"))
    before, after = (mapping(tuning.get(name)) for name in ("before", "after"))
    if not before or not after:
        return None
    rows = [
        (name, *(format_number(x) for x in pair), _change(pair))
        for key, name in _ROWS
        if None not in (pair := _pair(before, after, key))
    ]
    rows += _attention_rows(before, after)
    answers = run.summary.get("text")
    of = "answers" if mapping(answers).get("validation_answer_bytes") is not None else "text"
    about = (
        f"Held-out {of} before the first step and after the last. Attention is measured on the "
        "first tokens of its longest document: entropy and keys are means over layers, the score "
        "and the sensitivity those of the layer with the largest. The sensitivity is the spectral "
        "norm of attention in its queries, keys and values, between a bound that is attained and "
        "one that is exceeded with probability 1e-6."
    )
    body = [
        element("p", about, class_="about"),
        table(("", "before", "after", "change"), rows, caption="Held-out text and attention"),
        *_laws(tuning),
        details("Layer by layer", _layers(before, after)),
    ]
    return Section(anchor="tuning", title="Before and after", body=join(body, "\n"))


def _laws(tuning: Mapping[str, Any]) -> list[Html]:
    """The budget and what was measured, and the laws that changed most, side by side."""
    kl = mapping(tuning.get("kl"))
    budget, measured = number(kl.get("budget")), number(kl.get("measured"))
    if budget is None or measured is None:
        return []
    sentence = (
        f"The mean KL from the checkpoint is {format_number(measured)} nats per token of the "
        f"held-out text, measured; the budget is {format_number(budget)}. On other text it may be "
        "more."
    )
    listed = tuning.get("laws")
    laws = [mapping(law) for law in listed[:_LAWS]] if isinstance(listed, list) else []
    rows = [
        (
            repr(clean(str(law.get("target")))),
            format_number(number(law.get("kl")) or 0.0),
            *(_likeliest(law.get(when)) for when in ("before", "after")),
        )
        for law in laws
    ]
    caption = "Where the law of the next token changed most"
    return [
        element("p", sentence, class_="about"),
        table(("followed by", "KL, nats", "before", "after"), rows, caption=caption),
    ]


def _likeliest(pairs: Any) -> str:
    """
    >>> _likeliest([[" of", 0.5], [" the", 0.25]])
    "' of' 50%, ' the' 25%"
    """
    if not isinstance(pairs, list):
        return ""
    texts = []
    for pair in pairs[:3]:
        if isinstance(pair, list | tuple) and len(pair) == 2:
            texts.append(f"{shorten(clean(str(pair[0])), 20)!r} {number(pair[1]) or 0.0:.0%}")
    return ", ".join(texts)


Pair = tuple[float | None, float | None]


def _pair(before: Mapping[str, Any], after: Mapping[str, Any], key: str) -> Pair:
    return number(before.get(key)), number(after.get(key))


def _change(pair: Pair) -> str:
    """
    >>> _change((2.0, 1.5)), _change((1.0, 1.25))
    ('-0.5000', '+0.2500')
    """
    if pair[0] is None or pair[1] is None:
        return ""
    difference = pair[1] - pair[0]
    return f"{'+' if difference > 0 else ''}{format_number(difference)}"


def _attention_rows(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[tuple[str, ...]]:
    rows = []
    for key, name in _LAYER_ROWS:
        columns = [_numbers(mapping(one.get("attention")).get(key)) for one in (before, after)]
        if all(columns):
            merged = [max(c) if key == "max_logit" else sum(c) / len(c) for c in columns]
            pair = (merged[0], merged[1])
            shown = (format_number(x) for x in pair)
            rows.append((f"attention: {name}", *shown, _change(pair)))
    ends = [_intervals(one.get("sensitivity")) for one in (before, after)]
    if all(ends):
        largest = [max(layers, key=lambda interval: interval[0]) for layers in ends]
        change = _change((largest[0][0], largest[1][0]))
        rows.append(("attention: sensitivity", *map(_interval, largest), change))
    return rows


def _layers(before: Mapping[str, Any], after: Mapping[str, Any]) -> Any:
    names, columns = ["layer"], []
    for key, name in _LAYER_ROWS:
        for when, one in (("before", before), ("after", after)):
            names.append(f"{name}, {when}")
            found = _numbers(mapping(one.get("attention")).get(key))
            columns.append([format_number(x) for x in found])
    for when, one in (("before", before), ("after", after)):
        names.append(f"sensitivity, {when}")
        columns.append([_interval(x) for x in _intervals(one.get("sensitivity"))])
    count = min(_LAYERS, max(map(len, columns), default=0))
    rows = [
        (str(n + 1), *(column[n] if n < len(column) else "" for column in columns))
        for n in range(count)
    ]
    return table(names, rows, caption="Attention layer by layer")


def _numbers(values: Any) -> list[float]:
    if not isinstance(values, list):
        return []
    return [x for value in values[:_LAYERS] if (x := number(value)) is not None]


def _intervals(values: Any) -> list[tuple[float, float]]:
    if not isinstance(values, list):
        return []
    pairs = (_numbers(value) for value in values[:_LAYERS])
    return [(pair[0], pair[1]) for pair in pairs if len(pair) == 2]


def _interval(ends: Sequence[float]) -> str:
    """
    >>> _interval((1.0, 1.2501))
    '1 to 1.26'
    """
    return format_value(Interval(ends[0], ends[1], 0))
