"""fenchel/attention/derivative.py: the map of the notes, in its several written forms."""

import pytest
import torch
from torch import Tensor

from fenchel.attention import Causal, attend_jvp, self_attention, self_attention_vjp
from fenchel.choice import Entmax, Softmax

N, M, D, E = 6, 4, 3, 5


@pytest.fixture
def layer(draw) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return draw(N, M), draw(M, D), draw(M, D), draw(M, E)


def test_it_is_the_short_form_with_the_head_width_under_the_root(layer) -> None:
    X, W_Q, W_K, W_V = layer
    att = self_attention(X, W_Q, W_K, W_V)
    A = W_Q @ W_K.mT / D**0.5
    P = X @ A @ X.mT
    torch.testing.assert_close(att, torch.softmax(P, -1) @ X @ W_V)
    wrong = torch.softmax(P * (D / M) ** 0.5, -1) @ X @ W_V
    assert (att - wrong).abs().max() > 0.01
    for i in range(N):  # row i is sigma(P^T e_i)^T X W_V
        torch.testing.assert_close(att[i], torch.softmax(P.mT[:, i], 0) @ X @ W_V)


def test_token_by_token_gives_the_whole(layer) -> None:
    X, W_Q, W_K, W_V = layer
    whole = self_attention(X, W_Q, W_K, W_V, prior=Causal())
    for t in range(N):
        torch.testing.assert_close(
            self_attention(X[: t + 1], W_Q, W_K, W_V, prior=Causal())[-1], whole[t]
        )


@pytest.mark.parametrize("choice", [Softmax(), Entmax(1.5)], ids=repr)
def test_without_positions_a_permutation_passes_through(layer, choice) -> None:
    X, *W = layer
    order = torch.tensor([3, 0, 5, 1, 4, 2])
    moved = self_attention(X[order], *W, choice=choice)
    torch.testing.assert_close(moved, self_attention(X, *W, choice=choice)[order])
    causal = self_attention(X[order], *W, choice=choice, prior=Causal())
    assert (causal - self_attention(X, *W, choice=choice, prior=Causal())[order]).abs().max() > 0.1


def test_the_total_derivative_of_the_notes(layer, draw) -> None:
    X, W_Q, W_K, W_V = layer
    Xt = draw(N, M)
    _, tangent = torch.func.jvp(lambda X: self_attention(X, W_Q, W_K, W_V), (X,), (Xt,))
    A = W_Q @ W_K.mT / D**0.5
    p = torch.softmax(X @ A @ X.mT, -1)
    slope = Xt @ A @ X.mT + X @ A @ Xt.mT
    rows = [(torch.diag(p[i]) - torch.outer(p[i], p[i])) @ slope[i] for i in range(N)]
    torch.testing.assert_close(torch.stack(rows) @ X @ W_V + p @ Xt @ W_V, tangent)
    move = attend_jvp(
        tuple(X @ W for W in (W_Q, W_K, W_V)),
        tuple(Xt @ W for W in (W_Q, W_K, W_V)),
        choice=Softmax(),
    )
    torch.testing.assert_close(move.total, tangent)
    torch.testing.assert_close(move.values, p @ Xt @ W_V)


def test_at_scores_of_zero_rows_are_even_and_the_slope_is_the_centring() -> None:
    z = torch.zeros(N, dtype=torch.float64)
    J = torch.func.jacfwd(Softmax().weights)(z)
    torch.testing.assert_close(Softmax().weights(z), torch.full_like(z, 1 / N))
    torch.testing.assert_close(J, torch.eye(N).double() / N - 1 / N**2)


@pytest.mark.parametrize("choice", [Softmax(), Entmax(1.5)], ids=repr)
@pytest.mark.parametrize("batch", [(), (2,), (2, 3)], ids=str)
def test_the_written_gradients_of_a_layer_are_those_of_autograd(draw, choice, batch) -> None:
    X, W_Q, W_K, W_V = draw(*batch, N, M), draw(M, D), draw(M, D), draw(M, E)
    R = draw(*batch, N, E)
    variables = [x.requires_grad_() for x in (X, W_Q, W_K, W_V)]
    value = (R * self_attention(*variables, choice=choice, prior=Causal())).sum()
    ours = self_attention_vjp(*variables, R, choice=choice, prior=Causal())
    torch.testing.assert_close(tuple(ours), torch.autograd.grad(value, variables))
