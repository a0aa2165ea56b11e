"""Callbacks of a run in addition to the terminal: TensorBoard, and a list of callbacks.

``Callback`` (fenchel/train/loop.py) is the protocol. Every line of metrics.jsonl is passed to
``log``; a line may hold one number per layer, or one per layer and head.
"""

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from fenchel.train.loop import Callback


class TensorBoard:
    """Writes the numbers of every line of metrics as TensorBoard scalars."""

    def __init__(self, folder: Path, *, step: int = 0) -> None:
        """Write below ``folder``; events of an earlier process beyond ``step`` are purged."""
        self.writer = _summary_writer()(str(folder), purge_step=step + 1)

    def step(self, step: int, steps: int) -> None:
        """Does nothing: steps between two lines of metrics have no scalars."""

    def message(self, text: str) -> None:
        """Does nothing: a message holds no number."""

    def log(self, metrics: Mapping[str, Any]) -> None:
        """Write one line of metrics at its step."""
        for name, value in scalars(metrics).items():
            self.writer.add_scalar(name, value, int(metrics["step"]))
        self.writer.flush()


class CallbackList:
    """Several callbacks as one. A callback that raises OSError is removed, and the run goes on."""

    def __init__(self, *callbacks: Callback) -> None:
        self.callbacks = list(callbacks)

    def step(self, step: int, steps: int) -> None:
        """Pass on a step."""
        self._each(lambda callback: callback.step(step, steps))

    def log(self, metrics: Mapping[str, Any]) -> None:
        """Pass on a line of metrics."""
        self._each(lambda callback: callback.log(metrics))

    def message(self, text: str) -> None:
        """Pass on a message."""
        self._each(lambda callback: callback.message(text))

    def _each(self, call: Callable[[Callback], None]) -> None:
        for callback in tuple(self.callbacks):
            try:
                call(callback)
            except OSError as error:  # a terminal that was closed, a disk that is full
                self.callbacks.remove(callback)
                self.message(
                    f"{type(callback).__name__} failed ({error}) and is left out from here on."
                )


def require_loggers(names: Iterable[str]) -> None:
    """Raise ValueError for a logger whose package is not installed, before any work is done."""
    if "tensorboard" in names:
        _summary_writer()


def scalars(metrics: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of a line by name; lists become name/layer_0, ..., nested lists add /head_0, ...

    >>> scalars({"step": 3, "train/loss": 2.5, "attention/entropy": [1.0, 0.5]})
    {'train/loss': 2.5, 'attention/entropy/layer_0': 1.0, 'attention/entropy/layer_1': 0.5}
    >>> scalars({"attention/head_rms": [[2.0, 3.0]]})
    {'attention/head_rms/layer_0/head_0': 2.0, 'attention/head_rms/layer_0/head_1': 3.0}
    """
    numbers: dict[str, float] = {}
    for name, value in metrics.items():
        if name != "step":
            numbers |= _numbered(name, value, ("layer", "head"))
    return numbers


def _numbered(name: str, value: Any, axes: tuple[str, ...]) -> dict[str, float]:
    if isinstance(value, int | float):
        return {name: float(value)}
    numbers: dict[str, float] = {}
    if isinstance(value, list | tuple) and axes:
        for n, item in enumerate(value):
            numbers |= _numbered(f"{name}/{axes[0]}_{n}", item, axes[1:])
    return numbers


def _summary_writer() -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise ValueError(
            "the logger tensorboard needs a package that is not installed: "
            "pip install 'fenchel[log]', or leave it out of train.log."
        ) from None
    return SummaryWriter
