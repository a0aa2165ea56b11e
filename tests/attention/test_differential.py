"""fenchel/attention/differential.py: the difference of two choices, written out."""

import pytest
import torch
from torch import Tensor
from torch.func import jvp

from fenchel.attention import Causal, attend, differential_attend
from fenchel.choice import Choice, Entmax, Softmax

WEIGHTS = {"number": (), "per head": (4,), "per query": (2, 4, 5)}


def by_hand(q: Tensor, k: Tensor, v: Tensor, weight: Tensor, choice: Choice) -> Tensor:
    k, v = (x.repeat_interleave(2, 1) for x in (k, v))  # one per output head
    log_u = Causal().log(5, 5, dtype=q.dtype)
    p, other = (
        choice.weights(q[:, start::2] @ k.mT / q.shape[-1] ** 0.5, log_u) for start in (0, 1)
    )
    wide = weight.view(-1, 1, 1) if weight.dim() == 1 else weight.unsqueeze(-1)
    return (p - (wide if weight.dim() else weight) * other) @ v


@pytest.mark.parametrize("shape", WEIGHTS.values(), ids=WEIGHTS.keys())
@pytest.mark.parametrize("choice", [Softmax(1.3), Entmax(1.5)], ids=repr)
def test_values_and_derivatives_both_ways(choice: Choice, shape: tuple[int, ...], draw) -> None:
    at = tuple(draw(*size) for size in ((2, 8, 5, 6), (2, 2, 5, 6), (2, 2, 5, 3), shape))

    def ours(q: Tensor, k: Tensor, v: Tensor, weight: Tensor) -> Tensor:
        return differential_attend(q, k, v, weight, choice=choice, prior=Causal())

    def exact(*x: Tensor) -> Tensor:
        return by_hand(*x, choice)

    torch.testing.assert_close(ours(*at), exact(*at), atol=1e-7, rtol=1e-7)
    moves = tuple(torch.linspace(-1, 1, x.numel(), dtype=x.dtype).view_as(x) for x in at)
    torch.testing.assert_close(
        jvp(ours, at, moves)[1], jvp(exact, at, moves)[1], atol=1e-6, rtol=1e-6
    )
    learn = [x.requires_grad_() for x in at]
    slopes = [torch.autograd.grad(f(*learn).square().sum(), learn) for f in (ours, exact)]
    torch.testing.assert_close(*slopes, atol=1e-6, rtol=1e-6)


def test_without_the_second_choice_it_is_attention(draw) -> None:
    q, k, v = draw(1, 4, 5, 6), draw(1, 1, 5, 6), draw(1, 1, 5, 3)
    ours = differential_attend(q, k, v, 0.0, sink=0.3)
    torch.testing.assert_close(ours, attend(q[:, ::2], k, v, sink=0.3))


def test_bad_input_gets_one_sentence(draw) -> None:
    q, k = draw(1, 6, 3, 4), draw(1, 2, 3, 4)
    with pytest.raises(ValueError, match="two query heads for every output head"):
        differential_attend(q, k, k, 0.5)
    with pytest.raises(ValueError, match="two weights per key"):
        differential_attend(q, k[:, :1], k[:, :1], 0.5, return_weights=True)
