"""Scores to weights: argmax over the simplex, its value, derivative, loss, certificate."""

from fenchel.choice.base import Choice
from fenchel.choice.budget import beta_for_budget
from fenchel.choice.capped import Capped
from fenchel.choice.certificate import Multipliers, Residuals, kkt, multipliers
from fenchel.choice.entmax import Entmax
from fenchel.choice.hard import Hard
from fenchel.choice.named import named
from fenchel.choice.softmax import Softmax
from fenchel.choice.sparsemax import Sparsemax

__all__ = [
    "Capped",
    "Choice",
    "Entmax",
    "Hard",
    "Multipliers",
    "Residuals",
    "Softmax",
    "Sparsemax",
    "beta_for_budget",
    "kkt",
    "multipliers",
    "named",
]
