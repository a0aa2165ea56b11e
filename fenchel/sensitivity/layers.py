"""Layers with a Jacobian in closed form and a bound that holds over a ball, and their chains.

Every layer maps tokens (N, M) to tokens (N, M') and has ``ball_bound(X, ball)``: an upper bound of
|J'|_2, of |J' - J|_2 and of the gain in the norm max_i |x_i|, for all J' in the ball about X
(fenchel/sensitivity/perturbation.py).

Jacobians. LayerNorm and RMSNorm act on each token; with x^ = (x - mean) / s or x / r and 1 / s the
gain,

    J v   = gamma / s (v~ - x^ <x^, v~> / d)         v~ = v - mean v for LayerNorm, v for RMSNorm
    J^T u = 1 / s (g~ - x^ <x^, g~> / d),            g = gamma u,  g~ centred in the same way

The projection inside is symmetric, so forward and reverse differ only in the place of gamma. An
activation multiplies by its slope: GELU by Phi(x) + x phi(x). Self-attention is the Jacobian of
attention between two linear maps, ``Projection`` (with the rotations of RoPE) and ``HeadJoin``.

Norm layers over a ball: with r the least sqrt(var + eps) in the ball and d the width,
|J'| <= max|gamma| / r and |J' - J| <= 2 max|gamma| rho / (sqrt(3 d) r^2). The second derivative of
maps like x / |x| is a symmetric form, so its norm is reached with all arguments equal, where it is
c (3 t - 3 tau t^3).

A gated MLP multiplies two linear maps of its token, y = a(g) u with g = x W_G and u = x W_U, and

    J = diag(a'(g) u) W_G^T + diag(a(g)) W_U^T        for every single token.

In the ball g_f moves by at most rho |W_G e_f| and u_f by rho |W_U e_f|, so the two diagonals move
by at most some d_f and e_f, |J' - J| <= |diag(d) W_G^T| + |diag(e) W_U^T|, and |J'| is at most that
plus |J|, which is a small matrix per token.

An output gate multiplies the outputs of another layer f by a function of the same token,
y_i = a(g_i) f_i(X) with g_i = x_i W_G, and

    J = diag(a(g)) Df + diag(a'(g) f) W_G^T            the second term for every single token.

In the ball f_i moves by at most tau = token rho; with s the steepest slope near g,

    |J'|     <= max a |Df'| + |diag(s (|f| + tau)) W_G^T|
    |J' - J| <= max a |Df' - Df| + max|a' - a| |Df'| + |diag(s tau + |f| |s' - s|) W_G^T|.

Norms of queries and keys (QK-norm): q = N(x W_Q) is not affine. Its derivative is at most
L_Q = gain |W_Q| anywhere in the ball, so bound A holds with L_Q 1 for A_i and L_K 1 for B_j; the
variation is then at most twice the bound.

Chains. The image of the ball of one layer lies in the ball of the next one (``BallBound.carry``).
Upper bounds multiply, and J_2' J_1' - J_2 J_1 = (J_2' - J_2) J_1' + J_2 (J_1' - J_1) gives the
variation. A skip connection adds one to the upper bound and nothing to the variation. So a network
has its own variation, and its norm at the centre plus that variation is an upper bound; the
product of the upper bounds is another, and the smaller one is used.

Rounding. The centre of a layer inside a chain is a computed one. Every layer bounds the distance of
its computed output from the exact one (``rounding``), by the usual rule for sums of n products,
|error| <= (n + c) eps (|X| |W| + |b|), and by its own gain for what its steps add up to.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, final

import torch
from torch import Tensor
from torch.nn import functional

from fenchel.attention import Angles, AttentionSpec, Prior, attend, rotate
from fenchel.attention.spec import SOFTMAX
from fenchel.choice import Choice
from fenchel.sensitivity.attention_ball import HeadBounds, head_bounds
from fenchel.sensitivity.attention_jacobian import attention_jacobian, self_attention_jacobian
from fenchel.sensitivity.autodiff import point, space
from fenchel.sensitivity.bounds.feedforward import SLOPES, linear, norm_layer, slope_range
from fenchel.sensitivity.norms import spectral
from fenchel.sensitivity.operator import Operator, Scaled, Space, identity
from fenchel.sensitivity.perturbation import (
    IDENTITY,
    Ball,
    BallBound,
    NormEstimator,
    TokenLayer,
)
from fenchel.sensitivity.rounding import frobenius, lengths, outward
from fenchel.sensitivity.weight_blocks import project, repeat_heads


@final
class NormJacobian(Operator):
    """d LayerNorm(X) or d RMSNorm(X): X (..., d)."""

    def __init__(self, X: Tensor, weight: Tensor | None, eps: float, kind: str) -> None:
        (X,) = point(X)
        self.domain = self.codomain = space((X,), 0, several=False)
        self.dtype, self.device = X.dtype, X.device
        self.centre, self.weight = kind == "layer", weight
        self.top = norm_layer(X, weight, eps=eps, kind=kind)
        X = self._centred(X)
        size = lengths(X).unsqueeze(-1) / X.shape[-1] ** 0.5
        self.gain = 1.0 / torch.hypot(size, torch.full_like(size, eps**0.5))
        self.hat = X * self.gain

    def apply(self, v: Tensor) -> Tensor:
        return self.domain.flatten([self.push(self.domain.unflatten(v)[0])])

    def adjoint(self, u: Tensor) -> Tensor:
        return self.domain.flatten([self.pull(self.domain.unflatten(u)[0])])

    def push(self, v: Tensor) -> Tensor:
        """J v for v shaped like X, after the axis of a stack."""
        moved = self._inner(v)
        return moved if self.weight is None else self.weight * moved

    def pull(self, g: Tensor) -> Tensor:
        """J^T g for g shaped like X, after the axis of a stack."""
        return self._inner(g if self.weight is None else self.weight * g)

    def ceiling(self) -> Tensor:
        """max|gamma| times the largest gain."""
        return self.top.double().amax()

    def _inner(self, v: Tensor) -> Tensor:
        v = self._centred(v)
        return self.gain * (v - self.hat * (self.hat * v).mean(-1, keepdim=True))

    def _centred(self, v: Tensor) -> Tensor:
        return v - v.mean(-1, keepdim=True) if self.centre else v


@final
class Diagonal(Operator):
    """Elementwise multiplication by a tensor."""

    def __init__(self, slopes: Tensor) -> None:
        self.slopes = slopes
        self.domain = self.codomain = space((slopes,), 0, several=False)
        self.dtype, self.device = slopes.dtype, slopes.device

    def apply(self, v: Tensor) -> Tensor:
        return v * self.slopes.flatten()

    def adjoint(self, u: Tensor) -> Tensor:
        return self.apply(u)

    def ceiling(self) -> Tensor:
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
        return self.codomain.flatten([self.domain.unflatten(v)[0] @ self.W])

    def adjoint(self, u: Tensor) -> Tensor:
        return self.domain.flatten([self.codomain.unflatten(u)[0] @ self.W.mT])

    def ceiling(self) -> Tensor:
        return frobenius(self.W)


@final
class Projection(Operator):
    """d (q, k, v) of a token matrix (N, M): linear maps per head, then norms and rotations."""

    def __init__(
        self,
        X: Tensor,
        W: Sequence[Tensor],
        rotations: Tensor | None,
        norms: Sequence[NormJacobian] = (),
    ) -> None:
        """W_Q (H, M, D), W_K (G, M, D) and W_V (G, M, E); ``rotations`` (N, D, D) or None.

        ``norms`` are those of the norm layers of queries and keys, or none.
        """
        self.W, self.rotations, self.norms = W, rotations, norms
        self.domain = space((X,), 0, several=False)
        shapes = tuple((w.shape[0], X.shape[0], w.shape[2]) for w in W)
        self.codomain = Space(shapes, (), several=True)
        self.dtype, self.device = X.dtype, X.device

    def apply(self, v: Tensor) -> Tensor:
        """(dq, dk, dv), flat."""
        dX = self.domain.unflatten(v)[0].unsqueeze(1)
        q, k, values = (dX @ w for w in self.W)
        if self.norms:
            q, k = self.norms[0].push(q), self.norms[1].push(k)
        if self.rotations is not None:
            q, k = (rotated(x, self.rotations) for x in (q, k))
        return self.codomain.flatten([q, k, values])

    def adjoint(self, u: Tensor) -> Tensor:
        """The gradient in X, summed over heads."""
        q, k, values = self.codomain.unflatten(u)
        if self.rotations is not None:
            q, k = (rotated(x, self.rotations.mT) for x in (q, k))
        if self.norms:
            q, k = self.norms[0].pull(q), self.norms[1].pull(k)
        parts = zip((q, k, values), self.W, strict=True)
        return self.domain.flatten([sum((g @ w.mT).sum(1) for g, w in parts)])  # type: ignore[list-item]


@final
class HeadJoin(Operator):
    """Heads (H, N, E) side by side, (N, H E), times W_O if there is one."""

    def __init__(
        self, heads: Space, W_O: Tensor | None, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.domain, self.W_O = heads, W_O
        H, N, E = heads.shapes[0]
        self.codomain = Space(((N, H * E if W_O is None else W_O.shape[-1]),))
        self.dtype, self.device = dtype, device

    def apply(self, v: Tensor) -> Tensor:
        joined = self.domain.unflatten(v)[0].transpose(1, 2).flatten(2)
        return self.codomain.flatten([joined if self.W_O is None else joined @ self.W_O])

    def adjoint(self, u: Tensor) -> Tensor:
        H, _, E = self.domain.shapes[0]
        g = self.codomain.unflatten(u)[0]
        g = g if self.W_O is None else g @ self.W_O.mT
        return self.domain.flatten([g.reshape(*g.shape[:-1], H, E).transpose(1, 2)])


def rotated(x: Tensor, rotations: Tensor) -> Tensor:
    """Each row of x (..., N, D) times the matrix of its position, (N, D, D)."""
    return torch.einsum("ned,...nd->...ne", rotations, x)


def rotation_matrices(angles: Angles, D: int, *, layout: str = "half") -> Tensor:
    """The rotary angles of N positions as matrices R_i with rotate(q)_i = R_i q_i: (N, D, D)."""
    N = angles.cos.shape[-2]
    columns = torch.eye(D, dtype=angles.cos.dtype, device=angles.cos.device)
    return rotate(columns.unsqueeze(1).expand(D, N, D), angles, layout=layout).permute(1, 2, 0)


@final
@dataclass(frozen=True, eq=False)
class SelfAttention(TokenLayer):
    """X -> attend(q, k, v) for affine q, k, v; heads side by side, times W_O if there is one.

    W_Q (M, D) or (H, M, D), W_K and W_V (M, .) or (G, M, .), W_O (H E, M'); ``biases``
    of q (D,) or (H, D), of k and v (D,) or (G, D). ``rotations`` (N, D, D) multiply queries and
    keys by position (RoPE, see ``rotation_matrices``), after ``qk_norm``, the norm layers of
    queries and keys per head. ``sink`` is the score of a key with value 0, (H,). ``bias`` is added
    after W_O.
    """

    W_Q: Tensor
    W_K: Tensor
    W_V: Tensor
    W_O: Tensor | None = None
    choice: Choice = SOFTMAX
    prior: Prior | None = None
    scale: float | None = None
    biases: tuple[Tensor | None, Tensor | None, Tensor | None] = (None, None, None)
    rotations: Tensor | None = None
    qk_norm: "tuple[NormLayer, NormLayer] | None" = None
    bias: Tensor | None = None
    sink: Tensor | None = None

    def __call__(self, X: Tensor) -> Tensor:
        out = self._joined(*self._qkv(X))
        out = out if self.W_O is None else out @ self.W_O
        return out if self.bias is None else out + self.bias

    def jacobian(self, X: Tensor) -> Operator:
        """Streamed: O(n d) memory."""
        bare = self.W_O is None and self.sink is None and self.W_Q.dim() == 2
        if self._is_linear and bare:
            return self_attention_jacobian(X, self.W_Q, self.W_K, self.W_V, **self._spec)
        q, k, v = (x.detach() for x in self._qkv(X))
        norms = [
            norm.jacobian(y) for norm, y in zip(self.qk_norm or (), self._affine(X), strict=False)
        ]
        moved = Projection(X, self._weights, self.rotations, norms)
        J = attention_jacobian(q, k, v, **self._spec, sink=self.sink) @ moved
        return HeadJoin(J.codomain, self.W_O, J.dtype, J.device) @ J

    def ball_bound(self, X: Tensor, ball: Ball, estimator: NormEstimator) -> BallBound:
        """The lesser of bound A and the exact norm at the centre plus bound B."""
        bounds = self.head_bounds(X, ball)
        if self.W_O is None:  # heads side by side: squares add
            upper, variation, token = (float(outward(lengths(part), len(part))) for part in bounds)
        else:  # heads are summed
            upper, variation, token = (float(outward(part.sum(), len(part))) for part in bounds)
        rounding = self.rounding(X)
        if self.qk_norm is not None:  # B needs affine queries and keys
            return BallBound(upper, 2.0 * upper, token, rounding)
        return estimator.from_centre(self.jacobian(X), BallBound(upper, variation, token, rounding))

    def rounding(self, X: Tensor) -> float:
        """By the errors of q, k and v, of scores, and the Lipschitz constant of the weights."""
        eps, N = torch.finfo(X.dtype).eps, len(X)
        lost, sizes = [], []
        affine, whole = self._affine(X), self._qkv(X)
        for at, (W, b) in enumerate(zip(self._weights, self.biases, strict=True)):
            error = _product_error(X, W, None if b is None else b.unsqueeze(-2))
            if self.qk_norm is not None and at < 2:
                error = self.qk_norm[at].gain(affine[at], error).double() * error
            size = lengths(whole[at].double())
            lost.append(float((error + 4.0 * (W.shape[-1] + 16) * eps * size).amax()))
            sizes.append(float(size.amax()))
        scale = 1.0 / math.sqrt(self.W_Q.shape[-1]) if self.scale is None else abs(self.scale)
        scores = scale * (lost[0] * (sizes[1] + lost[1]) + sizes[0] * lost[1])
        scores += 4.0 * (self.W_Q.shape[-1] + 16) * eps * scale * sizes[0] * sizes[1]
        if self.prior is not None:
            log = self.prior.log(N, N, H=self._heads, device=X.device, dtype=X.dtype).detach()
            scores += 8.0 * eps * float(log.masked_fill(log.isinf(), 0.0).abs().amax())
        if self.sink is not None:
            scores += 8.0 * eps * float(self.sink.masked_fill(self.sink.isinf(), 0.0).abs().amax())
            N += 1  # keys
        steep = float(torch.as_tensor(self.choice.lipschitz(N)).amax())
        weights = min(2.0, N * steep * scores + 64.0 * (N + 16) * eps)
        total = (weights * sizes[2] + lost[2]) * math.sqrt(N * self._heads)
        if self.W_O is None:
            return total * (1.0 + 1e-6)
        after = lengths(_product_error(self._joined(*whole), self.W_O, self.bias))
        return (total * float(linear(self.W_O)) + float(after)) * (1.0 + 1e-6)

    def head_bounds(self, X: Tensor, ball: Ball) -> HeadBounds:
        """Bounds per head, each with its own rows of W_O; computed in float64."""
        layer: SelfAttention = with_dtype(self, torch.float64)
        x = project(X.double(), *layer._weights)
        q, k, v = (repeat_heads(y, self._heads, -3)[None] for y in layer._qkv(X.double()))
        x = x._replace(q=q, k=k, v=v, rotations=layer.rotations)
        if layer.qk_norm is not None:
            x = x._replace(W=(*layer._gains(X.double(), ball), x.W[2]))
        W_O = layer.W_O
        out = None if W_O is None else W_O.reshape(self._heads, -1, W_O.shape[-1])
        return head_bounds(x, out, self._spec, ball, layer.sink)

    def _joined(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """The outputs of all heads side by side: (..., N, H E)."""
        out = attend(q, k, v, **self._spec, sink=self.sink)
        return out.transpose(-3, -2).flatten(-2)

    def _gains(self, X: Tensor, ball: Ball) -> tuple[Tensor, Tensor]:
        """L_Q 1 and L_K 1 for every head: (1, H, D, D) each."""
        assert self.qk_norm is not None
        both = []
        for norm, W, y in zip(self.qk_norm, self._weights[:2], self._affine(X)[:2], strict=True):
            size = linear(W)  # (H,) or (G,)
            rounding = 4.0 * (X.shape[-1] + 8) * torch.finfo(X.dtype).eps * lengths(y).amax(-1)
            radius = (size * ball.token + rounding).unsqueeze(-1)
            gain = norm.gain(y, radius).amax(-1) * size
            eye = torch.eye(W.shape[-1], dtype=X.dtype, device=X.device)
            both.append(repeat_heads(outward(gain).view(1, -1, 1, 1) * eye, self._heads))
        return both[0], both[1]

    @property
    def _heads(self) -> int:
        return self.W_Q.shape[-3] if self.W_Q.dim() > 2 else 1

    @property
    def _spec(self) -> AttentionSpec:
        return AttentionSpec(self.choice, self.prior, self.scale)

    @property
    def _is_linear(self) -> bool:
        """Whether q, k and v are X times a matrix and nothing more."""
        return all(part is None for part in (*self.biases, self.rotations, self.qk_norm))

    @property
    def _weights(self) -> tuple[Tensor, Tensor, Tensor]:
        W_Q, W_K, W_V = (w if w.dim() > 2 else w[None] for w in (self.W_Q, self.W_K, self.W_V))
        return W_Q, W_K, W_V

    def _qkv(self, X: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q (..., H, N, D), k (..., G, N, D), v (..., G, N, E)."""
        q, k, v = self._affine(X)
        if self.qk_norm is not None:
            q, k = (norm(x) for norm, x in zip(self.qk_norm, (q, k), strict=True))
        if self.rotations is not None:
            q, k = (rotated(x, self.rotations) for x in (q, k))
        return q, k, v

    def _affine(self, X: Tensor) -> list[Tensor]:
        """q, k and v before norms and rotations."""
        return [
            X.unsqueeze(-3) @ w if b is None else X.unsqueeze(-3) @ w + b.unsqueeze(-2)
            for w, b in zip(self._weights, self.biases, strict=True)
        ]


@final
@dataclass(frozen=True, eq=False)
class NormLayer(TokenLayer):
    """LayerNorm (kind "layer") or RMSNorm ("rms") of every token."""

    weight: Tensor | None = None
    bias: Tensor | None = None
    eps: float | None = 1e-5
    """None is torch's default for RMSNorm: the eps of the dtype in which it computes."""
    kind: str = "layer"

    def __call__(self, X: Tensor) -> Tensor:
        shape = X.shape[-1:]
        if self.kind == "layer":
            return functional.layer_norm(X, shape, self.weight, self.bias, self._eps(X))
        y = functional.rms_norm(X, shape, self.weight, self._eps(X))
        return y if self.bias is None else y + self.bias

    def jacobian(self, X: Tensor) -> NormJacobian:
        return NormJacobian(X, self.weight, self._eps(X), self.kind)

    def gain(self, X: Tensor, radius: float | Tensor) -> Tensor:
        """A bound of the gain within ``radius`` of every token: (..., M) -> (...)."""
        return norm_layer(X, self.weight, eps=self._eps(X), kind=self.kind, radius=radius)

    def _eps(self, X: Tensor) -> float:
        if self.eps is not None:
            return self.eps
        return torch.finfo(torch.promote_types(X.dtype, torch.float32)).eps

    def ball_bound(self, X: Tensor, ball: Ball, estimator: NormEstimator) -> BallBound:  # noqa: ARG002
        """max|gamma| / r at the least r of the ball, and the variation that follows from it."""
        gain = self.gain(X, ball.token)
        upper = float(gain.amax())
        size = 1.0 if self.weight is None else float(self.weight.abs().amax())
        rounding = self.rounding(X)
        if size == 0.0 or ball.token == 0.0:
            return BallBound(upper, 0.0, upper, rounding)
        steep = outward(2.0 * gain.double().amax() / size, X.shape[-1]) / (3.0 * X.shape[-1]) ** 0.5
        varied = min(float(steep) * upper * ball.token, 2.0 * upper)
        return BallBound(upper, varied, upper, rounding)

    def rounding(self, X: Tensor) -> float:
        """What the mean loses counts as a move of the token; the rest is relative."""
        eps = 4.0 * (X.shape[-1] + 16) * torch.finfo(X.dtype).eps
        move = eps * lengths(X.double())
        error = self.gain(X, move).double() * move + eps * lengths(self(X).double())
        if self.bias is not None:
            error = error + eps * lengths(self.bias.double())
        return float(lengths(error))


@final
@dataclass(frozen=True, eq=False)
class LinearLayer(TokenLayer):
    """X -> X W + b, with W (M, M')."""

    W: Tensor
    b: Tensor | None = None

    def __call__(self, X: Tensor) -> Tensor:
        return X @ self.W if self.b is None else X @ self.W + self.b

    def jacobian(self, X: Tensor) -> Operator:
        return TokenMap(X, self.W)

    def ball_bound(self, X: Tensor, ball: Ball, estimator: NormEstimator) -> BallBound:  # noqa: ARG002
        size = float(linear(self.W))
        rounding = float(lengths(_product_error(X, self.W, self.b)))
        return BallBound(size, 0.0, size, rounding)


def _product_error(X: Tensor, W: Tensor, b: Tensor | None) -> Tensor:
    """A bound on the rounding of each row of X W + b, in float64: (N, M) -> (..., N)."""
    terms = X.double().abs() @ W.double().abs()
    terms = terms if b is None else terms + b.double().abs()
    return lengths(terms) * (2.0 * (X.shape[-1] + 8) * torch.finfo(X.dtype).eps)


@final
@dataclass(frozen=True, eq=False)
class ElementwiseAffine(TokenLayer):
    """X -> weight X + bias, entry by entry: numbers, rows (M,) or matrices (N, M)."""

    weight: Tensor | None = None
    bias: Tensor | None = None

    def __call__(self, X: Tensor) -> Tensor:
        Y = X if self.weight is None else X * self.weight.to(X)
        return Y if self.bias is None else Y + self.bias.to(X)

    def jacobian(self, X: Tensor) -> Operator:
        weight = X.new_ones(()) if self.weight is None else self.weight.to(X)
        return Diagonal(weight.expand(X.shape))

    def ball_bound(self, X: Tensor, ball: Ball, estimator: NormEstimator) -> BallBound:  # noqa: ARG002
        size = 1.0 if self.weight is None else float(outward(self.weight.double().abs().amax()))
        terms = X.double().abs() * (1.0 if self.weight is None else self.weight.double().abs())
        terms = terms if self.bias is None else terms + self.bias.double().abs()
        eps = torch.finfo(X.dtype).eps
        return BallBound(size * (1.0 + 2.0 * eps), 0.0, size, 8.0 * eps * float(terms.norm()))


@final
@dataclass(frozen=True)
class ActivationLayer(TokenLayer):
    """An elementwise function known by name."""

    name: str

    def __call__(self, X: Tensor) -> Tensor:
        return _FUNCTIONS[self.name](X)

    def jacobian(self, X: Tensor) -> Operator:
        return Diagonal(SLOPES[self.name].at(X))

    def ball_bound(self, X: Tensor, ball: Ball, estimator: NormEstimator) -> BallBound:  # noqa: ARG002
        """The largest slope within the ball, and the largest change of a slope."""
        low, here, high = slope_range(self.name, X, ball.token)
        upper = float(torch.maximum(low.abs(), high.abs()).amax())
        varied = float(torch.maximum(high - here, here - low).amax())
        terms = lengths(X.double().flatten()) + lengths(self(X).double().flatten())
        return BallBound(upper, varied, upper, float(32.0 * torch.finfo(X.dtype).eps * terms))


@final
@dataclass(frozen=True, eq=False)
class GatedLayer(TokenLayer):
    """X -> a(X W_G + b_G) * (X W_U + b_U), the first half of a gated MLP: SwiGLU for a = "silu".

    W_G and W_U are (M, F), ``biases`` are b_G and b_U; a ``LinearLayer`` is the second half.
    """

    W_G: Tensor
    W_U: Tensor
    name: str = "silu"
    biases: tuple[Tensor | None, Tensor | None] = (None, None)

    def __call__(self, X: Tensor) -> Tensor:
        g, u = self._parts(X)
        return _FUNCTIONS[self.name](g) * u

    def jacobian(self, X: Tensor) -> Operator:
        (X,) = point(X)
        g, u = self._parts(X)
        gate = Diagonal(SLOPES[self.name].at(g) * u) @ TokenMap(X, self.W_G)
        return gate + Diagonal(_FUNCTIONS[self.name](g)) @ TokenMap(X, self.W_U)

    def ball_bound(self, X: Tensor, ball: Ball, estimator: NormEstimator) -> BallBound:  # noqa: ARG002
        """The largest |J| + |diag(d) W_G^T| + |diag(e) W_U^T| of a token, in float64."""
        layer: GatedLayer = with_dtype(self, torch.float64)
        rounded = self._rounding(X)
        X = X.double()
        g, u = layer._parts(X)
        W_G, W_U = layer.W_G.mT, layer.W_U.mT
        rounding = 4.0 * (X.shape[-1] + 8) * torch.finfo(X.dtype).eps
        size = ball.token + rounding * lengths(X).unsqueeze(-1)  # a move beyond the rounding of X W
        move_g, move_u = (
            size * lengths(W) + (0.0 if b is None else rounding * b.abs())
            for W, b in zip((W_G, W_U), layer.biases, strict=True)
        )
        low, slope, high = slope_range(self.name, g, move_g)
        d = torch.maximum(high - slope, slope - low) * (u.abs() + move_u) + slope.abs() * move_u
        e = torch.maximum(low.abs(), high.abs()) * move_g
        bounds = []
        for at_g, at_u, d_i, e_i in zip(slope * u, _FUNCTIONS[self.name](g), d, e, strict=True):
            parts = at_g.unsqueeze(-1) * W_G, at_u.unsqueeze(-1) * W_U
            lost = rounding * sum(lengths(part.flatten()) for part in parts)  # where they cancel
            moved = spectral(d_i.unsqueeze(-1) * W_G) + spectral(e_i.unsqueeze(-1) * W_U) + lost
            bounds.append(torch.stack((spectral(parts[0] + parts[1]) + moved, moved)))
        upper, variation = outward(torch.stack(bounds), sum(W_G.shape)).amax(0).tolist()
        return BallBound(upper, variation, upper, rounded)

    def _rounding(self, X: Tensor) -> float:
        """|a(g + dg) (u + du) - a(g) u| for the errors dg and du of X W_G and X W_U."""
        eps = torch.finfo(X.dtype).eps
        g, u = (part.double() for part in self._parts(X))
        dg, du = (
            2.0 * (X.shape[-1] + 8) * eps * (X.double().abs() @ W.double().abs() + offset)
            for W, offset in (
                (W, 0.0 if b is None else b.double().abs())
                for W, b in zip((self.W_G, self.W_U), self.biases, strict=True)
            )
        )
        low, _, high = slope_range(self.name, g, dg)
        a = _FUNCTIONS[self.name](g)
        steep = torch.maximum(low.abs(), high.abs())
        da = steep * dg + 32.0 * eps * (a.abs() + g.abs())
        return float(lengths((da * (u.abs() + du) + a.abs() * du + eps * (a * u).abs()).flatten()))

    def _parts(self, X: Tensor) -> tuple[Tensor, Tensor]:
        g, u = (
            X @ W if b is None else X @ W + b
            for W, b in zip((self.W_G, self.W_U), self.biases, strict=True)
        )
        return g, u


@final
@dataclass(frozen=True, eq=False)
class OutputGate(TokenLayer):
    """X -> a(X W_G + b_G) * f(X), entry by entry, for a layer f: (N, M) -> (N, F).

    W_G (M, F); a gate per head repeats its column for every entry of the head.
    """

    layer: TokenLayer
    W_G: Tensor
    name: str = "sigmoid"
    bias: Tensor | None = None

    def __call__(self, X: Tensor) -> Tensor:
        return _FUNCTIONS[self.name](self._gate(X)) * self.layer(X)

    def jacobian(self, X: Tensor) -> Operator:
        (X,) = point(X)
        g = self._gate(X)
        chosen = Diagonal(_FUNCTIONS[self.name](g)) @ self.layer.jacobian(X)
        return chosen + Diagonal(SLOPES[self.name].at(g) * self.layer(X)) @ TokenMap(X, self.W_G)

    def ball_bound(self, X: Tensor, ball: Ball, estimator: NormEstimator) -> BallBound:
        """By the bounds of f and the range of the gate, in float64."""
        inner = self.layer.ball_bound(X, ball, estimator)
        here: OutputGate = with_dtype(self, torch.float64, X.dtype)
        f, g = self.layer(X).double().abs(), here._gate(X.double())
        W, eps = here.W_G.mT, torch.finfo(X.dtype).eps
        lost = 4.0 * (X.shape[-1] + 8) * eps  # a move beyond the rounding of X W
        move = (ball.token + lost * lengths(X.double()).unsqueeze(-1)) * lengths(W)
        move = move if here.bias is None else move + lost * here.bias.abs()
        low, slope, high = slope_range(self.name, g, move)
        steep, bent = high, torch.maximum(high - slope, slope - low)  # both gates only rise
        tau = inner.token * ball.token + inner.rounding
        grown = float(outward(_FUNCTIONS[self.name](g + move)).amax())
        changed = float((steep * move).amax())
        near = spectral((steep * (f + tau)).unsqueeze(-1) * W).amax()
        away = spectral((steep * tau + f * bent).unsqueeze(-1) * W).amax()
        moved, varied = (float(outward(x, sum(W.shape))) for x in (near, away))
        rough = steep * lost * (lengths(X.double()).unsqueeze(-1) * lengths(W))
        rough = rough if here.bias is None else rough + steep * lost * here.bias.abs()
        rounding = lengths(((rough + 64.0 * eps * (1.0 + g.abs())) * (f + tau)).flatten())
        bound = BallBound(
            grown * inner.upper + moved,
            grown * inner.variation + changed * inner.upper + varied,
            grown * inner.token + moved,
            grown * inner.rounding + float(rounding),
        )
        return estimator.from_centre(self.jacobian(X), bound)

    def _gate(self, X: Tensor) -> Tensor:
        return X @ self.W_G if self.bias is None else X @ self.W_G + self.bias


def with_dtype(value: Any, dtype: torch.dtype, source: torch.dtype | None = None) -> Any:
    """A layer, a tuple or a tensor with all floating tensors in ``dtype``; others as they are.

    ``source`` is the dtype in which the layer is used, that of its weights by default: the eps of
    an RMSNorm without one is that of its dtype.
    """
    if isinstance(value, Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    if isinstance(value, tuple):
        return tuple(with_dtype(part, dtype, source) for part in value)
    if not isinstance(value, TokenLayer) or not is_dataclass(value):
        return value
    parts = {f.name: with_dtype(getattr(value, f.name), dtype, source) for f in fields(value)}
    if isinstance(value, NormLayer):
        like = value.weight if source is None else torch.empty(0, dtype=source)
        parts["eps"] = value.eps if like is None else value._eps(like)
    return replace(value, **parts)


@final
@dataclass(frozen=True)
class Residual(TokenLayer):
    """X -> skip X + scale (the sum of branches), each a function of X: several are parallel."""

    branch: TokenLayer
    parallel: tuple[TokenLayer, ...] = ()
    scale: float = 1.0
    skip: float = 1.0

    def __call__(self, X: Tensor) -> Tensor:
        total = self.branch(X)
        for branch in self.parallel:
            total = total + branch(X)
        total = self.scale * total
        return total if self.skip == 0.0 else self.skip * X + total

    def jacobian(self, X: Tensor) -> Operator:
        parts = [] if self.skip == 0.0 else [_scaled(identity(X), self.skip)]
        branches = (self.branch, *self.parallel)
        parts += [_scaled(branch.jacobian(X), self.scale) for branch in branches]
        J = parts[0]
        for part in parts[1:]:
            J = J + part
        return J

    def ball_bound(self, X: Tensor, ball: Ball, estimator: NormEstimator) -> BallBound:
        """The sum of the bounds of the branches and of the skip, and of their variations."""
        bound, size = BallBound(abs(self.skip), 0.0, abs(self.skip)), abs(self.scale)
        terms = abs(self.skip) * float(X.double().norm())
        for branch in (self.branch, *self.parallel):
            inner = branch.ball_bound(X, ball, estimator)
            bound = bound.plus(BallBound(*(size * end for end in inner)))
            terms += size * float(branch(X).double().norm())
        rounding = 4.0 * (len(self.parallel) + 3) * torch.finfo(X.dtype).eps * terms
        bound = bound._replace(rounding=bound.rounding + rounding)
        return estimator.from_centre(self.jacobian(X), bound)


def _scaled(J: Operator, factor: float) -> Operator:
    return J if factor == 1.0 else Scaled(J, factor)


@final
@dataclass(frozen=True)
class Chain(TokenLayer):
    """Layers one after another."""

    layers: tuple[TokenLayer, ...]

    def __call__(self, X: Tensor) -> Tensor:
        for layer in self.layers:
            X = layer(X)
        return X

    def jacobian(self, X: Tensor) -> Operator:
        J = identity(X)
        for layer in self.layers:
            J, X = layer.jacobian(X) @ J, layer(X)
        return J

    def ball_bound(self, X: Tensor, ball: Ball, estimator: NormEstimator) -> BallBound:
        """The bounds of a product, or the norm at the centre plus the variation if smaller."""
        whole, J = IDENTITY, identity(X)
        for layer in self.layers:
            bound = layer.ball_bound(X, ball, estimator)
            J, X, ball = layer.jacobian(X) @ J, layer(X), bound.carry(ball)
            whole = bound.after(whole)
        return whole if len(self.layers) < 2 else estimator.from_centre(J, whole)


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
