"""GPT-NeoX (Pythia): rotary on a quarter of each head, attention and MLP in parallel."""

from fenchel.model.families.family import Family
from fenchel.model.families.rope_settings import partial_rope
from fenchel.model.families.setting_rows import (
    CONTEXT,
    PLAIN,
    SIZES,
    attention_dropout,
    constant,
    flag,
    number,
    only,
    unread,
    word,
)
from fenchel.model.families.tensor_rows import INTERLEAVED_QKV, weight, weight_and_bias

_WORDS = {"gelu": "gelu", **PLAIN}

GPT_NEOX = Family(
    name="gpt_neox",
    architecture="GPTNeoXForCausalLM",
    settings=(
        *SIZES,
        CONTEXT,
        word("mlp", "hidden_act", _WORDS, "gelu"),
        number("epsilon", "layer_norm_eps", 1e-5),
        number("dropout", "hidden_dropout", 0.0),
        attention_dropout("attention_dropout", 0.0),
        flag("parallel", "use_parallel_residual", True),
        flag("tied", "tie_word_embeddings", False),
        partial_rope(10000.0, 0.25),
        constant(norm="layer", bias=True),
        only("attention_bias", True),
        unread("is_decoder"),
    ),
    tensors=(
        weight("embed", "gpt_neox.embed_in"),
        *weight_and_bias("blocks.{}.attention_norm", "gpt_neox.layers.{}.input_layernorm"),
        *weight_and_bias(
            "blocks.{}.attention.qkv",
            "gpt_neox.layers.{}.attention.query_key_value",
            INTERLEAVED_QKV,
        ),
        *weight_and_bias("blocks.{}.attention.out", "gpt_neox.layers.{}.attention.dense"),
        *weight_and_bias("blocks.{}.mlp_norm", "gpt_neox.layers.{}.post_attention_layernorm"),
        *weight_and_bias("blocks.{}.mlp.up", "gpt_neox.layers.{}.mlp.dense_h_to_4h"),
        *weight_and_bias("blocks.{}.mlp.down", "gpt_neox.layers.{}.mlp.dense_4h_to_h"),
        *weight_and_bias("norm", "gpt_neox.final_layer_norm"),
        weight("lm_head", "embed_out"),
    ),
    prefix="gpt_neox.",
    copies={"embed_out.weight": "gpt_neox.embed_in.weight"},
    ignored=(r"(gpt_neox\.)?layers\.\d+\.attention\.(bias|masked_bias|rotary_emb\.inv_freq)",),
)
