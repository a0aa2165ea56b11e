"""The page of an inspection, from plain data to one HTML file.

    Inspection.plain(maps=True, rows=True) -> sections -> document

The data is the output of ``fenchel inspect --json`` with maps and rows; numbers that are not finite
are None. Sections: summary, the scale of healthy models, heads, rows of every head, attention maps,
gains of blocks, sensitivity of the network, method.
"""

from collections.abc import Mapping
from typing import Any

from fenchel.report.certificates import certificates
from fenchel.report.html import (
    Html,
    Section,
    amount,
    clean,
    document,
    duration,
    element,
    facts,
    format_number,
    join,
    pluralise,
    shorten,
)
from fenchel.report.inspection_blocks import blocks, network
from fenchel.report.inspection_heads import heads, maps, rows
from fenchel.report.inspection_scale import meaning, scale

Data = Mapping[str, Any]


def render(result: Data) -> str:
    """The whole page as text."""
    sections = [_summary(result), meaning(result), heads(result), rows(result), maps(result)]
    if result["layers"]:
        sections.append(blocks(result))
    if result["network"]:
        sections.append(network(result))
    if result.get("certificates"):
        sections.append(certificates(result))
    sections.append(_method(result))
    name = shorten(clean(str(result["subject"]["name"])), 200)
    return document(
        title=f"{name} inspected · fenchel",
        header=_header(result, name),
        sections=sections,
        views=("heat.js",),
    )


def _header(result: Data, name: str) -> Html:
    subject = result["subject"]
    sentence = (
        f"{subject['family']}: {pluralise(subject['layers'], 'layer')} of "
        f"{pluralise(subject['heads'], 'head')}, {amount(subject['parameters'])} parameters, on "
        f"the first {pluralise(len(result['tokens']), 'token')} "
        f"of {shorten(clean(result['text']), 80)}."
    )
    return join(
        (
            element("p", element("span", "fenchel", class_="mark"), " inspection", class_="over"),
            element("h1", name),
            element("p", sentence, class_="lead"),
        ),
        "\n",
    )


def _summary(result: Data) -> Section:
    heads = result["heads"]
    top = max(heads, key=lambda head: head["sigma"]["qkv"]["lower"])
    sharp = min(heads, key=lambda head: head["entropy"]["mean"])
    largest = max(heads, key=lambda head: head["max_logit"]["most"])
    sink = max(heads, key=lambda head: head["first"])
    entries = [
        (
            "Most sensitive head",
            format_number(top["sigma"]["qkv"]["lower"], 3),
            f"{_name(top)}; usual {scale('sigma of a head').usual}",
        ),
        ("Lowest entropy", f"{format_number(sharp['entropy']['mean'], 3)} nats", _name(sharp)),
        (
            "Largest logit",
            format_number(largest["max_logit"]["most"], 3),
            f"{_name(largest)}; usual {scale('largest logit').usual}",
        ),
        (
            "Most weight on the first token",
            format_number(sink["first"], 2),
            f"{_name(sink)}; usual {scale('weight on the first token').usual}",
        ),
    ]
    network = result["network"]
    if network:
        ends = network["stream"]
        bound = f"at most {format_number(ends['upper'], 3)}"
        entries.append(("Network, stream to stream", format_number(ends["lower"], 3), bound))
        usual = f"per layer; usual {scale('Lyapunov exponent').usual}"
        entries.append(("Lyapunov exponent", format_number(network["exponent"], 3), usual))
    cards = (
        element("div", element("dt", name), element("dd", value, element("small", unit)))
        for name, value, unit in entries
    )
    link = element("a", "What the numbers mean", href="#meaning")
    body = [element("dl", *cards), element("p", link, class_="about")]
    if result["precision"]:
        body.append(element("p", result["precision"]["statement"], class_="note"))
    return Section(anchor="summary", title="Summary", body=join(body, "\n"))


def _name(head: Data) -> str:
    return f"layer {head['layer']}, head {head['head']}"


def _method(result: Data) -> Section:
    method, seconds = result["method"], result["seconds"]
    about = (
        "Every spectral norm is a bracket. Its lower end is attained by an explicit direction; its "
        f"upper end is exceeded with probability at most {method['failure']:g} over the random "
        "start of the Golub-Kahan recurrence, which stops when the ends are within "
        f"{method['tolerance']:.0%} of each other or after {method['iterations']} pairs of "
        "products. Entropies, row sensitivities, logits and column sums are exact to rounding."
    )
    spent = {name: duration(value) for name, value in seconds.items()}
    cards = (
        facts(result["subject"], caption="subject"),
        facts(method, caption="method"),
        facts(spent, caption="time"),
    )
    body = (element("p", about, class_="about"), element("div", *cards, class_="cards"))
    return Section(anchor="method", title="Method", body=join(body, "\n"))
