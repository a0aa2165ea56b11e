"""Sigmoid: every alternative chosen by itself, over the box [0, 1]^K in place of the simplex.

    Omega(p) = sum_i p_i log p_i + (1 - p_i) log(1 - p_i) - b p_i       0 log 0 = 0
    p_i      = 1 / (1 + exp(-x_i - b))                                  x = beta z + log u
    value(z) = sum_i log(1 + exp(x_i + b)) / beta
    s_i      = p_i (1 - p_i)                                            J = beta diag(s)

No constraint connects the alternatives: weights do not compete, their sum lies anywhere between 0
and K, and a common shift of the scores changes them all. A prior holds odds here: with u_i the odds
of alternative i before its score, prob_i = u_i / (1 + u_i), Omega(p) - <p, log u> is the sum of the
divergences KL(p_i || prob_i) of two outcomes, up to a constant. u_i = 0 forbids, u_i = 1 is even.
``log_odds`` = b is the same for all alternatives: with b = -log n, scores of 0 give n keys weights
that sum to n / (n + 1), which keeps the output of attention at the size of a value.

No eigenvalue of J exceeds beta / 4, which p_i = 1/2 attains, also for one alternative.

Ramapuram et al. (2025), Theory, analysis, and best practices for sigmoid self-attention.
"""

from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor
from torch.nn.functional import softplus

from fenchel.choice.base import Choice, float32_or_better, require_positive
from fenchel.choice.softmax import Softmax


@final
@dataclass(frozen=True)
class Sigmoid(Choice):
    """A weight between 0 and 1 for every alternative, whatever the others are.

    >>> import torch
    >>> Sigmoid().weights(torch.tensor([5.0, 4.0, 0.0]))
    tensor([0.9933, 0.9820, 0.5000])
    """

    beta: float | Tensor = 1.0
    log_odds: float | Tensor = 0.0
    """b; a tensor broadcasts as ``beta`` does."""

    feasible = "box"

    def __post_init__(self) -> None:
        require_positive("Sigmoid", self.beta)
        if not isinstance(self.log_odds, Tensor) and not abs(self.log_odds) < float("inf"):
            raise ValueError(f"Sigmoid needs finite log_odds, got {self.log_odds}.")

    def choose(self, x: Tensor) -> Tensor:
        return torch.sigmoid(x + self.log_odds)

    def omega(self, p: Tensor) -> Tensor:
        return Softmax().omega(p) + Softmax().omega(1.0 - p) - self.log_odds * p

    def slope(self, p: Tensor) -> Tensor:
        limits = torch.finfo(p.dtype)  # below eps / 4 the distance from 1 is rounded away
        log_p, log_rest = p.clamp(min=limits.tiny).log(), (1.0 - p).clamp(min=limits.eps / 4).log()
        return log_p - log_rest - self.log_odds

    def response(self, y: Tensor) -> Tensor:
        return torch.sigmoid(y + self.log_odds)

    def spread(self, p: Tensor) -> Tensor:
        p = float32_or_better(p)
        return p * (1.0 - p)

    def divergence(self, y: Tensor, p: Tensor) -> Tensor:
        """y log(y / p) + (1 - y) log((1 - y) / (1 - p))."""
        inner = torch.where(p < 1.0, p, 0.5)
        both = Softmax().divergence(y, inner) + Softmax().divergence(1.0 - y, 1.0 - inner)
        return torch.where(p < 1.0, both, super().divergence(y, p))

    def lipschitz(self, K: int) -> float | Tensor:
        """beta / 4, and 0 for no alternative."""
        return self.beta * (0.25 if K > 0 else 0.0)

    def _maximum(self, x: Tensor) -> Tensor:
        # threshold: torch's softplus is linear beyond 20 by default, 2e-9 off
        forbidden = x == -torch.inf
        y = x.masked_fill(forbidden, 0.0) + self.log_odds
        total = torch.where(forbidden, 0.0, softplus(y, threshold=40.0)).sum(-1)
        return total / self.row_beta()
