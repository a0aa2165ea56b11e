"""The page of an inspection as one HTML file: Inspection -> sections -> document.

Sections: summary, the scale of healthy models, heads, rows of every head, attention maps, gains of
blocks, sensitivity of the network, the parts of a score, certificates, method.
"""

import math
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, NamedTuple

import numpy as np

from fenchel.inspection_result import (
    BlockResult,
    Head,
    Inspection,
    Network,
    Precision,
    Quantiles,
    ScoreParts,
)
from fenchel.report.attention_map import inspected_maps
from fenchel.report.certificates import certificates
from fenchel.report.findings import findings, token_name
from fenchel.report.heat_map import (
    heat_map,
    heat_values,
    span_edges,
    span_means,
    span_sums,
    token_map,
)
from fenchel.report.html import (
    Html,
    Section,
    amount,
    clean,
    element,
    format_bound,
    format_number,
    join,
    method_section,
    number_cards,
    picture,
    pluralise,
    shorten,
    subject_page,
    table,
)
from fenchel.report.inspection_scale import meaning, scale
from fenchel.report.measures import (
    BLOCK,
    HEAD,
    format_value,
    head_measure,
    head_name,
    measures_table,
    top_tokens,
)

_ROW_COLUMNS, _COLUMNS = 128, 256  # spans of tokens across a map of queries, and across others
_TOP = 5


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
    subject = result.subject
    some = subject.get("attention_layers", subject["layers"])
    attending = "" if some == subject["layers"] else f", of which {some} attend,"
    sentence = (
        f"{subject['family']}: {pluralise(subject['layers'], 'layer')}{attending} of "
        f"{pluralise(subject['heads'], 'head')}, {amount(subject['parameters'])} parameters, on "
        f"the first {pluralise(len(result.tokens), 'token')} "
        f"of {shorten(clean(result.text), 80)}."
    )
    return subject_page("inspection", "inspected", subject, sentence, sections)


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
    tables = {"subject": result.subject, "method": asdict(method)}
    return method_section("Method", about, tables, result.seconds)


class RowMeasure(NamedTuple):
    """A measure with one number per head and query."""

    key: str
    """Its name in ``Head.rows``, and that of its quantiles in ``Head``."""
    name: str
    about: str
    bend: str = ""
    """Its colour scale; "" is linear."""


ROW_MEASURES = (
    RowMeasure("entropy", "entropy", "In nats; 0 if the query attends to one key only."),
    RowMeasure(
        "sensitivity", "row sensitivity", "Exact spectral norm of d weights / d scores of the row."
    ),
    RowMeasure("max_logit", "largest logit", "The largest absolute score of the row."),
    RowMeasure(
        "margin",
        "margin",
        "Largest score less the second largest; a row with one key has none.",
        "root",
    ),
)


def heads(result: Inspection) -> Section:
    """The section with the grid and the table of all heads."""
    layers = sorted({head.layer for head in result.heads})
    numbers = sorted({head.head for head in result.heads})
    at = {(head.layer, head.head): head for head in result.heads}
    focused = min(result.heads, key=head_measure("entropy").number)
    data = heat_map(
        [f"layer {layer}" for layer in layers],
        [str(number) for number in numbers],
        [
            heat_values(
                measure.name,
                [[measure.number(at[layer, number]) for number in numbers] for layer in layers],
                measure.about,
                bend=measure.bend,
            )
            for measure in HEAD
            if measure.about
        ],
        across="head",
        start=(numbers.index(focused.head), layers.index(focused.layer)),
    )
    caption = (
        "One row per layer, one column per head. Choose a measure, then point at a head or move "
        "with the arrow keys. Spectral norms show the lower end of their bracket; the table has "
        "both ends."
    )
    means = (
        "Means over queries, except for the largest row sensitivity and logit and the median "
        "margin. Sigma is a bracket; bound is a guaranteed upper bound of sigma all"
    )
    numbers_table = measures_table(HEAD, result.heads, caption=means)
    figure = picture("heads", "Every head", caption, numbers_table, width="whole")
    return Section(anchor="heads", title="Heads", body=figure, pictures={"heads": data})


