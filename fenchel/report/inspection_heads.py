"""The heads of an inspection: one grid for every measure, a table of all of them, and the maps."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fenchel.report.document import Part, picture
from fenchel.report.markup import clean, details, element, join, shorten, table
from fenchel.report.quantities import figure, many, plain

Data = Mapping[str, Any]
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


def heads(found: Data) -> Part:
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
                    plain(_number(measure.of(at[layer, number])) for number in numbers)
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
    return Part(anchor="heads", title="Heads", body=figure_, pictures={"heads": data})


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
            *(figure(h["entropy"][name], 3) for name in ("mean", "low", "high")),
            figure(h["effective"]["mean"], 3),
            figure(h["support"]["mean"], 3),
            figure(h["sensitivity"]["most"], 3),
            figure(h["max_logit"]["most"], 3),
            figure(h["margin"]["median"], 3),
            figure(h["first"], 3),
            figure(h["itself"], 3),
            figure(h["distance"], 3),
            figure(h["column"], 3),
            str(h["column_token"]),
            "" if h["twin"] is None else str(h["twin"]),
            figure(h["overlap"], 3),
            *(between(h["sigma"][name]) for name in ("q", "k", "v", "qkv")),
            figure(h["bound"], 3),
            h["dominant"],
        )
        for h in heads
    ]
    told = (
        "Means over rows, but the largest row sensitivity and logit and the median margin. Sigma "
        "is a bracket; bound is a sure upper bound of sigma all"
    )
    return table(head, rows, caption=told)


def between(bracket: Data | None) -> str:
    """A bracket as text; one number where both ends round to it."""
    if not bracket:
        return ""
    low, high = (figure(bracket[end], 3) for end in ("lower", "upper"))
    return low if low == high else f"{low} to {high}"


def maps(found: Data) -> Part:
    """The section with every chosen head's map on the first tokens."""
    stated = found["maps"]
    size, layers, heads = stated["size"], stated["layers"], stated["heads"]
    tokens = [shorten(clean(str(token)), _TOKEN) for token in found["tokens"][:size]]
    part = "" if size == len(found["tokens"]) else f"the first {size} of "
    about = (
        f"{many(len(layers), 'layer')} of {many(len(heads), 'head')} on {part}"
        f"{many(len(found['tokens']), 'token')}. A row is the token that looks, a column a token "
        "it looks at; colours run from 0 to 1 on a square-root scale. A weight says where a head "
        "reads, not what it does with what it finds."
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
    return Part(
        anchor="maps", title="Where they look", body=join([body]), pictures={"attention": data}
    )


def _number(value: float | None) -> float:
    return float("nan") if value is None else value


def _list(numbers: Sequence[int]) -> str:
    return shorten(", ".join(str(n) for n in numbers), 80)
