"""Atomic files and folders: a crash leaves the old state or the new one, and nothing between.

A file is written beside its final name, synced, then renamed over it. A folder of several
files is committed the same way: written under a temporary name, sealed by ``manifest.json``
with the size and SHA-256 of every file in it, synced, renamed. The rename is the commit.
A sealed folder is read back by ``verify``, which names the first thing that is wrong. A single
file carries its own seal: a JSON object under the key "seal", a text in its first line, a line of
a JSON-lines file under the key "crc".

A file of a folder that may come from elsewhere is opened by ``open_regular``: a link is not
followed and a pipe is not waited for.

A path that a user names for output passes ``require_output`` before any work is done. What is there
may be a regular file, or a folder where one is written, and nothing else: a link, a device, a pipe
or a socket is neither followed nor replaced. ``write_atomic`` refuses them too.

    Damaged         a file is not what was written
    NoSpace         a write does not fit; nothing of it is left behind
    Busy            another process writes to the folder
    StorageFailed   a run could not save its work

Locks end with their process. What depends on the system is in ``fenchel/operating_system.py``.
"""

import errno
import hashlib
import json
import os
import re
import shutil
import socket
import stat
import time
import zlib
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from glob import escape
from io import FileIO
from pathlib import Path
from types import MappingProxyType
from typing import Any
from unicodedata import category

from fenchel.operating_system import SYSTEM

MANIFEST = "manifest.json"
LOCK = "run.lock"
CHECKPOINTS = "checkpoints"
"""The folder of the checkpoints of a run."""
_JSON_LIMIT = 64 * 2**20
_TEMPORARY = re.compile(r"\.tmp-(\d+)")
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_ABSENT = {errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.ENXIO, errno.ENAMETOOLONG}
"""Errors of opening something that is not there, or is a folder, a link, a pipe or a socket."""
_KINDS = {
    stat.S_IFREG: "a file",
    stat.S_IFDIR: "a folder",
    stat.S_IFLNK: "a link",
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
}
_LEAST_SPACE = 2**16
_TEXT_SEAL = re.compile(rb"(?:# |<!doctype html><!-- )fenchel seal ([0-9a-f]{64})[^\n]*\n")
_LINE_SEAL = re.compile(rb', "crc": (\d{1,10})\}\n?\Z')
_JOINER = "\u200d"
_TEXT = "\n\t\u200c\u200d"
_EMOJI = "[\u2190-\u21ff\u2600-\u27bf\u2b00-\u2bff\U0001f000-\U0001faff]"  # and skin tones
_LONE_JOINER = re.compile(f"(?<!{_EMOJI})(?<!{_EMOJI}\ufe0f){_JOINER}|{_JOINER}(?!{_EMOJI})")
"""A zero-width joiner that is not between two emoji; the first may have a variation selector."""


class Damaged(ValueError):
    """A file or folder differs from its manifest."""


class NoSpace(OSError):
    """A write was not begun or not finished because the disk is full."""


class Busy(OSError):
    """Another process writes to this folder."""


class StorageFailed(OSError):
    """A run could not save its work."""


class Notice(UserWarning):
    """A warning that a command prints as one sentence."""


def open_regular(path: Path, flags: int = os.O_RDONLY) -> FileIO:
    """Open a regular file without a buffer; a link, a pipe or anything else is Damaged.

    A file that is written in place must have one name only: under another, it belongs to a copy.
    """
    writing = flags & (os.O_WRONLY | os.O_RDWR)
    try:
        handle = SYSTEM.open(path, flags)
    except OSError as error:
        if error.errno in _ABSENT and not (error.errno == errno.ENOENT and flags & os.O_CREAT):
            raise Damaged(f"{path} is missing or not a plain file.") from None
        raise
    except ValueError:
        raise Damaged(f"{printable(path)} is not the name of a file.") from None
    facts = os.fstat(handle)
    if not stat.S_ISREG(facts.st_mode) or (writing and facts.st_nlink > 1):
        os.close(handle)
        if not stat.S_ISREG(facts.st_mode):
            raise Damaged(f"{path} is missing or not a plain file.")
        raise Damaged(f"{path} has a second name (a hard link); replace it by a copy.")
    return FileIO(handle, "r+b" if writing else "rb")


