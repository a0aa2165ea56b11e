"""BERT, RoBERTa, DistilBERT, ALBERT: encoders with post-norm blocks and a head for masked tokens.

bert          also MiniLM
roberta       the position of a token is its row less 2, since row 1 is that of padding
xlm-roberta   the same, with the vocabulary of many languages
mpnet         and a bias by distance, as T5 has it, in every layer
distilbert    other names, no token types
albert        layers that share their weights, and a narrow embedding with a projection

Files without the head are read too; they end with a pooler or with the last block.
"""

import re
from collections.abc import Mapping

from fenchel.model.config import ModelConfig
from fenchel.model.families.config_reader import ConfigReader
from fenchel.model.families.family import Family
from fenchel.model.families.setting_rows import (
    CONTEXT,
    PLAIN,
    SIZES,
    Setting,
    Settings,
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
    LAST_ROWS,
    REPEATED,
    SAME,
    Layout,
    Row,
    weight,
    weight_and_bias,
)

WORDS = {"gelu": "gelu", **PLAIN}
_KIND = (
    constant(kind="encoder", norm="layer", norm_place="post", final_norm=False, bias=True),
    constant(positions="learned", embedding_norm=True),
)
_ENCODER = (
    *SIZES,
    number("epsilon", "layer_norm_eps", 1e-12),
    number("dropout", "hidden_dropout_prob", 0.1),
    attention_dropout("attention_probs_dropout_prob", 0.1),
    flag("tied", "tie_word_embeddings", True),
    *_KIND,
)
"""Settings that all of these but DistilBERT share."""
_TYPES = Setting(
    lambda c: {"token_types": c.integer("type_vocab_size", 2)},
    lambda m: {"type_vocab_size": m.token_types},
)
_VARIANTS = (
    only("is_decoder", False),
    only("add_cross_attention", False),
    only("position_embedding_type", "absolute"),
    unread("pooler_fc_size", "pooler_num_attention_heads", "pooler_num_fc_layers"),
    unread("pooler_size_per_head", "pooler_type"),
)
SETTINGS = (*_ENCODER, CONTEXT, _TYPES, *_VARIANTS)
"""Settings that BERT and ALBERT share."""
LM_HEAD = constant(lm_head_transform=True, lm_head_bias=True)
_PADDING = 1
"""The row of padding in a table of positions of RoBERTa and MPNet."""


def _positions_after_padding(*, checked: bool = True) -> Setting:
    """Rows of the table up to that of padding hold no position of a token.

    RoBERTa's is ``pad_token_id``, which is ``checked``; that of MPNet is 1 whatever the file says.
    """

    def read(c: ConfigReader) -> Settings:
        if checked:
            c.only("pad_token_id", (_PADDING,))
        rows = c.integer("max_position_embeddings", least=_PADDING + 2)
        return {"context": rows - _PADDING - 1}

    def write(m: ModelConfig) -> Settings:
        rows = {"max_position_embeddings": m.context + _PADDING + 1}
        return rows | ({"pad_token_id": _PADDING} if checked else {})

    return Setting(read, write)


def _without_head(pooler: str) -> tuple[Setting, ...]:
    """A body: with a pooler where the files hold the tensor ``pooler``, prefixed or not."""
    names = {pooler, pooler.partition(".")[2]}
    found = Setting(lambda c: {"pooler": bool(names & set(c.tensors))}, lambda _: {})
    return found, constant(lm_head=False, tied=True)


def lm_head_bias(head: str) -> tuple[Row, Row]:
    """The bias of the LM head; where it is not tied, the decoder computes with its own copy."""
    names = (f"{head}.bias", f"{head}.decoder.bias")
    tied = Row("lm_head_bias", names[:1], SAME, when=lambda m: m.tied)
    return tied, Row("lm_head_bias", names, REPEATED, when=lambda m: not m.tied)


def _body(prefix: str, positions: Layout = SAME) -> tuple[Row, ...]:
    """The names of BERT's body; ``positions`` is the layout of the table of positions."""
    embeddings, layer = f"{prefix}embeddings", f"{prefix}encoder.layer.{{}}"
    attention = f"{layer}.attention"
    return (
        weight("embed", f"{embeddings}.word_embeddings"),
        weight("pos_embed", f"{embeddings}.position_embeddings", positions),
        weight("type_embed", f"{embeddings}.token_type_embeddings"),
        *weight_and_bias("embed_norm", f"{embeddings}.LayerNorm"),
        *weight_and_bias(
            "blocks.{}.attention.qkv",
            [f"{attention}.self.{x}" for x in ("query", "key", "value")],
            FUSED_QKV,
        ),
        *weight_and_bias("blocks.{}.attention.out", f"{attention}.output.dense"),
        *weight_and_bias("blocks.{}.attention_norm", f"{attention}.output.LayerNorm"),
        *weight_and_bias("blocks.{}.mlp.up", f"{layer}.intermediate.dense"),
        *weight_and_bias("blocks.{}.mlp.down", f"{layer}.output.dense"),
        *weight_and_bias("blocks.{}.mlp_norm", f"{layer}.output.LayerNorm"),
    )


