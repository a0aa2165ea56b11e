"""The files of a run directory as values, and the columns of its metrics as arrays.

    config.toml       all settings
    environment.json  versions, device, commit, start
    metrics.jsonl     one object per line, each with "step"
    summary.json      how the run ended
    sample.json       a generated text and the attention maps of one sentence

**Reading.** A report is also made of a run that was killed, has diverged or is still going on, so
any file may be missing, empty, truncated or invalid. What can be read is returned; what cannot
becomes a sentence in ``troubles`` under the name of its file.

**Result.** ``validation`` and ``baselines`` are bits per byte of held-out text, of the model and of
coders that need no neural network (``fenchel/evaluate/baseline.py``); they do not depend on the
vocabulary.

**Thinning.** A chart is some hundred points wide, and a run may have a million lines. ``extremes``
keeps the first, least, greatest and last value of every span, so that no spike of a curve is lost;
``even_indices`` keeps rows at equal distances for a table.
"""

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fenchel.config import parse_toml
from fenchel.files import is_sealed, is_sealed_line, open_regular, read_sealed_json
from fenchel.report.html import clean, format_number, json_numbers, pluralise, shorten

MetricsRow = Mapping[str, float | tuple[float, ...]]
"""One step: under each name a number or one number per layer, under name/n one number per head of
layer n. "step" is always present."""

CONSEQUENCES = {
    "config.toml": "the settings of this run are unknown",
    "environment.json": "the machine and the versions of this run are unknown",
    "metrics.jsonl": "there are no curves to draw",
    "summary.json": "how this run ended is unknown",
    "sample.json": "there is no sample and no attention map to show",
}
"""The files of a run, and what the report lacks without each."""

_SETTINGS_LIMIT = 2**20
_METRICS_LIMIT = 96 * 2**20
_LINE_LIMIT = 2**20
_LAYERS_LIMIT = 256
_STEP_LIMIT = 2**53  # beyond it a float cannot represent every integer
_HUGE = 1e100  # larger values count as infinite, so that a chart can square and scale the rest


@dataclass(frozen=True, kw_only=True)
class RunData:
    """The contents of a run directory; any of them may be empty."""

    name: str
    """The folder's name."""
    config: Mapping[str, Any]
    """Settings as nested mappings."""
    config_text: str
    """Settings as the text of the file."""
    environment: Mapping[str, Any]
    """Versions, device, commit, start."""
    rows: tuple[MetricsRow, ...]
    """The metrics by increasing step; lines with the same step are merged."""
    summary: Mapping[str, Any]
    """How the run ended."""
    sample: Mapping[str, Any]
    """Generated text and attention maps."""
    troubles: Mapping[str, tuple[str, ...]]
    """File name to sentences about what could not be read."""
    damage: tuple[str, ...] = ()
    """Those of the sentences that no run explains, whether it was finished, stopped or killed."""

    @property
    def last_step(self) -> int | None:
        """The last step in the metrics."""
        return int(number(self.rows[-1]["step"]) or 0) if self.rows else None


def read_run(path: Path, *, strict: bool = False) -> RunData:
    """Everything in the run directory ``path`` that can be read.

    A file that the system fails to read, such as for want of memory, is left out with a sentence;
    with ``strict`` the error is raised, for a run that writes its own page and can do so later.
    """
    if not path.is_dir():
        raise ValueError(f"a run directory was expected, {path} is not a folder; check the name.")
    if not any((path / name).exists() for name in CONSEQUENCES):
        raise ValueError(
            f"{path} holds none of {', '.join(CONSEQUENCES)}; "
            "give the folder that a training run wrote."
        )
    troubles = _Troubles()
    config_text, config = _settings(path / "config.toml", troubles, strict)
    return RunData(
        name=path.resolve().name,
        config=config,
        config_text=config_text,
        environment=_object(path / "environment.json", troubles, strict),
        rows=_metrics(path / "metrics.jsonl", troubles, strict),
        summary=_object(path / "summary.json", troubles, strict),
        sample=_object(path / "sample.json", troubles, strict),
        troubles=troubles,
        damage=tuple(troubles.damage),
    )


