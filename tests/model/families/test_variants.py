"""Files as they are found: older names and keys, repeated tensors, shards, other dtypes."""

import json
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from fenchel.checkpoints import convert, load_model, save
from fenchel.cli.doctor import find_pitfalls
from fenchel.model import ModelConfig, Transformer
from fenchel.model.families import family_of
from tests.model.families.conftest import ALL, GEMMA4, NEAR

Foreign, Written, Reload = Callable[[str], Any], Callable[..., Path], Callable[..., Any]
WEIGHTS = "model.safetensors"
LONG = torch.randint(3, 70, (1, 60), generator=torch.Generator().manual_seed(2))
IDS = torch.randint(3, 70, (2, 11), generator=torch.Generator().manual_seed(0))


def rewrite(path: Path, change: Callable[[dict[str, Tensor]], Any]) -> Path:
    weights = {name: tensor.clone() for name, tensor in load_file(path / WEIGHTS).items()}
    change(weights)
    save_file(weights, path / WEIGHTS)
    return path


def resay(path: Path, drop: tuple[str, ...] = (), **changes: Any) -> Path:
    settings = json.loads((path / "config.json").read_text())
    settings = {k: v for k, v in settings.items() if k not in drop}
    (path / "config.json").write_text(json.dumps({**settings, **changes}))
    return path


def require_agreement(path: Path, model: Any) -> None:
    with torch.no_grad():
        torch.testing.assert_close(load_model(path)(IDS), model(IDS).logits, atol=1e-4, rtol=0)


def renamed(weights: dict[str, Tensor], old: str, new: str) -> None:
    for name in list(weights):
        weights[re.sub(old, new, name)] = weights.pop(name)


# names


def test_a_gpt2_saved_without_a_head_and_with_its_masks_is_read(
    foreign: Foreign, written: Written
) -> None:
    def as_published(weights: dict[str, Tensor]) -> None:
        renamed(weights, r"^transformer\.", "")
        for layer in range(3):
            weights[f"h.{layer}.attn.bias"] = torch.ones(1, 1, 64, 64, dtype=torch.uint8).tril()

    require_agreement(rewrite(written("gpt2"), as_published), foreign("gpt2"))


def test_a_read_out_that_repeats_the_embedding_is_left_out(
    foreign: Foreign, written: Written
) -> None:
    def repeat(weights: dict[str, Tensor]) -> None:
        weights["lm_head.weight"] = weights["transformer.wte.weight"].clone()

    require_agreement(rewrite(written("gpt2"), repeat), foreign("gpt2"))


def test_a_read_out_that_differs_from_the_embedding_it_is_tied_to_is_refused(
    written: Written,
) -> None:
    def differ(weights: dict[str, Tensor]) -> None:
        weights["lm_head.weight"] = weights["transformer.wte.weight"] + 1

    with pytest.raises(ValueError, match=r"lm_head\.weight differs from transformer\.wte"):
        load_model(rewrite(written("gpt2"), differ))


def test_a_bert_with_older_names_and_other_heads_is_read(
    foreign: Foreign, written: Written
) -> None:
    def as_published(weights: dict[str, Tensor]) -> None:
        renamed(weights, r"LayerNorm\.weight$", "LayerNorm.gamma")
        renamed(weights, r"LayerNorm\.bias$", "LayerNorm.beta")
        weights["bert.pooler.dense.weight"] = torch.ones(48, 48)
        weights["cls.seq_relationship.weight"] = torch.ones(2, 48)
        weights["bert.embeddings.position_ids"] = torch.arange(64)[None]
        embedding = weights["bert.embeddings.word_embeddings.weight"]
        weights["cls.predictions.decoder.weight"] = embedding.clone()

    require_agreement(rewrite(written("bert"), as_published), foreign("bert"))


def test_two_names_for_one_tensor_are_refused(written: Written) -> None:
    def twice(weights: dict[str, Tensor]) -> None:
        weights["bert.embeddings.LayerNorm.gamma"] = torch.ones(48)

    with pytest.raises(ValueError, match="under two names"):
        load_model(rewrite(written("bert"), twice))


