"""A run directory: everything about one training run, in files a person can read.

    config.toml        the settings, complete, with the format's version
    environment.json   versions, device, threads, commit
    text.json          which text it reads, with its hash; the token files are in tokens/
    tokenizer.json     text to ids and back
    metrics.jsonl      one line per log: {"step": 12, "train/loss": 3.41, ..., "crc": 305419896}
    base/              of a run that tunes a checkpoint: its files beside the weights
    before.json        of such a run: measures of the checkpoint before the first step
    checkpoints/       see fenchel/checkpoints/run_checkpoint.py
    tensorboard/       the same metrics as events, with train.log
    sample.json        a generated sample and attention maps, when training has ended
    report.html        the page made from these files
    summary.json       status and last numbers, written last
    run.lock           held by the one process that writes here

A folder is a run once it has config.toml. Metrics whose names start with "time/" are durations and
differ between two runs of the same settings; all others are the same bits.

Every file is sealed, so that a changed bit is found: config.toml and report.html in their first
line, the JSON files under "seal", a line of metrics under "crc", the rest by manifests
(fenchel/files.py). config.toml is therefore not edited by hand: a resume changes a setting by
--set. A link, a pipe or a device under one of these names is refused.
"""

import errno
import json
import math
import os
import re
import shutil
import warnings
from collections.abc import Iterable, Mapping
from contextlib import suppress
from io import BufferedReader, FileIO
from pathlib import Path
from types import MappingProxyType
from typing import Any

from fenchel.checkpoints.run_checkpoint import BASE, FORMAT, check_tokenizer, require_format
from fenchel.config import parse_toml, to_toml
from fenchel.files import (
    CHECKPOINTS,
    LOCK,
    Damaged,
    Notice,
    errors_name,
    full_disk_as_no_space,
    is_sealed,
    is_sealed_line,
    open_regular,
    read_regular,
    read_sealed_json,
    require_output,
    require_unlocked,
    seal_line,
    seal_text,
    sweep,
    write_atomic,
    write_sealed_json,
)

TOKENS = "tokens"
"""Folder of a run's token files, unless they are shared."""
_NAME = re.compile(
    r"(config\.toml|(text|tokenizer|environment|summary|sample|before)\.json|metrics\.jsonl|report\.html)"
    rf"|{re.escape(LOCK)}"
)
_FOLDER = re.compile(rf"{BASE}|{CHECKPOINTS}|tensorboard|{TOKENS}(-[0-9a-f]+)?")
_TEMPORARY = re.compile(r"\.tmp-\d+\Z")
_SETTINGS_BYTES = 2**20
_LINE_BYTES = 2**24  # of metrics; a line has some hundred
_PAGE_BYTES = 2**28


