"""fenchel/train/step.py: the place that is named is the place that broke."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from fenchel.model import ModelConfig, Transformer
from fenchel.torch_internals import has_forward_hooks
from fenchel.train.loss import total_loss
from fenchel.train.step import first_broken

IDS = torch.arange(12).view(2, 6)
NAN = float("nan")


@pytest.fixture
def model() -> Transformer:
    """Three layers whose branches are not zero, so that whatever breaks spreads."""
    config = ModelConfig(vocabulary=13, context=6, width=8, layers=3, heads=2)
    model = Transformer(config, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        for name, p in model.named_parameters():
            if name.endswith(("out.weight", "down.weight")):
                p.normal_(generator=torch.Generator().manual_seed(1))
    return model


def told(model: nn.Module) -> str:
    """What is said of a step on IDS."""
    loss = total_loss(model(IDS), IDS)
    loss.backward()
    return first_broken(model, lambda: model(IDS), loss)


def spoil(_module: nn.Module, _given: object, output: Tensor) -> Tensor:
    return torch.where(torch.arange(output.shape[-1]) == 3, torch.inf, output)


@pytest.mark.parametrize(
    "name",
    ["embed", "blocks.0.attention.qkv", "blocks.1.mlp.up", "blocks.2.mlp_norm", "norm"],
)
def test_a_module_that_gives_infinity_is_named_and_not_those_it_spoils(
    model: Transformer, name: str
) -> None:
    model.get_submodule(name).register_forward_hook(spoil)
    assert told(model) == f"the output of {name} is the first that is not finite"


def test_a_value_broken_between_modules_is_named_by_its_receiver(
    model: Transformer, monkeypatch: pytest.MonkeyPatch
) -> None:
    attention = model.blocks[1].attention

    class Broken(type(attention.fixed_choice)):
        def weights(self, z: Tensor, *args: object, **others: object) -> Tensor:
            return super().weights(z, *args, **others) * NAN

    monkeypatch.setattr(attention, "fixed_choice", Broken())
    says = "the input of blocks.1.attention.out is the first that is not finite"
    assert told(model) == says


def test_logits_that_overflow_are_the_output_of_the_model(model: Transformer) -> None:
    with torch.no_grad():
        model.norm.weight.fill_(1e30)
        model.embed.weight.mul_(1e15)
    assert told(model) == "the output of the model is the first that is not finite"


@pytest.mark.parametrize(
    ("module", "first"),
    [
        ("blocks.1.mlp", "blocks.1.mlp_norm.weight"),
        ("blocks.2.attention", "blocks.2.attention_norm.weight"),
        ("blocks.0", "embed.weight"),
    ],
)
def test_a_backward_pass_that_breaks_is_named_where_it_broke(
    model: Transformer, module: str, first: str
) -> None:
    """The gradient handed on by ``module`` is nan: what stands before it is the first to get it."""

    def hand_on(_module: nn.Module, given: tuple[Tensor, ...], _got: object) -> tuple[object, ...]:
        return (given[0] * NAN, *given[1:])

    model.get_submodule(module).register_full_backward_hook(hand_on)
    assert told(model) == f"the gradient of {first} is the first that is not finite"


def test_one_broken_gradient_is_named_alone(model: Transformer) -> None:
    model.blocks[1].attention.qkv.weight.register_hook(lambda g: g * NAN)
    says = "the gradient of blocks.1.attention.qkv.weight is the first that is not finite"
    assert told(model) == says


def test_weights_come_before_what_they_spoil(model: Transformer) -> None:
    with torch.no_grad():
        model.blocks[2].mlp.up.weight[0, 0] = torch.inf
    assert told(model) == "the weights blocks.2.mlp.up.weight are not finite"


def test_an_infinite_loss_comes_before_the_gradients_it_spoils(model: Transformer) -> None:
    total_loss(model(IDS), IDS).backward()
    says = "the loss is the first that is not finite"
    assert first_broken(model, lambda: model(IDS), float("inf")) == says
    model.embed.weight.grad.fill_(NAN)
    assert first_broken(model, lambda: model(IDS), NAN) == says
    assert "the gradient of embed.weight" in first_broken(model, lambda: model(IDS), 1.0)


def test_a_finite_gradient_with_an_infinite_norm_is_named(model: Transformer) -> None:
    for p in model.parameters():
        p.grad = torch.full_like(p, 1e30)
    says = "the gradient is finite and too large for its norm to be"
    assert first_broken(model, lambda: model(IDS), 1.0) == says


def test_looking_leaves_no_hook_behind_even_when_the_model_raises(model: Transformer) -> None:
    def fail() -> object:
        raise RuntimeError("no memory")

    forward: Callable[[], object] = fail
    with pytest.raises(RuntimeError, match="no memory"):
        first_broken(model, forward, 1.0)
    assert not any(map(has_forward_hooks, model.modules()))