@pytest.mark.parametrize(
    ("kind", "prefix"),
    [
        ("Bert", ""),
        ("Bert", "bert."),
        ("Roberta", ""),
        ("XLMRoberta", ""),
        ("DistilBert", ""),
        ("MPNet", ""),
        ("ModernBert", ""),
    ],
)
def test_a_body_without_its_head_gives_the_same_stream_and_pool(
    kind: str, prefix: str, tmp_path: Path
) -> None:
    sizes: dict[str, Any] = {
        "hidden_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 56,
    }
    if kind == "ModernBert":
        sizes |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    if kind == "DistilBert":
        sizes = {"dim": 48, "n_layers": 2, "n_heads": 4, "hidden_dim": 56}
    config = getattr(transformers, f"{kind}Config")(
        vocab_size=70, max_position_embeddings=64, attn_implementation="eager", **sizes
    )
    torch.manual_seed(0)
    theirs = getattr(transformers, f"{kind}Model")(config).eval()
    theirs.save_pretrained(tmp_path / "theirs")
    rewrite(tmp_path / "theirs", lambda weights: renamed(weights, "^", prefix))
    ours = load_model(tmp_path / "theirs")
    save(ours, None, tmp_path / "ours")
    back = getattr(transformers, f"{kind}Model").from_pretrained(
        tmp_path / "ours", output_loading_info=True, attn_implementation="eager"
    )
    assert not any(back[1].values())
    for model in (theirs, back[0].eval()):
        with torch.no_grad():
            stream = ours(IDS, return_hidden=True)
            expected = model(IDS)
        torch.testing.assert_close(stream, expected.last_hidden_state, atol=1e-5, rtol=0)
        assert ("pooler_output" in expected) == (ours.pooler is not None)
        if ours.pooler is not None:
            torch.testing.assert_close(ours.pool(stream), expected.pooler_output, atol=1e-5, rtol=0)
    with pytest.raises(ValueError, match="no LM head and hence no logits"):
        ours(IDS)


@pytest.mark.parametrize("changes", [{"pad_token_id": 0}, {"pad_token_id": None}])
def test_positions_of_a_roberta_that_begin_elsewhere_are_refused(
    changes: dict[str, Any], written: Written
) -> None:
    with pytest.raises(ValueError, match=r"pad_token_id=\w+ is a variant that fenchel does not"):
        load_model(resay(written("roberta"), **changes))


@pytest.mark.parametrize(
    ("changes", "drop", "says"),
    [
        ({"num_local_experts": 4}, (), "num_local_experts=4 should be 0"),
        ({"layer_types": ["attention", "mamba", "attention"]}, (), "Mamba is not read"),
        ({}, ("layer_types",), "Mamba is not read"),
        ({"layer_types": ["attention"] * 3}, (), None),
    ],
)
def test_a_granite_4_is_read_where_all_layers_are_attention(
    changes: dict[str, Any], drop: tuple[str, ...], says: str | None, written: Written
) -> None:
    path = resay(written("granite 4"), drop, **changes)
    if says is None:
        load_model(path)
        return
    with pytest.raises(ValueError, match=says):
        load_model(path)


def test_a_gemma_4_as_published_has_other_keys_and_unused_tensors(
    written: Written, foreign: Foreign
) -> None:
    """Two keys for heads without a window, and keys of layers that use those of others."""

    def add_unused(weights: dict[str, Tensor]) -> None:
        for name in ("k_proj", "v_proj", "k_norm"):
            weights[f"model.layers.4.self_attn.{name}.weight"] = torch.ones(3)

    path = resay(written("gemma4"), ("per_layer_config",), global_head_dim=24)
    require_agreement(rewrite(path, add_unused), foreign("gemma4"))


@pytest.mark.parametrize(
    "keys",
    [
        {"global_head_dim": 24},
        {"global_head_dim": 24, "num_global_key_value_heads": 1},
        {"global_head_dim": 24, "num_global_key_value_heads": 1, "attention_k_eq_v": True},
        {"per_layer_config": {n: {"num_key_value_heads": 1} for n in "24"}, "global_head_dim": 24},
        {"per_layer_config": {n: {"head_dim": 8} for n in "24"}},
    ],
    ids=str,
)
def test_heads_without_a_window_are_those_of_transformers(keys: dict[str, Any]) -> None:
    settings = {**GEMMA4, "layer_types": [NEAR, NEAR, ALL, NEAR, ALL], **keys}
    theirs = transformers.Gemma4TextConfig(**json.loads(json.dumps(settings)))
    ours = family_of("gemma4_text", (), Path()).read(settings, (), Path("config.json"))
    for layer in range(5):
        own, wanted = ours.at_layer(layer), theirs.per_layer_config[layer]
        assert (own.head_width, own.groups) == (wanted.head_dim, wanted.num_key_value_heads)


