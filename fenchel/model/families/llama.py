"""Llama and its relatives: rotary positions, RMSNorm, gated MLP, grouped heads.

llama              also TinyLlama, SmolLM, SmolLM2
mistral            a window in every layer, or none
ministral3         YaRN, and queries that grow with their position
qwen2              a bias for queries, keys and values only
qwen3              RMSNorm of queries and keys per head
qwen3_moe          and experts, each with tensors of its own, in all layers or some
granite            factors on the embedding, the branches, the scores and the logits
granitemoehybrid   the same, without experts and without Mamba layers (Granite 4 dense)
olmo2              norms after the branches; RMSNorm of the queries and keys of all heads
olmo3              and windows in three layers of four, which have a rotary base of their own
smollm3            every fourth layer without rotation
phi3               queries, keys and values in one matrix, gate and up in another (Phi-3, Phi-4)
gpt_oss            sinks, windows in every second layer, experts with biases and clamped gates
nanochat           norms without gains, squared ReLU, rotation in the other direction
"""

from typing import Any

from fenchel.model.config import ModelConfig
from fenchel.model.families.config_reader import ConfigReader
from fenchel.model.families.family import Family
from fenchel.model.families.rope_settings import (
    partial_rope,
    rope,
    rope_parameters,
    rope_with_local_base,
)
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
    number_or_none,
    only,
    size,
    size_or_none,
    unread,
    word,
)
from fenchel.model.families.tensor_rows import (
    EVEN,
    EVEN_COLUMNS,
    FIRST_HALF,
    FLIPPED_QKV,
    FUSED_QKV,
    ODD,
    ODD_COLUMNS,
    SAME,
    SECOND_HALF,
    STACKED,
    TRANSPOSED,
    Row,
    weight,
    weight_and_bias,
)
from fenchel.model.families.window_settings import (
    FULL,
    SLIDING,
    alternating,
    per_layer,
    periodic,
    switchable,
    switchable_everywhere,
    uniform,
)

SHARED = (
    *SIZES,
    CONTEXT,
    size_or_none("kv_heads", "num_key_value_heads", written="groups"),
    size_or_none("head_size", "head_dim", written="head_width"),
    number("epsilon", "rms_norm_eps", 1e-6),
    attention_dropout("attention_dropout", 0.0),
)
"""Settings that these families, Qwen3.5 and the Gemmas share."""
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
    *SHARED,
    word("mlp", "hidden_act", GATED, "silu"),
    flag("tied", "tie_word_embeddings", False),
)
_ROPE = rope()
_TENSORS = (*NAMES, weight("blocks.{}.mlp_norm", "model.layers.{}.post_attention_layernorm"))
COPIES = {"lm_head.weight": "model.embed_tokens.weight"}
IGNORED = (r"(model\.)?layers\.\d+\.self_attn\.rotary_emb\.inv_freq",)


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


def _multipliers() -> Setting:
    """Factors of Granite: a missing one is 1, also that of the scores."""

    def read(c: ConfigReader) -> Settings:
        return {
            "embedding_scale": c.number("embedding_multiplier", 1.0),
            "residual_scale": c.number("residual_multiplier", 1.0),
            "score_scale": c.number("attention_multiplier", 1.0),
            "logit_scale": 1.0 / c.positive("logits_scaling", 1.0),
        }

    def write(m: ModelConfig) -> Settings:
        return {
            "embedding_multiplier": m.embedding_scale,
            "residual_multiplier": m.branch_scale,
            "attention_multiplier": m.score_scale or m.head_width**-0.5,
            "logits_scaling": 1.0 / m.logit_scale,
        }

    return Setting(read, write)


def _temperature() -> Setting:
    """The factor on queries beyond the trained context, among the rotary parameters."""
    key = "llama_4_scaling_beta"

    def read(c: ConfigReader) -> Settings:
        growth = rope_parameters(c, _MINISTRAL_ROPE).number(key)
        return {"temperature": "stepped", "temperature_growth": growth} if growth else {}

    def write(m: ModelConfig) -> Settings:
        parameters = _ROPE.write(m)["rope_parameters"]
        growth = (m.temperature_growth or 0.1) if m.temperature == "stepped" else 0.0
        return {"rope_parameters": {**parameters, key: growth}}

    return Setting(read, write)


_LONGROPE = dict.fromkeys(("longrope", "su", "yarn"), "longrope")  # all mean the same to Phi-3


