"""The base class of choice maps.

A choice map turns scores into weights by solving a small concave problem. With the scores
z, the inverse temperature beta, a prior u over the alternatives and x = beta z + log u,

    weights(z) = argmax_p  <p, x> - Omega(p)              over the feasible set,
    value(z)   =    max_p [<p, x> - Omega(p)] / beta      whose gradient in z is weights(z).

The feasible set is the simplex, where weights sum to 1, or the box 0 <= p_i <= 1, where nothing
connects them (``Choice.feasible``). u_i = 0, that is log_prior = -inf, forbids alternative i. Where
all are forbidden weights gives zeros and every derivative is 0; the simplex then has no p and value
gives -inf, the box has p = 0 and value gives 0.

When Omega is a sum of one-dimensional terms, Omega(p) = sum_i omega(p_i), the optimality
conditions read omega'(p_i) = x_i - nu on the support, and the derivative of ``weights``
depends on one vector alone. With s_i = 1 / omega''(p_i) where p_i > 0, and s_i = 0 elsewhere,

    J = beta (diag(s) - s s^T / sum(s))       over the simplex,
    J = beta diag(s)                          over the box, where nu = 0.

J is symmetric, so the forward (jvp) and reverse (vjp) products are one function, and J is
also the Hessian of ``value``. A new map supplies omega, its slope, its response (the inverse
of the slope), s and the solution; the base class derives the rest. by_name.py has the table in
which maps are registered. Derivations: docs/maths/choice.md.

The gap in the inequality of Fenchel and Young is the loss of the map:

    loss(z, y) = value(z) + Omega(y) / beta - <y, z>  >=  0,       0 exactly where weights(z) = y.

Its gradient in z is weights(z) - y, as that of the cross-entropy, which it is for Softmax and an
index y. For a sparse map it is exactly 0, and so is its gradient, once the score of the target is
far enough above the others (by 1 / beta for Sparsemax): such a loss has a margin. For a
distribution y the sum above cancels when y is near p = weights(z), all the more for a small beta.
Its value is then taken from the conditions of optimality, as a sum of terms none of which is
negative, and its derivatives from the sum:

    beta loss = sum_i d(y_i, p_i) + mu_i y_i + eta_i (p_i - y_i),
    d(y, p)   = omega(y) - omega(p) - omega'(p) (y - p)             Bregman's divergence

with mu_i >= 0 the multiplier of p_i >= 0, and eta_i >= 0 that of a weight at its cap.

Shapes: scores and weights are (..., K); Omega, value, loss and sensitivity are (...). A beta
that is a tensor broadcasts against z and has one entry along the axis of the choice. Half
precision is accepted and returned; the computation between is float32.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import fields, replace
from typing import ClassVar, Literal, Self

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from fenchel.choice.secular import eigenvalue_bounds, largest_eigenvalue
from fenchel.torch_internals import has_no_values, is_func_placeholder

FORBIDDEN = float("-inf")
_ROUNDINGS = 8
"""More roundings than s and the factor beta have, for bounds that hold after them."""


class Choice(ABC):
    """A regularised argmax over the simplex or over the box.

    >>> import torch
    >>> from fenchel.choice import Entmax, Softmax
    >>> z = torch.tensor([2.0, 1.0, -1.0])
    >>> for choice in (Softmax(), Entmax(1.5)):
    ...     print(choice.weights(z))
    tensor([0.7054, 0.2595, 0.0351])
    tensor([0.8307, 0.1693, 0.0000])
    """

    beta: float | Tensor
    feasible: ClassVar[Literal["simplex", "box"]] = "simplex"
    """Whether weights sum to 1, or each lies between 0 and 1 by itself."""

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
        """The largest admissible weight; infinite where only the simplex bounds it."""
        return float("inf")

    @abstractmethod
    def choose(self, x: Tensor) -> Tensor:
        """The argmax for the scores x, differentiable any number of times: (..., K) -> (..., K)."""

    @abstractmethod
    def omega(self, p: Tensor) -> Tensor:
        """One term of Omega, elementwise; 0 at 0 and at 1."""

    @abstractmethod
    def slope(self, p: Tensor) -> Tensor:
        """omega'(p), elementwise; at p = 0 the limit that the dtype can represent."""

    @abstractmethod
    def response(self, y: Tensor) -> Tensor:
        """The p that maximises p y - omega(p), elementwise."""

    @abstractmethod
    def spread(self, p: Tensor) -> Tensor:
        """s = 1 / omega''(p) on the support, 0 off it, in float32 or better: (..., K)."""

    @property
    def spread_falls(self) -> bool | Tensor:
        """Whether the spread falls with the weight, and is unbounded as that tends to 0."""
        return False

    def divergence(self, y: Tensor, p: Tensor) -> Tensor:
        """omega(y) - omega(p) - omega'(p) (y - p) for y near p > 0, elementwise.

        A map has its own form of it, in which omega(p) does not cancel.
        """
        return (self.omega(y) - self.omega(p) - self.slope(p) * (y - p)).clamp(min=0.0)

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
        """Omega(p) - <p, log u>, infinite where p > 0 is forbidden: (..., K) -> (...)."""
        q = float32_or_better(p)
        total = self.omega(q).sum(-1)
        if log_prior is not None:
            total = total - torch.where(q != 0, q * log_prior, 0.0).sum(-1)
        return total.to(p.dtype)

    def jacobian_product(self, p: Tensor, v: Tensor) -> Tensor:
        """J v at the scores that gave ``p``; serves jvp and vjp alike: (..., K) -> (..., K)."""
        s = self.spread(p)
        return (self.beta * (centred(s, v) if self.feasible == "simplex" else s * v)).to(p.dtype)

    def sensitivity(self, p: Tensor) -> Tensor:
        """The largest eigenvalue of J at the scores that gave ``p``: (..., K) -> (...)."""
        s = self.spread(p)
        largest = largest_eigenvalue(s) if self.feasible == "simplex" else _largest(s)
        return (self.row_beta() * largest).to(p.dtype)

    def sensitivity_bounds(self, p: Tensor) -> tuple[Tensor, Tensor]:
        """(lower, upper) of ``sensitivity`` at ``p`` that hold after rounding, in float64: (...).

        For exactly these weights: |J|_2 increases with every s_i and is proportional to them all,
        so the rounding of s moves it by no larger share. An infinite ``upper`` proves nothing.
        """
        s = self.spread(p)
        if self.feasible == "simplex":
            lower, upper = eigenvalue_bounds(s)
        else:
            lower = upper = _largest(s).double()
        beta, share = self.row_beta(), _ROUNDINGS * torch.finfo(s.dtype).eps
        upper = torch.where(upper.isnan(), torch.inf, upper)
        lower = _next(beta * lower * (1.0 - share), lower, 0.0)
        return lower, _next(beta * upper * (1.0 + share), upper, torch.inf)

    def loss(self, z: Tensor, y: Tensor, log_prior: Tensor | None = None) -> Tensor:
        """The Fenchel-Young loss value(z) + Omega(y) / beta - <y, z>: (..., K) -> (...).

        ``y`` is an index (an integer tensor without the last axis) or a point of the feasible set,
        a distribution for the simplex. The loss is
        convex in z, never negative, and 0 exactly where weights(z) = y; its gradient in z is
        weights(z) - y. For Softmax() it is the cross-entropy minus the entropy of y, for
        Sparsemax() and Entmax() it is 0 beyond a finite margin.

        >>> import torch
        >>> from fenchel.choice import Softmax, Sparsemax
        >>> z, y = torch.tensor([[2.0, 0.5, -1.0]]), torch.tensor([0])
        >>> Softmax().loss(z, y), torch.nn.functional.cross_entropy(z, y, reduction="none")
        (tensor([0.2413]), tensor([0.2413]))
        >>> slope = torch.func.grad(lambda z: Sparsemax().loss(z, y).sum())
        >>> slope(z)  # a margin of 1: no gradient left
        tensor([[0., 0., 0.]])
        """
        x, _ = self.scores(z, log_prior, -1)
        beta, simplex = self.row_beta(), self.feasible == "simplex"
        peak = x.detach().amax(-1, keepdim=True)
        if simplex:
            # sum(p) = sum(y): the common part of large scores, forbidden ones left out, cancels
            x = x - torch.where(peak.isfinite(), peak, 0.0)
        if not y.is_floating_point() and (self.ceiling < 1.0 or not simplex):
            # a corner may be above the cap; Omega there is 0 over the simplex alone
            y = one_hot(y, x.shape[-1]).to(x.dtype)
        if not y.is_floating_point():  # Omega is 0 at a corner
            gap = self._maximum(x) - x.gather(-1, y.unsqueeze(-1)).squeeze(-1) / beta
            gap = torch.where(gap < 0, gap - gap.detach(), gap)
        else:
            y = y.to(x.dtype)
            reached = torch.where(y != 0, x, 0.0).mul(y).sum(-1)
            cost = self.regulariser(y, torch.where(x == FORBIDDEN, FORBIDDEN, 0.0))
            gap = self._maximum(x) + (cost - reached) / beta
            exact = (self._gap(x, y) / beta).detach()
            gap = torch.where(gap.isfinite(), exact + (gap - gap.detach()), gap)
        if simplex:
            gap = gap.masked_fill(peak.squeeze(-1) == FORBIDDEN, float("inf"))
        return gap.to(z.dtype)

    @torch.no_grad()
    def _gap(self, x: Tensor, y: Tensor) -> Tensor:
        """beta times the loss of a distribution y, as a sum without cancellation: (...)."""
        p = self.choose(x)
        slope, free = self.slope(p), self.spread(p) > 0
        # On the free weights omega'(p_i) = x_i - nu; with none free, nu leaves every eta_i >= 0.
        heaviest = torch.where(free, p, -1.0).argmax(-1, keepdim=True)
        least = torch.where(p > 0, x - slope, torch.inf).amin(-1, keepdim=True)
        nu = torch.where(free.any(-1, keepdim=True), (x - slope).gather(-1, heaviest), least)
        nu = nu if self.feasible == "simplex" else torch.zeros_like(nu)
        near = (y - p).abs() <= 0.5 * p
        eta = torch.where((p > 0) & ~free, (x - nu - slope).clamp(min=0.0), 0.0)
        close = self.divergence(y, torch.where(p > 0, p, 1.0)) + eta * (p - y)
        far = self.omega(y) - self.omega(p) - (x - nu) * (y - p)  # holds mu and eta
        return torch.where(near, torch.where(p > 0, close, 0.0), far).sum(-1).clamp(min=0.0)

    def scores(self, z: Tensor, log_prior: Tensor | None, dim: int) -> tuple[Tensor, int]:
        """x = beta z + log u in float32 or better, and the axis counted from the end."""
        axis = checked_axis(z, log_prior, dim)
        x = float32_or_better(z)
        if isinstance(self.beta, Tensor):
            # A score of -inf forbids too; 0 * -inf would put nan into the gradient of beta.
            forbidden = x == FORBIDDEN
            x = (self.beta * x.masked_fill(forbidden, 0.0)).masked_fill(forbidden, FORBIDDEN)
            return (x if log_prior is None else x + log_prior), axis
        if log_prior is not None:
            return torch.add(log_prior.to(x.dtype), x, alpha=self.beta), axis
        return (x if self.beta == 1.0 else self.beta * x), axis

    def along(self, axis: int, ndim: int) -> Self:
        """The same map with its tensors laid out for scores whose axis was moved last."""
        if axis == -1:
            return self
        return self.with_tensors(
            [
                t.reshape((1,) * (ndim - t.ndim) + t.shape).movedim(axis, -1) if t.ndim else t
                for t in self.tensors()
            ]
        )

    def tensors(self) -> tuple[Tensor, ...]:
        """The settings that are tensors, which may learn, in the order of the fields."""
        settings = (getattr(self, field.name) for field in fields(self))  # type: ignore[arg-type]
        return tuple(x for x in settings if isinstance(x, Tensor))

    def with_tensors(self, tensors: Sequence[Tensor]) -> Self:
        """The same map with other tensors in place of ``tensors()``."""
        names = [
            field.name
            for field in fields(self)  # type: ignore[arg-type]
            if isinstance(getattr(self, field.name), Tensor)
        ]
        changes = dict(zip(names, tensors, strict=True))
        return replace(self, **changes) if changes else self  # type: ignore[type-var]

    def row_beta(self) -> float | Tensor:
        """The factor on z without the axis of the choice, for results of shape (...)."""
        beta = self.score_scale
        return beta.squeeze(-1) if isinstance(beta, Tensor) and beta.ndim > 0 else beta

    def _maximum(self, x: Tensor) -> Tensor:
        """The maximum over p, divided by beta, rows last: (..., K) -> (...)."""
        if x.shape[-1] == 0:
            return x.new_full(x.shape[:-1], FORBIDDEN)
        # p carries its own derivative, and J (x - omega'(p)) = 0: so the gradient of this sum
        # is p, and its Hessian J. With p held constant the gradient would be right and the Hessian
        # zero.
        p = self.choose(x)
        peak = x.detach().amax(-1)
        base = torch.where(peak == FORBIDDEN, 0.0, peak)
        reached = torch.where(p > 0, x - base.unsqueeze(-1), 0.0)
        total = base + (p * reached - self.omega(p)).sum(-1)
        return (total / self.row_beta()).masked_fill(peak == FORBIDDEN, FORBIDDEN)


