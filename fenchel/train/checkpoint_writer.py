"""Checkpoints written beside the next steps.

A save copies its tensors into host memory, pinned where they come from a GPU, and a thread hashes,
writes, syncs and renames them while the run trains on. What is promised of a checkpoint is promised
by the write (fenchel/files.py), whichever thread it is in: it is complete and verified, or absent.

One write at a time: a save waits for the one before it, whose copies it overwrites. The copies stay
for the whole run, as large as a checkpoint; ``spacing`` keeps saves so far apart that on usual
hardware none waits.
"""

from collections.abc import Callable, Mapping
from threading import Event, Thread
from typing import Any

import torch
from torch import Tensor

from fenchel.checkpoints.run_checkpoint import flatten, tensor_bytes, unflatten
from fenchel.train.hardware import memory_of

TOKENS_PER_SAVE = 4 * 2**20
"""Tokens that a GPU trains on at least between two checkpoints by default.

P parameters are 12 P bytes of checkpoint, and N tokens 6 P N operations: at 400 TFLOP/s and 1 GB/s
a write takes as long as the steps of 0.8 million tokens, whatever P."""
MEMORY_SHARE = 0.25
"""Share of the host memory that copies may take; a larger checkpoint is written without one."""


def spacing(device: torch.device, tokens_per_step: int) -> int:
    """Least number of steps between two checkpoints where the settings do not say how many.

    >>> spacing(torch.device("cpu"), 8192), spacing(torch.device("cuda"), 32 * 1024)
    (1, 128)
    """
    return 1 if device.type == "cpu" else -(-TOKENS_PER_SAVE // tokens_per_step)


class CheckpointWriter:
    """A thread that writes one checkpoint at a time, and the host memory it writes from."""

    def __init__(self) -> None:
        self._ended: Event | None = None  # a join that a signal interrupts does not wait again
        self._error: BaseException | None = None
        self._buffers: dict[str, Tensor] = {}

    def copy(
        self, weights: Mapping[str, Tensor], optimiser: Mapping[str, Any]
    ) -> tuple[Mapping[str, Tensor], Mapping[str, Any]] | None:
        """Weights and state of the optimiser as they are now; None if memory is short for them."""
        assert self._ended is None  # it reads the buffers
        moments, rest = flatten(optimiser)
        every = {f"weights {name}": x for name, x in weights.items()}
        every |= {f"optimiser {name}": x for name, x in moments.items()}
        if tensor_bytes(every) > MEMORY_SHARE * memory_of(torch.device("cpu")):
            return None
        for name, x in every.items():
            buffer = self._buffers.get(name)
            if buffer is None or (buffer.shape, buffer.dtype) != (x.shape, x.dtype):
                buffer = torch.empty(x.shape, dtype=x.dtype, pin_memory=x.is_cuda)
                self._buffers[name] = buffer
            buffer.copy_(x.detach(), non_blocking=True)
        if any(x.is_cuda for x in every.values()):
            torch.cuda.synchronize()
        return (
            {name: self._buffers[f"weights {name}"] for name in weights},
            unflatten({name: self._buffers[f"optimiser {name}"] for name in moments}, rest),
        )

    def start(self, write: Callable[[], None]) -> None:
        """Begin to write; the one before has been waited for."""
        assert self._ended is None
        self._ended = ended = Event()

        def run() -> None:
            try:
                write()
            except BaseException as error:
                self._error = error
            finally:
                ended.set()

        Thread(target=run, name="checkpoint").start()

    @property
    def done(self) -> bool:
        """Whether a write has ended that nobody has waited for."""
        return self._ended is not None and self._ended.is_set()

    def wait(self) -> None:
        """Wait until what was started is on the disk; raises what the write raised."""
        self.close()
        error, self._ended, self._error = self._error, None, None
        if error is not None:
            raise error

    def close(self) -> None:
        """Wait for the thread, without an error of its write."""
        if self._ended is not None:
            self._ended.wait()
