"""What a checkpoint's attention does on a text, measured."""

from fenchel.inspection.certificates import Search
from fenchel.inspection.decisions import (
    Decision,
    certify_constant,
    certify_decision,
    certify_text_constant,
    certify_text_decisions,
)
from fenchel.inspection.run import certify_model, inspect, open_model
from fenchel.inspection.substitutions import (
    SubstitutionDecision,
    certify_substitutions,
    certify_text_substitutions,
    read_synonyms,
)
from fenchel.inspection.trace import InspectedModel
from fenchel.inspection_result import (
    Certification,
    DecisionCertification,
    Inspection,
    SubstitutionCertification,
)

__all__ = [
    "Certification",
    "Decision",
    "DecisionCertification",
    "InspectedModel",
    "Inspection",
    "Search",
    "SubstitutionCertification",
    "SubstitutionDecision",
    "certify_constant",
    "certify_decision",
    "certify_model",
    "certify_substitutions",
    "certify_text_constant",
    "certify_text_decisions",
    "certify_text_substitutions",
    "inspect",
    "open_model",
    "read_synonyms",
]
