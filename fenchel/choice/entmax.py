"""Entmax: choice under Tsallis entropy, sparse for every alpha > 1.

    Omega(p) = sum_i (p_i^alpha - p_i) / (alpha (alpha - 1))
    p_i      = [(alpha - 1) x_i - tau]_+ ^ (1 / (alpha - 1)),       sum_i p_i = 1
    s_i      = p_i^(2 - alpha)                                      on the support

alpha = 2 is sparsemax; alpha -> 1 tends to softmax. Both have files of their own.

alpha may be a tensor and learn. omega'(p_i) = x_i - nu on the support holds while alpha
moves, so a move (dx, dalpha) acts like the move of scores dx - (d omega' / d alpha) dalpha:

    dp = J (dx - m dalpha),    m_i = p_i^(alpha - 1) (log p_i - 1 / (alpha - 1)) / (alpha - 1).

Peters, Niculae and Martins (2019), Sparse sequence-to-sequence models.
Correia, Niculae and Martins (2019), Adaptively sparse transformers.
"""

from dataclasses import dataclass, replace
from typing import Any, Self, final

import torch
from torch import Tensor

from fenchel.choice.base import FORBIDDEN, Choice, centred, positive
from fenchel.choice.threshold import bisect, powers


@final
@dataclass(frozen=True)
class Entmax(Choice):
    """Tsallis choice with exponent ``alpha``, 1 < alpha <= 4.

    >>> import torch
    >>> Entmax(alpha=2.0).weights(torch.tensor([1.0, 0.8, -3.0]))
    tensor([0.6000, 0.4000, 0.0000])
    """

    alpha: float | Tensor = 1.5
    beta: float | Tensor = 1.0

    def __post_init__(self) -> None:
        positive("Entmax", self.beta)
        if not isinstance(self.alpha, Tensor) and not 1.0 < self.alpha <= 4.0:
            raise ValueError(
                f"Entmax needs 1 < alpha <= 4, got alpha={self.alpha}; "
                "for alpha = 1 use fenchel.choice.Softmax."
            )

    def choose(self, x: Tensor) -> Tensor:
        """The argmax for the scores x: (..., K) -> (..., K)."""
        return tsallis(x, self.alpha)

    def omega(self, p: Tensor) -> Tensor:
        """(p^alpha - p) / (alpha (alpha - 1))."""
        on = p > 0
        power = torch.where(on, torch.where(on, p, 1.0).pow(self.alpha), 0.0)
        return (power - p) / (self.alpha * (self.alpha - 1.0))

    def slope(self, p: Tensor) -> Tensor:
        """p^(alpha - 1) / (alpha - 1) - 1 / (alpha (alpha - 1))."""
        return (p.pow(self.alpha - 1.0) - 1.0 / self.alpha) / (self.alpha - 1.0)

    def response(self, y: Tensor) -> Tensor:
        """[(alpha - 1) y + 1 / alpha]_+ ^ (1 / (alpha - 1))."""
        return powers((self.alpha - 1.0) * y + 1.0 / self.alpha, self.alpha)

    def spread(self, p: Tensor) -> Tensor:
        """p^(2 - alpha) on the support."""
        return spread(p, self.alpha)

    def lipschitz(self, K: int) -> float | Tensor:
        """To come."""
        raise NotImplementedError

    def along(self, axis: int, ndim: int) -> Self:
        """The same map with its alpha laid out for an axis that was moved last."""
        if axis == -1 or not isinstance(self.alpha, Tensor) or self.alpha.ndim == 0:
            return self
        leading = (1,) * (ndim - self.alpha.ndim)
        return replace(self, alpha=self.alpha.reshape(leading + self.alpha.shape).movedim(axis, -1))


def tsallis(x: Tensor, alpha: float | Tensor) -> Tensor:
    """The Tsallis choice for the scores x, differentiable: (..., K) -> (..., K)."""
    if x.shape[-1] == 0:
        return x
    if torch.compiler.is_compiling():
        return _traced(x, alpha)
    p: Tensor = _Tsallis.apply(x, alpha)  # type: ignore[no-untyped-call]
    return p


def spread(p: Tensor, alpha: float | Tensor) -> Tensor:
    """p^(2 - alpha) on the support, 0 off it."""
    # The inner where keeps 0 ** (2 - alpha) out of the graph: its derivative is infinite,
    # and an infinity masked afterwards still returns nan.
    on = p > 0
    return torch.where(on, torch.where(on, p, 1.0).pow(2.0 - alpha), 0.0)


