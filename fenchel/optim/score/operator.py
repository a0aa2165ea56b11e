"""How the scores move when the query and key weights do: the linear map J, and its adjoint.

    S        = mask * (X W_Q W_K^T X^T)                      one matrix for each sequence
    dS       = J(dW_Q, dW_K) + R(dW_Q, dW_K)                 exactly
    J        = mask * (X dW_Q K^T + Q dW_K^T X^T)            Q = X W_Q,  K = X W_K
    R        = mask * (X dW_Q dW_K^T X^T)                    O(|dW_Q| |dW_K|)
    J^T(G)   = (sum_b X^T G K,  sum_b X^T G^T Q)             the gradients in W_Q and W_K

so that <G, J(dW)> = <J^T(G), dW>. Scores carry no 1/sqrt(k) here; G is the gradient in these
same, unscaled scores. Sequences of a batch share the weights: J maps into all their scores at
once. Entries off the mask are no part of any score, norm or product.

Shapes: X (B, n, d), W_Q and W_K (d, k), scores (B, n, n).
"""

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from torch import Tensor


class Weights(NamedTuple):
    """A move of both weights, or a gradient in both: (d, k) each."""

    Q: Tensor
    K: Tensor


@dataclass(frozen=True, eq=False)
class ScoreMap:
    """The scores of sequences X as a function of the weights, around the given ones."""

    X: Tensor
    W_Q: Tensor
    W_K: Tensor
    mask: Tensor | None = None
    """True where a query may see a key; broadcasts to (B, n, n)."""

    @cached_property
    def Q(self) -> Tensor:
        """Queries, (B, n, k)."""
        return self.X @ self.W_Q

    @cached_property
    def K(self) -> Tensor:
        """Keys, (B, n, k)."""
        return self.X @ self.W_K

    def linear(self, dW: Weights) -> Tensor:
        """J: two (d, k) -> (B, n, n)."""
        return self.masked(self.X @ dW.Q @ self.K.mT + self.Q @ (self.X @ dW.K).mT)

    def bilinear(self, dW: Weights) -> Tensor:
        """R: two (d, k) -> (B, n, n)."""
        return self.masked(self.X @ dW.Q @ (self.X @ dW.K).mT)

    def adjoint(self, G: Tensor) -> Weights:
        """J^T: (B, n, n) -> two (d, k)."""
        G = self.masked(G)
        return Weights((self.X.mT @ G @ self.K).sum(0), (self.X.mT @ G.mT @ self.Q).sum(0))

    def masked(self, scores: Tensor) -> Tensor:
        """Zero off the mask."""
        return scores if self.mask is None else scores.masked_fill(~self.mask, 0.0)
