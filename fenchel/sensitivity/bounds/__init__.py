"""Upper bounds of how far a layer can move, each with its theorem and where it holds."""

from fenchel.sensitivity.bounds.attention import castin_at, generic, token_max, yudin
from fenchel.sensitivity.bounds.ball import ball, castin, normalised_radius, token_max_ball
from fenchel.sensitivity.bounds.covariance import Terms, covariance, covariance_terms
from fenchel.sensitivity.bounds.l2 import distance_attention, l2_attention
from fenchel.sensitivity.bounds.layers import activation, linear, norm_layer
from fenchel.sensitivity.bounds.scores import entropy, penalty, row

__all__ = [
    "Terms",
    "activation",
    "ball",
    "castin",
    "castin_at",
    "covariance",
    "covariance_terms",
    "distance_attention",
    "entropy",
    "generic",
    "l2_attention",
    "linear",
    "norm_layer",
    "normalised_radius",
    "penalty",
    "row",
    "token_max",
    "token_max_ball",
    "yudin",
]
