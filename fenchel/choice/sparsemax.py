"""Sparsemax: choice under half the squared length, the projection onto the simplex.

    Omega(p) = sum_i (p_i^2 - p_i) / 2
    p_i      = [x_i - tau]_+,       sum_i p_i = 1
    s_i      = 1                    on the support, so J is beta times a projection

It is entmax at alpha = 2, where weights are pieces of straight lines.

Martins and Astudillo (2016), From softmax to sparsemax.
"""

from dataclasses import dataclass
from typing import final

from torch import Tensor

from fenchel.choice.base import Choice, float32_or_better, positive
from fenchel.choice.tsallis import tsallis


@final
@dataclass(frozen=True)
class Sparsemax(Choice):
    """The distribution nearest to the scores.

    >>> import torch
    >>> Sparsemax().weights(torch.tensor([1.0, 0.8, -3.0]))
    tensor([0.6000, 0.4000, 0.0000])
    """

    beta: float | Tensor = 1.0

    def __post_init__(self) -> None:
        positive("Sparsemax", self.beta)

    def choose(self, x: Tensor) -> Tensor:
        """The argmax for the scores x: (..., K) -> (..., K)."""
        return tsallis(x, 2.0)

    def omega(self, p: Tensor) -> Tensor:
        """(p^2 - p) / 2."""
        return 0.5 * p * (p - 1.0)

    def slope(self, p: Tensor) -> Tensor:
        """p - 1/2."""
        return p - 0.5

    def response(self, y: Tensor) -> Tensor:
        """[y + 1/2]_+."""
        return (y + 0.5).clamp(min=0.0)

    def spread(self, p: Tensor) -> Tensor:
        """1 on the support."""
        return float32_or_better((p > 0).to(p.dtype))

    def lipschitz(self, K: int) -> float | Tensor:
        """beta, and 0 where there is nothing to choose: a projection moves no further."""
        return self.beta * (1.0 if K > 1 else 0.0)
