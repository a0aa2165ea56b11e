"""ALBERT: a BERT with layers that share their weights and a narrow embedding with a projection."""

from fenchel.model.families.bert import LM_HEAD, SETTINGS, lm_head_bias
from fenchel.model.families.family import Family
from fenchel.model.families.setting_rows import PLAIN, only, size, unread, word
from fenchel.model.families.tensor_rows import FUSED_QKV, weight, weight_and_bias

_LAYER = "albert.encoder.albert_layer_groups.{}.albert_layers.0"

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
            [f"{_LAYER}.attention.{x}" for x in ("query", "key", "value")],
            FUSED_QKV,
        ),
        *weight_and_bias("blocks.{}.attention.out", f"{_LAYER}.attention.dense"),
        *weight_and_bias("blocks.{}.attention_norm", f"{_LAYER}.attention.LayerNorm"),
        *weight_and_bias("blocks.{}.mlp.up", f"{_LAYER}.ffn"),
        *weight_and_bias("blocks.{}.mlp.down", f"{_LAYER}.ffn_output"),
        *weight_and_bias("blocks.{}.mlp_norm", f"{_LAYER}.full_layer_layer_norm"),
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
