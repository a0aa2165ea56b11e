"""Every row of every head: one number a token that looks, head by head.

The heads of an inspection: one grid for every measure, a table of all of them, and the maps.
"""

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
_COLUMNS = 128  # tokens, or spans of them

ROW_MEASURES = (
    ("entropy", "entropy", "In nats: 0 looks at one key.", ""),
    ("sensitivity", "row sensitivity", "Exact norm of d weights / d scores of the row.", ""),
    ("max_logit", "largest logit", "The greatest score, by size, that the row could choose.", ""),
    ("margin", "margin", "Best score less the second; a row with one key has none.", "root"),
)
"""Name in the data, name on the page, what it is, and how its colours bend."""


def rows(found: Data) -> Section:
    """The section with one line a head and one column a token."""
    heads, tokens = found["heads"], found["tokens"]
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
    gathered = "" if len(edges) > len(tokens) else " Long texts are shown by means over spans."
    told = f"A line is a head, layer by layer, a column the token that looks.{gathered}"
    body = picture("rows", "Every row of every head", told, _row_table(heads), width="whole")
    return Section(anchor="rows", title="Rows", body=body, pictures={"rows": data})


def span_means(rows: Sequence[Sequence[float | None]], edges: Sequence[int]) -> NDArray[np.float64]:
    """For every row, the mean in every span of what is there, nan where nothing is.

    >>> span_means([[1.0, 3.0, None, None]], [0, 2, 3, 4])
    array([[ 2., nan, nan]])
    """
    numbers, starts = np.array(rows, dtype=float), list(edges[:-1])
    there = ~np.isnan(numbers)
    count = np.add.reduceat(there.astype(float), starts, axis=1)
    total = np.add.reduceat(np.where(there, numbers, 0.0), starts, axis=1)
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
    return table(head, rows, caption="Quantiles over rows; --json --rows has every row")


_TOKEN = 40


@dataclass(frozen=True)
class Measure:
    """One number a head."""

    name: str
    about: str
    of: Callable[[Data], float | None]
    bend: str = ""
    """"log" where colours follow the logarithm."""


MEASURES = (
    Measure("entropy", "Mean over rows, in nats: 0 is one key.", lambda h: h["entropy"]["mean"]),
    Measure(
        "keys used",
        "exp of the entropy: how many keys a row uses, as if evenly; mean over rows.",
        lambda h: h["effective"]["mean"],
        bend="log",
    ),
    Measure(
        "row sensitivity",
        "Largest over rows of the exact norm of d weights / d scores; 0.5 is the most for softmax.",
        lambda h: h["sensitivity"]["most"],
    ),
    Measure(
        "largest logit",
        "The greatest score, by size, that enters the choice.",
        lambda h: h["max_logit"]["most"],
        bend="log",
    ),
    Measure(
        "margin",
        "Best score less the second best; median over rows.",
        lambda h: h["margin"]["median"],
    ),
    Measure(
        "on the first", "Mean weight on the first token, the usual sink.", lambda h: h["first"]
    ),
    Measure(
        "column sum",
        "The largest column sum of the weights: how much of the text looks at one token.",
        lambda h: h["column"],
        bend="log",
    ),
    Measure(
        "likeness",
        "How alike the nearest other head of the layer looks: 1 is the same, row by row.",
        lambda h: h["overlap"],
    ),
    Measure("distance", "Mean distance, in tokens, to what is looked at.", lambda h: h["distance"]),
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


def heads(found: Data) -> Section:
    """The section with the grid and the table of all heads."""
    all_ = found["heads"]
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
    told = (
        "A row is a layer, a column a head. Choose a measure, then point at a head or move "
        "with the arrow keys. Spectral norms show the lower, attained end of their bracket; the "
        "table has both."
    )
    figure_ = picture("heads", "Every head", told, _table(all_), width="whole")
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
        "likeness",
        "sigma q",
        "sigma k",
        "sigma v",
        "sigma all",
        "bound",
        "ruled by",
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
            "" if h["twin"] is None else str(h["twin"]),
            format_number(h["overlap"], 3),
            *(format_bracket(h["sigma"][name]) for name in ("q", "k", "v", "qkv")),
            format_number(h["bound"], 3),
            h["dominant"],
        )
        for h in heads
    ]
    told = (
        "Means over rows, but the largest row sensitivity and logit and the median margin. Sigma "
        "is a bracket; bound is a sure upper bound of sigma all"
    )
    return table(head, rows, caption=told)


def maps(found: Data) -> Section:
    """The section with every chosen head's map on the first tokens."""
    stated = found["maps"]
    size, layers, heads = stated["size"], stated["layers"], stated["heads"]
    tokens = [shorten(clean(str(token)), _TOKEN) for token in found["tokens"][:size]]
    part = "" if size == len(found["tokens"]) else f"the first {size} of "
    about = (
        f"{pluralise(len(layers), 'layer')} of {pluralise(len(heads), 'head')} on {part}"
        f"{pluralise(len(found['tokens']), 'token')}. Rows are queries, columns are keys; "
        "colours run from 0 to 1 on a square-root scale. A weight shows which tokens a head "
        "reads, not what it does with them."
    )
    if layers != list(range(1, len(layers) + 1)) or heads != list(range(1, len(heads) + 1)):
        about += (
            f" Layers and heads are counted among those inspected: layers {_list(layers)}, "
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
    rows = [(str(place), token) for place, token in enumerate(tokens)]
    body = element(
        "figure",
        element("figcaption", element("p", about, class_="about")),
        element("div", class_="view", data_picture="attention"),
        details(
            "The tokens as a table",
            table(("place", "token"), rows, caption="Places count from 0", numeric=False),
        ),
    )
    return Section(
        anchor="maps", title="Where they look", body=join([body]), pictures={"attention": data}
    )


def _number(value: float | None) -> float:
    return float("nan") if value is None else value


def _list(numbers: Sequence[int]) -> str:
    return shorten(", ".join(str(n) for n in numbers), 80)
