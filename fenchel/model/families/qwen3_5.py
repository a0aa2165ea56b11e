"""Qwen3.5 (text): three layers of gated DeltaNet to one of attention with an output gate.

qwen3_5_text       gains of 1 + weight but inside DeltaNet; a quarter of each head rotates; the rows
                   of a query head and of its gate lie side by side in one matrix
qwen3_5_moe_text   and experts in every layer, with a shared one behind a gate; files hold them one
                   by one or as one tensor

Of its ``rope_parameters`` the sections of images mean nothing for text, whose three positions are
equal. The layers that predict further tokens (``mtp``) are left out.
"""

from dataclasses import replace

from fenchel.model.config import ModelConfig
from fenchel.model.families.config_reader import ConfigReader
from fenchel.model.families.family import Family
from fenchel.model.families.llama import (
    COPIES,
    EXPERT_LOSS,
    IGNORED,
    LISTED_EXPERTS,
    NAMES,
    SHARED,
)
from fenchel.model.families.rope_settings import partial_rope
from fenchel.model.families.setting_rows import (
    Setting,
    Settings,
    constant,
    flag,
    only,
    size,
    unread,
    word,
)
from fenchel.model.families.tensor_rows import (
    FILTER,
    FIRST_ROWS,
    GATE,
    GATED_QKV,
    SAME,
    SECOND_ROWS,
    Row,
    weight,
)
from fenchel.model.families.window_settings import FULL

_LINEAR = "linear_attention"
_ATTENTION, _DELTA = "model.layers.{}.self_attn", "model.layers.{}.linear_attn"


_SIZES = (
    size("delta_key_heads", "linear_num_key_heads", default=16),
    size("delta_value_heads", "linear_num_value_heads", default=32),
    size("delta_key_width", "linear_key_head_dim", default=128),
    size("delta_value_width", "linear_value_head_dim", default=128),
    size("delta_kernel", "linear_conv_kernel_dim", default=4),
)


def _layers() -> Setting:
    """Which layers are DeltaNet: listed, or all but every ``full_attention_interval``-th."""

    def read(c: ConfigReader) -> Settings:
        layers, every = c.layers(), c.integer("full_attention_interval", 4)
        default = [FULL if (layer + 1) % every == 0 else _LINEAR for layer in range(layers)]
        kinds = c.words("layer_types", (_LINEAR, FULL), layers) or default
        sizes = {name: value for row in _SIZES for name, value in row.read(c).items()}
        if _LINEAR not in kinds:
            return {}
        if FULL not in kinds:  # transformers counts tokens by a layer of attention
            raise c.wrong("layer_types", kinds[0], f"{FULL} in one layer at least")
        return {"delta_layers": tuple(int(kind == _LINEAR) for kind in kinds), **sizes}

    def write(m: ModelConfig) -> Settings:
        kinds = [_LINEAR if m.is_delta(layer) else FULL for layer in range(m.layers)]
        sizes = {name: value for row in _SIZES for name, value in row.write(m).items()}
        return {"layer_types": kinds, **sizes}

    return Setting(read, write)


_SETTINGS = (
    *SHARED,
    word("mlp", "hidden_act", {"silu": "swiglu"}, "silu"),  # also behind the filter of DeltaNet
    flag("tied", "tie_word_embeddings", False),
    partial_rope(10000.0, 0.25),
    _layers(),
    constant(qk_norm=True, norm_plus_one=True, gate="element"),
    only("attention_bias", False),
    unread("attn_output_gate", "mtp_num_hidden_layers", "mtp_use_dedicated_embeddings"),
    unread("mamba_ssm_dtype", "output_gate_type", "mlp_only_layers"),
)
QWEN3_5 = Family(
    name="qwen3_5_text",
    architecture="Qwen3_5ForCausalLM",
    settings=_SETTINGS,
    tensors=(
        Row(
            "blocks.{}.attention.qkv.weight",
            tuple(f"{_ATTENTION}.{x}_proj.weight" for x in "qkv"),
            GATED_QKV,
        ),
        weight("blocks.{}.attention.output_gate", f"{_ATTENTION}.q_proj", GATE),
        weight("blocks.{}.attention.in_proj", f"{_DELTA}.in_proj_qkv"),
        weight("blocks.{}.attention.gate", f"{_DELTA}.in_proj_z"),
        weight("blocks.{}.attention.rate", f"{_DELTA}.in_proj_b"),
        weight("blocks.{}.attention.decay", f"{_DELTA}.in_proj_a"),
        weight("blocks.{}.attention.out_proj", f"{_DELTA}.out_proj"),
        Row("blocks.{}.attention.filter", (f"{_DELTA}.conv1d.weight",), FILTER),
        Row("blocks.{}.attention.decay_log", (f"{_DELTA}.A_log",), SAME),
        Row("blocks.{}.attention.decay_bias", (f"{_DELTA}.dt_bias",), SAME),
        Row("blocks.{}.attention.gain", (f"{_DELTA}.norm.weight",), SAME),
        *NAMES,
        weight("blocks.{}.mlp_norm", "model.layers.{}.post_attention_layernorm"),
    ),
    prefix="model.",
    copies=COPIES,
    ignored=(*IGNORED, r"mtp\..*"),
    defaults={"head_dim": 256, "num_key_value_heads": 4},
)
_MLP = "model.layers.{}.mlp"
QWEN3_5_MOE = replace(
    QWEN3_5,
    name="qwen3_5_moe_text",
    architecture="Qwen3_5MoeForCausalLM",
    settings=(
        *_SETTINGS,
        size("hidden", "moe_intermediate_size", default=512, written="mlp_width"),
        size("shared_expert", "shared_expert_intermediate_size", default=512),
        size("experts", "num_experts", default=256),
        size("experts_per_token", "num_experts_per_tok", default=8),
        constant(shared_expert_gate=True),
        EXPERT_LOSS,
    ),
    tensors=(
        weight("blocks.{}.mlp.router", f"{_MLP}.gate"),
        *LISTED_EXPERTS,
        *(
            weight(f"blocks.{{}}.mlp.shared.{x}", f"{_MLP}.shared_expert.{x}_proj")
            for x in ("gate", "up", "down")
        ),
        weight("blocks.{}.mlp.shared_gate", f"{_MLP}.shared_expert_gate"),
        *QWEN3_5.tensors,
    ),
    defaults={
        "head_dim": 256,
        "num_key_value_heads": 2,
        "intermediate_size": 512,  # of layers without experts, of which there are none
    },
    marker="model.layers.0.mlp.experts.0.gate_proj.weight",
)
QWEN3_5_MOE_STACKED = replace(
    QWEN3_5_MOE,
    tensors=(
        Row("blocks.{}.mlp.gate", (f"{_MLP}.experts.gate_up_proj",), FIRST_ROWS),
        Row("blocks.{}.mlp.up", (f"{_MLP}.experts.gate_up_proj",), SECOND_ROWS),
        Row("blocks.{}.mlp.down", (f"{_MLP}.experts.down_proj",), SAME),
        *(row for row in QWEN3_5_MOE.tensors if row not in LISTED_EXPERTS),
    ),
    marker="model.layers.0.mlp.experts.gate_up_proj",
)
FAMILIES = (QWEN3_5, QWEN3_5_MOE, QWEN3_5_MOE_STACKED)
