"""The runs below a directory, one row each, without reading their weights.

    directory -> paths of runs and of checkpoints -> RunRow of each run

A row says how the run stands:

    finished   the summary says so
    running    a process holds the lock of the run
    stopped    neither: it was interrupted or killed, and can be resumed
    diverged   the loss or the gradient was no longer finite
    damaged    a file differs from what was written, or is none that a run writes

What a row says of damage is about the files that it is made of; ``fenchel doctor`` checks every
byte of a run. Nothing is written, links are not followed.
"""

import math
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fenchel.files import CHECKPOINTS, LOCK, describe, is_locked
from fenchel.report.comparison import run_result
from fenchel.report.html import clean, shorten
from fenchel.report.run_data import CONSEQUENCES, RunData, mapping, number, read_run, series

DEPTH = 5
"""Folders below folders that are searched."""
MOST = 20_000
"""The most folders that are looked into."""
_SENTENCE = 300  # characters of what a file of a run says
_CONFIGS = ("config.json", "adapter_config.json")
_WEIGHTS = (".safetensors", ".safetensors.index.json")


class Found(NamedTuple):
    """Directories below a folder, each by its path."""

    runs: list[Path]
    checkpoints: list[Path]
    """Hugging Face directories, and those of adapters."""
    complete: bool
    """Whether every folder was looked into."""


@dataclass(frozen=True, kw_only=True)
class RunRow:
    """A run in a table; what is not known is None."""

    path: str
    state: str
    note: str = ""
    """What is damaged, or why the run ended."""
    time: str | None = None
    """When it began, or was resumed last."""
    text: str | None = None
    optimiser: str | None = None
    parameters: float | None = None
    step: float | None = None
    """Steps that are saved."""
    steps: float | None = None
    """Steps of the whole run."""
    loss: float | None = None
    bits_per_byte: float | None = None
    tokens_per_second: float | None = None
    """The median over the lines of the metrics."""

    def plain(self) -> dict[str, Any]:
        """As plain values, for JSON."""
        return asdict(self)


_NAMES = (
    *("time", "name", "state", "optimiser", "parameters", "steps"),
    *("bits_per_byte", "loss", "tokens_per_second"),
)
ORDERS = {name: {"name": "path", "steps": "step"}.get(name, name) for name in _NAMES}
"""What rows can be sorted by, and the field of each."""
_LARGEST_FIRST = {"time", "parameters", "steps", "tokens_per_second"}


def find(root: Path) -> Found:
    """The runs and the checkpoints in ``root`` and below, in order of their paths."""
    if not root.is_dir():
        raise ValueError(f"there is no folder {root} to look for runs in.")
    runs: list[Path] = []
    checkpoints: list[Path] = []
    for looked, (folder, names) in enumerate(_folders(root)):
        if looked == MOST:
            return Found(runs, checkpoints, complete=False)
        if _is_run(folder, names):
            runs.append(folder)
        elif not names.isdisjoint(_CONFIGS) and any(name.endswith(_WEIGHTS) for name in names):
            checkpoints.append(folder)
    return Found(runs, checkpoints, complete=True)


def _folders(root: Path) -> Iterator[tuple[Path, set[str]]]:
    """Folders with the names in them; hidden ones and those inside of runs are left out."""
    for place, folders, files in os.walk(root):
        path, names = Path(place), {*folders, *files}
        yield path, names
        deep = len(path.relative_to(root).parts) >= DEPTH
        inside = () if deep or _is_run(path, names) else folders
        folders[:] = sorted(name for name in inside if not name.startswith("."))


def _is_run(folder: Path, names: set[str]) -> bool:
    if LOCK in names and (folder / LOCK).is_file():
        return True
    return CHECKPOINTS in names and not names.isdisjoint(CONSEQUENCES)


def run_row(path: Path, root: Path) -> RunRow:
    """The row of the run in ``path``, named by its path below ``root``."""
    name = clean(str(path.relative_to(root)) if path != root else str(path))
    try:
        run = read_run(path)
    except ValueError:  # none of its files has been written
        locked = is_locked(path)
        note = "" if locked else "It was stopped before it began to train."
        return RunRow(path=name, state="running" if locked else "stopped", note=note)
    except OSError as error:
        return RunRow(path=name, state="damaged", note=describe(error))
    result = run_result(run)
    rates = series(run, "time/tokens_per_second").finite
    train, optim = (mapping(run.config.get(section)) for section in ("train", "optim"))
    text = _word(mapping(run.summary.get("text")).get("text_name"))
    steps = number(run.summary.get("steps")) or number(train.get("steps"))
    return RunRow(
        path=name,
        state=_state(run, path),
        note=shorten(" ".join(run.damage) or _word(run.summary.get("reason")) or "", _SENTENCE),
        time=_word(run.environment.get("time")),
        text=text or _word(mapping(run.config.get("text")).get("source")),
        optimiser=_word(optim.get("optimiser")),
        parameters=result.get("parameters"),
        step=result.get("steps", run.last_step),
        steps=steps if steps is not None and math.isfinite(steps) else None,
        loss=result.get("loss"),
        bits_per_byte=result.get("bits_per_byte"),
        tokens_per_second=float(np.median(rates)) if len(rates) else None,
    )


def _state(run: RunData, path: Path) -> str:
    status = run.summary.get("status")
    if run.damage:
        return "damaged"
    if status in ("finished", "diverged"):
        return str(status)
    return "running" if is_locked(path) else "stopped"


def _word(value: Any) -> str | None:
    return shorten(clean(value), _SENTENCE) if isinstance(value, str) and value else None


def in_order(rows: list[RunRow], by: str) -> list[RunRow]:
    """Sorted by one of ``ORDERS``, the newest, largest or best first; unknown values last."""
    key = attrgetter(ORDERS[by])
    known = [row for row in rows if key(row) is not None and key(row) == key(row)]
    unknown = [row for row in rows if key(row) is None or key(row) != key(row)]
    return sorted(known, key=key, reverse=by in _LARGEST_FIRST) + unknown
