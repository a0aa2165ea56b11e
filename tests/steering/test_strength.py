"""fenchel/steering/strength.py: the divergence of a direction, and the strength of a budget."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, kl_div

from fenchel.model import ModelConfig, Transformer
from fenchel.steering import Direction, divergence, find_strength

M, V = 24, 80
GPT2: dict[str, Any] = {"positions": "learned", "norm": "layer", "mlp": "gelu", "bias": True}


def build(seed: int, **settings: Any) -> Transformer:
    usual = {"vocabulary": V, "context": 64, "width": M, "layers": 3, "heads": 3}
    config = ModelConfig(**{**usual, **settings})  # type: ignore[arg-type]
    model = Transformer(config, generator=torch.Generator().manual_seed(seed)).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(2.0)
    return model


def drawn(seed: int, layer: int = 2) -> tuple[Direction, list[int]]:
    g = torch.Generator().manual_seed(seed)
    direction = Direction(vectors={layer: torch.randn(M, generator=g)})
    return direction, torch.randint(V, (40,), generator=g).tolist()


@torch.no_grad()
def test_the_divergence_is_that_of_the_two_laws() -> None:
    model, (direction, ids) = build(0), drawn(1)
    direction = direction.at(0.7)
    x = torch.tensor([ids])

    def logits(add: Tensor) -> Tensor:
        handle = model.blocks[1].register_forward_hook(lambda _, __, x: x + add)
        z = model(x)[0].double()
        handle.remove()
        return z

    plain, steered = logits(torch.zeros(M)), logits(0.7 * direction.vectors[2])
    kl = kl_div(
        plain.log_softmax(-1), steered.log_softmax(-1), reduction="none", log_target=True
    ).sum(-1)
    loss = cross_entropy(steered[:-1], x[0, 1:]) - cross_entropy(plain[:-1], x[0, 1:])
    found = divergence(model, direction, ids)
    assert found.mean == pytest.approx(float(kl.mean()), rel=1e-3)
    assert found.worst == pytest.approx(float(kl.max()), rel=1e-3)
    assert found.loss == pytest.approx(float(loss), abs=1e-5)
    assert divergence(model, direction.at(0.0), ids).mean == 0.0


@pytest.mark.parametrize("settings", [{}, GPT2], ids=["llama", "gpt2"])
@pytest.mark.parametrize("negative", [False, True])
@pytest.mark.parametrize("kl", [0.003, 0.1])
def test_the_strength_keeps_its_budget(kl: float, negative: bool, settings: dict[str, Any]) -> None:
    for seed in range(3):
        model, (direction, ids) = build(seed, **settings), drawn(seed)
        found = find_strength(model, direction, ids, kl, negative=negative)
        assert (found.value < 0) == negative
        again = divergence(model, direction.at(found.value), ids)
        assert again.mean == pytest.approx(kl, rel=0.02)
        assert again == found.divergence
        assert again.worst >= again.mean
        assert found.passes <= 6


@pytest.mark.parametrize("scale", [1e-4, 1e4])
def test_the_length_of_a_direction_does_not_matter(scale: float) -> None:
    model, (direction, ids) = build(2), drawn(5)
    usual = find_strength(model, direction, ids, 0.05)
    vectors = {2: scale * direction.vectors[2]}
    found = find_strength(model, Direction(vectors=vectors), ids, 0.05)
    assert found.value * scale == pytest.approx(usual.value, rel=0.05)


@pytest.mark.parametrize("kl", [0.0, -0.1, 1.5, float("nan")])
def test_a_budget_that_cannot_be_kept_is_refused(kl: float) -> None:
    model, (direction, ids) = build(0), drawn(1)
    with pytest.raises(ValueError, match="not in"):
        find_strength(model, direction, ids, kl)


def test_a_direction_without_effect_and_a_text_of_one_token_get_a_sentence() -> None:
    model, (_, ids) = build(0, tied=False), drawn(1)
    nothing = Direction(vectors={1: torch.zeros(M)})
    with pytest.raises(ValueError, match="the direction is zero"):
        find_strength(model, nothing, ids, 0.1)
    model.lm_head_weight.detach().zero_()  # the same logits for every token
    with pytest.raises(ValueError, match="no strength up to"):
        find_strength(model, drawn(1)[0], ids, 0.1)
    with pytest.raises(ValueError, match="two tokens"):
        find_strength(model, drawn(1)[0], ids[:1], 0.1)
