"""The parts of a report that are mostly text: result, sample, settings, environment.

The result is measured in bits per byte of held-out text, which does not depend on the vocabulary,
beside baselines that need no neural network (``fenchel/evaluate/baseline.py``).
"""

import math
import re
import shlex
from collections.abc import Mapping
from typing import Any

from fenchel.report.html import (
    Html,
    Section,
    amount,
    clean,
    details,
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
from fenchel.report.run_data import RunData, mapping, number

STATUSES = {
    "finished": ("✓", "Finished"),
    "running": ("…", "Running"),
    "interrupted": ("‖", "Interrupted"),
    "diverged": ("✗", "Diverged"),
}
"""Every status of a summary with a sign, since colour alone is not visible to all, and a word."""

_UNKNOWN = ("?", "Unknown end")
_COMPRESSORS = {"bzip2": "bzip2 -9", "gzip": "gzip -9", "xz": "xz -9"}
_BASELINES = 12
_BITS = 64.0  # per byte; a larger value is not plausible
_MEASURES = ("loss", "perplexity", "bits_per_byte", "accuracy")


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
    body.append(_numbers(run, measured))
    return Section(
        anchor="result",
        title="Result",
        body=element("div", *body, class_="result"),
        pictures={"baselines": {"view": "bars", "bars": bars}} if bars else {},
    )


def _why_no_bits(run: RunData) -> str:
    stated = _finite(mapping(run.summary.get("validation")))
    if not stated.get("uncovered"):
        return "There is no evaluation yet: the bits per byte are unknown."
    return (
        f"The model gives {100 * stated['uncovered']:.1f} % of the targets probability 0, as a "
        "sparse loss allows, so its bits per byte are infinite. It predicts "
        f"{100 * stated.get('accuracy', 0.0):.1f} % of the targets."
    )


def validation(run: RunData) -> tuple[Mapping[str, float], str]:
    """The evaluation of the summary, else the last one of the metrics, and which step it is of."""
    stated = mapping(run.summary.get("validation"))
    if measures := _finite({name: stated.get(name) for name in _MEASURES}):
        tokens = number(stated.get("tokens"))
        part = "all" if number(run.summary.get("validation_limit")) is None else "the first"
        return measures, "" if tokens is None else f", {part} {format_number(tokens)} tokens of it"
    for row in reversed(run.rows):
        if measures := _finite({name: row.get(f"validation/{name}") for name in _MEASURES}):
            return measures, f", at the last evaluation, step {format_number(number(row['step']))}"
    return {}, ""


def baselines(summary: Mapping[str, Any]) -> list[tuple[str, float]]:
    """(name, bits per byte) of every baseline with a plausible value."""
    stated = _finite(mapping(summary.get("baselines")))
    sound = [(baseline_name(key), value) for key, value in stated.items() if 0 < value < _BITS]
    return sound[:_BASELINES]


def baseline_name(key: str) -> str:
    """The name of a baseline on the page.

    >>> baseline_name("ngram5"), baseline_name("bzip2"), baseline_name("other")
    ('5-gram', 'bzip2 -9', 'other')
    """
    if match := re.fullmatch(r"ngram([0-9]{1,2})", key):
        return f"{match[1]}-gram"
    return _COMPRESSORS.get(key, shorten(clean(key), 14))


def _sentence(run: RunData, kind: str) -> str:
    stated = _finite(run.summary)
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


def _numbers(run: RunData, measured: Mapping[str, float]) -> Html:
    constant = _finite(mapping(run.summary.get("lipschitz")))
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


def _finite(values: Mapping[str, Any]) -> dict[str, float]:
    """Those of ``values`` that are finite numbers."""
    numbers = ((str(key), number(value)) for key, value in values.items())
    return {key: x for key, x in numbers if x is not None and math.isfinite(x)}


def evaluated_part(run: RunData) -> str:
    """Which part of the validation text the curves are of, if it is not all of it.

    The evaluations while training read the first tokens only, so that their last one differs from
    the result, which reads more of them.
    """
    limit = number(mapping(run.config.get("train")).get("evaluate_tokens"))
    whole = number(mapping(run.summary.get("text")).get("validation_tokens"))
    if limit is None or whole is None or whole - 1 <= limit:  # the first token is not predicted
        return ""
    last = number(run.summary.get("validation_limit"))
    result = "all of them" if last is None else f"the first {format_number(last)}"
    return (
        f"Held-out text while training: its first {format_number(limit)} tokens of "
        f"{format_number(whole)}. The result above is of {result}, so the numbers differ."
    )


_TEXT = 20_000
_NESTED = 40


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
