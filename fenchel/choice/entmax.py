"""Entmax and sparsemax: choice under Tsallis entropy, sparse for every alpha > 1.

    Entmax       Omega(p) = sum_i (p_i^alpha - p_i) / (alpha (alpha - 1))
                 p_i      = [(alpha - 1) x_i - tau]_+ ^ (1 / (alpha - 1)),       sum_i p_i = 1
                 s_i      = p_i^(2 - alpha)                                      on the support
    Sparsemax    Omega(p) = sum_i (p_i^2 - p_i) / 2,    p_i = [x_i - tau]_+,    s_i = 1

Sparsemax is entmax at alpha = 2: the projection onto the simplex, piecewise linear, and J is beta
times a projection. alpha -> 1 tends to softmax. entmax_solver.py computes tau.

**Derivatives.** With J = diag(s) - s s^T / sum(s),

    dp = J (dx - m dalpha).

alpha may be a tensor and learn: omega'(p_i) = x_i - nu on the support holds while alpha moves, so
dalpha acts like the move of scores -m dalpha, where m is omega' differentiated by alpha,

    omega'(p_i) = l_i E(w_i),    m_i = l_i^2 E'(w_i)                      up to constants,
    l_i = log p_i,    w_i = (alpha - 1) l_i,    E(w) = (e^w - 1) / w.

As alpha tends to 1, E tends to 1 and E' to 1/2, while the difference (p^(alpha - 1) - 1) /
(alpha - 1) and its derivatives lose all digits. For small w, E and its derivatives are computed as
means over s in [0, 1] of e^(w s), s e^(w s), ..., and log(1 + w) / w as that of 1 / (1 + w s), by
Gauss's quadrature: sums of positive terms, exact to rounding.

There are two forms of one function. For plain tensors it is an ``autograd.Function`` that saves
only the weights and is differentiable any number of times, in reverse and with dual numbers.
torch.compile drops the jvp of such a function, and torch.func.jvp of torch.func.jvp takes it for 0,
both silently; for them ``_traced`` computes the same in plain operations, with the derivative
restored by Newton steps.

**The l2 constant.** Over all p, the largest eigenvalue of J is beta times the largest |w|_2^2 over
w with sum(w) = 0 and |w|_m = 1, m = 2 / (3 - alpha), for 1 < alpha <= 2. It is attained either by
two equal weights or by one heavy weight and K - 1 equal light ones:

    2^(alpha - 2)      or      K / (K - 1) / (1 + (K - 1)^(1 - m))^(2 / m),

whichever is larger. Above alpha = 2 two alternatives have max(2, 2^(alpha - 2)), and more have no
bound, since s grows without limit as a weight tends to 0. Proof: docs/maths/choice.md.

Martins and Astudillo (2016), From softmax to sparsemax.
Peters, Niculae and Martins (2019), Sparse sequence-to-sequence models.
Correia, Niculae and Martins (2019), Adaptively sparse transformers.
"""

import math
from dataclasses import dataclass
from typing import Any, final

import numpy as np
import torch
from torch import Tensor

from fenchel.choice import entmax_solver
from fenchel.choice.base import (
    FORBIDDEN,
    Choice,
    centred,
    float32_or_better,
    is_plain,
    is_readable,
    relative,
    require_positive,
)
from fenchel.choice.entmax_solver import origin


def tsallis(x: Tensor, alpha: float | Tensor) -> Tensor:
    """The Tsallis choice for the scores x, differentiable: (..., K) -> (..., K)."""
    if x.shape[-1] == 0:
        return x
    if (wide := float32_or_better(x)).dtype != x.dtype:
        return tsallis(wide, alpha).to(x.dtype)
    if isinstance(alpha, Tensor):
        if alpha.ndim > 0 and alpha.shape[-1] != 1:
            raise ValueError(
                "alpha needs one entry along the axis of the choice, got shape "
                f"{tuple(alpha.shape)} for scores of shape {tuple(x.shape)}."
            )
        alpha = alpha.to(x.dtype)
        x = x.expand(torch.broadcast_shapes(x.shape, alpha.shape))  # type: ignore[no-untyped-call]
    if not is_plain(x) or (isinstance(alpha, Tensor) and not is_plain(alpha)):
        return _traced(x, alpha)
    p: Tensor = _Tsallis.apply(x, alpha)  # type: ignore[no-untyped-call]
    return p


