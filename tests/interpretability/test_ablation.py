"""fenchel/interpretability/ablation.py: another choice, and what is refused."""

import pytest
import torch
from torch import nn

from fenchel.choice import Entmax
from fenchel.interpretability import Site, ablate
from tests.interpretability.conftest import build, draw


@torch.no_grad()
def loss(model: nn.Module, ids: list[int]) -> float:
    z = model(torch.tensor([ids]))[0, :-1]
    return float(nn.functional.cross_entropy(z, torch.tensor(ids[1:])))


@pytest.mark.parametrize("to", ["entmax", Entmax(1.5)], ids=["name", "map"])
def test_another_map_in_a_layer_is_that_of_a_model_with_that_layer(to: str | Entmax) -> None:
    """choices of a model by layer: one layer of entmax is the model that was built with it."""
    model, ids = build("qwen3"), draw(1)
    found = ablate(model, ids, to=to)
    assert {effect.site.part for effect in found.effects} == {"head", "attention"}
    assert {row.part for row in found.agreement} == {"head", "attention"}
    base = loss(model, ids)
    assert found.base == pytest.approx(base)
    exact = {effect.site: effect.exact for effect in found.effects}
    for layer in (1, 2, 3):
        attention = model.blocks[layer - 1].attention
        own, attention.fixed_choice = attention.fixed_choice, Entmax(1.5)
        assert exact[Site("attention", layer)] == pytest.approx(loss(model, ids) - base)
        attention.fixed_choice = own


def test_the_choice_of_a_uniform_head_is_that_of_its_prior() -> None:
    """Scores of 0 leave ALiBi: with a score scale of 0 in a layer the model is the same."""
    model, ids = build("alibi"), draw(1)
    exact = {e.site: e.exact for e in ablate(model, ids, to="uniform").effects}
    base = loss(model, ids)
    for layer in (1, 3):
        attention = model.blocks[layer - 1].attention
        own, attention.scale = attention.scale, 0.0
        assert exact[Site("attention", layer)] == pytest.approx(loss(model, ids) - base)
        attention.scale = own


def test_sites_may_be_chosen() -> None:
    found = ablate(build(), draw(1), to="zero", sites=[Site("mlp", 2), Site("head", 1, 2)])
    assert {str(effect.site) for effect in found.effects} == {"mlp 2", "head 1.2"}
    plain = found.plain()
    assert (plain["to"], plain["tokens"]) == ("zero", 12)
    assert {"part", "layer", "head", "estimate", "exact"} <= plain["effects"][0].keys()


def test_what_cannot_be_removed_gets_a_sentence() -> None:
    model, ids = build(), draw(1)
    with pytest.raises(ValueError, match="at least three tokens"):
        ablate(model, ids[:2])
    with pytest.raises(ValueError, match="to='median' is not known; there are zero, mean, uniform"):
        ablate(model, ids, to="median")
    with pytest.raises(ValueError, match="an MLP has no choice"):
        ablate(model, ids, to="uniform", sites=[Site("mlp", 1)])
    with pytest.raises(ValueError, match="no layer 9"):
        ablate(model, ids, sites=[Site("head", 9, 1)])
    with pytest.raises(ValueError, match=r"query 1\.1 is not a part that is removed"):
        ablate(model, ids, sites=[Site("q", 1, 1)])
    model.lm_head_weight.detach().fill_(float("nan"))
    with pytest.raises(ValueError, match="not finite"):
        ablate(model, ids)
