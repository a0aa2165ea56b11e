"""Parameters and gradients to moved parameters, measured in score space; schedules."""

from fenchel.optim.config import (
    OptimConfig,
    build_beta2,
    build_optimiser,
    build_schedule,
)
from fenchel.optim.first_order import (
    CombinedOptimiser,
    adam_l2,
    adamw,
    clip_,
    nesterov,
    sgd,
    sgd_average,
)
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
from fenchel.optim.score.descent import ScoreDescent
from fenchel.optim.score.exact_step import Step, remove_gauge, score_step
from fenchel.optim.score.pairs import HeadProjection, QueryKeyPair, attention_pairs
from fenchel.optim.score.step_size import HeadStats
from fenchel.optim.score.trust import ScoreTrust

__all__ = [
    "CombinedOptimiser",
    "HeadProjection",
    "HeadStats",
    "Muon",
    "OptimConfig",
    "QueryKeyPair",
    "Schedule",
    "ScoreDescent",
    "ScoreTrust",
    "Step",
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
