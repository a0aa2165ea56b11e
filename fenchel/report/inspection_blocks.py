"""Sections of an inspection page: gains of the blocks and sensitivity of the whole network.

A block has its spectral norm, its norm per token, the tokens of its top singular vectors, and the
gains of its normalisations. The network has its growth with depth, the influence of tokens on
tokens, and its error in a coarser number format.
"""

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from fenchel.inspection_result import BlockResult, Inspection, Network, Precision
from fenchel.report.html import (
    Html,
    Section,
    clean,
    element,
    format_number,
    heat_map,
    heat_values,
    join,
    picture,
    shorten,
    table,
)
from fenchel.report.measures import BLOCK, format_value, measures_table, top_tokens

_COLUMNS = 256  # tokens, or spans of tokens, across a chart
_TOKEN = 14  # characters of a token below a chart
_TOP = 5


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
    mass = heat_map(
        [f"layer {layer.layer}" for layer in layers],
        span_tokens(tokens, edges),
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
        across="token",
        titles=span_titles(tokens, edges),
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


def span_edges(count: int, most: int) -> list[int]:
    """Edges of at most ``most`` equal spans of ``count`` items.

    >>> span_edges(5, 8), span_edges(10, 4)
    ([0, 1, 2, 3, 4, 5], [0, 2, 5, 8, 10])
    """
    parts = min(count, most)
    return [round(i * count / parts) for i in range(parts + 1)]


def span_tokens(tokens: Sequence[str], edges: Sequence[int]) -> list[str]:
    """The first token of every span, the name of its column.

    >>> span_tokens(["a", " b", "c"], [0, 1, 3])
    ['a', ' b']
    """
    return [shorten(clean(tokens[first]), _TOKEN) for first in edges[:-1]]


def span_titles(tokens: Sequence[str], edges: Sequence[int]) -> list[str]:
    """The title of every span of tokens: its position and its first token.

    >>> span_titles(["a", " b", "c"], [0, 1, 3])
    ['0 “a”', '1 “ b …”']
    """
    return [
        f"{first} “{shorten(clean(tokens[first]), 20)}{'' if end - first == 1 else ' …'}”"
        for first, end in pairwise(edges)
    ]


def span_sums(shares: Sequence[float], edges: Sequence[int]) -> list[float]:
    """The sum of the shares in every span.

    >>> span_sums([0.5, 0.25, 0.25], [0, 1, 3])
    [0.5, 0.5]
    """
    total = np.concatenate([[0.0], np.cumsum(np.asarray(shares, dtype=float))])
    sums: list[float] = (total[list(edges[1:])] - total[list(edges[:-1])]).tolist()
    return sums


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
    return heat_map(
        _spans(net),
        span_tokens(tokens, edges),
        [heat_values("influence", roots, bend="root")],
        down="tokens",
        across="token",
        titles=span_titles(tokens, edges),
    )


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
