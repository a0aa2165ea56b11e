"""Token ids to logits."""

from fenchel.model.block import Cache, Observer
from fenchel.model.config import ModelConfig
from fenchel.model.load import Loaded, load
from fenchel.model.mode import evaluating
from fenchel.model.transformer import Transformer

__all__ = ["Cache", "Loaded", "ModelConfig", "Observer", "Transformer", "evaluating", "load"]
