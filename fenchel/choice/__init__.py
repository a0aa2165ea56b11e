"""Scores to weights: argmax over the simplex, its value, derivative, loss, certificate."""

from fenchel.choice.base import Choice
from fenchel.choice.entmax import Entmax
from fenchel.choice.hard import Hard
from fenchel.choice.named import named
from fenchel.choice.softmax import Softmax
from fenchel.choice.sparsemax import Sparsemax

__all__ = ["Choice", "Entmax", "Hard", "Softmax", "Sparsemax", "named"]
