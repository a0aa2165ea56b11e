"""What differs between Linux, macOS and Windows: locks, links, signals, limits, pipes.

This is the only file that uses a module, a function or a signal that some system lacks
(tests/test_operating_system.py compares the others with the list there). ``SYSTEM`` is the system
of this machine, and the rest of the package calls its methods.

                       Posix                            Windows
    lock of a file     flock                            a byte far behind the end (msvcrt)
    lock of a folder   flock                            there is none: OSError
    a link             O_NOFOLLOW refuses it            lstat before and fstat after opening
    flush a folder     fsync                            the file system does it
    rename             over an existing file            likewise; tried again while a scanner or
                                                        a reader has the file open
    stop signals       SIGINT, SIGTERM, SIGHUP          SIGINT, SIGTERM, SIGBREAK
    a closed pipe      EPIPE                            EPIPE or EINVAL
    limits of a child  processor time, address space    none: its parent ends it by the clock
    a pipe of a child  a file descriptor                a handle
    several processes  torchrun with gloo or NCCL       refused: never tried there

Both classes are complete on every system, so that the suite can run with ``Windows`` in the place
of ``Posix``: tests/windows.py then gives it an ``msvcrt`` made of region locks.
"""

import errno
import math
import os
import signal
import stat
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing import connection
from pathlib import Path
from signal import Signals
from typing import Any

_LOCK_OFFSET = 2**30  # where Windows locks a byte: readers of the bytes before it are not refused
_RENAME_SECONDS = 2.0


class System(ABC):
    """The operations whose form depends on the operating system."""

    stop_signals: tuple[Signals, ...]
    """Signals that ask a process to end."""
    hangup: Signals | None
    """What a terminal that closes sends; it may come twice."""
    closed_pipe: frozenset[int]
    """Error numbers of writing to a pipe without a reader."""
    limits_children: bool
    """Whether ``limit_time`` and ``limit_memory`` have an effect on some machines."""
    trains_in_parallel: bool
    """Whether several processes may train together: torchrun, gloo and their signals."""

    @abstractmethod
    def open(self, path: Path, flags: int) -> int:
        """A file descriptor; ELOOP for a link, and a pipe is not waited for."""

    @abstractmethod
    def lock(self, handle: int, *, shared: bool = False) -> None:
        """Lock a file until it is closed; BlockingIOError where another process holds the lock."""

    @abstractmethod
    def unlock(self, handle: int) -> None:
        """End a lock before its file is closed."""

    @contextmanager
    @abstractmethod
    def lock_folder(self, folder: Path) -> Iterator[None]:
        """Hold the lock of a folder; OSError where it is held or folders cannot be locked."""

    @abstractmethod
    def sync(self, path: Path) -> None:
        """Flush a file, or the entries of a folder, to the disk."""

    @abstractmethod
    def rename(self, path: Path, target: Path) -> Path:
        """Rename a file over another, or a folder to a name that is free or an empty folder."""

    @abstractmethod
    def read_start(self, handle: int, size: int) -> bytes:
        """The first bytes of an open file."""

    @abstractmethod
    def process_exists(self, process: int) -> bool:
        """Whether a process of this machine has the number."""

    @abstractmethod
    def memory(self) -> int:
        """Bytes of memory that this process may have by the machine and its own limit."""

    @abstractmethod
    def cores(self) -> int:
        """Cores that this process may use."""

    @abstractmethod
    def limit_memory(self, amount: int) -> None:
        """Limit the address space of this process, where the system can."""

    @abstractmethod
    def limit_time(self, seconds: float) -> None:
        """End this process after so many further seconds of processor time, where that exists."""

    @abstractmethod
    def start_child(
        self, arguments: list[str], environment: dict[str, str]
    ) -> "tuple[subprocess.Popen[bytes], connection.Connection]":
        """Start a process that Ctrl-C does not reach, and return it with a pipe to it.

        The last argument that the child receives is for ``pipe_of_child``. What it prints, such as
        the lines of a Rust panic, is discarded.
        """

    @abstractmethod
    def pipe_of_child(self, number: str) -> connection.Connection:
        """The end of the pipe in the child that ``start_child`` has started."""


