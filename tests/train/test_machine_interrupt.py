"""fenchel/train/machine.py: a first signal asks, a second one ends."""

import signal
from threading import Thread

import pytest

from fenchel.train.machine import WATCHED, Interruption


@pytest.mark.parametrize("number", WATCHED)
def test_the_first_signal_is_remembered_and_nothing_else_happens(number: signal.Signals) -> None:
    with Interruption() as signals:
        assert signals.asked is None
        signal.raise_signal(number)
        assert signals.asked == number


@pytest.mark.parametrize("number", WATCHED)
def test_the_second_ends_at_once_and_tells_which_it_was(number: signal.Signals) -> None:
    with Interruption() as signals:
        signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt) as ended:
            signal.raise_signal(number)
        assert ended.value.args == (number,)
        assert signals.asked == signal.SIGINT


def test_a_terminal_may_say_twice_that_it_closes() -> None:
    with Interruption() as signals:
        for _ in range(3):
            signal.raise_signal(signal.SIGHUP)
        assert signals.asked == signal.SIGHUP
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGTERM)


def test_handlers_are_put_back_however_it_ends() -> None:
    before = [signal.getsignal(number) for number in WATCHED]
    with pytest.raises(ValueError, match="trouble"), Interruption():
        raise ValueError("trouble")
    assert [signal.getsignal(number) for number in WATCHED] == before


def test_a_signal_that_was_ignored_stays_ignored() -> None:
    """nohup fenchel train: closing the terminal must not stop the run."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with Interruption() as signals:
            signal.raise_signal(signal.SIGHUP)
            assert signals.asked is None
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_outside_the_main_thread_signals_are_left_to_their_owner() -> None:
    before = [signal.getsignal(number) for number in WATCHED]
    seen: list[object] = []

    def enter() -> None:
        with Interruption() as signals:
            seen.append(signals.asked)
            seen.extend(signal.getsignal(number) for number in WATCHED)

    thread = Thread(target=enter)
    thread.start()
    thread.join()
    assert seen == [None, *before]
