"""The hardware that a run trains on: device, dtype, threads, memory, and the time of a step.

**Device.** ``select_device`` is the one place where a device is chosen by name. ``select_dtype``
avoids a dtype that a CPU has no instructions for: torch then converts the operands of every
product, which made reading in bfloat16 three to four times as slow as in float32, and reading in
float16 ten times.

**Environment.** The numbers of a run depend on versions, device and thread count as well as on its
settings; ``environment`` records them.

**Memory.** A training step allocates the same tensors again and again. The C library of Linux
returns large ones to the kernel when they are freed, and the kernel clears every page when they
are allocated again: a fifth of a CPU step of GPT-2's 124M. ``retain_freed_memory`` has the library
keep them, for a few per cent more memory. It changes the whole process, so only a program that
owns the process calls it. ``explain_out_of_memory`` turns an allocation failure into one sentence.

**Step time.** More threads are not always faster: on busy cores they wait for each other, and
small models gain nothing from a second one. ``time_steps`` tries a few on real steps and sets the
fastest.
"""

import ctypes
import math
import os
import platform
import re
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch

import fenchel
from fenchel.operating_system import SYSTEM
from fenchel.torch_internals import is_compiler_failure

_CPU = re.compile(r"can't allocate memory: you tried to allocate (\d+) bytes")
_GPU = re.compile(r"Tried to allocate ([\d.]+ \w+)")
_TRIM_THRESHOLD, _MMAP_MAX = -1, -4
"""Parameters of mallopt: when the top of the heap is returned, and how many blocks are mapped."""


def select_device(name: str = "auto", *, float64: bool = False) -> torch.device:
    """The device of that name; "auto" is the best one: a GPU by CUDA, by MPS, then the CPU.

    MPS has no ``float64``. What measures in it goes to the CPU, and refuses "mps".

    >>> select_device("cpu")
    device(type='cpu')
    """
    if name == "auto":
        name = next(one for one in ("cuda", "mps", "cpu") if _has_device(one, float64=float64))
    if float64 and name.partition(":")[0] == "mps":
        raise ValueError("mps has no float64, in which this is computed; give cpu.")
    try:
        device = torch.device(name)
        usable = device.type != "meta"
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError):
        usable = False
    if not usable:
        here = [one for one in ("cuda", "mps", "cpu") if _has_device(one, float64=float64)]
        raise ValueError(f"there is no device {name!r} here; give {' or '.join(here)}.")
    return device


def _has_device(kind: str, *, float64: bool) -> bool:
    if kind == "mps":
        return torch.backends.mps.is_available() and not float64
    return kind == "cpu" or torch.cuda.is_available()


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
    """The product name of a device, or its architecture where the system does not give one."""
    if device.type == "cuda":
        return str(torch.cuda.get_device_name(device))
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())


def commit() -> str:
    """The commit of this source tree, or "unknown" for an installed package."""
    root = Path(fenchel.__file__).parents[1]
    if not (root / ".git").exists():
        return "unknown"
    command = ["git", "-C", str(root), "describe", "--always", "--dirty"]
    try:
        git = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError:
        return "unknown"
    return git.stdout.strip() or "unknown"


