"""What a checkpoint's attention does on a text, measured."""

from fenchel.inspection.loader import open_model
from fenchel.inspection.measure import inspect
from fenchel.inspection.result import (
    BlockResult,
    Head,
    Influence,
    Inspection,
    Interval,
    Method,
    Network,
    Precision,
)
from fenchel.inspection.trace import BlockTrace, ForwardTrace, InspectedModel

__all__ = [
    "BlockResult",
    "BlockTrace",
    "ForwardTrace",
    "Head",
    "Influence",
    "InspectedModel",
    "Inspection",
    "Interval",
    "Method",
    "Network",
    "Precision",
    "inspect",
    "open_model",
]