def read_regular(path: Path, limit: int) -> bytes:
    """The content of a regular file of at most ``limit`` bytes."""
    with errors_name(path), open_regular(path) as file:
        if (size := os.fstat(file.fileno()).st_size) > limit:
            raise Damaged(f"{path} has {size} bytes; more than {limit} is not read.")
        return file.read()


@contextmanager
def errors_name(path: Path) -> Iterator[None]:
    """Context manager: an OSError that names no file gets ``path``."""
    try:
        yield
    except OSError as error:
        if error.errno is not None and error.filename is None:
            error.filename = str(path)
        raise


def sha256(path: Path) -> str:
    """Hexadecimal SHA-256 of a regular file, read in blocks."""
    with errors_name(path), open_regular(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sync(path: Path) -> None:
    """Flush a file, or the entries of a folder, to the disk."""
    with errors_name(path):
        SYSTEM.sync(path)


def require_output(
    path: Path,
    *,
    folder: bool = False,
    new: bool = False,
    reads: Iterable[str | Path | None] = (),
    size: int = 0,
) -> None:
    """Refuse a path where a file, or a ``folder``, of ``size`` bytes cannot or may not be written.

    ``reads`` are the files and folders that the command reads: the path may be none of them, hold
    none and lie in none. A missing parent is refused for a file, and made for a folder. With
    ``new`` nothing is replaced but an empty folder; else the caller decides about what is there.
    """
    wanted = "a folder" if folder else "a file"
    if path.name in ("", ".."):
        raise ValueError(f"{str(path)!r} does not name {wanted} to write; give it a name.")
    kind = _kind(path)
    if kind not in (None, wanted):
        raise ValueError(f"{path} is {kind}, which is not written to or replaced; choose another.")
    if new and kind and not (folder and not any(path.iterdir())):
        raise ValueError(f"{path} exists and is not overwritten; choose another.")
    for source in (one for one in reads if one is not None):
        if relation := _relation(path, Path(os.path.expanduser(source))):
            raise ValueError(f"{path} {relation} {source}, which is read; choose another.")
    place = path.parent
    if folder:  # its parents are made
        place = path if kind else next(p for p in path.parents if os.path.lexists(p))
    if not place.is_dir():
        there = "is not a folder" if os.path.lexists(place) else "does not exist"
        raise ValueError(f"{path} cannot be written: {place} {there}.")
    require_space(place, max(size, _LEAST_SPACE))
    probe = _temporary_path(place / path.name)
    try:
        if place == path:  # other processes may look at what is in it
            if not os.access(place, os.W_OK | os.X_OK):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
            return
        probe.mkdir()
        probe.rmdir()
    except FileExistsError:  # of a writer that was killed; the next one replaces it
        pass
    except OSError as error:
        reason = (error.strerror or "").lower()
        raise ValueError(f"{path} cannot be written: {place}: {reason}.") from None


def require_page(path: Path, *, reads: Iterable[str | Path | None] = ()) -> None:
    """``require_output`` of a page, which replaces nothing but another page of fenchel."""
    require_output(path, reads=reads)
    if path.exists():
        with path.open("rb") as file:
            head = file.read(4096)
        if b'name="generator" content="fenchel"' not in head:
            raise ValueError(f"{path} exists and is not a page of fenchel; choose another.")


def _kind(path: Path) -> str | None:
    """What is at ``path`` itself, a link not followed; None for nothing."""
    try:
        return _KINDS.get(stat.S_IFMT(path.lstat().st_mode), "a device")
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
            return None
        raise
    except ValueError:  # a zero byte, or a character that no file name has
        raise ValueError(f"{printable(path)} is not the name of a file.") from None


def _relation(path: Path, source: Path) -> str | None:
    """How ``path`` is related to ``source``, by the identities of the folders above them."""
    (own, *above), (read, *over) = _identities(path), _identities(source)
    if own == read:
        return "is"
    if own in over:
        return "contains"
    return "lies in" if read in above else None


def _identities(path: Path) -> list[object]:
    """Device and inode of a path and of every folder above it, or the path of what is missing."""
    real = Path(os.path.realpath(path))
    found: list[object] = []
    for each in (real, *real.parents):
        try:
            facts = each.stat()
            found.append((facts.st_dev, facts.st_ino))
        except (OSError, ValueError):
            found.append(each)
    return found


def manifest_of_all(folder: Path) -> dict[str, Any] | None:
    """The manifest of a folder if it is intact and names everything in it; contents are not read.

    Only such a folder is replaced: everything in it was written by this package.
    """
    try:
        manifest = read_manifest(folder)
        named = _contents(manifest, folder / MANIFEST).keys() | {MANIFEST}
        with os.scandir(folder) as entries:
            ours = all(e.name in named and e.is_file(follow_symlinks=False) for e in entries)
    except (Damaged, FileNotFoundError, NotADirectoryError):
        return None
    return manifest if ours else None


def write_atomic(path: Path, content: str | bytes) -> None:
    """Replace ``path`` by ``content``; a reader sees the old file or the new one.

    What is there must be a regular file: a rename would also replace a device or a link.
    """
    if (kind := _kind(path)) not in (None, "a file"):
        raise ValueError(f"{path} is {kind}, which is not written to or replaced; choose another.")
    temporary = _temporary_path(path)
    _remove(temporary)  # a link of that name would be written through
    try:
        with full_disk_as_no_space(path), errors_name(path):
            temporary.write_bytes(content.encode() if isinstance(content, str) else content)
            sync(temporary)
            SYSTEM.rename(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync(path.parent)


@contextmanager
def committed(
    path: Path, header: Mapping[str, Any], digests: Mapping[str, str] = MappingProxyType({})
) -> Iterator[Path]:
    """Yield a folder to fill; on exit it is sealed and renamed to ``path``.

    ``digests`` are read on exit: the SHA-256 of files that their writers, other processes, have
    hashed and flushed; they are not read again.
    """
    temporary = _temporary_path(path)
    _remove(temporary)
    try:
        with full_disk_as_no_space(path), _marked_folder(temporary):
            readable = temporary.stat().st_mode & 0o666
            yield temporary
            contents = {}
            for file in sorted(temporary.iterdir()):
                file.chmod(readable)  # safetensors creates files that only their owner can read
                if file.name not in digests:
                    sync(file)
                digest = digests.get(file.name) or sha256(file)
                contents[file.name] = {"bytes": file.stat().st_size, "sha256": digest}
            if missing := sorted(digests.keys() - contents.keys()):
                raise OSError(errno.ENOENT, "a file of another process is missing", missing[0])
            sealed = {**header, "files": contents}
            write_atomic(temporary / MANIFEST, _text({**sealed, "seal": _seal(sealed)}))
            SYSTEM.rename(temporary, path)
    except BaseException:
        _remove(temporary)
        raise
    sync(path.parent)


def verify(folder: Path) -> dict[str, Any]:
    """Check every byte of a sealed folder and return its manifest.

    What cannot be read because the disk is broken (EIO) is Damaged. Any other error of the system,
    such as too many open files, is not about the files and is raised unchanged.
    """
    try:
        manifest = read_manifest(folder)
        contents = _contents(manifest, folder / MANIFEST)
        for name, (size, digest) in contents.items():
            require_size(folder / name, size)
            require_digest(folder / name, digest)
        unnamed = {file.name for file in folder.iterdir()} - contents.keys() - {MANIFEST}
    except OSError as error:
        if error.errno != errno.EIO and error.errno not in _ABSENT:
            raise
        raise Damaged(f"{folder} cannot be read ({describe(error)}).") from error
    if unnamed:
        raise Damaged(f"{folder} holds {min(unnamed)}, which its manifest does not name.")
    return manifest


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a sealed folder if it matches its own seal; the files are not read."""
    if folder.is_symlink():
        raise Damaged(f"{folder} is a link, which is not followed.")
    return _sealed_manifest(folder / MANIFEST)


def manifest_files(path: Path) -> dict[str, tuple[int, str]]:
    """Size and SHA-256 of each file that a manifest names, if it matches its own seal."""
    return _contents(_sealed_manifest(path), path)


def _sealed_manifest(path: Path) -> dict[str, Any]:
    manifest = read_json(path)
    if read_regular(path, _JSON_LIMIT).decode("utf-8") != _text(manifest):
        raise Damaged(f"{path} is not written as it was sealed.")
    if manifest.get("seal") != _seal(manifest):
        raise Damaged(f"{path} does not match its own seal.")
    return manifest


def read_json(path: Path, *, limit: int = _JSON_LIMIT) -> dict[str, Any]:
    """Read a JSON object from an untrusted file: its size, form and depth are checked."""
    data = read_regular(path, limit)
    try:
        value = json.loads(data.decode("utf-8"), object_pairs_hook=no_duplicates)
    except (ValueError, RecursionError) as error:  # not UTF-8, not JSON, a number too long
        raise Damaged(f"{path} is not JSON ({error}).") from None
    if not isinstance(value, dict):
        raise Damaged(f"{path} holds a {type(value).__name__}, an object was expected.")
    return value


def write_sealed_json(path: Path, value: Mapping[str, Any]) -> None:
    """Replace ``path`` by a JSON object with its seal."""
    plain = json.loads(json.dumps(value))  # tuples are lists in a file
    write_atomic(path, _text({**plain, "seal": _seal(plain)}))


def read_sealed_json(path: Path) -> dict[str, Any]:
    """``read_json`` without the seal; Damaged if the object is not the one that was sealed.

    An object without a seal is accepted: runs of earlier versions have none.
    """
    value = read_json(path)
    if value.get("seal", _seal(value)) != _seal(value):
        raise Damaged(f"{path} has changed since it was written (it does not match its seal).")
    value.pop("seal", None)
    return value


def seal_text(body: str, comment: str = "# {}") -> str:
    """``body`` below a line that seals it; ``comment`` makes a line a comment of its language.

    >>> sealed = seal_text("seed = 1\\n")
    >>> is_sealed(sealed.encode()), is_sealed(sealed.replace("1", "2").encode()), is_sealed(b"")
    (True, False, None)
    """
    digest = hashlib.sha256(body.encode()).hexdigest()
    return comment.format(f"fenchel seal {digest}") + "\n" + body


def is_sealed(data: bytes) -> bool | None:
    """Whether a text is as it was sealed; None for one without a seal."""
    if (seal := _TEXT_SEAL.match(data)) is None:
        return None
    return hashlib.sha256(data[seal.end() :]).hexdigest().encode() == seal[1]


def seal_line(line: bytes) -> bytes:
    """A JSON object on one line with its CRC-32 as the last entry, under "crc".

    >>> seal_line(b'{"step": 1}')
    b'{"step": 1, "crc": 981963069}\\n'
    """
    return line[:-1] + b', "crc": %d}\n' % zlib.crc32(line)


def is_sealed_line(line: bytes) -> bool | None:
    """Whether a line is as ``seal_line`` wrote it; None for one without a checksum."""
    if (seal := _LINE_SEAL.search(line)) is None:
        return None
    return zlib.crc32(line[: seal.start()] + b"}") == int(seal[1])


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
    """Context manager: every error of a full disk becomes NoSpace."""
    try:
        yield
    except OSError as error:
        if error.errno in _FULL:
            raise NoSpace(f"no space: the disk is full, {path} was not written.") from error
        raise


def discard(folder: Path) -> None:
    """Delete a folder. It is renamed first: a crash cannot leave half of it under its name."""
    _remove(SYSTEM.rename(folder, _temporary_path(folder)))


def sweep(folder: Path, ours: Callable[[str], object]) -> None:
    """Remove the temporary files of dead writers in ``folder``, whose lock the caller holds.

    ``ours`` decides by its final name whether a file is one that such a writer makes.
    """
    for stray in folder.glob("*.tmp-*"):
        if _TEMPORARY.fullmatch(stray.suffix) and ours(stray.stem):
            _remove(stray)


def sweep_beside(path: Path, names: Collection[str]) -> None:
    """Remove the temporary folders of dead writers of ``path`` beside it, without a lock.

    A writer is alive while its process exists here or its lock is held, on any machine. A folder
    that holds other files than ``names``, or cannot be locked, is left unchanged.
    """
    for stray in path.parent.glob(f"{escape(path.name)}.tmp-*"):
        process = _TEMPORARY.fullmatch(stray.suffix)
        if process is None or SYSTEM.process_exists(int(process[1])):
            continue
        with suppress(OSError), SYSTEM.lock_folder(stray):
            inside = {_TEMPORARY.sub("", file.name) for file in stray.iterdir()}
            if inside <= set(names):
                _remove(stray)


@contextmanager
def _marked_folder(folder: Path) -> Iterator[None]:
    """Make a folder, marked as in use by a lock that ends with this process."""
    folder.mkdir(parents=True)
    with ExitStack() as stack:
        with suppress(OSError):  # some file systems lock no folders; those are not swept
            stack.enter_context(SYSTEM.lock_folder(folder))
        yield


def is_locked(folder: Path) -> bool:
    """Whether a process holds the lock of ``folder``; nothing is written."""
    try:
        with open_regular(folder / LOCK) as file:
            SYSTEM.lock(file.fileno(), shared=True)
            SYSTEM.unlock(file.fileno())
    except BlockingIOError:
        return True
    except (OSError, ValueError):  # there is no lock, or none that a run would take
        return False
    return False


def require_unlocked(folder: Path) -> None:
    """Raise Busy if a process holds the lock of ``folder``."""
    if is_locked(folder):
        with open_regular(folder / LOCK) as file:
            raise _busy(folder, file.fileno())


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the lock of ``folder``, which ends with the process; raise Busy if another holds it."""
    path = folder / LOCK
    with open_regular(path, os.O_RDWR | os.O_CREAT) as file:
        try:
            with errors_name(path):
                SYSTEM.lock(file.fileno())
        except BlockingIOError:
            raise _busy(folder, file.fileno()) from None
        if not path.exists() or not os.path.samestat(path.stat(), os.fstat(file.fileno())):
            raise Busy(f"{folder} was taken away by another process; try again.")
        with suppress(OSError):  # the lock holds without the name of its holder
            file.truncate(0)
            file.write(f"process {os.getpid()} on {socket.gethostname()}".encode())
        try:
            yield
        finally:
            with suppress(OSError):
                file.truncate(0)


def _busy(folder: Path, handle: int) -> Busy:
    holder = _lock_holder(handle)
    return Busy(f"{folder} is being written by {holder}; wait or choose another.")


def _lock_holder(handle: int) -> str:
    """The holder of a lock. It writes its name just after locking, over one that may be dead."""
    for _ in range(200):
        name = SYSTEM.read_start(handle, 512).decode(errors="replace")
        match = re.fullmatch(r"process (\d+) on (.*)", name)
        here = match is not None and match[2] == socket.gethostname()
        if match and (not here or SYSTEM.process_exists(int(match[1]))):
            return name
        time.sleep(0.02)
    return "another process"


def _temporary_path(path: Path) -> Path:
    return path.with_name(f"{path.name}.tmp-{os.getpid()}")


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def require_size(file: Path, size: int) -> None:
    """Refuse a file that is missing, not a plain file or of another size than in its manifest."""
    with errors_name(file), open_regular(file) as opened:
        actual = os.fstat(opened.fileno()).st_size
    if actual != size:
        raise Damaged(f"{file} has {actual} bytes, and {size} in its manifest.")


def require_digest(file: Path, digest: str) -> None:
    """Refuse a file whose SHA-256 differs from that in its manifest."""
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


def no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """The object of these pairs, for json's ``object_pairs_hook``; raises if a key occurs twice."""
    value = dict(pairs)
    if len(value) != len(pairs):
        twice = Counter(name for name, _ in pairs).most_common(1)[0][0]
        raise ValueError(f"the key {twice!r} occurs twice")
    return value


def describe(error: OSError) -> str:
    """An error of the system as a phrase: the file, and the text of the system.

    >>> describe(OSError(28, "No space left on device", "runs/a/metrics.jsonl"))
    'runs/a/metrics.jsonl: no space left on device'
    """
    reason = error.strerror or str(error) or type(error).__name__
    if error.filename is None:
        return reason
    return f"{printable(error.filename, 200)}: {reason[0].lower()}{reason[1:]}"


def printable(value: object, limit: int | None = 80) -> str:
    """Untrusted text that cannot control a terminal.

    With a limit it is one line of a message or a table: shortened, and every control or format
    character is marked by "?"; a zero-width joiner stays only inside an emoji sequence.
    ``limit=None`` is for texts: line breaks, tabs, spaces of any width and joiners stay, and other
    such characters are left out.

    >>> printable("a\x1b[2Jb\u00a0c"), printable("a\x1b[2Jb\u00a0c", None)
    ('a?[2Jb?c', 'a[2Jb\\xa0c')
    """
    if limit is None:
        kept = (c for c in str(value) if c.isprintable() or c in _TEXT or category(c) == "Zs")
        return "".join(kept)
    text = "".join(c if c.isprintable() or c == _JOINER else "?" for c in str(value))
    text = _LONE_JOINER.sub("?", text)
    return text if len(text) <= limit else f"{text[:limit].removesuffix(_JOINER)}..."
