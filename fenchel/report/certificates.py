"""Certificates of attention layers to a page, and to a section of an inspection's page.

    Certification.plain() -> parts -> one document

The data is what ``fenchel certify --json`` prints; numbers that were not finite come as None.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from fenchel.report.html import (
    Html,
    Section,
    clean,
    document,
    duration,
    element,
    facts,
    format_bracket,
    format_number,
    join,
    json_numbers,
    notes,
    picture,
    pluralise,
    shorten,
    table,
)
from fenchel.report.inspection_blocks import span_edges, span_sums, span_titles

Data = Mapping[str, Any]
_LEVELS = {
    "attention": ("attention layer", "attention with its output projection"),
    "block": ("block", "the block, with its norm layers, MLP and residual branches"),
}
_COLUMNS = 64  # spans of tokens in a picture
_TOP = 3  # tokens of a witness in the table


def render(result: Data) -> str:
    """The whole page as text."""
    name = shorten(clean(str(result["subject"]["name"])), 200)
    return document(
        title=f"{name} certified · fenchel",
        header=_header(result, name),
        sections=[certificates(result), _method(result)],
        views=("heat.js",),
    )


def certificates(result: Data) -> Section:
    """The section with the certificates of every layer."""
    data, tokens = result["certificates"], result["tokens"]
    layers = [layer for layer in data["layers"] if layer["refused"] is None]
    refused = [layer["refused"] for layer in data["layers"] if layer["refused"] is not None]
    ball = (
        "no token moves by more than the radius"
        if data["norm"] == "token"
        else "all tokens together, as one vector, move by at most the radius"
    )
    of_layer, function = _LEVELS[data["level"]]
    about = (
        f"Over the ball of radius {format_number(data['radius'], 4)} about the input of each "
        f"{of_layer}, in which {ball}: the spectral norm of the Jacobian of {function}. Lower is "
        "attained at a point of the ball, the witness. Upper is exceeded nowhere in it, so two "
        "inputs in the ball have outputs at most upper times as far apart as the inputs are."
    )
    body: list[Html] = [element("p", about, class_="about")]
    pictures: dict[str, Any] = {}
    if refused:
        body.append(notes(refused))
    if layers:
        edges = span_edges(len(tokens), _COLUMNS)
        pictures = {
            "certificates": _ends_picture(layers),
            "witnesses": _moves_picture(layers, tokens, edges),
        }
        moves = (
            "The share of each token in the squared distance from the text's own input to the "
            "witness: the tokens whose change makes it most sensitive."
        )
        ends = "At the text itself, attained in the ball, and never exceeded in it."
        figures = (
            picture("certificates", "Both sides", ends, _table(layers), width="whole"),
            picture("witnesses", "Witnesses", moves, _witnesses(layers, tokens), width="whole"),
        )
        body.append(element("div", *figures, class_="charts"))
    heads = [(layer["layer"], head) for layer in layers for head in layer["heads"]]
    if heads:
        body.append(_heads(heads))
    return Section(
        anchor="certificates", title="Certificates", body=join(body, "\n"), pictures=pictures
    )


def _header(result: Data, name: str) -> Html:
    subject = result["subject"]
    of_layer, _ = _LEVELS[result["certificates"]["level"]]
    sentence = (
        f"{subject['family']}: {of_layer}s certified over a ball of radius "
        f"{format_number(result['certificates']['radius'], 4)} about the first "
        f"{pluralise(len(result['tokens']), 'token')} of {shorten(clean(result['text']), 80)}."
    )
    return join(
        (
            element("p", element("span", "fenchel", class_="mark"), " certificates", class_="over"),
            element("h1", name),
            element("p", sentence, class_="lead"),
        ),
        "\n",
    )


def _ends_picture(layers: Sequence[Data]) -> dict[str, Any]:
    rows = {
        "centre": [layer["centre"]["lower"] for layer in layers],
        "lower": [layer["lower"] for layer in layers],
        "upper": [_or_nan(layer["upper"]) for layer in layers],
    }
    return {
        "view": "heat",
        "rows": list(rows),
        "columns": [str(layer["layer"]) for layer in layers],
        "down": "",
        "across": "layer",
        "measures": [
            {
                "name": "sigma",
                "about": "The spectral norm at the text, and its two ends over the ball.",
                "bend": "log",
                "own": False,
                "values": [json_numbers(values) for values in rows.values()],
            }
        ],
    }


def _moves_picture(
    layers: Sequence[Data], tokens: Sequence[str], edges: Sequence[int]
) -> dict[str, Any]:
    return {
        "view": "heat",
        "rows": [f"layer {layer['layer']}" for layer in layers],
        "columns": [str(first) for first in edges[:-1]],
        "titles": span_titles(tokens, edges),
        "down": "",
        "across": "token",
        "measures": [
            {
                "name": "moved",
                "about": "Share of every token in the way from the text's input to the witness.",
                "bend": "",
                "own": False,
                "values": [span_sums(layer["moved"], edges) for layer in layers],
            }
        ],
    }


def _table(layers: Sequence[Data]) -> Html:
    head = ("layer", "token length", "at the text", "lower", "upper", "upper / lower")
    rows = [
        (
            str(layer["layer"]),
            format_number(layer["token_norm"], 3),
            format_bracket(layer["centre"]),
            format_number(layer["lower"], 3),
            "none" if layer["upper"] is None else format_number(layer["upper"], 3),
            _ratio(layer),
        )
        for layer in layers
    ]
    return table(head, rows, caption="token length is the mean length of an input token")


def _witnesses(layers: Sequence[Data], tokens: Sequence[str]) -> Html:
    rows = []
    for layer in layers:
        moved = layer["moved"]
        order = sorted(range(len(moved)), key=lambda i: -moved[i])[:_TOP]
        cells = [
            f"{i}: {shorten(clean(tokens[i]), 20)} ({format_number(moved[i], 2)})" for i in order
        ]
        rows.append((str(layer["layer"]), *cells, *[""] * (_TOP - len(cells))))
    head = ("layer", *(f"moves most, {i + 1}" for i in range(_TOP)))
    return table(head, rows, caption="place: token (share)", numeric=False)


def _heads(heads: Sequence[tuple[int, Data]]) -> Html:
    rows = [
        (
            f"{layer}.{head['head']}",
            format_bracket(head["centre"]),
            "none" if head["upper"] is None else format_number(head["upper"], 3),
        )
        for layer, head in heads
    ]
    caption = "every head alone, with its own rows of the output projection"
    return table(("head", "at the text", "upper"), rows, caption=caption)


def _method(result: Data) -> Section:
    data = result["certificates"]
    failure = sum(layer["failure"] for layer in data["layers"])
    sentence = (
        "Upper ends follow from bounds on scores, weights and covariances over the ball and from "
        "the exact norm at its centre, measured by Golub-Kahan; one of those measurements is too "
        f"small with probability {failure:.1g} at the most, over their random starts. Lower ends "
        "are found by ascent and hold however they were found. Arithmetic is "
        f"{data['dtype']}."
    )
    settings = {name: result[name] for name in ("text", "device", "seed")}
    cards = (
        facts(result["subject"], caption="subject"),
        facts(settings | {"radius": data["radius"], "norm": data["norm"]}, caption="settings"),
        facts({k: duration(v) for k, v in result["seconds"].items()}, caption="time"),
    )
    body = (element("p", sentence, class_="about"), element("div", *cards, class_="cards"))
    return Section(anchor="method", title="How it was computed", body=join(body, "\n"))


def _ratio(layer: Data) -> str:
    if layer["upper"] is None or not layer["lower"]:
        return ""
    return format_number(layer["upper"] / layer["lower"], 3)


def _or_nan(x: float | None) -> float:
    return float("nan") if x is None else x