def _trained_context() -> Setting:
    """Outside the rotary parameters, where it wins over the same key inside."""
    key = "original_max_position_embeddings"
    return Setting(unread(key).read, lambda m: {key: m.rotary_trained_context or m.context})


def _rope_or_none() -> Setting:
    """Granite 4 rotates queries and keys, or has no positions at all."""
    words = {"rope": "rotary", "nope": "none"}

    def read(c: ConfigReader) -> Settings:
        settings = _ROPE.read(c)
        key = "position_embedding_type"
        positions = c.word(key, words) if c.has(key) else "none"
        return settings if positions == "rotary" else {"positions": positions}

    def write(m: ModelConfig) -> Settings:
        kind = "rope" if m.positions == "rotary" else None
        return {**_ROPE.write(m), "position_embedding_type": kind}

    return Setting(read, write)


def _attention_in_all_layers() -> Setting:
    """Granite 4 without experts and without Mamba layers, which a missing list means."""
    mamba = ("n_heads", "n_groups", "d_state", "d_head", "d_conv", "expand", "chunk_size")

    def read(c: ConfigReader) -> Settings:
        c.ignore([f"mamba_{key}" for key in (*mamba, "conv_bias", "proj_bias")])
        c.ignore(["time_step_limit"])
        if (experts := c.integer("num_local_experts", 8, least=0)) > 0:
            raise c.wrong("num_local_experts", experts, "0: its experts are not read")
        key = "layers_block_type" if c.has("layers_block_type") else "layer_types"
        layers = c.layers()
        kinds = c.words(key, ("attention", FULL, "mamba", "linear_attention"), layers) or ["mamba"]
        if not {"attention", FULL}.issuperset(kinds):
            raise c.wrong(key, kinds[0], "attention in every layer; Mamba is not read")
        return {}

    def write(m: ModelConfig) -> Settings:
        layers = [FULL for _ in range(m.layers)]
        return {"num_local_experts": 0, "layer_types": layers, "mamba_n_heads": 1}

    return Setting(read, write)


def _rotated(c: ConfigReader, layers: int) -> list[int]:
    """Which layers rotate: ``no_rope_layers`` holds 1 for those that do."""
    every = c.integer("no_rope_layer_interval", 4)
    default = [int((layer + 1) % every != 0) for layer in range(layers)]
    return c.switches("no_rope_layers", layers) or default


def _no_rope() -> Setting:
    """Some layers do not rotate; where layers are not listed, those have the window."""
    windows = switchable(lambda c, n: [FULL if one else SLIDING for one in _rotated(c, n)])

    def read(c: ConfigReader) -> Settings:
        layers = _rotated(c, c.layers())
        return {"rotary_layers": () if all(layers) else tuple(layers), **windows.read(c)}

    def write(m: ModelConfig) -> Settings:
        layers = [int(m.rotates(layer)) for layer in range(m.layers)]
        return {"no_rope_layers": layers, **windows.write(m)}

    return Setting(read, write)


def _dense_layers() -> Setting:
    """Layers without experts: those that are listed, and all but every n-th (Qwen3-MoE)."""
    listed, step = "mlp_only_layers", "decoder_sparse_step"

    def read(c: ConfigReader) -> Settings:
        layers, every = c.layers(), c.integer(step, 1)
        named = c.integers(listed)
        dense = tuple(int(n in named or (n + 1) % every != 0) for n in range(layers))
        if all(dense):
            raise c.wrong(listed, named, "some layers, with experts in the others")
        if not any(dense):
            return {}
        return {"dense_layers": dense, "dense_hidden": c.integer("intermediate_size")}

    def write(m: ModelConfig) -> Settings:
        dense = [layer for layer in range(m.layers) if not m.has_experts(layer)]
        return {listed: dense, step: 1, "intermediate_size": m.dense_hidden or m.mlp_width}

    return Setting(read, write)


def _family(
    name: str,
    architecture: str,
    *rows: Setting,
    rotary: Setting = _ROPE,
    tensors: tuple[Row, ...] = (),
    **defaults: Any,
) -> Family:
    """A relative of Llama; ``tensors`` come before Llama's names, ``defaults`` are Family's."""
    return Family(
        name=name,
        architecture=architecture,
        settings=(*_COMMON, rotary, *rows),
        tensors=(*tensors, *_TENSORS),
        prefix="model.",
        copies=COPIES,
        ignored=IGNORED,
        defaults=defaults,
    )