class _Troubles(dict[str, tuple[str, ...]]):
    """The ``troubles`` of a run and its ``damage``, while files are read."""

    def __init__(self) -> None:
        super().__init__()
        self.damage: list[str] = []

    def note(self, path: Path, sentence: str, *, damage: bool = False) -> None:
        """Adds a sentence about a file."""
        self[path.name] = (*self.get(path.name, ()), sentence)
        if damage:
            self.damage.append(sentence)


def number(value: Any) -> float | None:
    """A number from JSON, also "nan", "inf" and "-inf"; None for anything else."""
    if isinstance(value, str) and value in ("nan", "inf", "-inf"):
        return float(value)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    if abs(value) >= _HUGE:
        return math.inf if value > 0 else -math.inf
    return float(value)


def mapping(value: Any) -> Mapping[str, Any]:
    """``value`` if it is a mapping, else an empty one."""
    return value if isinstance(value, Mapping) else {}


def _object(path: Path, troubles: _Troubles, strict: bool) -> Mapping[str, Any]:
    if _absent(path, troubles):
        return {}
    try:
        return read_sealed_json(path)
    except (ValueError, OSError) as error:
        if strict and isinstance(error, OSError):
            raise
        sentence = f"{_without_folder(error, path)} So {CONSEQUENCES[path.name]}."
        troubles.note(path, sentence, damage=True)
        return {}


def _settings(path: Path, troubles: _Troubles, strict: bool) -> tuple[str, Mapping[str, Any]]:
    if _absent(path, troubles):
        return "", {}
    text = ""
    try:
        with open_regular(path) as file:
            data = file.read(_SETTINGS_LIMIT)
        text = data.decode("utf-8", errors="replace")
        if is_sealed(data) is False:
            troubles.note(path, f"{path.name} has changed since it was written.", damage=True)
        return text, parse_toml(data)
    except (ValueError, OSError) as error:
        if strict and isinstance(error, OSError):
            raise
        sentence = f"{path.name} is not readable as TOML ({_without_folder(error, path)})."
        shown = f"{sentence} Its text is shown below." if text else sentence
        troubles.note(path, shown, damage=True)
        return text, {}


def _metrics(path: Path, troubles: _Troubles, strict: bool) -> tuple[MetricsRow, ...]:
    if _absent(path, troubles):
        return ()
    rows: dict[int, dict[str, float | tuple[float, ...]]] = {}
    bad: list[int] = []
    truncated = False
    try:
        stride = max(1, math.ceil(path.stat().st_size / _METRICS_LIMIT))
        for position, line in enumerate(_lines(path), 1):
            if position % stride and b'"validation/' not in line:
                continue
            row = _row(line)
            if row is not None:
                step = int(number(row["step"]) or 0)
                while rows and next(reversed(rows)) > step:  # a resumed run replaces later rows
                    rows.popitem()
                rows.setdefault(step, {}).update(row)
            elif line.endswith(b"\n"):
                bad.append(position)
            else:
                truncated = True
    except OSError as error:
        if strict:
            raise
        sentence = f"{path.name} could not be read to its end ({error.strerror})."
        troubles.note(path, sentence, damage=True)
        stride = 1
    if stride > 1:
        troubles.note(path, f"{path.name} is large: one training line in {stride} was read.")
    if truncated:
        troubles.note(path, f"The last line of {path.name} was cut short and is left out.")
    if bad:
        count = pluralise(len(bad), "line")
        first = f"the first is line {bad[0]:,}"
        sentence = f"{count} of {path.name} could not be read, {first}."
        troubles.note(path, sentence, damage=True)
    if not rows:
        consequence = CONSEQUENCES[path.name]
        troubles.note(path, f"{path.name} contains no measurement yet: {consequence}.")
    return tuple(rows.values())


def _lines(path: Path) -> Iterator[bytes]:
    """The lines that are not blank; a line that is too long comes in pieces that do not parse."""
    with BufferedReader(open_regular(path)) as file:
        while line := file.readline(_LINE_LIMIT):
            if line.strip():
                yield line


