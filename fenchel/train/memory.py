"""Memory that is kept from step to step, and memory that ran out.

A step of training asks for the same tensors again and again. The C library of Linux gives large
ones back to the system when they are freed, and the system clears every page when they are asked
for again: a fifth of a CPU step of GPT-2's 124M. ``keep_memory`` tells it to hold on to them, which
takes some per cent more of it. That is a matter of the whole process, so only those who own the
process call it.

Memory that ran out is told from every other error, with what would need less of it.
"""

import ctypes
import re
from collections.abc import Iterator
from contextlib import contextmanager

import torch

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