def spread(p: Tensor, alpha: float | Tensor) -> Tensor:
    """p^(2 - alpha) on the support, 0 off it."""
    # The inner where keeps 0 ** (2 - alpha) out of the graph: its derivative is infinite, and
    # an infinity masked afterwards still returns nan.
    on = p > 0
    return torch.where(on, torch.where(on, p, 1.0).pow(2.0 - alpha), 0.0)


class _Tsallis(torch.autograd.Function):
    """``entmax_solver.solve`` with J as its derivative."""

    @staticmethod
    def forward(x: Tensor, alpha: float | Tensor) -> Tensor:
        return entmax_solver.solve(x, alpha)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, float | Tensor], output: Tensor) -> None:
        _, alpha = inputs
        ctx.alpha = None if isinstance(alpha, Tensor) else alpha
        saved = (output, alpha) if isinstance(alpha, Tensor) else (output,)
        ctx.save_for_backward(*saved)
        ctx.save_for_forward(*saved)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None]:
        p, alpha = _saved(ctx)
        if not torch.is_grad_enabled():
            move = entmax_solver.jacobian_product(p, grad, alpha)
        else:
            move = _jacobian_product(p, grad, alpha)
        if ctx.alpha is not None:
            return move, None
        return move, -(move * _slope_by_alpha(p, alpha)).sum_to_size(alpha.shape)

    @staticmethod
    def jvp(ctx: Any, dx: Tensor | None, dalpha: Tensor | None) -> Tensor:
        p, alpha = _saved(ctx)
        move = torch.zeros_like(p) if dx is None else dx
        if dalpha is not None:
            move = move - _slope_by_alpha(p, alpha) * dalpha
        return _jacobian_product(p, move, alpha)


def _jacobian_product(p: Tensor, v: Tensor, alpha: float | Tensor) -> Tensor:
    """J v, where the entries of s are unbounded for alpha > 2."""
    s = spread(p, alpha)
    return centred(s, relative(s, v) if isinstance(alpha, Tensor) or alpha > 2.0 else v)


def _saved(ctx: Any) -> tuple[Tensor, Any]:
    return ctx.saved_tensors if ctx.alpha is None else (*ctx.saved_tensors, ctx.alpha)


def _slope_by_alpha(p: Tensor, alpha: Tensor) -> Tensor:
    """m on the support, 0 off it."""
    log_p = torch.where(p > 0, p, 1.0).log()
    return log_p.square() * expm1_ratio_slope((alpha - 1.0) * log_p)


def _nodes(count: int) -> list[tuple[float, float]]:
    """Points s of [0, 1] and weights, exact for polynomials of degree below 2 count."""
    points, weights = np.polynomial.legendre.leggauss(count)
    return [
        ((1.0 + s) / 2.0, w / 2.0) for s, w in zip(points.tolist(), weights.tolist(), strict=True)
    ]


_NODES = {torch.float32: _nodes(4), torch.float64: _nodes(7)}


def expm1_ratio(w: Tensor) -> Tensor:
    """E(w) = (e^w - 1) / w, with derivatives that are exact near 0 too.

    >>> expm1_ratio(torch.tensor([0.0, -1.0]))
    tensor([1.0000, 0.6321])
    """
    near = w.abs() < 1.0
    small, large = torch.where(near, w, 0.0), torch.where(near, 1.0, w)
    mean = sum(weight * (s * small).exp() for s, weight in _NODES[w.dtype])
    return torch.where(near, mean, large.expm1() / large)


def expm1_ratio_slope(w: Tensor) -> Tensor:
    """E'(w) = (e^w (w - 1) + 1) / w^2, with derivatives that are exact near 0 too.

    >>> expm1_ratio_slope(torch.tensor([0.0, -1.0]))
    tensor([0.5000, 0.2642])
    """
    near = w.abs() < 1.0
    small, large = torch.where(near, w, 0.0), torch.where(near, 1.0, w)
    mean = sum(weight * s * (s * small).exp() for s, weight in _NODES[w.dtype])
    return torch.where(near, mean, (large.exp() * (large - 1.0) + 1.0) / large.square())


