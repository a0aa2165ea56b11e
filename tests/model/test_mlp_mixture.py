"""fenchel/model/mlp.py against a loop over tokens, and against transformers' Mixtral."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import gelu, silu
from transformers import MixtralConfig
from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock

from fenchel.choice import by_name
from fenchel.model import Transformer
from fenchel.model.mlp import MixtureOfExperts, balance

Build = Callable[..., Transformer]
MIXTURES: list[dict[str, Any]] = [
    {"experts": 4, "experts_per_token": 2},
    {"experts": 4, "experts_per_token": 1, "mlp": "gelu"},
    {"experts": 3, "experts_per_token": 3, "router": "entmax"},
    {"experts": 5, "experts_per_token": 3, "router": "sparsemax", "mlp": "geglu"},
]


def stream() -> Tensor:
    return torch.randn(2, 5, 24, dtype=torch.float64, generator=torch.Generator().manual_seed(3))


def by_token(part: MixtureOfExperts, x: Tensor, router: str, mlp: str) -> Tensor:
    """One token after another, one expert after another."""
    f = silu if mlp == "swiglu" else gelu
    rows = []
    for token in x.flatten(0, 1):
        p = by_name(router).weights(part.router.weight @ token)
        best = p.sort(descending=True).indices[: part.per_token]
        w = p[best] / p[best].sum()
        y = torch.zeros_like(token)
        for e, share in zip(best, w, strict=True):
            wide = part.up[e] @ token
            wide = f(wide) if part.gate is None else f(part.gate[e] @ token) * wide
            y = y + share * (part.down[e] @ wide)
        rows.append(y)
    return torch.stack(rows).view_as(x)


@pytest.mark.parametrize("kind", MIXTURES, ids=str)
def test_it_is_a_loop_over_tokens(build: Build, kind: dict[str, Any]) -> None:
    part = build(layers=1, **kind).blocks[0].mlp
    x = stream()
    router, mlp = kind.get("router", "softmax"), kind.get("mlp", "swiglu")
    exact = by_token(part, x, router, mlp)
    torch.testing.assert_close(part(x), exact)
    learn = list(part.parameters())
    ours = torch.autograd.grad(part(x).square().sum(), learn)
    torch.testing.assert_close(ours, torch.autograd.grad(exact.square().sum(), learn))


def test_one_expert_is_an_mlp(build: Build) -> None:
    part = build(layers=1, experts=1, experts_per_token=1).blocks[0].mlp
    x = stream()
    wide = silu(x @ part.gate[0].T) * (x @ part.up[0].T)
    torch.testing.assert_close(part(x), wide @ part.down[0].T)


def test_with_mixtrals_weights_it_gives_mixtrals_answer(build: Build) -> None:
    part = build(layers=1, experts=4, experts_per_token=2).blocks[0].mlp.float()
    config = MixtralConfig(
        hidden_size=24, intermediate_size=20, num_local_experts=4, num_experts_per_tok=2
    )
    theirs = MixtralSparseMoeBlock(config)
    weights = {
        "gate.weight": part.router.weight,
        "experts.gate_up_proj": torch.cat([part.gate, part.up], 1),
        "experts.down_proj": part.down,
    }
    theirs.load_state_dict(weights, strict=True)
    x = stream().float()
    answer = theirs(x)
    answer = answer[0] if isinstance(answer, tuple) else answer
    torch.testing.assert_close(part(x), answer, atol=1e-5, rtol=1e-5)


def test_the_balance_is_one_when_even_and_the_number_of_experts_when_not() -> None:
    X = 4
    even = torch.full((8, X), 1 / X)
    round_robin = (torch.arange(8) % X)[:, None]
    torch.testing.assert_close(balance(even, round_robin), torch.tensor(1.0))
    one = torch.zeros(8, X)
    one[:, 2] = 1.0
    torch.testing.assert_close(balance(one, torch.full((8, 1), 2)), torch.tensor(float(X)))


def test_the_balance_pushes_down_the_expert_that_is_chosen_most() -> None:
    z = torch.tensor([[2.0, 0.0, -1.0], [1.0, 0.5, 0.0], [0.3, 0.9, 0.0]], requires_grad=True)
    p = z.softmax(-1)
    slope = torch.autograd.grad(balance(p, p.topk(1).indices), z)[0].sum(0)
    assert slope.argmax() == 0
    assert slope[0] > 0 > slope[2]


def test_experts_that_a_sparse_map_gives_nothing_are_not_counted() -> None:
    p = torch.tensor([[1.0, 0.0, 0.0], [0.5, 0.5, 0.0]])
    f = torch.tensor([2 / 3, 1 / 3, 0.0])
    torch.testing.assert_close(balance(p, p.topk(2).indices), 3 * f @ p.mean(0))


def test_the_model_gives_the_mean_balance_of_its_layers(build: Build, ids: Tensor) -> None:
    assert build().balance() is None
    model = build(experts=4)
    model(ids)
    assert model.balance() is None  # nothing was trained on
    model.train()(ids)
    each = torch.stack([block.mlp.balance for block in model.blocks])
    torch.testing.assert_close(model.balance(), each.mean())
    assert (each >= 1.0 - 0.3).all()
    model.balance().backward()
    assert model.blocks[0].mlp.router.weight.grad.abs().sum() > 0
