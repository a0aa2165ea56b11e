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
from fenchel.optim.score import (
    HeadStats,
    Pair,
    Rows,
    ScoreDescent,
    ScoreTrust,
    Step,
    attention_pairs,
    remove_gauge,
    score_step,
)
from fenchel.optim.together import Together

__all__ = [
    "HeadStats",
    "Muon",
    "OptimConfig",
    "Pair",
    "Rows",
    "Schedule",
    "ScoreDescent",
    "ScoreTrust",
    "Step",
    "Together",
    "attention_pairs",
    "beta2_warmup",
    "build_optimiser",
    "build_schedule",
    "constant",
    "inverse_sqrt",
    "remove_gauge",
    "score_step",
    "warmup_cosine",
    "warmup_hold",
    "warmup_linear",
]
