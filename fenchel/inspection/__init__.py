"""What a checkpoint's attention does on a text, measured."""

from fenchel.inspection.loader import open_subject
from fenchel.inspection.measure import inspect
from fenchel.inspection.result import (
    Bracket,
    Head,
    Influence,
    Inspection,
    Layer,
    Method,
    Network,
    Precision,
)
from fenchel.inspection.subject import Attention, Passage, Reading, Subject

__all__ = [
    "Attention",
    "Bracket",
    "Head",
    "Influence",
    "Inspection",
    "Layer",
    "Method",
    "Network",
    "Passage",
    "Precision",
    "Reading",
    "Subject",
    "inspect",
    "open_subject",
]
