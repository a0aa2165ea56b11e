"""Writing files so that a crash leaves the old state or the new one, and nothing between.

A file is written beside its final name, synced, then renamed over it. A folder of several
files is committed the same way: written under a temporary name, sealed by ``manifest.json``
with the size and SHA-256 of every file in it, synced, renamed. The rename is the commit.
A sealed folder is read back by ``verify``, which names the first thing that is wrong.
"""

import fcntl
import hashlib
import json
import os
import shutil
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

MANIFEST = "manifest.json"
_TEMPORARY = ".tmp-"


class Damaged(ValueError):
    """A file or folder is not what its manifest says."""


class NoSpace(OSError):
    """A write was not begun, or not finished, for want of disk space."""


class Busy(OSError):
    """Another process writes this folder."""


def sha256(path: Path) -> str:
    """Hexadecimal SHA-256 of a file, read in blocks."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sync(path: Path) -> None:
    """Flush a file or a folder's entries to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_atomic(path: Path, content: str | bytes) -> None:
    """Replace ``path`` by ``content``; a reader sees the old file or the new one."""
    temporary = path.with_name(f"{path.name}{_TEMPORARY}{os.getpid()}")
    data = content.encode() if isinstance(content, str) else content
    try:
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync(path.parent)


@contextmanager
def committed(path: Path, header: Mapping[str, Any]) -> Iterator[Path]:
    """A folder to fill; on leaving it is sealed and becomes ``path`` in one rename."""
    temporary = path.with_name(f"{path.name}{_TEMPORARY}{os.getpid()}")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    try:
        yield temporary
        contents = {}
        for file in sorted(temporary.iterdir()):
            sync(file)
            contents[file.name] = {"bytes": file.stat().st_size, "sha256": sha256(file)}
        sealed = {**header, "files": contents}
        sealed["seal"] = _seal(sealed)
        write_atomic(temporary / MANIFEST, json.dumps(sealed, indent=1) + "\n")
        temporary.rename(path)
        sync(path.parent)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def verify(folder: Path) -> dict[str, Any]:
    """The manifest of a sealed folder, after every byte it names was checked."""
    manifest = read_json(folder / MANIFEST)
    if manifest.get("seal") != _seal(manifest):
        raise Damaged(f"{folder / MANIFEST} does not match its own seal.")
    contents = manifest["files"]
    for name, expected in contents.items():
        file = folder / name
        if Path(name).name != name or file.is_symlink() or not file.is_file():
            raise Damaged(f"{file} is missing or not a plain file.")
        if (size := file.stat().st_size) != expected["bytes"]:
            raise Damaged(f"{file} has {size} bytes, its manifest says {expected['bytes']}.")
        if sha256(file) != expected["sha256"]:
            raise Damaged(f"{file} has changed since it was written (SHA-256 differs).")
    strangers = {file.name for file in folder.iterdir()} - contents.keys() - {MANIFEST}
    if strangers:
        raise Damaged(f"{folder} holds {sorted(strangers)[0]}, which its manifest does not name.")
    return manifest


def read_json(path: Path, *, limit: int = 64 * 2**20) -> dict[str, Any]:
    """A JSON object from a file nobody has vouched for: size, form and depth are checked."""
    try:
        if path.is_symlink() or not path.is_file():
            raise Damaged(f"{path} is missing or not a plain file.")
        if (size := path.stat().st_size) > limit:
            raise Damaged(f"{path} has {size} bytes; more than {limit} is not read.")
        value = json.loads(path.read_bytes().decode("utf-8"), object_pairs_hook=_no_duplicates)
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise Damaged(f"{path} is not JSON ({error}).") from None
    if not isinstance(value, dict):
        raise Damaged(f"{path} holds a {type(value).__name__}, an object was expected.")
    return value


def require_space(folder: Path, needed: int) -> None:
    """Refuse a write of ``needed`` bytes that the disk has no room for."""
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise NoSpace(
            f"no space: {folder} has {free / 2**20:.1f} MiB free and "
            f"{needed / 2**20:.1f} MiB are needed."
        )


def sweep(folder: Path) -> None:
    """Remove what writers that died left behind; call it only while holding the lock."""
    for stray in folder.glob(f"*{_TEMPORARY}*"):
        if stray.is_dir():
            shutil.rmtree(stray, ignore_errors=True)
        else:
            stray.unlink(missing_ok=True)


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Be the only writer of ``folder``; the lock ends with the process, however it ends."""
    path = folder / "run.lock"
    with path.open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            holder = file.read().strip() or "another process"
            raise Busy(f"{folder} is being written by {holder}; wait or choose another.") from None
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}")
        file.flush()
        yield
        file.truncate(0)


def _seal(manifest: Mapping[str, Any]) -> str:
    body = {key: value for key, value in manifest.items() if key != "seal"}
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise json.JSONDecodeError(f"the key {twice!r} stands twice", "", 0)
    return value
