"""What every choice map shares.

A choice map turns scores into weights by solving a small concave problem. With the scores
z, the inverse temperature beta, a prior u over the alternatives and x = beta z + log u,

    weights(z) = argmax_p  <p, x> - Omega(p)              over the simplex,
    value(z)   =    max_p [<p, x> - Omega(p)] / beta      whose gradient in z is weights(z).

u_i = 0, that is log_prior = -inf, forbids alternative i. Where all are forbidden there is no
p: weights gives zeros, value gives -inf, and every derivative of both is 0.

When Omega is a sum of one-dimensional terms, Omega(p) = sum_i omega(p_i), the optimality
conditions read omega'(p_i) = x_i - nu on the support, and the derivative of ``weights``
depends on one vector alone. With s_i = 1 / omega''(p_i) where p_i > 0, and s_i = 0 elsewhere,

    J = beta (diag(s) - s s^T / sum(s)).

J is symmetric, so the forward (jvp) and reverse (vjp) products are one function, and J is
also the Hessian of ``value``. A new map supplies omega, its slope, its response (the inverse
of the slope), s and the solution; the rest comes from here. Derivations: docs/maths/choice.md.

Shapes: scores and weights are (..., K); Omega, value, loss and sensitivity are (...). A beta
that is a tensor broadcasts against z and has one entry along the axis of the choice. Half
precision comes in and goes out; between, everything is float32.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from typing import Self

import torch
from torch import Tensor

from fenchel.choice.secular import largest_eigenvalue

FORBIDDEN = float("-inf")


class Choice(ABC):
    """A regularised argmax."""

    beta: float | Tensor

    @property
    def score_scale(self) -> float | Tensor:
        """The factor on z in x: beta, and 1 for ``Hard``, whose beta is infinite.

        >>> from fenchel.choice import Hard, Softmax
        >>> Softmax(beta=2.0).score_scale, Hard().score_scale
        (2.0, 1.0)
        """
        return self.beta

    @property
    def ceiling(self) -> float:
        """The largest weight allowed; infinite where the simplex alone bounds it."""
        return float("inf")

    @abstractmethod
    def choose(self, x: Tensor) -> Tensor:
        """The argmax for the scores x, differentiable again and again: (..., K) -> (..., K)."""

    @abstractmethod
    def omega(self, p: Tensor) -> Tensor:
        """One term of Omega, elementwise; 0 at 0 and, but for ``Capped``, at 1."""

    @abstractmethod
    def slope(self, p: Tensor) -> Tensor:
        """omega'(p), elementwise; at p = 0 the limit the dtype can still hold."""

    @abstractmethod
    def response(self, y: Tensor) -> Tensor:
        """The one number p that maximises p y - omega(p), elementwise."""

    @abstractmethod
    def spread(self, p: Tensor) -> Tensor:
        """s = 1 / omega''(p) on the support, 0 off it, in float32 or better: (..., K)."""

    @abstractmethod
    def lipschitz(self, K: int) -> float | Tensor:
        """The smallest known l2 Lipschitz constant of ``weights`` for K alternatives."""

    def weights(self, z: Tensor, log_prior: Tensor | None = None, dim: int = -1) -> Tensor:
        """The argmax: (..., K) -> (..., K)."""
        x, axis = self.scores(z, log_prior, dim)
        p = self.along(axis, x.ndim).choose(x.movedim(axis, -1)).movedim(-1, axis)
        return p.to(z.dtype)

    def value(self, z: Tensor, log_prior: Tensor | None = None, dim: int = -1) -> Tensor:
        """The maximum, whose gradient is ``weights``: (..., K) -> (...)."""
        x, axis = self.scores(z, log_prior, dim)
        return (self.along(axis, x.ndim)._maximum(x.movedim(axis, -1))).to(z.dtype)

    def regulariser(self, p: Tensor, log_prior: Tensor | None = None) -> Tensor:
        """Omega(p) - <p, log u>, infinite where p uses what is forbidden: (..., K) -> (...)."""
        q = float32_or_better(p)
        total = self.omega(q).sum(-1)
        if log_prior is not None:
            total = total - torch.where(q != 0, q * log_prior, 0.0).sum(-1)
        return total.to(p.dtype)

    def jacobian_product(self, p: Tensor, v: Tensor) -> Tensor:
        """J v at the scores that gave ``p``; serves jvp and vjp alike: (..., K) -> (..., K)."""
        return (self.beta * centred(self.spread(p), v)).to(p.dtype)

    def sensitivity(self, p: Tensor) -> Tensor:
        """The largest eigenvalue of J at the scores that gave ``p``: (..., K) -> (...)."""
        return (self.row_beta() * largest_eigenvalue(self.spread(p))).to(p.dtype)

    def loss(self, z: Tensor, y: Tensor, log_prior: Tensor | None = None) -> Tensor:
        """The Fenchel-Young loss value(z) + Omega(y) / beta - <y, z>: (..., K) -> (...).

        ``y`` is an index (an integer tensor without the last axis) or a distribution. The
        gradient in z is weights(z) - y; with Softmax() it is the cross-entropy less the
        entropy of y.
        """
        x = float32_or_better(z)
        # value(z - c) = value(z) - c, so the common part of large scores never enters the sum
        peak = x.detach().amax(-1, keepdim=True)
        x = x - torch.where(peak.isfinite(), peak, 0.0)
        if y.is_floating_point():
            reached = torch.where(y != 0, x, 0.0).mul(y).sum(-1)
            spent = self.regulariser(y.to(x.dtype), log_prior) / self.row_beta()
        else:
            reached = x.gather(-1, y.unsqueeze(-1)).squeeze(-1)
            spent = _sure(self, x, y, log_prior) / self.row_beta()
        return (self.value(x, log_prior) + spent - reached).to(z.dtype)

    def scores(self, z: Tensor, log_prior: Tensor | None, dim: int) -> tuple[Tensor, int]:
        """x = beta z + log u in float32 or better, and the axis counted from the end."""
        axis = checked_axis(z, log_prior, dim)
        x = float32_or_better(z)
        if isinstance(self.beta, Tensor):
            # A score of -inf forbids too; 0 * -inf would put nan into the gradient of beta.
            out = x == FORBIDDEN
            x = (self.beta * x.masked_fill(out, 0.0)).masked_fill(out, FORBIDDEN)
            return (x if log_prior is None else x + log_prior), axis
        if log_prior is not None:
            return torch.add(log_prior.to(x.dtype), x, alpha=self.beta), axis
        return (x if self.beta == 1.0 else self.beta * x), axis

    def along(self, axis: int, ndim: int) -> Self:
        """The same map with its tensors laid out for scores whose axis was moved last."""
        if axis == -1:
            return self
        moved = {
            name: t.reshape((1,) * (ndim - t.ndim) + t.shape).movedim(axis, -1)
            for name, t in vars(self).items()
            if isinstance(t, Tensor) and t.ndim > 0
        }
        return replace(self, **moved) if moved else self  # type: ignore[type-var]

    def tensors(self) -> tuple[Tensor, ...]:
        """The settings that are tensors, which may learn, in the order of the fields."""
        return tuple(x for x in vars(self).values() if isinstance(x, Tensor))

    def with_tensors(self, tensors: Sequence[Tensor]) -> Self:
        """The same map with other tensors in place of ``tensors()``."""
        names = [name for name, x in vars(self).items() if isinstance(x, Tensor)]
        changes = dict(zip(names, tensors, strict=True))
        return replace(self, **changes) if changes else self  # type: ignore[type-var]

    def row_beta(self) -> float | Tensor:
        """beta without the axis of the choice, to go beside results of shape (...)."""
        if isinstance(self.beta, Tensor) and self.beta.ndim > 0:
            return self.beta.squeeze(-1)
        return self.beta

    def _maximum(self, x: Tensor) -> Tensor:
        """The maximum over p, divided by beta, rows last: (..., K) -> (...)."""
        if x.shape[-1] == 0:
            return x.new_full(x.shape[:-1], FORBIDDEN)
        # p carries its own derivative, and J (x - omega'(p)) = 0: so the gradient of this sum
        # is p, and its Hessian J. Holding p fixed would give the gradient and a zero Hessian.
        p = self.choose(x)
        peak = x.detach().amax(-1)
        base = torch.where(peak == FORBIDDEN, 0.0, peak)
        reached = torch.where(p > 0, x - base.unsqueeze(-1), 0.0)
        total = base + (p * reached - self.omega(p)).sum(-1)
        return (total / self.row_beta()).masked_fill(peak == FORBIDDEN, FORBIDDEN)


