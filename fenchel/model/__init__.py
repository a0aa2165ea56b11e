"""Token ids to logits."""

from fenchel.model.config import ModelConfig
from fenchel.model.load import Loaded, load, load_model
from fenchel.model.mode import evaluating
from fenchel.model.save import save
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
    "load_model",
    "save",
]
