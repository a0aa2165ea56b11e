"""Atomic files and folders: a crash leaves the old state or the new one, and nothing between.

A file is written beside its final name, synced, then renamed over it. A folder of several
files is committed the same way: written under a temporary name, sealed by ``manifest.json``
with the size and SHA-256 of every file in it, synced, renamed. The rename is the commit.
A sealed folder is read back by ``verify``, which names the first thing that is wrong.

    Damaged         a file is not what was written
    NoSpace         a write does not fit; nothing of it is left behind
    Busy            another process writes to the folder
    StorageFailed   a run could not save its work

Locks are those of ``flock`` and end with their process, so this module, and with it training, runs
on Linux and macOS and not on Windows.
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
from collections.abc import Callable, Collection, Iterator, Mapping
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
    """A write was not begun or not finished because the disk is full."""


class Busy(OSError):
    """Another process writes to this folder."""


class StorageFailed(OSError):
    """A run could not save its work."""


class Notice(UserWarning):
    """A warning about a file that can be used all the same."""


def sha256(path: Path) -> str:
    """Hexadecimal SHA-256 of a file, read in blocks."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sync(path: Path) -> None:
    """Flush a file, or the entries of a folder, to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_atomic(path: Path, content: str | bytes) -> None:
    """Replace ``path`` by ``content``; a reader sees the old file or the new one."""
    temporary = _temporary_path(path)
    try:
        with full_disk_as_no_space(path):
            temporary.write_bytes(content.encode() if isinstance(content, str) else content)
            sync(temporary)
            temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync(path.parent)


@contextmanager
def committed(path: Path, header: Mapping[str, Any]) -> Iterator[Path]:
    """Yield a folder to fill; on exit it is sealed and renamed to ``path``."""
    temporary = _temporary_path(path)
    _remove(temporary)
    try:
        with full_disk_as_no_space(path), _marked_folder(temporary):
            readable = temporary.stat().st_mode & 0o666
            yield temporary
            contents = {}
            for file in sorted(temporary.iterdir()):
                file.chmod(readable)  # safetensors creates files that only their owner can read
                sync(file)
                contents[file.name] = {"bytes": file.stat().st_size, "sha256": sha256(file)}
            sealed = {**header, "files": contents}
            write_atomic(temporary / MANIFEST, _text({**sealed, "seal": _seal(sealed)}))
            temporary.rename(path)
    except BaseException:
        _remove(temporary)
        raise
    sync(path.parent)


def verify(folder: Path, *, locate: Callable[[str], Path] | None = None) -> dict[str, Any]:
    """Check every byte of a sealed folder and return its manifest.

    ``locate`` gives the file of a name in a folder where users may add files of their own; without
    it every file must be in the manifest.
    """
    path = folder / MANIFEST if locate is None else locate(MANIFEST)
    manifest = read_json(path)
    try:
        if path.read_text(encoding="utf-8") != _text(manifest):
            raise Damaged(f"{path} is not written as it was sealed.")
        if manifest.get("seal") != _seal(manifest):
            raise Damaged(f"{path} does not match its own seal.")
        contents = _contents(manifest, path)
        for name, (size, digest) in contents.items():
            _verify_file(folder / name if locate is None else locate(name), size, digest)
        unnamed = {file.name for file in folder.iterdir()} - contents.keys() - {MANIFEST}
    except OSError as error:
        raise Damaged(f"{folder} cannot be read ({error}).") from error
    if unnamed and locate is None:
        raise Damaged(f"{folder} holds {min(unnamed)}, which its manifest does not name.")
    return manifest


def read_json(path: Path, *, limit: int = 64 * 2**20) -> dict[str, Any]:
    """Read a JSON object from an untrusted file: its size, form and depth are checked."""
    _require_plain(path)
    try:
        if (size := path.stat().st_size) <= limit:
            value = json.loads(path.read_bytes().decode("utf-8"), object_pairs_hook=_no_duplicates)
    except OSError as error:
        raise Damaged(f"{path} cannot be read ({error.strerror}).") from error
    except (ValueError, RecursionError) as error:  # not UTF-8, not JSON, a number too long
        raise Damaged(f"{path} is not JSON ({error}).") from None
    if size > limit:
        raise Damaged(f"{path} has {size} bytes; more than {limit} is not read.")
    if not isinstance(value, dict):
        raise Damaged(f"{path} holds a {type(value).__name__}, an object was expected.")
    return value


def require_space(folder: Path, needed: int) -> None:
    """Raise NoSpace unless the disk has ``needed`` bytes free."""
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise NoSpace(
            f"no space: {folder} has {free / 2**20:.1f} MiB free and "
            f"{needed / 2**20:.1f} MiB are needed."
        )


@contextmanager
def full_disk_as_no_space(path: Path) -> Iterator[None]:
    """Within, every error of a full disk becomes NoSpace."""
    try:
        yield
    except OSError as error:
        if error.errno in _FULL:
            raise NoSpace(f"no space: the disk is full, {path} was not written.") from error
        raise


def discard(folder: Path) -> None:
    """Delete a folder. It is renamed first: a crash cannot leave half of it under its name."""
    _remove(folder.rename(_temporary_path(folder)))


def sweep(folder: Path) -> None:
    """Remove the temporary files of dead writers in ``folder``, whose lock the caller holds."""
    for stray in folder.glob("*.tmp-*"):
        if _TEMPORARY.fullmatch(stray.suffix):
            _remove(stray)


def sweep_beside(path: Path, names: Collection[str]) -> None:
    """Remove the temporary folders of dead writers of ``path`` beside it, without a lock.

    A writer is alive while its process exists here or its lock is held, on any machine. A folder
    that holds other files than ``names``, or cannot be locked, is left alone.
    """
    for stray in path.parent.glob(f"{escape(path.name)}.tmp-*"):
        process = _TEMPORARY.fullmatch(stray.suffix)
        if process is None or _alive(int(process[1])):
            continue
        with suppress(OSError), _folder_lock(stray):
            inside = {_TEMPORARY.sub("", file.name) for file in stray.iterdir()}
            if inside <= set(names):
                _remove(stray)


@contextmanager
def _marked_folder(folder: Path) -> Iterator[None]:
    """Make a folder, marked as in use by a lock that ends with this process."""
    folder.mkdir(parents=True)
    with ExitStack() as stack:
        with suppress(OSError):  # some file systems lock no folders; those are not swept
            stack.enter_context(_folder_lock(folder))
        yield


@contextmanager
def _folder_lock(folder: Path) -> Iterator[None]:
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(handle)


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the lock of ``folder``, which ends with the process; raise Busy if another holds it."""
    path = folder / LOCK
    with path.open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = _lock_holder(file.fileno())
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


def _lock_holder(handle: int) -> str:
    """The holder of a lock. It writes its name just after locking, over one that may be dead."""
    for _ in range(200):
        name = os.pread(handle, 512, 0).decode(errors="replace")
        match = re.fullmatch(r"process (\d+) on (.*)", name)
        if match and (match[2] != socket.gethostname() or _alive(int(match[1]))):
            return name
        time.sleep(0.02)
    return "another process"


def _alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # a process of another user
        return True
    return True


def _temporary_path(path: Path) -> Path:
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
    if (actual := file.stat().st_size) != size:
        raise Damaged(f"{file} has {actual} bytes, its manifest says {size}.")
    if sha256(file) != digest:
        raise Damaged(f"{file} has changed since it was written (SHA-256 differs).")


def _contents(manifest: Mapping[str, Any], path: Path) -> dict[str, tuple[int, str]]:
    """The size and hash of each file that a manifest names; names with a path are refused."""
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


def printable(value: object, limit: int = 80) -> str:
    """Untrusted text for a message: shortened, without control characters.

    >>> printable("a\x1b[2Jb")
    'a?[2Jb'
    """
    text = "".join(c if c.isprintable() else "?" for c in str(value))
    return text if len(text) <= limit else f"{text[:limit]}..."