_LEGACY = {".LayerNorm.gamma": ".LayerNorm.weight", ".LayerNorm.beta": ".LayerNorm.bias"}


def _with_and_without_head(
    name: str,
    architecture: str,
    prefix: str,
    settings: tuple[Setting, ...],
    head: tuple[Row, ...],
    copies: Mapping[str, str],
    positions: Layout = SAME,
    tensors: tuple[Row, ...] = (),
) -> tuple[Family, Family]:
    """A family with BERT's names, and the same without its head.

    The first row of ``head`` is the marker; ``tensors`` come before BERT's names.
    """
    rows, pooler = (*tensors, *_body(prefix, positions)), f"{prefix}pooler.dense"
    ignored = rf"({re.escape(prefix)})?embeddings\.position_ids"
    whole = Family(
        name=name,
        architecture=f"{architecture}ForMaskedLM",
        settings=(*settings, LM_HEAD),
        tensors=(*rows, *head),
        copies=copies,
        ignored=(
            ignored,
            rf"{re.escape(prefix)}pooler\.dense\.(weight|bias)",
            r"cls\.seq_relationship\..*",
        ),
        legacy_suffixes=_LEGACY,
        marker=head[0].theirs[0],
    )
    body = Family(
        name=name,
        architecture=f"{architecture}Model",
        settings=(*settings, *_without_head(f"{pooler}.weight")),
        tensors=(*rows, *weight_and_bias("pooler", pooler)),
        prefix=prefix,
        ignored=(ignored,),
        legacy_suffixes=_LEGACY,
    )
    return whole, body


BERT, BERT_BODY = _with_and_without_head(
    "bert",
    "Bert",
    "bert.",
    (*SETTINGS, word("mlp", "hidden_act", WORDS, "gelu")),
    (
        *weight_and_bias("lm_head_proj", "cls.predictions.transform.dense"),
        *weight_and_bias("lm_head_norm", "cls.predictions.transform.LayerNorm"),
        *lm_head_bias("cls.predictions"),
        weight("lm_head", "cls.predictions.decoder"),
    ),
    {
        "cls.predictions.decoder.weight": "bert.embeddings.word_embeddings.weight",
        "cls.predictions.decoder.bias": "cls.predictions.bias",
    },
)
_ROBERTA_HEAD = (
    *weight_and_bias("lm_head_proj", "lm_head.dense"),
    *weight_and_bias("lm_head_norm", "lm_head.layer_norm"),
    *lm_head_bias("lm_head"),
    weight("lm_head", "lm_head.decoder"),
)
_ROBERTA = (
    "roberta.",
    (
        *(*_ENCODER, _TYPES, _positions_after_padding(), *_VARIANTS),
        # Their head has an exact GELU, whatever the blocks have.
        *(constant(mlp="gelu"), only("hidden_act", "gelu")),
    ),
    _ROBERTA_HEAD,
    {
        "lm_head.decoder.weight": "roberta.embeddings.word_embeddings.weight",
        "lm_head.decoder.bias": "lm_head.bias",
    },
    LAST_ROWS,
)
ROBERTA, ROBERTA_BODY = _with_and_without_head("roberta", "Roberta", *_ROBERTA)
XLM_ROBERTA, XLM_ROBERTA_BODY = _with_and_without_head("xlm-roberta", "XLMRoberta", *_ROBERTA)

