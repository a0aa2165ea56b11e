"""Entmax: choice under Tsallis entropy, sparse for every alpha > 1.

    Omega(p) = sum_i (p_i^alpha - p_i) / (alpha (alpha - 1))
    p_i      = [(alpha - 1) x_i - tau]_+ ^ (1 / (alpha - 1)),       sum_i p_i = 1
    s_i      = p_i^(2 - alpha)                                      on the support

alpha = 2 is sparsemax; alpha -> 1 tends to softmax. Both have files of their own. tau is found
in threshold.py; the derivative of the whole, and how a compiler gets it, in tsallis.py.

The l2 constant. Over all p, the largest eigenvalue of J is beta times the largest |w|_2^2 over
w with sum(w) = 0 and |w|_m = 1, m = 2 / (3 - alpha), for 1 < alpha <= 2. It is reached either by
two equal weights or by one heavy weight and K - 1 equal light ones:

    2^(alpha - 2)      or      K / (K - 1) / (1 + (K - 1)^(1 - m))^(2 / m),

whichever is more. Above alpha = 2 two alternatives have 2 (3 - alpha <= 1: 2^(alpha - 2)), more
have no bound: light weights are infinitely quick. Proof: docs/maths/choice.md.

Peters, Niculae and Martins (2019), Sparse sequence-to-sequence models.
"""

import math
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from fenchel.choice.base import Choice, float32_or_better, positive, readable
from fenchel.choice.tsallis import spread, tsallis


@final
@dataclass(frozen=True)
class Entmax(Choice):
    """Tsallis choice with exponent ``alpha``, 1 < alpha <= 4.

    >>> import torch
    >>> Entmax(alpha=2.0).weights(torch.tensor([1.0, 0.8, -3.0]))
    tensor([0.6000, 0.4000, 0.0000])
    """

    alpha: float | Tensor = 1.5
    """The exponent; a tensor learns, broadcasts against z, and has one entry along the axis."""
    beta: float | Tensor = 1.0

    def __post_init__(self) -> None:
        positive("Entmax", self.beta)
        if isinstance(self.alpha, Tensor):
            good = not readable(self.alpha) or bool(((self.alpha > 1) & (self.alpha <= 4)).all())
        else:
            good = 1.0 < self.alpha <= 4.0
        if not good:
            raise ValueError(
                f"Entmax needs 1 < alpha <= 4, got alpha={self.alpha}; "
                "for alpha = 1 use fenchel.choice.Softmax."
            )

    def choose(self, x: Tensor) -> Tensor:
        """The argmax for the scores x: (..., K) -> (..., K)."""
        return tsallis(x, self.alpha)

    def omega(self, p: Tensor) -> Tensor:
        """(p^alpha - p) / (alpha (alpha - 1)), in a form that keeps its digits as alpha -> 1."""
        excess = torch.expm1((self.alpha - 1.0) * torch.where(p > 0, p, 1.0).log())
        return p * excess / (self.alpha * (self.alpha - 1.0))

    def slope(self, p: Tensor) -> Tensor:
        """(p^(alpha - 1) - 1) / (alpha - 1) + 1 / alpha."""
        return torch.expm1((self.alpha - 1.0) * p.log()) / (self.alpha - 1.0) + 1.0 / self.alpha

    def response(self, y: Tensor) -> Tensor:
        """[1 + (alpha - 1) (y - 1 / alpha)]_+ ^ (1 / (alpha - 1))."""
        w = (self.alpha - 1.0) * (y - 1.0 / self.alpha)
        return (w.clamp(min=-1.0).log1p() / (self.alpha - 1.0)).exp()

    def spread(self, p: Tensor) -> Tensor:
        """p^(2 - alpha) on the support."""
        return spread(float32_or_better(p), self.alpha)

    def lipschitz(self, K: int) -> float | Tensor:
        """beta times the larger of the two values above."""
        if not isinstance(self.alpha, Tensor):
            return self.beta * _lipschitz(self.alpha, K)
        each = [_lipschitz(a, K) for a in self.alpha.flatten().tolist()]
        return self.beta * self.alpha.new_tensor(each).view(self.alpha.shape)


def _lipschitz(alpha: float, K: int) -> float:
    if K < 2:
        return 0.0
    if alpha > 2.0:
        return max(2.0, 2.0 ** (alpha - 2.0)) if K == 2 else math.inf
    m, others = 2.0 / (3.0 - alpha), K - 1.0
    one_heavy = (1.0 + 1.0 / others) / (1.0 + others ** (1.0 - m)) ** (2.0 / m)
    return float(max(2.0 ** (alpha - 2.0), one_heavy))
