"""The report of a run: run directory -> RunData -> sections -> document -> report.html.

The page is a function of the files alone: the same run gives the same bytes, whenever and wherever
the page is written. Curves and attention have files of their own; the other sections are here.
"""

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from fenchel.files import seal_text, write_atomic
from fenchel.inspection_result import Interval
from fenchel.report.attention_map import attention_map
from fenchel.report.curves import curves, heads, layers
from fenchel.report.html import (
    Html,
    Section,
    amount,
    clean,
    details,
    document,
    duration,
    element,
    facts,
    flatten,
    format_number,
    join,
    join_words,
    notes,
    number_cards,
    page_header,
    picture,
    shorten,
    table,
)
from fenchel.report.measures import format_value
from fenchel.report.run_data import (
    RunData,
    baselines,
    finite_numbers,
    mapping,
    number,
    read_run,
    validation,
)

_TEXT, _NESTED = 20_000, 40  # characters of a text, nested settings
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
STATUSES = {
    "finished": ("✓", "Finished"),
    "running": ("…", "Running"),
    "interrupted": ("‖", "Interrupted"),
    "diverged": ("✗", "Diverged"),
}
"""Every status of a summary with a sign, since colour alone is not visible to all, and a word."""

_UNKNOWN = ("?", "Unknown end")


def page(run: Path, summary: Mapping[str, Any] | None = None) -> Path:
    """Writes ``report.html``, sealed, into the run directory and returns its path.

    ``summary`` stands for the summary.json of a run that has yet to write it.
    """
    target = run / "report.html"
    data = read_run(run, strict=summary is not None)
    if summary is not None:
        troubles = {k: v for k, v in data.troubles.items() if k != "summary.json"}
        data = replace(data, summary=summary, troubles=troubles)
    doctype = "<!doctype html>"
    text = render(data).removeprefix(f"{doctype}\n")
    write_atomic(target, seal_text(text, f"{doctype}<!-- {{}} -->"))
    return target


def render(run: RunData) -> str:
    """The whole page as text."""
    return document(
        title=f"{shorten(run.name, 200)} · fenchel",
        header=header(run),
        sections=[made for section in SECTIONS if (made := section(run)) is not None],
    )


def header(run: RunData) -> Html:
    """The header of the page: name, status, one sentence, and the reason if there is one."""
    status = run.summary.get("status")
    kind = status if isinstance(status, str) and status in STATUSES else "unknown"
    sign, word = STATUSES.get(kind, _UNKNOWN)
    badge = element(
        "span", element("span", sign, aria_hidden="true"), f" {word}", class_=f"status {kind}"
    )
    reason, below = run.summary.get("reason"), None
    if isinstance(reason, str) and reason.strip():
        below = element("p", shorten(reason, 2000), class_="reason")
    name, sentence = shorten(run.name, 200), f" {_sentence(run, kind)}"
    return page_header("training report", name, badge, sentence, below=below)


def headline(run: RunData) -> Section:
    """Validation bits per byte beside the baselines, and the run in numbers."""
    measured, where = validation(run)
    bits = measured.get("bits_per_byte")
    others = baselines(run.summary)
    body = [notes(run.troubles.get("summary.json", ()))]
    bars: list[dict[str, Any]] = []
    if bits is None:
        body.append(notes([_why_no_bits(run)]))
    else:
        bars.append({"name": "this model", "value": bits, "ours": True})
        unit = f"bits per byte of held-out text{where}"
        body.append(element("p", element("strong", format_number(bits)), unit, class_="hero"))
    bars += [{"name": name, "value": value, "ours": False} for name, value in others]
    if bars:
        body.append(_beside(bars, _comparison(bits, others)))
    reason = run.summary.get("no_baselines")
    if not others and isinstance(reason, str):
        body.append(notes([f"The baselines were not computed: {shorten(reason, 300)}"]))
    body.append(_cards(run, measured))
    return Section(
        anchor="result",
        title="Result",
        body=element("div", *body, class_="result"),
        pictures={"baselines": {"view": "bars", "bars": bars}} if bars else {},
    )


def _why_no_bits(run: RunData) -> str:
    stated = finite_numbers(mapping(run.summary.get("validation")))
    if not stated.get("uncovered"):
        return "There is no evaluation yet: the bits per byte are unknown."
    return (
        f"The model gives {100 * stated['uncovered']:.1f} % of the targets probability 0, as a "
        "sparse loss allows, so its bits per byte are infinite. It predicts "
        f"{100 * stated.get('accuracy', 0.0):.1f} % of the targets."
    )


def _sentence(run: RunData, kind: str) -> str:
    stated = finite_numbers(run.summary)
    step = stated.get("step", run.last_step)
    where = "before the first step" if step is None else f"at step {format_number(step)}"
    if step is not None and "steps" in stated:
        where += f" of {format_number(stated['steps'])}"
    if kind == "running":
        where += ", still running when this page was written"
    went = []
    if "parameters" in stated:
        went.append(f"{amount(stated['parameters'])} parameters")
    if "tokens" in stated:
        went.append(f"{amount(stated['tokens'])} tokens of training")
    if "seconds" in stated:
        went.append(duration(stated["seconds"]))
    return f"{where}. {', '.join(went)}{'.' if went else ''}"


def _beside(bars: list[dict[str, Any]], comparison: str) -> Html:
    rows = [(bar["name"], format_number(bar["value"])) for bar in bars]
    return picture(
        "baselines",
        "Compared with other coders of the same text",
        f"Bits per byte, lower is better. {comparison}",
        table(("coder", "bits per byte"), rows, caption="Bits per byte"),
    )


