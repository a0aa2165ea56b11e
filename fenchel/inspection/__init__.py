"""What a checkpoint's attention does on a text, measured."""

from fenchel.inspection.certificates import Search
from fenchel.inspection.loader import open_model
from fenchel.inspection.run import certify_model, inspect
from fenchel.inspection.trace import BlockTrace, ForwardTrace, InspectedModel
from fenchel.inspection_result import (
    BlockResult,
    Certificates,
    Certification,
    Head,
    HeadCertificate,
    Influence,
    Inspection,
    Interval,
    LayerCertificate,
    Method,
    Network,
    Precision,
)

__all__ = [
    "BlockResult",
    "BlockTrace",
    "Certificates",
    "Certification",
    "ForwardTrace",
    "Head",
    "HeadCertificate",
    "Influence",
    "InspectedModel",
    "Inspection",
    "Interval",
    "LayerCertificate",
    "Method",
    "Network",
    "Precision",
    "Search",
    "certify_model",
    "inspect",
    "open_model",
]
