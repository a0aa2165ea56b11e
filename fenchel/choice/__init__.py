"""Scores to weights: argmax over the simplex or a box, its value, derivative, loss, certificate.

``fenchel.choice.hypothesis_test`` (softmax as a tilted distribution: divergences and error
exponents) is for study, and serves the lessons.
"""

from fenchel.choice import hypothesis_test
from fenchel.choice.base import Choice
from fenchel.choice.box_range import range_over_box
from fenchel.choice.by_name import MAPS, by_name
from fenchel.choice.capped import Capped
from fenchel.choice.entmax import Entmax, Sparsemax
from fenchel.choice.hard import Hard
from fenchel.choice.kkt import Residuals, kkt, multipliers
from fenchel.choice.kl_budget import beta_for_budget
from fenchel.choice.membership import Membership, membership
from fenchel.choice.reverse_kl import ReverseKL, reverse_kl
from fenchel.choice.sigmoid import Sigmoid
from fenchel.choice.softmax import Softmax

__all__ = [
    "MAPS",
    "Capped",
    "Choice",
    "Entmax",
    "Hard",
    "Membership",
    "Residuals",
    "ReverseKL",
    "Sigmoid",
    "Softmax",
    "Sparsemax",
    "beta_for_budget",
    "by_name",
    "hypothesis_test",
    "kkt",
    "membership",
    "multipliers",
    "range_over_box",
    "reverse_kl",
]
