"""Finite differences: Jacobians of functions without a forward derivative, and Taylor remainders.

``difference_jacobian``. With D(h) = (f(x + h t) - f(x - h t)) / 2h for the unit vector t along v,

    J v = |v| (4 D(h) - D(2h)) / 3  +  O(h^4),

four evaluations per product. The step h is ``step`` times the length of x; by default it is chosen
at the first product among eps^(1/5) and its halves, as the one of least error: a larger step cuts
the series too early, a smaller one shows the rounding of f. J^T u is f's own reverse derivative,
exact whatever kernel computes it; where there is none, ``J.T`` raises.

These products are estimates, and ``error`` bounds their error: four times the last correction,
(4/3) |D(h) - D(2h)|, the largest so far, relative to the largest |J v|. Where the series dominates,
that is far too much; where the rounding of f dominates, its share in J v is four times that in the
correction, hence the factor. ``spectral_norm`` widens its upper end by it; its lower end |J^T u|
needs only the reverse derivative and stays exact.

``remainder``. The first-order expansion and what it leaves out,

    f(x + h d) = f(x) + h J d + o(h),        remainder(h) = |f(x + h d) - f(x) - h J d|.

For a smooth f the remainder falls like h^2, a line of slope 2 in logarithms until rounding stops
it. A wrong derivative gives slope 1, a kink on the way something between.
The lesson ``attention_derivative`` plots both.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, final

import torch
from torch import Tensor

from fenchel.sensitivity.autodiff import jacobian, point, space, tensor_function
from fenchel.sensitivity.golub_kahan import length, scaled
from fenchel.sensitivity.operator import Operator, Tensors


@final
class DifferenceJacobian(Operator):
    """The derivative of ``f`` at ``x``, forward by differences and backward by f's own rule."""

    def __init__(self, f: Callable[..., Any], x: Tensors, batch: int, step: float | None) -> None:
        self.f, self.x = tensor_function(f), point(x)
        self.domain = space(self.x, batch, several=not isinstance(x, Tensor))
        with torch.no_grad():
            y = self.f(*self.x)
        self.codomain = space((y,), batch, several=False)
        self.dtype, self.device = self.x[0].dtype, self.x[0].device
        if step is not None and not 0.0 < step < 1.0:
            raise ValueError(f"a step is a fraction of the length of x, in (0, 1); got {step}.")
        self.step = step
        size = length(self.domain.flatten([part[None] for part in self.x])[0])
        self._size = torch.where(size > 0, size, 1.0)
        self._off = self._size.new_zeros(())
        self._top = self._size.new_zeros(())

    @property
    def error(self) -> float:
        """The largest error so far, relative to the largest product; at least the rounding."""
        relative = float(self._off / self._top) if self._top > 0 else 0.0
        return relative + 32.0 * torch.finfo(self.dtype).eps

    def apply(self, v: Tensor) -> Tensor:
        """J v, four evaluations per vector."""
        return torch.stack([self._difference(move) for move in v])

    def adjoint(self, u: Tensor) -> Tensor:
        """J^T u by reverse mode."""
        with torch.enable_grad():
            x = [part.clone().requires_grad_() for part in self.x]
            y = self.f(*x)
        if not y.requires_grad:
            raise ValueError(
                "f has no reverse derivative, so J.T @ u cannot be computed; J @ v can."
            )
        backs = [
            torch.autograd.grad(
                y, x, self.codomain.unflatten(gradient[None])[0][0], retain_graph=True
            )
            for gradient in u
        ]
        return self.domain.flatten([torch.stack(parts) for parts in zip(*backs, strict=True)])

    def _difference(self, v: Tensor) -> Tensor:
        size = length(v)
        t = scaled(v, size)
        best, off = self._extrapolated(t, self._calibrated(t))
        self._off = torch.maximum(self._off, 4.0 * length(off).amax())
        self._top = torch.maximum(self._top, length(best).amax())
        return best * size.unsqueeze(-1).to(best)

    def _calibrated(self, t: Tensor) -> float:
        """The step: the one given, or that of least error along t."""
        if self.step is None:
            eps = torch.finfo(self.dtype).eps
            steps = [0.5**i * eps**0.2 for i in range(9)]
            errors = [float(length(self._extrapolated(t, step)[1]).amax()) for step in steps]
            self.step = steps[errors.index(min(errors))]
        return self.step

    def _extrapolated(self, t: Tensor, step: float) -> tuple[Tensor, Tensor]:
        """J t, and the last correction made to it."""
        h = step * self._size
        near, far = self._central(t, h), self._central(t, 2.0 * h)
        off = (near - far) / 3.0
        return near + off, off

    def _central(self, t: Tensor, h: Tensor) -> Tensor:
        move = t * h.unsqueeze(-1).to(t)
        with torch.no_grad():
            ahead, behind = (
                self.f(*(x + sign * part[0] for x, part in zip(self.x, parts, strict=True)))
                for parts in (self.domain.unflatten(move[None]),)
                for sign in (1.0, -1.0)
            )
        flat = self.codomain.flatten([(ahead - behind)[None]])[0]
        return flat / (2.0 * h.unsqueeze(-1)).to(flat)


def difference_jacobian(
    f: Callable[..., Any], x: Tensors, *, batch: int = 0, step: float | None = None
) -> DifferenceJacobian:
    """The Jacobian of ``f`` at ``x`` by finite differences; arguments as in ``jacobian``.

    ``step`` is relative to the length of x.
    """
    return DifferenceJacobian(f, x, batch, step)


class Remainder(NamedTuple):
    """What a first-order expansion leaves out."""

    h: Tensor
    error: Tensor
    """|f(x + h d) - f(x) - h J d| for every h."""
    slope: float
    """Of log error over log h, over the steps where the error is clear of rounding."""


def remainder(
    f: Callable[..., Any], x: Tensor, d: Tensor, *, J: Operator | None = None, steps: int = 12
) -> Remainder:
    """The remainder along d for h = 1, 1/2, 1/4, ...; ``J`` is the derivative to test."""
    f, x, d = tensor_function(f), x.detach(), d.detach()
    first = (jacobian(f, x) if J is None else J) @ d
    h = 0.5 ** torch.arange(steps, dtype=torch.float64)
    with torch.no_grad():
        y = f(x)
        error = torch.stack(
            [(f(x + float(t) * d) - y - float(t) * first).double().norm() for t in h]
        )
    clear = error > 1e3 * torch.finfo(x.dtype).eps * float(y.double().norm())
    if int(clear.sum()) < 2:
        return Remainder(h, error, float("nan"))  # linear, to the precision of the dtype
    a, b = h[clear].log(), error[clear].log()
    # In the last steps the leading term dominates.
    a, b = a[-4:], b[-4:]
    a, b = a - a.mean(), b - b.mean()
    return Remainder(h, error, float((a * b).sum() / a.square().sum()))
