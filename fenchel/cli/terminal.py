"""A terminal that closes: SIGHUP is heard as Ctrl-C is, and what is still said harms nobody.

When its window closes, a command gets SIGHUP, often twice (from the kernel and from the shell), and
from then on every write to the terminal is an error, EIO. Left alone that error would end a run
before it could keep what it did.
"""

import errno
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout
from types import FrameType
from typing import Any, TextIO


@contextmanager
def may_close() -> Iterator[None]:
    """Within, SIGHUP raises KeyboardInterrupt, once, and words to a closed terminal are lost."""
    with ExitStack() as stack:
        for redirect, stream in ((redirect_stdout, sys.stdout), (redirect_stderr, sys.stderr)):
            if stream is not None and stream.isatty():
                stack.enter_context(redirect(_Lossy(stream)))
        stack.enter_context(_hearing())
        yield


@contextmanager
def _hearing() -> Iterator[None]:
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_DFL:  # nohup has it ignored
        yield
        return
    try:
        signal.signal(signal.SIGHUP, _interrupt)
    except ValueError:  # not in the main thread, whose owner keeps its signals
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)


def _interrupt(number: int, _frame: FrameType | None) -> None:
    signal.signal(number, signal.SIG_IGN)  # the second time is the shell's, not an order
    raise KeyboardInterrupt(signal.Signals(number))


class _Lossy:
    """A stream to a terminal; once that has closed, to nowhere."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Say it, if anybody can hear."""
        try:
            return self._stream.write(text)
        except OSError as error:
            self._lose(error)
            return len(text)

    def flush(self) -> None:
        """Likewise."""
        try:
            self._stream.flush()
        except OSError as error:
            self._lose(error)

    def _lose(self, error: OSError) -> None:
        if error.errno != errno.EIO:
            raise error
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self._stream.fileno())  # what is in its buffer goes there too
        os.close(nowhere)
