"""Every detector finds the mistake that it is for, and nothing in a model without it."""

from dataclasses import replace

import pytest
import torch

from fenchel.evaluate import PITFALLS, pitfalls
from fenchel.model import ModelConfig, Transformer

CONFIG = ModelConfig(vocabulary=97, context=64, width=64, layers=2, heads=4)


def model(**settings: object) -> Transformer:
    config = replace(CONFIG, **settings)  # type: ignore[arg-type]
    return Transformer(config, generator=torch.Generator().manual_seed(0)).eval()


@pytest.fixture
def ids() -> torch.Tensor:
    return torch.randint(97, (2, 40), generator=torch.Generator().manual_seed(1))


def names(of: Transformer, ids: torch.Tensor) -> set[str]:
    return {found.pitfall for found in pitfalls(of, ids)}


def scale_queries(of: Transformer, factor: float) -> Transformer:
    with torch.no_grad():
        for block in of.blocks:
            block.attention.qkv.weight[: CONFIG.width] *= factor
    return of


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"choice": "entmax"},
        {"positions": "alibi"},
        {"kv_heads": 2, "qk_norm": True},
        {"kind": "encoder"},
        {"windows": (4, 0)},
    ],
)
def test_a_model_as_it_is_made_has_none(settings: dict[str, object], ids: torch.Tensor) -> None:
    assert names(scale_queries(model(**settings), 4.0), ids) == set()


def test_half_precision_is_read_as_it_is(ids: torch.Tensor) -> None:
    half = scale_queries(model(vocabulary=400), 4.0).bfloat16()
    assert names(half, ids) == set()
    with torch.no_grad():
        half.embed.weight[:4] *= 50
    assert "neighbours" in names(half, ids)


def test_a_scale_applied_twice_is_found(ids: torch.Tensor) -> None:
    twice = model(score_scale=CONFIG.head_width**-1.0)
    found = [each for each in pitfalls(twice, ids) if each.pitfall == "scale"]
    assert len(found) == CONFIG.layers
    assert "root is missing" in found[0].sentence


def test_collapse_is_found_in_layers_and_not_in_single_heads(ids: torch.Tensor) -> None:
    assert "collapse" in names(scale_queries(model(), 1e5), ids)
    one = model()
    with torch.no_grad():
        one.blocks[0].attention.qkv.weight[: CONFIG.head_width] *= 1e5
    assert "collapse" not in names(one, ids)


@pytest.mark.parametrize("positions", ["rotary", "alibi"])
def test_weights_of_the_prior_alone_are_found(positions: str, ids: torch.Tensor) -> None:
    assert "uniform" in names(scale_queries(model(positions=positions), 0.0), ids)


def test_one_head_that_does_not_choose_is_no_uniform_layer(ids: torch.Tensor) -> None:
    one = scale_queries(model(), 4.0)
    with torch.no_grad():
        for block in one.blocks:
            block.attention.qkv.weight[: CONFIG.head_width] = 0.0
    assert names(one, ids) == set()


def test_a_deep_post_norm_model_is_found(ids: torch.Tensor) -> None:
    with pytest.warns(UserWarning, match="post"):
        deep = model(layers=24, norm_place="post", initial="xavier")
    assert "post-norm" in names(deep, ids)


def test_long_rows_of_an_embedding_are_found(ids: torch.Tensor) -> None:
    longer = scale_queries(model(vocabulary=400), 4.0)
    with torch.no_grad():
        longer.embed.weight[:4] *= 50
    assert "neighbours" in names(longer, ids)


def test_long_rows_that_are_near_by_the_cosine_too_are_no_mistake(ids: torch.Tensor) -> None:
    shared = scale_queries(model(vocabulary=400), 4.0)
    with torch.no_grad():
        common = shared.embed.weight[0] / shared.embed.weight[0].norm()
        shared.embed.weight += shared.embed.weight.norm(dim=1, keepdim=True) * common
        shared.embed.weight[:4] = 50 * common
    assert "neighbours" not in names(shared, ids)


@pytest.mark.parametrize("factor", [0.0, 1.0, 1e5])
def test_short_sequences_have_no_row_to_judge(factor: float) -> None:
    found = names(scale_queries(model(), factor), torch.tensor([[1, 2, 3]]))
    assert not found & {"collapse", "uniform"}


def test_every_pitfall_has_its_words() -> None:
    assert len({each.name for each in PITFALLS}) == len(PITFALLS)
    assert all(each.symptom.endswith(".") and each.remedy.endswith(".") for each in PITFALLS)
