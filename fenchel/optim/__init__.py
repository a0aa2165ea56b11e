"""Parameters and gradients to moved parameters, measured in score space; schedules."""

from fenchel.optim.build import OptimConfig, build_optimiser, build_schedule
from fenchel.optim.muon import Muon
from fenchel.optim.schedule import (
    Schedule,
    beta2_warmup,
    constant,
    inverse_sqrt,
    warmup_cosine,
    warmup_hold,
    warmup_linear,
)
from fenchel.optim.together import Together

__all__ = [
    "Muon",
    "OptimConfig",
    "Schedule",
    "Together",
    "beta2_warmup",
    "build_optimiser",
    "build_schedule",
    "constant",
    "inverse_sqrt",
    "warmup_cosine",
    "warmup_hold",
    "warmup_linear",
]
