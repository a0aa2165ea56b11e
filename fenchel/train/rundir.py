"""A run directory: everything about one training run, in files a person can read.

    config.toml        the settings, complete, with the format's version
    environment.json   versions, device, threads, commit
    text.json          which text it reads, with its hash; the token files are in tokens/
    tokenizer.json     text to ids and back
    metrics.jsonl      one line per log: {"step": 12, "train/loss": 3.41, ...}
    checkpoints/       see fenchel/checkpoints/run_checkpoint.py
    tensorboard/       the same metrics as events, with train.log
    summary.json       status and last numbers
    sample.json        a generated sample and attention maps, when training has ended
    report.html        the page made from these files
    run.lock           held by the one process that writes here

A folder is a run once it has config.toml. Metrics whose names start with "time/" are durations and
differ between two runs of the same settings; all others are the same bits.
"""

import errno
import json
import math
import os
import shutil
import tomllib
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any

from fenchel.checkpoints.run_checkpoint import CHECKPOINTS, FORMAT, require_format
from fenchel.config import to_toml
from fenchel.files import LOCK, Damaged, NoSpace, full_disk_as_no_space, sync, write_atomic


class RunDir:
    """The writing side; fenchel.report reads the same files without torch."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.checkpoints = path / CHECKPOINTS
        self.metrics = path / "metrics.jsonl"
        self._unwritten = b""

    def create(self) -> bool:
        """Make the folder, refused if it holds anything; return whether it was new."""
        self.require_free()
        try:
            self.path.mkdir(parents=True)
            new = True
        except FileExistsError:
            new = False
        self.checkpoints.mkdir(exist_ok=True)
        return new

    def abandon(self) -> None:
        """Remove the folder of a run that never began."""
        if not (self.path / "config.toml").exists():
            shutil.rmtree(self.path, ignore_errors=True)

    def require_free(self) -> None:
        """Refuse a folder that holds a run or any file that an interrupted start does not leave."""
        if not self.path.exists():
            return
        if not self.path.is_dir():
            raise ValueError(f"{self.path} is a file; choose another folder.")
        names = {file.name for file in self.path.iterdir()} - {self.checkpoints.name}
        if "config.toml" in names or any(self.checkpoints.glob("*")):
            raise ValueError(
                f"{self.path} holds a run already; continue it with --resume {self.path} "
                "or choose another folder."
            )
        if names and LOCK not in names:
            raise ValueError(f"{self.path} holds other files ({min(names)}); choose a new folder.")

    def write_settings(
        self, settings: Mapping[str, Any], comments: Mapping[str, str] = MappingProxyType({})
    ) -> None:
        """Write the complete settings; from now on the folder is a run."""
        text = f"# written by fenchel\nformat = {FORMAT}\n{to_toml(settings, comments)}"
        write_atomic(self.path / "config.toml", text)

    def read_settings(self) -> dict[str, Any]:
        """Read the settings; a damaged file or an unknown format is refused."""
        path = self.path / "config.toml"
        if not path.is_file():
            raise ValueError(f"{self.path} is not a run directory: it has no config.toml.")
        try:
            settings = tomllib.loads(path.read_text(encoding="utf-8"))
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise Damaged(f"{path} cannot be read ({error}).") from None
        version = settings.pop("format", None)
        if type(version) is not int or version < 1:
            raise Damaged(f"{path} has no format; it should begin with format = {FORMAT}.")
        require_format(version, self.path)
        return settings

    def write_json(self, name: str, value: Mapping[str, Any]) -> None:
        """Replace one of the JSON files."""
        write_atomic(self.path / name, json.dumps(_plain(value), indent=1) + "\n")

    def log(self, line: Mapping[str, Any]) -> None:
        """Append one line of metrics; on a full disk it is written once there is room."""
        self._unwritten += json.dumps(_plain(line)).encode() + b"\n"
        with suppress(NoSpace):
            self._append()

    def flush(self) -> int:
        """Write all metrics to the disk and return the size of their file in bytes."""
        self._append()
        sync(self.metrics)
        return self.metrics.stat().st_size

    def rewind(self, position: int) -> str | None:
        """Remove metrics past ``position``; return a sentence if some before it are lost."""
        size = self.metrics.stat().st_size if self.metrics.exists() else 0
        if size >= position:
            if size > position:
                os.truncate(self.metrics, position)
            return None
        if size:  # perhaps cut in the middle of a line, which is removed
            os.truncate(self.metrics, self.metrics.read_bytes().rfind(b"\n") + 1)
        return (
            f"{self.metrics} has lost {position - size} bytes since the checkpoint; "
            "the run goes on, some of its metrics are gone."
        )

    def _append(self) -> None:
        with full_disk_as_no_space(self.metrics), self.metrics.open("ab", buffering=0) as file:
            end = file.tell()
            try:
                if file.write(self._unwritten) != len(self._unwritten):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            except OSError:
                file.truncate(end)  # a line is written whole or not at all
                raise
        self._unwritten = b""


def _plain(value: Any) -> Any:
    """``value`` for JSON, which has no nan and no inf: they become strings."""
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value
