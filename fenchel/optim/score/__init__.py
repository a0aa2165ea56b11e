"""Query and key weights moved by how far their scores go."""

from fenchel.optim.score.descent import ScoreDescent
from fenchel.optim.score.exact_step import Step, remove_gauge, score_step
from fenchel.optim.score.pairs import HeadProjection, QueryKeyPair, attention_pairs
from fenchel.optim.score.step_size import HeadStats
from fenchel.optim.score.trust import ScoreTrust

__all__ = [
    "HeadProjection",
    "HeadStats",
    "QueryKeyPair",
    "ScoreDescent",
    "ScoreTrust",
    "Step",
    "attention_pairs",
    "remove_gauge",
    "score_step",
]