def log1p_ratio(w: Tensor) -> Tensor:
    """log(1 + w) / w for w > -1, with derivatives that are exact near 0 too.

    >>> log1p_ratio(torch.tensor([0.0, -0.5]))
    tensor([1.0000, 1.3863])
    """
    near = w.abs() < 0.15
    small, large = torch.where(near, w, 0.0), torch.where(near, 1.0, w)
    mean = sum(weight / (1.0 + s * small) for s, weight in _NODES[w.dtype])
    return torch.where(near, mean, large.log1p() / large)


def _traced(x: Tensor, alpha: float | Tensor) -> Tensor:
    """``tsallis`` in operations that torch.compile and torch.func differentiate themselves.

    One opaque operation gives the threshold as a constant, measured from the score of alternative
    j and divided by alpha - 1, so that it has a limit as alpha tends to 1. Two Newton steps from
    there leave its value unchanged and restore its dependence on x and alpha: each step squares the
    error of the derivatives, so the first three are exact.
    """
    fixed = x.detach()
    top = fixed.amax(-1, keepdim=True)
    empty = top == FORBIDDEN
    x, fixed, top = (t.masked_fill(empty, 0.0) for t in (x, fixed, top))
    constant = torch.as_tensor(alpha, dtype=x.dtype, device=x.device).detach()
    j, d = _threshold((constant - 1.0) * (fixed - top), constant)
    below, T = x - x.gather(-1, j), d / (constant - 1.0)
    for _ in range(2):
        on, log_p = _log_weights(below + T, alpha)
        f = torch.where(on, log_p.exp(), 0.0).sum(-1, keepdim=True)
        g = torch.where(on, ((2.0 - alpha) * log_p).exp(), 0.0).sum(-1, keepdim=True)
        T = T - (f - 1.0) / g
    on, log_p = _log_weights(below + T, alpha)
    p = torch.where(on, log_p.exp(), 0.0)
    return (p / p.sum(-1, keepdim=True)).masked_fill(empty, 0.0)


def _log_weights(v: Tensor, alpha: float | Tensor) -> tuple[Tensor, Tensor]:
    """The support, and log p on it for u = origin + (alpha - 1) v; off it 0, with no derivative."""
    start, rate = origin(alpha), alpha - 1.0
    on = rate * v > -start
    v = torch.where(on, v, (1.0 - start) / rate)
    if not isinstance(alpha, Tensor):
        return on, ((rate * v).log1p() if alpha < 1.5 else (rate * v).log()) / rate
    near_one = alpha < 1.5
    near, far = torch.where(near_one, v, 0.0), torch.where(near_one, 1.0 / rate, v)
    return on, torch.where(near_one, near * log1p_ratio(rate * near), (rate * far).log() / rate)


@torch.library.custom_op("fenchel::tsallis_threshold", mutates_args=())
def _threshold(y: Tensor, alpha: Tensor) -> tuple[Tensor, Tensor]:
    return entmax_solver.thresholds(y, alpha if alpha.numel() > 1 else alpha.item())


@_threshold.register_fake
def _(y: Tensor, alpha: Tensor) -> tuple[Tensor, Tensor]:
    del alpha
    shape = (*y.shape[:-1], 1)
    return y.new_empty(shape, dtype=torch.int64), y.new_empty(shape)


@_threshold.register_vmap
def _(
    info: Any, in_dims: tuple[int | None, int | None], y: Tensor, alpha: Tensor
) -> tuple[tuple[Tensor, Tensor], tuple[int, int]]:
    y_dim, alpha_dim = in_dims
    ndim, size = y.ndim - (y_dim is not None), info.batch_size
    y = y.expand(size, *y.shape) if y_dim is None else y.movedim(y_dim, 0)
    if alpha_dim is not None:  # its own axes stay aligned with the last ones of y
        alpha = alpha.movedim(alpha_dim, 0)
        alpha = alpha.reshape(size, *(1,) * (ndim + 1 - alpha.ndim), *alpha.shape[1:])
    return _threshold(y, alpha), (0, 0)


