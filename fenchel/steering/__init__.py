"""Steering: directions that are added to the stream of a model, and how far they move its law."""

from fenchel.steering.direction import (
    Direction,
    SingularDirections,
    difference_of_means,
    singular_directions,
    word_direction,
)
from fenchel.steering.strength import MOST_NATS, Divergence, Strength, divergence, find_strength

__all__ = [
    "MOST_NATS",
    "Direction",
    "Divergence",
    "SingularDirections",
    "Strength",
    "difference_of_means",
    "divergence",
    "find_strength",
    "singular_directions",
    "word_direction",
]
