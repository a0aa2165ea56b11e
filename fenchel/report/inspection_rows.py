"""Every row of every head: one number a token that looks, head by head."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fenchel.report.document import Part, picture
from fenchel.report.inspection_blocks import spans, titles
from fenchel.report.markup import Html, table
from fenchel.report.quantities import figure, plain

Data = Mapping[str, Any]
_COLUMNS = 128  # tokens, or spans of them

MEASURES = (
    ("entropy", "entropy", "In nats: 0 looks at one key.", ""),
    ("sensitivity", "row sensitivity", "Exact norm of d weights / d scores of the row.", ""),
    ("max_logit", "largest logit", "The greatest score, by size, that the row could choose.", ""),
    ("margin", "margin", "Best score less the second; a row with one key has none.", "root"),
)
"""Name in the data, name on the page, what it is, and how its colours bend."""


def rows(found: Data) -> Part:
    """The section with one line a head and one column a token."""
    heads, tokens = found["heads"], found["tokens"]
    edges = spans(len(tokens), _COLUMNS)
    data = {
        "view": "heat",
        "rows": [f"{head['layer']}.{head['head']}" for head in heads],
        "columns": [str(first) for first in edges[:-1]],
        "titles": titles(tokens, edges),
        "down": "head",
        "across": "token",
        "measures": [
            {
                "name": name,
                "about": about,
                "bend": bend,
                "own": False,
                "values": [
                    plain(line) for line in means([h["rows"][key] for h in heads], edges).tolist()
                ],
            }
            for key, name, about, bend in MEASURES
        ],
    }
    gathered = "" if len(edges) > len(tokens) else " Long texts are shown by means over spans."
    told = f"A line is a head, layer by layer, a column the token that looks.{gathered}"
    body = picture("rows", "Every row of every head", told, _table(heads), width="whole")
    return Part(anchor="rows", title="Rows", body=body, pictures={"rows": data})


def means(rows: Sequence[Sequence[float | None]], edges: Sequence[int]) -> NDArray[np.float64]:
    """For every row, the mean in every span of what is there, nan where nothing is.

    >>> means([[1.0, 3.0, None, None]], [0, 2, 3, 4])
    array([[ 2., nan, nan]])
    """
    numbers, starts = np.array(rows, dtype=float), list(edges[:-1])
    there = ~np.isnan(numbers)
    count = np.add.reduceat(there.astype(float), starts, axis=1)
    total = np.add.reduceat(np.where(there, numbers, 0.0), starts, axis=1)
    return np.divide(total, count, out=np.full_like(total, np.nan), where=count > 0)


def _table(heads: Sequence[Data]) -> Html:
    ends = ("low", "median", "high")
    head = (
        "head",
        *(f"{name}, {end}" for _, name, _, _ in MEASURES for end in ("5 %", "50 %", "95 %")),
    )
    rows = [
        (
            f"{one['layer']}.{one['head']}",
            *(figure(one[key][end], 3) for key, *_ in MEASURES for end in ends),
        )
        for one in heads
    ]
    return table(head, rows, caption="Quantiles over rows; --json --rows has every row")
