"""The loop, losses, checkpoints and the run directory."""

from fenchel.train.checkpoint import Progress
from fenchel.train.config import TrainConfig, seconds
from fenchel.train.environment import environment
from fenchel.train.logger import Several, TensorBoard, require_loggers
from fenchel.train.loop import Listener, Loop, Outcome
from fenchel.train.memory import enough_memory, keep_memory
from fenchel.train.pace import Pace, measure
from fenchel.train.rundir import RunDir
from fenchel.train.step import Stepper

__all__ = [
    "Listener",
    "Loop",
    "Outcome",
    "Pace",
    "Progress",
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
