"""The parts of a page that are words: the generated sample, the settings, the environment."""

from collections.abc import Mapping
from typing import Any

from fenchel.report.document import Part
from fenchel.report.markup import Html, details, element, facts, join, notes, shorten
from fenchel.report.run import Run, mapping

_TEXT = 20_000
_NESTED = 40


def sample(run: Run) -> Part:
    """The prompt and what the model made of it, quoted."""
    prompt, text = run.sample.get("prompt"), run.sample.get("text")
    if not isinstance(text, str):
        missing = run.troubles.get("sample.json", ()) or ["sample.json holds no generated text."]
        return Part(anchor="sample", title="Sample", body=notes(missing))
    body = join(
        (
            element(
                "p", "What the model wrote after the prompt, which is in bold.", class_="about"
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
    return Part(anchor="sample", title="Sample", body=body)


def settings(run: Run) -> Part:
    """Every setting by its table, the text it learned from, and the file as it stands."""
    tables = {name: value for name, value in run.config.items() if isinstance(value, Mapping)}
    loose = {name: value for name, value in run.config.items() if name not in tables}
    cards = [facts(loose, caption="run")] if loose else []
    cards += [
        facts(mapping(value), caption=shorten(name, 80))
        for name, value in list(tables.items())[:_NESTED]
    ]
    text = mapping(run.summary.get("text"))
    if text:
        cards.append(facts(text, caption="facts of the text"))
    whole = element("pre", shorten(run.config_text, _TEXT))
    body = [
        notes(run.troubles.get("config.toml", ())),
        element("div", *cards, class_="cards") if cards else None,
        details("config.toml, to copy", whole, open_=not run.config) if run.config_text else None,
    ]
    return Part(anchor="settings", title="Settings", body=join(body, "\n"))


def environment(run: Run) -> Part:
    """Where it ran."""
    body: Html = notes(run.troubles.get("environment.json", ()))
    if run.environment:
        values: Mapping[str, Any] = run.environment
        body = element("div", facts(values, caption="machine and versions"), class_="cards")
    elif not body:
        body = notes(["environment.json is an empty object: the machine is not known."])
    return Part(anchor="environment", title="Environment", body=body)
