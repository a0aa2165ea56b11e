"""Gemma 1 to 4 (text): Llama's names; gains of 1 + weight, an embedding scaled by its width.

gemma         GeGLU, a head width independent of the model width
gemma2        norms on both sides of a branch, soft caps, every second layer with a window
gemma3_text   QK-norm; five layers of six have a window and another rotary base
gemma4_text   gains of weight; wider heads without a window, normalised values, keys and values that
              layers share, an embedding for every layer, a factor at the end of every block
"""

from collections.abc import Mapping
from dataclasses import replace

from fenchel.model.config import ModelConfig
from fenchel.model.families.config_reader import ConfigReader
from fenchel.model.families.family import Family
from fenchel.model.families.llama import COPIES, IGNORED, NAMES, SHARED
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
from fenchel.model.families.tensor_rows import (
    FIRST_ROWS,
    FUSED_QK,
    SAME,
    SECOND_ROWS,
    Row,
    weight,
)
from fenchel.model.families.window_settings import periodic

_GATES = {"gelu_pytorch_tanh": "geglu_tanh", "gelu": "geglu_tanh"}  # the first release has gelu
_COMMON = (
    *SHARED,
    flag("tied", "tie_word_embeddings", True),
    Setting(lambda c: {"embedding_scale": c.integer("hidden_size") ** 0.5}, lambda _: {}),
    only("attention_bias", False),
)
_PLUS_ONE = (constant(norm_plus_one=True), only("use_bidirectional_attention", None, False))
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


def _both_sides(logits: float | None) -> tuple[Setting, ...]:
    """Settings of Gemma 2 and later, with the default soft cap of the logits."""
    return (
        word("mlp", "hidden_activation", _GATES, "gelu_pytorch_tanh"),
        constant(norm_place="both"),
        number_or_none("logit_softcap", "final_logit_softcapping", logits),
    )


def _later(logits: float | None) -> tuple[Setting, ...]:
    """Settings that Gemma 2 and 3 share."""
    more = (*_PLUS_ONE, _query_scale(), only("hidden_act", "gelu_pytorch_tanh"))
    return *_both_sides(logits), *more


def _family(
    name: str, architecture: str, settings: tuple[Setting, ...], *tensors: Row, **defaults: int
) -> Family:
    return Family(
        name=name,
        architecture=architecture,
        settings=(*_COMMON, *settings),
        tensors=(*tensors, *NAMES),
        prefix="model.",
        copies=COPIES,
        ignored=IGNORED,
        defaults={"head_dim": 256, **defaults},
    )


