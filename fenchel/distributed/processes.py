"""The processes of a run: their ranks, how they exchange values, how one that fails ends all.

torchrun, or ``launch``, starts W processes and numbers them by rank, 0 to W - 1. ``start`` reads
its environment and connects them; without it a run is ``ALONE``, one process that exchanges
nothing. Rank 0 owns the run directory, the terminal and the report.

Plain values travel as JSON: no process unpickles what another has sent. Tensors travel by
``exchange``, a list for every rank, in one all-to-all per dtype. NCCL and gloo only move bytes
there: sums are made afterwards, in an order that this package fixes (cells.py).

**Failure.** A process that raises writes its rank into the store that torchrun keeps. The first one
to do so prints its sentence, all others end in silence, so a terminal shows one sentence.
``on_first`` runs a function only on rank 0, such as tokenising a text; the others wait outside of
any collective, whose timeout would end a wait of some minutes, and learn of a failure by the store.
A rank 0 that is stopped or lost writes nothing there: while it works it counts up a number in the
store, and the others give up when the number has not changed for the timeout.

**Restart.** torchrun ``--max-restarts`` starts all processes again where one has failed, and the
store may be that of the attempt before, with its keys: the addresses of processes that have ended
among them. Each attempt therefore has its own keys, under a number that rank 0 draws and hands
to every process that has come (``_attempt``). torchrun counts attempts as well, per machine: where
several machines notice a failure differently, their counts differ. Under no number is the path of
the run that an attempt has begun (``record_run``), which the next one continues.
"""

import json
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import count
from math import prod
from signal import Signals
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore  # type: ignore[attr-defined]
from torch.distributed.elastic.multiprocessing.api import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch
from torch.distributed.rendezvous import rendezvous

from fenchel.operating_system import SYSTEM

T = TypeVar("T")
_POLL = 0.05
"""Seconds between two reads of the store."""
_LOST = ("connection", "peer", "gloo", "nccl", "timed out", "timeout", "socket")
"""Words of the errors that torch raises where another process has ended or does not answer."""


class FailedElsewhere(Exception):
    """Another process has failed first and has printed why."""


class ProcessMissing(ValueError):
    """A process has not come; raised by one of those that have."""


