"""Writing files so that a crash leaves the old state or the new one, and nothing between.

A file is written beside its final name, synced, then renamed over it. A folder of several
files is committed the same way: written under a temporary name, sealed by ``manifest.json``
with the size and SHA-256 of every file in it, synced, renamed. The rename is the commit.
A sealed folder is read back by ``verify``, which names the first thing that is wrong.

    Damaged         what was read is not what was written
    NoSpace         a write does not fit; nothing of it is left behind
    Busy            another process writes here
    StorageFailed   a run under way could not keep what it did
"""

import errno
import fcntl
import hashlib
import json
import os
import re
import shutil
import socket
import time
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from glob import escape
from pathlib import Path
from typing import Any

MANIFEST = "manifest.json"
LOCK = "run.lock"
_TEMPORARY = re.compile(r"\.tmp-(\d+)")
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


class Damaged(ValueError):
    """A file or folder is not what its manifest says."""


class NoSpace(OSError):
    """A write was not begun, or not finished, for want of disk space."""


class Busy(OSError):
    """Another process writes this folder."""


class StorageFailed(OSError):
    """A run that was under way could not keep what it did."""


class Notice(UserWarning):
    """Something in a file that its owner should know of, and that stops nothing."""


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
    temporary = _beside(path)
    try:
        with naming_space(path):
            temporary.write_bytes(content.encode() if isinstance(content, str) else content)
            sync(temporary)
            temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync(path.parent)


@contextmanager
def committed(path: Path, header: Mapping[str, Any]) -> Iterator[Path]:
    """A folder to fill; on leaving it is sealed and becomes ``path`` in one rename."""
    temporary = _beside(path)
    _remove(temporary)
    try:
        with naming_space(path), _written(temporary):
            readable = temporary.stat().st_mode & 0o666
            yield temporary
            contents = {}
            for file in sorted(temporary.iterdir()):
                file.chmod(readable)  # safetensors writes for the owner's eyes only
                sync(file)
                contents[file.name] = {"bytes": file.stat().st_size, "sha256": sha256(file)}
            sealed = {**header, "files": contents}
            write_atomic(temporary / MANIFEST, _text({**sealed, "seal": _seal(sealed)}))
            temporary.rename(path)
    except BaseException:
        _remove(temporary)
        raise
    sync(path.parent)


def verify(folder: Path) -> dict[str, Any]:
    """The manifest of a sealed folder, after every byte in the folder was checked."""
    path = folder / MANIFEST
    manifest = read_json(path)
    try:
        if path.read_text(encoding="utf-8") != _text(manifest):
            raise Damaged(f"{path} is not written as it was sealed.")
        if manifest.get("seal") != _seal(manifest):
            raise Damaged(f"{path} does not match its own seal.")
        contents = _contents(manifest, path)
        for name, (size, digest) in contents.items():
            _verify_file(folder / name, size, digest)
        strangers = {file.name for file in folder.iterdir()} - contents.keys() - {MANIFEST}
    except OSError as error:
        raise Damaged(f"{folder} cannot be read ({error}).") from error
    if strangers:
        raise Damaged(f"{folder} holds {min(strangers)}, which its manifest does not name.")
    return manifest


def read_json(path: Path, *, limit: int = 64 * 2**20) -> dict[str, Any]:
    """A JSON object from a file nobody has vouched for: size, form and depth are checked."""
    _require_plain(path)
    try:
        if (size := path.stat().st_size) <= limit:
            value = json.loads(path.read_bytes().decode("utf-8"), object_pairs_hook=_no_duplicates)
    except OSError as error:
        raise Damaged(f"{path} cannot be read ({error.strerror}).") from error
    except (ValueError, RecursionError) as error:  # not UTF-8, not JSON, a number without end
        raise Damaged(f"{path} is not JSON ({error}).") from None
    if size > limit:
        raise Damaged(f"{path} has {size} bytes; more than {limit} is not read.")
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


@contextmanager
def naming_space(path: Path) -> Iterator[None]:
    """Turn the ways in which a system says that a disk is full into NoSpace."""
    try:
        yield
    except OSError as error:
        if error.errno in _FULL:
            raise NoSpace(f"no space: the disk is full, {path} was not written.") from error
        raise


