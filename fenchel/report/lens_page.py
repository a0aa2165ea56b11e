"""The page of ``fenchel lens``: what every layer predicts next, and how far it agrees.

record (plain values of the command) -> sections -> one document
"""

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

from fenchel.report.heat_map import heat_values, span_edges, token_map
from fenchel.report.html import (
    Section,
    clean,
    element,
    format_number,
    join,
    json_numbers,
    method_section,
    number_cards,
    picture,
    pluralise,
    shorten,
    subject_page,
    table,
)

_TOKENS = 128  # columns of the grid
_WORD = 24  # characters of a word in the grid
_IN_WORDS = {
    "logit": "the logit lens",
    "jacobian without offset": "J x without offset",
    "jacobian": "the Jacobian lens with its offset",
}
_NAMES = {
    "logit": ("Logit lens", "The stream as it is, through the last norm and the LM head."),
    "jacobian without offset": (
        "J x",
        "The stream times the average derivative of the later layers, as published: its linear "
        "part alone.",
    ),
    "jacobian": (
        "With offset",
        "The mean last stream plus the average derivative times the distance from the mean stream "
        "of the layer.",
    ),
}


def render(record: Mapping[str, Any]) -> str:
    """The whole page as text."""
    sentence = (
        f"What the model would say if it ended after each of its "
        f"{pluralise(len(record['lenses'][-1]['layers']), 'layer')}, on the first "
        f"{pluralise(len(record['tokens']), 'token')} of {shorten(clean(record['text']), 80)}."
    )
    sections = [_summary(record), _laws(record), _agreement(record), _method(record)]
    return subject_page("lens", "through a lens", record["subject"], sentence, sections, "lens.js")


def _summary(record: Mapping[str, Any]) -> Section:
    best = nearest(record)
    rows, first = best["agreement"], best["first"][1:]
    half = next((row for row in rows if row["top"] >= 0.5), rows[-1])
    last = rows[-2] if len(rows) > 1 else rows[-1]
    layers = best["layers"]
    early = sum(n < layers[-1] for n in first) / max(len(first), 1)
    cards = [
        (
            "Half of the words are final",
            f"layer {half['layer']}",
            f"{half['top']:.0%} of the tokens, {_NAMES[best['kind']][0]}",
        ),
        (
            "Settled before the last layer",
            f"{early:.0%}",
            "of the tokens keep their word to the end",
        ),
        (
            f"Loss after layer {last['layer']}",
            format_number(last["loss"], 3),
            f"nats per token; {format_number(rows[-1]['loss'], 3)} by the model itself",
        ),
    ]
    body = [
        element("p", finding(record), class_="lead"),
        number_cards(cards),
        element("p", record["did"], class_="note"),
    ]
    return Section(anchor="summary", title="Summary", body=join(body, "\n"))


def nearest(record: Mapping[str, Any]) -> Mapping[str, Any]:
    """The lens with the smallest divergence in the mean over layers, of those that are shown."""
    return min(_shown(record), key=lambda one: sum(row["kl"] for row in one["agreement"]))


