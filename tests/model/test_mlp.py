"""fenchel/model/mlp.py: the activations and their worked numbers."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import grad, vmap

from fenchel.model import ModelConfig, Transformer
from fenchel.model.mlp import ACTIVATIONS, Mlp

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
}
BY_HAND |= {"gelu": BY_HAND["geglu"], "gelu_tanh": BY_HAND["geglu_tanh"]}


@pytest.mark.parametrize("kind", ACTIVATIONS)
@pytest.mark.parametrize("bias", [False, True])
def test_it_is_its_formula(build: Build, kind: str, bias: bool) -> None:
    part = build(mlp=kind, layers=1, bias=bias).blocks[0].mlp
    x = torch.randn(2, 5, 24, dtype=torch.float64, generator=torch.Generator().manual_seed(3))

    def through(layer: torch.nn.Linear, x: Tensor) -> Tensor:
        return x @ layer.weight.T + (layer.bias if bias else 0.0)

    f, wide = BY_HAND[kind], through(part.up, x)
    gated = "glu" in kind
    bent = f(through(part.gate, x)) * wide if gated else f(wide)
    assert (part.gate is not None) == gated
    torch.testing.assert_close(part(x), through(part.down, bent))


def test_every_position_is_read_by_the_same_map(build: Build) -> None:
    part = build(layers=1).blocks[0].mlp
    x = torch.randn(2, 5, 24, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    torch.testing.assert_close(part(x)[1, 3], part(x[1, 3]))


def test_approximations_of_gelu_are_as_close_as_is_said() -> None:
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


def test_gelu_is_what_is_left_on_average_of_a_random_gate() -> None:
    x = torch.tensor([-1.0, 0.5, 2.0], dtype=torch.float64)
    gates = torch.rand(400_000, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    survived = ((gates < Phi(x)) * x).mean(0)
    torch.testing.assert_close(survived, GELU(x), atol=6e-3, rtol=0)
    assert [round(v, 4) for v in GELU(x).tolist()] == [-0.1587, 0.3457, 1.9545]


def test_dropout_stands_after_the_activation(settings: Any) -> None:
    part = Mlp(settings(mlp="relu", mlp_dropout=0.5, hidden=4000, bias=True)).train()
    with torch.no_grad():
        part.up.weight.zero_()
        part.up.bias.fill_(1.0)
        part.down.weight.fill_(1 / 4000)
        part.down.bias.zero_()
    torch.manual_seed(0)
    y = part(torch.zeros(1, 1, 24))
    assert 0.9 < y[0, 0, 0] < 1.1  # a mean of entries that are 0 or 2
    assert abs(y[0, 0, 0] - 1.0) > 1e-4
    torch.testing.assert_close(part.eval()(torch.zeros(1, 1, 24)), torch.ones(1, 1, 24))


def test_a_plain_mlp_has_eight_width_squared_weights() -> None:
    for kind in ("gelu", "gelu_tanh", "relu"):
        config = ModelConfig(vocabulary=8, width=512, heads=8, mlp=kind, bias=True)
        assert sum(p.numel() for p in Mlp(config).parameters()) == 2_099_712
