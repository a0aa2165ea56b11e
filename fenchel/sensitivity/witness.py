"""Inputs that attain a growth rate, so that no smaller rate is a bound.

``blowup``: self-attention has no Lipschitz constant on all of R^(n x M). Let A = scale W_Q W_K^T,
n >= 2, A != 0, W_V != 0. Put token i at 0 and the others at +t u and -t u. The scores of row i are
0 for any t, so its weights do not depend on t, and under a move w of only token i, row i moves by

    t^2 kappa (w^T A u) W_V^T u  +  p_ii W_V^T w,
    kappa = sum_j s_j e_j^2 - (sum_j s_j e_j)^2 / sum_j s_j

with e_j = +1, -1 or 0 and s the spread of row i's choice. Some u has both A u != 0 and
W_V^T u != 0, since two proper subspaces do not cover R^M. With w = A u / |A u| the leading constant
is kappa |A u| |W_V^T u|, and u is chosen to make it large. Other rows have scores of order
t^2 u^T A u; they saturate, and token i gets none of their weight - unless u^T A u = 0, when they
stay spread, add to the growth, and are counted. Exceptions, all of them: n = 1, A = 0, W_V = 0, or
a prior that leaves no row two keys; then Att is Lipschitz, and ``blowup`` raises with the reason.

``adversarial``: at tokens of length R the worst known inputs reach sqrt(n) through one column of P:

    minus    R (-u, u, ..., u)           u the eigenvector of the most negative u^T A u: a sink
    plus     R (u, u/2, ..., u/2)        u that of the most positive: peaks, then falls as n grows

Lesson: lipschitz. Proof and sources: docs/maths/sensitivity.md. Kim, Papamakarios and Mnih
(2021); Castin, Ablin and Peyre (2024).
"""

from typing import NamedTuple

import torch
from torch import Tensor

from fenchel.attention import AttentionSpec, Prior
from fenchel.attention.spec import SOFTMAX
from fenchel.choice import Choice
from fenchel.sensitivity.attention_jacobian import self_attention_jacobian
from fenchel.sensitivity.golub_kahan import spectral_norm
from fenchel.sensitivity.weight_blocks import curvature


class Witness(NamedTuple):
    """An input, a unit direction, and how fast the output moves along it."""

    X: Tensor
    direction: Tensor
    growth: float
    """|dAtt(X) direction| is growth * rate: exactly, or for ``blowup`` to leading order."""
    rate: float
    """scale^2 for ``blowup``, sqrt(n - 1) for ``adversarial``."""


def blowup(
    W_Q: Tensor,
    W_K: Tensor,
    W_V: Tensor,
    n: int,
    scale: float,
    *,
    choice: Choice = SOFTMAX,
    prior: Prior | None = None,
    score_scale: float | None = None,
) -> Witness:
    """X of n tokens of length ``scale`` and a direction whose growth is scale^2.

    ``growth`` is the exact leading constant: |dAtt(X) direction| = growth scale^2 + O(1).
    ``score_scale`` multiplies scores, 1 / sqrt(D) unless given.
    """
    A, V = _checked(W_Q, W_K, W_V, n, score_scale)
    log_prior = None if prior is None else prior.log(n, n, device=A.device, dtype=A.dtype)
    spread = curvature(choice, choice.weights(A.new_zeros(1, 1, n, n), log_prior)[0, 0])
    row = _row(spread)
    s = spread[row]
    e = _signs(s, row)
    kappa = float((s * e.square()).sum() - (s * e).sum().square() / s.sum())
    u = _direction(A, V)
    reach = A @ u
    w = reach / reach.norm()
    X = scale * e.unsqueeze(-1) * u
    direction = torch.zeros_like(X)
    direction[row] = w
    value = float((V.mT @ u).norm())
    squares = (kappa * float(reach.norm())) ** 2
    if float((u @ A @ u).abs()) <= 1e-12 * float(reach.norm()):
        squares += _spread_rows(spread, e, row, float(u @ A @ w))
    dtype = W_Q.dtype
    return Witness(X.to(dtype), direction.to(dtype), squares**0.5 * value, scale**2)


def adversarial(
    W_Q: Tensor,
    W_K: Tensor,
    W_V: Tensor,
    n: int,
    radius: float,
    *,
    family: str = "auto",
    choice: Choice = SOFTMAX,
    prior: Prior | None = None,
    score_scale: float | None = None,
    generator: torch.Generator | None = None,
) -> Witness:
    """n tokens of length at most ``radius`` in the worst known arrangement, and its top direction.

    ``family`` is "minus", "plus", or "auto": plus when its eigenvalue is 8 times as large.
    The attained norm is ``growth`` times sqrt(n - 1).
    """
    _checked(W_Q, W_K, W_V, n, score_scale)
    minus, plus = families(W_Q, W_K, n, radius)
    if family == "auto":
        values = torch.linalg.eigvalsh(_symmetric(W_Q, W_K))
        family = "plus" if values[-1] > -8.0 * values[0] else "minus"
    if family not in ("minus", "plus"):
        raise ValueError(f'a family is "minus", "plus" or "auto", got {family!r}.')
    X = (minus if family == "minus" else plus).to(W_Q)
    J = self_attention_jacobian(X, W_Q, W_K, W_V, choice=choice, prior=prior, scale=score_scale)
    bracket = spectral_norm(J, tol=1e-6, generator=generator)
    assert isinstance(bracket.right, Tensor)
    rate = (n - 1) ** 0.5
    return Witness(X, bracket.right, float(bracket.lower) / rate, rate)


