"""The blocks of an inspection: gains in two norms, and the tokens through which they act.

The network of an inspection: growth with depth, influence between tokens, coarser numbers.
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
_COLUMNS = 256  # tokens, or spans of them, across a picture
_TOP = 5


def blocks(found: Data) -> Section:
    """The section with every block's numbers and its singular vectors' tokens."""
    layers = found["layers"]
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
                "about": "Every row is a measure with a scale of its own, every column a layer.",
                "bend": "log",
                "own": True,
                "values": [json_numbers(values) for _, values in rows],
            }
        ],
    }
    tokens, edges = found["tokens"], span_edges(len(found["tokens"]), _COLUMNS)
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
                    "Share of every input token in the direction to which the block answers most.",
                ),
                (
                    "shown at",
                    "shown_at",
                    "Share of every output token in that answer.",
                ),
            )
        ],
    }
    told = (
        "sigma is the largest singular value of a block's derivative, between token matrices; the "
        "token norm is the same when a change is measured by its largest token, and does not grow "
        "with the length of the text by itself."
    )
    where = (
        "The squared size of each token's part of the top singular vectors: a row with one bright "
        "place is a block that one token rules."
    )
    body = (
        picture("gains", "Gain of every block", told, _table(layers), width="whole"),
        picture("mass", "Through which tokens", where, _top(layers, tokens), width="whole"),
    )
    return Section(
        anchor="blocks",
        title="Blocks",
        body=element("div", *body, class_="charts"),
        pictures={"gains": gains, "mass": mass},
    )


def span_edges(count: int, most: int) -> list[int]:
    """Edges of at most ``most`` equal spans of ``count`` things.

    >>> span_edges(5, 8), span_edges(10, 4)
    ([0, 1, 2, 3, 4, 5], [0, 2, 5, 8, 10])
    """
    parts = min(count, most)
    return [round(i * count / parts) for i in range(parts + 1)]


def span_titles(tokens: Sequence[str], edges: Sequence[int]) -> list[str]:
    """What to call every span of tokens: its place, and the first of its words.

    >>> span_titles(["a", " b", "c"], [0, 1, 3])
    ['0 “a”', '1 “ b …”']
    """
    return [
        f"{first} “{shorten(clean(tokens[first]), 20)}{'' if end - first == 1 else ' …'}”"
        for first, end in pairwise(edges)
    ]


def span_sums(shares: Sequence[float], edges: Sequence[int]) -> list[float | None]:
    """The sum of the shares in every span."""
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
    told = "update is the size of what the block adds over that of the stream; gains over tokens"
    return table(head, rows, caption=told)


def _top(layers: Sequence[Data], tokens: Sequence[str]) -> Html:
    head = ("layer", *(f"moved by {i + 1}" for i in range(_TOP)), "shown at")
    rows = []
    for layer in layers:
        order = np.argsort(layer["moved_by"])[::-1][:_TOP].tolist()
        said = [_token(tokens, i, layer["moved_by"][i]) for i in order]
        said += [""] * (_TOP - len(said))
        at = int(np.argmax(layer["shown_at"]))
        rows.append((str(layer["layer"]), *said, _token(tokens, at, layer["shown_at"][at])))
    told = "The tokens with the largest shares, place: token (share)"
    return table(head, rows, caption=told, numeric=False)


def _token(tokens: Sequence[str], place: int, share: float) -> str:
    return f"{place}: {shorten(clean(tokens[place]), 20)} ({format_number(share, 2)})"


_NETWORK_COLUMNS = 256
_NETWORK_TOP = 5


def network(found: Data) -> Section:
    """The section with the network's numbers, its growth and its influence map."""
    net = found["network"]
    pictures = {"growth": _growth(found), "influence": _influence(found)}
    told = (
        "A small change of the stream before the first block grows by sigma at the most until "
        f"after the last: {format_bracket(net['stream'])}"
    )
    if net["logits"]:
        told += (
            f", and moves the last token's logits by {format_bracket(net['logits'])} times its size"
        )
    told += f". That is exp({format_number(net['exponent'], 3)}) a layer"
    if net["blocks_exponent"] is not None:
        told += (
            f"; had every block's worst direction been the next one's too, it would have been "
            f"exp({format_number(net['blocks_exponent'], 3)})"
        )
    growth = picture(
        "growth",
        "Growth by depth",
        "The direction that grows most over all blocks, block by block: log of its stretch. With "
        "coarser numbers, how far the stream is off after each block.",
        _depth(found),
        width="whole",
    )
    error = net["influence"]["error"]
    influence = picture(
        "influence",
        "Influence of tokens on tokens",
        "A row is a span of output tokens, a column an input token: how far a change there moves "
        "the span through all blocks, in Frobenius norm, estimated by one random probe a row, "
        f"relative standard error {format_number(error, 2)}.",
        _strongest(found),
        width="whole",
    )
    body = (
        element("p", f"{told}.", class_="about"),
        element("div", growth, influence, class_="charts"),
    )
    return Section(anchor="network", title="Network", body=join(body, "\n"), pictures=pictures)


def _growth(found: Data) -> dict[str, Any]:
    net, coarse = found["network"], found["precision"]
    rows = [("log stretch", net["growth"])]
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
                "about": "Every row has a scale of its own.",
                "bend": "",
                "own": True,
                "values": [json_numbers(_numbers(values)) for _, values in rows],
            }
        ],
    }


def _influence(found: Data) -> dict[str, Any]:
    values = found["network"]["influence"]["values"]
    edges = span_edges(len(found["tokens"]), _NETWORK_COLUMNS)
    squares = [[x * x for x in _numbers(row)] for row in values]
    return {
        "view": "heat",
        "rows": [f"{first} to {end - 1}" for first, end in found["network"]["influence"]["spans"]],
        "columns": [str(first) for first in edges[:-1]],
        "titles": span_titles(found["tokens"], edges),
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


def _depth(found: Data) -> Any:
    net, coarse = found["network"], found["precision"]
    head = ("layer", "log stretch", "stream off by")
    rows = [
        (
            str(i + 1),
            format_number(grown, 3),
            format_number(coarse["stream"][i], 3) if coarse else "",
        )
        for i, grown in enumerate(net["growth"])
    ]
    return table(head, rows, caption="Block by block; the stretches sum to the log of sigma")


def _strongest(found: Data) -> Any:
    head = ("output tokens", *(f"input {i + 1}" for i in range(_NETWORK_TOP)))
    rows = []
    influence = found["network"]["influence"]
    for (first, end), values in zip(influence["spans"], influence["values"], strict=True):
        numbers = _numbers(values)
        order = sorted(range(len(numbers)), key=lambda i: -numbers[i])[:_NETWORK_TOP]
        said = [
            f"{i}: {shorten(clean(found['tokens'][i]), 20)} ({format_number(numbers[i], 2)})"
            for i in order
        ]
        rows.append((f"{first} to {end - 1}", *said, *[""] * (_NETWORK_TOP - len(said))))
    return table(head, rows, caption="The strongest inputs of every span", numeric=False)


def _numbers(values: Any) -> list[float]:
    return [float("nan") if value is None else float(value) for value in values]
