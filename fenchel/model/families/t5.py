"""T5: encoder and decoder, bucketed relative positions, unscaled scores.

It reads texts of any length. ``n_positions``, which transformers does not use, stores the context
of ModelConfig. Version 1.1 has an untied lm_head and does not scale its input.
"""

from collections.abc import Iterator

from fenchel.model.config import ModelConfig
from fenchel.model.families.config_reader import ConfigReader
from fenchel.model.families.family import Family
from fenchel.model.families.setting_rows import (
    Setting,
    Settings,
    constant,
    number,
    size,
    size_or_none,
    unread,
    word,
)
from fenchel.model.families.tensor_rows import FUSED_KV, FUSED_QKV, Row, weight

_WORDS = {"relu": "relu", "gated-gelu": "geglu_tanh", "gated-silu": "swiglu"}


_ACTIVATIONS = {"relu": "relu", "gated-gelu": "gelu_new", "gated-silu": "silu"}


def _activation() -> Setting:
    """``dense_act_fn`` follows from ``feed_forward_proj``; transformers reads it where it is."""

    def read(c: ConfigReader) -> Settings:
        c.only("dense_act_fn", (c.word("feed_forward_proj", _ACTIVATIONS, "relu"),))
        return {}

    return Setting(read, lambda _: {})


def _lm_head() -> Setting:
    """Untied where the files hold an lm_head; older files turn scaling off by the same key."""

    def read(c: ConfigReader) -> Settings:
        tied = c.flag("tie_word_embeddings", True)
        scaled = c.flag("scale_decoder_outputs", tied)
        scale = c.integer("d_model") ** -0.5 if scaled else 1.0
        return {"tied": "lm_head.weight" not in c.tensors, "logit_scale": scale}

    def write(m: ModelConfig) -> Settings:
        return {"tie_word_embeddings": m.tied, "scale_decoder_outputs": m.logit_scale != 1.0}

    return Setting(read, write)


def _layers() -> Setting:
    def read(c: ConfigReader) -> Settings:
        encoder = c.integer("num_layers")
        return {
            "encoder_layers": encoder,
            "layers": c.integer_or_none("num_decoder_layers") or encoder,
        }

    def write(m: ModelConfig) -> Settings:
        return {"num_layers": m.encoder_layers or m.layers, "num_decoder_layers": m.layers}

    return Setting(read, write)


def _stack(ours: str, theirs: str, mlp: int) -> Iterator[Row]:
    """The rows of one stack; its MLP is sublayer number ``mlp`` of a block."""
    layer = f"{theirs}.block.{{}}.layer"
    attention = f"{layer}.0.SelfAttention"
    names = tuple(f"{attention}.{x}.weight" for x in "qkv")
    yield Row(f"{ours}blocks.{{}}.attention.qkv.weight", names, FUSED_QKV)
    yield weight(f"{ours}blocks.{{}}.attention.out", f"{attention}.o")
    yield weight(f"{ours}blocks.{{}}.attention_norm", f"{layer}.0.layer_norm")
    dense = f"{layer}.{mlp}.DenseReluDense"
    up = f"{ours}blocks.{{}}.mlp.up"
    yield weight(f"{ours}blocks.{{}}.mlp.gate", f"{dense}.wi_0")
    yield weight(up, f"{dense}.wi_1")._replace(when=lambda m: m.gated)
    yield weight(up, f"{dense}.wi")._replace(when=lambda m: not m.gated)
    yield weight(f"{ours}blocks.{{}}.mlp.down", f"{dense}.wo")
    yield weight(f"{ours}blocks.{{}}.mlp_norm", f"{layer}.{mlp}.layer_norm")
    yield weight(f"{ours}norm", f"{theirs}.final_layer_norm")
    bias = f"{theirs}.block.0.layer.0.SelfAttention.relative_attention_bias"
    yield weight(f"{ours}relative_bias", bias)


_CROSS = "decoder.block.{}.layer.1.EncDecAttention"

T5 = Family(
    name="t5",
    architecture="T5ForConditionalGeneration",
    settings=(
        size("vocabulary", "vocab_size"),
        size("context", "n_positions", default=512),
        size("width", "d_model"),
        size("heads", "num_heads"),
        size_or_none("head_size", "d_kv", written="head_width"),
        size("hidden", "d_ff", written="mlp_width"),
        _layers(),
        word("mlp", "feed_forward_proj", _WORDS, "relu"),
        _activation(),
        number("epsilon", "layer_norm_epsilon", 1e-6),
        number("dropout", "dropout_rate", 0.1),
        size("buckets", "relative_attention_num_buckets", default=32),
        size("bucket_distance", "relative_attention_max_distance", default=128),
        _lm_head(),
        constant(kind="encoder-decoder", positions="buckets", score_scale=1.0),
        unread("is_decoder", "is_gated_act"),
    ),
    tensors=(
        weight("embed", "shared"),
        *_stack("encoder.", "encoder", mlp=1),
        *_stack("", "decoder", mlp=2),
        weight("blocks.{}.cross_attention.q", f"{_CROSS}.q"),
        Row(
            "blocks.{}.cross_attention.kv.weight",
            (f"{_CROSS}.k.weight", f"{_CROSS}.v.weight"),
            FUSED_KV,
        ),
        weight("blocks.{}.cross_attention.out", f"{_CROSS}.o"),
        weight("blocks.{}.cross_attention_norm", "decoder.block.{}.layer.1.layer_norm"),
        weight("lm_head", "lm_head"),
    ),
    copies={
        "encoder.embed_tokens.weight": "shared.weight",
        "decoder.embed_tokens.weight": "shared.weight",
    },
    ignored=(r"decoder\.block\.0\.layer\.1\.EncDecAttention\.relative_attention_bias\.weight",),
)
