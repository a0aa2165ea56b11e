"""Certificates of attention layers to a page, and to a section of an inspection's page.

Certification         -> parts -> one document
DecisionCertification -> parts -> one document
SubstitutionCertification -> parts -> one document
"""

import math
from collections.abc import Sequence
from statistics import median
from typing import Any

from fenchel.inspection_result import (
    Certificates,
    Certification,
    DecisionCertification,
    LayerCertificate,
    SubstitutionCertification,
)
from fenchel.report.heat_map import heat_values, span_edges, span_sums, token_map
from fenchel.report.html import (
    Html,
    Section,
    clean,
    element,
    format_bound,
    format_number,
    join,
    json_numbers,
    method_section,
    notes,
    picture,
    pluralise,
    shorten,
    subject_page,
    table,
)
from fenchel.report.measures import (
    CERTIFICATE,
    DECISION,
    HEAD_CERTIFICATE,
    SUBSTITUTION,
    measures_table,
    top_tokens,
)

_LEVELS = {
    "attention": ("attention layer", "attention with its output projection"),
    "block": ("block", "the block, with its norm layers, MLP and residual branches"),
}
_COLUMNS = 64  # spans of tokens in a picture
_TOP = 3  # tokens of a witness in the table


def render(result: Certification) -> str:
    """The whole page as text."""
    of_layer, _ = _LEVELS[result.certificates.level]
    sentence = (
        f"{result.subject['family']}: {of_layer}s certified over a ball of radius "
        f"{result.certificates.radius:g} about the first "
        f"{pluralise(len(result.tokens), 'token')} of {shorten(clean(result.text), 80)}."
    )
    sections = [certificates(result.certificates, result.tokens), _method(result)]
    return subject_page("certificates", "certified", result.subject, sentence, sections)


def certificates(data: Certificates, tokens: Sequence[str]) -> Section:
    """The section with the certificates of every layer."""
    layers = [layer for layer in data.layers if layer.refused is None]
    refused = [layer.refused for layer in data.layers if layer.refused is not None]
    ball = (
        "no token moves by more than the radius"
        if data.norm == "token"
        else "all tokens together, as one vector, move by at most the radius"
    )
    of_layer, function = _LEVELS[data.level]
    about = (
        f"Over the ball of radius {data.radius:g} about the input of each "
        f"{of_layer}, in which {ball}: the spectral norm of the Jacobian of {function}. Lower is "
        "attained at a point of the ball, the witness. Upper is exceeded nowhere in it, so two "
        "inputs in the ball have outputs at most upper times as far apart as the inputs are."
    )
    body: list[Html] = [
        element("p", _verdict(data, of_layer), class_="verdict"),
        element("p", about, class_="about"),
    ]
    pictures: dict[str, Any] = {}
    if refused:
        body.append(notes(refused))
    if layers:
        edges = span_edges(len(tokens), _COLUMNS)
        pictures = {
            "certificates": _ends_picture(layers),
            "witnesses": token_map(
                [f"layer {layer.layer}" for layer in layers],
                tokens,
                edges,
                [heat_values("moved", [span_sums(layer.moved, edges) for layer in layers])],
            ),
        }
        moves = (
            "The share of each token in the squared distance from the text's own input to the "
            "witness: the tokens whose change makes it most sensitive."
        )
        ends = (
            "The bar runs from lower, attained in the ball, to upper, exceeded nowhere in it; the "
            "dot is the text itself."
        )
        length = "token length is the mean length of an input token"
        numbers = measures_table(CERTIFICATE, layers, caption=length)
        figures = (
            picture("certificates", "Both sides", ends, numbers, width="whole", open_=True),
            picture("witnesses", "Witnesses", moves, _witnesses(layers, tokens), width="whole"),
        )
        body.append(element("div", *figures, class_="charts"))
    heads = [(layer.layer, head) for layer in layers for head in layer.heads]
    if heads:
        alone = "every head alone, with its own rows of the output projection"
        body.append(measures_table(HEAD_CERTIFICATE, heads, caption=alone))
    return Section(
        anchor="certificates", title="Certificates", body=join(body, "\n"), pictures=pictures
    )


_MOVES = {
    "all": "all tokens together, as one vector, move by at most the radius",
    "token": "no token moves by more than the radius",
    "one": "only the last token read moves, by at most the radius",
}


