"""The training loop, its losses and loggers, and the run directory."""

from fenchel.train.config import TrainConfig, seconds
from fenchel.train.hardware import (
    StepTime,
    environment,
    explain_out_of_memory,
    retain_freed_memory,
    select_device,
    time_steps,
)
from fenchel.train.logger import CallbackList, TensorBoard, require_loggers
from fenchel.train.loop import Callback, Loop, Outcome
from fenchel.train.loss import (
    count_targets,
    lm_head_loss,
    named_loss,
    per_sequence,
    target_losses,
    total_loss,
)
from fenchel.train.rundir import RunDir
from fenchel.train.step import Stepper, StepResult, Trainable

__all__ = [
    "Callback",
    "CallbackList",
    "Loop",
    "Outcome",
    "RunDir",
    "StepResult",
    "StepTime",
    "Stepper",
    "TensorBoard",
    "TrainConfig",
    "Trainable",
    "count_targets",
    "environment",
    "explain_out_of_memory",
    "lm_head_loss",
    "named_loss",
    "per_sequence",
    "require_loggers",
    "retain_freed_memory",
    "seconds",
    "select_device",
    "target_losses",
    "time_steps",
    "total_loss",
]
