"""Capped: softmax with weights of at most ``cap``.

    Omega(p) = sum_i p_i log p_i       with the constraints p_i <= cap
    p_i      = min(cap, exp(x_i - nu)),       sum_i p_i = 1
    s_i      = p_i                            where p_i < cap, else 0

Where fewer than 1 / cap alternatives are allowed no p satisfies the cap; such a row is uniform over
them, as if its cap were one over their number (the first rows under a causal mask).

The capped set. Sort the scores and let the k largest be capped. The others share 1 - k cap as a
softmax, and k is the smallest number for which the largest of them is at most cap. Given that set,
p is a softmax again, with all its derivatives; the set itself is locally constant.

Since no s_i exceeds cap, no eigenvalue of J exceeds beta cap, nor beta / 2.
"""

from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from fenchel.choice.base import FORBIDDEN, Choice, float32_or_better, require_positive
from fenchel.choice.softmax import Softmax


@final
@dataclass(frozen=True)
class Capped(Choice):
    """The choice of largest entropy with no weight above ``cap``.

    >>> import torch
    >>> Capped(cap=0.5).weights(torch.tensor([9.0, 1.0, 1.0]))
    tensor([0.5000, 0.2500, 0.2500])
    """

    cap: float
    beta: float | Tensor = 1.0

    def __post_init__(self) -> None:
        require_positive("Capped", self.beta)
        if not 0.0 < self.cap <= 1.0:
            raise ValueError(f"Capped needs 0 < cap <= 1, got cap={self.cap}.")

    @property
    def ceiling(self) -> float:
        return self.cap

    def choose(self, x: Tensor) -> Tensor:
        if x.shape[-1] == 0:
            return x
        allowed = (x > FORBIDDEN).sum(-1, keepdim=True).to(x.dtype)
        cap = (1.0 / allowed.clamp(min=1.0)).clamp(min=self.cap)
        capped = _capped(x.detach(), cap)
        left = (1.0 - cap * capped.sum(-1, keepdim=True)).clamp(min=0.0)
        p = left * Softmax().choose(x.masked_fill(capped, FORBIDDEN))
        return torch.where(capped, cap, p)

    def regulariser(self, p: Tensor, log_prior: Tensor | None = None) -> Tensor:
        """Omega(p) - <p, log u>, infinite above the cap and where p > 0 is forbidden."""
        allowed = torch.ones_like(p) if log_prior is None else (log_prior > FORBIDDEN).expand_as(p)
        cap = (1.0 / allowed.sum(-1, keepdim=True)).clamp(min=self.cap)
        above = (p > cap * (1.0 + 4.0 * torch.finfo(p.dtype).eps)).any(-1)
        return super().regulariser(p, log_prior).masked_fill(above, float("inf"))

    def omega(self, p: Tensor) -> Tensor:
        return Softmax().omega(p)

    def slope(self, p: Tensor) -> Tensor:
        return Softmax().slope(p)

    def response(self, y: Tensor) -> Tensor:
        """exp(y - 1); ``cap`` is a constraint beside omega, not a part of it."""
        return Softmax().response(y)

    def spread(self, p: Tensor) -> Tensor:
        """p where it is free to move, 0 at the cap."""
        at_cap = p >= torch.as_tensor(self.cap, dtype=p.dtype, device=p.device)  # rounded as p
        return float32_or_better(torch.where(at_cap, 0.0, p))

    def divergence(self, y: Tensor, p: Tensor) -> Tensor:
        return Softmax().divergence(y, p)

    def lipschitz(self, K: int) -> float | Tensor:
        """beta min(cap, 1/2), and 0 where the cap leaves no choice."""
        return self.beta * (min(self.cap, 0.5) if self.cap * K > 1.0 else 0.0)


def _capped(x: Tensor, cap: Tensor) -> Tensor:
    """Which alternatives are at the cap: (..., K) -> bool (..., K)."""
    ordered, order = x.sort(-1, descending=True)
    rest = ordered.flip(-1).logcumsumexp(-1).flip(-1)  # log of the sum of this one and all below
    k = torch.arange(x.shape[-1], dtype=x.dtype, device=x.device)
    largest = (1.0 - k * cap) * (ordered - rest).exp()  # nan where forbidden: never too large
    too_large = (largest > cap).to(x.dtype).cumprod(-1).bool()
    return torch.zeros_like(too_large).scatter(-1, order, too_large)
