"""fenchel/model/config.py: what is refused, and the sizes that follow from others."""

import math
from dataclasses import fields
from typing import Any

import pytest
import torch
from torch import nn

from fenchel.config import from_mapping, to_mapping
from fenchel.model import ModelConfig, Transformer

REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"vocabulary": 0}, "vocabulary=0 should be a whole number, 1 to 16777216."),
    ({"context": -1}, "context=-1 should be a whole number"),
    ({"layers": 2.0}, r"layers=2\.0 should be a whole number"),
    ({"layers": True}, "layers=True should be a whole number"),
    ({"width": 10**30}, "width=1000000000000000000000000000000 should be a whole number"),
    ({"heads": 0}, "heads=0 should be a whole number"),
    ({"hidden": 0}, "hidden=0 should be a whole number"),
    ({"kv_heads": 0}, "kv_heads=0 should be a whole number"),
    ({"width": 130, "heads": 4}, "width=130 does not split over heads=4; try width=128."),
    ({"width": 1, "heads": 4}, "width=1 does not split over heads=4; try width=4."),
    ({"heads": 4, "kv_heads": 3}, "kv_heads=3 does not divide heads=4; try kv_heads=1 or kv_h"),
    ({"width": 12, "heads": 4}, "3 entries per head are not even; change width=12 or heads=4."),
    ({"norm": "batch"}, r"norm='batch' should be one of \('rms', 'layer'\)."),
    ({"positions": "alibis"}, "positions='alibis' should be one of"),
    ({"mlp": "tanh"}, "mlp='tanh' should be one of"),
    ({"choice": "softmaxx"}, "there is no choice map 'softmaxx'; did you mean 'softmax'?"),
    ({"choice": "entmax", "entmax_alpha": 1.0}, "needs 1 < alpha"),
    ({"choice": "entmax", "entmax_alpha": math.nan}, "needs 1 < alpha"),
    (
        {"choice": "entmax", "entmax_alpha_learned": True, "entmax_alpha": 2.0},
        r"entmax_alpha=2\.0, which should be above 1\.05 and below 2\.0",
    ),
    (
        {"experts": 2, "router": "entmax", "entmax_alpha_learned": True},
        'it needs a choice or layer_choices "entmax"',
    ),
    ({"dropout": 1.0}, r"dropout=1\.0 should be in \[0, 1\)."),
    ({"dropout": math.nan}, "dropout=nan should be in"),
    ({"epsilon": 0.0}, r"epsilon=0\.0 should be above 0"),
    ({"epsilon": math.nan}, "epsilon=nan should be above 0"),
    ({"rotary_base": 1.0}, r"rotary_base=1\.0 should be a finite number above 1."),
    ({"rotary_base": math.inf}, "rotary_base=inf should be a finite number above 1."),
    (
        {"kind": "both"},
        r"kind='both' should be one of \('decoder', 'encoder', 'encoder-decoder'\).",
    ),
    ({"norm_place": "inside"}, "norm_place='inside' should be one of"),
    ({"rotary_scaling": "log"}, "rotary_scaling='log' should be one of"),
    ({"scores": "cosine"}, "scores='cosine' should be one of"),
    ({"initial": "he"}, "initial='he' should be one of"),
    ({"head_size": 0}, "head_size=0 should be a whole number"),
    ({"token_types": -1}, "token_types=-1 should be a whole number, 0 to"),
    ({"windows": (4, -1)}, "a window=-1 should be a whole number, 0 to"),
    ({"windows": (4, 2.5)}, r"a window=2\.5 should be a whole number"),
    (
        {"windows": (1, 2, 3, 4, 5)},
        r"the pattern windows=\(1, 2, 3, 4, 5\) is longer than layers=4",
    ),
    ({"layer_choices": ("softmax", "soft")}, "there is no choice map 'soft'"),
    ({"layer_choices": (3,)}, "there is no choice map '3'"),
    ({"experts": 2, "router": "topk"}, "there is no choice map 'topk'"),
    ({"delta_layers": (2,)}, "should hold 0 and 1 only"),
    ({"delta_layers": (1,), "delta_value_heads": 3}, "delta_key_heads=2 does not divide"),
    ({"delta_layers": (1,), "kind": "encoder"}, "read from left to right"),
    ({"delta_layers": (1,), "distinct_layers": 1}, "distinct_layers shares blocks"),
    ({"choice": "sigmoid", "sinks": True}, "weighs every key by itself"),
    ({"layer_choices": ("softmax", "sigmoid"), "scores": "l2"}, "weighs every key by itself"),
    ({"choice": "sigmoid", "log_odds": math.inf}, "log_odds=inf should be a finite number"),
    ({"distinct_layers": 3}, "distinct_layers=3 does not divide layers=4."),
    ({"distinct_layers": 2, "windows": (3, 0)}, "distinct_layers shares blocks between layers"),
    ({"positions": "buckets", "buckets": 30}, "buckets=30 should be a multiple of 4."),
    ({"mlp_dropout": 1.5}, r"mlp_dropout=1\.5 should be in \[0, 1\)."),
    ({"attention_dropout": -0.1}, r"attention_dropout=-0\.1 should be in"),
    ({"softcap": 0.0}, r"softcap=0\.0 should be a finite number above 0."),
    ({"logit_softcap": math.nan}, "logit_softcap=nan should be a finite number above 0."),
    ({"score_scale": -1.0}, r"score_scale=-1\.0 should be a finite number above 0."),
    ({"embedding_scale": math.inf}, "embedding_scale=inf should be a finite number above 0."),
    ({"residual_scale": "deep"}, "residual_scale='deep' should be a number above 0, or \"depth\"."),
    ({"residual_scale": 0.0}, r"residual_scale=0\.0 should be a number above 0"),
    ({"rotary_fraction": 0.0}, r"rotary_fraction=0\.0 should be above 0, at most 1."),
    ({"width": 20, "rotary_fraction": 0.5}, "5 entries per head are not even"),
    ({"experts": 2, "experts_per_token": 3}, "experts_per_token=3 is more than experts=2."),
    ({"experts": 2, "sigma_reparam": True}, "experts are plain linear maps"),
    ({"norm_parameters": "gain"}, 'norm="rms" has no bias'),
    ({"norm_parameters": "none", "norm_plus_one": True}, "norm_plus_one=True needs a gain"),
    ({"distinct_layers": 2, "first_norm": False}, "set first_norm=True"),
    ({"norm_place": "post", "first_norm": False}, 'it needs norm_place="pre" or "both"'),
    ({"temperature_growth": 0.1}, 'it needs temperature="stepped"'),
    (
        {"temperature": "stepped", "temperature_growth": 0.0},
        r"temperature_growth=0\.0 should be a finite number above 0",
    ),
    ({"temperature": "stepped", "temperature_offset": 2}, "temperature_offset=2 should be 0 or 1"),
    ({"temperature": "log", "kind": "encoder"}, 'it needs kind="decoder"'),
    ({"sink_score": "token"}, "it needs sinks"),
    ({"rotary_short": (1.0,)}, 'it needs rotary_scaling="longrope"'),
    ({"rotary_scaling": "longrope"}, "rotary_short should hold 32 numbers above 0"),
    ({"relative_bias": True}, 'it needs positions="learned"'),
    ({"router_normalise": False}, "it needs experts"),
    ({"scores": "l2", "heads": 2, "kv_heads": 1}, 'scores="l2" has one matrix'),
    ({"scores": "l2", "sinks": True}, 'scores="l2" leaves scores open to a shift'),
    ({"scores": "l2", "softcap": 9.0}, 'scores="l2" leaves scores open to a shift'),
    ({"gate": "row"}, "gate='row' should be one of"),
    ({"gate_activation": "softplus"}, "gate_activation='softplus' would do nothing"),
    ({"rotary_layers": (1, 2)}, r"rotary_layers=\(1, 2\) should hold 0 and 1 only."),
    ({"qk_norm_width": "all"}, "qk_norm_width='all' would do nothing; it needs qk_norm."),
    ({"parallel": True, "norm_place": "post"}, 'parallel=True needs norm_place="pre", "both"'),
    # What nothing would read.
    (
        {"positions": "none", "rotary_fraction": 0.5},
        r"rotary_fraction=0\.5 would do nothing; it needs pos",
    ),
    ({"rotary_factor": 2.0}, r"rotary_factor=2\.0 would do nothing; it needs rotary_scaling."),
    ({"rotary_local_base": 50.0}, r"rotary_local_base=50\.0 would do nothing; it needs windows."),
    (
        {"rotary_scaling": "linear", "rotary_trained_context": 9},
        'it needs rotary_scaling="yarn", "llama3" or "longrope"',
    ),
    ({"rotary_scaling": "llama3", "rotary_attention": 1.1}, 'it needs rotary_scaling="yarn".'),
    (
        {"buckets": 16},
        'buckets=16 would do nothing; it needs positions="buckets" or relative_bias.',
    ),
    ({"encoder_layers": 2}, 'encoder_layers=2 would do nothing; it needs kind="encoder-decoder".'),
    ({"norm": "layer", "norm_plus_one": True}, 'it needs norm="rms".'),
    ({"router": "entmax"}, "router='entmax' would do nothing; it needs experts."),
    ({"initial_depth": True}, 'it needs initial="normal" or "xavier".'),
]


