"""Sections of an inspection page: rows of every head, measures of every head, attention maps."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fenchel.report.html import (
    Html,
    Section,
    clean,
    details,
    element,
    format_bracket,
    format_number,
    join,
    json_numbers,
    picture,
    pluralise,
    shorten,
    table,
)
from fenchel.report.inspection_blocks import span_edges, span_titles

Data = Mapping[str, Any]
_COLUMNS = 128  # tokens, or spans of tokens

ROW_MEASURES = (
    ("entropy", "entropy", "In nats; 0 if the query attends to one key only.", ""),
    (
        "sensitivity",
        "row sensitivity",
        "Exact spectral norm of d weights / d scores of the row.",
        "",
    ),
    ("max_logit", "largest logit", "The largest absolute score of the row.", ""),
    (
        "margin",
        "margin",
        "Largest score less the second largest; a row with one key has none.",
        "root",
    ),
)
"""Name in the data, name on the page, explanation, colour scale ("" is linear)."""


def rows(result: Data) -> Section:
    """The section with one line per head and one column per token."""
    heads, tokens = result["heads"], result["tokens"]
    edges = span_edges(len(tokens), _COLUMNS)
    data = {
        "view": "heat",
        "rows": [f"{head['layer']}.{head['head']}" for head in heads],
        "columns": [str(first) for first in edges[:-1]],
        "titles": span_titles(tokens, edges),
        "down": "head",
        "across": "token",
        "measures": [
            {
                "name": name,
                "about": about,
                "bend": bend,
                "own": False,
                "values": [
                    json_numbers(line)
                    for line in span_means([h["rows"][key] for h in heads], edges).tolist()
                ],
            }
            for key, name, about, bend in ROW_MEASURES
        ],
    }
    spans = "" if len(edges) > len(tokens) else " Long texts are shown by means over spans."
    caption = f"One row per head, layer by layer, one column per query.{spans}"
    body = picture("rows", "Every query of every head", caption, _row_table(heads), width="whole")
    return Section(anchor="rows", title="Queries", body=body, pictures={"rows": data})


def span_means(rows: Sequence[Sequence[float | None]], edges: Sequence[int]) -> NDArray[np.float64]:
    """Per row and span the mean of the values that are not None; nan for none.

    >>> span_means([[1.0, 3.0, None, None]], [0, 2, 3, 4])
    array([[ 2., nan, nan]])
    """
    numbers, starts = np.array(rows, dtype=float), list(edges[:-1])
    valid = ~np.isnan(numbers)
    count = np.add.reduceat(valid.astype(float), starts, axis=1)
    total = np.add.reduceat(np.where(valid, numbers, 0.0), starts, axis=1)
    return np.divide(total, count, out=np.full_like(total, np.nan), where=count > 0)


def _row_table(heads: Sequence[Data]) -> Html:
    ends = ("low", "median", "high")
    head = (
        "head",
        *(f"{name}, {end}" for _, name, _, _ in ROW_MEASURES for end in ("5 %", "50 %", "95 %")),
    )
    rows = [
        (
            f"{one['layer']}.{one['head']}",
            *(format_number(one[key][end], 3) for key, *_ in ROW_MEASURES for end in ends),
        )
        for one in heads
    ]
    return table(head, rows, caption="Quantiles over queries; --json --rows has every query")


_TOKEN = 40


@dataclass(frozen=True)
class Measure:
    """One number per head."""

    name: str
    about: str
    of: Callable[[Data], float | None]
    bend: str = ""
    """"log" for a logarithmic colour scale."""


MEASURES = (
    Measure("entropy", "Mean over queries, in nats; 0 is one key.", lambda h: h["entropy"]["mean"]),
    Measure(
        "keys used",
        "exp of the entropy: the equivalent number of equally weighted keys; mean over queries.",
        lambda h: h["effective"]["mean"],
        bend="log",
    ),
    Measure(
        "row sensitivity",
        "Exact norm of d weights / d scores, largest over queries; at most 0.5 for softmax.",
        lambda h: h["sensitivity"]["most"],
    ),
    Measure(
        "largest logit",
        "The largest absolute score before the choice map.",
        lambda h: h["max_logit"]["most"],
        bend="log",
    ),
    Measure(
        "margin",
        "Largest score less the second largest; median over queries.",
        lambda h: h["margin"]["median"],
    ),
    Measure(
        "on the first",
        "Mean weight on the first token, a common attention sink.",
        lambda h: h["first"],
    ),
    Measure(
        "column sum",
        "The largest column sum of the weights: how many queries attend to one token.",
        lambda h: h["column"],
        bend="log",
    ),
    Measure(
        "similarity",
        "Overlap of the weights with the most similar head of the layer; 1 is equal.",
        lambda h: h["overlap"],
    ),
    Measure(
        "distance", "Mean distance in tokens from a query to its keys.", lambda h: h["distance"]
    ),
    *(
        Measure(
            f"sigma {name}",
            f"Largest singular value of d output / d {what}: {why}.",
            of,
            bend="log",
        )
        for name, what, why, of in (
            ("q", "queries", "query", lambda h: h["sigma"]["q"]["lower"]),
            ("k", "keys", "key", lambda h: h["sigma"]["k"]["lower"]),
            ("v", "values", "mixing", lambda h: h["sigma"]["v"]["lower"]),
            ("all", "(q, k, v) together", "all causes", lambda h: h["sigma"]["qkv"]["lower"]),
        )
    ),
)


def heads(result: Data) -> Section:
    """The section with the grid and the table of all heads."""
    all_ = result["heads"]
    layers = sorted({head["layer"] for head in all_})
    numbers = sorted({head["head"] for head in all_})
    at = {(head["layer"], head["head"]): head for head in all_}
    data = {
        "view": "heat",
        "rows": [f"layer {layer}" for layer in layers],
        "columns": [str(number) for number in numbers],
        "down": "",
        "across": "head",
        "measures": [
            {
                "name": measure.name,
                "about": measure.about,
                "bend": measure.bend,
                "own": False,
                "values": [
                    json_numbers(_number(measure.of(at[layer, number])) for number in numbers)
                    for layer in layers
                ],
            }
            for measure in MEASURES
        ],
    }
    caption = (
        "One row per layer, one column per head. Choose a measure, then point at a head or move "
        "with the arrow keys. Spectral norms show the lower end of their bracket; the table has "
        "both ends."
    )
    figure_ = picture("heads", "Every head", caption, _table(all_), width="whole")
    return Section(anchor="heads", title="Heads", body=figure_, pictures={"heads": data})


def _table(heads: Sequence[Data]) -> Any:
    head = (
        "head",
        "entropy",
        "5 %",
        "95 %",
        "keys used",
        "support",
        "row sensitivity",
        "largest logit",
        "margin",
        "on first",
        "on itself",
        "distance",
        "column sum",
        "at token",
        "nearest head",
        "similarity",
        "sigma q",
        "sigma k",
        "sigma v",
        "sigma all",
        "bound",
        "dominant",
    )
    rows = [
        (
            f"{h['layer']}.{h['head']}",
            *(format_number(h["entropy"][name], 3) for name in ("mean", "low", "high")),
            format_number(h["effective"]["mean"], 3),
            format_number(h["support"]["mean"], 3),
            format_number(h["sensitivity"]["most"], 3),
            format_number(h["max_logit"]["most"], 3),
            format_number(h["margin"]["median"], 3),
            format_number(h["first"], 3),
            format_number(h["itself"], 3),
            format_number(h["distance"], 3),
            format_number(h["column"], 3),
            str(h["column_token"]),
            "" if h["nearest_head"] is None else str(h["nearest_head"]),
            format_number(h["overlap"], 3),
            *(format_bracket(h["sigma"][name]) for name in ("q", "k", "v", "qkv")),
            format_number(h["bound"], 3),
            h["dominant"],
        )
        for h in heads
    ]
    caption = (
        "Means over queries, except for the largest row sensitivity and logit and the median "
        "margin. Sigma is a bracket; bound is a guaranteed upper bound of sigma all"
    )
    return table(head, rows, caption=caption)


def maps(result: Data) -> Section:
    """The section with the attention maps of the inspected heads on the first tokens."""
    stated = result["maps"]
    size, layers, heads = stated["size"], stated["layers"], stated["heads"]
    tokens = [shorten(clean(str(token)), _TOKEN) for token in result["tokens"][:size]]
    part = "" if size == len(result["tokens"]) else f"the first {size} of "
    about = (
        f"{pluralise(len(layers), 'layer')} of {pluralise(len(heads), 'head')} on {part}"
        f"{pluralise(len(result['tokens']), 'token')}. Rows are queries, columns are keys; "
        "colours run from 0 to 1 on a square-root scale. A weight shows which tokens a head "
        "reads, not what it does with them."
    )
    if layers != list(range(1, len(layers) + 1)) or heads != list(range(1, len(heads) + 1)):
        about += (
            f" Numbers count the inspected layers and heads only: layers {_list(layers)}, "
            f"heads {_list(heads)}."
        )
    data = {
        "view": "attention",
        "layers": len(layers),
        "heads": len(heads),
        "size": size,
        "tokens": tokens,
        "data": stated["data"],
    }
    rows = [(str(position), token) for position, token in enumerate(tokens)]
    body = element(
        "figure",
        element("figcaption", element("p", about, class_="about")),
        element("div", class_="view", data_picture="attention"),
        details(
            "The tokens as a table",
            table(("position", "token"), rows, caption="Positions count from 0", numeric=False),
        ),
    )
    return Section(
        anchor="maps", title="Attention maps", body=join([body]), pictures={"attention": data}
    )


def _number(value: float | None) -> float:
    return float("nan") if value is None else value


def _list(numbers: Sequence[int]) -> str:
    return shorten(", ".join(str(n) for n in numbers), 80)
