"""Bounds for score descent: the bilinear remainder, the length of a step, the raw gradient.

J and R are the linear and bilinear parts of dS (exact_step.py), s the smallest non-zero and
s_max the largest singular value of J, for one sequence without a mask.

    |R| <= |X|_2^2 gamma^2 / (2 s^2)                 of a move without gauge, gamma = |J(dW)|
    decrease >= gamma |Pi(G)| - b gamma^2 / 2        of a loss that is b-smooth in S
    |R| <= tau gamma                                 for gamma <= 2 tau s^2 / |X|_2^2
    rank J = r_Q r + r r_K - r_Q r_K                 r, r_Q, r_K the ranks of X, Q, K
    <G, dS_raw> / <G, dS*> >= 2 sqrt(kappa) / (1 + kappa),     kappa = (s_max / s)^2

docs/maths/score_descent.md derives them.

With X = U S V^T, J acts as (dA, dB) -> dA K^T + Q dB^T on A = S V^T W_Q = U^T Q and the same B, an
r^2 by 2 r k matrix, and its singular values are those of that matrix: a Gram matrix would square
their ratio. They are correct to rounding of the largest, which is subtracted from the smallest:
where nothing is left, s is 0. X has the rank r that matrix_rank gives it:
directions below max(n, d) eps |X|_2 count as absent.

The lesson score_descent uses it, and no command.
"""

import sys
from typing import NamedTuple

import torch
from torch import Tensor

from fenchel.optim.score.exact_step import ScoreMap, exact, raw


class ScoreSpectrum(NamedTuple):
    """Extreme singular values of J: how far a unit move of the weights moves the scores."""

    smallest: float
    """Over moves orthogonal to the gauge; 0 when J = 0, or when it is below rounding."""
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
    s, s_max, rank, rounding, unit = _spectrum(X, W_Q, W_K)
    return ScoreSpectrum(s * unit if s > rounding else 0.0, s_max * unit, rank)


class _Spectrum(NamedTuple):
    """The spectrum of J for X and W divided by their sizes."""

    s: float
    s_max: float
    rank: int
    rounding: float
    """How far s and s_max may be off."""
    unit: float
    """What they are to be multiplied by."""

    @property
    def least(self) -> float:
        """s, from below."""
        return max(0.0, self.s - self.rounding)


def _spectrum(X: Tensor, W_Q: Tensor, W_K: Tensor) -> _Spectrum:
    X, W_Q, W_K = X.double(), W_Q.double(), W_K.double()
    size_X, size_W = (max(float(A.abs().max()) for A in group) for group in ((X,), (W_Q, W_K)))
    if size_X == 0.0 or size_W == 0.0:
        return _Spectrum(0.0, 0.0, 0, 0.0, 1.0)
    X, W_Q, W_K = X / size_X, W_Q / size_W, W_K / size_W
    rank = reachable_rank(X, W_Q, W_K)
    if rank == 0:
        return _Spectrum(0.0, 0.0, 0, 0.0, 1.0)
    _, S, V = torch.linalg.svd(X, full_matrices=False)
    r = int(torch.linalg.matrix_rank(X))
    S, Q, K = S[:r], S[:r, None] * (V[:r] @ W_Q), S[:r, None] * (V[:r] @ W_K)
    eye = torch.eye(r, dtype=S.dtype, device=S.device)
    # Columns: dA, whose moves are diag(S) dA K^T, and dB, whose moves are Q (diag(S) dB)^T.
    moved = torch.cat(
        (
            torch.einsum("i,ia,jb->ijab", S, eye, K).reshape(r * r, -1),
            torch.einsum("j,ja,ib->ijab", S, eye, Q).reshape(r * r, -1),
        ),
        dim=1,
    )
    values = torch.linalg.svdvals(moved)
    # J is rounded, and so are its singular values, by the size of the largest.
    rounding = 8.0 * (sum(X.shape) + W_Q.shape[-1]) * torch.finfo(S.dtype).eps * float(values[0])
    unit = size_X * size_X * size_W
    return _Spectrum(float(values[rank - 1]), float(values[0]), rank, rounding, unit)


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
    found = _spectrum(X, W_Q, W_K)
    ratio = found.least / (found.s_max + found.rounding) if found.rank else 0.0
    return 2.0 * ratio / (1.0 + ratio * ratio) * (1.0 - 1e-15)


def remainder_upper(X: Tensor, W_Q: Tensor, W_K: Tensor, gamma: float) -> float:
    """An upper bound on |R| of a gauge-free move with |J| = gamma; inf when J = 0.

    >>> import torch
    >>> X, W = torch.eye(3), torch.eye(3)[:, :2]
    >>> round(remainder_upper(X, W, W, gamma=0.1), 6)
    0.005
    """
    gain = _least_gain(X, W_Q, W_K)
    length = gamma / gain if gain > 0.0 else float("inf")
    return 0.5 * length * length * (1.0 + 1e-12)


def _least_gain(X: Tensor, W_Q: Tensor, W_K: Tensor) -> float:
    """s / |X|_2, from below."""
    found = _spectrum(X, W_Q, W_K)
    size = float(torch.linalg.matrix_norm(X.double(), 2))
    return found.least * (found.unit / size) * (1.0 - 1e-12) if size > 0.0 else 0.0


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


def efficiency(X: Tensor, W_Q: Tensor, W_K: Tensor, G: Tensor) -> float:
    """The share of the best <G, dS> that the raw step attains at equal |dS|, to first order.

    >>> import torch
    >>> X, W = torch.eye(3), torch.eye(3)[:, :2]
    >>> round(efficiency(X, W, W, torch.ones(3, 3)), 4)
    0.9487
    """
    X, W_Q, W_K, G = (M.double() for M in (X, W_Q, W_K, G))
    scores = ScoreMap(X[None], W_Q, W_K)
    dS = scores.linear(raw(scores, G[None], 0.0))[0]
    best = reachable_gradient(X, W_Q, W_K, G).norm()
    return float(-(G * dS).sum() / (dS.norm() * best))


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
    bilinear = 2.0 * tau * _least_gain(X, W_Q, W_K) ** 2 if bool(X.any()) else float("inf")
    return GammaBounds(slope / smoothness, 2.0 * slope / smoothness, bilinear)


def decrease_lower(slope: float, smoothness: float, gamma: float) -> float:
    """A lower bound on the decrease of the loss, for slope = |Pi(G)| and |dS| = gamma.

    >>> round(decrease_lower(slope=2.0, smoothness=1.0, gamma=0.5), 6)
    0.875
    """
    decrease = gamma * slope - 0.5 * smoothness * gamma * gamma
    rounding = 8.0 * sys.float_info.epsilon * (gamma * slope + smoothness * gamma * gamma)
    return decrease - rounding