@pytest.mark.parametrize(("changes", "sentence"), REFUSED, ids=str)
def test_a_setting_that_cannot_be_is_refused_in_one_sentence(
    changes: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(ValueError, match=sentence) as caught:
        ModelConfig(**{"vocabulary": 64, **changes})
    said = str(caught.value)
    assert said.endswith((".", "?"))
    assert "\n" not in said


def test_odd_heads_are_fine_where_nothing_is_turned() -> None:
    config = ModelConfig(vocabulary=9, width=12, heads=4, positions="learned")
    assert config.head_width == 3


def test_derived_sizes_follow_from_those_that_are_set() -> None:
    config = ModelConfig(vocabulary=9, width=96, heads=6, kv_heads=2)
    assert (config.head_width, config.groups) == (16, 2)
    assert ModelConfig(vocabulary=9, heads=4).groups == 4
    assert ModelConfig(vocabulary=9, mlp="gelu", width=96).mlp_width == 384
    assert ModelConfig(vocabulary=9, hidden=50).mlp_width == 50
    assert ModelConfig(vocabulary=9, width=100, heads=3, head_size=20).head_width == 20
    assert ModelConfig(vocabulary=9, width=64, heads=2, rotary_fraction=0.25).rotary_width == 8
    assert ModelConfig(vocabulary=9, layers=8, residual_scale="depth").branch_scale == 0.25
    assert ModelConfig(vocabulary=9, mlp="geglu_tanh").gated
    assert ModelConfig(vocabulary=9, bias=True, qkv_bias=False).has_qkv_bias is False


def test_patterns_repeat_over_the_layers() -> None:
    config = ModelConfig(vocabulary=9, layers=5, windows=(4, 0), layer_choices=("hard", "softmax"))
    assert [config.window(n) for n in range(5)] == [4, None, 4, None, 4]
    assert [config.choice_of(n) for n in range(3)] == ["hard", "softmax", "hard"]
    plain = ModelConfig(vocabulary=9, choice="entmax")
    assert (plain.window(3), plain.choice_of(3)) == (None, "entmax")
    assert ModelConfig(vocabulary=9, windows=[3]).windows == (3,)  # type: ignore[arg-type]


@pytest.mark.parametrize("width", [2, 96, 98, 128, 384, 500])
def test_a_gated_mlp_is_eight_thirds_as_wide_rounded_up_to_a_multiple_of_32(width: int) -> None:
    wide = ModelConfig(vocabulary=9, width=width, heads=1).mlp_width
    assert wide % 32 == 0
    assert 0 <= wide - 8 * width / 3 < 32


def test_settings_survive_being_written_and_read() -> None:
    config = ModelConfig(vocabulary=77, heads=4, kv_heads=2, choice="entmax", entmax_alpha=1.25)
    assert from_mapping(ModelConfig, to_mapping(config)) == config


OTHERS: dict[str, Any] = {
    "context": 9,
    "width": 24,
    "layers": 3,
    "heads": 4,
    "kv_heads": 1,
    "hidden": 20,
    "norm": "layer",
    "positions": "alibi",
    "rotary_base": 500.0,
    "rotary_layers": (0, 1),
    "qk_norm_width": "all",
    "mlp": "gelu",
    "choice": "entmax",
    "entmax_alpha": 1.3,
    "entmax_alpha_learned": True,
    "beta": 2.0,
    "log_odds": -1.0,
    "tied": False,
    "bias": True,
    "dropout": 0.3,
    "epsilon": 0.1,
    "kind": "encoder",
    "encoder_layers": 3,
    "distinct_layers": 1,
    "head_size": 4,
    "full_head_size": 12,
    "full_kv_heads": 1,
    "embedding_width": 6,
    "per_layer_width": 3,
    "token_types": 2,
    "embedding_scale": 3.0,
    "embedding_norm": True,
    "norm_place": "post",
    "norm_plus_one": True,
    "norm_parameters": "none",
    "first_norm": False,
    "final_norm": False,
    "qk_norm": True,
    "value_norm": True,
    "layer_scale": True,
    "residual_scale": 0.5,
    "parallel": True,
    "rotary_layout": "pairs",
    "rotary_fraction": 0.5,
    "rotary_local_base": 50.0,
    "rotary_factor": 4.0,
    "rotary_trained_context": 2,
    "rotary_slow": 0.1,
    "rotary_fast": 1.1,
    "rotary_attention": 3.0,
    "rotary_truncate": False,
    "rotary_short": (2.0,) * 4,
    "rotary_long": (3.0,) * 4,
    "relative_bias": True,
    "buckets": 8,
    "bucket_distance": 6,
    "windows": (2,),
    "delta_layers": (1,),
    "delta_key_heads": 1,
    "delta_value_heads": 2,
    "delta_key_width": 8,
    "delta_value_width": 12,
    "delta_kernel": 3,
    "shared_kv_layers": 1,
    "shared_hidden": 24,
    "keys_as_values": True,
    "layer_choices": ("sparsemax",),
    "scores": "l2",
    "score_scale": 3.0,
    "softcap": 0.2,
    "temperature": "log",
    "temperature_growth": 0.5,
    "temperature_floor": 2,
    "temperature_offset": 1,
    "temperature_layers": "unrotated",
    "sinks": True,
    "sink_score": "token",
    "gate": "element",
    "gate_activation": "softplus",
    "qkv_bias": True,
    "sigma_reparam": True,
    "experts": 3,
    "dense_layers": (0, 1),
    "dense_hidden": 24,
    "experts_per_token": 1,
    "router": "sparsemax",
    "router_normalise": False,
    "router_bias": True,
    "router_scale": 2.0,
    "shared_expert": 24,
    "shared_expert_gate": True,
    "expert_norms": True,
    "attention_dropout": 0.3,
    "mlp_dropout": 0.3,
    "lm_head": False,
    "logit_scale": 3.0,
    "logit_softcap": 0.2,
    "lm_head_bias": True,
    "lm_head_transform": True,
    "pooler": True,
    "initial": "xavier",
    "initial_std": 0.3,
    "initial_qk": 3.0,
    "initial_distances": True,
    "initial_depth": True,
}
"""Another value of every setting but the vocabulary and rotary_scaling, whose factor 1, which some
checkpoints name, is none."""
LONGROPE = {"rotary_scaling": "longrope", "rotary_trained_context": 4}
BASES: list[dict[str, Any]] = [
    {},
    {"choice": "entmax"},
    {"choice": "sigmoid"},
    {"delta_layers": (0, 1)},
    {"layer_choices": ("softmax", "entmax")},
    {"positions": "learned"},
    {"positions": "buckets", "buckets": 8},
    {"experts": 2, "router": "entmax"},
    {"experts": 2, "dense_layers": (1, 0)},
    {"experts": 2, "shared_expert": 20, "norm_place": "both"},
    {"rotary_scaling": "yarn", "rotary_factor": 2.0, "rotary_base": 9.0, "head_size": 32},
    {"rotary_scaling": "llama3", "rotary_factor": 2.0},
    {"rotary_scaling": "llama3", "rotary_factor": 2.0, "rotary_trained_context": 7},
    {
        **LONGROPE,
        "rotary_short": (1.0, 2.0, 1.0, 2.0),
        "rotary_long": (1.5, 2.0, 1.0, 2.0),
    },
    {"positions": "learned", "relative_bias": True, "buckets": 8},
    {"windows": (2, 0)},
    {"shared_kv_layers": 1},
    {"norm": "layer"},
    {"qk_norm": True},
    {"gate": "head"},
    {"sinks": True},
    {"temperature": "stepped", "temperature_floor": 3},
    {"initial": "normal"},
]


def outcome(**settings: Any) -> tuple[list[str], torch.Tensor]:
    """Names and shapes of all weights; their fresh values and the logits while training."""
    fresh = torch.Generator().manual_seed(0)
    model = Transformer(
        ModelConfig(**{"vocabulary": 11, "context": 8, "width": 16, "layers": 2, **settings}),
        generator=fresh,
    )
    initial = nn.utils.parameters_to_vector(model.parameters()).detach()
    with torch.no_grad():
        for n, p in enumerate(model.parameters()):
            p.normal_(0.0, 0.5, generator=torch.Generator().manual_seed(n))
    torch.manual_seed(0)  # dropout
    logits = model.train()(torch.tensor([[1, 5, 2, 9, 9, 4, 0, 10]]))
    shapes = [f"{name} {tuple(x.shape)}" for name, x in model.state_dict().items()]
    return [*shapes, str(model.config.context)], torch.cat([initial, logits.detach().flatten()])


@pytest.mark.parametrize("base", BASES, ids=str)
def test_a_setting_changes_the_model_or_is_refused(base: dict[str, Any]) -> None:
    """Either way a person learns of it: no setting is accepted and then not read."""
    assert OTHERS.keys() | {"vocabulary", "rotary_scaling"} == {
        field.name for field in fields(ModelConfig)
    }
    shapes, numbers = outcome(**base)
    silent = []
    for name, value in OTHERS.items():
        if name in base:
            continue
        try:
            others = outcome(**{**base, name: value})
        except ValueError:
            continue
        if others[0] == shapes and torch.equal(others[1], numbers):
            silent.append(name)
    assert not silent
