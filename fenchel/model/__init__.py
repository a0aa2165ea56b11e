"""Token ids to logits."""

from fenchel.model.attention import by_distance
from fenchel.model.config import ModelConfig
from fenchel.model.forward_context import Cache, Memory, Observer
from fenchel.model.transformer import Transformer, evaluating

__all__ = ["Cache", "Memory", "ModelConfig", "Observer", "Transformer", "by_distance", "evaluating"]
