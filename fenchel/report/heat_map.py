"""The data of heat maps (heat_map.js), whose columns may be spans of tokens.

A chart has room for some hundred columns, and a text may have more tokens. ``span_edges`` divides
them into equal spans; a column is then a span, with the sum or the mean of what its tokens have.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fenchel.report.html import clean, json_numbers, shorten

_TOKEN = 14  # characters of a token below a chart


def heat_map(
    rows: Sequence[str],
    columns: Sequence[str],
    measures: Iterable[Mapping[str, Any]],
    *,
    across: str,
    down: str = "",
    titles: Sequence[str] | None = None,
    start: tuple[int, int] | None = None,
) -> dict[str, Any]:
    """The data of a heat map (heat_map.js), which shows one of its measures (``heat_values``).

    ``down`` and ``across`` are what the rows and columns are; ``titles`` are longer names of
    columns that are tokens. ``start`` is the (column, row) that is read out first: that of the
    largest value when left out.
    """
    shown = list(measures)
    cells = [
        (math.inf if value is None else value, column, row)
        for row, line in enumerate(shown[0]["values"])
        for column, value in enumerate(line)
    ]
    longer = {} if titles is None else {"titles": titles}
    first = start or max(cells, key=lambda cell: cell[0], default=(0.0, 0, 0))[1:]
    named = {"view": "heat", "rows": rows, "columns": columns, "start": first, **longer}
    return {**named, "down": down, "across": across, "measures": shown}


def heat_values(
    name: str,
    values: Iterable[Iterable[float]],
    about: str = "",
    *,
    bend: str = "",
    own: bool = False,
) -> dict[str, Any]:
    """One measure of a heat map; ``own`` gives every row its own colour scale."""
    numbers = [json_numbers(row) for row in values]
    return {"name": name, "about": about, "bend": bend, "own": own, "values": numbers}


def token_map(
    rows: Sequence[str],
    tokens: Sequence[str],
    edges: Sequence[int],
    measures: Iterable[Mapping[str, Any]],
    *,
    down: str = "",
    start: tuple[int, int] | None = None,
) -> dict[str, Any]:
    """``heat_map`` with a column per span of tokens.

    >>> token_map(["a"], ["x", " y", "z"], [0, 1, 3], [heat_values("n", [[1.0, 2.0]])])["titles"]
    ['0 “x”', '1 “ y …”']
    """
    titles = [
        f"{first} “{shorten(clean(tokens[first]), 20)}{'' if end - first == 1 else ' …'}”"
        for first, end in pairwise(edges)
    ]
    names = [shorten(clean(tokens[first]), _TOKEN) for first in edges[:-1]]
    return heat_map(rows, names, measures, down=down, across="token", titles=titles, start=start)


def span_edges(count: int, most: int) -> list[int]:
    """Edges of at most ``most`` equal spans of ``count`` items.

    >>> span_edges(5, 8), span_edges(10, 4)
    ([0, 1, 2, 3, 4, 5], [0, 2, 5, 8, 10])
    """
    parts = min(count, most)
    return [round(i * count / parts) for i in range(parts + 1)]


def span_sums(shares: Sequence[float], edges: Sequence[int]) -> list[float]:
    """The sum of the shares in every span.

    >>> span_sums([0.5, 0.25, 0.25], [0, 1, 3])
    [0.5, 0.5]
    """
    total = np.concatenate([[0.0], np.cumsum(np.asarray(shares, dtype=float))])
    sums: list[float] = (total[list(edges[1:])] - total[list(edges[:-1])]).tolist()
    return sums


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
