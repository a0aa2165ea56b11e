"""What a run directory holds, read by somebody who trusts none of it.

A report must also come out of a run that was killed, has diverged or still goes on, so a
file may be missing, empty, cut in the middle of a line or full of nonsense. What can be read
is kept; what cannot be becomes a sentence in ``troubles``, under the name of its file.

config.toml       all settings
environment.json  versions, device, commit, start
metrics.jsonl     one object a line, each with "step"
summary.json      how it ended
sample.json       a generated text and the attention maps of one sentence
"""

import json
import math
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fenchel.files import read_json
from fenchel.report.quantities import many

Row = Mapping[str, float | tuple[float, ...]]
"""One step: a number, or one a layer, under each name, or one a head of layer n under name/n;
"step" is always there."""

LOST = {
    "config.toml": "the settings of this run are not known",
    "environment.json": "the machine and the versions of this run are not known",
    "metrics.jsonl": "there are no curves to draw",
    "summary.json": "how this run ended is not known",
    "sample.json": "there is no sample and no attention map to show",
}
"""The files of a run, and what a reader loses without each."""

_SETTINGS_LIMIT = 2**20
_METRICS_LIMIT = 96 * 2**20
_LINE_LIMIT = 2**20
_LAYERS_LIMIT = 256
_STEP_LIMIT = 2**53  # above it a float no longer tells neighbours apart
_HUGE = 1e100  # no measurement; its square and its neighbours must stay finite in a drawing


@dataclass(frozen=True, kw_only=True)
class Run:
    """A run directory in memory; every part may be empty."""

    name: str
    """The folder's name."""
    config: Mapping[str, Any]
    """Settings as nested mappings."""
    config_text: str
    """Settings as they stand in the file."""
    environment: Mapping[str, Any]
    """Versions, device, commit, start."""
    rows: tuple[Row, ...]
    """The metrics by increasing step; lines of one step are joined."""
    summary: Mapping[str, Any]
    """How it ended."""
    sample: Mapping[str, Any]
    """Generated text and attention maps."""
    troubles: Mapping[str, tuple[str, ...]]
    """File name to sentences that say what could not be read."""

    @property
    def last_step(self) -> int | None:
        """The last step that the metrics tell of."""
        return int(number(self.rows[-1]["step"]) or 0) if self.rows else None


def read(path: Path) -> Run:
    """Everything in the run directory ``path`` that can be read."""
    if not path.is_dir():
        raise ValueError(f"a run directory was expected, {path} is not a folder; check the name.")
    if not any((path / name).exists() for name in LOST):
        raise ValueError(
            f"{path} holds none of {', '.join(LOST)}; give the folder that a training run wrote."
        )
    troubles: dict[str, tuple[str, ...]] = {}
    config_text, config = _settings(path / "config.toml", troubles)
    return Run(
        name=path.resolve().name,
        config=config,
        config_text=config_text,
        environment=_object(path / "environment.json", troubles),
        rows=_metrics(path / "metrics.jsonl", troubles),
        summary=_object(path / "summary.json", troubles),
        sample=_object(path / "sample.json", troubles),
        troubles=troubles,
    )


def number(value: Any) -> float | None:
    """A number as JSON may hold it, "nan" and "inf" included; None for anything else."""
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


def _object(path: Path, troubles: dict[str, tuple[str, ...]]) -> Mapping[str, Any]:
    if _absent(path, troubles):
        return {}
    try:
        return read_json(path)
    except (ValueError, OSError) as error:
        _note(troubles, path, f"{_without_folder(error, path)} So {LOST[path.name]}.")
        return {}


def _settings(path: Path, troubles: dict[str, tuple[str, ...]]) -> tuple[str, Mapping[str, Any]]:
    if _absent(path, troubles):
        return "", {}
    text = ""
    try:
        with path.open("rb") as file:
            text = file.read(_SETTINGS_LIMIT).decode("utf-8", errors="replace")
        return text, tomllib.loads(text)
    except (ValueError, OSError, RecursionError) as error:
        sentence = f"{path.name} is not readable as TOML ({_without_folder(error, path)})."
        _note(troubles, path, f"{sentence} Its text stands below as it is." if text else sentence)
        return text, {}


