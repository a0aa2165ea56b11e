"""Directions in which the scores descend: four answers to one question.

    minimise <G, J(dW)>   subject to  |J(dW)| <= gamma          (|.| Frobenius, J in operator.py)

With T = X^T G X the gradients are T W_K and T^T W_Q. Only the direction is found here; step.py
gives it its length. M+ is the pseudo-inverse, Q = X W_Q, K = X W_K.

    raw        dW_Q = -T W_K,  dW_K = -T^T W_Q. Steepest for |dW|, not for |dS|.

    exact      One sequence, no mask. The reachable dS are Q B^T + A K^T with the columns of A and
               B in those of X; the best one is -Pi(G) up to length,
                   Pi(G) = P_Q G P_X + P_X G P_K - P_Q G P_K,
               P projecting onto the columns of Q, X, K. The weights that give it, each taking
               half of the part that both reach:
                   dW_Q = -(X+ - W_Q Q+ / 2) G   (K+)^T
                   dW_K = -(X+ - W_K K+ / 2) G^T (Q+)^T

    spectral   Each half by itself, its score change bounded in the spectral norm instead:
               with E_M E_M^T = (M^T M)+ and polar(U s V^T) = U V^T,
                   dW_Q = -E_X polar(E_X^T T W_K E_K) E_K^T,   dW_K likewise with T^T W_Q, E_Q.

    cg         Batches and masks: no closed form, so conjugate gradients on the normal equations
               J^T J dW = -J^T G, in the coordinates dW_Q = E_X A E_K^T, dW_K = E_X B E_Q^T. They
               make J nearly an isometry, and the answer the one that is smallest in them.

exact, spectral and cg are covariant: (W_Q A, W_K A^-T) or (X B, B^-1 W) for invertible A and B
lead to the same dS, the second-order part included. damping adds that share of the mean square
singular value to the squares of all of them, in X, Q and K alike.
"""

import torch
from torch import Tensor

from fenchel.optim.score.operator import ScoreMap, Weights

SMALLEST = 1e-12
"""Singular values below this share of the largest count as zero."""


def raw(scores: ScoreMap, G: Tensor, damping: float) -> Weights:
    """The plain negative gradient."""
    if damping:
        raise ValueError(f'solver="raw" solves nothing to damp; got damping={damping}, give 0.')
    gradient = scores.adjoint(G)
    return Weights(-gradient.Q, -gradient.K)


def exact(scores: ScoreMap, G: Tensor, damping: float) -> Weights:
    """The closed form for one sequence."""
    if len(scores.X) != 1 or scores.mask is not None:
        raise ValueError(
            'solver="exact" has a closed form for one sequence without a mask; '
            'use solver="cg" for batches and masks.'
        )
    X_, Q_, K_ = (pseudo_inverse(M[0], damping) for M in (scores.X, scores.Q, scores.K))
    dW_Q = -(X_ - 0.5 * scores.W_Q @ Q_) @ G[0] @ K_.mT
    dW_K = -(X_ - 0.5 * scores.W_K @ K_) @ G[0].mT @ Q_.mT
    return Weights(dW_Q, dW_K)


def spectral(scores: ScoreMap, G: Tensor, damping: float) -> Weights:
    """Each half steepest in the spectral norm of its own score change."""
    E_X, E_Q, E_K = whitening(scores, damping)
    gradient = scores.adjoint(G)
    A, B = polar(E_X.mT @ gradient.Q @ E_K), polar(E_X.mT @ gradient.K @ E_Q)
    return Weights(-E_X @ A @ E_K.mT, -E_X @ B @ E_Q.mT)


def cg(
    scores: ScoreMap,
    G: Tensor,
    damping: float,
    *,
    tolerance: float = 1e-12,
    iterations: int = 2000,
) -> Weights:
    """The least-squares solution of J dW = -G by conjugate gradients (CGLS)."""
    E_X, E_Q, E_K = whitening(scores, damping)

    def out(z: Weights) -> Weights:
        return Weights(E_X @ z.Q @ E_K.mT, E_X @ z.K @ E_Q.mT)

    def back(residual: Tensor) -> Tensor:
        g = scores.adjoint(residual)
        return torch.stack((E_X.mT @ g.Q @ E_K, E_X.mT @ g.K @ E_Q))

    residual = -scores.masked(G)
    descent = back(residual)
    z, direction = torch.zeros_like(descent), descent
    size = start = descent.square().sum()
    for _ in range(iterations):
        if size <= tolerance**2 * start:
            break
        image = scores.linear(out(Weights(*direction)))
        stride = size / (image.square().sum() + damping * direction.square().sum())
        z, residual = z + stride * direction, residual - stride * image
        descent = back(residual) - damping * z
        before, size = size, descent.square().sum()
        direction = descent + size / before * direction
    return out(Weights(*z))


def whitening(scores: ScoreMap, damping: float) -> tuple[Tensor, Tensor, Tensor]:
    """E_X (d, d), E_Q (k, k), E_K (k, k): X E_X has orthonormal columns, and zeros beyond its rank.

    All the sequences of a batch are stacked into one tall matrix.
    """
    E = [_half_inverse(M.flatten(0, 1), damping) for M in (scores.X, scores.Q, scores.K)]
    return E[0], E[1], E[2]


def pseudo_inverse(M: Tensor, damping: float) -> Tensor:
    """M+ of M (n, m), or (M^T M + l I)^-1 M^T with l the share ``damping`` of the mean of s^2."""
    U, s, Vh = torch.linalg.svd(M, full_matrices=False)
    inverse: Tensor = Vh.mT * (s * _damped_inverse(s, damping)) @ U.mT
    return inverse


def polar(M: Tensor) -> Tensor:
    """U V^T of M = U s V^T, without the directions in which M is zero."""
    U, s, Vh = torch.linalg.svd(M, full_matrices=False)
    factor: Tensor = U * (s > SMALLEST * s.amax()) @ Vh
    return factor


def _half_inverse(M: Tensor, damping: float) -> Tensor:
    _, s, Vh = torch.linalg.svd(M, full_matrices=False)
    E = Vh.mT * _damped_inverse(s, damping).sqrt()
    missing = M.shape[-1] - E.shape[-1]  # fewer rows than columns: pad with directions of size 0
    return torch.nn.functional.pad(E, (0, missing))


def _damped_inverse(s: Tensor, damping: float) -> Tensor:
    """1 / (s^2 + l), and 0 for singular values that are zero."""
    square = s.square()
    inverse = 1.0 / (square + damping * square.mean()).clamp(min=torch.finfo(s.dtype).tiny)
    return torch.where(s > SMALLEST * s.amax(), inverse, 0.0)
