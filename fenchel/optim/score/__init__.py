"""Query and key weights moved by how far their scores go."""

from fenchel.optim.score.gauge import remove_gauge
from fenchel.optim.score.step import Step, score_step

__all__ = ["Step", "remove_gauge", "score_step"]