GEMMA = _family(
    "gemma",
    "GemmaForCausalLM",
    (
        *_PLUS_ONE,
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


def _windows_but_the_last() -> Setting:
    """The windows of Gemma 4: its last layer has none, whatever the file says."""
    rows = periodic(6)

    def read(c: ConfigReader) -> Settings:
        windows = [*rows.read(c).get("windows", ())]
        if windows:
            windows[-1] = 0
        return {"windows": tuple(windows)} if any(windows) else {}

    return Setting(read, rows.write)


_GEMMA4_ROPE = {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25}
_GEMMA4_POSITIONS = rope_with_local_base(
    *(1e6, 1e4),
    windows=_windows_but_the_last(),
    types={"default": "default", "proportional": "proportional"},
    missing=_GEMMA4_ROPE,
)


def _heads_without_a_window() -> Setting:
    """The heads of layers without a window: by two keys, or layer by layer as transformers 5 saves.

    Where no layer has a window, the heads of all.
    """
    width, groups, layers = "head_dim", "num_key_value_heads", "per_layer_config"

    def read(c: ConfigReader) -> Settings:
        windows = _GEMMA4_POSITIONS.read(c).get("windows", ())
        elsewhere = {width: c.integer(width), groups: c.integer(groups)}
        sizes = {**elsewhere, width: c.integer("global_head_dim", 512)}
        own = c.integer_or_none("num_global_key_value_heads")
        if c.flag("attention_k_eq_v", False) and own is not None:
            sizes[groups] = own
        if c.has(layers):  # then the two keys are not read
            full = [n for n in range(c.layers()) if not windows or not windows[n]]
            sizes = _alike_in_layers(c, layers, full, elsewhere)
        names = ("full_head_size", "full_kv_heads") if windows else ("head_size", "kv_heads")
        return dict(zip(names, (sizes[width], sizes[groups]), strict=True))

    def write(m: ModelConfig) -> Settings:
        sizes = {width: m.full_head_size or m.head_width, groups: m.full_kv_heads or m.groups}
        full = [n for n in range(m.layers) if m.window(n) is None]
        return {layers: {str(n): sizes for n in full}}

    return Setting(read, write)


def _alike_in_layers(
    c: ConfigReader, key: str, layers: list[int], defaults: Mapping[str, int]
) -> dict[str, int]:
    """The sizes that an object gives for each of ``layers``, the same for all, and for no other."""
    listed = c.part(key)
    if {*listed.settings} != {str(n) for n in layers}:
        raise c.wrong(key, [*listed.settings], f"an object for the layers {layers}")
    each = [listed.part(str(n)) for n in layers]
    for one in each:
        if unknown := one.settings.keys() - defaults.keys():
            raise c.wrong(key, sorted(unknown)[0], " and ".join(defaults))
    sizes = [{name: one.integer(name, size) for name, size in defaults.items()} for one in each]
    if any(one != sizes[0] for one in sizes):
        raise c.wrong(key, sizes, "the same in every layer")
    return sizes[0] if sizes else dict(defaults)


def _shared_layers() -> Setting:
    """The last layers without keys and values, whose MLP may be twice as wide."""
    count, double = "num_kv_shared_layers", "use_double_wide_mlp"

    def read(c: ConfigReader) -> Settings:
        shared = c.integer(count, 0, least=0)
        if shared and not c.integer("hidden_size_per_layer_input", 256, least=0):
            raise c.wrong(count, shared, "0 without an embedding per layer, as in transformers")
        wide = c.flag(double, False) and shared > 0
        hidden = 2 * c.integer("intermediate_size") if wide else None
        return {"shared_kv_layers": shared, "shared_hidden": hidden}

    def write(m: ModelConfig) -> Settings:
        return {count: m.shared_kv_layers, double: m.shared_hidden == 2 * m.mlp_width}

    return Setting(read, write)


def _per_layer_embedding() -> Setting:
    """The embedding of every layer, of the same tokens as the first one."""
    width, rows = "hidden_size_per_layer_input", "vocab_size_per_layer_input"

    def read(c: ConfigReader) -> Settings:
        per_layer, vocabulary = c.integer(width, 256, least=0), c.integer("vocab_size")
        given = c.integer(rows, 262144)
        if per_layer and given != vocabulary:
            raise c.wrong(rows, given, f"vocab_size={vocabulary}; fenchel has one vocabulary")
        return {"per_layer_width": per_layer}

    return Setting(read, lambda m: {width: m.per_layer_width, rows: m.vocabulary})


def _experts() -> Setting:
    """Experts beside an MLP of another width (26B-A4B), or neither."""
    keys = ("num_experts", "top_k_experts", "moe_intermediate_size")

    def read(c: ConfigReader) -> Settings:
        if not c.flag("enable_moe_block", False):
            c.ignore(keys)
            return {}
        if c.flag("use_double_wide_mlp", False):
            raise c.wrong("use_double_wide_mlp", True, "false where there are experts")
        ours = ("experts", "experts_per_token", "hidden")
        sizes = {name: c.integer(key) for name, key in zip(ours, keys, strict=True)}
        return {**sizes, "shared_expert": c.integer("intermediate_size"), "expert_norms": True}

    def write(m: ModelConfig) -> Settings:
        if not m.experts:
            return {"enable_moe_block": False}
        sizes = zip(keys, (m.experts, m.experts_per_token, m.mlp_width), strict=True)
        return {"enable_moe_block": True, **dict(sizes), "intermediate_size": m.shared_expert}

    return Setting(read, write)


def _unused_keys(m: ModelConfig) -> str | None:
    """Keys and values that published files hold for layers that attend to those of others."""
    shared = [str(n) for n in range(m.layers) if m.kv_source(n) != n]
    names = rf"layers\.({'|'.join(shared)})\.self_attn\.([kv]_proj|[kv]_norm)\.weight"
    return rf"(model\.)?{names}" if shared else None


def _shares(m: ModelConfig, layer: int) -> bool:
    return m.kv_source(layer) != layer


def _keys_only(m: ModelConfig, layer: int) -> bool:
    return m.keys_as_values and m.window(layer) is None


_QKV, _LAYER = "blocks.{}.attention.qkv.weight", "model.layers.{}"
_Q, _K = (f"{_LAYER}.self_attn.{x}_proj.weight" for x in "qk")
_EXPERT_TENSORS = (
    weight("blocks.{}.mlp.shared_norm", f"{_LAYER}.pre_feedforward_layernorm"),
    weight("blocks.{}.mlp.shared_post_norm", f"{_LAYER}.post_feedforward_layernorm_1"),
    weight("blocks.{}.mlp.experts_norm", f"{_LAYER}.pre_feedforward_layernorm_2"),
    weight("blocks.{}.mlp.experts_post_norm", f"{_LAYER}.post_feedforward_layernorm_2"),
    *(
        weight(f"blocks.{{}}.mlp.shared.{x}", f"{_LAYER}.mlp.{x}_proj")
        for x in ("gate", "up", "down")
    ),
    weight("blocks.{}.mlp.router", f"{_LAYER}.router.proj"),
    Row("blocks.{}.mlp.router_gain", (f"{_LAYER}.router.scale",), SAME),
    Row("blocks.{}.mlp.expert_scale", (f"{_LAYER}.router.per_expert_scale",), SAME),
    Row("blocks.{}.mlp.gate", (f"{_LAYER}.experts.gate_up_proj",), FIRST_ROWS),
    Row("blocks.{}.mlp.up", (f"{_LAYER}.experts.gate_up_proj",), SECOND_ROWS),
    Row("blocks.{}.mlp.down", (f"{_LAYER}.experts.down_proj",), SAME),
)
GEMMA4 = replace(
    _family(
        "gemma4_text",
        "Gemma4ForCausalLM",
        (
            *_both_sides(None),
            constant(qk_norm=True, value_norm=True, layer_scale=True, score_scale=1.0),
            only("use_bidirectional_attention", None, False, "vision"),  # of images alone
            _experts(),
            _GEMMA4_POSITIONS,
            flag("keys_as_values", "attention_k_eq_v", False),
            *(_heads_without_a_window(), _shared_layers(), _per_layer_embedding()),
        ),
        *_BOTH_SIDES,
        Row(_QKV, (_Q,), SAME, at=_shares),
        Row(_QKV, (_Q, _K), FUSED_QK, at=_keys_only),
        *_EXPERT_TENSORS,
        Row("blocks.{}.layer_scale", (f"{_LAYER}.layer_scalar",), SAME),
        weight("blocks.{}.per_layer_gate", f"{_LAYER}.per_layer_input_gate"),
        weight("blocks.{}.per_layer_out", f"{_LAYER}.per_layer_projection"),
        weight("blocks.{}.per_layer_norm", f"{_LAYER}.post_per_layer_input_norm"),
        weight("per_layer_embed", "model.embed_tokens_per_layer"),
        weight("per_layer_proj", "model.per_layer_model_projection"),
        weight("per_layer_norm", "model.per_layer_projection_norm"),
        num_key_value_heads=4,
        sliding_window=512,
    ),
    unused=_unused_keys,
)
FAMILIES = (GEMMA, GEMMA2, GEMMA3, GEMMA4)