def _next(x: Tensor, of: Tensor, to: float) -> Tensor:
    """The number next to x: below the normal numbers a share is rounded away. 0 of 0 stays."""
    return torch.where(of > 0, torch.nextafter(x, torch.full_like(x, to)), x)


def _largest(s: Tensor) -> Tensor:
    """The largest entry of s >= 0, and 0 of none: (..., K) -> (...)."""
    return s.amax(-1) if s.shape[-1] else s.sum(-1)


def require_simplex(choice: Choice, what: str) -> None:
    """Raise ValueError where ``what`` needs weights that sum to 1 and the map has none.

    >>> from fenchel.choice import Softmax
    >>> require_simplex(Softmax(), "a sink")
    """
    if choice.feasible != "simplex":
        raise ValueError(
            f"{what} needs a map whose weights sum to 1, and {choice!r} weighs every alternative "
            "by itself."
        )


def centred(s: Tensor, v: Tensor) -> Tensor:
    """(diag(s) - s s^T / sum(s)) v, and 0 where s = 0: (..., K) -> (..., K)."""
    total = s.sum(-1, keepdim=True)
    mean = (s * v).sum(-1, keepdim=True) / torch.where(total > 0, total, 1.0)
    return s * (v - mean)


def relative(s: Tensor, v: Tensor) -> Tensor:
    """v minus its entry at the largest s, which ``centred`` maps to the same.

    Where one s exceeds the others by more digits than the dtype has, as those of entmax above
    alpha = 2 do, v minus its mean would have none left there.
    """
    return v - v.gather(-1, s.argmax(-1, keepdim=True).expand(*v.shape[:-1], 1))


def is_plain(t: Tensor) -> bool:
    """Whether t holds numbers, and is no placeholder of torch.compile or torch.func."""
    return not (torch.compiler.is_compiling() or is_func_placeholder(t) or has_no_values(t))


def is_readable(t: Tensor) -> bool:
    """Whether Python may branch on the numbers in t without a synchronisation."""
    return is_plain(t) and t.device.type == "cpu"


def require_positive(name: str, beta: float | Tensor) -> None:
    """Raise ValueError for a beta that is not positive and finite, where it is readable."""
    if isinstance(beta, Tensor):
        good = not is_readable(beta) or bool(((beta > 0) & beta.isfinite()).all())
    else:
        good = 0.0 < beta < float("inf")
    if not good:
        raise ValueError(
            f"{name} needs 0 < beta < inf, got beta={beta}; for the limit of large beta use "
            "fenchel.choice.Hard."
        )


def checked_axis(z: Tensor, log_prior: Tensor | None, dim: int) -> int:
    """The axis of the choice counted from the end; raises ValueError for the likeliest mistakes."""
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


def float32_or_better(t: Tensor) -> Tensor:
    """Half precision becomes float32; other dtypes stay."""
    return t.to(torch.promote_types(t.dtype, torch.float32))
