"""A stand-in for a CUDA graph on a machine without a GPU.

``record`` keeps the operations of a function with the memory and the numbers that it had, undoes
what they have written, and repeats exactly those operations. A function that branches on the host,
reads a number of the device, or takes a value of this call from anywhere but that memory gives
other results there, or an error. ``record_pass`` lets it read numbers, as the loss does on a CPU
and not on a GPU: what it decides by them once, it decides in every replay.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


class Recording(TorchDispatchMode):
    """The operations on tensors, with all that they read and write."""

    def __init__(self, *, reads: bool = False) -> None:
        super().__init__()
        self.reads = reads
        self.calls: list[tuple[Any, Any, Any, Any]] = []
        self.made: set[int] = set()
        self.before: dict[int, tuple[Tensor, Tensor]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        read = "_local_scalar_dense" in str(func) or "is_nonzero" in str(func)
        if read and not self.reads:
            raise RuntimeError("operation not permitted when stream is capturing")
        keywords = kwargs or {}
        for argument, x in zip(func._schema.arguments, args, strict=False):
            if argument.alias_info is not None and argument.alias_info.is_write:
                self._save(x if isinstance(x, list | tuple) else [x])
        if (out := keywords.get("out")) is not None:
            self._save([out])
        result = func(*args, **keywords)
        views = any(r.alias_info is not None for r in func._schema.returns)
        if not views:
            self.made |= {x.untyped_storage()._cdata for x in _tensors(result)}
        # operations may give a tensor another shape in place
        self.calls.append((func, *map(_detached, (args, keywords, result))))
        return result

    def _save(self, written: Any) -> None:
        for x in written:
            if x.untyped_storage()._cdata not in self.made:
                self.before.setdefault(id(x), (x, x.clone()))


def _tensors(result: Any) -> Iterator[Tensor]:
    for x in result if isinstance(result, list | tuple) else [result]:
        if isinstance(x, Tensor):
            yield x


def _detached(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _detached(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map(_detached, value))
    return value.detach() if isinstance(value, Tensor) else value


def record(run: Callable[[], None], _: torch.device, *, reads: bool = False) -> Callable[[], None]:
    """A capture: what it has written is undone, and a replay writes where it wrote."""
    with torch.random.fork_rng(devices=[]), Recording(reads=reads) as recording:
        run()
    for x, before in reversed(recording.before.values()):
        x.copy_(before)

    def replay() -> None:
        with torch.no_grad():
            for func, args, keywords, result in recording.calls:
                again = func(*args, **keywords)
                if all(r.alias_info is None for r in func._schema.returns):
                    for x, now in zip(_tensors(result), _tensors(again), strict=True):
                        x.copy_(now)

    return replay


record_pass = partial(record, reads=True)