def test_a_gate_that_is_clamped_is_computed_as_in_transformers(written: Written) -> None:
    def enlarge(weights: dict[str, Tensor]) -> None:
        for name in weights:
            if name.endswith("experts.gate_up_proj"):
                weights[name] *= 30

    path = rewrite(written("gpt-oss"), enlarge)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager")
    require_agreement(path, theirs)


@pytest.mark.parametrize(
    ("name", "experts", "says"),
    [
        ("qwen3-moe", 5000, "too few for 5000 experts in 3 layers"),
        ("qwen3-moe", 2**24, "too few for 16777216 experts in 3 layers"),
        ("gpt-oss", 2**24, "16777216 for the experts does not fit the files"),
    ],
)
def test_more_experts_than_the_files_hold_are_refused_at_once(
    name: str, experts: int, says: str, written: Written
) -> None:
    path = resay(written(name), num_experts=experts, num_local_experts=experts)
    began = time.perf_counter()
    with pytest.raises(ValueError, match=says):
        load_model(path)
    assert time.perf_counter() - began < 2


@pytest.mark.parametrize("kind", ["longrope", "su", "yarn"])
def test_a_sequence_beyond_the_trained_context_has_the_long_list(
    kind: str, foreign: Foreign, written: Written
) -> None:
    path, ids = written("phi3 longrope"), torch.cat((LONG, LONG), 1)
    rope = json.loads((path / "config.json").read_text())["rope_parameters"]
    model = load_model(resay(path, rope_parameters=rope | {"rope_type": kind}))
    assert (model.config.context, model.config.rotary_short) == (64, (1.1, 0.7, 1.3))
    with torch.no_grad():
        expected = foreign("phi3 longrope")(ids).logits
        torch.testing.assert_close(model.with_context(128)(ids), expected, atol=2e-5, rtol=0)
        short = model(LONG)
    assert (short - expected[:, :60]).abs().max() > 1e-3


# settings


@pytest.mark.parametrize(
    ("name", "older"),
    [
        ("llama", {"rope_theta": 10000.0, "rope_scaling": None}),
        ("llama linear", {"rope_theta": 1e4, "rope_scaling": {"type": "linear", "factor": 2.0}}),
        (
            "llama yarn",
            {
                "rope_theta": 5000.0,
                "rope_scaling": {
                    "type": "yarn",
                    "factor": 4.0,
                    "original_max_position_embeddings": 16,
                },
            },
        ),
        (
            "llama3",
            {
                "rope_theta": 5000.0,
                "rope_scaling": {
                    "rope_type": "llama3",
                    "factor": 4.0,
                    "low_freq_factor": 1.0,
                    "high_freq_factor": 4.0,
                    "original_max_position_embeddings": 16,
                },
            },
        ),
        ("gpt-neox", {"rotary_pct": 0.25, "rotary_emb_base": 10000}),
        ("gemma3", {"rope_theta": 1e6, "rope_local_base_freq": 1e4}),
        ("modernbert", {"global_rope_theta": 7000.0, "local_rope_theta": 70.0}),
        (
            "gpt-oss",
            {
                "rope_theta": 5000.0,
                "rope_scaling": {
                    "rope_type": "yarn",
                    "factor": 4.0,
                    "original_max_position_embeddings": 16,
                    "truncate": False,
                },
            },
        ),
        (
            "phi3 longrope",
            {
                "partial_rotary_factor": 0.5,
                "rope_scaling": {
                    "type": "su",
                    "short_factor": [1.1, 0.7, 1.3],
                    "long_factor": [3.0, 2.0, 0.5],
                },
            },
        ),
    ],
)
def test_older_words_for_rotary_positions_mean_the_same(
    name: str, older: dict[str, Any], written: Written
) -> None:
    path = written(name)
    config = load_model(path).config
    assert load_model(resay(path, ("rope_parameters",), **older)).config == config


