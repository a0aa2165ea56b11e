"""BLOOM: ALiBi, a norm right after the embedding, an MLP four times as wide.

It reads texts of any length. ``seq_length``, which transformers does not use, keeps the length
that ours was made for.
"""

from fenchel.model.families.family import Family
from fenchel.model.families.setting_rows import (
    always,
    attention_dropout,
    flag,
    number,
    only,
    size,
    unread,
)
from fenchel.model.families.tensor_rows import HEAD_BY_HEAD, both, weight

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
        always(norm="layer", positions="alibi", bias=True, mlp="gelu_tanh", embedding_norm=True),
        only("apply_residual_connection_post_layernorm", False),
        only("n_inner", None),
        unread("slow_but_exact", "offset_alibi", "bias_dropout_fusion", "masked_softmax_fusion"),
        unread("skip_bias_add", "skip_bias_add_qkv", "attention_softmax_in_fp32", "unk_token_id"),
    ),
    tensors=(
        weight("embed", "transformer.word_embeddings"),
        *both("embed_norm", "transformer.word_embeddings_layernorm"),
        *both("blocks.{}.attention_norm", "transformer.h.{}.input_layernorm"),
        *both(
            "blocks.{}.attention.qkv",
            "transformer.h.{}.self_attention.query_key_value",
            HEAD_BY_HEAD,
        ),
        *both("blocks.{}.attention.out", "transformer.h.{}.self_attention.dense"),
        *both("blocks.{}.mlp_norm", "transformer.h.{}.post_attention_layernorm"),
        *both("blocks.{}.mlp.up", "transformer.h.{}.mlp.dense_h_to_4h"),
        *both("blocks.{}.mlp.down", "transformer.h.{}.mlp.dense_4h_to_h"),
        *both("norm", "transformer.ln_f"),
        weight("lm_head", "lm_head"),
    ),
    prefix="transformer.",
    copies={"lm_head.weight": "transformer.word_embeddings.weight"},
)
