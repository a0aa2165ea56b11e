"""Families of checkpoints: a table of settings and a table of names for each."""

from fenchel.model.families.family import Family, Match
from fenchel.model.families.registry import FAMILIES, family_for, family_of
from fenchel.model.families.t5 import T5

__all__ = [
    "FAMILIES",
    "T5",
    "Family",
    "Match",
    "family_for",
    "family_of",
]
