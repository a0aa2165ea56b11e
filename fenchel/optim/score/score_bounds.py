"""Bounds for score descent: the bilinear remainder, the length of a step, the raw gradient.

J and R are the linear and bilinear parts of dS (exact_step.py), s the smallest non-zero and
s_max the largest singular value of J, for one sequence without a mask.

1. When is R negligible? It is O(|dW_Q| |dW_K|), and o(|dS|) only where |dS| >= s |dW|: not along
   gauge moves, where J = 0 and R need not vanish, but orthogonally to them. There

       |R| <= |X|_2^2 |dW_Q| |dW_K| <= |X|_2^2 gamma^2 / (2 s^2),       gamma = |J(dW)|,

   which covers the raw step and, after ``remove_gauge``, every other.

2. How small must gamma be? If the loss is b-smooth in S, a step with dS* = -gamma Pi(G)/|Pi(G)| has

       decrease >= gamma |Pi(G)| - b gamma^2 / 2,

   positive for gamma < 2 |Pi(G)| / b and largest at gamma = |Pi(G)| / b; and gamma <= 2 tau s^2 /
   |X|_2^2 keeps |R| below the share tau of gamma.

3. The dimension of the reachable dS is r_Q r + r r_K - r_Q r_K with r, r_Q, r_K the ranks
   of X, Q, K (k (2 r - k) at full rank), and the raw step attains at least the share

       2 sqrt(kappa) / (1 + kappa),        kappa = (s_max / s)^2,

   of the best <G, dS> at equal |dS| (Kantorovich's inequality for J J^T on its range).

For the lesson "Score-space descent", which is planned; no command uses it.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from fenchel.optim.score.exact_step import ScoreMap, exact


class ScoreSpectrum(NamedTuple):
    """Extreme singular values of J: how far a unit move of the weights moves the scores."""

    smallest: float
    """Over moves orthogonal to the gauge; 0 when J = 0."""
    largest: float
    rank: int


class GammaBounds(NamedTuple):
    """Lengths of a score step, with what each guarantees."""

    best: float
    """Maximises the guaranteed decrease of a b-smooth loss."""
    largest: float
    """Below it a b-smooth loss decreases."""
    bilinear: float
    """Up to it the bilinear part is at most the share tau of the step."""


@torch.no_grad()
def score_spectrum(X: Tensor, W_Q: Tensor, W_K: Tensor) -> ScoreSpectrum:
    """Extreme singular values and rank of J for X (n, d); dense in (2 d k)^2, for small sizes.

    >>> import torch
    >>> score_spectrum(torch.eye(2), torch.eye(2), torch.eye(2))
    ScoreSpectrum(smallest=1.4142135623730951, largest=1.4142135623730951, rank=4)
    """
    X, W_Q, W_K = X.double(), W_Q.double(), W_K.double()
    rank = reachable_rank(X, W_Q, W_K)
    if rank == 0:
        return ScoreSpectrum(0.0, 0.0, 0)
    C = X.mT @ X
    CQ, CK = C @ W_Q, C @ W_K
    size = W_Q.numel()
    cross = torch.einsum("ib,ja->iajb", CQ, CK).reshape(size, size)
    gram = torch.cat(
        (
            torch.cat((torch.kron(C, W_K.mT @ CK), cross), dim=1),
            torch.cat((cross.mT, torch.kron(C, W_Q.mT @ CQ)), dim=1),
        )
    )
    squares = torch.linalg.eigvalsh(gram).clamp(min=0.0)
    return ScoreSpectrum(float(squares[-rank].sqrt()), float(squares[-1].sqrt()), rank)


def reachable_rank(X: Tensor, W_Q: Tensor, W_K: Tensor) -> int:
    """The dimension of the set of dS that the weights can reach to first order.

    >>> import torch
    >>> X, W = torch.eye(3), torch.eye(3)[:, :2]
    >>> reachable_rank(X, W, W)  # of the 9 entries of dS
    8
    """
    r, r_Q, r_K = (int(torch.linalg.matrix_rank(M)) for M in (X, X @ W_Q, X @ W_K))
    return r_Q * r + r * r_K - r_Q * r_K


def efficiency_lower(X: Tensor, W_Q: Tensor, W_K: Tensor) -> float:
    """A lower bound on the share of the best <G, dS> that the raw step attains, for any G.

    >>> import torch
    >>> X, W = torch.eye(3), torch.eye(3)[:, :2]
    >>> round(efficiency_lower(X, W, W), 4)
    0.9428
    """
    s, s_max, _ = score_spectrum(X, W_Q, W_K)
    if s == 0.0:
        return 0.0
    kappa = (s_max / s) ** 2
    return float(2.0 * kappa**0.5 / (1.0 + kappa))


def remainder_upper(X: Tensor, W_Q: Tensor, W_K: Tensor, gamma: float) -> float:
    """An upper bound on |R| of a gauge-free move with |J| = gamma; inf when J = 0.

    >>> import torch
    >>> X, W = torch.eye(3), torch.eye(3)[:, :2]
    >>> round(remainder_upper(X, W, W, gamma=0.1), 6)
    0.005
    """
    s = score_spectrum(X, W_Q, W_K).smallest
    if s == 0.0:
        return float("inf")
    return float(torch.linalg.matrix_norm(X.double(), 2)) ** 2 * gamma**2 / (2.0 * s**2)


def reachable_gradient(X: Tensor, W_Q: Tensor, W_K: Tensor, G: Tensor) -> Tensor:
    """Pi(G), the projection of G (n, n) onto the reachable score changes.

    >>> import torch
    >>> X, W = torch.eye(3), torch.eye(3)[:, :2]
    >>> round(float(reachable_gradient(X, W, W, torch.ones(3, 3)).norm()), 4)  # sqrt(8), |G| = 3
    2.8284
    """
    X, W_Q, W_K, G = (M.double() for M in (X, W_Q, W_K, G))
    scores = ScoreMap(X[None], W_Q, W_K)
    return -scores.linear(exact(scores, G[None], 0.0))[0]


def gamma_bounds(
    X: Tensor, W_Q: Tensor, W_K: Tensor, G: Tensor, *, smoothness: float, tau: float = 0.1
) -> GammaBounds:
    """Lengths gamma for a loss with |grad L(S) - grad L(S')| <= smoothness |S - S'|.

    >>> import torch
    >>> X, W = torch.eye(3), torch.eye(3)[:, :2]
    >>> round(gamma_bounds(X, W, W, torch.ones(3, 3), smoothness=1.0).best, 4)
    2.8284
    """
    if not smoothness > 0.0 or not tau > 0.0:
        raise ValueError(f"smoothness={smoothness} and tau={tau} should be above 0.")
    slope = float(reachable_gradient(X, W_Q, W_K, G).norm())
    s = score_spectrum(X, W_Q, W_K).smallest
    spread = float(torch.linalg.matrix_norm(X.double(), 2)) ** 2
    bilinear = 2.0 * tau * s**2 / spread if spread else float("inf")
    return GammaBounds(slope / smoothness, 2.0 * slope / smoothness, bilinear)


def decrease_lower(slope: float, smoothness: float, gamma: float) -> float:
    """A lower bound on the decrease of the loss, for slope = |Pi(G)| and |dS| = gamma.

    >>> decrease_lower(slope=2.0, smoothness=1.0, gamma=0.5)
    0.875
    """
    return gamma * slope - 0.5 * smoothness * gamma**2
