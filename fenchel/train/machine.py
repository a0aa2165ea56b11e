"""Ctrl-C and its relatives: the first asks the loop to stop, the second stops at once.

A terminal that closes says so twice, by the kernel and by the shell, so of SIGHUP the second means
no more than the first.

What the numbers of a run depend on besides its settings.

Memory that is kept from step to step, and memory that ran out.

A step of training asks for the same tensors again and again. The C library of Linux gives large
ones back to the system when they are freed, and the system clears every page when they are asked
for again: a fifth of a CPU step of GPT-2's 124M. ``keep_memory`` tells it to hold on to them, which
takes some per cent more of it. That is a matter of the whole process, so only those who own the
process call it.

Memory that ran out is told from every other error, with what would need less of it.

Kernels that add in a fixed order, so that a run on a GPU repeats bit for bit.

On a CPU with a fixed number of threads torch adds in a fixed order anyway. On a GPU some kernels
do not, the backward pass of fused attention first among them: two runs of the same settings
then differ in the last digits, and soon in all of them. A fixed order costs some time
(docs/log.md), so it can be declined.

How fast this machine takes a step, and with how many threads.

More threads are not always faster: on busy cores they wait for each other, and small models
gain nothing from a second one. So a few are tried on real steps and the fastest is kept.
"""

import ctypes
import os
import platform
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from types import FrameType, TracebackType
from typing import Any, NamedTuple, Self

import torch

import fenchel

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


def environment(device: torch.device) -> dict[str, Any]:
    """Versions, device, threads, commit and time, as plain values."""
    return {
        "fenchel": fenchel.__version__,
        "commit": commit(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "platform": platform.platform(),
        "device": device_name(device),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "time": time.strftime("%Y-%m-%d %H:%M:%S"),
    }


def device_name(device: torch.device) -> str:
    """The name a person would buy it under, as far as the machine tells."""
    if device.type == "cuda":
        return str(torch.cuda.get_device_name(device))
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())


def commit() -> str:
    """The commit of this source tree, or "unknown" when it was installed as a package."""
    root = Path(fenchel.__file__).parents[1]
    if not (root / ".git").exists():
        return "unknown"
    command = ["git", "-C", str(root), "describe", "--always", "--dirty"]
    try:
        told = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError:
        return "unknown"
    return told.stdout.strip() or "unknown"


_CPU = re.compile(r"can't allocate memory: you tried to allocate (\d+) bytes")
_GPU = re.compile(r"Tried to allocate ([\d.]+ \w+)")


_TRIM_THRESHOLD, _MMAP_MAX = -1, -4
"""Parameters of mallopt: when the top of the heap goes back, and how many blocks are mapped."""


def keep_memory() -> bool:
    """Hold on to memory that was freed, from now on; False where the C library has no such way."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):  # musl, macOS, Windows
        return False
    return bool(mallopt(_MMAP_MAX, 0)) and bool(mallopt(_TRIM_THRESHOLD, -1))


def ran_out(error: BaseException) -> str | None:
    """What was asked for when memory ran out, in words; None for any other error."""
    if found := _CPU.search(str(error)):
        return f"{int(found[1]):,} bytes were wanted"
    if isinstance(error, torch.OutOfMemoryError):
        found = _GPU.search(str(error))
        return f"{found[1]} were wanted on the GPU" if found else "on the GPU"
    return "no more could be had" if isinstance(error, MemoryError) else None


@contextmanager
def enough_memory(afterwards: str) -> Iterator[None]:
    """Turn the end of memory into one sentence, which closes with what to do ``afterwards``."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        wanted = ran_out(error)
        if wanted is None:
            raise
        raise ValueError(
            f"memory ran out ({wanted}); a larger train.accumulate or a smaller train.batch "
            f"needs less; {afterwards}."
        ) from None


@contextmanager
def fixed_order(device: torch.device, *, exact: bool) -> Iterator[None]:
    """Inside, a GPU uses only kernels that repeat; one that has none is named and refused."""
    if device.type != "cuda" or not exact:
        yield
        return
    # The matrix library reads this when it first takes work space.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        yield
    except RuntimeError as error:
        if "deterministic" not in str(error):
            raise
        reason = str(error).partition(". ")[0]
        raise ValueError(f"{reason}; give up exact repetition with train.exact=false.") from error
    finally:
        torch.use_deterministic_algorithms(before)


class Pace(NamedTuple):
    """What was measured."""

    threads: int
    seconds: float
    """Seconds a step."""


def measure(step: Callable[[], object], *, threads: int | None = None, repeats: int = 3) -> Pace:
    """Time ``step`` with ``threads``, or with 1, 2, 4, ... up to the cores; leave the best set."""
    cores = _cores()
    counts = [threads] if threads else sorted({min(2**n, cores) for n in range(8)})
    paces = []
    for count in counts:
        torch.set_num_threads(count)
        step()  # the first one takes memory and wakes the threads
        paces.append(Pace(count, median(_time(step) for _ in range(repeats))))
    best = min(paces, key=lambda pace: pace.seconds)
    torch.set_num_threads(best.threads)
    return best


def _time(step: Callable[[], object]) -> float:
    start = time.perf_counter()
    step()
    return time.perf_counter() - start


def _cores() -> int:
    """Cores this process may use, where the system tells; else all there are."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
