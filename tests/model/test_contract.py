"""Laws that every model obeys, whatever its settings. A new setting joins by one line in MODELS.

All in float64, with every parameter drawn, so that no branch is silent.
"""

import tomllib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import jvp, vjp

from fenchel.attention import attend
from fenchel.config import from_mapping, to_mapping, to_toml
from fenchel.generation.kv_cache import KVCache
from fenchel.model import ModelConfig, Transformer
from fenchel.model.block import position_bias
from fenchel.model.forward_context import ForwardContext

V, T = 37, 9
SCALED = {"rotary_factor": 4.0, "rotary_trained_context": 4}
MODELS: dict[str, dict[str, Any]] = {
    "plain": {},
    "multi-query": {"kv_heads": 1},
    "learned": {"positions": "learned"},
    "sinusoidal": {"positions": "sinusoidal", "embedding_scale": 5.0},
    "alibi": {"positions": "alibi", "embedding_norm": True, "norm": "layer"},
    "alibi, entmax": {"positions": "alibi", "choice": "entmax"},
    "buckets": {"positions": "buckets", "buckets": 8, "bucket_distance": 6},
    "no positions": {"positions": "none"},
    "pairs": {"rotary_layout": "pairs"},
    "linear": {"rotary_scaling": "linear", "rotary_factor": 2.0},
    "ntk": {"rotary_scaling": "ntk", "rotary_factor": 2.0},
    "yarn": {"rotary_scaling": "yarn", **SCALED},
    "llama3": {"rotary_scaling": "llama3", **SCALED},
    "partial, parallel": {"rotary_fraction": 0.67, "parallel": True, "norm": "layer", "bias": True},
    "post": {"norm_place": "post", "final_norm": False, "norm": "layer"},
    "gemma 2": {
        "norm_place": "both",
        "norm_plus_one": True,
        "mlp": "geglu_tanh",
        "softcap": 2.0,
        "logit_softcap": 3.0,
        "windows": (3, 0),
        "score_scale": 0.3,
        "embedding_scale": 24**0.5,
    },
    "gemma 3": {"qk_norm": True, "windows": (3, 3, 0), "rotary_local_base": 100.0, "head_size": 10},
    "gemma 4": {
        "norm_place": "both",
        "qk_norm": True,
        "value_norm": True,
        "layer_scale": True,
        "windows": (3, 0, 0),
        "rotary_local_base": 100.0,
        "rotary_scaling": "proportional",
        "rotary_fraction": 0.5,
        "head_size": 6,
        "full_head_size": 8,
        "full_kv_heads": 1,
        "shared_kv_layers": 1,
        "per_layer_width": 5,
    },
    "keys as values": {"windows": (3, 0), "keys_as_values": True, "head_size": 6},
    "window": {"windows": (4,)},
    "window, sparsemax": {"windows": (4, 0), "choice": "sparsemax"},
    "window, alibi": {"windows": (4,), "positions": "alibi"},
    "sinks": {"sinks": True, "windows": (3, 0)},
    "sinks, entmax": {"sinks": True, "choice": "entmax"},
    "sinks of the token": {"sinks": True, "sink_score": "token", "windows": (3, 0)},
    "off by one": {"sinks": True, "sink_score": "zero"},
    "temperature by length": {"temperature": "log", "windows": (3, 0), "choice": "entmax"},
    "temperature by steps": {
        "temperature": "stepped",
        "temperature_floor": 3,
        "temperature_offset": 1,
        "temperature_layers": "unrotated",
        "rotary_layers": (1, 0),
    },
    "gate": {"gate": "head", "sinks": True},
    "gate, softplus": {"gate": "element", "gate_activation": "softplus", "qkv_bias": True},
    "l2": {"scores": "l2", "kv_heads": None},
    "l2, no positions": {"scores": "l2", "kv_heads": None, "positions": "none", "choice": "entmax"},
    "layer choices": {"layer_choices": ("softmax", "entmax", "sparsemax")},
    "sigma": {"sigma_reparam": True, "qkv_bias": True},
    "shared, factorised": {"distinct_layers": 1, "embedding_width": 10},
    "scaled residual": {"residual_scale": "depth", "mlp": "relu"},
    "experts": {"experts": 4, "experts_per_token": 2},
    "experts in some layers": {"experts": 4, "dense_layers": (1, 0), "dense_hidden": 20},
    "experts beside a shared one": {
        "experts": 4,
        "shared_expert": 20,
        "shared_expert_gate": True,
        "norm_place": "both",
        "expert_norms": True,
    },
    "experts, sparse": {"experts": 4, "experts_per_token": 3, "router": "sparsemax", "mlp": "gelu"},
    "untied, biased": {"tied": False, "lm_head_bias": True, "bias": True, "logit_scale": 0.5},
    "encoder": {"kind": "encoder", "positions": "learned", "token_types": 2, "pooler": True},
    "encoder, windows": {"kind": "encoder", "windows": (2, 0)},
    "bert": {
        "kind": "encoder",
        "positions": "learned",
        "norm": "layer",
        "norm_place": "post",
        "final_norm": False,
        "embedding_norm": True,
        "token_types": 2,
        "mlp": "gelu",
        "bias": True,
        "lm_head_transform": True,
        "lm_head_bias": True,
        "embedding_width": 10,
    },
    "t5": {
        "kind": "encoder-decoder",
        "encoder_layers": 2,
        "positions": "buckets",
        "buckets": 8,
        "bucket_distance": 6,
        "mlp": "relu",
        "score_scale": 1.0,
        "logit_scale": 24**-0.5,
    },
    "encoder-decoder, post": {
        "kind": "encoder-decoder",
        "norm_place": "post",
        "final_norm": False,
        "positions": "sinusoidal",
    },
    "encoder-decoder, both": {"kind": "encoder-decoder", "norm_place": "both", "choice": "entmax"},
}
DECODERS = [name for name, settings in MODELS.items() if settings.get("kind") != "encoder"]
every_model = pytest.mark.parametrize("name", MODELS)
every_decoder = pytest.mark.parametrize("name", DECODERS)

