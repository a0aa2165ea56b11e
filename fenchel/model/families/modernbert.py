"""ModernBERT: an encoder with rotary positions, windows and a gated MLP.

Every third layer sees all positions, the others those within ``local_attention`` // 2 on either
side, with a rotary base of their own. The norm after the embedding stands for that before the first
attention. Norms, blocks and the head for masked tokens have no biases.
"""

from fenchel.model.config import ModelConfig
from fenchel.model.families.config_reader import ConfigReader
from fenchel.model.families.family import Family
from fenchel.model.families.rope_settings import rope_with_local_base
from fenchel.model.families.setting_rows import (
    CONTEXT,
    GATED,
    SIZES,
    Setting,
    Settings,
    attention_dropout,
    constant,
    flag,
    number,
    only,
    unread,
    word,
)
from fenchel.model.families.tensor_rows import (
    FIRST_HALF,
    SAME,
    SECOND_HALF,
    Row,
    weight,
)
from fenchel.model.families.window_settings import FULL, SLIDING


def _windows() -> Setting:
    """|i - j| <= ``local_attention`` // 2 in layers that are not listed as full."""

    def read(c: ConfigReader) -> Settings:
        layers, width = c.layers(), c.integer("local_attention", 128, least=0) // 2 + 1
        every = c.integer("global_attn_every_n_layers", 3)
        default = [SLIDING if layer % every else FULL for layer in range(layers)]
        types = c.words("layer_types", (SLIDING, FULL), layers) or default
        if SLIDING not in types:
            return {}
        return {"windows": tuple(width if kind == SLIDING else 0 for kind in types)}

    def write(m: ModelConfig) -> Settings:
        windows = [m.window(layer) for layer in range(m.layers)]
        width = next((w for w in windows if w is not None), m.context)
        return {
            "local_attention": 2 * (width - 1),
            "layer_types": [FULL if w is None else SLIDING for w in windows],
        }

    return Setting(read, write)


def _head_activation() -> Setting:
    """The head for masked tokens has the activation of the blocks here."""

    def read(c: ConfigReader) -> Settings:
        c.word("hidden_activation", GATED, "gelu")
        c.word("classifier_activation", GATED, "gelu")
        if c.settings.get("classifier_activation", "gelu") != c.settings.get(
            "hidden_activation", "gelu"
        ):
            c.only("classifier_activation", ())
        return {}

    def write(m: ModelConfig) -> Settings:
        names = {ours: theirs for theirs, ours in reversed(list(GATED.items()))}
        return {"classifier_activation": names.get(m.mlp, "gelu")}

    return Setting(read, write)


_SETTINGS = (
    *SIZES,
    CONTEXT,
    number("epsilon", "norm_eps", 1e-5),
    number("mlp_dropout", "mlp_dropout", 0.0),
    attention_dropout("attention_dropout", 0.0),
    flag("tied", "tie_word_embeddings", True),
    word("mlp", "hidden_activation", GATED, "gelu"),
    rope_with_local_base(
        1.6e5, 1e4, windows=_windows(), older=("global_rope_theta", "local_rope_theta")
    ),
    constant(kind="encoder", norm="layer", norm_parameters="gain", first_norm=False),
    constant(embedding_norm=True),
    *(only(key, False) for key in ("norm_bias", "attention_bias", "mlp_bias", "classifier_bias")),
    only("rope_scaling", None),
    unread("position_embedding_type", "embedding_dropout", "initializer_cutoff_factor"),
    unread("classifier_pooling", "deterministic_flash_attn", "layer_norm_eps"),
    unread(
        "sparse_prediction",
        "sparse_pred_ignore_index",
        "reference_compile",
        "repad_logits_with_grad",
    ),
)
_BODY = (
    weight("embed", "model.embeddings.tok_embeddings"),
    weight("embed_norm", "model.embeddings.norm"),
    weight("blocks.{}.attention_norm", "model.layers.{}.attn_norm"),
    weight("blocks.{}.attention.qkv", "model.layers.{}.attn.Wqkv"),
    weight("blocks.{}.attention.out", "model.layers.{}.attn.Wo"),
    weight("blocks.{}.mlp_norm", "model.layers.{}.mlp_norm"),
    weight("blocks.{}.mlp.gate", "model.layers.{}.mlp.Wi", FIRST_HALF),
    weight("blocks.{}.mlp.up", "model.layers.{}.mlp.Wi", SECOND_HALF),
    weight("blocks.{}.mlp.down", "model.layers.{}.mlp.Wo"),
    weight("norm", "model.final_norm"),
)
MODERNBERT = Family(
    name="modernbert",
    architecture="ModernBertForMaskedLM",
    settings=(
        *_SETTINGS,
        *(constant(lm_head_transform=True), _head_activation()),
        flag("lm_head_bias", "decoder_bias", True),
    ),
    tensors=(
        *_BODY,
        weight("lm_head_proj", "head.dense"),
        weight("lm_head_norm", "head.norm"),
        Row("lm_head_bias", ("decoder.bias",), SAME),
        weight("lm_head", "decoder"),
    ),
    copies={"decoder.weight": "model.embeddings.tok_embeddings.weight"},
    marker="head.dense.weight",
)
MODERNBERT_BODY = Family(
    name="modernbert",
    architecture="ModernBertModel",
    settings=(
        *_SETTINGS,
        *(constant(lm_head=False, tied=True), unread("classifier_activation", "decoder_bias")),
    ),
    tensors=_BODY,
    prefix="model.",
)
FAMILIES = (MODERNBERT, MODERNBERT_BODY)