class Shape(NamedTuple):
    """Sizes and dtype of a tensor that is to be received."""

    sizes: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class World:
    """This process among those of the run."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    """The rank on this machine, which numbers its GPUs."""
    local_size: int = 1
    store: Any = None
    """The store of torchrun, which holds values by key, restricted to this attempt."""
    device: str = "cpu"
    """Where tensors are exchanged."""
    seconds: float = 600.0
    """How long a process waits for another."""
    all_attempts: Any = None
    """The store with the keys of all attempts."""
    _numbers: Any = field(default_factory=count, compare=False)

    @property
    def first(self) -> bool:
        """Whether this process is rank 0."""
        return self.rank == 0

    def gather(self, value: Any) -> list[Any]:
        """The plain value of every process, by rank."""
        if self.size == 1:
            return [value]
        text = json.dumps(value).encode()
        lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
        dist.all_gather(lengths, torch.tensor([len(text)]))
        longest = max(int(length) for length in lengths)
        own = torch.zeros(longest, dtype=torch.uint8)
        own[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        texts = [torch.empty_like(own) for _ in range(self.size)]
        dist.all_gather(texts, own)
        return [
            json.loads(bytes(data[: int(length)].tolist()))
            for data, length in zip(texts, lengths, strict=True)
        ]

    def share(self, value: T) -> T:
        """The plain value of rank 0."""
        shared: T = self.gather(value if self.first else None)[0]
        return shared

    def sum(self, x: Tensor) -> Tensor:
        """The sum over processes of a CPU tensor; exact where each entry is 0 on all but one."""
        if self.size > 1:
            dist.all_reduce(x)
        return x

    def maximum(self, x: Tensor) -> Tensor:
        """The largest over processes of every entry of a CPU tensor without nan."""
        if self.size > 1:
            dist.all_reduce(x, dist.ReduceOp.MAX)
        return x

    def largest(self, number: int) -> int:
        """The largest of the numbers of all processes."""
        return int(self.maximum(torch.tensor([number])))

    def exchange(
        self, to: Sequence[Sequence[Tensor]], expected: Sequence[Sequence[Shape]]
    ) -> list[list[Tensor]]:
        """Send ``to[r]`` to every rank r; returns what each sent here, of the shapes expected."""
        if self.size == 1:
            return [list(to[0])]
        received: list[list[Tensor]] = [[] for _ in range(self.size)]
        dtypes = {x.dtype for row in to for x in row} | {s.dtype for row in expected for s in row}
        found = {}
        for dtype in sorted(dtypes, key=str):
            out = [[x for x in row if x.dtype == dtype] for row in to]
            back = [[s for s in row if s.dtype == dtype] for row in expected]
            found[dtype] = iter(_all_to_all(out, back, dtype, self.device))
        for row, shapes in zip(received, expected, strict=True):
            row.extend(next(found[shape.dtype]) for shape in shapes)
        return received

    def on_first(self, function: Callable[[], T]) -> T:
        """``function()`` on rank 0 only; every process gets its plain result."""
        if self.size == 1:
            return function()
        key = f"first-{next(self._numbers)}"
        if self.first:
            with self._counting(f"{key}-count"):
                value = function()
            self.store.set(key, json.dumps(value))
            return value
        seen, since = -1, time.monotonic()
        try:
            while not self.store.check([key]):
                if self.store.check(["failed"]):
                    raise FailedElsewhere
                if (number := self.store.add(f"{key}-count", 0)) != seen:
                    seen, since = number, time.monotonic()
                if time.monotonic() - since > self.seconds:
                    break
                time.sleep(_POLL)
            else:
                shared: T = json.loads(self.store.get(key))
                return shared
        except RuntimeError:  # the store has ended, and with it the run
            raise FailedElsewhere from None
        raise RuntimeError(f"timed out: rank 0 has not answered for {self.seconds:g} s")

    @contextmanager
    def _counting(self, key: str) -> Iterator[None]:
        """Context manager: a thread counts up a number in the store while this process is alive."""
        done = threading.Event()

        def count_up() -> None:
            with suppress(RuntimeError):  # the store has ended
                while not done.wait(min(1.0, self.seconds / 4)):
                    self.store.add(key, 1)

        thread = threading.Thread(target=count_up, daemon=True)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()

    def record_run(self, path: str) -> None:
        """Leave the path of the run that begins to the attempt that torchrun may start next."""
        if self.first and self.all_attempts is not None:
            self.all_attempts.set("run", path)

    def recorded_run(self) -> str | None:
        """The path of the run that an attempt before this one has begun."""
        store = self.all_attempts
        if store is None or not store.check(["run"]):
            return None
        path: str = store.get("run").decode()
        return path

    def fails_first(self) -> bool:
        """Whether this process, which has failed, is the first one, and so is to print why."""
        if self.size == 1 or self.store is None:
            return True
        own = str(self.rank)
        try:
            return bool(self.store.compare_set("failed", "", own).decode() == own)
        except RuntimeError:  # the store has ended with the process that keeps it
            return self.first

    def close(self) -> None:
        """Leave the group of processes."""
        if self.size > 1:
            with suppress(RuntimeError):
                dist.destroy_process_group()


ALONE = World()
"""One process."""


def start(device: str, *, seconds: float) -> World:
    """Connect the processes that torchrun has started; ``ALONE`` without it.

    ``seconds`` is how long a process waits for another in an exchange before it gives up.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return ALONE
    wait = timedelta(seconds=seconds)
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    everything, rank, size = next(rendezvous("env://", rank, size, timeout=wait))
    store = PrefixStore(f"attempt-{_attempt(everything, rank, size, seconds)}", everything)
    gpu = device.startswith("cuda") or (device == "auto" and torch.cuda.is_available())
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if gpu else "gloo",
        store=PrefixStore("group", store),
        rank=rank,
        world_size=size,
        timeout=wait,
    )
    local = int(os.environ.get("LOCAL_RANK", rank))
    if gpu:
        torch.cuda.set_device(local)
    where, local_size = "cuda" if gpu else "cpu", int(os.environ.get("LOCAL_WORLD_SIZE", size))
    return World(rank, size, local, local_size, store, where, seconds, everything)