Build = Callable[..., Transformer]


def source(model: Transformer, ids: Tensor) -> dict[str, Tensor]:
    """What a decoder beside an encoder looks at."""
    return {} if model.encoder is None else {"memory_BSM": model.encode(ids.flip(1))}


@every_decoder
def test_the_future_does_not_leak(build: Build, ids: Tensor, name: str) -> None:
    model = build(**MODELS[name])
    changed = ids.clone()
    changed[:, 5:] = (changed[:, 5:] + 3) % V
    memory = source(model, ids)
    before, after = model(ids, **memory), model(changed, **memory)
    torch.testing.assert_close(before[:, :5], after[:, :5])
    assert not torch.allclose(before[:, 5:], after[:, 5:])


@every_decoder
@pytest.mark.parametrize("parts", [[1] * T, [5, 1, 1, 1, 1], [2, 4, 3]], ids=str)
def test_reading_in_parts_with_a_cache_is_reading_at_once(
    build: Build, ids: Tensor, name: str, parts: list[int]
) -> None:
    model = build(**MODELS[name])
    cache = KVCache(model.config, batch=3, positions=T, dtype=torch.float64)
    memory = source(model, ids)
    with torch.no_grad():
        pieces = [model(part, cache=cache, **memory) for part in ids.split(parts, 1)]
        torch.testing.assert_close(torch.cat(pieces, 1), model(ids, **memory))


@every_model
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_on_either_side_changes_nothing(
    build: Build, ids: Tensor, name: str, side: str
) -> None:
    model = build(**MODELS[name])
    pad = torch.zeros(3, 2, dtype=torch.int64)
    there, nobody = torch.ones(3, T, dtype=torch.bool), torch.zeros(3, 2, dtype=torch.bool)
    padded = torch.cat([pad, ids] if side == "left" else [ids, pad], 1)
    present = torch.cat([nobody, there] if side == "left" else [there, nobody], 1)
    memory, padded_memory = {}, {}
    if model.encoder is not None:
        memory = source(model, ids)
        longer = torch.cat([pad, ids.flip(1)] if side == "left" else [ids.flip(1), pad], 1)
        padded_memory = {
            "memory_BSM": model.encode(longer, token_mask_BS=present),
            "memory_mask_BS": present,
        }
    logits = model(padded, token_mask_BS=present, **padded_memory)
    own = logits[:, 2:] if side == "left" else logits[:, :T]
    torch.testing.assert_close(own, model(ids, **memory))
    assert logits.isfinite().all()


@every_decoder
def test_rows_of_unequal_lengths_are_read_in_parts_too(
    build: Build, ids: Tensor, name: str
) -> None:
    """Row b begins b tokens later: it is one of several rows with lengths of their own."""
    model = build(**MODELS[name])
    cache = KVCache(model.config, batch=3, positions=T, dtype=torch.float64, slack=0)
    memory = source(model, ids)
    with torch.no_grad():
        for b in range(3):
            own = {key: value[b : b + 1] for key, value in memory.items()}
            model(ids[b : b + 1, b:6], cache=cache.select([b], [0]), **own)
        view = cache.select(slice(0, 3), [6, 5, 4])
        parts = torch.cat([model(ids[:, t : t + 1], cache=view, **memory) for t in range(6, T)], 1)
        for b in range(3):
            own = {key: value[b : b + 1] for key, value in memory.items()}
            alone = model(ids[b : b + 1, b:], **own)[0, 6 - b :]
            torch.testing.assert_close(parts[b], alone)


def test_a_cache_and_a_token_mask_exclude_each_other(build: Build, ids: Tensor) -> None:
    model = build()
    cache = KVCache(model.config, batch=3, positions=T, dtype=torch.float64)
    with pytest.raises(ValueError, match="no token mask"):
        model(ids, cache=cache, token_mask_BS=torch.ones_like(ids, dtype=torch.bool))