def rows(result: Inspection) -> Section:
    """The section with one line per head and one column per token."""
    heads, tokens = result.heads, result.tokens
    edges = span_edges(len(tokens), _ROW_COLUMNS)
    data = token_map(
        [head_name(head) for head in heads],
        tokens,
        edges,
        [
            heat_values(
                one.name,
                span_means([head.rows[one.key] for head in heads], edges).tolist(),
                one.about,
                bend=one.bend,
            )
            for one in ROW_MEASURES
        ],
        start=_most_focused(result, edges),
    )
    spans = "" if len(edges) > len(tokens) else " Long texts are shown by means over spans."
    caption = f"One row per head, layer by layer, one column per query.{spans}"
    body = picture("rows", "Every query of every head", caption, _row_table(heads), width="whole")
    return Section(anchor="rows", title="Queries", body=body, pictures={"rows": data})


def _most_focused(result: Inspection, edges: Sequence[int]) -> tuple[int, int]:
    """(span, head) of the entropy that is furthest below that of uniform attention."""
    entropies = np.array([head.rows["entropy"] for head in result.heads], dtype=float)
    if result.subject.get("causal", True):  # the first token has one key, the last has all
        entropies = entropies - np.log(np.arange(1, entropies.shape[1] + 1))
    means = span_means(entropies.tolist(), edges)
    head, span = np.unravel_index(np.argmin(np.where(np.isnan(means), np.inf, means)), means.shape)
    return int(span), int(head)


def _row_table(heads: Sequence[Head]) -> Html:
    names = [f"{one.name}, {end}" for one in ROW_MEASURES for end in ("5 %", "50 %", "95 %")]
    rows = []
    for head in heads:
        of_rows: list[Quantiles] = [getattr(head, one.key) for one in ROW_MEASURES]
        ends = (end for x in of_rows for end in (x.low, x.median, x.high))
        rows.append((head_name(head), *map(format_value, ends)))
    caption = "Quantiles over queries; --json --rows has every query"
    return table(("head", *names), rows, caption=caption)


def blocks(result: Inspection) -> Section:
    """The section with the gains of every block and the tokens of its top singular vectors."""
    layers, tokens = result.layers, result.tokens
    rows, edges = _gains(layers), span_edges(len(tokens), _COLUMNS)
    gains = heat_map(
        list(rows),
        [str(layer.layer) for layer in layers],
        [
            heat_values(
                "gain",
                rows.values(),
                "One row per measure, each on its own scale, one column per layer.",
                bend="log",
                own=True,
            )
        ],
        across="layer",
    )
    mass = token_map(
        [f"layer {layer.layer}" for layer in layers],
        tokens,
        edges,
        [
            heat_values(
                "moved by",
                [span_sums(layer.moved_by, edges) for layer in layers],
                "Share of every input token in the top right singular vector.",
            ),
            heat_values(
                "shown at",
                [span_sums(layer.shown_at, edges) for layer in layers],
                "Share of every output token in the top left singular vector.",
            ),
        ],
    )
    gain_caption = (
        "sigma is the largest singular value of the Jacobian of a block. The token norm measures "
        "changes by their largest token instead, so that it does not grow with the length of the "
        "text by itself."
    )
    mass_caption = (
        "The squared norm of each token's part of the top singular vectors. A row with one strong "
        "cell is a block that is dominated by one token."
    )
    update = (
        "update: norm of what the block adds over the norm of the stream; gains are over tokens"
    )
    numbers = measures_table(BLOCK, layers, caption=update)
    body = (
        picture("gains", "Gain of every block", gain_caption, numbers, width="whole"),
        picture("mass", "Dominant tokens", mass_caption, _top(layers, tokens), width="whole"),
    )
    return Section(
        anchor="blocks",
        title="Blocks",
        body=element("div", *body, class_="charts"),
        pictures={"gains": gains, "mass": mass},
    )


