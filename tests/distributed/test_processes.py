"""fenchel/distributed/processes.py: values between processes, and one failure for all."""

import os
import signal
import time
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch.distributed.elastic.multiprocessing.api import SignalException

from fenchel.cli import main
from fenchel.distributed import processes
from fenchel.distributed.processes import (
    ALONE,
    FailedElsewhere,
    Shape,
    World,
    lost_process,
    start,
)


@pytest.mark.needs_posix("several processes")
def test_a_signal_to_processes_that_print_nothing_is_answered_in_a_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The engine of torchrun kills processes that do not end within half a minute."""

    def killed(*_: object) -> Any:
        raise SignalException("Process got signal", sigval=signal.SIGTERM)

    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr(processes.logging, "disable", lambda _: None)
    monkeypatch.setattr(processes, "elastic_launch", lambda *_: killed)
    assert main(["train", "--processes", "2", "--steps", "1"]) == 128 + signal.SIGTERM
    said = capsys.readouterr()
    assert said.err == (
        "fenchel: all processes have ended; --resume RUN goes on from the last checkpoint.\n"
    )


def test_one_process_exchanges_with_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert start("cpu", seconds=1) is ALONE
    x = torch.arange(6.0).view(2, 3)
    assert ALONE.gather({"a": 1.5}) == [{"a": 1.5}]
    assert ALONE.exchange([[x]], [[Shape((2, 3), x.dtype)]])[0][0] is x
    assert ALONE.on_first(lambda: 7) == ALONE.share(7) == ALONE.largest(7) == 7
    assert ALONE.fails_first()


def test_plain_values_reach_every_process_by_rank(launch) -> None:
    def work(world: World) -> list:
        own = {"rank": world.rank, "pi": 0.1 + 0.2, "text": "ä" * (1 + 40 * world.rank)}
        return [
            world.gather(own),
            world.share(world.rank + 5),
            world.largest(world.rank),
            world.sum(torch.tensor([1.0, world.rank])).tolist(),
            world.on_first(lambda: os.getpid()) == os.getpid(),
        ]

    results = launch(3, work)
    for rank, (gathered, shared, largest, total, is_first) in enumerate(results):
        assert [row["rank"] for row in gathered] == [0, 1, 2]
        assert [row["pi"] for row in gathered] == [0.1 + 0.2] * 3  # JSON keeps every bit
        assert [len(row["text"]) for row in gathered] == [1, 41, 81]
        assert (shared, largest, total, is_first) == (5, 2, [3.0, 3.0], rank == 0)


def test_exchanged_tensors_keep_order_shape_and_dtype(launch) -> None:
    """Rank r sends r * 10 + o to rank o, as two dtypes and as a transposed view, or nothing."""

    def work(world: World) -> list:
        r, W = world.rank, world.size
        to = [
            [torch.full((2, 1), r * 10.0 + o), torch.arange(6).view(2, 3).T + r] if r else []
            for o in range(W)
        ]
        shapes = [Shape((2, 1), torch.float32), Shape((3, 2), torch.int64)]
        back = world.exchange(to, [shapes if rank else [] for rank in range(W)])
        return [[x.tolist() for x in row] for row in back]

    for rank, rows in enumerate(launch(3, work)):
        assert rows[0] == []
        for sender in (1, 2):
            number = sender * 10.0 + rank
            table = [[sender, 3 + sender], [1 + sender, 4 + sender], [2 + sender, 5 + sender]]
            assert rows[sender] == [[[number], [number]], table]


def test_the_failure_of_rank_0_ends_the_wait_of_the_others(launch) -> None:
    def work(world: World) -> str:
        def refuse() -> None:
            raise ValueError("the text is empty")

        try:
            world.on_first(refuse)
        except ValueError as error:
            return f"{error}: {world.fails_first()}"
        except FailedElsewhere:
            return f"silent: {world.fails_first()}"
        return "went on"

    assert launch(2, work, seconds=20) == ["the text is empty: True", "silent: False"]


def test_exactly_one_process_is_the_first_to_fail(launch) -> None:
    def work(world: World) -> bool:
        world.gather(None)  # none ends before all are connected
        return world.fails_first()

    assert sorted(launch(4, work)) == [False, False, False, True]


def test_a_killed_process_is_noticed_in_the_next_exchange(launch) -> None:
    def work(world: World) -> bool:
        world.gather(None)
        if world.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            world.gather(None)
        except RuntimeError as error:
            return lost_process(error)
        return False

    with pytest.raises(AssertionError, match="no answer") as raised:
        launch(2, work, seconds=20)
    assert str(raised.value).startswith("true\n")


def test_a_rank_0_that_works_is_waited_for_and_one_that_has_stopped_is_not(launch) -> None:
    """Longer than the timeout, of 1 s: with the count that shows it is alive, and without."""

    def work(world: World) -> list[Any]:
        def take_long() -> str:
            time.sleep(1.5)
            return "text"

        first = world.on_first(take_long)
        if world.first:
            World._counting = lambda *_: nullcontext()  # type: ignore[method-assign]
        try:
            return [first, world.on_first(take_long)]
        except RuntimeError as error:
            return [first, lost_process(error)]

    assert launch(2, work, seconds=1) == [["text", "text"], ["text", True]]


def test_an_attempt_sees_no_key_of_the_one_before_but_the_run(launch) -> None:
    """As after a restart by torchrun, whose store has the addresses of processes that ended."""

    def work(world: World) -> list[Any]:
        results = []
        for attempt in range(3):
            if attempt:
                world.close()
                world = start("cpu", seconds=20)
            found, number = world.recorded_run(), world.on_first(lambda n=attempt: n)
            results.append([found, number, world.gather(world.rank), world.fails_first()])
            world.gather(None)  # all have read the path before it is written again
            world.record_run(f"run-{attempt}")
        return results

    first, second = launch(2, work)
    for attempt, rows in enumerate(zip(first, second, strict=True)):
        assert sorted(row.pop() for row in rows) == [False, True]
        before = f"run-{attempt - 1}" if attempt else None
        assert list(rows) == [[before, attempt, [0, 1]]] * 2
