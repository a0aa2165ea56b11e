"""The network of an inspection: growth with depth, influence between tokens, coarser numbers."""

from collections.abc import Mapping
from typing import Any

from fenchel.report.document import Part, picture
from fenchel.report.inspection_blocks import spans, summed, titles
from fenchel.report.inspection_heads import between
from fenchel.report.markup import clean, element, join, shorten, table
from fenchel.report.quantities import figure, plain

Data = Mapping[str, Any]
_COLUMNS = 256
_TOP = 5


def network(found: Data) -> Part:
    """The section with the network's numbers, its growth and its influence map."""
    net = found["network"]
    pictures = {"growth": _growth(found), "influence": _influence(found)}
    told = (
        "A small change of the stream before the first block grows by sigma at the most until "
        f"after the last: {between(net['stream'])}"
    )
    if net["logits"]:
        told += f", and moves the last token's logits by {between(net['logits'])} times its size"
    told += f". That is exp({figure(net['exponent'], 3)}) a layer"
    if net["blocks_exponent"] is not None:
        told += (
            f"; had every block's worst direction been the next one's too, it would have been "
            f"exp({figure(net['blocks_exponent'], 3)})"
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
        f"relative standard error {figure(error, 2)}.",
        _strongest(found),
        width="whole",
    )
    body = (
        element("p", f"{told}.", class_="about"),
        element("div", growth, influence, class_="charts"),
    )
    return Part(anchor="network", title="Network", body=join(body, "\n"), pictures=pictures)


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
                "values": [plain(_numbers(values)) for _, values in rows],
            }
        ],
    }


def _influence(found: Data) -> dict[str, Any]:
    values = found["network"]["influence"]["values"]
    edges = spans(len(found["tokens"]), _COLUMNS)
    squares = [[x * x for x in _numbers(row)] for row in values]
    return {
        "view": "heat",
        "rows": [f"{first} to {end - 1}" for first, end in found["network"]["influence"]["spans"]],
        "columns": [str(first) for first in edges[:-1]],
        "titles": titles(found["tokens"], edges),
        "down": "tokens",
        "across": "token",
        "measures": [
            {
                "name": "influence",
                "about": "",
                "bend": "root",
                "own": False,
                "values": [plain((x or 0.0) ** 0.5 for x in summed(row, edges)) for row in squares],
            }
        ],
    }


def _depth(found: Data) -> Any:
    net, coarse = found["network"], found["precision"]
    head = ("layer", "log stretch", "stream off by")
    rows = [
        (str(i + 1), figure(grown, 3), figure(coarse["stream"][i], 3) if coarse else "")
        for i, grown in enumerate(net["growth"])
    ]
    return table(head, rows, caption="Block by block; the stretches sum to the log of sigma")


def _strongest(found: Data) -> Any:
    head = ("output tokens", *(f"input {i + 1}" for i in range(_TOP)))
    rows = []
    influence = found["network"]["influence"]
    for (first, end), values in zip(influence["spans"], influence["values"], strict=True):
        numbers = _numbers(values)
        order = sorted(range(len(numbers)), key=lambda i: -numbers[i])[:_TOP]
        said = [
            f"{i}: {shorten(clean(found['tokens'][i]), 20)} ({figure(numbers[i], 2)})"
            for i in order
        ]
        rows.append((f"{first} to {end - 1}", *said, *[""] * (_TOP - len(said))))
    return table(head, rows, caption="The strongest inputs of every span", numeric=False)


def _numbers(values: Any) -> list[float]:
    return [float("nan") if value is None else float(value) for value in values]
