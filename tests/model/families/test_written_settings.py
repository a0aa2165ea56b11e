"""Every setting that a family accepts means the same to the class of transformers that reads it.

Each family begins as its smallest model and is changed by one setting, or by a combination, at a
time. What the family refuses is written by no export; what it accepts is computed here and in
transformers. Weights are large, so that no setting is below the tolerance.
"""

from dataclasses import fields, replace
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from fenchel.checkpoints.hf_export import token_ids
from fenchel.checkpoints.weights import write_weights
from fenchel.model import ModelConfig, Transformer
from fenchel.model.families import FAMILIES, Family
from fenchel.model.families.family import _TRAINING

SIZES: dict[str, Any] = {"vocabulary": 40, "context": 64, "width": 32, "layers": 2, "heads": 4}
YARN = {"rotary_scaling": "yarn", "rotary_factor": 4.0, "rotary_trained_context": 16}
LLAMA3 = {**YARN, "rotary_scaling": "llama3"}
LAYER = {"norm": "layer", "bias": True, "mlp": "gelu_tanh"}
ENCODER = {
    **LAYER,
    "kind": "encoder",
    "mlp": "gelu",
    "positions": "learned",
    "norm_place": "post",
    "final_norm": False,
    "embedding_norm": True,
    "token_types": 2,
}
GEMMA = {"mlp": "geglu_tanh", "norm_plus_one": True, "embedding_scale": 32**0.5}
GEMMA4 = {
    "mlp": "geglu_tanh",
    "embedding_scale": 32**0.5,
    "norm_place": "both",
    "qk_norm": True,
    "value_norm": True,
    "layer_scale": True,
    "score_scale": 1.0,
    "layers": 3,
    "windows": (5, 0, 0),
    "rotary_local_base": 50.0,
    "rotary_scaling": "proportional",
    "rotary_fraction": 0.5,
    "full_head_size": 12,
    "shared_kv_layers": 1,
    "per_layer_width": 6,
}
OLMO = {"norm_place": "after", "qk_norm": True, "qk_norm_width": "all"}
HEAD = {"lm_head_transform": True, "lm_head_bias": True}
MPNET = {"token_types": 0, "relative_bias": True}
MODERN = {
    "kind": "encoder",
    "norm": "layer",
    "norm_parameters": "gain",
    "first_norm": False,
    "embedding_norm": True,
    "mlp": "geglu",
    "windows": (0, 3),
    "rotary_local_base": 50.0,
}
DISTIL = {"token_types": 0, "epsilon": 1e-12}
SMALLEST: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": {},
    "MistralForCausalLM": {"windows": (5,)},
    "Qwen2ForCausalLM": {"qkv_bias": True},
    "Qwen3ForCausalLM": {"qk_norm": True},
    "GraniteForCausalLM": {"residual_scale": 0.5},
    "GraniteMoeHybridForCausalLM": {"residual_scale": 0.5},
    "Phi3ForCausalLM": {},
    "Olmo2ForCausalLM": OLMO,
    "Olmo3ForCausalLM": {**OLMO, "windows": (5, 0), "rotary_local_base": 50.0},
    "SmolLM3ForCausalLM": {"rotary_layers": (1, 0)},
    "Ministral3ForCausalLM": {**YARN, "temperature": "stepped", "temperature_growth": 0.5},
    "Qwen3MoeForCausalLM": {"qk_norm": True, "experts": 3},
    "GptOssForCausalLM": {
        "bias": True,
        "sinks": True,
        "mlp": "swiglu_clamped",
        "experts": 3,
        "hidden": 24,
    },
    "NanoChatForCausalLM": {
        "norm_parameters": "none",
        "embedding_norm": True,
        "qk_norm": True,
        "mlp": "relu2",
    },
    "Qwen3_5ForCausalLM": {
        "norm_plus_one": True,
        "qk_norm": True,
        "gate": "element",
        "delta_layers": (1, 0),
        "delta_key_width": 10,
    },
    "Qwen3_5MoeForCausalLM": {
        "norm_plus_one": True,
        "qk_norm": True,
        "gate": "element",
        "delta_layers": (1, 0),
        "experts": 3,
        "shared_expert": 20,
        "shared_expert_gate": True,
    },
    "GPT2LMHeadModel": {**LAYER, "positions": "learned"},
    "GPTNeoXForCausalLM": {**LAYER, "parallel": True},
    "BloomForCausalLM": {**LAYER, "positions": "alibi", "embedding_norm": True},
    "GemmaForCausalLM": GEMMA,
    "Gemma2ForCausalLM": {**GEMMA, "norm_place": "both", "softcap": 2.0, "logit_softcap": 3.0},
    "Gemma3ForCausalLM": {**GEMMA, "norm_place": "both", "qk_norm": True},
    "Gemma4ForCausalLM": GEMMA4,
    "BertForMaskedLM": {**ENCODER, **HEAD},
    "BertModel": {**ENCODER, "lm_head": False},
    "RobertaForMaskedLM": {**ENCODER, **HEAD},
    "RobertaModel": {**ENCODER, "lm_head": False},
    "XLMRobertaForMaskedLM": {**ENCODER, **HEAD},
    "XLMRobertaModel": {**ENCODER, "lm_head": False},
    "MPNetForMaskedLM": {**ENCODER, **HEAD, **MPNET},
    "MPNetModel": {**ENCODER, **MPNET, "lm_head": False},
    "ModernBertForMaskedLM": {**MODERN, **HEAD},
    "ModernBertModel": {**MODERN, "lm_head": False},
    "DistilBertForMaskedLM": {**ENCODER, **HEAD, **DISTIL},
    "DistilBertModel": {**ENCODER, **DISTIL, "lm_head": False},
    "AlbertForMaskedLM": {
        **ENCODER,
        **HEAD,
        "mlp": "gelu_tanh",
        "embedding_width": 16,
        "distinct_layers": 1,
    },
    "T5ForConditionalGeneration": {
        "kind": "encoder-decoder",
        "positions": "buckets",
        "score_scale": 1.0,
        "mlp": "relu",
        "logit_scale": 32**-0.5,
    },
}
CHANGES: tuple[dict[str, Any], ...] = (
    {},
    {"vocabulary": 41},
    {"context": 32},
    {"width": 48},
    {"layers": 3},
    {"heads": 2},
    {"kv_heads": 2},
    {"hidden": 24},
    {"norm": "rms"},
    {"norm": "layer"},
    *({"positions": kind} for kind in ("learned", "sinusoidal", "alibi", "none")),
    {"rotary_base": 50.0},
    *({"mlp": kind} for kind in ("swiglu", "geglu", "geglu_tanh", "gelu", "gelu_tanh", "relu")),
    *({"mlp": kind} for kind in ("relu2", "swiglu_clamped")),
    *({"norm_parameters": kind} for kind in ("all", "gain", "none")),
    {"first_norm": True},
    {"first_norm": False},
    {"relative_bias": True},
    {"relative_bias": False},
    {
        "rotary_scaling": "longrope",
        "rotary_trained_context": 64,
        "rotary_attention": 1.2,
        "rotary_short": (1.0, 2.0, 0.5, 3.0),
        "rotary_long": (2.0, 3.0, 4.0, 5.0),
    },
    {"temperature": "none", "temperature_growth": None},
    {"temperature": "stepped", "temperature_growth": 0.5, **YARN},
    {"temperature": "stepped", "temperature_floor": 8},
    {"temperature": "stepped", "temperature_offset": 1},
    {"temperature": "log", "temperature_growth": None},
    {"temperature": "stepped", "temperature_layers": "unrotated"},
    {"sinks": True, "sink_score": "token"},
    {"sinks": True, "sink_score": "zero"},
    {"router_normalise": False},
    {"router_bias": True},
    {"router_scale": 2.0},
    {"shared_expert": 24},
    {"shared_expert_gate": False},
    {"experts": 3, "shared_expert": 24, "expert_norms": True, "hidden": 16},
    {"experts": 3, "shared_expert": 24, "expert_norms": True, "shared_hidden": 48},
    {"experts": 3, "shared_expert": 24, "expert_norms": True, "dense_layers": (0, 1)},
    {"delta_layers": ()},
    {"delta_layers": (0, 1)},
    {"delta_layers": (1, 0), "delta_key_heads": 1, "delta_value_heads": 3},
    {"delta_layers": (1,), "delta_key_width": 6, "delta_value_width": 10, "delta_kernel": 2},
    {"experts": 3, "bias": True},
    {"experts": 3, "bias": False},
    {"choice": "entmax"},
    {"choice": "entmax", "entmax_alpha": 1.25},
    {"choice": "entmax", "entmax_alpha_learned": True},
    {"beta": 2.0},
    {"choice": "sigmoid", "log_odds": -1.0},
    {"tied": True},
    {"tied": False},
    {"bias": True},
    {"bias": False},
    {"epsilon": 0.1},
    {"kind": "decoder"},
    {"kind": "encoder"},
    {"encoder_layers": 3},
    {"distinct_layers": 2},
    {"head_size": 12},
    {"embedding_width": 24},
    {"token_types": 0},
    {"token_types": 3},
    {"embedding_scale": 1.0},
    {"embedding_scale": 3.0},
    {"embedding_norm": True},
    {"embedding_norm": False},
    *({"norm_place": place} for place in ("pre", "post", "both", "after")),
    {"norm_plus_one": True},
    {"norm_plus_one": False},
    {"final_norm": True},
    {"final_norm": False},
    {"qk_norm": True},
    {"qk_norm": False},
    {"qk_norm": True, "qk_norm_width": "head"},
    {"qk_norm": True, "qk_norm_width": "all"},
    {"rotary_layers": (0, 1)},
    {"rotary_layers": ()},
    {"rotary_layers": (0, 1), "windows": (4, 0)},
    {"rotary_layers": (0,)},
    {"residual_scale": 0.5},
    {"parallel": True},
    {"parallel": False},
    {"rotary_layout": "pairs"},
    {"rotary_fraction": 0.5},
    {"rotary_fraction": 0.25},
    {"rotary_fraction": 0.5, **YARN},
    {"rotary_fraction": 0.5, "rotary_scaling": "linear", "rotary_factor": 2.0},
    {"rotary_fraction": 0.5, **LLAMA3},
    {"rotary_local_base": 20.0, "windows": (5, 0)},
    {"rotary_scaling": "linear", "rotary_factor": 2.0},
    {"rotary_scaling": "ntk", "rotary_factor": 2.0},
    YARN,
    {**YARN, "rotary_slow": 0.5, "rotary_fast": 3.0},
    {**YARN, "rotary_attention": 2.0},
    {**YARN, "rotary_truncate": False},
    {**YARN, "rotary_trained_context": None},
    LLAMA3,
    {**LLAMA3, "rotary_slow": 0.5, "rotary_fast": 3.0},
    {**LLAMA3, "windows": (5, 0)},
    {**YARN, "windows": (5, 0)},
    {"rotary_scaling": "proportional", "rotary_fraction": 0.25, "rotary_factor": 2.0},
    {"rotary_scaling": None, "rotary_fraction": 1.0},
    {"full_head_size": 10},
    {"full_head_size": None},
    {"full_kv_heads": 2},
    {"keys_as_values": True},
    {"keys_as_values": True, "full_kv_heads": 1},
    {"value_norm": True},
    {"value_norm": False},
    {"layer_scale": True},
    {"layer_scale": False},
    {"shared_kv_layers": 0},
    {"shared_kv_layers": 1},
    {"shared_kv_layers": 1, "shared_hidden": 24},
    {"hidden": 20, "shared_hidden": 40},
    {"per_layer_width": 0},
    {"per_layer_width": 7},
    {"windows": (), "full_head_size": None},
    {"buckets": 8},
    {"bucket_distance": 9},
    {"windows": ()},
    {"windows": (4,)},
    {"windows": (4, 0)},
    {"windows": (0, 4)},
    {"windows": (4, 6)},
    {"layer_choices": ("softmax", "entmax")},
    {"scores": "l2"},
    {"score_scale": 0.7},
    {"score_scale": 0.5},
    {"score_scale": None},
    {"softcap": 1.0},
    {"softcap": None},
    {"sinks": True},
    {"gate": "head", "gate_activation": "softplus"},
    {"qkv_bias": True},
    {"qkv_bias": False},
    {"sigma_reparam": True},
    {"experts": 3},
    {"dense_layers": (0, 1)},
    {"dense_layers": (1, 0), "dense_hidden": 24},
    {"experts": 3, "experts_per_token": 1},
    {"experts": 3, "router": "sparsemax"},
    {"lm_head": False},
    {"logit_scale": 1.0},
    {"logit_scale": 0.5},
    {"logit_softcap": 1.0},
    {"logit_softcap": None},
    {"lm_head_bias": True},
    {"lm_head_bias": False},
    {"lm_head_transform": True},
    {"lm_head_transform": False},
    {"pooler": True},
    {"tied": False, "logit_scale": 1.0},
    {"tied": True, "logit_scale": 1.0},
    {"tied": False, "softcap": 1.0, "windows": (4,)},
    {"kv_heads": 1, "head_size": 12, "windows": (4, 0), "rotary_base": 50.0},
)
IDS = torch.randint(2, 40, (2, 24), generator=torch.Generator().manual_seed(0))
FAMILY = {family.architecture: family for family in FAMILIES}


