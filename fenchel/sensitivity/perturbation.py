"""Balls of token sequences, and bounds on a layer that hold everywhere in one.

    |x'_j - x_j| <= token  for every token j,        |X' - X|_F <= total.

Both at once: "token" of radius r among n tokens is (r, r sqrt n), "fro" of radius r is (r, r). A
layer maps such a set into another one, so one description serves both norms and whole networks.
How the tokens may share the total is a small linear program: for w >= 0,

    share(w) = max  sum_i w_i t_i     over  0 <= t_i <= token^2,  sum_i t_i <= total^2,

solved by taking the largest w first.

A ``BallBound``, with J the Jacobian at the centre X and J' that at any other point of the ball:

    upper       |J'|_2 <= upper
    variation   |J' - J|_2 <= variation
    token       the gain in the norm max_i |x_i|
    rounding    how far the computed f(X) is from the exact one, as one vector

The centre of the next layer's ball is the computed f(X), so that ball is larger by ``rounding``.
|J|_2 at the centre is measured, so |J|_2 + variation is an upper bound too, and the smaller one in
small balls (``NormEstimator.from_centre``). The products that make up J are rounded relative to the
norms of its factors, which ``upper`` bounds, so J.error times ``upper`` is added.
"""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from fenchel.sensitivity.autodiff import jacobian
from fenchel.sensitivity.golub_kahan import spectral_norm
from fenchel.sensitivity.operator import Operator
from fenchel.sensitivity.rounding import outward

_GROW = 1.0 + 1e-12  # sums and products of bounds are rounded too


@dataclass(frozen=True)
class Ball:
    """All token sequences near a given one; the centre is not part of it.

    >>> Ball.of(0.5, "token", n=4)
    Ball(token=0.5, total=1.0)
    """

    token: float
    """The largest move of one token."""
    total: float
    """The largest move of all of them together, as one vector."""

    @classmethod
    def of(cls, radius: float, norm: str, n: int) -> "Ball":
        """The ball of a radius in "fro" or "token" norm about n tokens."""
        if norm not in ("fro", "token"):
            raise ValueError(f'a ball is measured in norm "fro" or "token", got {norm!r}.')
        if not 0.0 <= radius < math.inf:
            raise ValueError(f"a radius is a finite number >= 0, got {radius}.")
        return cls(radius, radius * math.sqrt(n) if norm == "token" else radius)

    def share(self, w: Tensor) -> Tensor:
        """max of sum_i w_i t_i as above: (..., n) -> (...)."""
        if self.token == 0.0:
            return torch.zeros_like(w[..., 0])
        n = w.shape[-1]
        count = min(float(n), (self.total / self.token) ** 2 * (1.0 + 1e-12))
        places = torch.arange(n, dtype=w.dtype, device=w.device)
        spent = (count - places).clamp(0.0, 1.0)
        return self.token * self.token * (w.sort(dim=-1, descending=True).values * spent).sum(-1)

    def within(self, moves: Tensor) -> Tensor:
        """The moves, shortened where needed to lie in the ball: (n, d) -> (n, d)."""
        length = moves.norm(dim=-1, keepdim=True)
        moves = moves * (self.token / length.clamp(min=self.token)) if self.token else moves * 0.0
        size = float(moves.norm())
        return moves * (self.total / size) if size > self.total else moves


class BallBound(NamedTuple):
    """Bounds on a layer that hold everywhere in a ball."""

    upper: float
    variation: float
    token: float
    rounding: float = 0.0

    def carry(self, ball: Ball) -> Ball:
        """A ball about the computed f(X) that contains the image of ``ball`` about X."""
        total = (self.upper * ball.total + self.rounding) * _GROW
        return Ball(min((self.token * ball.token + self.rounding) * _GROW, total), total)

    def after(self, first: "BallBound") -> "BallBound":
        """The bounds of this layer applied to the image of ``first``."""
        varied = self.variation * first.upper + self.upper * first.variation
        rounding = self.upper * first.rounding + self.rounding
        whole = (self.upper * first.upper, varied, self.token * first.token, rounding)
        return BallBound(*(end * _GROW for end in whole))

    def plus(self, other: "BallBound") -> "BallBound":
        """The bounds of a sum of two layers."""
        return BallBound(*((a + b) * _GROW for a, b in zip(self, other, strict=True)))


IDENTITY = BallBound(1.0, 0.0, 1.0)


class NormEstimator:
    """Upper bounds on norms at a centre, and the probability that one of them is too small."""

    def __init__(self, failure: float, generator: torch.Generator | None = None) -> None:
        self.failure, self.generator = failure, generator
        self.spent = 0.0
        """The sum of the failure probabilities of all measurements so far."""

    def upper_norm(self, J: Operator) -> float:
        """An upper bound on |J|_2: probabilistic, or by the matrix itself when failure is 0."""
        if self.failure == 0.0:
            m, n = J.shape
            if m * n > 1 << 24:
                raise ValueError(
                    f"failure=0 takes the singular values of a {m} by {n} matrix; allow a failure "
                    "such as 1e-9 instead."
                )
            return float(outward(torch.linalg.matrix_norm(J.dense().double(), 2), m + n))
        self.spent += self.failure
        bracket = spectral_norm(J, tol=1e-3, failure=self.failure, generator=self.generator)
        return float(bracket.upper)

    def from_centre(self, J: Operator, bound: BallBound) -> BallBound:
        """``bound``, with |J|_2 plus the variation as its upper bound where that is smaller."""
        if bound.variation >= bound.upper:
            return bound
        near = (self.upper_norm(J) + bound.variation + J.error * bound.upper) * _GROW
        return bound._replace(upper=min(bound.upper, near))


class TokenLayer(ABC):
    """A map of tokens (N, M) to tokens (N, M')."""

    @abstractmethod
    def __call__(self, X: Tensor) -> Tensor:
        """The map itself."""

    @abstractmethod
    def ball_bound(self, X: Tensor, ball: Ball, estimator: NormEstimator) -> BallBound:
        """Bounds that hold everywhere in the ball about X."""

    def jacobian(self, X: Tensor) -> Operator:
        """The derivative at X."""
        return jacobian(self, X)
