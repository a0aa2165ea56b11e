"""fenchel/sensitivity/finite_difference.py: what a first-order expansion leaves out."""

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import relu

from fenchel.attention import attend_vjp, self_attention
from fenchel.choice import Choice, Entmax, Softmax
from fenchel.sensitivity import jacobian, remainder

Draw = Callable[..., Tensor]


def test_the_remainder_of_a_smooth_function_has_slope_two(draw: Draw) -> None:
    W = [draw(4, 4) for _ in range(3)]
    for choice in (Softmax(), Entmax(1.5)):

        def f(X: Tensor, choice: Choice = choice) -> Tensor:
            return self_attention(X, *W, choice=choice)

        found = remainder(f, draw(5, 4), 0.1 * draw(5, 4))
        assert abs(found.slope - 2.0) < 0.1
        assert (found.error.diff() < 0).all()


def test_a_wrong_derivative_shows_as_slope_one(draw: Draw) -> None:
    X, d = draw(5), draw(5)
    wrong = jacobian(torch.cos, X)
    assert abs(remainder(torch.sin, X, d, J=wrong).slope - 1.0) < 0.1


def test_the_loss_of_attention_expands_along_its_scores(draw: Draw) -> None:
    # L(S + dS) = L(S) + <G, dS> + o(|dS|), and rows of G sum to zero.
    q, k, v, target = draw(1, 1, 5, 3), draw(1, 1, 6, 3), draw(1, 1, 6, 4), draw(5, 4)

    def loss(S: Tensor) -> Tensor:
        return (0.5 * (S.softmax(-1) @ v[0, 0] - target).square()).sum()

    S = (q @ k.mT / 3**0.5)[0, 0]
    g = (S.softmax(-1) @ v[0, 0] - target)[None, None]
    G = attend_vjp((q, k, v), g, choice=Softmax()).scores[0, 0]
    torch.testing.assert_close(G, torch.func.grad(loss)(S))
    torch.testing.assert_close(G.sum(-1), torch.zeros(5, dtype=torch.float64))
    assert abs(remainder(loss, S, draw(5, 6)).slope - 2.0) < 0.1


def test_a_linear_function_leaves_nothing_and_a_kink_more(draw: Draw) -> None:
    assert math.isnan(remainder(lambda x: 3 * x, draw(4), draw(4)).slope)
    kink = remainder(relu, torch.zeros(1).double(), torch.ones(1).double())
    assert abs(kink.slope - 1.0) < 0.1
