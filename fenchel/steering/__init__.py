"""Steering: directions that are added to the stream of a model, and how far they move its law."""

from fenchel.steering.direction import Direction, difference_of_means, word_direction
from fenchel.steering.strength import MOST_NATS, Divergence, Strength, divergence, find_strength

__all__ = [
    "MOST_NATS",
    "Direction",
    "Divergence",
    "Strength",
    "difference_of_means",
    "divergence",
    "find_strength",
    "word_direction",
]
