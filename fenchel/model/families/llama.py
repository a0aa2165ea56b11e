"""Llama and its relatives: rotary positions, RMSNorm, gated MLP, grouped heads.

llama     also TinyLlama, SmolLM, SmolLM2
mistral   a window in every layer, or none
qwen2     a bias for queries, keys and values only; no token begins a text
qwen3     RMSNorm of queries and keys per head; no token begins a text
"""

from fenchel.model.families.config_reader import ConfigReader
from fenchel.model.families.family import Family
from fenchel.model.families.rope_settings import rope
from fenchel.model.families.setting_rows import (
    GATED,
    Setting,
    Settings,
    attention_dropout,
    constant,
    flag,
    number,
    only,
    size,
    size_or_none,
    word,
)
from fenchel.model.families.tensor_rows import FUSED_QKV, weight, weight_and_bias
from fenchel.model.families.window_settings import switchable, uniform

SIZES = (
    size("vocabulary", "vocab_size"),
    size("context", "max_position_embeddings"),
    size("width", "hidden_size"),
    size("layers", "num_hidden_layers"),
    size("heads", "num_attention_heads"),
    size("hidden", "intermediate_size", written="mlp_width"),
    size_or_none("kv_heads", "num_key_value_heads", written="groups"),
    size_or_none("head_size", "head_dim", written="head_width"),
    number("epsilon", "rms_norm_eps", 1e-6),
    attention_dropout("attention_dropout", 0.0),
)
"""Settings that these families and the Gemmas share."""
NAMES = (
    weight("embed", "model.embed_tokens"),
    weight("blocks.{}.attention_norm", "model.layers.{}.input_layernorm"),
    *weight_and_bias(
        "blocks.{}.attention.qkv",
        [f"model.layers.{{}}.self_attn.{x}_proj" for x in "qkv"],
        FUSED_QKV,
    ),
    weight("blocks.{}.attention.q_norm", "model.layers.{}.self_attn.q_norm"),
    weight("blocks.{}.attention.k_norm", "model.layers.{}.self_attn.k_norm"),
    *weight_and_bias("blocks.{}.attention.out", "model.layers.{}.self_attn.o_proj"),
    *weight_and_bias("blocks.{}.mlp.gate", "model.layers.{}.mlp.gate_proj"),
    *weight_and_bias("blocks.{}.mlp.up", "model.layers.{}.mlp.up_proj"),
    *weight_and_bias("blocks.{}.mlp.down", "model.layers.{}.mlp.down_proj"),
    weight("norm", "model.norm"),
    weight("lm_head", "lm_head"),
)
"""Tensor names that these families and the Gemmas share."""
_COMMON = (
    *SIZES,
    word("mlp", "hidden_act", GATED, "silu"),
    flag("tied", "tie_word_embeddings", False),
    rope(),
)
_TENSORS = (*NAMES, weight("blocks.{}.mlp_norm", "model.layers.{}.post_attention_layernorm"))
_COPIES = {"lm_head.weight": "model.embed_tokens.weight"}
_IGNORED = (r"(model\.)?layers\.\d+\.self_attn\.rotary_emb\.inv_freq",)


def _biases() -> Setting:
    """Llama has two switches for biases, ModelConfig has one."""

    def read(c: ConfigReader) -> Settings:
        attention, mlp = c.flag("attention_bias", False), c.flag("mlp_bias", False)
        if attention != mlp:
            raise c.wrong("attention_bias", attention, f"as mlp_bias={mlp} is; fenchel has one")
        return {"bias": attention}

    return Setting(read, lambda m: {"attention_bias": m.bias, "mlp_bias": m.bias})


def _even_heads() -> Setting:
    """transformers refuses a Llama whose width is not a multiple of its heads."""

    def read(c: ConfigReader) -> Settings:
        width, heads = c.integer("hidden_size"), c.integer("num_attention_heads")
        if width % heads:
            raise c.wrong("hidden_size", width, f"a multiple of num_attention_heads={heads}")
        return {}

    return Setting(read, lambda _: {})


def _family(name: str, architecture: str, *rows: Setting, begins_with_bos: bool = True) -> Family:
    return Family(
        name=name,
        architecture=architecture,
        settings=(*_COMMON, *rows),
        tensors=_TENSORS,
        prefix="model.",
        copies=_COPIES,
        ignored=_IGNORED,
        begins_with_bos=begins_with_bos,
    )


LLAMA = _family(
    "llama", "LlamaForCausalLM", _biases(), _even_heads(), only("rope_interleaved", False)
)
MISTRAL = _family("mistral", "MistralForCausalLM", uniform(), only("attention_bias", False))
QWEN2 = _family(
    "qwen2",
    "Qwen2ForCausalLM",
    *(switchable(), constant(qkv_bias=True), only("use_mrope", False)),
    begins_with_bos=False,
)
QWEN3 = _family(
    "qwen3",
    "Qwen3ForCausalLM",
    *(switchable(), constant(qk_norm=True), only("attention_bias", False)),
    begins_with_bos=False,
)
