"""fenchel/generation/attention_trace.py: the numbers of ``attend`` on the whole text."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fenchel.attention import AttentionCall, attend
from fenchel.generation import Decoder, GenerationSettings, KVCache, Sampling, Scheduler
from fenchel.generation.attention_trace import (
    LayerTrace,
    PassTrace,
    PositionsRead,
    TokenCalibration,
    TokenTrace,
    TraceAttention,
    TracedRow,
    TraceSettings,
    _sensitivity_json,
    trace_text,
)
from fenchel.generation.cpu_step import CpuForward
from fenchel.generation.kv_cache import CacheKind
from fenchel.model import ModelConfig, Transformer

Build = Callable[..., Transformer]
Draw = Callable[..., Tensor]
SHAPES: dict[str, dict[str, Any]] = {
    "plain": {"layers": 3},
    "gqa": {"kv_heads": 2},
    "window": {"windows": (5, 0), "kv_heads": 1, "score_scale": 0.7},
    "entmax": {"choice": "entmax", "positions": "learned"},
    "sparsemax": {"choice": "sparsemax", "positions": "alibi", "kv_heads": 2},
    "two maps": {"layer_choices": ("softmax", "sparsemax"), "beta": 2.0},
    "alpha per head": {"choice": "entmax", "entmax_alpha_learned": True},
    "hard": {"choice": "hard", "positions": "learned"},
    "softcap": {"softcap": 2.0},
    "alibi": {"positions": "alibi", "windows": (4, 0)},
    "buckets": {"positions": "buckets"},
    "sinks": {"sinks": True, "positions": "alibi", "kv_heads": 2},
    "sinks in a window": {"sinks": True, "windows": (4, 0), "choice": "entmax"},
    "l2": {"scores": "l2"},
    "off by one": {"sinks": True, "sink_score": "zero"},
    "temperature": {"temperature": "log", "windows": (4, 0)},
    "shared keys": {
        "layers": 4,
        "windows": (4, 0),
        "shared_kv_layers": 2,
        "full_head_size": 12,
    },
}
every_shape = pytest.mark.parametrize("name", SHAPES)
EVERYTHING = TraceSettings(
    entropy=True, sensitivity=True, attention=TraceAttention(heads="all", top=5)
)


def attended(model: Transformer, ids: list[int]) -> list[np.ndarray]:
    """Per layer the weights (H, S) of the last query, the sink in front, by ``attend``."""
    weights = []

    def observe(layer: int, q: Tensor, k: Tensor, v: Tensor) -> None:
        call = model.attention_call(layer, q, k, v)
        p = attend(call.q, call.k, call.v, **call.spec, return_weights=True)[1]
        weights.append(p[0, :, -1].double().numpy())

    with torch.no_grad():
        model(torch.tensor([ids]), observe=observe)
    return weights


def require_read(found: PositionsRead, p: np.ndarray, sink: bool, top: int) -> None:
    tokens = p[1:] if sink else p
    order = np.argsort(-tokens, kind="stable")[:top]
    wanted = [float(tokens[j]) for j in order if tokens[j] > 0]
    assert [weight for _, weight in found.top] == pytest.approx(wanted, abs=1e-5)
    assert all(tokens[j] == pytest.approx(w, abs=1e-5) for j, w in found.top)
    assert found.first == pytest.approx(tokens[0], abs=1e-5)
    assert (found.sink is not None) == sink
    assert found.sink is None or found.sink == pytest.approx(p[0], abs=1e-5)
    assert found.rest == pytest.approx(1 - sum(wanted) - (p[0] if sink else 0), abs=2e-5)


def nats(p: np.ndarray) -> float:
    return float(-sum(x * math.log(x) for x in p if x > 0))


def jacobian_norm(model: Transformer, layer: int, head: int, p: np.ndarray) -> float:
    """|J|_2 by the singular values of the Jacobian, column by column."""
    weights, choice = torch.tensor(p), model.attention(layer).choice
    choice = choice.with_tensors([x[head, 0, 0].detach() for x in choice.tensors()])
    J = [choice.jacobian_product(weights, e) for e in torch.eye(len(p), dtype=torch.float64)]
    return float(torch.linalg.matrix_norm(torch.stack(J), 2))


def require_layer(model: Transformer, found: LayerTrace, p: np.ndarray, top: int) -> None:
    sink, sparse = model.config.sinks, model.config.choice_of(found.layer) != "softmax"
    entropies = [nats(row) for row in p]
    assert found.entropy == pytest.approx(np.mean(entropies), abs=1e-5)
    assert found.keys == pytest.approx(np.mean(np.exp(entropies)), rel=1e-5)
    counts = [int((row > 0).sum()) for row in p]
    assert found.support == (pytest.approx(np.mean(counts)) if sparse else None)
    assert found.read is not None
    require_read(found.read, p.mean(0), sink, top)
    for head, row, count in zip(found.heads, p, counts, strict=True):
        assert head.entropy == pytest.approx(nats(row), abs=1e-5)
        assert head.keys == pytest.approx(math.exp(nats(row)), rel=1e-5)
        assert head.support == (count if sparse else None)
        require_read(head.read, row, sink, top)
    norms = [jacobian_norm(model, found.layer, head, row) for head, row in enumerate(p)]
    bounds = found.sensitivity
    assert bounds is not None
    assert bounds.certified
    assert bounds.lower <= max(norms) * (1 + 1e-4) + 1e-6  # p itself is rounded differently
    assert bounds.upper >= max(norms) * (1 - 1e-4) - 1e-6
    assert bounds.upper <= bounds.lower * 1.0001 + 1e-6
    assert norms[bounds.head] == pytest.approx(max(norms), rel=1e-3, abs=1e-6)
    written = _sensitivity_json(found)
    assert written["lower"] <= bounds.lower <= bounds.upper <= written["upper"]
    assert written["upper"] - written["lower"] <= bounds.upper - bounds.lower + 2e-5


def require_trace(model: Transformer, ids: list[int], token: int, found: TokenTrace) -> None:
    """``found`` is the trace of ``token``, drawn after ``ids``."""
    with torch.no_grad():
        p = model(torch.tensor([ids]))[0, -1].double().softmax(-1).numpy()
    assert found.p == pytest.approx(p[token], abs=1e-5)
    assert found.rank == 1 + int((p > p[token]).sum())
    assert found.entropy == pytest.approx(nats(p), abs=1e-5)
    assert found.effective == pytest.approx(math.exp(nats(p)), rel=1e-5)
    assert found.position == len(ids) - 1
    weights = attended(model, ids)
    assert [layer.layer for layer in found.layers] == list(range(model.config.layers))
    for layer, rows in zip(found.layers, weights, strict=True):
        require_layer(model, layer, rows, 5)
    third = math.ceil(len(weights) / 3)
    assert found.last_third is not None
    last = np.mean([rows.mean(0) for rows in weights[-third:]], 0)
    require_read(found.last_third, last, model.config.sinks, 5)


@every_shape
def test_a_traced_step_gives_the_weights_of_the_whole_text(
    name: str, lively: Build, prompts: Draw, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of unequal lengths, after their prompts and after steps, also where slots come round."""
    model = lively(**SHAPES[name])
    monkeypatch.setattr("fenchel.generation.decoder.SLACK", 0)
    T, lengths = 12, (12, 9, 4)
    texts = [prompts(T + 3, seed=row).tolist() for row in range(3)]
    with torch.inference_mode():
        decoder = Decoder(model, rows=3)
        assert (decoder.kind.name in ("cpu", "packed")) == (name in ("plain", "gqa", "window"))
        rows = []
        for text, length in zip(texts, lengths, strict=True):
            row = decoder.take(text[:length])
            trace = PassTrace(model, [TracedRow(0, length, EVERYTHING)])
            x = decoder.read([row], [text[:length]], observe=trace.observe)
            (first,) = trace.tokens(decoder.logits(x), torch.tensor([text[length]]))
            require_trace(model, text[:length], text[length], first)
            rows.append(row)
        for more in (1, 2):
            traced = [TracedRow(rows[r].index, lengths[r] + more, EVERYTHING) for r in (2, 0)]
            for row, text, length in zip(rows, texts, lengths, strict=True):
                row.token = text[length + more - 1]
            positions = decoder.view(decoder.fit()).key_positions
            trace = PassTrace(model, traced, key_positions=positions)
            logits = decoder.step(trace.observe)
            next_ids = [texts[r][lengths[r] + more] for r in (2, 0)]
            at = [rows[r].index for r in (2, 0)]
            for r, one in zip(
                (2, 0), trace.tokens(logits[at], torch.tensor(next_ids)), strict=True
            ):
                end = lengths[r] + more
                require_trace(model, texts[r][:end], texts[r][end], one)


