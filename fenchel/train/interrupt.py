"""Ctrl-C and its relatives: the first asks the loop to stop, the second stops at once."""

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
        try:
            self._before = {s: signal.signal(s, self._note) for s in WATCHED}
        except ValueError:  # not in the main thread: the owner of that thread keeps its signals
            self._before = {}
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.asked is not None:
            raise KeyboardInterrupt  # asked twice: now
        self.asked = signal.Signals(number)
