"""What a checkpoint's attention does on a text, measured."""

from fenchel.inspection.certificates import Search
from fenchel.inspection.loader import open_model
from fenchel.inspection.run import certify_model, inspect
from fenchel.inspection.trace import InspectedModel
from fenchel.inspection_result import (
    Certification,
    Inspection,
)

__all__ = [
    "Certification",
    "InspectedModel",
    "Inspection",
    "Search",
    "certify_model",
    "inspect",
    "open_model",
]
