"""Token ids to logits."""

from fenchel.model.attention import l2_as_dot_product
from fenchel.model.config import ModelConfig
from fenchel.model.flops import Flops, attention_entries, forward_flops, training_flops
from fenchel.model.forward_context import (
    CrossAttentionCache,
    ForwardContext,
)
from fenchel.model.transformer import Transformer, evaluating

__all__ = [
    "CrossAttentionCache",
    "Flops",
    "ForwardContext",
    "ModelConfig",
    "Transformer",
    "attention_entries",
    "evaluating",
    "forward_flops",
    "l2_as_dot_product",
    "training_flops",
]
