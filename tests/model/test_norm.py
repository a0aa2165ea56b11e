"""fenchel/model/norm.py: RMSNorm against its definition, in every derivative."""

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck
from torch.func import functional_call, jacfwd, jacrev, vmap
from torch.nn.functional import rms_norm

from fenchel.model import ModelConfig
from fenchel.model.norm import RMSNorm, RMSNormPlusOne, norm


@pytest.fixture
def layer() -> RMSNorm:
    made = RMSNorm(7, eps=1e-2).double()
    with torch.no_grad():
        made.weight.copy_(torch.linspace(-1.0, 2.0, 7))
    return made


@pytest.fixture
def x() -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(2, 3, 7, dtype=torch.float64, generator=generator)


def test_it_divides_by_the_root_mean_square_and_gives_each_entry_its_gain(
    layer: RMSNorm, x: Tensor
) -> None:
    root = (x.square().sum(-1, keepdim=True) / 7 + 1e-2).sqrt()
    torch.testing.assert_close(layer(x), x / root * layer.weight)


def test_first_and_second_derivatives(layer: RMSNorm, x: Tensor) -> None:
    def f(x: Tensor, weight: Tensor) -> Tensor:
        return functional_call(layer, {"weight": weight}, (x,))  # type: ignore[no-any-return]

    inputs = (x.requires_grad_(), layer.weight.detach().requires_grad_())
    assert gradcheck(f, inputs, check_forward_ad=True, check_batched_grad=True)
    assert gradgradcheck(f, inputs)


def test_the_quick_derivative_of_training_is_the_one_that_can_be_differentiated(
    layer: RMSNorm, x: Tensor
) -> None:
    g = torch.linspace(-1.0, 1.0, x.numel(), dtype=torch.float64).view_as(x)
    inputs = (x.requires_grad_(), layer.weight)
    quick = torch.autograd.grad(layer(x), inputs, g)
    again = torch.autograd.grad(layer(x), inputs, g, create_graph=True)
    torch.testing.assert_close(quick, again)


def test_forward_and_reverse_agree_under_vmap(layer: RMSNorm, x: Tensor) -> None:
    torch.testing.assert_close(vmap(jacfwd(layer))(x), vmap(jacrev(layer))(x))
    torch.testing.assert_close(vmap(vmap(layer))(x), layer(x))


def test_it_is_torchs_in_float32_and_without_gradients(x: Tensor) -> None:
    layer = RMSNorm(7, eps=1e-5)
    x = x.float()
    theirs = rms_norm(x, (7,), layer.weight, 1e-5)
    torch.testing.assert_close(layer(x), theirs)
    with torch.no_grad():
        assert torch.equal(layer(x), layer(x.clone().requires_grad_()))
        torch.testing.assert_close(layer(x), theirs)


def test_half_precision_is_summed_in_float32() -> None:
    x = torch.full((2, 2048), 30.0, dtype=torch.float16)  # the sum of squares is above 65504
    torch.testing.assert_close(RMSNorm(2048, eps=1e-5).half()(x), torch.ones_like(x))


def test_a_row_of_zeros_stays_zero_with_a_finite_derivative(layer: RMSNorm) -> None:
    x = torch.zeros(1, 7, dtype=torch.float64, requires_grad=True)
    y = layer(x)
    (slope,) = torch.autograd.grad(y.sum(), x)
    assert not y.any()
    torch.testing.assert_close(slope, layer.weight[None] / 1e-2**0.5)


def test_the_settings_choose_the_norm_and_layer_norm_is_its_formula(x: Tensor) -> None:
    settings = ({"vocabulary": 9, "epsilon": 0.1, "norm": kind} for kind in ("rms", "layer"))
    rms, layer = (norm(ModelConfig(**each), 7).double() for each in settings)  # type: ignore[arg-type]
    assert isinstance(rms, RMSNorm)
    gain, shift = torch.linspace(-1.0, 2.0, 7).double(), torch.linspace(3.0, 1.0, 7).double()
    layer.load_state_dict({"weight": gain, "bias": shift})
    centred = x - x.mean(-1, keepdim=True)
    root = (centred.square().sum(-1, keepdim=True) / 7 + 0.1).sqrt()
    torch.testing.assert_close(layer(x), gain * centred / root + shift)


def test_a_gain_of_one_plus_weight_starts_at_one_and_has_the_same_derivatives(x: Tensor) -> None:
    shifted, plain = RMSNormPlusOne(7, eps=1e-2).double(), RMSNorm(7, eps=1e-2).double()
    assert torch.equal(shifted(x), plain(x))
    with torch.no_grad():
        shifted.weight.copy_(torch.linspace(-1.0, 2.0, 7))
        plain.weight.copy_(1.0 + shifted.weight)
    torch.testing.assert_close(shifted(x), plain(x))
    slopes = [
        torch.autograd.grad(m(x.requires_grad_()).sin().sum(), (x, m.weight))
        for m in (shifted, plain)
    ]
    torch.testing.assert_close(*slopes)


def test_layer_norm_forgets_a_shift_and_rms_norm_does_not(x: Tensor) -> None:
    layer, rms = (
        norm(ModelConfig(vocabulary=9, norm=kind, epsilon=1e-12), 7).double()
        for kind in ("layer", "rms")
    )
    torch.testing.assert_close(layer(3 * x + 5), layer(x))
    torch.testing.assert_close(rms(3 * x), rms(x))
    assert not torch.allclose(rms(x + 5), rms(x))
    y = norm(ModelConfig(vocabulary=9, norm="layer", epsilon=0.1), 7).double()(x)
    variance = x.var(-1, correction=0)
    torch.testing.assert_close(y.mean(-1), torch.zeros_like(y[..., 0]))
    torch.testing.assert_close(y.var(-1, correction=0), variance / (variance + 0.1))
    torch.testing.assert_close(layer(x).norm(dim=-1), torch.full_like(variance, 7**0.5))
    torch.testing.assert_close(layer(x)[1, 2], layer(x[1, 2]))  # whatever else is in the batch
