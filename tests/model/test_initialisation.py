"""fenchel/model/initialisation.py: variances of fresh parameters, and what depth does to them."""

import warnings
from typing import Any

import pytest
import torch
from torch.nn import functional

from fenchel.attention import Causal, RelativeBias, attend, health
from fenchel.model import ModelConfig, Transformer
from fenchel.model.initialisation import post_norm_trouble
from fenchel.model.transformer import meta_model


def fresh(seed: int = 0, **settings: Any) -> Transformer:
    sizes = {"vocabulary": 60, "context": 16, "width": 96, "heads": 4, "kv_heads": 2, "hidden": 200}
    config = ModelConfig(**{**sizes, "layers": 3, **settings})
    return Transformer(config, generator=torch.Generator().manual_seed(seed))


def deviation(x: torch.Tensor) -> float:
    return float(x.detach().std(correction=0))


def parts(model: Transformer) -> dict[str, torch.Tensor]:
    block = model.blocks[1]
    q, k, v = block.attention.qkv.weight.split([96, 48, 48])
    mlp = {name: getattr(block.mlp, name).weight for name in ("gate", "up", "down")}
    return {"q": q, "k": k, "v": v, "out": block.attention.out.weight, **mlp}


def test_xavier_draws_each_of_queries_keys_and_values_by_its_own_size() -> None:
    for name, weight in parts(fresh(initial="xavier")).items():
        outputs, inputs = weight.shape
        wanted = (2 / (inputs + outputs)) ** 0.5
        assert deviation(weight) == pytest.approx(wanted, rel=0.05), name


def test_normal_draws_everything_alike() -> None:
    model = fresh(initial="normal", initial_std=0.05, tied=False)
    for name, weight in {**parts(model), "read": model.lm_head.weight}.items():
        assert deviation(weight) == pytest.approx(0.05, rel=0.05), name


def test_zero_draws_by_the_inputs_and_leaves_branches_silent() -> None:
    found = parts(fresh(tied=False))
    for name in ("q", "k", "v", "gate", "up"):
        assert deviation(found[name]) == pytest.approx(96**-0.5, rel=0.05), name
    assert not found["out"].any()
    assert not found["down"].any()
    assert not fresh(tied=False).lm_head.weight.any()


def test_the_last_map_of_every_branch_shrinks_with_depth() -> None:
    plain, scaled = (parts(fresh(initial="xavier", initial_depth=d)) for d in (False, True))
    for name, weight in plain.items():
        factor = 6**-0.5 if name in ("out", "down") else 1.0
        torch.testing.assert_close(scaled[name], factor * weight)


def test_heads_begin_at_one_distance_each() -> None:
    model = fresh(positions="buckets", initial_distances=True)
    assert model.relative_bias is not None
    prior = Causal() + RelativeBias(model.relative_bias.weight)
    q = torch.zeros(1, 4, 16, 8)
    p_HTS = attend(q, q, q, prior=prior, return_weights=True)[1][0].detach()
    for h in range(4):
        back = p_HTS[h].diagonal(-(h + 1))
        assert float(back.min()) > 0.85
        assert float((p_HTS[h].sum() - back.sum()) / 16) < 0.5


@pytest.mark.parametrize("initial", ["zero", "normal", "xavier"])
def test_smaller_queries_and_keys_attend_more_evenly(initial: str) -> None:
    settings = {"initial": initial, "initial_std": 0.3}
    plain, small = (fresh(**settings, initial_qk=factor) for factor in (1.0, 0.2))
    for name, weight in parts(plain).items():
        factor = 0.2 if name in ("q", "k") else 1.0
        torch.testing.assert_close(parts(small)[name], factor * weight)
    ids = torch.arange(48).view(3, 16)
    entropy = []
    for model in (plain, small):
        seen: list[tuple[int, torch.Tensor, torch.Tensor, torch.Tensor]] = []
        model(ids, observe=lambda *what, seen=seen: seen.append(what))
        entropy.append(health(*seen[0][1:3], prior=Causal()).entropy)
    assert entropy[0] < entropy[1]


