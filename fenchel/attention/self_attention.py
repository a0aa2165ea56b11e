"""Self-attention as a map of one sequence X to another, and the ways back from it.

    q = X W_Q,   k = X W_K,   v = X W_V
    Att(X) = p(P) X W_V,      P = X A X^T,      A = W_Q W_K^T / sqrt(D)

X is (..., N, M), one row a token; W_Q and W_K are (M, D), W_V is (M, E). p acts on rows. The scale
belongs to the head width D, not to M.

For R of the shape of Att(X), the gradient of <R, Att(X)> follows from that of attention,

    gX = gq W_Q^T + gk W_K^T + gv W_V^T,     gW_Q = X^T gq,   gW_K = X^T gk,   gW_V = X^T gv
"""

from typing import NamedTuple

from torch import Tensor

from fenchel.attention.attend import attend
from fenchel.attention.derivative import attend_vjp
from fenchel.attention.prior import Prior
from fenchel.choice import Choice, Softmax

_SOFTMAX = Softmax()


class SelfGradients(NamedTuple):
    """Gradients of <R, Att(X)>, each of the shape of its variable."""

    X: Tensor
    W_Q: Tensor
    W_K: Tensor
    W_V: Tensor


def self_attention(
    X: Tensor,
    W_Q: Tensor,
    W_K: Tensor,
    W_V: Tensor,
    *,
    choice: Choice = _SOFTMAX,
    prior: Prior | None = None,
    scale: float | None = None,
    backend: str = "auto",
) -> Tensor:
    """Att(X): (..., N, M) -> (..., N, E); one head, so that a prior sees H = 1."""
    q, k, v = ((X @ W).unsqueeze(-3) for W in (W_Q, W_K, W_V))
    return attend(q, k, v, choice=choice, prior=prior, scale=scale, backend=backend).squeeze(-3)


def self_attention_vjp(
    X: Tensor,
    W_Q: Tensor,
    W_K: Tensor,
    W_V: Tensor,
    R: Tensor,
    *,
    choice: Choice = _SOFTMAX,
    prior: Prior | None = None,
    scale: float | None = None,
) -> SelfGradients:
    """The gradients of <R, Att(X)> in closed form; weights get the sum over leading axes."""
    qkv = ((X @ W_Q).unsqueeze(-3), (X @ W_K).unsqueeze(-3), (X @ W_V).unsqueeze(-3))
    back = attend_vjp(qkv, R.unsqueeze(-3), choice=choice, prior=prior, scale=scale)
    gq, gk, gv = (g.squeeze(-3) for g in (back.q, back.k, back.v))
    rows = X.flatten(0, -2)
    gW_Q, gW_K, gW_V = (rows.mT @ g.flatten(0, -2) for g in (gq, gk, gv))
    return SelfGradients(gq @ W_Q.mT + gk @ W_K.mT + gv @ W_V.mT, gW_Q, gW_K, gW_V)
