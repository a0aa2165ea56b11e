"""Ctrl-C and its relatives: the first asks the loop to stop, the second stops at once.

A terminal that closes says so twice, by the kernel and by the shell, so of SIGHUP the second means
no more than the first.
"""

import signal
from types import FrameType, TracebackType
from typing import Any, Self

WATCHED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interruption:
    """While entered, remembers the first watched signal instead of dying of it."""

    def __init__(self) -> None:
        self.asked: signal.Signals | None = None
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        for number in WATCHED:
            # Whoever started us may have had a signal ignored: nohup does so with SIGHUP.
            # None is a handler of another language, which could not be put back.
            if signal.getsignal(number) in (signal.SIG_IGN, None):
                continue
            try:
                self._before[number] = signal.signal(number, self._note)
            except ValueError:  # not in the main thread, whose owner keeps its signals
                break
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, _frame: FrameType | None) -> None:
        if self.asked == number == signal.SIGHUP:
            return
        if self.asked is not None:
            raise KeyboardInterrupt(signal.Signals(number))  # asked twice: now
        self.asked = signal.Signals(number)
