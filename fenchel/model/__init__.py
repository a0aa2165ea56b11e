"""Token ids to logits."""

from fenchel.model.attention import l2_as_dot_product
from fenchel.model.config import ModelConfig
from fenchel.model.forward_context import (
    AttentionOverride,
    Cache,
    CrossAttentionCache,
    ForwardContext,
    Observer,
)
from fenchel.model.transformer import Transformer, evaluating

__all__ = [
    "AttentionOverride",
    "Cache",
    "CrossAttentionCache",
    "ForwardContext",
    "ModelConfig",
    "Observer",
    "Transformer",
    "evaluating",
    "l2_as_dot_product",
]
