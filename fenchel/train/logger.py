"""Those who listen to a run besides the terminal: TensorBoard, and several at once."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from fenchel.train.loop import Listener


class TensorBoard:
    """The numbers of every line of metrics as scalars, one a layer where there are layers."""

    def __init__(self, folder: Path, *, step: int = 0) -> None:
        """Write below ``folder``; what an earlier process wrote beyond ``step`` is forgotten."""
        self.writer = _writer()(str(folder), purge_step=step + 1)

    def step(self, step: int, steps: int) -> None:
        """A step was taken."""

    def say(self, sentence: str) -> None:
        """Something a person should know."""

    def line(self, metrics: Mapping[str, Any]) -> None:
        """A line of metrics was written."""
        for name, value in scalars(metrics).items():
            self.writer.add_scalar(name, value, int(metrics["step"]))
        self.writer.flush()


class Several:
    """Listeners behind one; whoever cannot write any more is left out, and the run goes on."""

    def __init__(self, *listeners: Listener) -> None:
        self.listeners = list(listeners)

    def step(self, step: int, steps: int) -> None:
        """A step was taken."""
        self._tell("step", step, steps)

    def line(self, metrics: Mapping[str, Any]) -> None:
        """A line of metrics was written."""
        self._tell("line", metrics)

    def say(self, sentence: str) -> None:
        """Something a person should know."""
        self._tell("say", sentence)

    def _tell(self, what: str, *told: Any) -> None:
        for listener in tuple(self.listeners):
            try:
                getattr(listener, what)(*told)
            except OSError as error:  # a terminal that was closed, a disk that is full
                self.listeners.remove(listener)
                self.say(f"{type(listener).__name__} no longer listens ({error}).")


def require_loggers(names: Iterable[str]) -> None:
    """Refuse loggers whose package is not here, before any work is done."""
    if "tensorboard" in names:
        _writer()


def scalars(metrics: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of a line by name; lists as name/layer_0, ..., lists of them with /head_0, ...

    >>> scalars({"step": 3, "train/loss": 2.5, "attention/entropy": [1.0, 0.5]})
    {'train/loss': 2.5, 'attention/entropy/layer_0': 1.0, 'attention/entropy/layer_1': 0.5}
    >>> scalars({"attention/head_rms": [[2.0, 3.0]]})
    {'attention/head_rms/layer_0/head_0': 2.0, 'attention/head_rms/layer_0/head_1': 3.0}
    """
    found: dict[str, float] = {}
    for name, value in metrics.items():
        if name != "step":
            found |= _numbered(name, value, ("layer", "head"))
    return found


def _numbered(name: str, value: Any, axes: tuple[str, ...]) -> dict[str, float]:
    if isinstance(value, int | float):
        return {name: float(value)}
    found: dict[str, float] = {}
    if isinstance(value, list | tuple) and axes:
        for n, one in enumerate(value):
            found |= _numbered(f"{name}/{axes[0]}_{n}", one, axes[1:])
    return found


def _writer() -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise ValueError(
            "the logger tensorboard needs a package that is not here: "
            "pip install 'fenchel[log]', or leave it out of train.log."
        ) from None
    return SummaryWriter
