"""Softmax: choice under Shannon entropy, or under the divergence KL(p || u) from a prior u.

    Omega(p) = sum_i p_i log p_i                      0 log 0 = 0
    p_i      = u_i exp(beta z_i) / sum_j u_j exp(beta z_j)
    value(z) = log sum_i u_i exp(beta z_i) / beta
    s_i      = p_i                                    J = beta (diag(p) - p p^T)

With u normalised, <p, z> - KL(p || u) / beta is what p maximises; without a prior u = 1, and
value is larger than with the uniform prior by log(K) / beta. The limit beta -> inf is ``Hard``,
beta -> 0 gives u. No eigenvalue of J exceeds beta / 2: the absolute values of row i sum to
2 beta p_i (1 - p_i). Two equal scores attain it; three or more alternatives only approach it.
"""

from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from fenchel.choice.base import (
    FORBIDDEN,
    Choice,
    checked_axis,
    float32_or_better,
    is_readable,
    require_positive,
)


@final
@dataclass(frozen=True)
class Softmax(Choice):
    """The choice of largest entropy.

    >>> import torch
    >>> Softmax().weights(torch.tensor([5.0, 4.0]))
    tensor([0.7311, 0.2689])
    """

    beta: float | Tensor = 1.0

    def __post_init__(self) -> None:
        require_positive("Softmax", self.beta)

    def weights(self, z: Tensor, log_prior: Tensor | None = None, dim: int = -1) -> Tensor:
        if log_prior is None and not isinstance(self.beta, Tensor) and self.beta == 1.0:
            x, axis = z, checked_axis(z, log_prior, dim)  # torch sums halves in float32 itself
        else:
            x, axis = self.scores(z, log_prior, dim)
        return _softmax(x, axis).to(z.dtype)

    def choose(self, x: Tensor) -> Tensor:
        return _softmax(x, -1)

    def omega(self, p: Tensor) -> Tensor:
        return torch.xlogy(p, torch.where(p > 0, p, 1.0))

    def slope(self, p: Tensor) -> Tensor:
        return p.clamp(min=torch.finfo(p.dtype).tiny).log() + 1.0

    def response(self, y: Tensor) -> Tensor:
        return (y - 1.0).exp()

    def spread(self, p: Tensor) -> Tensor:
        return float32_or_better(p)

    def divergence(self, y: Tensor, p: Tensor) -> Tensor:
        r = (y - p) / p
        d: Tensor = p * (torch.special.xlog1py(1.0 + r, r) - r)
        return d

    def lipschitz(self, K: int) -> float | Tensor:
        """beta / 2, and 0 for a single alternative."""
        return self.beta * (0.5 if K > 1 else 0.0)

    def _maximum(self, x: Tensor) -> Tensor:
        if x.shape[-1] == 0:
            return x.new_full(x.shape[:-1], FORBIDDEN)
        empty = x.amax(-1) == FORBIDDEN
        total = x.masked_fill(empty.unsqueeze(-1), 0.0).logsumexp(-1)
        return (total / self.row_beta()).masked_fill(empty, FORBIDDEN)


def _softmax(x: Tensor, axis: int) -> Tensor:
    """torch.softmax, with zeros for a row that is -inf throughout."""
    if x.shape[axis] == 0:
        return x
    if is_readable(x):
        # Such a row, and no other without nan in it, gives nan in its first entry. Testing one
        # column is cheap; the general form below costs three passes over x.
        p = torch.softmax(x, axis)
        if not p.select(axis, 0).isnan().any():
            return p
    empty = x.amax(axis, keepdim=True) == FORBIDDEN
    return torch.softmax(x.masked_fill(empty, 0.0), axis).masked_fill(empty, 0.0)