ABSENT: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {},
    "qwen2": {"use_sliding_window": True, "max_window_layers": 2},
    "qwen3": {"use_sliding_window": True, "max_window_layers": 2},
    "gemma": {},
    "gemma2": {},
    "gemma3_text": {},
    "gemma4_text": {"vocab_size_per_layer_input": 70},
    "granite": {},
    "olmo2": {},
    "olmo3": {},
    "smollm3": {"use_sliding_window": True, "sliding_window": 7},
    "phi3": {},
    "granitemoehybrid": {
        "num_local_experts": 0,
        "layer_types": 8 * ["full_attention"],
        "position_embedding_type": "rope",
    },
    "ministral3": {},
    "nanochat": {},
    "qwen3_moe": {"use_sliding_window": True},
    "gpt_oss": {},
}


@pytest.mark.parametrize("kind", ABSENT)
def test_keys_that_a_file_leaves_out_have_the_values_of_transformers(kind: str) -> None:
    sizes = {"vocab_size": 70, "hidden_size": 2048, "num_hidden_layers": 8}
    sizes |= {"num_attention_heads": 32, "intermediate_size": 56, "max_position_embeddings": 8192}
    theirs = transformers.AutoConfig.for_model(kind, **sizes, **ABSENT[kind])
    theirs.allow_global_per_layer_attribute_access = True  # of Gemma 4
    ours = family_of(kind, (), Path()).read({**sizes, **ABSENT[kind]}, (), Path("config.json"))
    types = getattr(theirs, "layer_types", None) or 8 * ["sliding_attention"]
    width = getattr(theirs, "sliding_window", None)
    windows = [width if kind == "sliding_attention" else None for kind in types]
    assert [ours.window(layer) for layer in range(8)] == windows
    rotated = getattr(theirs, "no_rope_layers", 8 * [1])
    assert [ours.rotates(layer) for layer in range(8)] == [bool(one) for one in rotated]
    assert ours.groups == theirs.num_key_value_heads
    assert ours.head_width == getattr(theirs, "head_dim", 64)
    assert (ours.full_head_size or 512) == 512
    assert (ours.epsilon, ours.tied) == (theirs.rms_norm_eps, theirs.tie_word_embeddings)
    assert ours.rotary_base == _rope_of(theirs)["rope_theta"]
    if _rope_of(theirs)["rope_type"] == "yarn":
        assert ours.rotary_factor == _rope_of(theirs)["factor"]
        assert ours.rotary_truncate == _rope_of(theirs).get("truncate", True)
    if ours.experts:
        assert (ours.experts, ours.experts_per_token) == (
            theirs.num_local_experts,
            theirs.num_experts_per_tok,
        )
        assert ours.router_normalise == getattr(theirs, "norm_topk_prob", True)


def _rope_of(config: Any) -> dict[str, Any]:
    rope: dict[str, Any] = config.rope_parameters
    return rope.get("full_attention", rope)


SCALED = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
NESTED = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 50.0}
YARNS: list[tuple[str, dict[str, Any]]] = [
    ("llama", {"rope_scaling": SCALED, "original_max_position_embeddings": 32}),
    ("llama", {"rope_scaling": {**SCALED, "truncate": False}}),
    ("llama", {"rope_scaling": {**SCALED, "mscale": 0.5, "mscale_all_dim": 2.0}}),
    ("llama", {"rope_scaling": {**SCALED, "mscale": 0.5}}),
    ("gemma3", {"rope_scaling": NESTED, "original_max_position_embeddings": 32}),
    ("gemma3", {"rope_parameters": {"full_attention": {**NESTED, "truncate": False}}}),
    ("gemma3", {"rope_parameters": {"rope_type": "linear", "factor": 3.0}}),
]


@pytest.mark.parametrize(("name", "changes"), YARNS, ids=str)
def test_scaled_positions_are_computed_as_in_transformers(
    name: str, changes: dict[str, Any], written: Written
) -> None:
    path = resay(written(name), ("rope_parameters",), max_position_embeddings=64, **changes)
    model = transformers.AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager")
    with torch.no_grad():
        mine, theirs = load_model(path)(LONG), model(LONG).logits
    torch.testing.assert_close(mine, theirs, atol=2e-5, rtol=0)


def test_a_number_gives_the_pattern_of_windows(written: Written) -> None:
    path = resay(written("gemma3"), ("layer_types",), sliding_window_pattern=2)
    assert load_model(path).config.windows == (4, 0, 4)