def centred(s: Tensor, v: Tensor) -> Tensor:
    """(diag(s) - s s^T / sum(s)) v, which is 0 where all of s is: (..., K) -> (..., K)."""
    total = s.sum(-1, keepdim=True)
    mean = (s * v).sum(-1, keepdim=True) / torch.where(total > 0, total, 1.0)
    return s * (v - mean)


def plain(t: Tensor) -> bool:
    """Whether t is a tensor of numbers, not a placeholder of a compiler or of torch.func."""
    wrapped = torch._C._functorch.is_functorch_wrapped_tensor
    return not torch.compiler.is_compiling() and not wrapped(t)


def readable(t: Tensor) -> bool:
    """Whether Python may branch on the numbers in t at no cost: they are plain and at hand."""
    return plain(t) and t.device.type == "cpu"


def positive(name: str, beta: float | Tensor) -> None:
    """Refuse an inverse temperature that is not positive and finite, where that can be seen."""
    if isinstance(beta, Tensor):
        good = not readable(beta) or bool(((beta > 0) & beta.isfinite()).all())
    else:
        good = 0.0 < beta < float("inf")
    if not good:
        raise ValueError(
            f"{name} needs 0 < beta < inf, got beta={beta}; for the limit of large beta use "
            "fenchel.choice.Hard."
        )


def checked_axis(z: Tensor, log_prior: Tensor | None, dim: int) -> int:
    """The axis of the choice counted from the end, after the likeliest mistakes are refused."""
    if not z.is_floating_point():
        raise ValueError(f"scores must be floating point, got {z.dtype}; convert them first.")
    if not -z.ndim <= dim < z.ndim:
        raise ValueError(f"dim={dim} is not an axis of scores of shape {tuple(z.shape)}.")
    if log_prior is not None and not log_prior.is_floating_point():
        raise ValueError(
            f"log_prior is log u, with -inf where a choice is forbidden, got {log_prior.dtype}; "
            "turn a mask that is True where a choice is allowed into mask.float().log()."
        )
    return dim if dim < 0 else dim - z.ndim


def _sure(choice: Choice, x: Tensor, y: Tensor, log_prior: Tensor | None) -> Tensor:
    """Omega of the corner y: what a sure choice costs, (...) from an index (...)."""
    one = choice.omega(torch.ones_like(x[..., 0]))
    if log_prior is None:
        return one
    return one - log_prior.expand_as(x).gather(-1, y.unsqueeze(-1)).squeeze(-1)


def float32_or_better(t: Tensor) -> Tensor:
    """Halves become float32, the rest stays as it is."""
    return t.to(torch.promote_types(t.dtype, torch.float32))
