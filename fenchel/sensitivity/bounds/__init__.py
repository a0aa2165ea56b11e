"""Upper bounds on how far a layer can move, each with its theorem and the set where it holds."""

from fenchel.sensitivity.bounds.attention import (
    ball,
    castin,
    castin_at,
    distance_attention,
    entropy,
    generic,
    l2_attention,
    normalised_radius,
    penalty,
    row,
    token_max,
    token_max_ball,
    yudin,
)
from fenchel.sensitivity.bounds.covariance import Terms, covariance, covariance_terms
from fenchel.sensitivity.bounds.feedforward import activation, linear, norm_layer

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