@every_shape
def test_a_finished_text_has_the_traces_of_its_steps(
    name: str, lively: Build, prompts: Draw
) -> None:
    model, ids = lively(**SHAPES[name]), prompts(1, 10)[0].tolist()
    found = trace_text(model, ids, 8, EVERYTHING)
    assert len(found) == 2
    for n, one in zip((8, 9), found, strict=True):
        require_trace(model, ids[:n], ids[n], one)


@pytest.mark.parametrize("kind", ["float16", "int8"])
def test_a_small_cache_is_traced_by_the_keys_that_it_returns(
    kind: CacheKind, lively: Build, prompts: Draw
) -> None:
    model, ids = lively(), prompts(1, 9)
    cache = KVCache(model.config, batch=1, positions=9, kind=kind)
    with torch.no_grad():
        model(ids[:, :8], cache=cache)
        trace = PassTrace(model, [TracedRow(0, 9, EVERYTHING)])
        logits = CpuForward(model).step(cache, ids[:, 8], trace.observe)
    layer = trace.tokens(logits, torch.tensor([3]))[0].layers[0]
    exact = trace_text(model, [*ids[0].tolist(), 3], 9, EVERYTHING)[0].layers[0]
    assert layer.entropy == pytest.approx(exact.entropy, abs=0.05)
    assert layer.entropy != exact.entropy