def render_decisions(result: DecisionCertification) -> str:
    """The page of certified decisions."""
    sentence = (
        f"{result.subject['family']}: decisions certified at "
        f"{pluralise(len(result.rows), 'position')} of {shorten(clean(result.text), 80)}."
    )
    about = (
        "Certified: no change of the embeddings within this radius changes the decision. The proof "
        "expands the network about the text: exact gradients of all margins, and bounds of every "
        "remainder of norms, scores, softmax, values and MLPs, carried by exactly composed "
        "Jacobians, with their rounding. Attacked: the length of a change that was found and "
        "changes it. Arithmetic is float64; rounding of a forward pass in another dtype is not "
        "covered."
    )
    tables = {
        "subject": result.subject,
        "settings": {"text": result.text, "norm": result.norm, "keep": result.keep},
    }
    method = method_section("How it was computed", about, tables, result.seconds)
    sections = [decisions(result), method]
    return subject_page("decisions", "certified", result.subject, sentence, sections)


def decisions(result: DecisionCertification) -> Section:
    """The section with both radii of every position."""
    ratios = [row.ratio for row in result.rows if row.ratio is not None]
    what = "the next token" if result.keep == 1 else f"the {result.keep} likeliest tokens"
    verdict = "No change of a decision was found."
    if ratios:
        share = format_bound(median(ratios), up=False)
        verdict = f"The certified radius is {share} of the attacked one, in the median."
    if not result.complete:
        left = f"; {result.not_reached}" if result.not_reached else ""
        verdict += f" The time that was given ended the search{left}."
    about = (
        f"How far the embeddings may move before {what} changes, where {_MOVES[result.norm]}. "
        "Certified <= the true radius <= attacked. An embedding has a length of about "
        f"{format_number(result.token_norm, 3)}. Large margins have small ratios: remainders grow "
        "with the square of the radius."
    )
    ends = (
        "The bar runs from certified to attacked; the dot is margin over gradient, no bound, where "
        "that is less than attacked."
    )
    caption = "radii in the units of embeddings; margin in logits"
    table_ = measures_table(DECISION, result.rows, caption=caption)
    body = [
        element("p", verdict, class_="verdict"),
        element("p", about, class_="about"),
        element(
            "div",
            picture("decisions", "Both radii", ends, table_, width="whole", open_=True),
            class_="charts",
        ),
    ]
    return Section(
        anchor="decisions",
        title="Decisions",
        body=join(body, "\n"),
        pictures={"decisions": _radii_picture(result)},
    )


def render_substitutions(result: SubstitutionCertification) -> str:
    """The page of certified substitutions."""
    sentence = (
        f"{result.subject['family']}: substitutions certified at "
        f"{pluralise(len(result.rows), 'position')} of {shorten(clean(result.text), 80)}."
    )
    about = (
        "Texts are read in the order of their substitutions, in float64, as far as the number of "
        "them allows; a count at which all were read is exact, for every position behind the last "
        "substitution at once. Beyond it the margin is bounded by an expansion about the text: the "
        "exact loss of its gradient at the worst substitutions, and remainders. The attack adds "
        "the substitution that leaves the least margin until the decision changes."
    )
    tables = {
        "subject": result.subject,
        "settings": {"text": result.text, "keep": result.keep},
        "may become": {
            shorten(clean(repr(token)), 20): ", ".join(map(repr, others))
            for token, others in result.alternatives.items()
        },
    }
    method = method_section("How it was computed", about, tables, result.seconds)
    sections = [substitutions(result), method]
    return subject_page("decisions", "certified", result.subject, sentence, sections)


def substitutions(result: SubstitutionCertification) -> Section:
    """The section with both counts of every position."""
    what = "the next token" if result.keep == 1 else f"the {result.keep} likeliest tokens"
    met = [row for row in result.rows if row.most]
    safe = sum(row.safe for row in met)
    verdict = (
        f"No allowed substitution changes {what} at {safe} of "
        f"{pluralise(len(met), 'position')} that have any."
    )
    verdict += "" if result.complete else " The time that was given ended the search."
    if result.refused:
        verdict += f" There is no bound beyond the texts that were read: {result.refused}"
    about = (
        f"How many tokens may be substituted at once before {what} changes: no text with at most "
        "certified substitutions changes it, attacked of them were found that do. How: exact, no "
        "larger count holds, by the texts that were read; read, larger ones are open; bound, by a "
        "bound of the margin."
    )
    changes = [
        (str(row.position), ", ".join(f"{m} {a!r} to {b!r}" for m, (a, b) in row.witness.items()))
        for row in result.rows
        if row.witness
    ]
    body = [
        element("p", verdict, class_="verdict"),
        element("p", about, class_="about"),
        measures_table(SUBSTITUTION, result.rows, caption="margin in logits"),
    ]
    if changes:
        caption = "texts that change the decision, by position and token"
        body.append(table(("position", "substitutions"), changes, caption=caption, numeric=False))
    return Section(anchor="decisions", title="Substitutions", body=join(body, "\n"))