@pytest.mark.parametrize(
    ("name", "changes", "says"),
    [
        ("llama", {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "rope_type='dynamic'"),
        ("llama", {"attention_bias": True}, "attention_bias=True"),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "does not have"),
        ("gpt2", {"add_cross_attention": True}, "does not have"),
        ("bloom", {"apply_residual_connection_post_layernorm": True}, "does not have"),
        ("bert", {"is_decoder": True}, "does not have"),
        ("bert", {"position_embedding_type": "relative_key"}, "does not have"),
        ("albert", {"inner_group_num": 2}, "does not have"),
        ("gemma2", {"use_bidirectional_attention": True}, "does not have"),
        ("qwen3", {"quantization_config": {"bits": 4}}, "does not have"),
        ("t5", {"feed_forward_proj": "gated-relu"}, "should be one of"),
        ("t5", {"dense_act_fn": "gelu_new"}, "dense_act_fn='gelu_new'"),
        ("bert", {"type_vocab_size": 0}, "type_vocab_size=0 should be"),
        ("llama linear", {"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
        ("qwen3-moe", {"mlp_only_layers": [0, 1, 2]}, "with experts in the others"),
        ("qwen3-moe", {"mlp_only_layers": "1"}, "a list of whole numbers"),
        ("gemma4", {"enable_moe_block": True}, "should be false where there are experts"),
        ("gemma4", {"vocab_size_per_layer_input": 71}, "fenchel has one vocabulary"),
        ("gemma4", {"per_layer_config": {"2": {"head_dim": 24}}}, "an object for the layers"),
        (
            "gemma4",
            {"per_layer_config": {"2": {"head_dim": 24}, "4": {"head_dim": 16}}},
            "the same in every layer",
        ),
        (
            "gemma4",
            {"per_layer_config": {n: {"sliding_window": 3} for n in "24"}},
            "head_dim and num_key_value_heads",
        ),
        ("gemma4, keys as values", {"num_kv_shared_layers": 2}, "without an embedding per layer"),
        ("gemma4", {"num_kv_shared_layers": 4}, "leave none with keys"),
    ],
)
def test_a_variant_that_we_do_not_have_is_named(
    name: str, changes: dict[str, Any], says: str, written: Written
) -> None:
    with pytest.raises(ValueError, match=says):
        load_model(resay(written(name), **changes))


@pytest.mark.parametrize("place", ["", "rope_parameters"])
def test_whole_heads_are_rotated_where_transformers_does(place: str, written: Written) -> None:
    path = written("llama")
    before = load_model(path)(IDS)
    rope = json.loads((path / "config.json").read_text())["rope_parameters"]
    key = {"partial_rotary_factor": 0.5}
    resay(path, **({place: rope | key} if place else key))
    with pytest.warns(UserWarning, match=r"partial_rotary_factor=0\.5 is not used"):
        model = load_model(path)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(path)
    with torch.no_grad():
        torch.testing.assert_close(model(IDS), before)
        torch.testing.assert_close(model(IDS), theirs(IDS).logits, atol=2e-5, rtol=0)


def test_a_soft_cap_that_transformers_does_not_apply_is_named(written: Written) -> None:
    with pytest.warns(UserWarning, match="attn_logit_softcapping is no setting of gemma3_text"):
        model = load_model(resay(written("gemma3"), attn_logit_softcapping=1.0))
    assert model.config.softcap is None


@pytest.mark.parametrize(
    ("model_type", "changes", "says"),
    [
        ("olmo", {"clip_qkv": 8.0}, "patch and attach read it through .* clip_qkv is no"),
        ("cohere", {"attention_bias": True}, "Nearest is llama, for which attention_bias=True"),
        (
            "stablelm",
            {},
            "not a known family; fenchel inspect, .* transformers. fenchel list families has",
        ),
        (
            "llama4_text",
            {"attention_chunk_size": 8192},
            r"attach read .* in the way is attention_chunk_size=8192: a query sees its own chunk",
        ),
        ("deepseek_v3", {"kv_lora_rank": 512}, r"kv_lora_rank=512: .* \(MLA\)\. fenchel list"),
        ("falcon", {}, "'falcon' is not a known family. fenchel list families has"),
        ("unheard", {}, "'unheard' is not a known family. fenchel list families has"),
        ("../gpt2", {}, "'../gpt2' is not a known family. fenchel list"),
    ],
)
def test_an_unlisted_family_is_refused_with_what_reads_it_and_its_first_obstacle(
    model_type: str, changes: dict[str, Any], says: str, written: Written
) -> None:
    path = resay(written("llama"), model_type=model_type, **changes)
    with pytest.raises(ValueError, match=says):
        load_model(path)
    with pytest.raises(ValueError, match=says):
        convert(path, path.parent / "out")
    assert re.search(says, find_pitfalls(path)["not looked for"])


def test_a_setting_of_special_tokens_is_no_warning(
    written: Written, recwarn: pytest.WarningsRecorder
) -> None:
    load_model(resay(written("llama"), unk_token_id=3, mask_token_id=4))
    assert not recwarn.list


def test_a_pickle_is_refused_for_being_one_whatever_its_settings_lack(written: Written) -> None:
    path = resay(written("llama"), drop=("model_type",))
    (path / WEIGHTS).rename(path / "pytorch_model.bin")
    with pytest.raises(ValueError, match="pickle"):
        load_model(path)


def test_an_unread_setting_is_named(written: Written) -> None:
    with pytest.warns(UserWarning, match="attention_multiplier is no setting of llama"):
        load_model(resay(written("llama"), attention_multiplier=2.0))


def test_every_unread_setting_is_named(written: Written, recwarn: pytest.WarningsRecorder) -> None:
    """And no setting that only says where a checkpoint came from."""
    names = {"_model_name_or_path": "a/b", "_commit_hash": "c", "_attn_implementation": "sdpa"}
    path = written("llama")
    load_model(resay(path, **names))
    assert not [one for one in recwarn if "no setting" in str(one.message)]
    read = "attention_multiplier, residual_multiplier are each no setting of llama"
    with pytest.warns(UserWarning, match=read):
        load_model(resay(path, attention_multiplier=2.0, residual_multiplier=3.0))
    with pytest.warns(UserWarning, match="unheard_09 and 10 more are each no setting"):
        load_model(resay(path, **{f"unheard_{i:02}": i for i in range(20)}))


# kinds of numbers, and memory


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_weights_keep_their_dtype_unless_dtype_is_given(
    dtype: torch.dtype, written: Written
) -> None:
    path = rewrite(
        written("llama"),
        lambda weights: weights.update({k: w.to(dtype) for k, w in weights.items()}),
    )
    assert {p.dtype for p in load_model(path).parameters()} == {dtype}
    single = load_model(path, dtype=torch.float32)
    assert {p.dtype for p in single.parameters()} == {torch.float32}
    with torch.no_grad():
        difference = single(IDS) - load_model(path)(IDS).float()
    assert difference.abs().max() < 0.2


def test_a_mixture_of_dtypes_needs_one_to_be_named(written: Written) -> None:
    def mix(weights: dict[str, Tensor]) -> None:
        weights["model.norm.weight"] = weights["model.norm.weight"].bfloat16()

    path = rewrite(written("llama"), mix)
    with pytest.raises(ValueError, match="mixes weights of BF16, F32"):
        load_model(path)
    assert {p.dtype for p in load_model(path, dtype=torch.float32).parameters()} == {torch.float32}


def test_shards_that_transformers_wrote_are_read(foreign: Foreign, written: Written) -> None:
    path = written("llama", max_shard_size="40KB")
    assert len(list(path.glob("*.safetensors"))) > 2
    require_agreement(path, foreign("llama"))


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the system does not tell")
def test_what_lies_as_ours_does_is_mapped_and_not_copied(tmp_path: Path) -> None:
    """Anonymous memory grows by the queries, keys and values, which are copied, and not more."""
    probe = """
import sys
from fenchel.checkpoints import load_model
def anonymous():
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon")) * 1024
load_model(sys.argv[1])  # what the first call takes for itself
before = anonymous()
model = load_model(sys.argv[2])
print(anonymous() - before)
"""
    small = ModelConfig(vocabulary=300, width=8)
    large = ModelConfig(vocabulary=6000, width=512, layers=1, heads=8, kv_heads=1, hidden=2048)
    for name, config in (("small", small), ("large", large)):
        save(Transformer(config), None, tmp_path / name)
    words = [sys.executable, "-c", probe, str(tmp_path / "small"), str(tmp_path / "large")]
    told = subprocess.run(words, check=True, capture_output=True, text=True)
    model = Transformer(large)
    size = sum(p.nbytes for p in model.parameters())
    copied = sum(p.nbytes for name, p in model.named_parameters() if "qkv" in name)
    assert copied < size / 12
    assert int(told.stdout) < copied + size / 12, (size, copied, told.stdout)
