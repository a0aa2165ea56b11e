"""Parameters and gradients to moved parameters, measured in score space; schedules."""

from fenchel.optim.build import OptimConfig, build_beta2, build_optimiser, build_schedule
from fenchel.optim.clip import clip_
from fenchel.optim.muon import Muon
from fenchel.optim.ordinary import adam_l2, adamw, nesterov, sgd, sgd_average
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
    "adam_l2",
    "adamw",
    "attention_pairs",
    "beta2_warmup",
    "build_beta2",
    "build_optimiser",
    "build_schedule",
    "clip_",
    "constant",
    "inverse_sqrt",
    "nesterov",
    "remove_gauge",
    "score_step",
    "sgd",
    "sgd_average",
    "warmup_cosine",
    "warmup_hold",
    "warmup_linear",
]
