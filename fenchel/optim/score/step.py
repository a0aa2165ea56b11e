"""The step of the query and key weights that lowers a loss most for a given change of the scores.

    minimise <G, dS>   subject to  |dS| <= gamma,      S = X W_Q W_K^T X^T,  G = dL/dS

over dS that some (dW_Q, dW_K) produces; |.| is the Frobenius norm over the entries of the mask.
S has no 1/sqrt(k) in it: a gradient in the scaled scores has to be multiplied by that factor.
A direction U = (U_Q, U_K) comes from solvers.py. Along it the scores move exactly by

    dS(t) = t J(U) + t^2 R(U),      |dS(t)|^2 = t^2 (a + 2 b t + c t^2),
    a = |J|^2,  b = <J, R>,  c = |R|^2,

and t is the smallest positive root of |dS(t)| = gamma, so the asked length is that of the finite
change, second-order part included. With gamma -> 0 it is gamma / |J(U)|, the linear rule.

A step exists unless the gradients T W_K and T^T W_Q both vanish (T = X^T G X). Then no move of
the weights changes <G, S> to first order, every dS of the ball is as good as any other, and the
step is zero; ``Step.words`` says so.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from fenchel.optim.score import solvers
from fenchel.optim.score.gauge import remove_gauge
from fenchel.optim.score.operator import ScoreMap, Weights

SOLVERS: dict[str, Callable[[ScoreMap, Tensor, float], Weights]] = {
    "raw": solvers.raw,
    "exact": solvers.exact,
    "spectral": solvers.spectral,
    "cg": solvers.cg,
}
GAUGES = ("score", "least")
STATIONARY = 1e-12
"""Gradients below this share of |G|, in whitened coordinates, count as zero."""


class Step(NamedTuple):
    """A move of the weights, and what it does to the scores."""

    dW_Q: Tensor  # noqa: N815
    dW_K: Tensor  # noqa: N815
    dS: Tensor  # noqa: N815
    """The finite change of the scores, zero off the mask."""
    predicted: Tensor
    """<G, dS>, a scalar; below zero for a small enough gamma."""

    @property
    def words(self) -> str:
        """One sentence: what the step does, or why there is none."""
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
    """X (n, d) or (B, n, d), W (d, k), G as X X^T: a step whose finite dS has length ``gamma``.

    ``mask`` is True where a query may see a key. ``gauge`` picks among the moves with one dS to
    first order: "score", the solver's own, which is covariant, or "least", the shortest. Solved
    in float64 and given back in the dtype of the weights.
    """
    _require(X, W_Q, W_K, G, gamma, solver, damping, gauge)
    one = X.ndim == 2
    X3, G3 = (M.double().reshape(-1, *M.shape[-2:]) for M in (X, G))
    if mask is not None:
        mask = torch.broadcast_to(mask.to(torch.bool), G.shape).reshape(G3.shape)
    scores = ScoreMap(X3, W_Q.double(), W_K.double(), mask)
    G3 = scores.masked(G3)
    dW = Weights(torch.zeros_like(scores.W_Q), torch.zeros_like(scores.W_K))
    if gamma > 0.0 and not stationary(scores, G3):
        dW = SOLVERS[solver](scores, G3, damping)
        if gauge == "least":
            dW = remove_gauge(scores.W_Q, scores.W_K, dW.Q, dW.K)
        t = length(scores.linear(dW), scores.bilinear(dW), gamma)
        dW = Weights(t * dW.Q, t * dW.K)
    dS = scores.linear(dW) + scores.bilinear(dW)
    predicted = (G3 * dS).sum()
    dS = dS[0] if one else dS.reshape(G.shape)
    return Step(*(M.to(W_Q.dtype) for M in (dW.Q, dW.K, dS, predicted)))


def stationary(scores: ScoreMap, G: Tensor) -> bool:
    """Whether no move of the weights changes <G, S> to first order."""
    E_X, E_Q, E_K = solvers.whitening(scores, 0.0)
    gradient = scores.adjoint(G)
    sizes = (E_X.mT @ gradient.Q @ E_K).norm(), (E_X.mT @ gradient.K @ E_Q).norm()
    return bool(max(sizes) <= STATIONARY * G.norm())


def length(J: Tensor, R: Tensor, gamma: float) -> float:
    """The smallest t > 0 with |t J + t^2 R| = gamma; J is not zero."""
    a = float(J.square().sum())
    # in units of the linear answer gamma / |J| the quartic is c t^4 + 2 b t^3 + t^2 = 1
    unit = gamma / math.sqrt(a)
    b = float((J * R).sum()) * unit / a
    c = float(R.square().sum()) * unit**2 / a
    t = _first_root(b, c)
    for _ in range(3):  # Newton, to the last digit, where it helps
        slope = 2.0 * t * (1.0 + 3.0 * b * t + 2.0 * c * t * t)
        nearer = t - _excess(t, b, c) / slope if slope > 0.0 else t
        if abs(_excess(nearer, b, c)) < abs(_excess(t, b, c)):
            t = nearer
    return t * unit


def _excess(t: float, b: float, c: float) -> float:
    return t * t * (1.0 + 2.0 * b * t + c * t * t) - 1.0


def _first_root(b: float, c: float) -> float:
    """About where c t^4 + 2 b t^3 + t^2 first reaches 1."""
    if c == 0.0:
        return 1.0
    # companion matrix of s^4 - s^2 - 2 b s - c with s = 1 / t: the largest real root is wanted
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
        raise ValueError("X, W_Q, W_K and G should be finite; one of them holds nan or inf.")
