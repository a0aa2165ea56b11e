"""Runs side by side: a table of results, the settings that differ, and overlaid curves.

    run directories -> RunData of each -> Comparison -> table, JSON or page

Bits per byte of the validation text are comparable between runs on one text, whatever their
tokenizers; loss and perplexity only between runs with one tokenizer as well. ``Comparison.notes``
says where that fails.
"""

import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fenchel.report.curves import CHARTS, Chart, axis_choice, line_chart
from fenchel.report.html import (
    Section,
    amount,
    clean,
    document,
    duration,
    element,
    flatten,
    format_number,
    join,
    join_words,
    notes,
    page_header,
    picture,
    pluralise,
    scrolled,
    shorten,
    table,
)
from fenchel.report.run_data import (
    RunData,
    Series,
    evaluated_part,
    layer_series,
    mapping,
    number,
    read_run,
    series,
    table_rows,
    validation,
)

TONES = 8
"""Colours of colours.css; a ninth run has the colour of the first."""
_NAME, _BAR = 60, 18  # characters; half of a phone holds a name beside a bar
_DERIVED = ("train.threads", "format", "text.prepared")  # of the machine, not of the experiment


@dataclass(frozen=True)
class Column:
    """A column of the table of results."""

    key: str
    title: str
    text: Callable[[float], str] = format_number

    def cell(self, result: Mapping[str, float]) -> str:
        """The number of a run as text; empty where the run has none."""
        return self.text(result[self.key]) if self.key in result else ""