LLAMA = _family(
    "llama", "LlamaForCausalLM", _biases(), _even_heads(), only("rope_interleaved", False)
)
MISTRAL = _family(
    "mistral",
    "MistralForCausalLM",
    *(uniform(), only("attention_bias", False)),
    num_key_value_heads=8,
    sliding_window=4096,
)
QWEN2 = _family(
    "qwen2",
    "Qwen2ForCausalLM",
    *(switchable(), constant(qkv_bias=True), only("use_mrope", False)),
    num_key_value_heads=32,
    sliding_window=4096,
)
QWEN3 = _family(
    "qwen3",
    "Qwen3ForCausalLM",
    *(switchable(), constant(qk_norm=True), only("attention_bias", False)),
    num_key_value_heads=32,
    head_dim=128,
    sliding_window=4096,
)
GRANITE = _family("granite", "GraniteForCausalLM", _biases(), _multipliers())
GRANITE4 = _family(
    "granitemoehybrid",
    "GraniteMoeHybridForCausalLM",
    *(_multipliers(), _attention_in_all_layers(), only("attention_bias", False)),
    size("hidden", "shared_intermediate_size", default=1024, written="mlp_width"),
    unread("num_experts_per_tok", "output_router_logits", "router_aux_loss_coef"),
    rotary=_rope_or_none(),
    tensors=(
        weight("blocks.{}.mlp.gate", "model.layers.{}.shared_mlp.input_linear", FIRST_HALF),
        weight("blocks.{}.mlp.up", "model.layers.{}.shared_mlp.input_linear", SECOND_HALF),
        weight("blocks.{}.mlp.down", "model.layers.{}.shared_mlp.output_linear"),
    ),
    intermediate_size=11008,  # of experts, which a dense model has none of
)
_OLMO = (
    constant(norm_place="after", qk_norm=True, qk_norm_width="all"),
    only("attention_bias", False),
)
_OLMO_NORMS = (
    weight("blocks.{}.attention_post_norm", "model.layers.{}.post_attention_layernorm"),
    weight("blocks.{}.mlp_post_norm", "model.layers.{}.post_feedforward_layernorm"),
)
OLMO2 = _family("olmo2", "Olmo2ForCausalLM", *_OLMO, tensors=_OLMO_NORMS, rms_norm_eps=1e-5)
OLMO3 = _family(
    "olmo3",
    "Olmo3ForCausalLM",
    *_OLMO,
    rotary=rope_with_local_base(5e5, 5e5, windows=periodic(4)),
    tensors=_OLMO_NORMS,
    rms_norm_eps=1e-5,
    sliding_window=4096,
)
SMOLLM3 = _family(
    "smollm3",
    "SmolLM3ForCausalLM",
    *(_biases(), _no_rope()),
    rotary=rope(2e6),
    num_key_value_heads=4,
    tie_word_embeddings=True,
)
_YARN = {"yarn": "yarn"}
_MINISTRAL_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 1e6,
    "factor": 16.0,
    "original_max_position_embeddings": 16384,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}
