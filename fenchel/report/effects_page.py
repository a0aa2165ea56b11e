"""Pages of ``fenchel ablate`` and ``fenchel patch``: effects of sites as heat maps and tables.

record (plain values of the command) -> sections -> one document
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from fenchel.report.heat_map import heat_map, heat_values, token_map
from fenchel.report.html import (
    Section,
    clean,
    element,
    format_number,
    join,
    method_section,
    number_cards,
    picture,
    shorten,
    subject_page,
    table,
)

_NAMES = {
    "q": "queries",
    "k": "keys",
    "v": "values",
    "head": "outputs of heads",
    "attention": "attention",
    "mlp": "MLP",
    "stream": "stream",
}
_REPLACEMENTS = {"mean": "its mean over the text", "uniform": "an equal mixture of all keys"}
_ROWS = 200  # of the table of effects
_RUNS = 4  # of layers that a sentence names
Effect = Mapping[str, Any]


def render_ablation(record: Mapping[str, Any]) -> str:
    """The page of an ablation as text."""
    sentence = (
        "Which parts of the model this text needs: the change of the loss when one head, "
        f"attention or MLP is replaced by {_REPLACEMENTS.get(record['to'], record['to'])}, on "
        f"{record['tokens']} tokens of {shorten(clean(record['text']), 80)}."
    )
    strongest = record["effects"][0]
    cards = [
        ("Loss of the whole model", format_number(record["loss"]), "nats per token"),
        ("Largest change", f"{value_of(strongest):+.3g}", _short(strongest)),
    ]
    lower = [one for one in record["effects"] if value_of(one) < 0]
    cards.append(("Without them it falls", f"{len(lower)}", f"of {len(record['effects'])} parts"))
    lead = element("p", ablation_finding(record), class_="lead")
    sections = [
        Section(anchor="summary", title="Summary", body=join([lead, number_cards(cards)], "\n")),
        *_grids(record, unit="nats per token", tokens=()),
        _method(record),
    ]
    return subject_page("ablation", "ablated", record["subject"], sentence, sections)


def render_patch(record: Mapping[str, Any]) -> str:
    """The page of a patch between two prompts as text."""
    words = [shorten(clean(word).strip(), 40) for word in record["words"]]
    sentence = (
        f"Where the model carries the difference between two prompts, of which one is followed by "
        f"“{words[0]}” and the other by “{words[1]}”: the corrupt one is read with one query, key, "
        "value or stream of the clean one, and the share of the difference that comes back is 0 to "
        "1."
    )
    cards = [
        ("Clean", format_number(record["clean"]), f"logit of “{words[0]}” less “{words[1]}”"),
        ("Corrupt", format_number(record["corrupt"]), "the same after the other prompt"),
    ]
    lead = element("p", patch_finding(record), class_="lead")
    prompts = [
        element("p", element("strong", f"{label}  "), shorten(clean("".join(tokens)), 2000))
        for label, tokens in (
            ("Clean", record["clean_tokens"]),
            ("Corrupt", record["corrupt_tokens"]),
        )
    ]
    sections = [
        Section(
            anchor="summary",
            title="Summary",
            body=join([*prompts, lead, number_cards(cards)], "\n"),
        ),
        *_grids(record, unit="share", tokens=record["corrupt_tokens"]),
        _method(record),
    ]
    return subject_page("patch", "patched", record["subject"], sentence, sections)


def ablation_finding(record: Mapping[str, Any]) -> str:
    """What an ablation shows, in two or three sentences."""
    ranked = sorted(record["effects"], key=value_of, reverse=True)
    first, last = ranked[0], ranked[-1]
    heads = [one for one in ranked if one["head"] is not None]
    if value_of(first) > 0:
        found = f"The text needs {_short(first)} most: without it the loss of "
        found += f"{record['loss']:.3f} nats per token rises by {value_of(first):.3g}."
    else:
        found = f"No part lowers the loss of {record['loss']:.3f} nats per token."
    if heads and heads[0] is not first and value_of(heads[0]) > 0:
        found += f" Of the heads it needs {_short(heads[0])} most ({value_of(heads[0]):+.3g})."
    below = sum(value_of(one) < 0 for one in ranked)
    if below:
        found += f" Without {below} of the {len(ranked)} parts it falls, by "
        found += f"{-value_of(last):.3g} at most ({_short(last)})."
    return found


def patch_finding(record: Mapping[str, Any]) -> str:
    """What a patch shows: at which token the difference is after each layer, and in which head."""
    effects, tokens = record["effects"], record["corrupt_tokens"]
    streams = [one for one in effects if one["part"] == "stream"]
    runs: list[tuple[Effect, list[Effect]]] = []  # layers in which one token carries the most
    for layer in sorted({one["layer"] for one in streams})[:-1]:  # the last is the answer itself
        best = max((one for one in streams if one["layer"] == layer), key=value_of)
        if not runs or runs[-1][0]["position"] != best["position"]:
            runs.append((best, []))
        runs[-1][1].append(best)
    said = []
    for best, some in runs[:_RUNS]:
        low, high = some[0]["layer"], some[-1]["layer"]
        where = f"layer {low}" if low == high else f"layers {low} to {high}"
        shares = [f"{value_of(one):.2f}" for one in (some[0], some[-1])]
        share = shares[0] if low == high else f"{shares[0]} to {shares[1]}"
        token = shorten(clean(tokens[best["position"]]).strip(), 40)
        said.append(f"after {where} at token {best['position']}, “{token}” ({share})")
    more = "" if len(runs) <= _RUNS else " and so on"
    found = f"The stream that brings back most is {', '.join(said)}{more}." if said else ""
    heads = [one for one in effects if one["head"] is not None]
    if heads:
        best = max(heads, key=value_of)
        found += f" Of single queries, keys and values, {_short(best)} brings back most: "
        found += f"{value_of(best):.2f}."
    return found.strip()


def _short(effect: Effect) -> str:
    """
    >>> _short({"site": "mlp 2"}), _short({"site": "head 1.2"})
    ('MLP 2', 'head 1.2')
    """
    return str(effect["site"]).replace("mlp", "MLP")


def value_of(effect: Effect) -> float:
    """The exact effect, or the estimate of a site that was not run."""
    exact = effect["exact"]
    return float(effect["estimate"] if exact is None else exact)


def site_name(effect: Effect) -> str:
    """
    >>> site_name({"part": "q", "layer": 2, "head": 1, "position": None})
    'layer 2, queries, head 1'
    """
    name = f"layer {effect['layer']}, {_NAMES[effect['part']]}"
    name += "" if effect["head"] is None else f", head {effect['head']}"
    return name if effect["position"] is None else f"{name} at token {effect['position']}"


def _grids(record: Mapping[str, Any], *, unit: str, tokens: Sequence[str]) -> list[Section]:
    """A section per kind of grid: heads, whole branches, tokens of the stream."""
    effects = record["effects"]
    heads = [one for one in effects if one["head"] is not None]
    streams = [one for one in effects if one["position"] is not None]
    rest = [one for one in effects if one["head"] is None and one["position"] is None]
    sections = []
    if streams:
        columns = sorted({one["position"] for one in streams})
        edges = [*columns, columns[-1] + 1]
        rows, measures = _grid(streams, "position", columns, ["stream"])
        data = token_map(rows, tokens, edges, measures)
        about = "The stream after a layer at one token. Tokens before the first difference are "
        about += "left out: they are the same in both passes."
        sections.append(_figure("streams", "Streams", about, data, streams, unit))
    for group in (("q", "head"), ("k", "v")):  # keys and values may have fewer heads
        some = [one for one in heads if one["part"] in group]
        if not some:
            continue
        parts = [part for part in group if any(one["part"] == part for one in some)]
        columns = sorted({one["head"] for one in some})
        rows, measures = _grid(some, "head", columns, parts)
        data = heat_map(rows, [str(n) for n in columns], measures, across="head")
        title = "Heads" if "head" in parts else " and ".join(_NAMES[p] for p in parts).capitalize()
        about = "One row per layer, one column per head."
        sections.append(_figure(parts[0], title, about, data, some, unit))
    if rest:
        parts = list(dict.fromkeys(one["part"] for one in rest))
        layers = sorted({one["layer"] for one in rest})
        at = {(one["part"], one["layer"]): value_of(one) for one in rest}
        values = [[at.get((part, n), math.nan) for n in layers] for part in parts]
        data = heat_map(
            [_NAMES[part] for part in parts],
            [str(n) for n in layers],
            [heat_values(unit, values)],
            across="layer",
        )
        about = "What each layer's attention and MLP add, removed or replaced as a whole."
        sections.append(_figure("branches", "Layers", about, data, rest, unit))
    return sections


def _grid(
    effects: Sequence[Effect], axis: str, columns: Sequence[int], parts: Sequence[str]
) -> tuple[list[str], list[dict[str, Any]]]:
    """The rows of a map, one per layer, and a measure per part."""
    layers = sorted({one["layer"] for one in effects})
    at = {(one["part"], one["layer"], one[axis]): value_of(one) for one in effects}
    measures = [
        heat_values(
            _NAMES[part], [[at.get((part, n, c), math.nan) for c in columns] for n in layers]
        )
        for part in parts
    ]
    return [f"layer {n}" for n in layers], measures


def _figure(
    anchor: str, title: str, about: str, data: Any, effects: Sequence[Effect], unit: str
) -> Section:
    rows = [
        (
            site_name(one),
            "" if one["exact"] is None else format_number(one["exact"]),
            format_number(one["estimate"]),
        )
        for one in effects[:_ROWS]
    ]
    numbers = table(("site", "exact", "estimate"), rows, caption=f"{unit}, the largest first")
    note = "Exact where a pass was run, else the estimate."
    figure = picture(anchor, title, f"{about} {note}", numbers, width="whole")
    return Section(anchor=anchor, title=title, body=figure, pictures={anchor: data})


def _method(record: Mapping[str, Any]) -> Section:
    about = (
        "An estimate is the product of the gradient, from one pass, with the change of what "
        "follows the site; the choice of a changed query, key, value or map is computed anew and "
        "only the layers after it are linearised. An exact effect is a pass of its own."
    )
    agreement = {
        _NAMES[row["part"]]: {
            "sites": row["sites"],
            "run exactly": row["run"],
            "rank correlation": "" if row["spearman"] is None else f"{row['spearman']:.3f}",
            "largest in common": f"{row['shared']:.0%}",
            "mean error of estimates": f"{row['error']:.0%}",
        }
        for row in record["agreement"]
    }
    return method_section("Method", about, {"subject": record["subject"], **agreement})