def retain_freed_memory() -> bool:
    """Keep freed memory in the process from now on; False where the C library cannot."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):  # musl, macOS, Windows
        return False
    return bool(mallopt(_MMAP_MAX, 0)) and bool(mallopt(_TRIM_THRESHOLD, -1))


def out_of_memory(error: BaseException) -> str | None:
    """How much memory could not be allocated, as a phrase; None for any other error.

    >>> out_of_memory(MemoryError()), out_of_memory(RuntimeError("shapes do not match"))
    ('no more is free', None)
    """
    if match := _CPU.search(str(error)):
        return f"{int(match[1]):,} bytes were needed"
    if isinstance(error, torch.OutOfMemoryError):
        match = _GPU.search(str(error))
        return f"{match[1]} were needed on the GPU" if match else "on the GPU"
    return "no more is free" if isinstance(error, MemoryError) else None


@contextmanager
def explain_out_of_memory(afterwards: str, *, recompute: str = "none") -> Iterator[None]:
    """Turn a failed allocation into a ValueError whose sentence ends with ``afterwards``.

    ``recompute`` is the setting of the run, which is advised where it is off.
    """
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        shortage = out_of_memory(error)
        if shortage is None:
            raise
        advice = "a larger train.accumulate or a smaller train.batch"
        if recompute == "none":
            advice = 'a larger train.accumulate, a smaller train.batch or train.recompute="block"'
        raise ValueError(
            f"memory ran out ({shortage}); {advice} needs less; {afterwards}."
        ) from None


_INSTRUCTIONS = {
    torch.bfloat16: ("avx512_bf16", "amx_bf16"),
    torch.float16: ("avx512_fp16", "amx_fp16"),
}


def select_dtype(stored: torch.dtype, device: torch.device, *, bytes: int) -> torch.dtype:
    """The dtype to compute in with weights of ``bytes`` in all: ``stored``, or float32.

    float32 on an x86 CPU that has no instructions for ``stored``, if the copy takes no more than a
    quarter of the memory.

    >>> select_dtype(torch.float32, torch.device("cpu"), bytes=1000)
    torch.float32
    """
    if device.type != "cpu" or stored not in _INSTRUCTIONS:
        return stored
    capabilities = torch.cpu.get_capabilities()
    native = any(capabilities.get(name) for name in _INSTRUCTIONS[stored])
    if native or capabilities.get("architecture") != "x86_64":
        return stored
    return torch.float32 if 2 * bytes <= memory_of(device) // 4 else stored


def memory_of(device: torch.device) -> int:
    """Bytes of memory that a process may use on a device: of the machine, and of its limits.

    >>> memory_of(torch.device("cpu")) > 2**20
    True
    """
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[1])
    if device.type == "mps":
        return int(torch.mps.recommended_max_memory())
    return SYSTEM.memory()


def free_memory(device: torch.device) -> int:
    """Bytes of memory that nothing occupies yet on a GPU; elsewhere half of all there is.

    >>> free_memory(torch.device("cpu")) > 2**20
    True
    """
    if device.type == "cuda":
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(torch.cuda.mem_get_info(device)[0]) + cached
    return memory_of(device) // 2


@cache
def compiler_works(device: str) -> bool:
    """Whether torch.compile makes a kernel here, for which it needs a C compiler."""
    try:
        torch.compile(torch.nn.functional.softplus)(torch.zeros(1, device=device))
    except Exception as error:
        if is_compiler_failure(error):
            return False
        raise
    return True


class StepTime(NamedTuple):
    """The time of a training step at the thread count that was fastest."""

    threads: int
    seconds: float
    """Seconds per step."""


def time_steps(
    step: Callable[[], object],
    *,
    threads: int | None = None,
    repeats: int = 3,
    limit: float = math.inf,
) -> StepTime:
    """Time ``step`` with ``threads``, or with 1, 2, 4, ... up to the cores; set the fastest.

    After ``limit`` seconds no further step is begun. Steps that reach it are long ones, which gain
    from threads, so the largest count comes first.
    """
    counts = [threads] if threads else sorted({min(2**n, cores()) for n in range(8)}, reverse=True)
    times, spent = [], 0.0
    for count in counts:
        torch.set_num_threads(count)
        spent += (first := _time(step))  # allocates memory and starts the threads
        measured: list[float] = []
        while len(measured) < repeats and spent < limit:
            measured.append(_time(step))
            spent += measured[-1]
        times.append(StepTime(count, median(measured or [first])))
        if spent >= limit:
            break
    best = min(times, key=lambda time: (time.seconds, time.threads))
    torch.set_num_threads(best.threads)
    return best


def _time(step: Callable[[], object]) -> float:
    start = time.perf_counter()
    step()
    return time.perf_counter() - start


def cores() -> int:
    """Cores that this process may use."""
    return SYSTEM.cores()
