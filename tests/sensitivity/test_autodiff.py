"""fenchel/sensitivity/autodiff.py: the Jacobian of any function, of modules and of models."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.func import jacrev
from torch.nn.functional import scaled_dot_product_attention
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaModel

from fenchel.sensitivity import identity, jacobian, singular_values, spectral_norm

Draw = Callable[..., Tensor]


def test_it_is_the_derivative_that_jacrev_gives(draw: Draw) -> None:
    x, W = draw(3, 4), draw(4, 5)

    def f(x: Tensor) -> Tensor:
        return torch.softmax(x @ W, -1).cumsum(0)

    torch.testing.assert_close(jacobian(f, x).dense(), jacrev(f)(x).reshape(15, 12))


def test_fused_attention_has_both_directions_here(draw: Draw) -> None:
    q, k, v = draw(1, 2, 5, 4), draw(1, 2, 6, 4), draw(1, 2, 6, 4)
    with pytest.raises(NotImplementedError):  # the reason the plain back end is asked for
        torch.func.jvp(lambda q: scaled_dot_product_attention(q, k, v), (q,), (q,))
    J = jacobian(scaled_dot_product_attention, (q, k, v))
    u = draw(1, 2, 5, 4)
    back = J.T @ u
    torch.testing.assert_close(
        ((J @ (q, k, v)) * u).sum(),
        sum((a * b).sum() for a, b in zip((q, k, v), back, strict=True)),
    )


def test_leading_axes_may_be_operators_side_by_side(draw: Draw) -> None:
    x, W = draw(7, 3, 4), draw(4, 4)
    J = jacobian(lambda x: torch.tanh(x @ W).cumsum(1), x, batch=1)
    assert (J.batch, J.shape) == ((7,), (12, 12))
    alone = torch.stack([jacobian(lambda x: torch.tanh(x @ W).cumsum(0), y).dense() for y in x])
    torch.testing.assert_close(J.dense(), alone)


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_the_jacobian_of_a_hugging_face_model_is_by_its_embeddings(
    family: str, draw: Draw, generator: torch.Generator
) -> None:
    torch.manual_seed(0)
    if family == "gpt2":
        config = GPT2Config(vocab_size=11, n_positions=8, n_embd=8, n_layer=2, n_head=2)
        model = GPT2LMHeadModel(config).double().eval()
    else:
        config = LlamaConfig(
            vocab_size=11,
            hidden_size=8,
            intermediate_size=12,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
        )
        model = LlamaModel(config).double().eval()
    x = draw(1, 4, 8)
    J = jacobian(model, x)

    def f(x: Tensor) -> Tensor:
        y = model(inputs_embeds=x)
        return y.logits if family == "gpt2" else y.last_hidden_state

    # Reverse mode alone, for J v comes from forward mode; differences would not do, since
    # Llama's norm layers work in float32 whatever they are given.
    rows = torch.autograd.functional.jacobian(f, x).reshape(-1, x.numel())
    torch.testing.assert_close(J.dense(), rows, rtol=1e-5, atol=1e-6)
    bracket = spectral_norm(J, generator=generator)
    torch.testing.assert_close(bracket.lower, torch.linalg.matrix_norm(rows, 2), rtol=1e-5, atol=0)


def test_a_residual_branch_alone_and_beside_its_skip(draw: Draw) -> None:
    branch = nn.Sequential(nn.LayerNorm(6), nn.Linear(6, 9), nn.GELU(), nn.Linear(9, 6)).double()
    x = draw(4, 6)
    J = jacobian(branch, x)
    alone, beside = singular_values(J, 3).values, singular_values(identity(x) + J, 3).values
    torch.testing.assert_close(alone, torch.linalg.svdvals(J.dense())[:3])
    both = jacrev(lambda x: x + branch(x))(x).reshape(24, 24)
    torch.testing.assert_close(beside, torch.linalg.svdvals(both)[:3])


def test_what_has_no_derivative_is_refused_in_one_sentence(draw: Draw) -> None:
    with pytest.raises(ValueError, match="floating point"):
        jacobian(torch.sin, torch.arange(3))
    with pytest.raises(ValueError, match="finite"):
        jacobian(torch.sin, torch.tensor([1.0, torch.nan]))
    with pytest.raises(ValueError, match=r"f\.eval\(\)"):
        jacobian(nn.Sequential(nn.Dropout(0.5)), draw(3))
    with pytest.raises(ValueError, match="must give a tensor"):
        jacobian(lambda x: {"other": x}, draw(3))
    with pytest.raises(ValueError, match="by itself"):
        jacobian(lambda x: x.sum(0), draw(3, 4), batch=1)
