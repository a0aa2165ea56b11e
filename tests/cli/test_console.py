"""fenchel/cli/console.py: SIGHUP is heard once, and a terminal that has closed harms nobody."""

import errno
import io
import os
import pty
import signal
import sys
from collections.abc import Iterator
from threading import Thread

import pytest

from fenchel.cli.console import may_close


@pytest.fixture(autouse=True)
def unowned() -> Iterator[None]:
    """Nobody hears SIGHUP, even if the tests themselves run under nohup."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


def test_a_hangup_is_an_interruption_once() -> None:
    with may_close():
        with pytest.raises(KeyboardInterrupt) as ended:
            signal.raise_signal(signal.SIGHUP)
        signal.raise_signal(signal.SIGHUP)  # while the first is being answered
    assert ended.value.args == (signal.SIGHUP,)
    assert signal.getsignal(signal.SIGHUP) == signal.SIG_DFL


@pytest.mark.parametrize("owned", [signal.SIG_IGN, lambda *_: None], ids=["nohup", "own"])
def test_who_hears_it_already_goes_on_hearing_it(owned: signal.Handlers) -> None:
    signal.signal(signal.SIGHUP, owned)
    with may_close():
        signal.raise_signal(signal.SIGHUP)
    assert signal.getsignal(signal.SIGHUP) == owned


def test_in_another_thread_signals_are_left_to_their_owner() -> None:
    seen: list[object] = []

    def enter() -> None:
        with may_close():
            seen.append(signal.getsignal(signal.SIGHUP))

    thread = Thread(target=enter)
    thread.start()
    thread.join()
    assert seen == [signal.getsignal(signal.SIGHUP)]


def test_words_reach_an_open_terminal_and_are_lost_at_a_closed_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    terminal, theirs = pty.openpty()
    stream = os.fdopen(theirs, "w", buffering=1)
    monkeypatch.setattr(sys, "stdout", stream)
    with may_close():
        print("heard")
        assert os.read(terminal, 100) == b"heard\r\n"
        os.close(terminal)
        for _ in range(3):
            print("lost")
        print("half a line", end="", flush=True)
    assert sys.stdout is stream
    stream.close()  # what an interpreter does at its end: nothing is left to fail


def test_other_troubles_are_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    class Full(io.StringIO):
        def isatty(self) -> bool:
            return True

        def write(self, _: str) -> int:
            raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(sys, "stdout", Full())
    with pytest.raises(OSError, match="full"), may_close():
        print("word")