def _row(line: bytes) -> dict[str, float | tuple[float, ...]] | None:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if is_sealed_line(line) is False:
        return None
    step = number(mapping(value).get("step"))
    if step is None or not 0 <= step <= _STEP_LIMIT:
        return None
    row: dict[str, float | tuple[float, ...]] = {}
    for key, entry in value.items():
        if key == "crc":
            continue
        if isinstance(entry, list):
            row[key] = _numbers(entry)
            # One list per layer, such as one number per head, is stored under name/layer.
            for layer, inner in enumerate(entry[:_LAYERS_LIMIT]):
                if isinstance(inner, list):
                    row[f"{key}/{layer}"] = _numbers(inner)
        elif (one := number(entry)) is not None:
            row[key] = one
    return row | {"step": float(int(step))}


def _numbers(entries: list[Any]) -> tuple[float, ...]:
    numbers = (number(entry) for entry in entries[:_LAYERS_LIMIT])
    return tuple(math.nan if value is None else value for value in numbers)


def _absent(path: Path, troubles: _Troubles) -> bool:
    if path.is_file() and not path.is_symlink() and path.stat().st_size:
        return False
    state = "empty" if path.is_file() else "not a plain file" if path.exists() else "missing"
    if path.is_symlink():
        state = "a link and not followed"
    # A run that was killed may lack any file but its settings, which it writes first.
    damage = path.name == "config.toml" or state not in ("missing", "empty")
    troubles.note(path, f"{path.name} is {state}: {CONSEQUENCES[path.name]}.", damage=damage)
    return True


def _without_folder(error: Exception, path: Path) -> str:
    """The message without the folders above the run, since pages are sent to other people."""
    return str(error).replace(str(path), path.name)


Numbers = NDArray[np.float64]

_SPANS = 400
_AXES = {"tokens": "train/tokens", "elapsed": "time/elapsed"}


@dataclass(frozen=True)
class Series:
    """A column of the metrics: values (N,) at increasing steps (N,)."""

    steps: Numbers
    values: Numbers

    @property
    def finite(self) -> Numbers:
        """The values that are finite."""
        return self.values[np.isfinite(self.values)]


def series(run: RunData, key: str) -> Series:
    """The column ``key``; rows without it are left out."""
    values = [(row["step"], row[key]) for row in run.rows if isinstance(row.get(key), float)]
    pairs = np.array(values, dtype=np.float64).reshape(-1, 2)
    return Series(pairs[:, 0], pairs[:, 1])


def layer_series(run: RunData, key: str) -> tuple[Numbers, Numbers]:
    """A column with one number per layer: steps (N,), values (N, L); short rows end in NaN."""
    rows: list[tuple[MetricsRow, tuple[float, ...]]] = []
    for row in run.rows:
        entry = row.get(key)
        if isinstance(entry, tuple) and entry:
            rows.append((row, entry))
    layers = max((len(entry) for _, entry in rows), default=0)
    values = np.full((len(rows), layers), math.nan)
    for index, (_, entry) in enumerate(rows):
        values[index, : len(entry)] = entry
    return np.array([row["step"] for row, _ in rows], dtype=np.float64), values


def axis_values(run: RunData, steps: Numbers) -> dict[str, list[float]]:
    """``steps`` on every axis that the metrics have: steps, tokens, seconds elapsed.

    Values are interpolated linearly between lines of the metrics, from 0 at step 0.
    """
    axes = {"step": _exact(steps)}
    for axis, key in _AXES.items():
        known = series(run, key)
        sound = np.isfinite(known.values)
        if sound.any():
            nodes = np.r_[0.0, known.steps[sound]], np.r_[0.0, known.values[sound]]
            axes[axis] = _exact(np.round(np.interp(steps, *nodes), 3))
    return axes


def chart_series(run: RunData, name: str, measured: Series) -> Mapping[str, Any]:
    """A series as ``lineChart`` of charts.js takes it."""
    shown = extremes(measured.values)
    return {
        "name": name,
        "x": axis_values(run, measured.steps[shown]),
        "y": json_numbers(measured.values[shown]),
    }


def extremes(values: Numbers, spans: int = _SPANS) -> NDArray[np.intp]:
    """Indices of the first, least, greatest and last value, and of a NaN, in each of the spans.

    >>> extremes(np.array([0.0, 5.0, 1.0, -2.0, 0.0, 1.0, 1.0, 1.0, 1.0, 1.0]), spans=2)
    array([0, 1, 3, 4, 5, 9])
    """
    if len(values) <= 4 * spans:
        return np.arange(len(values))
    indices: set[int] = set()
    for span in np.array_split(np.arange(len(values)), spans):
        sound = np.isfinite(values[span])
        finite = span[sound]
        indices.update((int(span[0]), int(span[-1])), span[~sound][:1].tolist())
        if len(finite):
            indices.add(int(finite[np.argmin(values[finite])]))
            indices.add(int(finite[np.argmax(values[finite])]))
    return np.array(sorted(indices))


