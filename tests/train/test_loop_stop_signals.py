"""fenchel/train/loop.py: the first signal requests a stop, the second stops at once."""

import signal
from threading import Thread

import pytest

from fenchel.train.loop import STOP_SIGNALS, StopSignals


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_the_first_signal_is_only_recorded(number: signal.Signals) -> None:
    with StopSignals() as signals:
        assert signals.first is None
        signal.raise_signal(number)
        assert signals.first == number


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_the_second_signal_ends_at_once_with_its_number(number: signal.Signals) -> None:
    with StopSignals() as signals:
        signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt) as ended:
            signal.raise_signal(number)
        assert ended.value.args == (number,)
        assert signals.first == signal.SIGINT


@pytest.mark.needs_posix("hang-ups")
def test_a_second_hangup_of_a_terminal_is_ignored() -> None:
    with StopSignals() as signals:
        for _ in range(3):
            signal.raise_signal(signal.SIGHUP)
        assert signals.first == signal.SIGHUP
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGTERM)


def test_handlers_are_put_back_however_it_ends() -> None:
    before = [signal.getsignal(number) for number in STOP_SIGNALS]
    with pytest.raises(ValueError, match="trouble"), StopSignals():
        raise ValueError("trouble")
    assert [signal.getsignal(number) for number in STOP_SIGNALS] == before


def test_a_signal_that_was_ignored_stays_ignored() -> None:
    """nohup fenchel train: closing the terminal must not stop the run."""
    end_of_terminal = STOP_SIGNALS[-1]
    before = signal.signal(end_of_terminal, signal.SIG_IGN)
    try:
        with StopSignals() as signals:
            signal.raise_signal(end_of_terminal)
            assert signals.first is None
        assert signal.getsignal(end_of_terminal) == signal.SIG_IGN
    finally:
        signal.signal(end_of_terminal, before)


def test_outside_the_main_thread_signals_are_left_to_their_owner() -> None:
    before = [signal.getsignal(number) for number in STOP_SIGNALS]
    seen: list[object] = []

    def enter() -> None:
        with StopSignals() as signals:
            seen.append(signals.first)
            seen.extend(signal.getsignal(number) for number in STOP_SIGNALS)

    thread = Thread(target=enter)
    thread.start()
    thread.join()
    assert seen == [None, *before]