def _gains(layers: Sequence[BlockResult]) -> dict[str, list[float]]:
    """The measures that are numbers, and the largest gain of every norm layer, by layers."""
    rows = {one.name: [one.number(layer) for layer in layers] for one in BLOCK}
    rows = {name: values for name, values in rows.items() if any(map(math.isfinite, values))}
    for place, norms in enumerate(zip(*(layer.norms for layer in layers), strict=False), 1):
        rows[f"norm gain {place}"] = [norm.most for norm in norms]
    return rows


def _top(layers: Sequence[BlockResult], tokens: Sequence[str]) -> Html:
    head = ("layer", *(f"moved by {i + 1}" for i in range(_TOP)), "shown at")
    rows = [
        (
            str(layer.layer),
            *top_tokens(layer.moved_by, tokens, _TOP),
            *top_tokens(layer.shown_at, tokens, 1),
        )
        for layer in layers
    ]
    caption = "The tokens with the largest shares, as position: token (share)"
    return table(head, rows, caption=caption, numeric=False)


def network(result: Inspection, net: Network) -> Section:
    """The section with the gain of the network, its growth by depth and its influence map."""
    about = (
        "A small change of the stream before the first block grows after the last by a factor of "
        f"at most sigma = {format_value(net.stream)}"
    )
    if net.logits is not None:
        about += f", and moves the last token's logits by {format_value(net.logits)} times its size"
    about += f". That is exp({format_value(net.exponent)}) per layer"
    if net.blocks_exponent is not None:
        about += (
            "; if the worst directions of successive blocks coincided, it would be "
            f"exp({format_value(net.blocks_exponent)})"
        )
    growth = picture(
        "growth",
        "Growth by depth",
        "The log of the growth of the direction that grows most over all blocks, block by block, "
        "and the error of the stream after each block in a coarser number format.",
        _depth(net, result.precision),
        width="whole",
    )
    influence = picture(
        "influence",
        "Influence of tokens on tokens",
        "One row per span of output tokens, one column per input token: the Frobenius norm of the "
        "Jacobian between them through all blocks, estimated by one random probe per row, "
        f"relative standard error {format_number(net.influence.error, 2)}.",
        _strongest(net, result.tokens),
        width="whole",
    )
    body = (
        element("p", f"{about}.", class_="about"),
        element("div", growth, influence, class_="charts"),
    )
    return Section(
        anchor="network",
        title="Network",
        body=join(body, "\n"),
        pictures={
            "growth": _growth(net, result.precision),
            "influence": _influence(net, result.tokens),
        },
    )


def _growth(net: Network, coarse: Precision | None) -> dict[str, Any]:
    rows = {"log growth": net.growth}
    if coarse is not None:
        rows[f"error in {coarse.rounded}"] = coarse.stream
    columns = [str(i + 1) for i in range(len(net.growth))]
    about = "Every row has its own scale."
    values = [heat_values("by depth", rows.values(), about, own=True)]
    return heat_map(list(rows), columns, values, across="layer")


def _influence(net: Network, tokens: Sequence[str]) -> dict[str, Any]:
    edges = span_edges(len(tokens), _COLUMNS)
    squares = [[x * x for x in row] for row in net.influence.values]
    roots = [[x**0.5 for x in span_sums(row, edges)] for row in squares]
    measure = heat_values("influence", roots, bend="root")
    return token_map(_spans(net), tokens, edges, [measure], down="tokens")


def _spans(net: Network) -> list[str]:
    return [f"{first} to {end - 1}" for first, end in net.influence.spans]


def _depth(net: Network, coarse: Precision | None) -> Html:
    errors = [None] * len(net.growth) if coarse is None else coarse.stream
    rows = [
        (str(i), format_value(growth), format_value(error))
        for i, (growth, error) in enumerate(zip(net.growth, errors, strict=True), 1)
    ]
    head = ("layer", "log growth", "error of the stream")
    return table(head, rows, caption="Block by block; the log growths sum to log sigma")


def _strongest(net: Network, tokens: Sequence[str]) -> Html:
    rows = [
        (span, *top_tokens(values, tokens, _TOP))
        for span, values in zip(_spans(net), net.influence.values, strict=True)
    ]
    head = ("output tokens", *(f"input {i + 1}" for i in range(_TOP)))
    return table(head, rows, caption="The most influential inputs of every span", numeric=False)
