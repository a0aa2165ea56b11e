"""The first thing a reader wants: did it end well, and is it any good?

Good is measured in bits per byte of text the model has not seen, because that number does not
depend on the vocabulary, beside two compressors anybody can run on the same text.
"""

import re
from collections.abc import Mapping
from typing import Any

from fenchel.report.document import Part, picture
from fenchel.report.markup import Html, element, join, notes, shorten, table
from fenchel.report.quantities import amount, duration, figure, spoken
from fenchel.report.run import Run, mapping, number

STATUSES = {
    "finished": ("✓", "Finished"),
    "running": ("…", "Running"),
    "interrupted": ("‖", "Interrupted"),
    "diverged": ("✗", "Diverged"),
}
_UNKNOWN = ("?", "End unknown")
_COMPRESSORS = {"bzip2": "bzip2 -9", "gzip": "gzip -9", "xz": "xz -9"}
_BASELINES = 12


def header(run: Run) -> Html:
    """The head of the page: name, status, one sentence, what could not be read."""
    kind = str(run.summary.get("status"))
    kind = kind if kind in STATUSES else "unknown"
    sign, word = STATUSES.get(kind, _UNKNOWN)
    reason = run.summary.get("reason")
    return join(
        (
            element("p", element("span", "fenchel", class_="mark"), " training report", class_="over"),
            element("h1", shorten(run.name, 200)),
            element(
                "p",
                element("span", element("span", sign, aria_hidden="true"), f" {word}", class_=f"status {kind}"),
                f" {_sentence(run)}",
                class_="lead",
            ),
            element("p", shorten(reason, 2000), class_="reason") if _said(reason) else None,
        ),
        "\n",
    )


def headline(run: Run) -> Part:
    """Validation bits per byte beside the baselines, and the run in numbers."""
    measured, where = _validation(run)
    bits = measured.get("bits_per_byte")
    others = rivals(run.summary)
    bars = [{"name": "this model", "value": bits, "ours": True}] if bits is not None else []
    bars += [{"name": name, "value": value} for name, value in others]
    body: list[Html | None] = [notes(run.troubles.get("summary.json", ()))]
    if bits is None:
        body.append(notes(["No evaluation was written: the model's bits per byte are not known."]))
    else:
        told = f"bits per byte of unseen text{where}"
        body.append(element("p", element("strong", figure(bits)), told, class_="hero"))
    if bars:
        rows = [(bar["name"], figure(number(bar["value"]))) for bar in bars]
        body.append(
            picture(
                "baselines",
                "Beside other coders of the same text",
                f"Bits per byte, lower is better. {_comparison(bits, others)}",
                [table(("coder", "bits per byte"), rows, caption="Bits per byte")],
            )
        )
    body.append(_numbers(run, measured))
    whole = element("div", *body, class_="result")
    pictures = {"baselines": {"view": "bars", "bars": bars}} if bars else {}
    return Part(anchor="result", title="Result", body=whole, pictures=pictures)


def baseline_name(key: str) -> str:
    """What a baseline of the summary is called on the page.

    >>> baseline_name("ngram5"), baseline_name("bzip2"), baseline_name("other")
    ('5-gram', 'bzip2 -9', 'other')
    """
    if match := re.fullmatch(r"ngram(\d{1,2})", key):
        return f"{match[1]}-gram"
    return _COMPRESSORS.get(key, shorten(key, 40))


def rivals(summary: Mapping[str, Any]) -> list[tuple[str, float]]:
    """(name, bits per byte) of every baseline that has a finite number."""
    found = []
    for key, value in list(mapping(summary.get("baselines")).items())[:_BASELINES]:
        one = number(value)
        if one is not None and abs(one) < 1e6:
            found.append((baseline_name(str(key)), one))
    return found


def _sentence(run: Run) -> str:
    summary, status = run.summary, run.summary.get("status")
    step, steps = number(summary.get("step")), number(summary.get("steps"))
    step = step if step is not None else run.last_step
    where = "before the first step" if step is None else f"at step {figure(step)}"
    if steps is not None and step is not None:
        where += f" of {figure(steps)}"
    went = []
    if (parameters := number(summary.get("parameters"))) is not None:
        went.append(f"{amount(parameters)} parameters")
    if (tokens := number(summary.get("tokens"))) is not None:
        went.append(f"{amount(tokens)} tokens of training")
    if (seconds := number(summary.get("seconds"))) is not None:
        went.append(duration(seconds))
    opening = f"{where}, not ended when this page was written" if status == "running" else where
    return f"{opening}. {', '.join(went)}{'.' if went else ''}"


def _validation(run: Run) -> tuple[Mapping[str, float], str]:
    """The evaluation that the summary vouches for, else the last one in the metrics."""
    names = ("loss", "perplexity", "bits_per_byte")
    stated = mapping(run.summary.get("validation"))
    found = {name: one for name in names if (one := _finite(stated.get(name))) is not None}
    if found:
        return found, ""
    for row in reversed(run.rows):
        found = {name: one for name in names if (one := _finite(row.get(f"validation/{name}"))) is not None}
        if found:
            return found, f", at the last evaluation, step {figure(number(row['step']))}"
    return {}, ""


def _comparison(bits: float | None, others: list[tuple[str, float]]) -> str:
    if bits is None:
        return ""
    below = [f"{name} ({figure(value)})" for name, value in others if bits < value]
    above = [f"{name} ({figure(value)})" for name, value in others if bits >= value]
    said = [f"{word} {spoken(some)}" for word, some in (("below", below), ("not below", above)) if some]
    return f"The model needs {figure(bits)}{', ' if said else ''}{', '.join(said)}."


def _numbers(run: Run, measured: Mapping[str, float]) -> Html:
    summary = run.summary
    entries = [
        ("Perplexity", figure(measured.get("perplexity")), "of a token"),
        ("Loss", figure(measured.get("loss")), "nats a token"),
        ("Best step", figure(number(summary.get("best_step"))), "by validation loss"),
        ("Skipped steps", _last(run, "train/skipped"), "loss or gradient not finite"),
        ("Speed", _last(run, "time/tokens_per_second"), "tokens a second, last"),
    ]
    shown = [entry for entry in entries if entry[1]]
    return element(
        "dl",
        *(
            element("div", element("dt", name), element("dd", value, element("small", unit)))
            for name, value, unit in shown
        )
    )


def _last(run: Run, key: str) -> str:
    for row in reversed(run.rows):
        if (value := number(row.get(key))) is not None:
            return figure(round(value) if abs(value) >= 1000 and abs(value) < 1e15 else value)
    return ""


def _finite(value: Any) -> float | None:
    one = number(value)
    return one if one is not None and abs(one) < float("inf") else None


def _said(reason: Any) -> bool:
    return isinstance(reason, str) and bool(reason.strip())