class RunDir:
    """The writing side; fenchel.report reads the same files without torch."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.checkpoints = path / CHECKPOINTS
        self.metrics = path / "metrics.jsonl"
        self._unwritten = b""
        self._end = 0
        """Bytes of metrics.jsonl that are whole lines; what a torn write left is beyond them."""

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

    def claim(self) -> None:
        """Refuse the folder of another run, and remove what an interrupted start has left."""
        self.require_free(held=True)  # again, under the lock: another process may have been faster
        sweep(self.path, is_run_name)

    def abandon(self) -> None:
        """Remove the folder of a run that never began, except what is not of such a run."""
        if (self.path / "config.toml").exists():
            return
        with suppress(OSError):
            for entry in self.path.iterdir():
                if entry.is_dir() and not entry.is_symlink() and is_run_name(entry.name):
                    shutil.rmtree(entry, ignore_errors=True)
                elif is_run_name(entry.name):
                    entry.unlink(missing_ok=True)
            self.path.rmdir()

    def require_free(self, reads: Iterable[str | Path | None] = (), *, held: bool = False) -> None:
        """Refuse a folder that holds a run or any file that an interrupted start does not leave.

        ``reads`` are the files and folders that the run reads, which it may not overlap. A run that
        trains now is named by its process, unless the lock is ``held`` by the caller.
        """
        require_output(self.path, folder=True, reads=reads)
        if not self.path.exists():
            return
        self.require_plain()
        names = {file.name for file in self.path.iterdir()} - {self.checkpoints.name}
        if "config.toml" in names or any(self.checkpoints.glob("*")):
            if not held:
                require_unlocked(self.path)
            raise ValueError(
                f"{self.path} holds a run already; continue it with --resume {self.path} "
                "or choose another folder."
            )
        others = names if LOCK not in names else {name for name in names if not is_run_name(name)}
        if others:
            raise ValueError(f"{self.path} holds other files ({min(others)}); choose a new folder.")

    def require_plain(self) -> None:
        """Refuse links, pipes and devices under the names of a run's files and folders."""
        for entry in self.path.iterdir():
            file, folder = _NAME.fullmatch(entry.name), _FOLDER.fullmatch(entry.name)
            if entry.is_symlink() and (file or folder):
                raise Damaged(
                    f"{entry} is a link, which a run does not write through; "
                    "put what it points to in its place."
                )
            if (file and not entry.is_file()) or (folder and not entry.is_dir()):
                raise Damaged(f"{entry} is not a plain {'file' if file else 'folder'}.")

    def write_settings(
        self, settings: Mapping[str, Any], comments: Mapping[str, str] = MappingProxyType({})
    ) -> None:
        """Write the complete settings; from now on the folder is a run."""
        about = "# written by fenchel; --resume RUN --set NAME=VALUE changes a setting"
        text = f"{about}\nformat = {FORMAT}\n{to_toml(settings, comments)}"
        write_atomic(self.path / "config.toml", seal_text(text))

    def read_settings(self) -> dict[str, Any]:
        """Read the settings; a file that was changed, or of an unknown format, is refused."""
        path = self.path / "config.toml"
        self.require_run()
        data = read_regular(path, _SETTINGS_BYTES)
        try:
            settings = parse_toml(data)
        except ValueError as error:
            raise Damaged(f"{path} cannot be read ({error}).") from None
        version = settings.pop("format", None)
        if type(version) is not int or version < 1:
            raise Damaged(f"{path} has no format; it should begin with format = {FORMAT}.")
        require_format(version, self.path)
        if is_sealed(data) is False:
            raise Damaged(
                f"{path} has changed since it was written (it does not match its seal): put the "
                f"old file back, and change a setting by --resume {self.path} --set NAME=VALUE."
            )
        return settings

    def require_run(self) -> None:
        """Refuse a folder without settings, with a sentence about what it is instead."""
        if os.path.lexists(self.path / "config.toml"):
            return
        if not self.path.is_dir():
            raise ValueError(f"there is no run directory {self.path}.")
        if (self.path / LOCK).exists():
            raise ValueError(
                f"{self.path} is a run that was stopped before it began to train; give the command "
                f"that began it again, with --out {self.path}."
            )
        raise ValueError(f"{self.path} is not a run directory: it has no config.toml.")

    def write_json(self, name: str, value: Mapping[str, Any]) -> None:
        """Replace one of the JSON files."""
        write_sealed_json(self.path / name, plain_json(value))

    def write_status(self, step: int, steps: int) -> None:
        """The summary of a run that trains: checkpoints up to ``step`` have been written."""
        self.write_json("summary.json", {"status": "running", "step": step, "steps": steps})

    def log(self, line: Mapping[str, Any]) -> None:
        """Append one line of metrics; what cannot be written now is written by the next call."""
        self._unwritten += seal_line(json.dumps(plain_json(line)).encode())
        with suppress(OSError):
            self._append()

    def flush(self) -> int:
        """Write all metrics to the disk and return the size of their file in bytes."""
        self._append(sync=True)
        return self._end

    def rewind(self, position: int) -> str | None:
        """Remove metrics past ``position``; return a sentence if some before it have changed."""
        self._end = 0
        if not self.metrics.exists():
            return self._loss(position) if position else None
        with errors_name(self.metrics), open_regular(self.metrics, os.O_RDWR) as file:
            size = os.fstat(file.fileno()).st_size
            self._end, broken = _whole_lines(file, position)
            if size > self._end:
                file.truncate(self._end)
        if self._end < position:
            return self._loss(position - (size if size < position else self._end))
        if broken:
            return (
                f"{self.metrics} has changed since it was written, first in line {broken}; "
                "the run goes on, and its report leaves out the lines that have changed."
            )
        return None

    def _loss(self, count: int) -> str:
        return (
            f"{self.metrics} has lost {count} bytes since the checkpoint; "
            "the run goes on, some of its metrics are gone."
        )

    def _append(self, *, sync: bool = False) -> None:
        """Write at the end of the last whole line, over what a torn write may have left there."""
        with (
            full_disk_as_no_space(self.metrics),
            errors_name(self.metrics),
            open_regular(self.metrics, os.O_RDWR | os.O_CREAT) as file,
        ):
            size = os.fstat(file.fileno()).st_size
            if size < self._end:
                self._end = size
                warnings.warn(
                    f"{self.metrics} was cut or removed while the run goes on; "
                    "some of its metrics are gone.",
                    Notice,
                    stacklevel=2,
                )
            file.seek(self._end)
            try:
                if file.write(self._unwritten) != len(self._unwritten):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            except OSError:
                with suppress(OSError):
                    file.truncate(self._end)
                raise
            self._end += len(self._unwritten)
            self._unwritten = b""
            if size > self._end:
                file.truncate(self._end)
            if sync:
                os.fsync(file.fileno())

    def check_files(self) -> dict[str, str]:
        """Each file of the run outside its folders, with "intact" or what is wrong with it."""
        # Of an interrupted run, some are not written yet.
        names = "config.toml environment.json text.json tokenizer.json before.json metrics.jsonl "
        names += "sample.json report.html summary.json"
        return {
            name: self.check_file(name)
            for name in names.split()
            if os.path.lexists(self.path / name)
        }

    def check_file(self, name: str) -> str:
        """What is wrong with one of the files, or "intact"."""
        path = self.path / name
        try:
            match name:
                case "config.toml":
                    self.read_settings()
                case "tokenizer.json":
                    check_tokenizer(self.path)
                case "metrics.jsonl":
                    _require_whole_lines(path)
                case "report.html":
                    _require_sealed(path)
                case _:
                    read_sealed_json(path)
        except ValueError as error:
            return str(error)
        return "intact"


