"""Scores to weights: argmax over the simplex, its value, derivative, loss, certificate."""

from fenchel.choice.base import Choice
from fenchel.choice.budget import beta_for_budget
from fenchel.choice.by_name import by_name
from fenchel.choice.capped import Capped
from fenchel.choice.entmax import Entmax, Sparsemax
from fenchel.choice.hard import Hard
from fenchel.choice.kkt import Multipliers, Residuals, kkt, multipliers
from fenchel.choice.softmax import Softmax

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
    "by_name",
    "kkt",
    "multipliers",
]