def _shown(record: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The lenses with the layers of the fitted one, which may lack some."""
    layers = record["lenses"][-1]["layers"]
    return [one for one in record["lenses"] if one["layers"] == layers]


def finding(record: Mapping[str, Any]) -> str:
    """What a lens shows, in a sentence or two."""
    best = nearest(record)
    rows = best["agreement"]
    if len(rows) < 2:
        return "The model has one layer, whose word is its own."
    steps = [after["top"] - before["top"] for before, after in pairwise(rows)]
    step = max(range(len(steps)), key=steps.__getitem__)
    half = next(row for row in rows if row["top"] >= 0.5)
    found = (
        f"After layer {rows[0]['layer']} of {rows[-1]['layer']} the likeliest next word is the "
        f"final one for {rows[0]['top']:.0%} of the tokens"
    )
    if half is not rows[0]:
        found += f", after layer {half['layer']} for {half['top']:.0%}"
    found += (
        f". The largest step from there is layer {rows[step + 1]['layer']} ({steps[step]:+.0%}). "
        f"Read by the lens that is nearest to the model here, {_IN_WORDS[best['kind']]}."
    )
    return found


def _laws(record: Mapping[str, Any]) -> Section:
    tokens = [clean(token) for token in record["tokens"][:_TOKENS]]
    words = {key: shorten(clean(word), _WORD) for key, word in record["words"].items()}
    count, best = len(tokens), nearest(record)
    lenses = [
        {
            "name": _NAMES[one["kind"]][0],
            "about": _NAMES[one["kind"]][1],
            "layers": one["layers"],
            "top": [row[:count] for row in one["top"]],
            "p": [[json_numbers(law) for law in row[:count]] for row in one["probability"]],
            "kl": [json_numbers(row[:count]) for row in one["kl"]],
            "rank": [row[:count] for row in one["rank"]],
        }
        for one in _shown(record)
    ]
    place = max(range(1, count), key=lambda t: best["kl"][0][t]) if count > 1 else 0
    data = {
        "view": "laws",
        "tokens": tokens,
        "words": words,
        "lenses": lenses,
        "shown": _shown(record).index(best),
        "start": [place, 0],
    }
    caption = (
        "One row per layer, one column per token: the word that the layer predicts after it, "
        "shaded by its probability. The last row is the model itself, and cells that already have "
        "its word are framed. Choose a cell, or move with the arrow keys, to see its law."
    )
    rows = [(f"{t} {tokens[t]}", *(words[row[t][0]] for row in best["top"])) for t in range(count)]
    head = ("token", *(f"layer {n}" for n in best["layers"]))
    numbers = table(
        head, rows, caption=f"The most likely next word, {_NAMES[best['kind']][0]}", numeric=False
    )
    figure = picture("laws", "What each layer predicts", caption, numbers, width="whole")
    return Section(anchor="laws", title="Words", body=figure, pictures={"laws": data})


def _agreement(record: Mapping[str, Any]) -> Section:
    lenses, fit = record["lenses"], record["fit"]
    layers, tokens = lenses[-1]["layers"], record["tokens"]
    edges = span_edges(min(len(tokens), _TOKENS), _TOKENS)
    kl = token_map(
        [f"layer {n}" for n in layers],
        tokens,
        edges,
        [
            heat_values(
                _NAMES[one["kind"]][0],
                [row[: len(edges) - 1] for row in one["kl"]],
                "KL(model || layer) in nats.",
                bend="root",
            )
            for one in sorted(_shown(record), key=lambda one: one is not nearest(record))
        ],
    )
    names = [_NAMES[one["kind"]][0] for one in lenses]
    head = ("layer", *(f"{name}: {what}" for name in names for what in ("top", "KL", "loss")))
    errors = {} if fit is None else fit["error"]
    head = (*head, "error of J") if errors else head
    rows = []
    for n in layers:
        cells: list[str] = []
        for one in lenses:
            row = one["agreement"][one["layers"].index(n)]
            cells += [
                f"{row['top']:.2f}",
                format_number(row["kl"], 3),
                format_number(row["loss"], 3),
            ]
        if errors:
            error = errors.get(n)
            cells.append("" if error is None else f"{error:.0%}")
        rows.append((str(n), *cells))
    caption = (
        "Means over all tokens but the first. Top: share with the model's own word on top; KL and "
        "loss in nats"
    )
    numbers = table(head, rows, caption=caption)
    about = (
        "Every layer against the model's own law. Low layers often hold little more than the "
        "average word, whatever the lens."
    )
    figure = picture(
        "kl", "Distance from the model's own law", about, numbers, width="whole", open_=True
    )
    return Section(anchor="agreement", title="Agreement", body=figure, pictures={"kl": kl})


def _method(record: Mapping[str, Any]) -> Section:
    about = (
        "A Jacobian lens is the derivative of the stream after the last layer in that after layer "
        "l, summed over later positions (or at the position itself, with targets same), averaged "
        "over positions and texts, by exact reverse products. Its error is the spread over texts "
        "divided by the root of their number. Laws are read through the model's own last norm and "
        "LM head."
    )
    fit = record["fit"]
    tables: dict[str, Mapping[str, Any]] = {"subject": record["subject"]}
    if fit is not None:
        spread = {f"layer {n}": format_number(x, 3) for n, x in fit["spread_positions"].items()}
        stated = {name: fit[name] for name in ("about", "texts", "positions", "skip", "targets")}
        tables |= {"fit": stated, "spread over positions, of |J|": spread}
    return method_section("Method", about, tables)