COLUMNS = (  # the result first: a phone shows three of them
    Column("bits_per_byte", "bits/byte"),
    Column("loss", "loss"),
    Column("steps", "steps"),
    Column("tokens", "tokens", amount),
    Column("seconds", "time", duration),
    Column("entropy", "entropy"),
    Column("parameters", "parameters", amount),
)


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Several runs and what distinguishes them."""

    names: tuple[str, ...]
    """One name per run, all different."""
    runs: tuple[RunData, ...]
    results: tuple[Mapping[str, float], ...]
    """Per run the numbers of ``COLUMNS`` that it has."""
    settings: Mapping[str, tuple[str, ...]]
    """The settings that differ: dotted name to one value per run, "" where it is left out."""
    notes: tuple[str, ...]
    """What cannot be compared, and what is missing."""

    def plain(self) -> dict[str, Any]:
        """As plain values, for JSON."""
        return {
            "runs": [
                {
                    "name": name,
                    "status": run.summary.get("status"),
                    **result,
                    "settings": {key: values[n] for key, values in self.settings.items()},
                }
                for n, (name, run, result) in enumerate(
                    zip(self.names, self.runs, self.results, strict=True)
                )
            ],
            "notes": list(self.notes),
        }


def compare_runs(paths: Sequence[Path]) -> Comparison:
    """Read the runs in ``paths`` and compare them."""
    if len(paths) < 2:
        raise ValueError(f"a comparison takes two runs or more, got {len(paths)}.")
    if len({os.path.realpath(path) for path in paths}) < len(paths):
        raise ValueError("one run directory is named twice; name different runs.")
    runs = tuple(read_run(path) for path in paths)
    names = tuple(shorten(clean(run.name), _NAME) for run in runs)
    if len(set(names)) < len(names):
        names = tuple(shorten(clean(str(path)), 4 * _NAME) for path in paths)
    return Comparison(
        names=names,
        runs=runs,
        results=tuple(run_result(run) for run in runs),
        settings=_differences(runs),
        notes=tuple(_notes(names, runs)),
    )


def run_result(run: RunData) -> dict[str, float]:
    """The numbers of ``COLUMNS`` that a run has."""
    stated = {key: number(run.summary.get(key)) for key in ("parameters", "tokens", "seconds")}
    stated["steps"] = number(run.summary.get("step"))
    measures, _ = validation(run)
    stated |= {key: measures.get(key) for key in ("loss", "bits_per_byte")}
    entropy = _mean_over_layers(run, "attention/entropy").finite
    stated["entropy"] = float(entropy[-1]) if len(entropy) else None
    present = {c.key: x for c in COLUMNS if (x := stated[c.key]) is not None and math.isfinite(x)}
    return {key: int(x) if x == int(x) else x for key, x in present.items()}


def _differences(runs: Sequence[RunData]) -> dict[str, tuple[str, ...]]:
    all_ = [dict(flatten(run.config)) for run in runs]
    keys = dict.fromkeys(key for one in all_ for key in one if key not in _DERIVED)
    rows = {key: tuple(one.get(key, "") for one in all_) for key in keys}
    return {key: values for key, values in rows.items() if len(set(values)) > 1}


def _notes(names: Sequence[str], runs: Sequence[RunData]) -> list[str]:
    sentences = []
    texts = [mapping(run.summary.get("text")) for run in runs]
    # Validation bytes tell two splits of one text apart.
    if len({(text.get("text_sha256"), text.get("validation_bytes")) for text in texts}) > 1:
        sentences.append(
            "The runs have different validation texts, so neither their bits per byte nor their "
            "losses are comparable; fenchel eval RUN --against RUN evaluates two on one text."
        )
    elif len({text.get("tokenizer_sha256") for text in texts}) > 1:
        sentences.append(
            "The runs have different tokenizers, so their losses per token are not comparable; "
            "bits per byte are."
        )
    unfinished = [
        f"{name} ({clean(str(run.summary.get('status', 'unknown')))[:20]})"
        for name, run in zip(names, runs, strict=True)
        if run.summary.get("status") != "finished"
    ]
    if unfinished:
        sentences.append(
            f"Not finished: {join_words(unfinished)}; their numbers are those of the last "
            "evaluation, of the first validation tokens."
        )
    return sentences


def _mean_over_layers(run: RunData, key: str) -> Series:
    steps, values = layer_series(run, key)
    sound = np.isfinite(values).any(1) if values.size else np.zeros(len(steps), bool)
    return Series(steps[sound], np.nanmean(values[sound], 1) if sound.any() else np.empty(0))


def _charts() -> list[tuple[Chart, str, Callable[[RunData], Series]]]:
    """The charts of a report, one per column, and the mean entropy of attention.

    Perplexity is left out: it shows the validation loss again.
    """
    charts: list[tuple[Chart, str, Callable[[RunData], Series]]] = []
    for chart in CHARTS:
        if chart.name == "perplexity":
            continue
        for key, label in reversed(list(chart.columns.items())):  # validation before training
            words = f"{chart.title}, {label}" if len(chart.columns) > 1 else chart.title
            charts.append((chart, words, lambda run, key=key: series(run, key)))  # type: ignore[misc]
    entropy = Chart(
        "entropy", "Entropy of attention", "Nats, the mean over layers.", {}, width="half"
    )
    charts.insert(3, (entropy, entropy.title, lambda r: _mean_over_layers(r, "attention/entropy")))
    return charts


def render(comparison: Comparison) -> str:
    """The whole page as text."""
    names = comparison.names
    title = f"{pluralise(len(names), 'run')} compared"
    header = page_header("comparison", title, f"{join_words(list(names))}.")
    sections = [_results(comparison), _curves(comparison), _settings(comparison)]
    return document(title=f"{title} · fenchel", header=header, sections=sections)


def _results(comparison: Comparison) -> Section:
    rows = [
        (name, *(column.cell(result) for column in COLUMNS))
        for name, result in zip(comparison.names, comparison.results, strict=True)
    ]
    about = (
        "Loss and bits per byte are of the validation text after training, lower is better; "
        "entropy is that of attention at the last step, in nats"
    )
    head = ("run", *(column.title for column in COLUMNS))
    ranked: list[dict[str, Any]] = [
        {"name": shorten(name, _BAR), "value": result["bits_per_byte"], "tone": n % TONES}
        for n, (name, result) in enumerate(zip(comparison.names, comparison.results, strict=True))
        if "bits_per_byte" in result
    ]
    bars = sorted(ranked, key=lambda bar: bar["value"])
    for bar in bars:  # lengths alone do not tell 1.18 from 1.21
        more = 100 * (bar["value"] / bars[0]["value"] - 1) if bars[0]["value"] > 0 else 0.0
        bar["note"] = f"+{format_number(more, 2)} %" if more else ""
    body = [notes(comparison.notes), scrolled(table(head, rows, caption=about), "Results")]
    pictures = {}
    if len(bars) > 1:
        longest = max(len(bar["name"]) for bar in bars)
        pictures["ranking"] = {"view": "bars", "bars": bars, "gutter": 10 + 9 * longest}  # pixels
        numbers = [(bar["name"], format_number(bar["value"]), bar["note"]) for bar in bars]
        head = ("run", "bits per byte", "above the lowest")
        words = table(head, numbers, caption="Bits per byte")
        ranks = "The lowest first, the others with how far they are above it."
        body.append(picture("ranking", "Bits per byte", ranks, words))
    return Section(anchor="results", title="Results", body=join(body, "\n"), pictures=pictures)


def _curves(comparison: Comparison) -> Section:
    pictures: dict[str, Any] = {}
    figures = []
    for n, (chart, title, column) in enumerate(_charts()):
        columns = [column(run) for run in comparison.runs]
        if not any(len(one.finite) for one in columns):
            continue
        name, tones = f"{chart.name}-{n}", (index % TONES for index in range(len(columns)))
        drawn = zip(comparison.runs, comparison.names, columns, tones, strict=True)
        pictures[name] = line_chart(chart, list(drawn))
        rows = [[format_number(cell) for cell in row] for row in table_rows(columns)]
        numbers = table(("step", *comparison.names), rows, caption=f"{title} at some of the steps")
        caption = "Logarithmic scale." if pictures[name]["log"] else ""
        figures.append(picture(name, title, caption, numbers, width=chart.width))
    if not figures:
        body = notes(["None of the runs has a measurement yet."])
    else:
        parts = dict.fromkeys(filter(None, map(evaluated_part, comparison.runs)))
        charts = element("div", *figures, class_="charts")
        body = join([notes(parts), axis_choice(pictures), charts], "\n")
    return Section(anchor="curves", title="Curves", body=body, pictures=pictures)


def _settings(comparison: Comparison) -> Section:
    if not comparison.settings:
        body = notes(["All settings of these runs are equal."])
    else:
        head = ("setting", *comparison.names)
        rows = [(key, *values) for key, values in comparison.settings.items()]
        caption = "Settings that differ; an empty cell is a setting that was left out"
        words = table(head, rows, caption=caption, numeric=False)
        body = scrolled(words, "Settings that differ")
    return Section(anchor="settings", title="Settings that differ", body=body)
