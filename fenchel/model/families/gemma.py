"""Gemma 1, 2 and 3 (text): Llama's names; gains of 1 + weight, an embedding scaled by its width.

gemma         GeGLU, a head width independent of the model width
gemma2        norms on both sides of a branch, soft caps, every second layer with a window
gemma3_text   QK-norm; five layers of six have a window and another rotary base
"""

from fenchel.model.config import ModelConfig
from fenchel.model.families.family import Family
from fenchel.model.families.llama import NAMES, SIZES
from fenchel.model.families.rope_settings import rope, rope_with_local_base
from fenchel.model.families.setting_rows import (
    Setting,
    Settings,
    constant,
    flag,
    number_or_none,
    only,
    word,
)
from fenchel.model.families.tensor_rows import Row, weight
from fenchel.model.families.window_settings import periodic

_GATES = {"gelu_pytorch_tanh": "geglu_tanh", "gelu": "geglu_tanh"}  # the first release has gelu
_COMMON = (
    *SIZES,
    flag("tied", "tie_word_embeddings", True),
    Setting(lambda c: {"embedding_scale": c.integer("hidden_size") ** 0.5}, lambda _: {}),
    constant(norm_plus_one=True),
    only("attention_bias", False),
    only("use_bidirectional_attention", None, False),
)
_GEMMA1 = weight("blocks.{}.mlp_norm", "model.layers.{}.post_attention_layernorm")
_BOTH_SIDES = (
    weight("blocks.{}.attention_post_norm", "model.layers.{}.post_attention_layernorm"),
    weight("blocks.{}.mlp_norm", "model.layers.{}.pre_feedforward_layernorm"),
    weight("blocks.{}.mlp_post_norm", "model.layers.{}.post_feedforward_layernorm"),
)


def _query_scale() -> Setting:
    """Scores are divided by the root of ``query_pre_attn_scalar``."""

    def write(m: ModelConfig) -> Settings:
        scale = m.score_scale or m.head_width**-0.5
        return {"query_pre_attn_scalar": round(scale**-2)}

    return Setting(
        lambda c: {"score_scale": c.integer("query_pre_attn_scalar", 256) ** -0.5}, write
    )


def _later(logits: float | None) -> tuple[Setting, ...]:
    """Settings that Gemma 2 and 3 share, with the default soft cap of the logits."""
    return (
        word("mlp", "hidden_activation", _GATES, "gelu_pytorch_tanh"),
        constant(norm_place="both"),
        _query_scale(),
        number_or_none("logit_softcap", "final_logit_softcapping", logits),
        only("hidden_act", "gelu_pytorch_tanh"),
    )


def _family(
    name: str, architecture: str, settings: tuple[Setting, ...], *tensors: Row, **defaults: int
) -> Family:
    return Family(
        name=name,
        architecture=architecture,
        settings=(*_COMMON, *settings),
        tensors=(*NAMES, *tensors),
        prefix="model.",
        copies={"lm_head.weight": "model.embed_tokens.weight"},
        ignored=(r"(model\.)?layers\.\d+\.self_attn\.rotary_emb\.inv_freq",),
        defaults={"head_dim": 256, **defaults},
    )


GEMMA = _family(
    "gemma",
    "GemmaForCausalLM",
    (
        word("mlp", "hidden_act", _GATES, "gelu_pytorch_tanh"),
        only("hidden_activation", None, "gelu_pytorch_tanh"),
        rope(),
    ),
    _GEMMA1,
    num_key_value_heads=16,
)
_LATER = {"num_key_value_heads": 4, "sliding_window": 4096}
GEMMA2 = _family(
    "gemma2",
    "Gemma2ForCausalLM",
    (*_later(30.0), number_or_none("softcap", "attn_logit_softcapping", 50.0), rope(), periodic(2)),
    *_BOTH_SIDES,
    **_LATER,
)
GEMMA3 = _family(
    "gemma3_text",
    "Gemma3ForCausalLM",
    (
        *_later(None),
        constant(qk_norm=True),
        rope_with_local_base(1e6, 1e4, windows=periodic(6)),
    ),
    *_BOTH_SIDES,
    **_LATER,
)