def even_indices(count: int, most: int) -> list[int]:
    """At most ``most`` indices below ``count``, with the first and the last.

    >>> even_indices(10, 4)
    [0, 3, 6, 9]
    """
    if count <= most:
        return list(range(count))
    return [round(index * (count - 1) / (most - 1)) for index in range(most)]


def table_rows(columns: Sequence[Series], most: int = 40) -> list[list[float | None]]:
    """Rows (step, value per column or None) for a table, thinned; the ends of columns are kept."""
    steps: set[float] = set()
    for column in columns:
        steps.update(column.steps[even_indices(len(column.steps), most)].tolist())
    lookups = [dict(zip(c.steps.tolist(), c.values.tolist(), strict=True)) for c in columns]
    return [[step, *(lookup.get(step) for lookup in lookups)] for step in sorted(steps)]


def _exact(values: Numbers) -> list[float]:
    """Numbers for JSON with all their digits, integers without a fraction."""
    return [int(one) if one == int(one) else one for one in values.tolist()]


_COMPRESSORS = {"bzip2": "bzip2 -9", "gzip": "gzip -9", "xz": "xz -9"}
_BASELINES = 12
_BITS = 64.0  # per byte; a larger value is not plausible
_MEASURES = ("loss", "perplexity", "bits_per_byte", "accuracy")


def validation(run: RunData) -> tuple[Mapping[str, float], str]:
    """The evaluation of the summary, else the last one of the metrics, and which step it is of."""
    stated = mapping(run.summary.get("validation"))
    if measures := finite_numbers({name: stated.get(name) for name in _MEASURES}):
        tokens = number(stated.get("tokens"))
        part = "all" if number(run.summary.get("validation_limit")) is None else "the first"
        return measures, "" if tokens is None else f", {part} {format_number(tokens)} tokens of it"
    for row in reversed(run.rows):
        if measures := finite_numbers({name: row.get(f"validation/{name}") for name in _MEASURES}):
            return measures, f", at the last evaluation, step {format_number(number(row['step']))}"
    return {}, ""


def baselines(summary: Mapping[str, Any]) -> list[tuple[str, float]]:
    """(name, bits per byte) of every baseline with a plausible value."""
    stated = finite_numbers(mapping(summary.get("baselines")))
    sound = [(baseline_name(key), value) for key, value in stated.items() if 0 < value < _BITS]
    return sound[:_BASELINES]


def baseline_name(key: str) -> str:
    """The name of a baseline on the page.

    >>> baseline_name("ngram5"), baseline_name("bzip2"), baseline_name("other")
    ('5-gram', 'bzip2 -9', 'other')
    """
    if match := re.fullmatch(r"ngram([0-9]{1,2})", key):
        return f"{match[1]}-gram"
    return _COMPRESSORS.get(key, shorten(clean(key), 14))


def finite_numbers(values: Mapping[str, Any]) -> dict[str, float]:
    """Those of ``values`` that are finite numbers."""
    numbers = ((str(key), number(value)) for key, value in values.items())
    return {key: x for key, x in numbers if x is not None and math.isfinite(x)}


def evaluated_part(run: RunData) -> str:
    """Which part of the validation text the curves are of, if it is not all of it.

    The evaluations while training read the first tokens only, so that their last one differs from
    the result, which reads more of them.
    """
    limit = number(mapping(run.config.get("train")).get("evaluate_tokens"))
    whole = number(mapping(run.summary.get("text")).get("validation_tokens"))
    if limit is None or whole is None or whole - 1 <= limit:  # the first token is not predicted
        return ""
    last = number(run.summary.get("validation_limit"))
    result = "all of them" if last is None else f"the first {format_number(last)}"
    return (
        f"Held-out text while training: its first {format_number(limit)} tokens of "
        f"{format_number(whole)}. The result above is of {result}, so the numbers differ."
    )