def _metrics(path: Path, troubles: dict[str, tuple[str, ...]]) -> tuple[Row, ...]:
    if _absent(path, troubles):
        return ()
    rows: dict[int, dict[str, float | tuple[float, ...]]] = {}
    bad: list[int] = []
    cut = False
    try:
        stride = max(1, math.ceil(path.stat().st_size / _METRICS_LIMIT))
        for position, line in enumerate(_lines(path), 1):
            if position % stride and b'"validation/' not in line:
                continue
            row = _row(line)
            if row is not None:
                _join(rows, row)
            elif line.endswith(b"\n"):
                bad.append(position)
            else:
                cut = True
    except OSError as error:
        _note(troubles, path, f"{path.name} could not be read to its end ({error.strerror}).")
        stride = 1
    if stride > 1:
        _note(troubles, path, f"{path.name} is large: one training line in {stride} was read.")
    if cut:
        _note(troubles, path, f"The last line of {path.name} was cut short and is left out.")
    if bad:
        told = f"{many(len(bad), 'line')} of {path.name} could not be read"
        _note(troubles, path, f"{told}, the first is line {bad[0]:,}.")
    if not rows:
        _note(troubles, path, f"{path.name} holds no measurement yet: {LOST[path.name]}.")
    return tuple(rows.values())


def _lines(path: Path) -> Iterator[bytes]:
    """The lines that are not blank; one without end comes in pieces that will not parse."""
    with path.open("rb") as file:
        while line := file.readline(_LINE_LIMIT):
            if line.strip():
                yield line


def _row(line: bytes) -> dict[str, float | tuple[float, ...]] | None:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return None
    step = number(mapping(value).get("step"))
    if step is None or not 0 <= step <= _STEP_LIMIT:
        return None
    row: dict[str, float | tuple[float, ...]] = {}
    for key, entry in value.items():
        if isinstance(entry, list):
            row[key] = _numbers(entry)
            # One list a layer, such as a number a head: each under the number of its layer.
            for layer, inner in enumerate(entry[:_LAYERS_LIMIT]):
                if isinstance(inner, list):
                    row[f"{key}/{layer}"] = _numbers(inner)
        elif (one := number(entry)) is not None:
            row[key] = one
    return row | {"step": float(int(step))}


def _numbers(entries: list[Any]) -> tuple[float, ...]:
    found = (number(one) for one in entries[:_LAYERS_LIMIT])
    return tuple(math.nan if one is None else one for one in found)


def _join(
    rows: dict[int, dict[str, float | tuple[float, ...]]],
    row: dict[str, float | tuple[float, ...]],
) -> None:
    """Add a line; one that goes back in time is a resumed run, which replaces what came after."""
    step = int(number(row["step"]) or 0)
    while rows and next(reversed(rows)) > step:
        rows.popitem()
    rows.setdefault(step, {}).update(row)


def _absent(path: Path, troubles: dict[str, tuple[str, ...]]) -> bool:
    if path.is_file() and not path.is_symlink() and path.stat().st_size:
        return False
    state = "empty" if path.is_file() else "not a plain file" if path.exists() else "missing"
    if path.is_symlink():
        state = "a link and not followed"
    _note(troubles, path, f"{path.name} is {state}: {LOST[path.name]}.")
    return True


def _note(troubles: dict[str, tuple[str, ...]], path: Path, sentence: str) -> None:
    troubles[path.name] = (*troubles.get(path.name, ()), sentence)


def _without_folder(error: Exception, path: Path) -> str:
    """The message without the folders above the run: a page is sent to other people."""
    return str(error).replace(str(path), path.name)
