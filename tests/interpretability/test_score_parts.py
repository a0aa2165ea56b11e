"""fenchel/interpretability/score_parts.py: pairs sum to the score, and parts are what they say."""

from typing import Any

import pytest
import torch

from fenchel.attention import AttentionCall, attention_weights
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
def test_the_pairs_sum_to_the_score_above_the_mean(shape: str, dtype: torch.dtype) -> None:
    model, ids = build("llama", dtype, **{"kv_heads": None, **SHAPES[shape]}), draw(3)
    heads = model.config.heads
    for layer, head, query, key in ((1, 1, 7, 5), (2, heads, 9, 9), (3, 1, 11, None)):
        found = score_parts(model, ids, layer, head, query, key)
        q, k, _, spec = call_of(model, ids, layer)
        group = (head - 1) * model.config.groups // heads
        z = spec.scale_for(q.shape[-1]) * (k[0, group] @ q[0, head - 1, query]).double()
        p = attention_weights(q, k, **spec)[0, head - 1, query].double()
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
        assert found.weight == pytest.approx(float(p[j]), abs=1e-6)
        assert len(found.parts) == 2 * layer == len(found.pairs)


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
    with pytest.raises(ValueError, match="not a sum of what branches added"):
        score_parts(build("post"), ids, 1, 1)
    with pytest.raises(ValueError, match="not bilinear"):
        score_parts(build(scores="l2", kv_heads=2), ids, 1, 1)
    with pytest.raises(ValueError, match="no stream"):
        score_parts(build(sinks=True), ids, 1, 1)
    assert not has_score_parts(build(sinks=True))
    with pytest.raises(ValueError, match="query 7 sees the keys 4 to 7 only, and not 3"):
        score_parts(build(windows=(4,)), ids, 1, 1, 7, 3)