@every_model
def test_every_parameter_gets_a_gradient(build: Build, ids: Tensor, name: str) -> None:
    model = build(**MODELS[name]).train()
    stream = model(ids, return_hidden=True, **source(model, ids))
    loss = model(ids, **source(model, ids)).square().sum()
    if model.pooler is not None:
        loss = loss + model.pool(stream).sum()
    loss.backward()
    for parameter_name, p in model.named_parameters():
        assert p.grad is not None, parameter_name
        assert p.grad.isfinite().all(), parameter_name
        assert p.grad.abs().sum() > 0, parameter_name


@every_model
def test_a_block_has_its_derivative_in_both_directions(build: Build, name: str) -> None:
    """<u, J v> = <J^T u, v>, by forward and by reverse mode, and J v by a central difference."""
    model = build(**MODELS[name])
    generator = torch.Generator().manual_seed(4)
    x, v, u, memory = torch.randn(4, 2, 6, 24, dtype=torch.float64, generator=generator)
    rotary = model._rotary(0, 6, None, x)
    bias = position_bias(model.config, model.relative_bias, 6, 6)
    ids = torch.arange(12).view(2, 6)
    context = ForwardContext(
        rotary=rotary, position_bias=bias, memory=memory, per_layer=model._per_layer(ids, x)
    )

    def f(x: Tensor) -> Tensor:
        return model.blocks[0](x, context)

    _, Jv = jvp(f, (x,), (v,))
    torch.testing.assert_close((u * Jv).sum(), (vjp(f, x)[1](u)[0] * v).sum())
    step = 1e-5
    difference = (f(x + step * v) - f(x - step * v)) / (2 * step)
    torch.testing.assert_close(Jv, difference, atol=1e-6, rtol=1e-5)


@every_model
def test_half_precision_by_autocast_trains(settings: Any, ids: Tensor, name: str) -> None:
    generator = torch.Generator().manual_seed(5)
    model = Transformer(settings(**MODELS[name], dropout=0.1), generator=generator).train()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = model(ids, **source(model, ids)).float().square().mean()
    loss.backward()
    found = [p.grad for p in model.parameters() if p.grad is not None]
    assert found
    assert all(g.isfinite().all() for g in found)


@every_model
def test_the_stream_times_the_table_is_the_logits(build: Build, ids: Tensor, name: str) -> None:
    model = build(**MODELS[name])
    memory = source(model, ids)
    stream, logits = model(ids, return_hidden=True, **memory), model(ids, **memory)
    made = stream @ model.lm_head_weight.T
    assert torch.allclose(made, logits) == model.lm_head_is_linear
    torch.testing.assert_close(model(ids, last=True, **memory), logits[:, -1:])


@every_model
def test_an_observer_sees_every_layer_and_changes_nothing(
    build: Build, ids: Tensor, name: str
) -> None:
    model, seen = build(**MODELS[name]), []
    memory = source(model, ids)
    told = model(ids, observe=lambda *what: seen.append(what), **memory)
    torch.testing.assert_close(told, model(ids, **memory))
    assert [layer for layer, *_ in seen] == [0, 1, 2]
    for layer, _, k, _ in seen:
        config = model.config.at_layer(layer)
        assert k.shape == (3, config.groups, T, config.head_width)


@every_model
def test_the_attention_call_of_a_layer_is_the_one_it_makes(
    build: Build, ids: Tensor, name: str
) -> None:
    """The stream after each attention layer follows from what an observer saw."""
    model, seen, given, inputs = build(**MODELS[name]), [], [], []
    for block in model.blocks:
        block.attention.register_forward_pre_hook(lambda _, x: inputs.append(x[0]))
        block.attention.out.register_forward_pre_hook(lambda _, x: given.append(x[0]))
    model(ids, observe=lambda *what: seen.append(what), **source(model, ids))
    if MODELS[name].get("sink_score") == "token":
        with pytest.raises(ValueError, match="computed from its stream"):
            model.attention_call(*seen[0])
        return
    for (layer, *qkv), mixed in zip(seen, given, strict=True):
        call = model.attention_call(layer, *qkv)
        out, p = attend(call.q, call.k, call.v, **call.spec, return_weights=True)
        if (gate := model.attention_layers()[layer].gate_values(inputs[layer])) is not None:
            out = gate.transpose(1, 2) * out
        torch.testing.assert_close(out.transpose(1, 2).flatten(2), mixed)
        torch.testing.assert_close(p.sum(-1), torch.ones_like(p[..., 0]))


@every_model
def test_settings_survive_being_written_and_read(settings: Any, name: str) -> None:
    config = settings(**MODELS[name])
    assert from_mapping(ModelConfig, tomllib.loads(to_toml(to_mapping(config)))) == config


@every_model
def test_a_fresh_model_is_the_same_for_the_same_generator_and_finite(
    settings: Any, ids: Tensor, name: str
) -> None:
    one, two = (
        Transformer(settings(**MODELS[name]), generator=torch.Generator().manual_seed(5))
        for _ in range(2)
    )
    assert all(map(torch.equal, one.state_dict().values(), two.state_dict().values()))
    assert one(ids, **source(one, ids)).isfinite().all()
    half = one.to(torch.bfloat16)
    assert half(ids, **source(half, ids)).isfinite().all()
