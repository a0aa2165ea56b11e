"""inspection/linearisation.py: a tangent has the value and the derivative, and only where due."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.functional import jacobian
from torch.nn import functional
from transformers.activations import NewGELUActivation

from fenchel.inspection.linearisation import derivative, tangent_activations
from fenchel.torch_internals import has_forward_hooks


class Reversed(nn.Module):
    """Without weights, and not number by number."""

    def forward(self, x: Tensor) -> Tensor:
        return x.flip(-1).sin()


class Bare(nn.Module):
    """A function of torch's, inside something that has weights and so is no activation itself."""

    def __init__(self, f: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.f, self.weight = f, nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return self.f(x)


class Called(nn.Module):
    """An activation that is a function of torch's, as in our own MLP."""

    def __init__(self, f: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.up, self.f = nn.Linear(6, 6), f

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.f(self.up(x))
        return out


def net(bare: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), bare, nn.LayerNorm(6), nn.Linear(6, 4)).double()


X = torch.randn(1, 3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


FUNCTIONS = [
    *(functional.gelu, functional.silu, functional.relu, functional.softplus),
    partial(functional.gelu, approximate="tanh"),
]
MODULES = [NewGELUActivation(), nn.SiLU(), nn.ReLU(), nn.Softmax(-1), Reversed(), nn.Dropout(0.0)]


@pytest.mark.parametrize("bare", [*MODULES, *(Called(f) for f in FUNCTIONS)])
def test_derivatives_are_those_of_the_map(bare: nn.Module) -> None:
    f = net(bare)
    near = tangent_activations(f, f)
    torch.testing.assert_close(near(X), f(X))
    J, wanted = derivative(near, X), jacobian(f, X).reshape(12, 12)
    torch.testing.assert_close(J.dense(), wanted)
    torch.testing.assert_close(J.T.dense(), wanted.mT)


def test_only_what_acts_number_by_number_becomes_straight() -> None:
    def bend(bare: nn.Module) -> float:
        """How far the second derivative of a sum is from 0."""
        near = tangent_activations(bare, bare)
        x = X.clone().requires_grad_()
        (slope,) = torch.autograd.grad(near(x).square().sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(slope.sum(), x)
        straight = 2.0 * jacobian(bare, X).reshape(12, 12).square().sum(0)
        return float((second.flatten() - straight).abs().amax())

    assert bend(nn.SiLU()) < 1e-12
    assert bend(Reversed()) > 0.1
    assert bend(Bare(functional.silu)) < 1e-12
    assert bend(Bare(functional.gelu)) < 1e-12


def test_the_module_is_left_as_it_was() -> None:
    f = net(nn.SiLU())
    tangent_activations(f, f)(X.clone().requires_grad_())
    assert not any(map(has_forward_hooks, f.modules()))
