"""Hard: the argmax itself, the limit of every other map as beta -> inf.

    Omega(p) = 0
    p        = u restricted to the alternatives of largest score, and normalised
    value(z) = max of z over what u allows
    s        = 0: the weights are constant almost everywhere

The prior forbids, as in every map, and splits ties: alternatives of equal largest score share the
weight in proportion to their priors, equally without a prior. It never overrides a score.
"""

from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from fenchel.choice.base import FORBIDDEN, Choice, checked_axis, float32_or_better
from fenchel.choice.softmax import Softmax


@final
@dataclass(frozen=True)
class Hard(Choice):
    """All weight on the largest score.

    >>> import torch
    >>> u = torch.tensor([0.1, 0.3, 0.6])
    >>> Hard().weights(torch.tensor([1.0, 1.0, 0.0]), u.log())
    tensor([0.2500, 0.7500, 0.0000])
    """

    @property
    def beta(self) -> float:  # type: ignore[override]
        """Infinite: this map is the limit."""
        return float("inf")

    @property
    def score_scale(self) -> float:
        """1: the argmax does not depend on the scale of the scores."""
        return 1.0

    def weights(self, z: Tensor, log_prior: Tensor | None = None, dim: int = -1) -> Tensor:
        """The argmax: (..., K) -> (..., K); constant in z, so its derivative there is 0."""
        allowed, axis = self.scores(z, log_prior, dim)
        if allowed.shape[axis] == 0:
            return allowed.to(z.dtype)
        best = allowed.amax(axis, keepdim=True)
        shares = allowed.new_zeros(()) if log_prior is None else log_prior.to(allowed.dtype)
        shares = torch.where(allowed == best, shares, FORBIDDEN)
        p = Softmax().weights(shares.masked_fill(best == FORBIDDEN, FORBIDDEN), dim=axis)
        # Without a path to z a call of backward would raise; with it the gradient is 0.
        return (p + 0.0 * torch.where(p > 0, allowed, 0.0)).to(z.dtype)

    def value(self, z: Tensor, log_prior: Tensor | None = None, dim: int = -1) -> Tensor:
        """The largest allowed score, whose gradient is ``weights``: (..., K) -> (...)."""
        p = self.weights(z, log_prior, dim)
        total = torch.where(p > 0, z, 0.0).mul(p).sum(dim)
        return total.masked_fill(p.detach().sum(dim) == 0.0, FORBIDDEN)

    def scores(self, z: Tensor, log_prior: Tensor | None, dim: int) -> tuple[Tensor, int]:
        """z itself, -inf where the prior forbids, and the axis counted from the end."""
        axis = checked_axis(z, log_prior, dim)
        x = float32_or_better(z)
        return (x if log_prior is None else x.masked_fill(log_prior == FORBIDDEN, FORBIDDEN)), axis

    def choose(self, x: Tensor) -> Tensor:
        """The argmax for the scores x, ties split equally: (..., K) -> (..., K)."""
        return self.weights(x)

    def regulariser(self, p: Tensor, log_prior: Tensor | None = None) -> Tensor:
        """0, and infinite where p > 0 is forbidden: (..., K) -> (...)."""
        if log_prior is None:
            return torch.zeros_like(p[..., 0])
        forbidden = ((p != 0) & (log_prior == FORBIDDEN)).any(-1)
        return torch.zeros_like(p[..., 0]).masked_fill(forbidden, float("inf"))

    def jacobian_product(self, p: Tensor, v: Tensor) -> Tensor:
        return torch.zeros_like(p * v)

    def sensitivity(self, p: Tensor) -> Tensor:
        """0; the weights jump where the two best scores change order: (..., K) -> (...)."""
        return torch.zeros_like(p[..., 0])

    def sensitivity_bounds(self, p: Tensor) -> tuple[Tensor, Tensor]:
        """0 for a single best alternative; at a tie the weights jump and nothing is proved."""
        zero = torch.zeros_like(p[..., 0], dtype=torch.float64)
        return zero, torch.where((p > 0).sum(-1) > 1, torch.inf, zero)

    def omega(self, p: Tensor) -> Tensor:
        return torch.zeros_like(p)

    def slope(self, p: Tensor) -> Tensor:
        return torch.zeros_like(p)

    def response(self, y: Tensor) -> Tensor:
        return (y > 0).to(y.dtype)

    def spread(self, p: Tensor) -> Tensor:
        return torch.zeros_like(p)

    def lipschitz(self, K: int) -> float | Tensor:
        """Infinite, since the weights jump; 0 for a single alternative."""
        return float("inf") if K > 1 else 0.0
