"""fenchel/model/sigma_linear.py: a map whose largest singular value is its gain."""

import copy

import pytest
import torch
from torch import Tensor

from fenchel.model import ModelConfig, Transformer
from fenchel.model.sigma_linear import SigmaLinear


def drawn(inputs: int = 7, outputs: int = 5) -> SigmaLinear:
    generator = torch.Generator().manual_seed(0)
    layer = SigmaLinear(inputs, outputs).double()
    with torch.no_grad():
        layer.weight.normal_(generator=generator)
        layer.bias.normal_(generator=generator)
    layer.reset(1.7, generator)
    return layer


def settled(layer: SigmaLinear) -> SigmaLinear:
    layer.power_iterate(500)
    return layer


def test_its_largest_singular_value_is_the_gain() -> None:
    layer = settled(drawn())
    top = torch.linalg.matrix_norm(layer.matrix, 2)
    torch.testing.assert_close(top, layer.gain.detach())
    fresh = drawn()
    assert torch.linalg.matrix_norm(fresh.matrix, 2).item() == pytest.approx(1.7, rel=1e-2)


def test_it_is_the_weight_over_its_norm() -> None:
    layer = settled(drawn())
    x = torch.randn(3, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    sigma = torch.linalg.svdvals(layer.weight)[0]
    wanted = 1.7 * x @ layer.weight.T / sigma + layer.bias
    torch.testing.assert_close(layer.eval()(x), wanted)


def test_its_gradient_is_that_of_the_exact_norm() -> None:
    layer = settled(drawn()).train()
    x = torch.randn(3, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    layer(x).square().sum().backward()

    def exact(weight: Tensor, gain: Tensor) -> Tensor:
        scaled = gain * weight / torch.linalg.matrix_norm(weight, 2)
        return (x @ scaled.T + layer.bias.detach()).square().sum()

    at = layer.weight.detach(), layer.gain.detach()
    slopes = torch.func.grad(exact, argnums=(0, 1))(*at)
    torch.testing.assert_close((layer.weight.grad, layer.gain.grad), slopes)
    # The size of the weights does nothing, so the gradient has no part along them.
    assert (layer.weight.grad * layer.weight).sum().abs() < 1e-9 * layer.weight.grad.norm()


def test_the_vectors_follow_the_weights_in_training_and_stand_still_otherwise() -> None:
    layer = drawn()
    x = torch.ones(1, 7, dtype=torch.float64)
    before = copy.deepcopy(layer.right)
    layer.eval()(x)
    with torch.no_grad():
        layer.train()(x)
    assert torch.equal(layer.right, before)
    layer.train()(x)
    assert not torch.equal(layer.right, before)


def test_a_step_taken_between_two_passes_does_not_spoil_their_gradient() -> None:
    layer = drawn().train()
    x = torch.ones(1, 7, dtype=torch.float64)
    (layer(x).sum() + layer(x).sum()).backward()
    assert layer.weight.grad is not None
    assert layer.weight.grad.isfinite().all()


def test_a_fresh_model_starts_as_the_identity_and_its_vectors_are_kept() -> None:
    config = ModelConfig(vocabulary=9, width=16, layers=2, sigma_reparam=True, positions="none")
    model = Transformer(config, generator=torch.Generator().manual_seed(0))
    x = torch.randn(2, 3, 16, generator=torch.Generator().manual_seed(1))
    assert torch.equal(model.eval().blocks[0](x), x)
    assert {"blocks.1.mlp.up.left", "blocks.1.mlp.up.right"} <= model.state_dict().keys()
    model.train()(torch.arange(6).view(2, 3)).sum().backward()
    assert model.blocks[0].attention.out.gain.grad != 0  # it can leave zero
