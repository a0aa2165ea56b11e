"""Optimisers and schedules, among them those measured in the space of attention scores."""

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
from fenchel.optim.score import score_bounds
from fenchel.optim.score.descent import ScoreDescent
from fenchel.optim.score.exact_step import Step, remove_gauge, score_step
from fenchel.optim.score.output_change import OutputChange
from fenchel.optim.score.pairs import (
    HeadProjection,
    LayerArguments,
    QueryKeyLayer,
    QueryKeyPair,
    attention_pairs,
    pass_gradients,
    remaining_parameters,
)
from fenchel.optim.score.step_size import HeadStats
from fenchel.optim.score.trust import ScoreTrust

__all__ = [
    "CombinedOptimiser",
    "HeadProjection",
    "HeadStats",
    "LayerArguments",
    "Muon",
    "OptimConfig",
    "OutputChange",
    "QueryKeyLayer",
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
    "pass_gradients",
    "remaining_parameters",
    "remove_gauge",
    "score_bounds",
    "score_step",
    "sgd",
    "sgd_average",
    "warmup_cosine",
    "warmup_hold",
    "warmup_linear",
]
