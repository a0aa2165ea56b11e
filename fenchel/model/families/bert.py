"""BERT (MiniLM): an encoder with post-norm blocks and a head for masked tokens.

Files without the head are read too (``BERT_BODY``); they end with a pooler or with the last block.
"""

from fenchel.model.families.family import Family
from fenchel.model.families.setting_rows import (
    PLAIN,
    Setting,
    attention_dropout,
    constant,
    flag,
    number,
    only,
    size,
    unread,
    word,
)
from fenchel.model.families.tensor_rows import (
    FUSED_QKV,
    REPEATED,
    SAME,
    Row,
    weight,
    weight_and_bias,
)

WORDS = {"gelu": "gelu", **PLAIN}
SETTINGS = (
    size("vocabulary", "vocab_size"),
    size("context", "max_position_embeddings"),
    size("width", "hidden_size"),
    size("layers", "num_hidden_layers"),
    size("heads", "num_attention_heads"),
    size("hidden", "intermediate_size", written="mlp_width"),
    Setting(
        lambda c: {"token_types": c.integer("type_vocab_size", 2)},
        lambda m: {"type_vocab_size": m.token_types},
    ),
    number("epsilon", "layer_norm_eps", 1e-12),
    number("dropout", "hidden_dropout_prob", 0.1),
    attention_dropout("attention_probs_dropout_prob", 0.1),
    flag("tied", "tie_word_embeddings", True),
    constant(kind="encoder", norm="layer", norm_place="post", final_norm=False, bias=True),
    constant(positions="learned", embedding_norm=True),
    only("is_decoder", False),
    only("add_cross_attention", False),
    only("position_embedding_type", "absolute"),
    unread("pooler_fc_size", "pooler_num_attention_heads", "pooler_num_fc_layers"),
    unread("pooler_size_per_head", "pooler_type"),
)
"""Settings that BERT and ALBERT share."""


def lm_head_bias(head: str) -> tuple[Row, Row]:
    """The bias of the LM head; where it is not tied, the decoder computes with its own copy."""
    names = (f"{head}.bias", f"{head}.decoder.bias")
    tied = Row("lm_head_bias", names[:1], SAME, when=lambda m: m.tied)
    return tied, Row("lm_head_bias", names, REPEATED, when=lambda m: not m.tied)


_BODY = (
    weight("embed", "bert.embeddings.word_embeddings"),
    weight("pos_embed", "bert.embeddings.position_embeddings"),
    weight("type_embed", "bert.embeddings.token_type_embeddings"),
    *weight_and_bias("embed_norm", "bert.embeddings.LayerNorm"),
    *weight_and_bias(
        "blocks.{}.attention.qkv",
        [f"bert.encoder.layer.{{}}.attention.self.{x}" for x in ("query", "key", "value")],
        FUSED_QKV,
    ),
    *weight_and_bias("blocks.{}.attention.out", "bert.encoder.layer.{}.attention.output.dense"),
    *weight_and_bias(
        "blocks.{}.attention_norm", "bert.encoder.layer.{}.attention.output.LayerNorm"
    ),
    *weight_and_bias("blocks.{}.mlp.up", "bert.encoder.layer.{}.intermediate.dense"),
    *weight_and_bias("blocks.{}.mlp.down", "bert.encoder.layer.{}.output.dense"),
    *weight_and_bias("blocks.{}.mlp_norm", "bert.encoder.layer.{}.output.LayerNorm"),
)
_HEAD = (
    *weight_and_bias("lm_head_proj", "cls.predictions.transform.dense"),
    *weight_and_bias("lm_head_norm", "cls.predictions.transform.LayerNorm"),
    *lm_head_bias("cls.predictions"),
    weight("lm_head", "cls.predictions.decoder"),
)
_POOLER = "bert.pooler.dense.weight"
_LEGACY = {".LayerNorm.gamma": ".LayerNorm.weight", ".LayerNorm.beta": ".LayerNorm.bias"}
_POSITIONS = r"(bert\.)?embeddings\.position_ids"

BERT = Family(
    name="bert",
    architecture="BertForMaskedLM",
    settings=(
        *SETTINGS,
        word("mlp", "hidden_act", WORDS, "gelu"),
        constant(lm_head_transform=True, lm_head_bias=True),
    ),
    tensors=(*_BODY, *_HEAD),
    copies={
        "cls.predictions.decoder.weight": "bert.embeddings.word_embeddings.weight",
        "cls.predictions.decoder.bias": "cls.predictions.bias",
    },
    ignored=(_POSITIONS, r"bert\.pooler\.dense\.(weight|bias)", r"cls\.seq_relationship\..*"),
    legacy_suffixes=_LEGACY,
    marker="cls.predictions.transform.dense.weight",
)
BERT_BODY = Family(
    name="bert",
    architecture="BertModel",
    settings=(
        *SETTINGS,
        word("mlp", "hidden_act", WORDS, "gelu"),
        Setting(
            lambda c: {"pooler": bool({_POOLER, _POOLER.removeprefix("bert.")} & set(c.tensors))},
            lambda _: {},
        ),
        constant(lm_head=False, tied=True),
    ),
    tensors=(*_BODY, *weight_and_bias("pooler", "bert.pooler.dense")),
    prefix="bert.",
    ignored=(_POSITIONS,),
    legacy_suffixes=_LEGACY,
)
