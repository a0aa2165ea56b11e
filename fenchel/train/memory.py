"""Memory that ran out, told from every other error, and what would need less of it."""

import re
from collections.abc import Iterator
from contextlib import contextmanager

import torch

_CPU = re.compile(r"can't allocate memory: you tried to allocate (\d+) bytes")
_GPU = re.compile(r"Tried to allocate ([\d.]+ \w+)")


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
