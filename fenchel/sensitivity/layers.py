"""The derivatives of the small layers, written out.

LayerNorm and RMSNorm, token by token, with x^ = (x - mean) / s or x / r and 1 / s the gain:

    J v   = gamma / s (v~ - x^ <x^, v~> / d)         v~ = v - mean v for LayerNorm, v for RMSNorm
    J^T u = 1 / s (g~ - x^ <x^, g~> / d),            g = gamma u,  g~ centred in the same way

The projection inside is symmetric, so forward and reverse differ by where gamma stands. An
activation multiplies by its slope: GELU by Phi(x) + x phi(x). A rotation of queries and keys (RoPE)
is orthogonal: its reverse is the rotation by the opposite angles, and its gain is 1.

Layers that know how far they can move, and what follows when they stand in a row.

Every layer maps tokens (N, M) to tokens (N, M') and answers ``reach(X, ball)``; see
fenchel.sensitivity.layers for the words.

In a row, the ball is carried on: what the first layer does to it is the ball of the second. Uppers
multiply, and J_2' J_1' - J_2 J_1 = (J_2' - J_2) J_1' + J_2 (J_1' - J_1) gives the variation. Beside
a skip connection the upper grows by one and the variation stays. So a whole network has a
variation, and its own norm at the centre plus that variation bounds it; the product of uppers is
the other choice. Never a product of global constants.

Norm layers: with r the least sqrt(var + eps) in the ball and d the width, |J'| <= max|gamma| / r
and |J' - J| <= 2 max|gamma| rho / (sqrt(3 d) r^2). The second derivative of x / |x| type maps is a
symmetric form, so its norm is reached with all arguments equal, where it is c (3 t - 3 tau t^3).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor, nn
from torch.nn import functional

from fenchel.attention import Prior, attend
from fenchel.choice import Choice, Softmax
from fenchel.sensitivity.attention_ball import head_bounds
from fenchel.sensitivity.attention_jacobian import self_attention_jacobian
from fenchel.sensitivity.autodiff import jacobian, point, space
from fenchel.sensitivity.ball import Ball, BallBound, NormEstimator, TokenLayer
from fenchel.sensitivity.bounds.feedforward import SLOPES, linear, norm_layer, slope_range
from fenchel.sensitivity.operator import Operator, Space, identity
from fenchel.sensitivity.weight_blocks import project


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


_SOFTMAX = Softmax()


@final
@dataclass(frozen=True, eq=False)
class SelfAttention(TokenLayer):
    """X -> attend(X W_Q, X W_K, X W_V), heads side by side, times W_O if there is one.

    W_Q (M, D) or (H, M, D), W_K and W_V (M, .) or (G, M, .), W_O (H E, M').
    """

    W_Q: Tensor
    W_K: Tensor
    W_V: Tensor
    W_O: Tensor | None = None
    choice: Choice = _SOFTMAX
    prior: Prior | None = None
    scale: float | None = None

    def __call__(self, X: Tensor) -> Tensor:
        """(..., N, M) -> (..., N, M')."""
        q, k, v = (
            X.unsqueeze(-3) @ (w if w.dim() > 2 else w[None])
            for w in (self.W_Q, self.W_K, self.W_V)
        )
        out = attend(q, k, v, choice=self.choice, prior=self.prior, scale=self.scale)
        mixed = out.transpose(-3, -2).flatten(-2)
        return mixed if self.W_O is None else mixed @ self.W_O

    def jacobian(self, X: Tensor) -> Operator:
        """Streamed: O(n d) memory."""
        J = self._inner(X)
        if self.W_O is None and self._heads == 1:
            return J
        heads = J.codomain.shapes[0]

        def join(o: Tensor) -> Tensor:
            mixed = o.transpose(-3, -2).flatten(-2) if o.dim() > 2 else o
            return mixed if self.W_O is None else mixed @ self.W_O

        return jacobian(join, torch.zeros(heads, dtype=J.dtype, device=J.device)) @ J

    def ball_bound(self, X: Tensor, ball: Ball, estimator: NormEstimator) -> BallBound:
        """The lesser of bound A and the exact norm at the centre plus bound B."""
        x = project(X, self.W_Q, self.W_K, self.W_V)
        scale = x.q.shape[-1] ** -0.5 if self.scale is None else self.scale
        out = None if self.W_O is None else self.W_O.reshape(self._heads, -1, self.W_O.shape[-1])
        found = head_bounds(x, out, self.choice, self.prior, scale, ball)
        if out is None:  # heads stand side by side: squares add
            upper, variation, token = (float(part.norm()) for part in found)
        else:  # heads are summed
            upper, variation, token = (float(part.sum()) for part in found)
        return estimator.from_centre(self.jacobian(X), BallBound(upper, variation, token))

    @property
    def _heads(self) -> int:
        return self.W_Q.shape[-3] if self.W_Q.dim() > 2 else 1

    def _inner(self, X: Tensor) -> Operator:
        return self_attention_jacobian(
            X,
            self.W_Q,
            self.W_K,
            self.W_V,
            choice=self.choice,
            prior=self.prior,
            scale=self.scale,
        )


@final
@dataclass(frozen=True, eq=False)
class NormLayer(TokenLayer):
    """LayerNorm (kind "layer") or RMSNorm ("rms") of every token."""

    weight: Tensor | None = None
    bias: Tensor | None = None
    eps: float = 1e-5
    kind: str = "layer"

    def __call__(self, X: Tensor) -> Tensor:
        """(..., M) -> (..., M)."""
        shape = X.shape[-1:]
        if self.kind == "layer":
            return functional.layer_norm(X, shape, self.weight, self.bias, self.eps)
        y = functional.rms_norm(X, shape, self.weight, self.eps)
        return y if self.bias is None else y + self.bias

    def jacobian(self, X: Tensor) -> Operator:
        """In closed form."""
        return NormJacobian(X, self.weight, self.eps, self.kind)

    def ball_bound(self, X: Tensor, ball: Ball, estimator: NormEstimator) -> BallBound:  # noqa: ARG002
        """1 / r at its least r, and its slope."""
        gain = norm_layer(X, self.weight, eps=self.eps, kind=self.kind, radius=ball.token)
        upper = float(gain.amax())
        size = 1.0 if self.weight is None else float(self.weight.abs().amax())
        steep = 2.0 * upper**2 / (size * (3.0 * X.shape[-1]) ** 0.5) if size > 0 else 0.0
        return BallBound(upper, min(steep * ball.token, 2.0 * upper), upper)


@final
@dataclass(frozen=True, eq=False)
class LinearLayer(TokenLayer):
    """X -> X W + b, with W (M, M')."""

    W: Tensor
    b: Tensor | None = None

    def __call__(self, X: Tensor) -> Tensor:
        """(..., M) -> (..., M')."""
        return X @ self.W if self.b is None else X @ self.W + self.b

    def jacobian(self, X: Tensor) -> Operator:
        """W, for every token."""
        return TokenMap(X, self.W)

    def ball_bound(self, X: Tensor, ball: Ball, estimator: NormEstimator) -> BallBound:  # noqa: ARG002
        """|W|_2, the same everywhere."""
        size = float(linear(self.W))
        return BallBound(size, 0.0, size)


@final
@dataclass(frozen=True)
class ActivationLayer(TokenLayer):
    """An elementwise function known by name."""

    name: str

    def __call__(self, X: Tensor) -> Tensor:
        """Any shape."""
        return _FUNCTIONS[self.name](X)

    def jacobian(self, X: Tensor) -> Operator:
        """The slopes, number by number."""
        return Diagonal(SLOPES[self.name].at(X))

    def ball_bound(self, X: Tensor, ball: Ball, estimator: NormEstimator) -> BallBound:  # noqa: ARG002
        """The steepest slope near any number, and how far slopes differ from those at X."""
        low, here, high = slope_range(self.name, X, ball.token)
        upper = float(torch.maximum(low.abs(), high.abs()).amax())
        return BallBound(upper, float(torch.maximum(high - here, here - low).amax()), upper)


@final
@dataclass(frozen=True)
class Residual(TokenLayer):
    """X -> X + branch(X)."""

    branch: TokenLayer

    def __call__(self, X: Tensor) -> Tensor:
        """(..., M) -> (..., M)."""
        return X + self.branch(X)

    def jacobian(self, X: Tensor) -> Operator:
        """I + J of the branch."""
        return identity(X) + self.branch.jacobian(X)

    def ball_bound(self, X: Tensor, ball: Ball, estimator: NormEstimator) -> BallBound:
        """One more than the branch, and its variation."""
        inner = self.branch.ball_bound(X, ball, estimator)
        apart = BallBound(1.0 + inner.upper, inner.variation, 1.0 + inner.token)
        return estimator.from_centre(self.jacobian(X), apart)


@final
@dataclass(frozen=True)
class Chain(TokenLayer):
    """Layers one after another."""

    layers: tuple[TokenLayer, ...]

    def __call__(self, X: Tensor) -> Tensor:
        """Through all of them."""
        for layer in self.layers:
            X = layer(X)
        return X

    def jacobian(self, X: Tensor) -> Operator:
        """The product of theirs."""
        J = identity(X)
        for layer in self.layers:
            J, X = layer.jacobian(X) @ J, layer(X)
        return J

    def ball_bound(self, X: Tensor, ball: Ball, estimator: NormEstimator) -> BallBound:
        """The ball is carried through; uppers multiply, variations add up behind them."""
        whole, J = BallBound(1.0, 0.0, 1.0), identity(X)
        for layer in self.layers:
            one = layer.ball_bound(X, ball, estimator)
            J, X, ball = layer.jacobian(X) @ J, layer(X), one.carry(ball)
            whole = BallBound(
                one.upper * whole.upper,
                one.variation * whole.upper + one.upper * whole.variation,
                one.token * whole.token,
            )
        return whole if len(self.layers) < 2 else estimator.from_centre(J, whole)


def layer_of(f: object) -> TokenLayer | None:
    """The layer that a module of torch.nn is, in evaluation; None where none is known."""
    if isinstance(f, TokenLayer):
        return f
    if isinstance(f, nn.Sequential):
        parts = [layer_of(part) for part in f]
        known = [part for part in parts if part is not None]
        return Chain(tuple(known)) if len(known) == len(parts) else None
    if isinstance(f, nn.Linear):
        return LinearLayer(f.weight.detach().mT, None if f.bias is None else f.bias.detach())
    if isinstance(f, nn.LayerNorm | nn.RMSNorm) and len(f.normalized_shape) == 1:
        weight, bias = (
            None if part is None else part.detach() for part in (f.weight, getattr(f, "bias", None))
        )
        if isinstance(f, nn.LayerNorm):
            return NormLayer(weight, bias, f.eps, "layer")
        eps = f.eps if f.eps is not None else torch.finfo(torch.float32).eps
        return NormLayer(weight, None, eps, "rms")
    if isinstance(f, nn.GELU):
        return ActivationLayer("gelu" if f.approximate == "none" else "gelu_tanh")
    name = _MODULES.get(type(f))
    return None if name is None else ActivationLayer(name)


_MODULES: dict[type, str] = {
    nn.Identity: "identity",
    nn.ReLU: "relu",
    nn.SiLU: "silu",
    nn.Mish: "mish",
    nn.Tanh: "tanh",
    nn.Sigmoid: "sigmoid",
}

_FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "identity": lambda x: x,
    "relu": functional.relu,
    "relu2": lambda x: functional.relu(x).square(),
    "leaky_relu": functional.leaky_relu,
    "elu": functional.elu,
    "softplus": functional.softplus,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "gelu": functional.gelu,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "silu": functional.silu,
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "mish": functional.mish,
}