def test_rows_get_what_they_ask_for(lively: Build, prompts: Draw) -> None:
    model, ids = lively(layers=3), prompts(2, 6)
    few = TraceAttention(layers=(2,), top=2)
    rows = [
        TracedRow(0, 6, TraceSettings(attention=few, confidence=True)),
        TracedRow(1, 6, TraceSettings(entropy=True)),
        TracedRow(1, 6, TraceSettings()),
    ]
    trace = PassTrace(model, rows, TokenCalibration(2.0, 0.01, 100))
    with torch.no_grad():
        logits = model(ids, observe=trace.observe)[:, -1]
    first, second, third = (
        one.as_json() for one in trace.tokens(logits[[0, 1, 1]], torch.tensor([1, 2, 3]))
    )
    assert [layer["layer"] for layer in first["attention"]["layers"]] == [2]
    (layer,) = first["attention"]["layers"]
    assert len(layer["top"]) == 2
    assert layer.keys() == {"layer", "top", "rest", "first"}
    assert sum(weight for _, weight in layer["top"]) + layer["rest"] == pytest.approx(1.0, abs=1e-5)
    assert "last_third" not in first["attention"]
    wanted = (logits[0].double() / 2.0).softmax(-1)[1]
    assert first["confidence"] == {
        "p": pytest.approx(float(wanted), abs=1e-5),
        "temperature": 2.0,
        "error": 0.01,
        "predictions": 100,
    }
    assert [layer.keys() for layer in second["attention"]["layers"]] == [
        {"layer", "entropy", "keys"}
    ] * 3
    assert third.keys() == {"p", "rank", "entropy", "effective"}


def test_a_pass_without_questions_about_attention_is_not_observed(lively: Build) -> None:
    assert PassTrace(lively(), [TracedRow(0, 4, TraceSettings(confidence=True))]).observe is None


def test_an_unproved_bound_is_not_certified(lively: Build) -> None:
    """Equal scores of the hard map: its weights jump there."""
    model = lively(choice="hard", positions="none")
    with torch.no_grad():
        model.attention(0).qkv.weight.zero_()
    trace = trace_text(model, [1, 2, 3, 4], 3, TraceSettings(sensitivity=True))[0]
    found = trace.layers[0].sensitivity
    assert found is not None
    assert not found.certified
    layer = trace.as_json()["sensitivity"]["layers"][0]
    assert (layer["lower"], layer["upper"], layer["certified"]) == (0.0, None, False)


CONFIG = ModelConfig(vocabulary=9, layers=4, heads=4)


@pytest.mark.parametrize("name", ["plain", "window", "entmax", "alibi", "sinks in a window"])
def test_with_invariant_the_other_rows_change_no_bit_of_a_trace(name: str, lively: Build) -> None:
    model = lively(vocabulary=300, context=64, **SHAPES[name])
    settings = GenerationSettings(
        max_new_tokens=8, sampling=Sampling(temperature=0.0), trace=EVERYTHING
    )

    def traces(*others: int) -> list[TokenTrace | None]:
        scheduler = Scheduler(Decoder(model, rows=8, invariant=True))
        found: list[TokenTrace | None] = []
        for length in others:
            scheduler.submit(settings.request(range(1, length)), lambda _: None)
        scheduler.submit(
            settings.request((5, 6, 7)), lambda update: found.extend(t.trace for t in update.tokens)
        )
        while scheduler.busy:
            scheduler.turn()
        return found

    assert traces() == traces(9, 21, 40)


def test_sinks_of_the_token_are_traced_over_a_whole_text_only(lively: Build, prompts: Draw) -> None:
    model, ids = lively(sinks=True, sink_score="token"), prompts(1, 6)[0].tolist()
    (found,) = trace_text(model, ids, 5, EVERYTHING)
    seen: list[AttentionCall] = []
    with torch.no_grad():
        model(torch.tensor([ids[:5]]), attention_override=lambda _, call: seen.append(call))
    for layer, call in zip(found.layers, seen, strict=True):
        p = attend(call.q, call.k, call.v, **call.spec, return_weights=True)[1][0, :, -1]
        entropy = torch.special.entr(p.double()).sum(-1).mean()
        assert layer.entropy == pytest.approx(float(entropy), rel=1e-4)
