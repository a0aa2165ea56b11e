"""fenchel/interpretability/score_parts.py: pairs sum to the score, and parts are what they say."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from fenchel.attention import AttentionCall, attention_weights
from fenchel.checkpoints import load_model
from fenchel.checkpoints.directory import open_directory
from fenchel.checkpoints.tokenizer import read_tokenizer
from fenchel.data import train_tokenizer
from fenchel.inspection.foreign_model import ForeignModel, open_foreign
from fenchel.interpretability.score_parts import has_score_parts, score_parts
from fenchel.model import Transformer
from tests.interpretability.conftest import build, draw

SHAPES: dict[str, dict[str, Any]] = {
    "rotary and grouped keys": {"heads": 4, "kv_heads": 2},
    "rotary of pairs, part of the width": {"rotary_layout": "pairs", "rotary_fraction": 0.5},
    "biases and layer norm": {
        "positions": "learned",
        "norm": "layer",
        "mlp": "gelu",
        "bias": True,
    },
    "norms of queries and keys": {"heads": 4, "kv_heads": 2, "qk_norm": True},
    "joint norms": {"heads": 4, "kv_heads": 2, "qk_norm": True, "qk_norm_width": "all"},
    "layer norm of queries, biases": {"qk_norm": True, "norm": "layer", "bias": True},
    "norms after branches too": {"norm_place": "both", "norm_plus_one": True},
    "no norm before branches": {"norm_place": "after"},
    "parallel branches": {"parallel": True, "bias": True},
    "scaled residuals": {"residual_scale": 0.4},
    "soft cap": {"softcap": 3.0},
    "entmax": {"choice": "entmax"},
    "a window": {"windows": (4,), "rotary_local_base": 100.0},
    "ALiBi": {"positions": "alibi"},
    "sigma": {"sigma_reparam": True},
    "shared blocks": {"distinct_layers": 1},
    "norms without parameters": {"norm_parameters": "none"},
    "layer norm without parameters": {"norm": "layer", "norm_parameters": "none"},
    "layer norm without a bias": {"norm": "layer", "norm_parameters": "gain"},
    "a gate": {"gate": "head", "beta": 1.5},
    "sinks": {"sinks": True, "windows": (5,), "heads": 4, "kv_heads": 2},
    "norms after the residual": {"norm_place": "post", "norm": "layer", "final_norm": False},
    "scores by distance": {"scores": "l2"},
    "queries that grow": {
        "temperature": "stepped",
        "temperature_growth": 0.5,
        "temperature_floor": 4,
    },
    "queries that grow by a factor per head": {
        "temperature": "log",
        "windows": (5, 0),
    },
}


def call_of(model: Transformer, ids: list[int], layer: int) -> AttentionCall:
    found: dict[int, AttentionCall] = {}

    def keep(at: int, call: AttentionCall) -> None:
        found[at] = call

    with torch.no_grad():
        model(torch.tensor([ids]), attention_override=keep)
    return found[layer - 1]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
@pytest.mark.parametrize("shape", SHAPES)
@torch.no_grad()
def test_the_pairs_sum_to_the_score_above_the_mean(shape: str, dtype: torch.dtype) -> None:
    model, ids = build("llama", dtype, **{"kv_heads": None, **SHAPES[shape]}), draw(3)
    heads = model.config.heads
    for layer, head, query, key in ((1, 1, 7, 5), (2, heads, 9, 9), (3, 1, 11, None)):
        found = score_parts(model, ids, layer, head, query, key)
        q, k, _, spec = call_of(model, ids, layer)
        group = (head - 1) * model.config.groups // heads
        keys, weights = k[0, group], attention_weights(q, k, **spec)[0, head - 1, query].double()
        if model.config.sinks:
            assert found.sink == pytest.approx(float(weights[0]), abs=1e-6)
            keys, weights = keys[1:], weights[1:]
        z = spec.scale_for(q.shape[-1]) * (keys @ q[0, head - 1, query]).double()
        p = weights / weights.sum()
        j = int(p.argmax()) if key is None else key
        assert (found.key, found.query) == (j, query)
        contrast = float(z[j] - p @ z)
        assert found.contrast == pytest.approx(contrast, abs=1e-5)
        total = sum(map(sum, found.pairs))
        bar = 1e-9 if dtype == torch.float64 else 1e-5
        assert abs(total - contrast) <= bar * max(1.0, found.size)
        assert abs(found.remainder) <= bar * max(1.0, found.size)
        assert sum(found.by_query) == pytest.approx(total, abs=1e-9)
        assert sum(found.by_key) == pytest.approx(total, abs=1e-9)
        assert found.weight == pytest.approx(float(weights[j]), abs=1e-6)
        length = model.config.scores == "l2"
        assert len(found.parts) == 2 * layer + length == len(found.pairs)


@torch.no_grad()
def test_a_part_is_what_its_branch_adds() -> None:
    """Without norms a score is bilinear in the branches themselves: remove one and compare."""
    model, ids = build(norm_place="after", kv_heads=2), draw(3)
    found = score_parts(model, ids, 2, 1, 8, 3)
    grabbed: dict[str, torch.Tensor] = {}
    block = model.blocks[0]
    block.mlp_post_norm.register_forward_hook(lambda _, __, y: grabbed.update(mlp=y))
    model.blocks[1].register_forward_pre_hook(lambda _, a: grabbed.update(x=a[0]))
    q, k, _, spec = call_of(model, ids, 2)
    p = attention_weights(q, k, **spec)[0, 0, 8]
    attention, scale = model.blocks[1].attention, spec.scale_for(q.shape[-1])

    def q_and_k(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        angles = model._rotary(0, len(ids), None, x)[0]
        q, k, _ = attention._project(x, angles)
        return q[0, 0, 8], k[0, 0]

    query, _ = q_and_k(grabbed["mlp"])
    _, keys = q_and_k(grabbed["x"])
    wanted = scale * query @ (keys[3] - p @ keys)
    assert found.by_query[found.parts.index("mlp 1")] == pytest.approx(float(wanted), abs=1e-9)
    _, keys = q_and_k(grabbed["mlp"])
    wanted = scale * q_and_k(grabbed["x"])[0] @ (keys[3] - p @ keys)
    assert found.by_key[found.parts.index("mlp 1")] == pytest.approx(float(wanted), abs=1e-9)


def test_the_prior_stands_beside_the_score() -> None:
    assert score_parts(build(), draw(3), 2, 1).prior is None
    found = score_parts(build("alibi"), draw(3), 2, 1, 8, 2)
    assert found.prior is not None
    assert found.prior < 0.0  # a far key


def test_bad_input_gets_a_sentence() -> None:
    ids = draw(3)
    for words, sentence in (
        ((4, 1), "no layer 4"),
        ((1, 3), "no head 3"),
        ((1, 1, 12), "no query 12 in a text of 12"),
        ((1, 1, 3, 40), "no key 40"),
        ((1, 1, 3, 4), "query 3 sees the keys 0 to 3 only"),
    ):
        with pytest.raises(ValueError, match=sentence):
            score_parts(build(), ids, *words)
    assert not has_score_parts(build(kind="encoder"))
    assert not has_score_parts(build(layer_scale=True))
    with pytest.raises(ValueError, match="query 7 sees the keys 4 to 7 only, and not 3"):
        score_parts(build(windows=(4,)), ids, 1, 1, 7, 3)


SIZES: dict[str, Any] = {"vocab_size": 60, "num_hidden_layers": 3, "hidden_size": 16}
LLAMA = {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 24, "head_dim": 4}
READ_BY_BOTH: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": {**SIZES, **LLAMA, "attention_bias": True, "mlp_bias": True},
    "Qwen3ForCausalLM": {**SIZES, **LLAMA},
    "GPT2LMHeadModel": {"vocab_size": 60, "n_layer": 3, "n_embd": 16, "n_head": 4},
    "Phi3ForCausalLM": {**SIZES, **LLAMA, "pad_token_id": 0},
}


def opened(name: str, sizes: dict[str, Any], folder: Path) -> ForeignModel:
    transformers.utils.logging.disable_progress_bar()
    kind = getattr(transformers, name)
    torch.manual_seed(0)
    model = kind(kind.config_class(**sizes))
    with torch.no_grad():
        for key, p in model.named_parameters():
            p.add_(0.3 * torch.randn(p.shape) if p.dim() == 1 else 0.2 * torch.randn(p.shape))
            assert key
    model.save_pretrained(folder)
    train_tokenizer(["the people of these States " * 9], 270).save(str(folder / "tokenizer.json"))
    return open_foreign(open_directory(folder), read_tokenizer(folder))


@pytest.mark.parametrize("name", READ_BY_BOTH)
def test_a_model_of_transformers_has_the_parts_of_the_same_model_read_by_us(
    name: str, tmp_path: Path
) -> None:
    theirs, ids = opened(name, READ_BY_BOTH[name], tmp_path), draw(3)
    ours = load_model(tmp_path)
    for layer, head, query, key in ((1, 1, 7, 5), (2, 4, 9, 9), (3, 2, 11, None)):
        wanted = score_parts(ours, ids, layer, head, query, key)
        found = score_parts(theirs, ids, layer, head, query, key)
        assert (found.parts, found.key) == (wanted.parts, wanted.key)
        assert np.abs(np.subtract(found.pairs, wanted.pairs)).max() < 1e-4 * max(1.0, wanted.size)
        assert abs(found.remainder) < 1e-4 * max(1.0, found.size)


@pytest.mark.parametrize("name", ["CohereForCausalLM", "OlmoForCausalLM", "StableLmForCausalLM"])
def test_norms_of_their_own_kind_keep_their_scale(name: str, tmp_path: Path) -> None:
    """Against the weights that transformers returns: z_j less its mean is that of log p_j."""
    sizes = {**SIZES, **LLAMA, "layer_norm_bias": True, "use_qk_norm": name == "CohereForCausalLM"}
    theirs, ids = opened(name, sizes, tmp_path), draw(3)
    own = getattr(transformers, name).from_pretrained(tmp_path, attn_implementation="eager").eval()
    with torch.no_grad():
        weights = own(torch.tensor([ids]), output_attentions=True).attentions
    for layer, head, query, key in ((1, 1, 7, 5), (2, 4, 9, 9), (3, 2, 11, 4)):
        p = weights[layer - 1][0, head - 1, query, : query + 1].double()
        found = score_parts(theirs, ids, layer, head, query, key)
        assert found.contrast == pytest.approx(float(p[key].log() - p @ p.log()), abs=1e-4)
        assert abs(found.remainder) < 1e-4 * max(1.0, found.size)


def test_a_block_whose_branches_do_not_sum_to_its_stream_gets_a_sentence(tmp_path: Path) -> None:
    """Gemma 2 normalises what its branches return; OPT has no module for its MLP, and is served."""
    sizes = {**SIZES, **LLAMA}
    theirs, ids = opened("Gemma2ForCausalLM", sizes, tmp_path / "gemma2"), draw(3)
    assert abs(score_parts(theirs, ids, 1, 1).remainder) < 1e-4
    with pytest.raises(ValueError, match="is not the sum of the embedding and what attention"):
        score_parts(theirs, ids, 2, 1)
    own = {"num_attention_heads": 4, "ffn_dim": 24, "word_embed_proj_dim": 16}
    found = score_parts(opened("OPTForCausalLM", SIZES | own, tmp_path / "opt"), ids, 3, 1)
    assert abs(found.remainder) < 1e-4 * max(1.0, found.size)
