"""Sections of an inspection page: measures of every head, and rows of every head."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fenchel.inspection_result import Head, Inspection, Quantiles
from fenchel.report.html import Html, Section, heat_map, heat_values, picture, table
from fenchel.report.inspection_blocks import span_edges, span_titles, span_tokens
from fenchel.report.measures import HEAD, format_value, head_measure, head_name, measures_table

_COLUMNS = 128  # tokens, or spans of tokens


class RowMeasure(NamedTuple):
    """One number per query of a head."""

    key: str
    """Its name in ``Head.rows``, and that of its quantiles in ``Head``."""
    name: str
    about: str
    bend: str = ""
    """Its colour scale; "" is linear."""


ROW_MEASURES = (
    RowMeasure("entropy", "entropy", "In nats; 0 if the query attends to one key only."),
    RowMeasure(
        "sensitivity", "row sensitivity", "Exact spectral norm of d weights / d scores of the row."
    ),
    RowMeasure("max_logit", "largest logit", "The largest absolute score of the row."),
    RowMeasure(
        "margin",
        "margin",
        "Largest score less the second largest; a row with one key has none.",
        "root",
    ),
)


def heads(result: Inspection) -> Section:
    """The section with the grid and the table of all heads."""
    layers = sorted({head.layer for head in result.heads})
    numbers = sorted({head.head for head in result.heads})
    at = {(head.layer, head.head): head for head in result.heads}
    focused = min(result.heads, key=head_measure("entropy").number)
    data = heat_map(
        [f"layer {layer}" for layer in layers],
        [str(number) for number in numbers],
        [
            heat_values(
                measure.name,
                [[measure.number(at[layer, number]) for number in numbers] for layer in layers],
                measure.about,
                bend=measure.bend,
            )
            for measure in HEAD
            if measure.about
        ],
        across="head",
        start=(numbers.index(focused.head), layers.index(focused.layer)),
    )
    caption = (
        "One row per layer, one column per head. Choose a measure, then point at a head or move "
        "with the arrow keys. Spectral norms show the lower end of their bracket; the table has "
        "both ends."
    )
    means = (
        "Means over queries, except for the largest row sensitivity and logit and the median "
        "margin. Sigma is a bracket; bound is a guaranteed upper bound of sigma all"
    )
    numbers_table = measures_table(HEAD, result.heads, caption=means)
    figure = picture("heads", "Every head", caption, numbers_table, width="whole")
    return Section(anchor="heads", title="Heads", body=figure, pictures={"heads": data})


def rows(result: Inspection) -> Section:
    """The section with one line per head and one column per token."""
    heads, tokens = result.heads, result.tokens
    edges = span_edges(len(tokens), _COLUMNS)
    data = heat_map(
        [head_name(head) for head in heads],
        span_tokens(tokens, edges),
        [
            heat_values(
                one.name,
                span_means([head.rows[one.key] for head in heads], edges).tolist(),
                one.about,
                bend=one.bend,
            )
            for one in ROW_MEASURES
        ],
        across="token",
        titles=span_titles(tokens, edges),
        start=_most_focused(result, edges),
    )
    spans = "" if len(edges) > len(tokens) else " Long texts are shown by means over spans."
    caption = f"One row per head, layer by layer, one column per query.{spans}"
    body = picture("rows", "Every query of every head", caption, _row_table(heads), width="whole")
    return Section(anchor="rows", title="Queries", body=body, pictures={"rows": data})


def _most_focused(result: Inspection, edges: Sequence[int]) -> tuple[int, int]:
    """(span, head) of the entropy that is furthest below that of uniform attention."""
    entropies = np.array([head.rows["entropy"] for head in result.heads], dtype=float)
    if result.subject.get("causal", True):  # the first token has one key, the last has all
        entropies = entropies - np.log(np.arange(1, entropies.shape[1] + 1))
    means = span_means(entropies.tolist(), edges)
    head, span = np.unravel_index(np.argmin(np.where(np.isnan(means), np.inf, means)), means.shape)
    return int(span), int(head)


def span_means(rows: Sequence[Sequence[float]], edges: Sequence[int]) -> NDArray[np.float64]:
    """Per row and span the mean of the finite values; nan for none.

    >>> span_means([[1.0, 3.0, np.nan, np.nan]], [0, 2, 3, 4])
    array([[ 2., nan, nan]])
    """
    numbers, starts = np.array(rows, dtype=float), list(edges[:-1])
    valid = np.isfinite(numbers)
    count = np.add.reduceat(valid.astype(float), starts, axis=1)
    total = np.add.reduceat(np.where(valid, numbers, 0.0), starts, axis=1)
    return np.divide(total, count, out=np.full_like(total, np.nan), where=count > 0)


def _row_table(heads: Sequence[Head]) -> Html:
    names = [f"{one.name}, {end}" for one in ROW_MEASURES for end in ("5 %", "50 %", "95 %")]
    rows = []
    for head in heads:
        of_rows: list[Quantiles] = [getattr(head, one.key) for one in ROW_MEASURES]
        ends = (end for x in of_rows for end in (x.low, x.median, x.high))
        rows.append((head_name(head), *map(format_value, ends)))
    caption = "Quantiles over queries; --json --rows has every query"
    return table(("head", *names), rows, caption=caption)
