"""The loop, losses, checkpoints and the run directory."""

from fenchel.train.config import TrainConfig, seconds
from fenchel.train.logger import Several, TensorBoard, require_loggers
from fenchel.train.loop import Listener, Loop, Outcome
from fenchel.train.machine import (
    Pace,
    enough_memory,
    environment,
    keep_memory,
    measure,
)
from fenchel.train.rundir import RunDir
from fenchel.train.step import Stepper

__all__ = [
    "Listener",
    "Loop",
    "Outcome",
    "Pace",
    "RunDir",
    "Several",
    "Stepper",
    "TensorBoard",
    "TrainConfig",
    "enough_memory",
    "environment",
    "keep_memory",
    "measure",
    "require_loggers",
    "seconds",
]