@final
@dataclass(frozen=True)
class Entmax(Choice):
    """Tsallis choice with exponent ``alpha``, 1 < alpha <= 4.

    >>> import torch
    >>> Entmax(alpha=2.0).weights(torch.tensor([1.0, 0.8, -3.0]))
    tensor([0.6000, 0.4000, 0.0000])
    """

    alpha: float | Tensor = 1.5
    """The exponent; a tensor may learn, broadcasts against z and has one entry along the axis."""
    beta: float | Tensor = 1.0

    def __post_init__(self) -> None:
        require_positive("Entmax", self.beta)
        if isinstance(self.alpha, Tensor):
            good = not is_readable(self.alpha) or bool(((self.alpha > 1) & (self.alpha <= 4)).all())
        else:
            good = 1.0 < self.alpha <= 4.0
        if not good:
            raise ValueError(
                f"Entmax needs 1 < alpha <= 4, got alpha={self.alpha}; "
                "for alpha = 1 use fenchel.choice.Softmax."
            )

    def choose(self, x: Tensor) -> Tensor:
        return tsallis(x, self.alpha)

    def omega(self, p: Tensor) -> Tensor:
        """(p^alpha - p) / (alpha (alpha - 1)), in a form that keeps its digits as alpha -> 1."""
        rate, log_p = self.alpha - 1.0, torch.where(p > 0, p, 1.0).log()
        if isinstance(rate, Tensor):  # which may learn
            return p * log_p * expm1_ratio(rate * log_p) / self.alpha
        return p * torch.expm1(rate * log_p) / (self.alpha * rate)

    def slope(self, p: Tensor) -> Tensor:
        """(p^(alpha - 1) - 1) / (alpha - 1) + 1 / alpha."""
        return torch.expm1((self.alpha - 1.0) * p.log()) / (self.alpha - 1.0) + 1.0 / self.alpha

    def response(self, y: Tensor) -> Tensor:
        """[1 + (alpha - 1) (y - 1 / alpha)]_+ ^ (1 / (alpha - 1))."""
        w = (self.alpha - 1.0) * (y - 1.0 / self.alpha)
        return (w.clamp(min=-1.0).log1p() / (self.alpha - 1.0)).exp()

    def spread(self, p: Tensor) -> Tensor:
        return spread(float32_or_better(p), self.alpha)

    @property
    def spread_falls(self) -> bool | Tensor:
        """Above alpha = 2."""
        return self.alpha > 2.0

    def jacobian_product(self, p: Tensor, v: Tensor) -> Tensor:
        wide = float32_or_better(p)
        return (self.beta * _jacobian_product(wide, v.to(wide.dtype), self.alpha)).to(p.dtype)

    def divergence(self, y: Tensor, p: Tensor) -> Tensor:
        """(y^alpha - p^alpha - alpha p^(alpha - 1) (y - p)) / (alpha (alpha - 1))."""
        r = (y - p) / p
        excess = torch.expm1((self.alpha - 1.0) * r.log1p()) / (self.alpha - 1.0)
        return p.pow(self.alpha) / self.alpha * ((1.0 + r) * excess - r)

    def lipschitz(self, K: int) -> float | Tensor:
        """beta times the larger of the two values in the module docstring."""
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


@final
@dataclass(frozen=True)
class Sparsemax(Choice):
    """The distribution nearest to the scores in Euclidean distance.

    >>> import torch
    >>> Sparsemax().weights(torch.tensor([1.0, 0.8, -3.0]))
    tensor([0.6000, 0.4000, 0.0000])
    """

    beta: float | Tensor = 1.0

    def __post_init__(self) -> None:
        require_positive("Sparsemax", self.beta)

    def choose(self, x: Tensor) -> Tensor:
        return tsallis(x, 2.0)

    def omega(self, p: Tensor) -> Tensor:
        return 0.5 * p * (p - 1.0)

    def slope(self, p: Tensor) -> Tensor:
        return p - 0.5

    def response(self, y: Tensor) -> Tensor:
        return (y + 0.5).clamp(min=0.0)

    def spread(self, p: Tensor) -> Tensor:
        return float32_or_better((p > 0).to(p.dtype))

    def divergence(self, y: Tensor, p: Tensor) -> Tensor:
        return 0.5 * (y - p).square()

    def lipschitz(self, K: int) -> float | Tensor:
        """beta, and 0 for a single alternative: a projection is 1-Lipschitz."""
        return self.beta * (1.0 if K > 1 else 0.0)