MINISTRAL3 = _family(
    "ministral3",
    "Ministral3ForCausalLM",
    *(uniform(), _temperature()),
    rotary=rope(types=_YARN, missing=_MINISTRAL_ROPE),
    num_key_value_heads=8,
    head_dim=128,
    rms_norm_eps=1e-5,
)
NANOCHAT = Family(
    name="nanochat",
    architecture="NanoChatForCausalLM",
    settings=(
        *SHARED,
        *(word("mlp", "hidden_act", {"relu2": "relu2"}, "relu2"), only("attention_bias", False)),
        flag("tied", "tie_word_embeddings", False),
        number_or_none("logit_softcap", "final_logit_softcapping", 15.0),
        constant(norm_parameters="none", embedding_norm=True, qk_norm=True),
        # Theirs normalises after the rotation, which keeps the length of a query where cos and sin
        # are not scaled.
        rope(types={"default": "default"}),
    ),
    tensors=(
        Row(
            "blocks.{}.attention.qkv.weight",
            tuple(f"model.layers.{{}}.self_attn.{x}_proj.weight" for x in "qkv"),
            FLIPPED_QKV,
        ),
        weight("blocks.{}.mlp.up", "model.layers.{}.mlp.fc1"),
        weight("blocks.{}.mlp.down", "model.layers.{}.mlp.fc2"),
        *NAMES,
    ),
    prefix="model.",
    copies=COPIES,
    ignored=IGNORED,
    defaults={"intermediate_size": 8192},
)
EXPERT_LOSS = unread("router_aux_loss_coef", "output_router_logits")
LISTED_EXPERTS = tuple(
    Row(
        f"blocks.{{}}.mlp.{x}",
        (f"model.layers.{{}}.mlp.experts.{{expert}}.{x}_proj.weight",),
        STACKED,
    )
    for x in ("gate", "up", "down")
)
"""Each expert with tensors of its own."""
QWEN3_MOE = _family(
    "qwen3_moe",
    "Qwen3MoeForCausalLM",
    *(switchable_everywhere(), constant(qk_norm=True), only("attention_bias", False)),
    size("hidden", "moe_intermediate_size", default=768, written="mlp_width"),
    size("experts", "num_experts", "num_local_experts", default=128),
    size("experts_per_token", "num_experts_per_tok", default=8),
    flag("router_normalise", "norm_topk_prob", False),
    *(_dense_layers(), EXPERT_LOSS),
    tensors=(
        weight("blocks.{}.mlp.router", "model.layers.{}.mlp.gate"),
        *LISTED_EXPERTS,
    ),
    num_key_value_heads=4,
    sliding_window=4096,
    intermediate_size=6144,  # of layers without experts
)
_OSS = "model.layers.{}.mlp.experts"
GPT_OSS = _family(
    "gpt_oss",
    "GptOssForCausalLM",
    constant(bias=True, sinks=True, mlp="swiglu_clamped"),
    *(
        per_layer(alternating, needed=True),
        only("attention_bias", True),
        only("hidden_act", "silu"),
    ),
    *(only("swiglu_alpha", 1.702), only("swiglu_limit", 7.0)),
    size("experts", "num_local_experts", "num_experts", default=128),
    size("experts_per_token", "num_experts_per_tok", "experts_per_token", default=4),
    *(unread("initial_context_length"), EXPERT_LOSS),
    rotary=rope(
        150000.0,
        missing={
            "rope_type": "yarn",
            "factor": 32.0,
            "original_max_position_embeddings": 4096,
            "truncate": False,
        },
    ),
    tensors=(
        Row("blocks.{}.attention.sink", ("model.layers.{}.self_attn.sinks",), SAME),
        *weight_and_bias("blocks.{}.mlp.router", "model.layers.{}.mlp.router"),
        Row("blocks.{}.mlp.gate", (f"{_OSS}.gate_up_proj",), EVEN_COLUMNS),
        Row("blocks.{}.mlp.up", (f"{_OSS}.gate_up_proj",), ODD_COLUMNS),
        Row("blocks.{}.mlp.down", (f"{_OSS}.down_proj",), TRANSPOSED),
        Row("blocks.{}.mlp.gate_bias", (f"{_OSS}.gate_up_proj_bias",), EVEN),
        Row("blocks.{}.mlp.up_bias", (f"{_OSS}.gate_up_proj_bias",), ODD),
        Row("blocks.{}.mlp.down_bias", (f"{_OSS}.down_proj_bias",), SAME),
    ),
    num_key_value_heads=8,
    head_dim=64,
    sliding_window=128,
    rms_norm_eps=1e-5,
)
PHI3 = _family(
    "phi3",
    "Phi3ForCausalLM",
    *(uniform(), number("dropout", "resid_pdrop", 0.0), unread("embd_pdrop")),
    *(only("attention_bias", False), _trained_context()),
    rotary=partial_rope(10000.0, 1.0, types={"default": "default", **_LONGROPE}),
    tensors=(
        weight("blocks.{}.attention.qkv", "model.layers.{}.self_attn.qkv_proj"),
        weight("blocks.{}.mlp.gate", "model.layers.{}.mlp.gate_up_proj", FIRST_HALF),
        weight("blocks.{}.mlp.up", "model.layers.{}.mlp.gate_up_proj", SECOND_HALF),
    ),
    rms_norm_eps=1e-5,
)
FAMILIES = (
    *(LLAMA, MISTRAL, QWEN2, QWEN3, GRANITE, GRANITE4, PHI3, OLMO2, OLMO3, SMOLLM3),
    *(MINISTRAL3, QWEN3_MOE, GPT_OSS, NANOCHAT),
)
