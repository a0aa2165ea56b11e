"""Sections of an inspection page: gains of the blocks and sensitivity of the whole network.

A block has its spectral norm, its norm per token, the tokens of its top singular vectors, and the
gains of its normalisations. The network has its growth with depth, the influence of tokens on
tokens, and its error in a coarser number format.
"""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from fenchel.report.html import (
    Html,
    Section,
    clean,
    element,
    format_bracket,
    format_number,
    join,
    json_numbers,
    picture,
    shorten,
    table,
)

Data = Mapping[str, Any]
_COLUMNS = 256  # tokens, or spans of tokens, across a chart
_TOP = 5


def blocks(result: Data) -> Section:
    """The section with the gains of every block and the tokens of its top singular vectors."""
    layers = result["layers"]
    names = [f"layer {layer['layer']}" for layer in layers]
    rows = _measures(layers)
    gains = {
        "view": "heat",
        "rows": [name for name, _ in rows],
        "columns": [str(layer["layer"]) for layer in layers],
        "down": "",
        "across": "layer",
        "measures": [
            {
                "name": "gain",
                "about": "One row per measure, each on its own scale, one column per layer.",
                "bend": "log",
                "own": True,
                "values": [json_numbers(values) for _, values in rows],
            }
        ],
    }
    tokens, edges = result["tokens"], span_edges(len(result["tokens"]), _COLUMNS)
    mass = {
        "view": "heat",
        "rows": names,
        "columns": [str(first) for first in edges[:-1]],
        "titles": span_titles(tokens, edges),
        "down": "",
        "across": "token",
        "measures": [
            {
                "name": name,
                "about": about,
                "bend": "",
                "own": False,
                "values": [span_sums(layer[key], edges) for layer in layers],
            }
            for name, key, about in (
                (
                    "moved by",
                    "moved_by",
                    "Share of every input token in the top right singular vector.",
                ),
                (
                    "shown at",
                    "shown_at",
                    "Share of every output token in the top left singular vector.",
                ),
            )
        ],
    }
    gain_caption = (
        "sigma is the largest singular value of the Jacobian of a block. The token norm measures "
        "changes by their largest token instead, so that it does not grow with the length of the "
        "text by itself."
    )
    mass_caption = (
        "The squared norm of each token's part of the top singular vectors. A row with one strong "
        "cell is a block that is dominated by one token."
    )
    body = (
        picture("gains", "Gain of every block", gain_caption, _table(layers), width="whole"),
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


def span_titles(tokens: Sequence[str], edges: Sequence[int]) -> list[str]:
    """The title of every span of tokens: its position and its first token.

    >>> span_titles(["a", " b", "c"], [0, 1, 3])
    ['0 “a”', '1 “ b …”']
    """
    return [
        f"{first} “{shorten(clean(tokens[first]), 20)}{'' if end - first == 1 else ' …'}”"
        for first, end in pairwise(edges)
    ]


def span_sums(shares: Sequence[float], edges: Sequence[int]) -> list[float | None]:
    """The sum of the shares in every span.

    >>> span_sums([0.5, 0.25, 0.25], [0, 1, 3])
    [0.5, 0.5]
    """
    total = np.concatenate([[0.0], np.cumsum(np.asarray(shares, dtype=float))])
    return json_numbers((total[list(edges[1:])] - total[list(edges[:-1])]).tolist())


def _measures(layers: Sequence[Data]) -> list[tuple[str, list[float]]]:
    rows = [
        ("sigma", [layer["block"]["lower"] for layer in layers]),
        ("token norm", [layer["token"]["lower"] for layer in layers]),
        ("update", [layer["update"] for layer in layers]),
    ]
    for name, key in (("attention alone", "attention"), ("MLP alone", "mlp")):
        if all(layer[key] for layer in layers):
            rows.append((name, [layer[key]["lower"] for layer in layers]))
    count = min(len(layer["norms"]) for layer in layers)
    for place in range(count):
        rows.append((f"norm gain {place + 1}", [x["norms"][place]["most"] for x in layers]))
    return rows


def _table(layers: Sequence[Data]) -> Html:
    head = (
        "layer",
        "sigma",
        "token norm",
        "attention",
        "MLP",
        "update",
        "norm gains 1/s",
        "at most",
    )
    rows = [
        (
            str(layer["layer"]),
            format_bracket(layer["block"]),
            format_bracket(layer["token"]),
            format_bracket(layer["attention"]),
            format_bracket(layer["mlp"]),
            format_number(layer["update"], 3),
            "; ".join(
                f"{format_number(n['least'], 3)} to {format_number(n['most'], 3)}"
                for n in layer["norms"]
            ),
            "; ".join(format_number(norm["upper"], 3) for norm in layer["norms"]),
        )
        for layer in layers
    ]
    caption = (
        "update: norm of what the block adds over the norm of the stream; gains are over tokens"
    )
    return table(head, rows, caption=caption)


def _top(layers: Sequence[Data], tokens: Sequence[str]) -> Html:
    head = ("layer", *(f"moved by {i + 1}" for i in range(_TOP)), "shown at")
    rows = []
    for layer in layers:
        order = np.argsort(layer["moved_by"])[::-1][:_TOP].tolist()
        cells = [_token(tokens, i, layer["moved_by"][i]) for i in order]
        cells += [""] * (_TOP - len(cells))
        at = int(np.argmax(layer["shown_at"]))
        rows.append((str(layer["layer"]), *cells, _token(tokens, at, layer["shown_at"][at])))
    caption = "The tokens with the largest shares, as position: token (share)"
    return table(head, rows, caption=caption, numeric=False)


def _token(tokens: Sequence[str], position: int, share: float) -> str:
    return f"{position}: {shorten(clean(tokens[position]), 20)} ({format_number(share, 2)})"


def network(result: Data) -> Section:
    """The section with the gain of the network, its growth by depth and its influence map."""
    net = result["network"]
    pictures = {"growth": _growth(result), "influence": _influence(result)}
    about = (
        "A small change of the stream before the first block grows after the last by a factor of "
        f"at most sigma = {format_bracket(net['stream'])}"
    )
    if net["logits"]:
        about += (
            f", and moves the last token's logits by {format_bracket(net['logits'])} times its size"
        )
    about += f". That is exp({format_number(net['exponent'], 3)}) per layer"
    if net["blocks_exponent"] is not None:
        about += (
            "; if the worst directions of successive blocks coincided, it would be "
            f"exp({format_number(net['blocks_exponent'], 3)})"
        )
    growth = picture(
        "growth",
        "Growth by depth",
        "The log of the growth of the direction that grows most over all blocks, block by block, "
        "and the error of the stream after each block in a coarser number format.",
        _depth(result),
        width="whole",
    )
    error = net["influence"]["error"]
    influence = picture(
        "influence",
        "Influence of tokens on tokens",
        "One row per span of output tokens, one column per input token: the Frobenius norm of the "
        "Jacobian between them through all blocks, estimated by one random probe per row, "
        f"relative standard error {format_number(error, 2)}.",
        _strongest(result),
        width="whole",
    )
    body = (
        element("p", f"{about}.", class_="about"),
        element("div", growth, influence, class_="charts"),
    )
    return Section(anchor="network", title="Network", body=join(body, "\n"), pictures=pictures)


def _growth(result: Data) -> dict[str, Any]:
    net, coarse = result["network"], result["precision"]
    rows = [("log growth", net["growth"])]
    if coarse:
        rows.append((f"error in {coarse['rounded']}", coarse["stream"]))
    return {
        "view": "heat",
        "rows": [name for name, _ in rows],
        "columns": [str(i + 1) for i in range(len(net["growth"]))],
        "down": "",
        "across": "layer",
        "measures": [
            {
                "name": "by depth",
                "about": "Every row has its own scale.",
                "bend": "",
                "own": True,
                "values": [json_numbers(_numbers(values)) for _, values in rows],
            }
        ],
    }


def _influence(result: Data) -> dict[str, Any]:
    values = result["network"]["influence"]["values"]
    edges = span_edges(len(result["tokens"]), _COLUMNS)
    squares = [[x * x for x in _numbers(row)] for row in values]
    return {
        "view": "heat",
        "rows": [f"{first} to {end - 1}" for first, end in result["network"]["influence"]["spans"]],
        "columns": [str(first) for first in edges[:-1]],
        "titles": span_titles(result["tokens"], edges),
        "down": "tokens",
        "across": "token",
        "measures": [
            {
                "name": "influence",
                "about": "",
                "bend": "root",
                "own": False,
                "values": [
                    json_numbers((x or 0.0) ** 0.5 for x in span_sums(row, edges))
                    for row in squares
                ],
            }
        ],
    }


def _depth(result: Data) -> Any:
    net, coarse = result["network"], result["precision"]
    head = ("layer", "log growth", "error of the stream")
    rows = [
        (
            str(i + 1),
            format_number(growth, 3),
            format_number(coarse["stream"][i], 3) if coarse else "",
        )
        for i, growth in enumerate(net["growth"])
    ]
    return table(head, rows, caption="Block by block; the log growths sum to log sigma")


def _strongest(result: Data) -> Any:
    head = ("output tokens", *(f"input {i + 1}" for i in range(_TOP)))
    rows = []
    influence = result["network"]["influence"]
    for (first, end), values in zip(influence["spans"], influence["values"], strict=True):
        numbers = _numbers(values)
        order = sorted(range(len(numbers)), key=lambda i: -numbers[i])[:_TOP]
        cells = [
            f"{i}: {shorten(clean(result['tokens'][i]), 20)} ({format_number(numbers[i], 2)})"
            for i in order
        ]
        rows.append((f"{first} to {end - 1}", *cells, *[""] * (_TOP - len(cells))))
    return table(head, rows, caption="The most influential inputs of every span", numeric=False)


def _numbers(values: Any) -> list[float]:
    return [float("nan") if value is None else float(value) for value in values]
