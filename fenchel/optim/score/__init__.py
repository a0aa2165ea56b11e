"""Query and key weights moved by the change of their scores.

``ScoreDescent`` and ``ScoreTrust`` are optimisers for training. ``score_step`` is the exact step
for one layer, and ``score_bounds`` has the bounds that belong to it; both are for study.
"""

from fenchel.optim.score import exact_step, score_bounds
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
    "HeadProjection",
    "HeadStats",
    "LayerArguments",
    "OutputChange",
    "QueryKeyLayer",
    "QueryKeyPair",
    "ScoreDescent",
    "ScoreTrust",
    "Step",
    "attention_pairs",
    "exact_step",
    "pass_gradients",
    "remaining_parameters",
    "remove_gauge",
    "score_bounds",
    "score_step",
]