def families(W_Q: Tensor, W_K: Tensor, n: int, radius: float) -> tuple[Tensor, Tensor]:
    """The two arrangements, minus and plus: (n, M) each."""
    vectors = torch.linalg.eigh(_symmetric(W_Q, W_K)).eigenvectors
    low, high = vectors[:, 0], vectors[:, -1]
    minus, plus = low.repeat(n, 1), 0.5 * high.repeat(n, 1)
    minus[0], plus[0] = -low, high
    return radius * minus, radius * plus


def _symmetric(W_Q: Tensor, W_K: Tensor) -> Tensor:
    A = W_Q.double() @ W_K.double().mT
    return 0.5 * (A + A.mT)


def _checked(
    W_Q: Tensor, W_K: Tensor, W_V: Tensor, n: int, score_scale: float | None
) -> tuple[Tensor, Tensor]:
    """A and W_V in float64; raises with the reason where Att is Lipschitz."""
    scale = AttentionSpec(scale=score_scale).scale_for(W_Q.shape[-1])
    A, V = scale * W_Q.double() @ W_K.double().mT, W_V.double()
    size = float(W_Q.double().norm() * W_K.double().norm() * abs(scale))
    why = None
    if n < 2:
        why = f"n = {n}: one token has all the weight, and Att(X) = X W_V is linear"
    elif float(A.norm()) <= 1e-14 * size:
        why = "W_Q W_K^T = 0: weights do not depend on X, and Att averages X W_V"
    elif float(V.norm()) == 0.0:
        why = "W_V = 0: Att is 0"
    if why is not None:
        raise ValueError(f"self-attention is Lipschitz here, so nothing blows up: {why}.")
    return A, V


def _row(s: Tensor) -> int:
    """The row that can move most, by the spreads of the choices where scores are 0: (n, n)."""
    off = s - s.diagonal().diag()  # token i itself stays at 0
    room = off.sum(-1) - _imbalance(off).square() / s.sum(-1).clamp(min=1e-300)
    best = int(room.argmax())
    if not float(room[best]) > 0.0:
        raise ValueError(
            "self-attention is Lipschitz here, so nothing blows up: no row spreads its choice "
            "over a second key when its scores are equal."
        )
    return best


def _imbalance(off: Tensor) -> Tensor:
    """|sum_j s_j e_j| per row for the signs of ``_signs``."""
    left = torch.zeros_like(off[:, 0])
    for column in off.sort(dim=-1, descending=True).values.unbind(-1):
        left = (left - column).abs()
    return left


def _signs(s: Tensor, row: int) -> Tensor:
    """+1 and -1 so that sum_j s_j e_j is small; 0 for token i and keys without weight."""
    e, left = torch.zeros_like(s), 0.0
    for j in s.argsort(descending=True, stable=True).tolist():
        if j != row and float(s[j]) > 0.0:
            e[j] = 1.0 if left <= 0.0 else -1.0
            left += float(s[j] * e[j])
    return e


def _direction(A: Tensor, V: Tensor) -> Tensor:
    """A unit u that makes |A u| |V^T u| large: ascent on both quadratic forms from a few starts."""
    G, F = A.mT @ A, V @ V.mT
    starts = [torch.linalg.eigh(Q).eigenvectors[:, -1] for Q in (G, F, G / G.norm() + F / F.norm())]
    starts += [starts[0] + starts[1], starts[0] - starts[1]]
    best: Tensor = starts[2]
    size = -1.0
    for u in starts:
        if float(u.norm()) < 1e-6:
            continue
        u = u / u.norm()
        for _ in range(50):
            a, b = u @ G @ u, u @ F @ u
            if min(float(a), float(b)) <= 0.0:
                break
            u = G @ u / a + F @ u / b  # the gradient of log a + log b
            u = u / u.norm()
        product = float((u @ G @ u) * (u @ F @ u))
        if product > size:
            best, size = u, product
    return best


def _spread_rows(s: Tensor, e: Tensor, row: int, turn: float) -> float:
    """sum over the other rows of their squared leading constants when u^T A u = 0."""
    mean = (s @ e) / s.sum(-1).clamp(min=1e-300)
    # Row j moves by s_ji (0 - mean_j) e_j (u^T A w) t^2 along W_V^T u.
    moves = s[:, row] * mean * e * turn
    moves[row] = 0.0
    return float(moves.square().sum())
