"""BLOOM: ALiBi, a norm after the embedding, an MLP four times as wide as the model.

It reads texts of any length. ``seq_length``, which transformers does not use, stores the context
of ModelConfig.
"""

from fenchel.model.families.family import Family
from fenchel.model.families.setting_rows import (
    attention_dropout,
    constant,
    flag,
    number,
    only,
    size,
    unread,
)
from fenchel.model.families.tensor_rows import INTERLEAVED_QKV, weight, weight_and_bias

BLOOM = Family(
    name="bloom",
    architecture="BloomForCausalLM",
    settings=(
        size("vocabulary", "vocab_size"),
        size("context", "seq_length", default=2048),
        size("width", "hidden_size", "n_embed"),
        size("layers", "n_layer", "num_hidden_layers"),
        size("heads", "n_head", "num_attention_heads"),
        number("epsilon", "layer_norm_epsilon", 1e-5),
        number("dropout", "hidden_dropout", 0.0),
        attention_dropout("attention_dropout", 0.0),
        flag("tied", "tie_word_embeddings", True),
        constant(norm="layer", positions="alibi", bias=True, mlp="gelu_tanh", embedding_norm=True),
        only("apply_residual_connection_post_layernorm", False),
        only("n_inner", None),
        unread("slow_but_exact", "offset_alibi", "bias_dropout_fusion", "masked_softmax_fusion"),
        unread("skip_bias_add", "skip_bias_add_qkv", "attention_softmax_in_fp32"),
    ),
    tensors=(
        weight("embed", "transformer.word_embeddings"),
        *weight_and_bias("embed_norm", "transformer.word_embeddings_layernorm"),
        *weight_and_bias("blocks.{}.attention_norm", "transformer.h.{}.input_layernorm"),
        *weight_and_bias(
            "blocks.{}.attention.qkv",
            "transformer.h.{}.self_attention.query_key_value",
            INTERLEAVED_QKV,
        ),
        *weight_and_bias("blocks.{}.attention.out", "transformer.h.{}.self_attention.dense"),
        *weight_and_bias("blocks.{}.mlp_norm", "transformer.h.{}.post_attention_layernorm"),
        *weight_and_bias("blocks.{}.mlp.up", "transformer.h.{}.mlp.dense_h_to_4h"),
        *weight_and_bias("blocks.{}.mlp.down", "transformer.h.{}.mlp.dense_4h_to_h"),
        *weight_and_bias("norm", "transformer.ln_f"),
        weight("lm_head", "lm_head"),
    ),
    prefix="transformer.",
    copies={"lm_head.weight": "transformer.word_embeddings.weight"},
)