_MPNET_ATTENTION = "mpnet.encoder.layer.{}.attention"
MPNET, MPNET_BODY = _with_and_without_head(
    "mpnet",
    "MPNet",
    "mpnet.",
    (
        *(*_ENCODER, _positions_after_padding(checked=False)),
        # Buckets, their distance and the activation of the head are fixed in the class.
        *(only("relative_attention_num_buckets", 32), only("hidden_act", "gelu")),
        constant(mlp="gelu", relative_bias=True),
    ),
    _ROBERTA_HEAD,
    {
        "lm_head.decoder.weight": "mpnet.embeddings.word_embeddings.weight",
        "lm_head.decoder.bias": "lm_head.bias",
    },
    LAST_ROWS,
    (
        weight("relative_bias", "mpnet.encoder.relative_attention_bias"),
        *weight_and_bias(
            "blocks.{}.attention.qkv", [f"{_MPNET_ATTENTION}.attn.{x}" for x in "qkv"], FUSED_QKV
        ),
        *weight_and_bias("blocks.{}.attention.out", f"{_MPNET_ATTENTION}.attn.o"),
        *weight_and_bias("blocks.{}.attention_norm", f"{_MPNET_ATTENTION}.LayerNorm"),
    ),
)
_DISTIL = (
    size("vocabulary", "vocab_size"),
    CONTEXT,
    size("width", "dim"),
    size("layers", "n_layers"),
    size("heads", "n_heads"),
    size("hidden", "hidden_dim", written="mlp_width"),
    number("dropout", "dropout", 0.1),
    attention_dropout("attention_dropout", 0.1),
    flag("tied", "tie_word_embeddings", True),
    word("mlp", "activation", WORDS, "gelu"),
    *_KIND,
    constant(epsilon=1e-12),
    # The table of positions is stored, sinusoidal or not.
    unread("sinusoidal_pos_embds", "qa_dropout", "seq_classif_dropout", "tie_weights_"),
)
_DISTIL_LAYER = "distilbert.transformer.layer.{}"
_DISTIL_BODY = (
    weight("embed", "distilbert.embeddings.word_embeddings"),
    weight("pos_embed", "distilbert.embeddings.position_embeddings"),
    *weight_and_bias("embed_norm", "distilbert.embeddings.LayerNorm"),
    *weight_and_bias(
        "blocks.{}.attention.qkv",
        [f"{_DISTIL_LAYER}.attention.{x}_lin" for x in "qkv"],
        FUSED_QKV,
    ),
    *weight_and_bias("blocks.{}.attention.out", f"{_DISTIL_LAYER}.attention.out_lin"),
    *weight_and_bias("blocks.{}.attention_norm", f"{_DISTIL_LAYER}.sa_layer_norm"),
    *weight_and_bias("blocks.{}.mlp.up", f"{_DISTIL_LAYER}.ffn.lin1"),
    *weight_and_bias("blocks.{}.mlp.down", f"{_DISTIL_LAYER}.ffn.lin2"),
    *weight_and_bias("blocks.{}.mlp_norm", f"{_DISTIL_LAYER}.output_layer_norm"),
)
DISTILBERT = Family(
    name="distilbert",
    architecture="DistilBertForMaskedLM",
    settings=(*_DISTIL, LM_HEAD),
    tensors=(
        *_DISTIL_BODY,
        *weight_and_bias("lm_head_proj", "vocab_transform"),
        *weight_and_bias("lm_head_norm", "vocab_layer_norm"),
        Row("lm_head_bias", ("vocab_projector.bias",), SAME),
        weight("lm_head", "vocab_projector"),
    ),
    copies={"vocab_projector.weight": "distilbert.embeddings.word_embeddings.weight"},
    marker="vocab_transform.weight",
)
DISTILBERT_BODY = Family(
    name="distilbert",
    architecture="DistilBertModel",
    settings=(*_DISTIL, constant(lm_head=False, tied=True)),
    tensors=_DISTIL_BODY,
    prefix="distilbert.",
)
_ALBERT_LAYER = "albert.encoder.albert_layer_groups.{}.albert_layers.0"

ALBERT = Family(
    name="albert",
    architecture="AlbertForMaskedLM",
    settings=(
        *SETTINGS,
        word("mlp", "hidden_act", PLAIN, "gelu_new"),
        size("embedding_width", "embedding_size"),
        size("distinct_layers", "num_hidden_groups"),
        LM_HEAD,
        only("inner_group_num", 1),
        unread("classifier_dropout_prob", "down_scale_factor", "gap_size", "net_structure_type"),
        unread("num_memory_blocks"),
    ),
    tensors=(
        weight("embed", "albert.embeddings.word_embeddings"),
        weight("pos_embed", "albert.embeddings.position_embeddings"),
        weight("type_embed", "albert.embeddings.token_type_embeddings"),
        *weight_and_bias("embed_norm", "albert.embeddings.LayerNorm"),
        *weight_and_bias("embed_proj", "albert.encoder.embedding_hidden_mapping_in"),
        *weight_and_bias(
            "blocks.{}.attention.qkv",
            [f"{_ALBERT_LAYER}.attention.{x}" for x in ("query", "key", "value")],
            FUSED_QKV,
        ),
        *weight_and_bias("blocks.{}.attention.out", f"{_ALBERT_LAYER}.attention.dense"),
        *weight_and_bias("blocks.{}.attention_norm", f"{_ALBERT_LAYER}.attention.LayerNorm"),
        *weight_and_bias("blocks.{}.mlp.up", f"{_ALBERT_LAYER}.ffn"),
        *weight_and_bias("blocks.{}.mlp.down", f"{_ALBERT_LAYER}.ffn_output"),
        *weight_and_bias("blocks.{}.mlp_norm", f"{_ALBERT_LAYER}.full_layer_layer_norm"),
        *weight_and_bias("lm_head_proj", "predictions.dense"),
        *weight_and_bias("lm_head_norm", "predictions.LayerNorm"),
        *lm_head_bias("predictions"),
        weight("lm_head", "predictions.decoder"),
    ),
    copies={
        "predictions.decoder.weight": "albert.embeddings.word_embeddings.weight",
        "predictions.decoder.bias": "predictions.bias",
    },
    ignored=(
        r"albert\.embeddings\.position_ids",
        r"albert\.pooler\.(weight|bias)",
        r"sop_classifier\..*",
    ),
    marker="predictions.dense.weight",
)
FAMILIES = (
    *(BERT, BERT_BODY, ROBERTA, ROBERTA_BODY, XLM_ROBERTA, XLM_ROBERTA_BODY),
    *(MPNET, MPNET_BODY, DISTILBERT, DISTILBERT_BODY, ALBERT),
)
