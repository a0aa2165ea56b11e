"""A run directory: all that is known of one training run, in files a person can read.

    config.toml        the settings, complete, with the format's version
    environment.json   versions, device, threads, commit
    tokenizer.json     text to ids and back
    metrics.jsonl      one line a log: {"step": 12, "train/loss": 3.41, ...}
    checkpoints/       see fenchel/train/checkpoint.py
    summary.json       how the run stands: status, last numbers
    sample.json        a generated sample and attention maps, when training has ended
    report.html        the page made of all this

Keys of metrics that start with "time/" tell how long things took and differ between two runs
of the same settings; all others are the same bits.
"""

import json
import math
import os
import shutil
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fenchel.config import to_toml
from fenchel.files import Damaged, write_atomic

FORMAT = 1


class RunDir:
    """The writing side; fenchel.report reads the same files without torch."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.checkpoints = path / "checkpoints"
        self.metrics = path / "metrics.jsonl"

    def create(self) -> bool:
        """Make the folder, and tell whether it was new; one that holds a run is refused."""
        if (self.path / "config.toml").exists():
            raise ValueError(
                f"{self.path} holds a run already; continue it with --resume {self.path} "
                "or choose another folder."
            )
        if self.path.exists() and not self.path.is_dir():
            raise ValueError(f"{self.path} is a file; choose another folder.")
        try:
            self.path.mkdir(parents=True)
            new = True
        except FileExistsError:
            new = False
        self.checkpoints.mkdir(exist_ok=True)
        return new

    def abandon(self) -> None:
        """Remove a folder that was new and whose run never began."""
        if not (self.path / "config.toml").exists():
            shutil.rmtree(self.path, ignore_errors=True)

    def write_settings(self, settings: Mapping[str, Any]) -> None:
        """Keep the settings, complete."""
        text = f"# written by fenchel\nformat = {FORMAT}\n{to_toml(settings)}"
        write_atomic(self.path / "config.toml", text)

    def read_settings(self) -> dict[str, Any]:
        """The settings as they were kept."""
        path = self.path / "config.toml"
        if not path.is_file():
            raise ValueError(f"{self.path} is not a run directory: it has no config.toml.")
        try:
            settings = tomllib.loads(path.read_text(encoding="utf-8"))
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise Damaged(f"{path} cannot be read ({error}).") from None
        version = settings.pop("format", None)
        if not isinstance(version, int) or version > FORMAT:
            raise ValueError(
                f"{self.path} has format {version}, this fenchel reads up to {FORMAT}; "
                "use the newer fenchel that wrote it."
            )
        return settings

    def write_json(self, name: str, value: Mapping[str, Any]) -> None:
        """Replace one of the JSON files."""
        write_atomic(self.path / name, json.dumps(_plain(value), indent=1) + "\n")

    def log(self, line: Mapping[str, Any]) -> None:
        """Append one line of metrics."""
        with self.metrics.open("a", encoding="utf-8") as file:
            file.write(json.dumps(_plain(line)) + "\n")

    def position(self) -> int:
        """How many bytes of metrics there are."""
        return self.metrics.stat().st_size if self.metrics.exists() else 0

    def rewind(self, position: int) -> str | None:
        """Forget metrics past ``position``; a sentence when some before it are lost."""
        there = self.position()
        if there > position:
            os.truncate(self.metrics, position)
        elif there < position:
            return (
                f"{self.metrics} has lost {position - there} bytes since the checkpoint; "
                "the run goes on, its early metrics are gone."
            )
        return None


def _plain(value: Any) -> Any:
    """JSON has no nan and no inf: they are written as words."""
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value