def launch(processes: int, words: list[str]) -> int:
    """Start ``fenchel WORDS`` so many times by the engine of torchrun; returns the exit code.

    torchrun --standalone --nproc-per-node N -m fenchel WORDS does the same, adds a report of some
    forty lines to the sentence of a process that fails, and ends with 1 whatever its exit code.
    A signal, which the processes receive too, raises KeyboardInterrupt once they have ended.
    """
    if not SYSTEM.trains_in_parallel:
        raise ValueError("several processes train on Linux and macOS only; leave out --processes.")
    logging.disable(logging.CRITICAL)  # in this process, which does nothing else
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # of libraries that train.threads does not reach
    try:
        with TemporaryDirectory(ignore_cleanup_errors=True) as logs:  # torch would leave its own
            config = LaunchConfig(
                min_nodes=1,
                max_nodes=1,
                nproc_per_node=processes,
                run_id=f"fenchel-{os.getpid()}",
                rdzv_backend="c10d",
                rdzv_endpoint="localhost:0",
                max_restarts=0,
                monitor_interval=0.1,
                logs_specs=DefaultLogsSpecs(log_dir=logs),
            )
            elastic_launch(config, sys.executable)("-m", "fenchel", *words)
    except ChildFailedError as error:
        codes = [error.get_first_failure()[1].exitcode]
        codes += [failure.exitcode for failure in error.failures.values()]
        code = next((code for code in codes if code > 2), codes[0])  # 2 is also that of silence
        return code if code > 0 else 128 - code
    except SignalException as error:
        # Processes that do not end within half a minute are killed and print nothing.
        raise KeyboardInterrupt(
            Signals(error.sigval),
            "all processes have ended; --resume RUN goes on from the last checkpoint.",
        ) from None
    return 0


def _attempt(store: Any, rank: int, size: int, seconds: float) -> int:
    """The number of this attempt, common to its processes and different from all other attempts.

    Rank r stores its own word under its rank and waits for the number under that word. Rank 0
    draws the number and answers every word that it finds until all ranks have received it: a word
    of an earlier attempt is answered as well, in vain, and replaced by that of the rank to come.
    """
    until = time.monotonic() + seconds
    if rank > 0:
        word = os.urandom(8).hex()
        store.set(f"rank-{rank}", word)
        while not store.check([word]):
            if time.monotonic() > until:
                if store.compare_set("rank-0-missing", "", word).decode() != word:
                    raise FailedElsewhere
                raise ProcessMissing(
                    f"rank 0 of this run did not come within {seconds:g} s (train.timeout)."
                )
            time.sleep(_POLL)
        number = int(store.get(word))
        store.set(f"received-{number}-{rank}", "")
        return number
    number, missing = int(store.add("attempts", 1)), set(range(1, size))
    while missing:
        for r in sorted(missing):
            if store.check([f"received-{number}-{r}"]):
                missing.remove(r)
            elif store.check([f"rank-{r}"]):
                store.set(store.get(f"rank-{r}").decode(), str(number))
        if time.monotonic() > until:
            raise ProcessMissing(
                f"{len(missing)} of the {size} processes of this run did not come within "
                f"{seconds:g} s (train.timeout)."
            )
        time.sleep(_POLL / 5)
    return number


def lost_process(error: BaseException) -> bool:
    """Whether an error of torch means that another process has ended or does not answer.

    >>> lost_process(RuntimeError("Connection closed by peer")), lost_process(RuntimeError("shape"))
    (True, False)
    """
    text = str(error).lower()
    return isinstance(error, RuntimeError) and any(word in text for word in _LOST)


def _all_to_all(
    to: list[list[Tensor]], expected: list[list[Shape]], dtype: torch.dtype, device: str
) -> list[Tensor]:
    """Tensors of one dtype, flat in one message; those received, by rank."""
    sent = [sum(x.numel() for x in row) for row in to]
    sizes = [[prod(shape.sizes) for shape in row] for row in expected]
    message = torch.cat(
        [torch.empty(0, dtype=dtype, device=device), *(x.reshape(-1) for row in to for x in row)]
    )
    answer = message.new_empty(sum(map(sum, sizes)))
    dist.all_to_all_single(answer, message, [sum(row) for row in sizes], sent)
    flat = torch.split(answer, [size for row in sizes for size in row])
    shapes = [shape for row in expected for shape in row]
    return [x.view(shape.sizes) for x, shape in zip(flat, shapes, strict=True)]
