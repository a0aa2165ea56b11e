"""fenchel/steering/strength.py: the divergence of a direction, and the strength of a budget."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, kl_div

from fenchel.attention import AttentionCall
from fenchel.generation import Emphasis, HeadChoice, Steering
from fenchel.model import ModelConfig, Transformer
from fenchel.steering import Direction, divergence, find_strength, strength
from fenchel.steering.strength import Divergence

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


def test_a_divergence_that_jumps_over_the_budget_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where another expert takes a token."""

    def jumping(_model: Any, direction: Direction, *_: Any, **__: Any) -> Divergence:
        return Divergence(0.05 if direction.strength > -3.0 else 0.2, 0.3, 0.0)

    monkeypatch.setattr(strength, "divergence", jumping)
    direction, ids = drawn(1)
    with pytest.raises(ValueError, match=r"at -3\.0\d+ it jumps from 0\.05 to 0\.2\."):
        find_strength(build(0), direction, ids, 0.1, negative=True)


def test_a_direction_without_effect_and_a_text_of_one_token_get_a_sentence() -> None:
    model, (_, ids) = build(0, tied=False), drawn(1)
    nothing = Direction(vectors={1: torch.zeros(M)})
    with pytest.raises(ValueError, match="the direction is zero"):
        find_strength(model, nothing, ids, 0.1)
    model.lm_head_weight.detach().zero_()  # the same logits for every token
    with pytest.raises(ValueError, match="no strength was found"):
        find_strength(model, drawn(1)[0], ids, 0.1)
    with pytest.raises(ValueError, match="two tokens"):
        find_strength(model, drawn(1)[0], ids[:1], 0.1)


@torch.no_grad()
@pytest.mark.parametrize("settings", [{}, GPT2, {"kv_heads": 1}], ids=["llama", "gpt2", "mqa"])
def test_the_divergence_of_heads_that_choose_otherwise_is_that_of_their_scores(
    settings: dict[str, Any],
) -> None:
    """Against a forward pass with the bias and the factor written into the scores."""
    model, (_, ids) = build(3, initial="xavier", **settings), drawn(4)
    emphasis = Emphasis(frozenset({2, 7}), bias=1.5, layers=frozenset({2}))
    heads = {(3, 1): HeadChoice(beta=0.25)}

    def override(layer: int, call: AttentionCall) -> Tensor | None:
        q, k, v = call.q, *(x.repeat_interleave(3 // x.shape[1], 1) for x in (call.k, call.v))
        z = q @ k.mT * (call.spec.scale or q.shape[-1] ** -0.5)
        if layer == 1:
            z[..., [2, 7]] += 1.5
        if layer == 2:
            z[:, 0] *= 0.25
        return (z + torch.full(z.shape[-2:], -torch.inf).triu(1)).softmax(-1) @ v

    x = torch.tensor([ids])
    plain, steered = (
        model(x, attention_override=how)[0].double().log_softmax(-1) for how in (None, override)
    )
    kl = kl_div(plain, steered, reduction="none", log_target=True).sum(-1)
    assert float(kl.mean()) > 1e-4
    steering = Steering(emphasis=emphasis, heads=heads)
    assert divergence(model, steering, ids).mean == pytest.approx(float(kl.mean()), rel=1e-3)
    late = divergence(model, steering, ids, start=30)
    assert late.mean == pytest.approx(float(kl[30:].mean()), rel=1e-3)
    loss = (plain - steered)[30:-1].gather(1, x[0, 31:, None]).mean()
    assert late.loss == pytest.approx(float(loss), abs=1e-4)


@pytest.mark.parametrize("negative", [False, True])
def test_the_bias_of_an_emphasis_keeps_its_budget(negative: bool) -> None:
    model, (_, ids) = build(1, initial="xavier"), drawn(2)
    emphasis = Emphasis(frozenset({3, 4, 5}))
    found = find_strength(model, emphasis, ids, 0.02, negative=negative, start=10)
    assert (found.value < 0) == negative
    steering = Steering(emphasis=replace(emphasis, bias=found.value))
    assert divergence(model, steering, ids, start=10).mean == pytest.approx(0.02, rel=0.02)
    with pytest.raises(ValueError, match="no strength was found"):  # keys that no law depends on
        find_strength(model, replace(emphasis, tokens=frozenset({99})), ids, 0.1)
