"""GPT-2: learned positions, LayerNorm, biases everywhere, weight matrices stored transposed."""

from fenchel.model.families.family import Family
from fenchel.model.families.setting_rows import (
    PLAIN,
    constant,
    flag,
    number,
    only,
    size,
    size_or_none,
    unread,
    word,
)
from fenchel.model.families.tensor_rows import TRANSPOSED, weight, weight_and_bias

GPT2 = Family(
    name="gpt2",
    architecture="GPT2LMHeadModel",
    settings=(
        size("vocabulary", "vocab_size"),
        size("context", "n_positions"),
        size("width", "n_embd"),
        size("layers", "n_layer"),
        size("heads", "n_head"),
        size_or_none("hidden", "n_inner", written="mlp_width"),
        word("mlp", "activation_function", PLAIN, "gelu_new"),
        number("epsilon", "layer_norm_epsilon", 1e-5),
        number("dropout", "resid_pdrop", 0.1),
        flag("tied", "tie_word_embeddings", True),
        constant(norm="layer", positions="learned", bias=True),
        only("scale_attn_weights", True),
        only("scale_attn_by_inverse_layer_idx", False),
        only("add_cross_attention", False),
        unread("n_ctx", "attn_pdrop", "embd_pdrop", "reorder_and_upcast_attn"),
        unread("summary_type", "summary_use_proj", "summary_activation", "summary_proj_to_labels"),
        unread("summary_first_dropout"),
    ),
    tensors=(
        weight("embed", "transformer.wte"),
        weight("pos_embed", "transformer.wpe"),
        *weight_and_bias("blocks.{}.attention_norm", "transformer.h.{}.ln_1"),
        *weight_and_bias("blocks.{}.attention.qkv", "transformer.h.{}.attn.c_attn", TRANSPOSED),
        *weight_and_bias("blocks.{}.attention.out", "transformer.h.{}.attn.c_proj", TRANSPOSED),
        *weight_and_bias("blocks.{}.mlp_norm", "transformer.h.{}.ln_2"),
        *weight_and_bias("blocks.{}.mlp.up", "transformer.h.{}.mlp.c_fc", TRANSPOSED),
        *weight_and_bias("blocks.{}.mlp.down", "transformer.h.{}.mlp.c_proj", TRANSPOSED),
        *weight_and_bias("norm", "transformer.ln_f"),
        weight("lm_head", "lm_head"),
    ),
    prefix="transformer.",
    copies={"lm_head.weight": "transformer.wte.weight"},
    ignored=(r"(transformer\.)?h\.\d+\.attn\.(bias|masked_bias)",),
)