def solve(x: Tensor, alpha: float | Tensor) -> Tensor:
    """The weights, with no derivative attached: (..., K) -> (..., K)."""
    x = _from_the_top(x, alpha)
    p = powers(x - bisect(x, alpha), alpha)
    total = p.sum(-1, keepdim=True)
    return p / torch.where(total > 0, total, 1.0)


def _from_the_top(x: Tensor, alpha: float | Tensor) -> Tensor:
    """(alpha - 1) (x - max x); a row that is -inf throughout stays so."""
    top = x.amax(-1, keepdim=True)
    return (alpha - 1.0) * (x - torch.where(top == FORBIDDEN, 0.0, top))


def _traced(x: Tensor, alpha: float | Tensor) -> Tensor:
    """``tsallis`` in plain operations alone, for a compiler that knows no custom derivative.

    tau comes without a derivative. Two Newton steps from it change nothing in value and
    put back its dependence on x and alpha, exact for first, second and third derivatives,
    since each step squares what is missing.
    """
    on_top = x.detach().amax(-1, keepdim=True)
    empty = on_top == FORBIDDEN
    y = (alpha - 1.0) * (x - torch.where(empty, 0.0, on_top))
    still = alpha.detach() if isinstance(alpha, Tensor) else alpha
    tau = bisect(y.detach(), still)
    r = 1.0 / (alpha - 1.0)
    for _ in range(2):
        on = y > tau
        u = torch.where(on, y - tau, 1.0)
        f = torch.where(on, u.pow(r), 0.0).sum(-1, keepdim=True)
        g = torch.where(on, u.pow(r - 1.0), 0.0).sum(-1, keepdim=True)
        f, g = torch.where(empty, 1.0, f), torch.where(empty, 1.0, g)
        tau = tau + (f - f.pow(1.0 - 1.0 / r)) / g
    on = y > tau
    p = torch.where(on, torch.where(on, y - tau, 1.0).pow(r), 0.0)
    return p / torch.where(empty, 1.0, p.sum(-1, keepdim=True))


class _Tsallis(torch.autograd.Function):
    """``solve`` with J for its derivative; saves the weights alone."""

    @staticmethod
    def forward(x: Tensor, alpha: float | Tensor) -> Tensor:
        return solve(x, alpha)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, float | Tensor], output: Tensor) -> None:
        _, alpha = inputs
        ctx.learns = isinstance(alpha, Tensor)
        ctx.alpha = None if ctx.learns else alpha
        saved = (output, alpha) if ctx.learns else (output,)
        ctx.save_for_backward(*saved)
        ctx.save_for_forward(*saved)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None]:
        p, alpha = _saved(ctx)
        move = centred(spread(p, alpha), grad)
        if not ctx.learns:
            return move, None
        return move, -(move * _marginal_by_alpha(p, alpha)).sum_to_size(alpha.shape)

    @staticmethod
    def jvp(ctx: Any, dx: Tensor | None, dalpha: Tensor | None) -> Tensor:
        p, alpha = _saved(ctx)
        move = torch.zeros_like(p) if dx is None else dx
        if dalpha is not None:
            move = move - _marginal_by_alpha(p, alpha) * dalpha
        return centred(spread(p, alpha), move)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, int | None], x: Tensor, alpha: Any) -> Any:
        x_dim, alpha_dim = in_dims
        ndim = x.ndim - (x_dim is not None)
        x = x.expand(info.batch_size, *x.shape) if x_dim is None else x.movedim(x_dim, 0)
        if alpha_dim is not None:
            alpha = alpha.movedim(alpha_dim, 0)
            alpha = alpha.reshape(-1, *(1,) * (ndim + 1 - alpha.ndim), *alpha.shape[1:])
        return tsallis(x, alpha), 0


def _saved(ctx: Any) -> tuple[Tensor, Any]:
    return ctx.saved_tensors if ctx.learns else (ctx.saved_tensors[0], ctx.alpha)


def _marginal_by_alpha(p: Tensor, alpha: Tensor) -> Tensor:
    """How omega'(p) moves with alpha, a common constant left out; 0 off the support."""
    on = p > 0
    q = torch.where(on, p, 1.0)
    m = q.pow(alpha - 1.0) * (q.log() - 1.0 / (alpha - 1.0)) / (alpha - 1.0)
    return torch.where(on, m, 0.0)