def discard(folder: Path) -> None:
    """Delete a folder; one that a crash leaves half deleted no longer has its name."""
    _remove(folder.rename(_beside(folder)))


def sweep(folder: Path) -> None:
    """Remove what writers that died left behind; call it only while holding the lock."""
    for stray in folder.glob("*.tmp-*"):
        if _TEMPORARY.fullmatch(stray.suffix):
            _remove(stray)


def sweep_beside(path: Path, names: Collection[str]) -> None:
    """Remove what writers of the folder ``path`` that died left beside it, no lock being held.

    A writer lives while its process is here or its lock is held, wherever it runs. A folder that
    holds more than files by these ``names`` is somebody's, and so is one that cannot be locked.
    """
    for stray in path.parent.glob(f"{escape(path.name)}.tmp-*"):
        process = _TEMPORARY.fullmatch(stray.suffix)
        if process is None or _alive(int(process[1])):
            continue
        with suppress(OSError), _alone(stray):
            inside = {_TEMPORARY.sub("", file.name) for file in stray.iterdir()}
            if inside <= set(names):
                _remove(stray)


@contextmanager
def _written(folder: Path) -> Iterator[None]:
    """Make a folder, marked by a lock that ends with this process, however it ends."""
    folder.mkdir(parents=True)
    with ExitStack() as stack:
        with suppress(OSError):  # some file systems lock no folders; nobody sweeps those
            stack.enter_context(_alone(folder))
        yield


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(handle)


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Be the only writer of ``folder``; the lock ends with the process, however it ends."""
    path = folder / LOCK
    with path.open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = _holder(file.fileno())
            raise Busy(f"{folder} is being written by {holder}; wait or choose another.") from None
        if not path.exists() or not os.path.samestat(path.stat(), os.fstat(file.fileno())):
            raise Busy(f"{folder} was taken away by another process; try again.")
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}")
        file.flush()
        try:
            yield
        finally:
            file.truncate(0)


def _holder(handle: int) -> str:
    """Who has the lock. It signs right after taking it, over the name of one that may be dead."""
    for _ in range(200):
        told = os.pread(handle, 512, 0).decode(errors="replace")
        signed = re.fullmatch(r"process (\d+) on (.*)", told)
        if signed and (signed[2] != socket.gethostname() or _alive(int(signed[1]))):
            return told
        time.sleep(0.02)
    return "another process"


def _alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # somebody else's
        return True
    return True


def _beside(path: Path) -> Path:
    return path.with_name(f"{path.name}.tmp-{os.getpid()}")


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def _require_plain(path: Path) -> None:
    if path.is_symlink() or not path.is_file():
        raise Damaged(f"{path} is missing or not a plain file.")


def _verify_file(file: Path, size: int, digest: str) -> None:
    _require_plain(file)
    if (there := file.stat().st_size) != size:
        raise Damaged(f"{file} has {there} bytes, its manifest says {size}.")
    if sha256(file) != digest:
        raise Damaged(f"{file} has changed since it was written (SHA-256 differs).")


def _contents(manifest: Mapping[str, Any], path: Path) -> dict[str, tuple[int, str]]:
    """The size and hash of each file that a manifest names; plain names only."""
    try:
        files = {name: (int(f["bytes"]), str(f["sha256"])) for name, f in manifest["files"].items()}
    except (AttributeError, KeyError, TypeError, ValueError):
        raise Damaged(f"{path} does not list its files.") from None
    if any(Path(name).name != name for name in files):
        raise Damaged(f"{path} names a file outside its folder.")
    return files


def _text(manifest: Mapping[str, Any]) -> str:
    return json.dumps(manifest, indent=1) + "\n"


def _seal(manifest: Mapping[str, Any]) -> str:
    body = {key: value for key, value in manifest.items() if key != "seal"}
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        twice = Counter(name for name, _ in pairs).most_common(1)[0][0]
        raise ValueError(f"the key {twice!r} stands twice")
    return value


def printable(said: object, limit: int = 80) -> str:
    """Words of a stranger inside a sentence of ours: short, and nothing a terminal obeys."""
    text = "".join(c if c.isprintable() else "?" for c in str(said))
    return text if len(text) <= limit else f"{text[:limit]}..."