class Posix(System):
    """Linux and macOS."""

    closed_pipe = frozenset({errno.EPIPE})
    limits_children = True
    trains_in_parallel = True

    @property
    def stop_signals(self) -> tuple[Signals, ...]:  # type: ignore[override]
        """SIGHUP is the end of a terminal or of a session."""
        return signal.SIGINT, signal.SIGTERM, signal.SIGHUP

    @property
    def hangup(self) -> Signals | None:  # type: ignore[override]
        """From the kernel and from the shell."""
        return signal.SIGHUP

    def open(self, path: Path, flags: int) -> int:
        """By the flags of the system."""
        return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)

    def lock(self, handle: int, *, shared: bool = False) -> None:
        """By flock, which ends with the process."""
        import fcntl

        fcntl.flock(handle, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)

    def unlock(self, handle: int) -> None:
        """By flock."""
        import fcntl

        fcntl.flock(handle, fcntl.LOCK_UN)

    @contextmanager
    def lock_folder(self, folder: Path) -> Iterator[None]:
        """By flock on the folder itself."""
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        try:
            self.lock(handle)
            yield
        finally:
            os.close(handle)

    def sync(self, path: Path) -> None:
        """By fsync."""
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)

    def rename(self, path: Path, target: Path) -> Path:
        """One call of the system, which is atomic."""
        return path.replace(target)

    def read_start(self, handle: int, size: int) -> bytes:
        """Without moving the position of the file."""
        return os.pread(handle, size, 0)

    def process_exists(self, process: int) -> bool:
        """By the signal 0, which is checked and not sent."""
        try:
            os.kill(process, 0)
        except ProcessLookupError:
            return False
        except PermissionError:  # a process of another user
            return True
        return True

    def memory(self) -> int:
        """Of the machine, of the limit of this process, and of its cgroup (v2, v1)."""
        import resource

        limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
        limits += [soft for soft, _ in (resource.getrlimit(resource.RLIMIT_AS),) if soft > 0]
        for file in ("memory.max", "memory/memory.limit_in_bytes"):
            try:
                text = (Path("/sys/fs/cgroup") / file).read_text(encoding="utf-8").strip()
            except OSError:
                continue
            limits += [int(text)] if text.isdecimal() else []  # "max" is none
        return min(limits)

    def cores(self) -> int:
        """Those of the affinity mask, where the system has one."""
        if hasattr(os, "sched_getaffinity"):
            return len(os.sched_getaffinity(0))
        return os.cpu_count() or 1

    def limit_memory(self, amount: int) -> None:
        """By RLIMIT_AS, which macOS ignores."""
        import resource

        self._limit(resource.RLIMIT_AS, amount)

    def limit_time(self, seconds: float) -> None:
        """By RLIMIT_CPU, in whole seconds from the start of the process."""
        import resource

        used = sum(resource.getrusage(resource.RUSAGE_SELF)[:2])
        self._limit(resource.RLIMIT_CPU, math.ceil(used + seconds))

    def _limit(self, kind: int, amount: int) -> None:
        """Within the limit that the process was started with."""
        import resource

        hard = resource.getrlimit(kind)[1]
        soft = amount if hard == resource.RLIM_INFINITY else min(amount, hard)
        with suppress(ValueError, OSError):  # macOS has no limit of address space
            resource.setrlimit(kind, (soft, hard))

    def start_child(
        self, arguments: list[str], environment: dict[str, str]
    ) -> "tuple[subprocess.Popen[bytes], connection.Connection]":
        """In a session of its own, with the descriptor of the pipe."""
        ours, theirs = connection.Pipe()
        number = theirs.fileno()
        child = subprocess.Popen(
            [*arguments, str(number)],
            pass_fds=[number],
            start_new_session=True,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        theirs.close()
        return child, ours

    def pipe_of_child(self, number: str) -> connection.Connection:
        """The descriptor has the same number in the child."""
        return connection.Connection(int(number))


class Windows(System):
    """Windows 10 and later."""

    hangup = None
    closed_pipe = frozenset({errno.EPIPE, errno.EINVAL})
    limits_children = False
    trains_in_parallel = False

    @property
    def stop_signals(self) -> tuple[Signals, ...]:  # type: ignore[override]
        """SIGBREAK is Ctrl-Break, and the end of a console."""
        names = ("SIGINT", "SIGTERM", "SIGBREAK")
        return tuple(Signals[name] for name in names if name in Signals.__members__)

    def open(self, path: Path, flags: int) -> int:
        """A link is refused before; what replaces the path in between is refused after."""
        before = None
        with suppress(FileNotFoundError):
            before = path.lstat()
        if before is not None and stat.S_ISLNK(before.st_mode):
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path))
        if before is not None and not stat.S_ISREG(before.st_mode):  # a folder is "access denied"
            raise OSError(errno.EISDIR, "not a plain file", str(path))
        binary = getattr(os, "O_BINARY", 0) | getattr(os, "O_NOINHERIT", 0)
        handle = os.open(path, flags | binary, 0o666)
        if before is not None and not os.path.samestat(before, os.fstat(handle)):
            os.close(handle)
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path))
        return handle

    def lock(self, handle: int, *, shared: bool = False) -> None:  # noqa: ARG002
        """By msvcrt, which has exclusive locks only; the system ends them with the process."""
        msvcrt = _module("msvcrt")
        with _position(handle):
            os.lseek(handle, _LOCK_OFFSET, os.SEEK_SET)
            try:
                msvcrt.locking(handle, msvcrt.LK_NBLCK, 1)
            except PermissionError as error:
                raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN)) from error

    def unlock(self, handle: int) -> None:
        """By msvcrt."""
        msvcrt = _module("msvcrt")
        with _position(handle):
            os.lseek(handle, _LOCK_OFFSET, os.SEEK_SET)
            msvcrt.locking(handle, msvcrt.LK_UNLCK, 1)

    @contextmanager
    def lock_folder(self, folder: Path) -> Iterator[None]:
        """There is none: temporary folders of other writers are then left where they are."""
        raise OSError(errno.EOPNOTSUPP, "folders cannot be locked", str(folder))
        yield  # makes this a generator, as a context manager needs

    def sync(self, path: Path) -> None:
        """By fsync, which needs a file that is open for writing; folders are left to NTFS."""
        if path.is_dir():
            return
        handle = os.open(path, os.O_RDWR | getattr(os, "O_BINARY", 0))
        try:
            os.fsync(handle)
        finally:
            os.close(handle)

    def rename(self, path: Path, target: Path) -> Path:
        """Tried again for two seconds: a file that is open elsewhere is "access denied"."""
        with suppress(OSError):  # Windows renames over files, not over empty folders
            if path.is_dir():
                target.rmdir()
        end = time.monotonic() + _RENAME_SECONDS
        while True:
            try:
                return path.replace(target)
            except PermissionError:
                if time.monotonic() > end:
                    raise
                time.sleep(0.02)

    def read_start(self, handle: int, size: int) -> bytes:
        """By seek and read."""
        with _position(handle):
            os.lseek(handle, 0, os.SEEK_SET)
            return os.read(handle, size)

    def process_exists(self, process: int) -> bool:
        """By a handle to the process: os.kill would send it a Ctrl-C event."""
        kernel = _kernel()
        query, still_active, code = 0x1000, 259, _integer()
        handle = kernel.OpenProcess(query, False, process)
        if not handle:
            return bool(kernel.GetLastError() == 5)  # access denied: a process of another user
        try:
            found = kernel.GetExitCodeProcess(handle, code.pointer())
            return bool(found) and code.value == still_active
        finally:
            kernel.CloseHandle(handle)

    def memory(self) -> int:
        """Kibibytes of the installed memory, as the firmware reports them."""
        total = _integer(bits=64)
        found = _kernel().GetPhysicallyInstalledSystemMemory(total.pointer())
        return total.value * 1024 if found else 2**32

    def cores(self) -> int:
        """All cores."""
        return os.cpu_count() or 1

    def limit_memory(self, amount: int) -> None:
        """No limit."""

    def limit_time(self, seconds: float) -> None:
        """No limit."""

    def start_child(
        self, arguments: list[str], environment: dict[str, str]
    ) -> "tuple[subprocess.Popen[bytes], connection.Connection]":
        """In a process group of its own, with the handle of the pipe."""
        ours, theirs = connection.Pipe()
        handle = theirs.fileno()
        _set_inheritable(handle)
        child = subprocess.Popen(
            [*arguments, str(handle)],
            close_fds=False,
            creationflags=getattr(subprocess, "CREATE_NEW_PROCESS_GROUP", 0),
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        theirs.close()
        return child, ours

    def pipe_of_child(self, number: str) -> connection.Connection:
        """A handle that was inherited."""
        kind: Any = getattr(connection, "PipeConnection", connection.Connection)
        opened: connection.Connection = kind(int(number))
        return opened


@contextmanager
def _position(handle: int) -> Iterator[None]:
    """Within, the position of a file may move; it is set back after."""
    before = os.lseek(handle, 0, os.SEEK_CUR)
    try:
        yield
    finally:
        os.lseek(handle, before, os.SEEK_SET)


def _module(name: str) -> Any:
    """A module that only Windows has, or its stand-in."""
    from importlib import import_module

    return import_module(name)


def _kernel() -> Any:
    """kernel32.dll."""
    import ctypes

    return getattr(ctypes, "windll").kernel32  # noqa: B009  (type checkers of Linux know none)


def _set_inheritable(handle: int) -> None:
    """Let a child process inherit the handle of a pipe."""
    set_handle: Any = getattr(os, "set_handle_inheritable", os.set_inheritable)
    set_handle(handle, True)


class _integer:  # noqa: N801  (a C integer)
    """An integer that a function of the system fills in."""

    def __init__(self, bits: int = 32) -> None:
        import ctypes

        self._number: Any = ctypes.c_uint64() if bits == 64 else ctypes.c_uint32()

    def pointer(self) -> Any:
        """Where the function writes."""
        import ctypes

        return ctypes.byref(self._number)

    @property
    def value(self) -> int:
        """What the function has written."""
        return int(self._number.value)


SYSTEM: System = Windows() if sys.platform == "win32" else Posix()
"""The system of this machine."""
EXIT_OF_CLOSED_PIPE = 128 + 13
"""The exit code of SIGPIPE, which Windows does not have."""
