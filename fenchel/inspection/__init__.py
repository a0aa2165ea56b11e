"""What a checkpoint's attention does on a text, measured."""

from fenchel.inspection.measure import inspect
from fenchel.inspection.opening import open_subject
from fenchel.inspection.subject import Attention, Passage, Reading, Subject
from fenchel.inspection.values import (
    Bracket,
    Head,
    Influence,
    Inspection,
    Layer,
    Method,
    Network,
    Precision,
)

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
