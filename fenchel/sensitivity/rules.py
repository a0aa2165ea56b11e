"""The derivatives of the small layers, written out.

LayerNorm and RMSNorm, token by token, with x^ = (x - mean) / s or x / r and 1 / s the gain:

    J v   = gamma / s (v~ - x^ <x^, v~> / d)         v~ = v - mean v for LayerNorm, v for RMSNorm
    J^T u = 1 / s (g~ - x^ <x^, g~> / d),            g = gamma u,  g~ centred in the same way

The projection inside is symmetric, so forward and reverse differ by where gamma stands. An
activation multiplies by its slope: GELU by Phi(x) + x phi(x). A rotation of queries and keys (RoPE)
is orthogonal: its reverse is the rotation by the opposite angles, and its gain is 1.
"""

from typing import final

from torch import Tensor

from fenchel.sensitivity.autodiff import point, space
from fenchel.sensitivity.operator import Operator, Space


@final
class NormJacobian(Operator):
    """d LayerNorm(X) or d RMSNorm(X): X (..., d)."""

    def __init__(self, X: Tensor, weight: Tensor | None, eps: float, kind: str) -> None:
        (X,) = point(X)
        self.domain = self.codomain = space((X,), 0, several=False)
        self.dtype, self.device = X.dtype, X.device
        self.centre, self.weight = kind == "layer", weight
        X = self._centred(X)
        self.gain = (X.square().mean(-1, keepdim=True) + eps).rsqrt()
        self.hat = X * self.gain

    def apply(self, v: Tensor) -> Tensor:
        """J v."""
        moved = self._inner(self.domain.lift(v)[0])
        return self.domain.lay([moved if self.weight is None else self.weight * moved])

    def adjoint(self, u: Tensor) -> Tensor:
        """J^T u."""
        g = self.domain.lift(u)[0]
        return self.domain.lay([self._inner(g if self.weight is None else self.weight * g)])

    def ceiling(self) -> Tensor:
        """max|gamma| times the largest gain."""
        top = self.gain.amax()
        return top if self.weight is None else top * self.weight.abs().amax()

    def _inner(self, v: Tensor) -> Tensor:
        v = self._centred(v)
        return self.gain * (v - self.hat * (self.hat * v).mean(-1, keepdim=True))

    def _centred(self, v: Tensor) -> Tensor:
        return v - v.mean(-1, keepdim=True) if self.centre else v


@final
class Diagonal(Operator):
    """Multiplication by a tensor, number by number."""

    def __init__(self, slopes: Tensor) -> None:
        self.slopes = slopes
        self.domain = self.codomain = space((slopes,), 0, several=False)
        self.dtype, self.device = slopes.dtype, slopes.device

    def apply(self, v: Tensor) -> Tensor:
        """Slopes times v."""
        return v * self.slopes.flatten()

    def adjoint(self, u: Tensor) -> Tensor:
        """The same."""
        return self.apply(u)

    def ceiling(self) -> Tensor:
        """The steepest slope: exact."""
        return self.slopes.abs().amax()


@final
class TokenMap(Operator):
    """v -> v W for every token: (..., M) -> (..., M')."""

    def __init__(self, X: Tensor, W: Tensor) -> None:
        self.W = W
        self.domain = space((X,), 0, several=False)
        self.codomain = Space(((*X.shape[:-1], W.shape[-1]),))
        self.dtype, self.device = W.dtype, W.device

    def apply(self, v: Tensor) -> Tensor:
        """v W."""
        return self.codomain.lay([self.domain.lift(v)[0] @ self.W])

    def adjoint(self, u: Tensor) -> Tensor:
        """u W^T."""
        return self.domain.lay([self.codomain.lift(u)[0] @ self.W.mT])

    def ceiling(self) -> Tensor:
        """The Frobenius norm of W."""
        return self.W.square().sum().sqrt()
