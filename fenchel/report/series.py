"""Columns of the metrics as arrays, thinned to what a screen can show.

A picture has some hundred points across; a run may have a million lines. Two ways to thin:
``extremes`` keeps the first, least, greatest and last value of every span, so that no spike of
a curve is lost; ``evenly`` keeps rows at equal distances for a table a person would read.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fenchel.report.quantities import plain
from fenchel.report.run import Row, Run

Numbers = NDArray[np.float64]

_SPANS = 400
_AXES = {"tokens": "train/tokens", "elapsed": "time/elapsed"}


@dataclass(frozen=True)
class Series:
    """One measured quantity: values (N,) at steps (N,), increasing."""

    steps: Numbers
    values: Numbers

    @property
    def finite(self) -> Numbers:
        """The values that are numbers."""
        return self.values[np.isfinite(self.values)]


def series(run: Run, key: str) -> Series:
    """The column ``key``; rows without it are left out."""
    found = [(row["step"], row[key]) for row in run.rows if isinstance(row.get(key), float)]
    pairs = np.array(found, dtype=np.float64).reshape(-1, 2)
    return Series(pairs[:, 0], pairs[:, 1])


def layered(run: Run, key: str) -> tuple[Numbers, Numbers]:
    """A column with one number a layer: steps (N,), values (N, L); short rows end in NaN."""
    rows: list[tuple[Row, tuple[float, ...]]] = []
    for row in run.rows:
        entry = row.get(key)
        if isinstance(entry, tuple) and entry:
            rows.append((row, entry))
    layers = max((len(entry) for _, entry in rows), default=0)
    values = np.full((len(rows), layers), math.nan)
    for index, (_, entry) in enumerate(rows):
        values[index, : len(entry)] = entry
    return np.array([row["step"] for row, _ in rows], dtype=np.float64), values


def places(run: Run, steps: Numbers) -> dict[str, list[float]]:
    """Where ``steps`` lie on each axis the run knows: step, tokens seen, seconds elapsed.

    Between two lines that tell, it is a straight line; before the first, one from step 0 at 0.
    """
    found = {"step": _exact(steps)}
    for axis, key in _AXES.items():
        known = series(run, key)
        sound = np.isfinite(known.values)
        if sound.any():
            told = np.r_[0.0, known.steps[sound]], np.r_[0.0, known.values[sound]]
            at = np.interp(steps, *told)
            found[axis] = _exact(np.round(at, 3))
    return found


def curve(run: Run, name: str, measured: Series) -> Mapping[str, Any]:
    """A series as ``lineChart`` of viewer.js takes it."""
    kept = extremes(measured.values)
    return {
        "name": name,
        "x": places(run, measured.steps[kept]),
        "y": plain(measured.values[kept]),
    }


def extremes(values: Numbers, spans: int = _SPANS) -> NDArray[np.intp]:
    """Indices of the first, least, greatest and last value, and of a NaN, in each of the spans.

    >>> extremes(np.array([0.0, 5.0, 1.0, -2.0, 0.0, 1.0, 1.0, 1.0, 1.0, 1.0]), spans=2)
    array([0, 1, 3, 4, 5, 9])
    """
    if len(values) <= 4 * spans:
        return np.arange(len(values))
    kept: set[int] = set()
    for span in np.array_split(np.arange(len(values)), spans):
        sound = np.isfinite(values[span])
        finite = span[sound]
        kept.update((int(span[0]), int(span[-1])), span[~sound][:1].tolist())
        if len(finite):
            kept.add(int(finite[np.argmin(values[finite])]))
            kept.add(int(finite[np.argmax(values[finite])]))
    return np.array(sorted(kept))


def evenly(count: int, most: int) -> list[int]:
    """At most ``most`` indices below ``count``, first and last among them.

    >>> evenly(10, 4)
    [0, 3, 6, 9]
    """
    if count <= most:
        return list(range(count))
    return [round(index * (count - 1) / (most - 1)) for index in range(most)]


def rows_of(columns: Sequence[Series], most: int = 40) -> list[list[float | None]]:
    """Rows (step, value of each column or None) for a table, thinned but with every end."""
    steps: set[float] = set()
    for column in columns:
        steps.update(column.steps[evenly(len(column.steps), most)].tolist())
    lookups = [dict(zip(c.steps.tolist(), c.values.tolist(), strict=True)) for c in columns]
    return [[step, *(lookup.get(step) for lookup in lookups)] for step in sorted(steps)]


def _exact(values: Numbers) -> list[float]:
    """Numbers for JSON with all their digits: a step is not rounded."""
    return [int(one) if one == int(one) else one for one in values.tolist()]