def test_every_setting_is_changed() -> None:
    names = {field.name for field in fields(ModelConfig)}
    assert names - _TRAINING == {name for change in CHANGES for name in change}
    assert FAMILY.keys() == SMALLEST.keys()


def large_weights(config: ModelConfig) -> Transformer:
    generator = torch.Generator().manual_seed(1)
    model = Transformer(config, generator=generator).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.4 * torch.randn(parameter.shape, generator=generator)
    return model


def their_output(family: Family, config: ModelConfig, model: Transformer) -> Tensor:
    settings = token_ids(None, config.kind) | family.write(config)
    name = settings.pop("model_type")
    weights = write_weights(dict(model.state_dict()), family, config, None)
    theirs, info = getattr(transformers, family.architecture).from_pretrained(
        None,
        config=transformers.AutoConfig.for_model(name, **settings),
        state_dict=weights,
        output_loading_info=True,
        attn_implementation="eager",
    )
    wrong = {key: names for key, names in info.items() if any("pooler" not in n for n in names)}
    assert not wrong
    extra = {"decoder_input_ids": IDS[:, :9]} if config.kind == "encoder-decoder" else {}
    output = theirs.eval()(IDS, **extra)
    return output.logits if config.lm_head else output.last_hidden_state


def our_output(model: Transformer) -> Tensor:
    if model.config.kind == "encoder-decoder":
        return model(IDS[:, :9], memory_BSM=model.encode(IDS))
    return model(IDS, return_hidden=not model.config.lm_head)


@pytest.mark.parametrize("architecture", SMALLEST)
@torch.no_grad()
def test_transformers_computes_what_is_written(architecture: str) -> None:
    family, base = FAMILY[architecture], ModelConfig(**{**SIZES, **SMALLEST[architecture]})
    wrong, computed = {}, set()
    for change in CHANGES:
        try:
            config = replace(base, **change)
        except ValueError:  # no model has this combination
            continue
        if config in computed:
            continue
        computed.add(config)
        model = large_weights(config)
        if family.cannot_express(config, model.state_dict()):
            assert change
            continue
        error = (our_output(model) - their_output(family, config, model)).abs().max().item()
        if not error < 2e-4:
            wrong[str(change)] = error
    assert not wrong