def test_the_encoder_and_experts_are_drawn_too() -> None:
    model = fresh(kind="encoder-decoder", experts=3, initial="xavier")
    cross, mixture = model.blocks[0].cross_attention, model.encoder.blocks[2].mlp
    k, v = cross.kv.weight.chunk(2)
    for half in (k, v):
        assert deviation(half) == pytest.approx((2 / (96 + 48)) ** 0.5, rel=0.05)
    assert deviation(mixture.up) == pytest.approx((2 / 296) ** 0.5, rel=0.05)
    silent = fresh(kind="encoder-decoder", experts=3)
    assert not silent.blocks[0].cross_attention.out.weight.any()
    assert not silent.encoder.blocks[2].mlp.down.any()


def _gradient_of_the_last_layer(place: str, layers: int) -> float:
    model = fresh(
        initial="xavier",
        norm_place=place,
        norm="layer",
        mlp="gelu",
        width=64,
        kv_heads=None,
        hidden=None,
        layers=layers,
        final_norm=place == "pre",
        tied=False,
        positions="learned",
        initial_std=1.0,
    )
    ids = torch.arange(48).view(3, 16)
    logits = model(ids)[:, :-1].flatten(0, 1)
    torch.nn.functional.cross_entropy(logits, ids[:, 1:].flatten()).backward()
    return float(model.blocks[-1].mlp.down.weight.grad.norm())


def test_norms_after_branches_make_the_last_layers_gradient_large_with_depth() -> None:
    ratios = [
        _gradient_of_the_last_layer("post", L) / _gradient_of_the_last_layer("pre", L)
        for L in (6, 24, 54)
    ]
    assert ratios == pytest.approx([1.9, 4.8, 10.6], rel=0.03)


@pytest.mark.parametrize(
    ("settings", "warned"),
    [
        ({"layers": 6, "initial": "xavier"}, False),
        ({"layers": 7, "initial": "xavier"}, True),
        ({"layers": 54, "initial": "xavier"}, True),
        ({"layers": 54, "initial": "xavier", "norm_place": "pre"}, False),
        ({"layers": 54, "initial": "xavier", "residual_scale": "depth"}, False),
        ({"layers": 54, "initial": "xavier", "initial_depth": True}, False),
        ({"layers": 54}, False),  # branches start at zero
        ({"layers": 12, "width": 768, "heads": 12, "initial": "normal"}, False),  # BERT base
        ({"layers": 24, "width": 1024, "heads": 16, "initial": "normal"}, True),  # BERT large
    ],
)
def test_norms_after_many_branches_come_with_advice(settings: dict[str, Any], warned: bool) -> None:
    config = ModelConfig(**{"vocabulary": 16, "norm_place": "post", **settings})
    trouble = post_norm_trouble(config)
    assert (trouble is not None) == warned
    if warned and config.width < 200:
        with pytest.warns(UserWarning, match='residual_scale="depth" or initial_depth=True'):
            Transformer(config)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            meta_model(config)  # weights from a file are not drawn


def test_the_share_of_the_embedding_halves_per_branch() -> None:
    """Under norms after branches that preserve variance, by half per branch: 2^(-2 L)."""
    generator = torch.Generator().manual_seed(0)
    x = stream = torch.randn(256, 1024, generator=generator)
    for branches in range(1, 9):
        W = torch.randn(1024, 1024, generator=generator) / 32.0
        stream = functional.layer_norm(stream + stream @ W, (1024,))
        share = float((x * stream).mean()) ** 2
        assert share == pytest.approx(2.0**-branches, rel=0.2)


def _growth(layers: int, **settings: Any) -> float:
    model = fresh(layers=layers, initial="xavier", final_norm=False, initial_std=1.0, **settings)
    ids = torch.arange(48).view(3, 16)
    before, after = model._embed(ids, 0, None, None), model(ids, return_hidden=True)
    return float(after.detach().var() / before.detach().var())


def test_the_depth_rule_bounds_a_stream_that_grows_without_it() -> None:
    plain = [_growth(L) for L in (6, 24)]
    ruled = [_growth(L, residual_scale="depth") for L in (6, 24)]
    assert plain[0] < plain[1]
    assert max(ruled) < torch.e < plain[1]
