"""Token ids to logits."""

from fenchel.model.config import ModelConfig
from fenchel.model.load import Loaded, load
from fenchel.model.mode import evaluating
from fenchel.model.sight import Cache, Memory, Observer
from fenchel.model.transformer import Transformer

__all__ = [
    "Cache",
    "Loaded",
    "Memory",
    "ModelConfig",
    "Observer",
    "Transformer",
    "evaluating",
    "load",
]
