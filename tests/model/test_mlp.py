"""fenchel/model/mlp.py: activations, and experts against a loop and against Mixtral."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import grad, vmap
from torch.nn.functional import gelu, silu
from transformers import Glm4MoeConfig, MixtralConfig
from transformers.models.glm4_moe.modeling_glm4_moe import Glm4MoeTopkRouter
from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock

from fenchel.choice import by_name
from fenchel.model import ModelConfig, Transformer
from fenchel.model.mlp import ACTIVATIONS, MixtureOfExperts, Mlp, balance

Build = Callable[..., Transformer]
X = torch.linspace(-8, 8, 160_001, dtype=torch.float64)


def Phi(x: Tensor) -> Tensor:
    return 0.5 * (1 + torch.erf(x / 2**0.5))


GELU, TANH = ACTIVATIONS["gelu"], ACTIVATIONS["gelu_tanh"]
BY_HAND: dict[str, Callable[[Tensor], Tensor]] = {
    "swiglu": lambda x: x / (1 + (-x).exp()),
    "geglu": lambda x: x * Phi(x),
    "geglu_tanh": lambda x: (
        0.5 * x * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (x + 0.044715 * x**3)))
    ),
    "relu": lambda x: x * (x > 0),
    "relu2": lambda x: x**2 * (x > 0),
    "swiglu_clamped": lambda x: (g := torch.where(x > 7, 7, x)) / (1 + (-1.702 * g).exp()),
}
BY_HAND |= {"gelu": BY_HAND["geglu"], "gelu_tanh": BY_HAND["geglu_tanh"]}


@pytest.mark.parametrize("kind", ACTIVATIONS)
@pytest.mark.parametrize("bias", [False, True])
def test_it_is_its_formula(build: Build, kind: str, bias: bool) -> None:
    part = build(mlp=kind, layers=1, bias=bias).blocks[0].mlp
    x = torch.randn(2, 5, 24, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    x[1] *= 50  # beyond what is clamped

    def through(layer: torch.nn.Linear, x: Tensor) -> Tensor:
        return x @ layer.weight.T + (layer.bias if bias else 0.0)

    f, wide = BY_HAND[kind], through(part.up, x)
    gated = "glu" in kind
    if kind == "swiglu_clamped":
        wide = 1 + wide.minimum(torch.tensor(7.0)).maximum(torch.tensor(-7.0))
    bent = f(through(part.gate, x)) * wide if gated else f(wide)
    assert (part.gate is not None) == gated
    torch.testing.assert_close(part(x), through(part.down, bent))


def test_every_position_is_read_by_the_same_map(build: Build) -> None:
    part = build(layers=1).blocks[0].mlp
    x = torch.randn(2, 5, 24, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    torch.testing.assert_close(part(x)[1, 3], part(x[1, 3]))


def test_approximations_of_gelu_have_the_stated_errors() -> None:
    exact = GELU(X)
    assert (TANH(X) - exact).abs().max().item() == pytest.approx(4.73e-4, rel=1e-2)
    quick = X * torch.sigmoid(1.702 * X)
    assert (quick - exact).abs().max().item() == pytest.approx(0.0203, rel=1e-2)


def test_gelu_dips_below_zero_and_its_slope_above_one() -> None:
    y, slope = GELU(X), vmap(grad(GELU))(X)
    assert y.min().item() == pytest.approx(-0.16997, abs=1e-5)
    assert X[y.argmin()].item() == pytest.approx(-0.7518, abs=1e-4)
    assert slope.min().item() == pytest.approx(-0.1289, abs=1e-4)
    assert slope.max().item() == pytest.approx(1.1289, abs=1e-4)
    assert X[slope.argmax()].item() == pytest.approx(2**0.5, abs=1e-3)
    # between 0 and x, and without the jump that ReLU's slope makes at 0
    assert (y * X >= 0).all()
    assert (y.abs() <= X.abs()).all()
    at = torch.tensor([-1e-7, 1e-7], dtype=torch.float64)
    assert vmap(grad(ACTIVATIONS["relu"]))(at).diff() == 1.0
    assert vmap(grad(GELU))(at).diff() < 1e-6


def test_larger_inputs_survive_the_gate_of_gelu_more_often() -> None:
    x = torch.tensor([-1.0, 1.0, 2.0])
    survives = ACTIVATIONS["gelu"](x) / x
    torch.testing.assert_close(survives, torch.tensor([0.159, 0.841, 0.977]), atol=5e-4, rtol=0)
    assert Phi(torch.zeros(())) == 0.5
    mean = ACTIVATIONS["gelu"](torch.tensor([-1.0, 0.5, 2.0]))
    torch.testing.assert_close(mean, torch.tensor([-0.1587, 0.3457, 1.954]), atol=5e-4, rtol=0)


def test_gelu_is_what_is_left_on_average_of_a_random_gate() -> None:
    x = torch.tensor([-1.0, 0.5, 2.0], dtype=torch.float64)
    gates = torch.rand(400_000, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    survived = ((gates < Phi(x)) * x).mean(0)
    torch.testing.assert_close(survived, GELU(x), atol=6e-3, rtol=0)
    assert [round(v, 4) for v in GELU(x).tolist()] == [-0.1587, 0.3457, 1.9545]


def test_dropout_stands_after_the_activation(settings: Any) -> None:
    part = Mlp(settings(mlp="gelu", mlp_dropout=0.5, hidden=4000, bias=True)).train()
    with torch.no_grad():
        part.up.weight.zero_()
        part.up.bias.fill_(1.0)
        part.down.weight.fill_(1 / 4000)
        part.down.bias.zero_()
    torch.manual_seed(0)
    open_ = GELU(torch.tensor(1.0))  # 0.84; before the activation it would be GELU(2) / 2 = 0.98
    y = part(torch.zeros(1, 1, 24))[0, 0, 0]
    assert 1e-4 < (y / open_ - 1).abs() < 0.06  # a mean of entries that are 0 or twice that
    torch.testing.assert_close(part.eval()(torch.zeros(1, 1, 24)), open_.expand(1, 1, 24))


def test_a_plain_mlp_has_eight_width_squared_weights() -> None:
    for kind in ("gelu", "gelu_tanh", "relu"):
        config = ModelConfig(vocabulary=8, width=512, heads=8, mlp=kind, bias=True)
        assert sum(p.numel() for p in Mlp(config).parameters()) == 2_099_712


MIXTURES: list[dict[str, Any]] = [
    {"experts": 4, "experts_per_token": 2},
    {"experts": 4, "experts_per_token": 1, "mlp": "gelu"},
    {"experts": 3, "experts_per_token": 3, "router": "entmax"},
    {"experts": 5, "experts_per_token": 3, "router": "sparsemax", "mlp": "geglu"},
    {"experts": 5, "experts_per_token": 2, "router": "sigmoid"},
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


def test_a_shared_expert_is_an_mlp_for_every_token(build: Build) -> None:
    part = build(layers=1, experts=4, shared_expert=16, shared_expert_gate=True).blocks[0].mlp
    x, shared = stream(), part.shared
    wide = silu(x @ shared.gate.weight.T) * (x @ shared.up.weight.T)
    gate = 1 / (1 + (-x @ part.shared_gate.weight.T).exp())
    expected = by_token(part, x, "softmax", "swiglu") + gate * (wide @ shared.down.weight.T)
    torch.testing.assert_close(part(x), expected)
    assert shared.up.weight.shape == (16, 24)


def test_experts_with_norms_of_their_own_see_the_stream(build: Build) -> None:
    """Whatever the length of the stream, their output has that of the gain of the last norm."""
    settings = {"experts": 4, "shared_expert": 16, "expert_norms": True, "norm_place": "both"}
    block = build(layers=1, epsilon=1e-12, **settings).blocks[0]
    part, x = block.mlp, stream()
    assert isinstance(block.mlp_norm, nn.Identity)
    torch.testing.assert_close(part(1e3 * x), part(x))
    with torch.no_grad():
        part.shared_post_norm.weight.zero_()
        part.experts_post_norm.weight.fill_(1.0)
        y = part(x)
        torch.testing.assert_close(y.square().mean(-1), torch.ones_like(y[..., 0]))
        part.expert_scale.zero_()
        assert not part(x).any()


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


def test_a_sigmoid_router_with_a_bias_and_a_scale_is_that_of_glm(build: Build) -> None:
    settings = {"router": "sigmoid", "router_bias": True, "router_scale": 2.5}
    part = build(layers=1, experts=6, experts_per_token=2, **settings).blocks[0].mlp.float()
    part.router_bias.copy_(0.3 * torch.randn(6, generator=torch.Generator().manual_seed(4)))
    config = Glm4MoeConfig(hidden_size=24, num_local_experts=6, num_experts_per_tok=2, n_group=1)
    config.routed_scaling_factor = 2.5
    router = Glm4MoeTopkRouter(config)
    weights = {"weight": part.router.weight, "e_score_correction_bias": part.router_bias}
    router.load_state_dict(weights)
    seen: list[tuple[Tensor, Tensor]] = []
    part._experts = lambda x, w, expert: seen.append((w, expert)) or x
    x = stream().float()
    part(x)
    (w, expert), (_, weight, index) = seen[0], router(x)
    order, theirs = expert.argsort(-1), index.argsort(-1)
    assert torch.equal(expert.gather(-1, order), index.gather(-1, theirs))
    torch.testing.assert_close(w.gather(-1, order), weight.gather(-1, theirs))
    unbiased = part.router(x.flatten(0, 1)).topk(2).indices
    assert not torch.equal(unbiased.sort(-1).values, index.sort(-1).values)  # the bias has chosen


def test_the_balance_is_one_when_choices_or_weights_are_even() -> None:
    X = 4
    even, round_robin = torch.full((8, X), 1 / X), (torch.arange(8) % X)[:, None]
    uneven = torch.tensor([0.7, 0.1, 0.1, 0.1]).expand(8, X)
    for p, experts in ((even, round_robin), (even, torch.zeros_like(round_robin))):
        torch.testing.assert_close(balance(p, experts), torch.tensor(1.0))
    torch.testing.assert_close(balance(uneven, round_robin), torch.tensor(1.0))


def test_the_balance_where_all_tokens_choose_one_expert_and_where_it_is_below_one() -> None:
    certain = torch.tensor([[0.0, 0.0, 1.0, 0.0]] * 8)
    torch.testing.assert_close(balance(certain, torch.full((8, 1), 2)), torch.tensor(4.0))
    leaning = torch.tensor([[0.6, 0.4]] * 10)
    torch.testing.assert_close(balance(leaning, leaning.topk(1).indices), torch.tensor(1.2))
    opposed = torch.tensor([[0.51, 0.49]] * 3 + [[0.0, 1.0]])
    torch.testing.assert_close(balance(opposed, opposed.topk(1).indices), torch.tensor(0.8825))
    generator = torch.Generator().manual_seed(0)
    for X in (2, 3, 8):
        p = (4.0 * torch.randn(200, 6, X, generator=generator)).softmax(-1)
        found = torch.stack([balance(each, each.topk(1).indices) for each in p])
        assert found.min() >= 1 / X
        assert found.max() <= X


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