def _comparison(bits: float | None, others: list[tuple[str, float]]) -> str:
    if bits is None:
        return ""
    below = [f"{name} ({format_number(value)})" for name, value in others if bits < value]
    above = [f"{name} ({format_number(value)})" for name, value in others if bits >= value]
    clauses = [f"below {join_words(below)}"] if below else []
    clauses += [f"not below {join_words(above)}"] if above else []
    return f"The model needs {format_number(bits)}{': ' if clauses else ''}{', '.join(clauses)}."


def _cards(run: RunData, measured: Mapping[str, float]) -> Html:
    constant = finite_numbers(mapping(run.summary.get("lipschitz")))
    entries = (
        ("Perplexity", measured.get("perplexity"), "per token"),
        ("Loss", measured.get("loss"), "nats per token"),
        ("Accuracy", measured.get("accuracy"), "of held-out tokens"),
        (
            "Lipschitz constant",
            constant.get("certified"),
            "at most, certified: change of a logit per largest move of a token embedding",
        ),
        ("Largest stretch", constant.get("attacked"), "of a logit that an attack found"),
        ("Best step", number(run.summary.get("best_step")), "by validation loss"),
        ("Skipped steps", _last(run, "train/skipped"), "loss or gradient not finite"),
        ("Speed", _last(run, "time/tokens_per_second"), "tokens per second, at the end"),
    )
    return number_cards(
        (name, format_number(value), unit) for name, value, unit in entries if value is not None
    )


def _last(run: RunData, key: str) -> float | None:
    return next((v for row in reversed(run.rows) if (v := number(row.get(key))) is not None), None)


def sample(run: RunData) -> Section:
    """The prompt and its generated continuation, quoted."""
    prompt, text = run.sample.get("prompt"), run.sample.get("text")
    if not isinstance(text, str):
        missing = run.troubles.get("sample.json", ()) or ["sample.json contains no generated text."]
        return Section(anchor="sample", title="Sample", body=notes(missing))
    body = join(
        (
            element(
                "p", "The prompt in bold, then the text that the model generated.", class_="about"
            ),
            element(
                "blockquote",
                element("strong", shorten(prompt, _TEXT) if isinstance(prompt, str) else ""),
                shorten(text, _TEXT),
                class_="sample",
            ),
        ),
        "\n",
    )
    return Section(anchor="sample", title="Sample", body=body)


def next_commands(run: RunData) -> Section:
    """What can be done with the run, as commands to copy."""
    name = shlex.quote(clean(run.name))
    prompt = run.sample.get("prompt")
    words = " ".join(prompt.split()[:3]) if isinstance(prompt, str) else ""
    commands = {
        f"fenchel generate {name} --prompt {shlex.quote(words)}": "continue a prompt",
        f"fenchel eval {name} --calibration": "loss and calibration on the held-out text",
    }
    if mapping(run.summary.get("text")).get("validation_answer_bytes") is not None:
        commands = {
            f"fenchel chat {name}": "hold a conversation",
            f"fenchel eval {name} --text FILE --calibration": "loss and calibration on a text",
        }
    commands |= {
        f"fenchel inspect {name} --text FILE": "what attention does on a text",
        f"fenchel compare {name} RUN": "beside another run",
        f"fenchel convert {name} OUT": "as a Hugging Face directory",
    }
    if run.summary.get("status") in ("interrupted", "running"):
        commands = {f"fenchel train --resume {name}": "go on with the run", **commands}
    items = (
        element("li", element("code", command), element("span", purpose))
        for command, purpose in commands.items()
    )
    about = element("p", "Commands, from the folder that holds the run.", class_="about")
    body = join((about, element("ul", *items, class_="commands")), "\n")
    return Section(anchor="next", title="Next", body=body)


def settings(run: RunData) -> Section:
    """What differs from the default, every setting by table, the text, and the file itself."""
    tables = {name: value for name, value in run.config.items() if isinstance(value, Mapping)}
    loose = {name: value for name, value in run.config.items() if name not in tables}
    cards = [facts(loose, caption="run")] if loose else []
    default = mapping(run.summary.get("defaults"))
    if default:
        own = dict(flatten(run.config))
        rows = [
            (name, own.get(name) or "none", value or "none") for name, value in flatten(default)
        ]
        head, caption = ("setting", "this run", "default"), "differs from the default run"
        cards = [table(head, rows[:_NESTED], caption=caption, numeric=False), *cards]
    cards += [
        facts(mapping(value), caption=shorten(name, 80))
        for name, value in list(tables.items())[:_NESTED]
    ]
    text = mapping(run.summary.get("text"))
    if text:
        cards.append(facts(text, caption="training text"))
    whole = element("pre", shorten(run.config_text, _TEXT))
    same = ["All settings are those of the default run."]
    body = [
        notes(run.troubles.get("config.toml", ())),
        notes(same) if not default and "defaults" in run.summary else None,
        element("div", *cards, class_="cards") if cards else None,
        details("config.toml, to copy", whole, open_=not run.config) if run.config_text else None,
    ]
    return Section(anchor="settings", title="Settings", body=join(body, "\n"))


def environment(run: RunData) -> Section:
    """Machine and versions."""
    body: Html = notes(run.troubles.get("environment.json", ()))
    if run.environment:
        values: Mapping[str, Any] = run.environment
        body = element("div", facts(values, caption="machine and versions"), class_="cards")
    elif not body:
        body = notes(["environment.json is an empty object: the machine is unknown."])
    return Section(anchor="environment", title="Environment", body=body)


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


SECTIONS = (
    headline,
    before_and_after,
    sample,
    next_commands,
    curves,
    layers,
    heads,
    attention_map,
    settings,
    environment,
)
"""The sections in the order of the page; one that has nothing to show is None."""