def is_run_name(name: str) -> bool:
    """Whether a file or folder of this name in a run directory is one that a run makes.

    >>> is_run_name("metrics.jsonl"), is_run_name("tokens.tmp-123"), is_run_name("notes.txt")
    (True, True, False)
    """
    name = _TEMPORARY.sub("", name)
    return bool(_NAME.fullmatch(name) or _FOLDER.fullmatch(name))


def _whole_lines(file: FileIO, position: int) -> tuple[int, int | None]:
    """The end of the last whole line up to ``position``, and the first line that has changed."""
    reader = BufferedReader(file)
    end, number, broken = 0, 0, None
    while end < position:
        line = reader.readline(min(_LINE_BYTES, position - end))
        if not line.endswith(b"\n"):
            break
        end, number = end + len(line), number + 1
        if broken is None and not _is_whole(line):
            broken = number
    reader.detach()
    return end, broken


def _is_whole(line: bytes) -> bool:
    if (sealed := is_sealed_line(line)) is not None:
        return sealed
    try:
        json.loads(line)
    except (ValueError, RecursionError):
        return False
    return True


def _require_whole_lines(path: Path) -> None:
    with errors_name(path), open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        end, broken = _whole_lines(file, size)
    if broken or end < size:
        where = f"in line {broken}" if broken else f"after byte {end}, where a line is not whole"
        raise Damaged(f"{path} has changed since it was written, {where}.")


def _require_sealed(path: Path) -> None:
    if not is_sealed(read_regular(path, _PAGE_BYTES)):
        raise Damaged(f"{path} is not as it was written; fenchel report writes it again.")


def plain_json(value: Any) -> Any:
    """``value`` as it is read back from a JSON file: nan and inf are strings, tuples are lists.

    >>> plain_json({"loss": float("nan"), "skipped": (1, 2)})
    {'loss': 'nan', 'skipped': [1, 2]}
    """
    if isinstance(value, Mapping):
        return {key: plain_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain_json(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value
