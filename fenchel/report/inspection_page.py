"""The page of an inspection as one HTML file: Inspection -> sections -> document.

Sections: summary, the scale of healthy models, heads, rows of every head, attention maps, gains of
blocks, sensitivity of the network, the parts of a score, certificates, method.
"""

import math
from collections.abc import Sequence
from dataclasses import asdict

from fenchel.inspection_result import Inspection, ScoreParts
from fenchel.report.attention_map import inspected_maps
from fenchel.report.certificates import certificates
from fenchel.report.findings import findings, token_name
from fenchel.report.html import (
    Html,
    Section,
    amount,
    clean,
    document,
    duration,
    element,
    format_bound,
    heat_map,
    heat_values,
    join,
    method_section,
    number_cards,
    page_header,
    picture,
    pluralise,
    shorten,
    table,
)
from fenchel.report.inspection_blocks import blocks, network
from fenchel.report.inspection_heads import heads, rows
from fenchel.report.inspection_scale import meaning, scale
from fenchel.report.measures import format_value, head_measure


def render(result: Inspection) -> str:
    """The whole page as text."""
    sections = [_summary(result), meaning(result), heads(result), rows(result)]
    sections.append(inspected_maps(result.maps, result.tokens))
    if result.layers:
        sections.append(blocks(result))
    if result.network is not None:
        sections.append(network(result, result.network))
    if result.why is not None:
        sections.append(_why(result.why, result.tokens))
    if result.certificates is not None:
        sections.append(certificates(result.certificates, result.tokens))
    sections.append(_method(result))
    name = shorten(clean(str(result.subject["name"])), 200)
    return document(
        title=f"{name} inspected · fenchel",
        header=_header(result, name),
        sections=sections,
        views=("heat_map.js",),
    )


def _header(result: Inspection, name: str) -> Html:
    subject = result.subject
    some = subject.get("attention_layers", subject["layers"])
    attending = "" if some == subject["layers"] else f", of which {some} attend,"
    sentence = (
        f"{subject['family']}: {pluralise(subject['layers'], 'layer')}{attending} of "
        f"{pluralise(subject['heads'], 'head')}, {amount(subject['parameters'])} parameters, on "
        f"the first {pluralise(len(result.tokens), 'token')} "
        f"of {shorten(clean(result.text), 80)}."
    )
    return page_header("inspection", name, sentence)


def _summary(result: Inspection) -> Section:
    entries = []
    for title, name, largest, unit, usual in (
        ("Most sensitive head", "sigma all", True, "", "sigma of a head"),
        ("Lowest entropy", "entropy", False, " nats", ""),
        ("Largest logit", "largest logit", True, "", "largest logit"),
        ("Most weight on the first token", "on the first", True, "", "weight on the first token"),
    ):
        of = head_measure(name).number
        head = (max if largest else min)(result.heads, key=of)
        where = f"layer {head.layer}, head {head.head}"
        where += f"; usual {scale(usual).usual}" if usual else ""
        entries.append((title, f"{format_value(of(head))}{unit}", where))
    network = result.network
    if network is not None:
        bound = f"over all layers, at most {format_bound(network.stream.upper, up=True)} times"
        grown = f"{format_value(network.stream.lower)} times"
        entries.append(("Growth of a change", grown, bound))
        grown = f"{format_value(math.exp(network.exponent))} times"
        exponent = f"Lyapunov exponent {format_value(network.exponent)}"
        entries.append(("Growth of a change per layer", grown, exponent))
    link = element("a", "What the numbers mean", href="#meaning")
    found = element("p", " ".join(findings(result)), class_="lead")
    body = [found, number_cards(entries), element("p", link, class_="about")]
    if result.precision is not None:
        body.append(element("p", result.precision.statement, class_="note"))
    return Section(anchor="summary", title="Summary", body=join(body, "\n"))


def _why(why: ScoreParts, tokens: Sequence[str]) -> Section:
    """Why a head gave a key its score: the parts of both streams, and every pair of them."""
    query, key = (clean(token_name(tokens[at])) for at in (why.query, why.key))
    about = (
        f"Layer {why.layer}, head {why.head}, query {why.query} {query}, key {why.key} {key}: "
        f"weight {format_value(why.weight)}, score {format_value(why.score)} against a mean of "
        f"{format_value(why.mean)} under the weights of that query. No choice depends on a shift "
        f"of all scores, so the difference, {format_value(why.contrast)}, is what is explained: as "
        "a sum over pairs of a part of the query's stream and a part of the key's."
    )
    if why.sink is not None:
        about += f" The sink has weight {format_value(why.sink)}; the mean is that of the keys."
    grid = heat_map(
        why.parts,
        why.parts,
        [heat_values("contribution", why.pairs)],
        down="query:",
        across="key:",
    )
    rows = [
        (name, format_value(q), format_value(k))
        for name, q, k in zip(why.parts, why.by_query, why.by_key, strict=True)
    ]
    caption = (
        f"Sums over the other side; each column sums to {format_value(why.contrast)}, with a "
        f"remainder of {why.remainder:.1g} by rounding"
    )
    numbers = table(("part", "of the query", "of the key"), rows, caption=caption)
    explained = (
        "One row per part of the query's stream, one column per part of the key's. Large pairs of "
        f"opposite sign cancel: their absolute values sum to {format_value(why.size)}."
    )
    figure = picture("why", "Pairs of parts", explained, numbers, width="whole", open_=True)
    body = join([element("p", about, class_="about"), figure], "\n")
    return Section(anchor="why", title="Why it attends there", body=body, pictures={"why": grid})


def _method(result: Inspection) -> Section:
    method = result.method
    about = (
        "Every spectral norm is a bracket. Its lower end is attained by an explicit direction; its "
        f"upper end is exceeded with probability at most {method.failure:g} over the random "
        "start of the Golub-Kahan recurrence, which stops when the ends are within "
        f"{method.tolerance:.0%} of each other or after {method.iterations} pairs of "
        "products. Entropies, row sensitivities, logits and column sums are exact to rounding."
    )
    spent = {name: duration(value) for name, value in result.seconds.items()}
    tables = {"subject": result.subject, "method": asdict(method), "time": spent}
    return method_section("Method", about, tables)
