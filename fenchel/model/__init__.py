"""Token ids to logits."""

from fenchel.model.config import ModelConfig
from fenchel.model.convert import Converted, convert
from fenchel.model.generation import Generation, read_generation
from fenchel.model.load import Loaded, load, load_model
from fenchel.model.mode import evaluating
from fenchel.model.save import save
from fenchel.model.sight import Cache, Memory, Observer
from fenchel.model.transformer import Transformer

__all__ = [
    "Cache",
    "Converted",
    "Generation",
    "Loaded",
    "Memory",
    "ModelConfig",
    "Observer",
    "Transformer",
    "convert",
    "evaluating",
    "load",
    "load_model",
    "read_generation",
    "save",
]
