"""The step of query and key weights that lowers a loss most for a given change of the scores.

    minimise <G, dS>   subject to  |dS| <= gamma,      S = mask * (X W_Q W_K^T X^T),  G = dL/dS

over the dS that some (dW_Q, dW_K) produces; |.| is the Frobenius norm over the entries of the mask.
S has no factor 1/sqrt(k): a gradient in the scaled scores must be multiplied by that factor.
``score_step`` computes the step in three stages.

**1. The linear map.** With Q = X W_Q, K = X W_K, exactly

    dS       = J(dW_Q, dW_K) + R(dW_Q, dW_K)
    J        = mask * (X dW_Q K^T + Q dW_K^T X^T)
    R        = mask * (X dW_Q dW_K^T X^T)                    O(|dW_Q| |dW_K|)
    J^T(G)   = (sum_b X^T G K,  sum_b X^T G^T Q)             the gradients in W_Q and W_K

so that <G, J(dW)> = <J^T(G), dW> (``ScoreMap``). The sequences of a batch share the weights: J maps
into all their scores at once. Entries off the mask are part of no score, norm or product.

**2. The direction**, from one of four solvers. With T = X^T G X the gradients are T W_K and
T^T W_Q; M+ is the pseudo-inverse.

    raw        dW_Q = -T W_K,  dW_K = -T^T W_Q. Steepest for |dW|, not for |dS|.

    exact      One sequence, no mask: dS = -Pi(G) up to length, the projection of G onto the
               reachable dS, each half taking half of the part that both reach.
                   dW_Q = -(X+ - W_Q Q+ / 2) G   (K+)^T
                   dW_K = -(X+ - W_K K+ / 2) G^T (Q+)^T

    spectral   Each half by itself, its score change bounded in the spectral norm instead:
               with E_M E_M^T = (M^T M)+ and polar(U s V^T) = U V^T,
                   dW_Q = -E_X polar(E_X^T T W_K E_K) E_K^T,   dW_K likewise with T^T W_Q, E_Q.

    cg         Batches and masks: no closed form, so conjugate gradients on the normal equations
               J^T J dW = -J^T G, in the coordinates dW_Q = E_X A E_K^T, dW_K = E_X B E_Q^T. They
               make J nearly an isometry, and the solution is the smallest one in them.

exact, spectral and cg are covariant: (W_Q A, W_K A^-T) or (X B, B^-1 W) for invertible A and B
lead to the same dS, the second-order part included. damping adds that share of the mean squared
singular value to all squared singular values, in each of X, Q and K.

*Gauge.* For any M (k, k) the move (W_Q M, -W_K M^T) changes no score to first order.
``remove_gauge`` adds the one that leaves the shortest move, with M from the Sylvester equation

    (W_Q^T W_Q) M + M (W_K^T W_K) = dW_K^T W_K - W_Q^T dW_Q,

solved in the eigenvectors of the two Grams.

**3. The length.** Along a direction U the scores move exactly by

    dS(t) = t J(U) + t^2 R(U),      |dS(t)|^2 = t^2 (a + 2 b t + c t^2),
    a = |J|^2,  b = <J, R>,  c = |R|^2,

and t is the smallest positive root of |dS(t)| = gamma, so gamma is the length of the finite change,
second-order part included. For gamma -> 0 it is gamma / |J(U)|, the linear rule.

The step is zero where T W_K and T^T W_Q both vanish; ``Step.summary`` gives this reason.

Derivations: docs/maths/score_descent.md. Lesson: score_descent. ScoreDescent is its batched,
approximate form.

Shapes: X (B, n, d), W_Q and W_K (d, k), scores (B, n, n).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor


class WeightMove(NamedTuple):
    """A move of both weights, or the gradient in both: (d, k) each."""

    Q: Tensor
    K: Tensor


@dataclass(frozen=True, eq=False)
class ScoreMap:
    """The scores of sequences X as a function of the weights, linearised at W_Q and W_K."""

    X: Tensor
    W_Q: Tensor
    W_K: Tensor
    mask: Tensor | None = None
    """True where a query may attend to a key; broadcasts to (B, n, n)."""

    @cached_property
    def Q(self) -> Tensor:
        """Queries, (B, n, k)."""
        return self.X @ self.W_Q

    @cached_property
    def K(self) -> Tensor:
        """Keys, (B, n, k)."""
        return self.X @ self.W_K

    def linear(self, dW: WeightMove) -> Tensor:
        """J: two (d, k) -> (B, n, n)."""
        return self.masked(self.X @ dW.Q @ self.K.mT + self.Q @ (self.X @ dW.K).mT)

    def bilinear(self, dW: WeightMove) -> Tensor:
        """R: two (d, k) -> (B, n, n)."""
        return self.masked(self.X @ dW.Q @ (self.X @ dW.K).mT)

    def adjoint(self, G: Tensor) -> WeightMove:
        """J^T: (B, n, n) -> two (d, k)."""
        G = self.masked(G)
        return WeightMove((self.X.mT @ G @ self.K).sum(0), (self.X.mT @ G.mT @ self.Q).sum(0))

    def masked(self, scores: Tensor) -> Tensor:
        """The scores, zero off the mask."""
        return scores if self.mask is None else scores.masked_fill(~self.mask, 0.0)


SMALLEST = 1e-12
"""Singular values below this share of the largest count as zero."""


def raw(scores: ScoreMap, G: Tensor, damping: float) -> WeightMove:
    """The plain negative gradient."""
    if damping:
        raise ValueError(f'solver="raw" has nothing to damp; got damping={damping}, give 0.')
    gradient = scores.adjoint(G)
    return WeightMove(-gradient.Q, -gradient.K)


def exact(scores: ScoreMap, G: Tensor, damping: float) -> WeightMove:
    """The closed form for one sequence."""
    if len(scores.X) != 1 or scores.mask is not None:
        raise ValueError(
            'solver="exact" has a closed form for one sequence without a mask; '
            'use solver="cg" for batches and masks.'
        )
    X_, Q_, K_ = (pseudo_inverse(M[0], damping) for M in (scores.X, scores.Q, scores.K))
    dW_Q = -(X_ - 0.5 * scores.W_Q @ Q_) @ G[0] @ K_.mT
    dW_K = -(X_ - 0.5 * scores.W_K @ K_) @ G[0].mT @ Q_.mT
    return WeightMove(dW_Q, dW_K)


def spectral(scores: ScoreMap, G: Tensor, damping: float) -> WeightMove:
    """Each half steepest in the spectral norm of its own score change."""
    E_X, E_Q, E_K = whitening(scores, damping)
    gradient = scores.adjoint(G)
    A, B = polar(E_X.mT @ gradient.Q @ E_K), polar(E_X.mT @ gradient.K @ E_Q)
    return WeightMove(-E_X @ A @ E_K.mT, -E_X @ B @ E_Q.mT)


def cg(
    scores: ScoreMap,
    G: Tensor,
    damping: float,
    *,
    tolerance: float = 1e-12,
    iterations: int = 2000,
) -> WeightMove:
    """The least-squares solution of J dW = -G by conjugate gradients (CGLS)."""
    E_X, E_Q, E_K = whitening(scores, damping)

    def to_weights(z: WeightMove) -> WeightMove:
        return WeightMove(E_X @ z.Q @ E_K.mT, E_X @ z.K @ E_Q.mT)

    def to_coordinates(residual: Tensor) -> Tensor:
        g = scores.adjoint(residual)
        return torch.stack((E_X.mT @ g.Q @ E_K, E_X.mT @ g.K @ E_Q))

    residual = -scores.masked(G)
    descent = to_coordinates(residual)
    z, direction = torch.zeros_like(descent), descent
    size = start = descent.square().sum()
    for _ in range(iterations):
        if size <= tolerance**2 * start:
            break
        image = scores.linear(to_weights(WeightMove(*direction)))
        stride = size / (image.square().sum() + damping * direction.square().sum())
        z, residual = z + stride * direction, residual - stride * image
        descent = to_coordinates(residual) - damping * z
        before, size = size, descent.square().sum()
        direction = descent + size / before * direction
    return to_weights(WeightMove(*z))


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
    missing = M.shape[-1] - E.shape[-1]  # fewer rows than columns: pad with zero directions
    return torch.nn.functional.pad(E, (0, missing))


def _damped_inverse(s: Tensor, damping: float) -> Tensor:
    """1 / (s^2 + l), and 0 for singular values that are zero."""
    square = s.square()
    inverse = 1.0 / (square + damping * square.mean()).clamp(min=torch.finfo(s.dtype).tiny)
    return torch.where(s > SMALLEST * s.amax(), inverse, 0.0)


def remove_gauge(W_Q: Tensor, W_K: Tensor, dW_Q: Tensor, dW_K: Tensor) -> WeightMove:
    """The shortest move of the weights with the same first-order score change: (d, k) each.

    >>> import torch
    >>> W = torch.eye(2)
    >>> remove_gauge(W, W, W, -W).Q.norm()  # a pure gauge move: it changes no score
    tensor(0.)
    """
    a, U = torch.linalg.eigh(W_Q.mT @ W_Q)
    b, V = torch.linalg.eigh(W_K.mT @ W_K)
    right = U.mT @ (dW_K.mT @ W_K - W_Q.mT @ dW_Q) @ V
    sums = a.clamp(min=0).unsqueeze(-1) + b.clamp(min=0)
    largest = sums.amax()
    # where both Grams vanish, M moves nothing and stays zero
    solvable = sums > torch.finfo(sums.dtype).eps * largest
    M = U @ torch.where(solvable, right / torch.where(solvable, sums, 1.0), 0.0) @ V.mT
    return WeightMove(dW_Q + W_Q @ M, dW_K - W_K @ M.mT)


SOLVERS: dict[str, Callable[[ScoreMap, Tensor, float], WeightMove]] = {
    "raw": raw,
    "exact": exact,
    "spectral": spectral,
    "cg": cg,
}
GAUGES = ("score", "least")
STATIONARY = 1e-12
"""Gradients below this share of |G|, in whitened coordinates, count as zero."""


class Step(NamedTuple):
    """A move of the weights, and its effect on the scores."""

    dW_Q: Tensor  # noqa: N815
    dW_K: Tensor  # noqa: N815
    dS: Tensor  # noqa: N815
    """The finite change of the scores, zero off the mask."""
    predicted: Tensor
    """<G, dS>, a scalar; below zero for a small enough gamma."""

    @property
    def summary(self) -> str:
        """One sentence: the effect of the step, or why there is none."""
        length = float(self.dS.norm())
        if length == 0.0:
            return (
                "no step: either gamma is 0, or T W_K and T^T W_Q vanish and no move of the "
                "weights changes the loss to first order."
            )
        change = float(self.predicted)
        return f"the scores move by {length:.4g} and the loss by {change:.4g} to first order."


@torch.no_grad()
def score_step(
    X: Tensor,
    W_Q: Tensor,
    W_K: Tensor,
    G: Tensor,
    gamma: float,
    *,
    solver: str = "exact",
    mask: Tensor | None = None,
    damping: float = 0.0,
    gauge: str = "score",
) -> Step:
    """The step whose finite dS has length ``gamma``: X (n, d) or (B, n, d), W (d, k), G as X X^T.

    ``mask`` is True where a query may attend to a key. ``gauge`` selects among the moves with one
    dS to first order: "score", the solver's own, which is covariant, or "least", the shortest.
    Solved in float64, returned in the dtype of the weights.

    >>> import torch
    >>> X, W, G = torch.eye(3), torch.eye(3)[:, :2], torch.ones(3, 3)
    >>> step = score_step(X, W, W, G, gamma=0.1)
    >>> step.dS.norm(), step.predicted
    (tensor(0.1000), tensor(-0.2801))
    """
    _require(X, W_Q, W_K, G, gamma, solver, damping, gauge)
    single = X.ndim == 2
    X3, G3 = (M.double().reshape(-1, *M.shape[-2:]) for M in (X, G))
    if mask is not None:
        mask = torch.broadcast_to(mask.to(torch.bool), G.shape).reshape(G3.shape)
    scores = ScoreMap(X3, W_Q.double(), W_K.double(), mask)
    G3 = scores.masked(G3)
    dW = WeightMove(torch.zeros_like(scores.W_Q), torch.zeros_like(scores.W_K))
    if gamma > 0.0 and not stationary(scores, G3):
        dW = SOLVERS[solver](scores, G3, damping)
        if gauge == "least":
            dW = remove_gauge(scores.W_Q, scores.W_K, dW.Q, dW.K)
        t = step_length(scores.linear(dW), scores.bilinear(dW), gamma)
        dW = WeightMove(t * dW.Q, t * dW.K)
    dS = scores.linear(dW) + scores.bilinear(dW)
    predicted = (G3 * dS).sum()
    dS = dS[0] if single else dS.reshape(G.shape)
    return Step(*(M.to(W_Q.dtype) for M in (dW.Q, dW.K, dS, predicted)))


def stationary(scores: ScoreMap, G: Tensor) -> bool:
    """Whether every move of the weights leaves <G, S> unchanged to first order."""
    E_X, E_Q, E_K = whitening(scores, 0.0)
    gradient = scores.adjoint(G)
    sizes = (E_X.mT @ gradient.Q @ E_K).norm(), (E_X.mT @ gradient.K @ E_Q).norm()
    return bool(max(sizes) <= STATIONARY * G.norm())


def step_length(J: Tensor, R: Tensor, gamma: float) -> float:
    """The smallest t > 0 with |t J + t^2 R| = gamma; J is not zero."""
    a = float(J.square().sum())
    # in units of the linear solution gamma / |J| the quartic is c t^4 + 2 b t^3 + t^2 = 1
    unit = gamma / math.sqrt(a)
    b = float((J * R).sum()) * unit / a
    c = float(R.square().sum()) * unit**2 / a
    t = _first_root(b, c)
    for _ in range(3):  # Newton's method to the last digit, where it improves
        slope = 2.0 * t * (1.0 + 3.0 * b * t + 2.0 * c * t * t)
        nearer = t - _excess(t, b, c) / slope if slope > 0.0 else t
        if abs(_excess(nearer, b, c)) < abs(_excess(t, b, c)):
            t = nearer
    return t * unit


def _excess(t: float, b: float, c: float) -> float:
    return t * t * (1.0 + 2.0 * b * t + c * t * t) - 1.0


def _first_root(b: float, c: float) -> float:
    """An approximation of the first t with c t^4 + 2 b t^3 + t^2 = 1."""
    if c == 0.0:
        return 1.0
    # companion matrix of s^4 - s^2 - 2 b s - c with s = 1 / t: its largest real root counts
    companion = torch.zeros(4, 4, dtype=torch.float64)
    companion[0] = torch.tensor([0.0, 1.0, 2.0 * b, c])
    companion[1:, :3] = torch.eye(3)
    s = torch.linalg.eigvals(companion)
    real = s.real[(s.imag.abs() <= 1e-6 * s.abs()) & (s.real > 0)]
    return 1.0 / float(real.max())


def _require(
    X: Tensor,
    W_Q: Tensor,
    W_K: Tensor,
    G: Tensor,
    gamma: float,
    solver: str,
    damping: float,
    gauge: str,
) -> None:
    if solver not in SOLVERS:
        raise ValueError(f"solver={solver!r} should be one of {tuple(SOLVERS)}.")
    if gauge not in GAUGES:
        raise ValueError(f"gauge={gauge!r} should be one of {GAUGES}.")
    if not 0.0 <= gamma < float("inf") or not 0.0 <= damping < float("inf"):
        raise ValueError(f"gamma={gamma} and damping={damping} should be finite and not negative.")
    shapes = [tuple(M.shape) for M in (X, W_Q, W_K, G)]
    if X.ndim not in (2, 3) or W_Q.ndim != 2 or W_Q.shape != W_K.shape or X.shape[-1] != len(W_Q):
        raise ValueError(
            "X should be (n, d) or (B, n, d) and W_Q, W_K both (d, k); "
            f"got {shapes[0]}, {shapes[1]} and {shapes[2]}."
        )
    if G.shape != (*X.shape[:-1], X.shape[-2]):
        raise ValueError(f"G should have the shape of X X^T; got {shapes[3]} for X {shapes[0]}.")
    if not all(bool(M.isfinite().all()) for M in (X, W_Q, W_K, G)):
        raise ValueError("X, W_Q, W_K and G should be finite; one of them has nan or inf.")