def _radii_picture(result: DecisionCertification) -> dict[str, Any]:
    rows = []
    for row in result.rows:
        inside = row.first_order if row.first_order < row.attacked else math.nan
        none = "none found" if row.attempted else "not reached"
        upper = none if row.ratio is None else format_bound(row.attacked, up=True)
        name = f"{row.position} {shorten(clean(repr(row.token)), 14)}"
        texts = (format_bound(row.certified, up=False), upper)
        rows.append(_interval(name, (inside, row.certified, row.attacked), texts))
    return {"view": "intervals", "rows": rows}


def _interval(name: str, numbers: Sequence[float], texts: Sequence[str]) -> dict[str, Any]:
    """A row of a picture: centre, lower and upper end, and both ends in words."""
    centre, lower, upper = json_numbers(numbers)
    return {"name": name, "centre": centre, "lower": lower, "upper": upper, "texts": texts}


def _verdict(data: Certificates, of_layer: str) -> str:
    """How close upper and lower are, and the radius beside the length of a token."""
    bounded = [layer for layer in data.layers if layer.refused is None and layer.ratio is not None]
    if not bounded:
        return f"No {of_layer} has a finite upper bound over this ball."
    count, all_ = len(bounded), len(data.layers)
    ratios = [layer.ratio or 1.0 for layer in bounded]
    ends = (format_bound(end, up=True) for end in (min(ratios), max(ratios)))
    within = " to ".join(dict.fromkeys(ends))
    which = f"All {all_}" if count == all_ else f"{count} of {all_}"
    subject = f"{which} {of_layer}s are" if all_ > 1 else f"The {of_layer} is"
    sentence = f"{subject} certified within {within} times of what is attained."
    lengths = [layer.token_norm for layer in bounded if layer.token_norm]
    if not lengths:
        return sentence
    length = " to ".join(dict.fromkeys(format_number(x, 3) for x in (min(lengths), max(lengths))))
    share = format_number(100 * data.radius * len(lengths) / sum(lengths), 2)
    each = "for each token" if data.norm == "token" else "for all tokens together"
    return (
        f"{sentence} The radius, {data.radius:g} {each}, is {share} % of the mean length of a "
        f"token ({length})."
    )


def _ends_picture(layers: Sequence[LayerCertificate]) -> dict[str, Any]:
    measures = {one.name: one for one in CERTIFICATE}
    rows = []
    for layer in layers:
        ends = [measures[name].number(layer) for name in ("at the text", "lower", "upper")]
        upper = "no bound" if layer.upper is None else measures["upper"].text(layer)
        texts = (measures["lower"].text(layer), upper)
        rows.append(_interval(f"layer {layer.layer}", ends, texts))
    return {"view": "intervals", "rows": rows}


def _witnesses(layers: Sequence[LayerCertificate], tokens: Sequence[str]) -> Html:
    rows = [(str(layer.layer), *top_tokens(layer.moved, tokens, _TOP)) for layer in layers]
    head = ("layer", *(f"moves most, {i + 1}" for i in range(_TOP)))
    return table(head, rows, caption="place: token (share)", numeric=False)


def _method(result: Certification) -> Section:
    data = result.certificates
    failure = sum(layer.failure for layer in data.layers)
    sentence = (
        "Upper ends follow from bounds on scores, weights and covariances over the ball and from "
        "the exact norm at its centre, measured by Golub-Kahan; one of those measurements is too "
        f"small with probability {failure:.1g} at the most, over their random starts. Lower ends "
        "are found by ascent and hold however they were found. Arithmetic is "
        f"{data.dtype}."
    )
    settings = {"text": result.text, "device": result.device, "seed": result.seed}
    settings |= {"radius": data.radius, "norm": data.norm}
    tables = {"subject": result.subject, "settings": settings}
    return method_section("How it was computed", sentence, tables, result.seconds)
