"""fenchel/train/hardware.py: how fast a step is, and with how many threads."""

import os
from collections.abc import Iterator

import pytest
import torch

from fenchel.train import hardware


@pytest.fixture(autouse=True)
def threads_as_before() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def clock(monkeypatch: pytest.MonkeyPatch, cost: dict[int, list[float]]) -> None:
    """A clock by which a step with n threads takes the next of ``cost[n]`` seconds."""
    times = {n: iter(costs) for n, costs in cost.items()}
    monkeypatch.setattr(hardware, "_time", lambda _: next(times[torch.get_num_threads()]))


def test_the_fastest_number_of_threads_is_kept_and_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "cores", lambda: 4)
    clock(monkeypatch, {1: [3.0] * 4, 2: [2.0] * 4, 4: [5.0] * 4})
    assert hardware.time_steps(lambda: None) == (2, 2.0)
    assert torch.get_num_threads() == 2


def test_one_slow_step_does_not_decide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "cores", lambda: 2)
    clock(monkeypatch, {1: [3.0] * 4, 2: [9.0, 2.0, 90.0, 2.0]})
    assert hardware.time_steps(lambda: None) == (2, 2.0)


def test_a_number_that_is_given_is_not_tried_against_others() -> None:
    seen: list[int] = []
    found = hardware.time_steps(lambda: seen.append(torch.get_num_threads()), threads=1, repeats=2)
    assert seen == [1, 1, 1]  # one to warm up, two that count
    assert found.threads == 1
    assert found.seconds > 0


def test_cores_that_are_no_power_of_two_are_tried_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "cores", lambda: 3)
    seen: set[int] = set()
    hardware.time_steps(lambda: seen.add(torch.get_num_threads()))
    assert seen == {1, 2, 3}


def test_timing_ends_at_its_limit_with_what_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Long steps: only the largest count of threads is tried, and only until the limit."""
    monkeypatch.setattr(hardware, "cores", lambda: 4)
    clock(monkeypatch, {4: [50.0]})
    assert hardware.time_steps(lambda: None, limit=6.0) == (4, 50.0)
    clock(monkeypatch, {4: [2.0, 1.0, 1.0, 1.0], 2: [3.0]})
    assert hardware.time_steps(lambda: None, limit=6.0) == (4, 1.0)


def test_a_system_without_a_core_count_is_not_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    assert hardware.cores() >= 1
