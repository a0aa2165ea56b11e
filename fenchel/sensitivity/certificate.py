"""Certificates: the largest spectral norm of a Jacobian anywhere in a ball, from both sides.

    lower <= max over X' in the ball of |J(X')|_2 <= upper

``lower`` is attained at a point X' of the ball, the witness. ``upper`` is the layer's bound over
the ball (fenchel/sensitivity/layers.py). |J|_2 is the spectral norm between token matrices under
the Frobenius norm, so ``upper`` is a Lipschitz constant on the ball, which is convex. The ball is
measured in the Frobenius norm ("fro") or per token ("token").

The layers of a torch module are read off by running it (fenchel/sensitivity/module_trace.py) and
compared with the module itself; a module with a part that is not known is refused, by the name of
that part. For a function that is neither a layer nor a module nothing is proved: ``upper`` is
infinite, and ``lower`` comes from its derivatives.

Both ends of a layer or module are computed in float64, whatever the dtype of x.

The witness is computed by ascent. sigma(X) = |J(X)|_2 has, where the top singular value is simple,
the gradient

    d sigma = < d/dX of <u, J(X) v>, dX >        u, v the top singular vectors at X,

a second derivative of f that costs two reverse passes. Each step goes towards the point of the ball
that is furthest along it (Frank and Wolfe), by a fraction that grows while sigma does and shrinks
when it does not; u and v start from those of the last step. Large balls have many local maxima, so
the best of some random points are starts too. Any point of the ball gives a valid lower bound.
"""

import json
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor, nn

from fenchel.files import write_atomic
from fenchel.sensitivity.autodiff import jacobian, plain_kernels, point, tensor_function
from fenchel.sensitivity.golub_kahan import Bracket, spectral_norm
from fenchel.sensitivity.layers import SelfAttention, with_dtype
from fenchel.sensitivity.module_trace import KNOWN, Refused, layer_of, require_agreement
from fenchel.sensitivity.norms import unit_rows
from fenchel.sensitivity.operator import Operator
from fenchel.sensitivity.perturbation import Ball, NormEstimator, TokenLayer
from fenchel.sensitivity.witness import families

ROUNDING = 8
"""Units of the last place by which a measured norm may exceed the norm itself."""


class Maximum(NamedTuple):
    """The best point of an ascent, and the norm there."""

    X: Tensor
    sigma: float


def ascend(
    f: Callable[[Tensor], Tensor],
    derivative: Callable[[Tensor], Operator],
    X: Tensor,
    ball: Ball,
    starts: Iterable[Tensor],
    *,
    steps: int,
    generator: torch.Generator | None = None,
) -> Maximum:
    """The largest sigma in the ball about X that ascent from each of ``starts`` reaches."""
    best = Maximum(X, -1.0)
    for start in starts:
        Y = X + ball.within(start - X)
        sigma, u, v = _power_steps(derivative(Y), _random(X, generator), rounds=8)
        share, moved = 0.5, True
        for _ in range(steps):
            if moved:
                target = X + linear_maximiser(ball, sigma_gradient(f, Y, u, v))
            Z = X + ball.within(Y + share * (target - Y) - X)
            trial = _power_steps(derivative(Z), v, rounds=3)
            moved = trial[0] > sigma
            if moved:
                (sigma, u, v), Y, share = trial, Z, min(1.0, 1.5 * share)
            else:
                share = 0.4 * share
            if share < 1e-3:
                break
        if sigma > best.sigma:
            best = Maximum(Y, sigma)
    return best


def random_starts(
    derivative: Callable[[Tensor], Operator],
    X: Tensor,
    ball: Ball,
    count: int,
    *,
    candidates: int = 12,
    generator: torch.Generator | None = None,
) -> list[Tensor]:
    """The ``count`` most sensitive of ``candidates * count`` random points on the boundary."""
    if count == 0:
        return []
    points = []
    for _ in range(candidates * count):
        Y = X + linear_maximiser(ball, _random(X, generator).view_as(X))
        sigma = _power_steps(derivative(Y), _random(X, generator), rounds=2)[0]
        points.append((sigma, Y))
    points.sort(key=lambda point: -point[0])
    return [Y for _, Y in points[:count]]


def _random(X: Tensor, generator: torch.Generator | None) -> Tensor:
    return torch.randn(X.numel(), dtype=X.dtype, generator=generator).to(X)


def sigma_gradient(f: Callable[[Tensor], Tensor], X: Tensor, u: Tensor, v: Tensor) -> Tensor:
    """The gradient of <u, J(X) v> in X, for flat u and v; 0 where f is linear."""
    with torch.enable_grad(), plain_kernels():
        Y = X.detach().clone().requires_grad_()
        out = tensor_function(f)(Y)
        (back,) = torch.autograd.grad(out, Y, u.view_as(out), create_graph=True)
        if not back.requires_grad:
            return torch.zeros_like(X)
        (gradient,) = torch.autograd.grad(back, Y, v.view_as(Y), allow_unused=True)
    return torch.zeros_like(X) if gradient is None else gradient


def linear_maximiser(ball: Ball, g: Tensor) -> Tensor:
    """The move in the ball with the largest inner product with g: (n, d) -> (n, d)."""
    if ball.total >= ball.token * len(g) ** 0.5 * (1.0 - 1e-12):
        return ball.token * unit_rows(g)
    size = g.norm()
    return ball.within(g * (ball.total / size)) if size > 0 else torch.zeros_like(g)


def _power_steps(J: Operator, v: Tensor, rounds: int) -> tuple[float, Tensor, Tensor]:
    """sigma, u, v after ``rounds`` steps of the power method from v."""
    for _ in range(rounds):
        u = J.apply(v[None])[0]
        size = u.norm()
        u = u / torch.where(size > 0, size, 1.0)
        w = J.adjoint(u[None])[0]
        sigma = w.norm()
        v = torch.where(sigma > 0, w / torch.where(sigma > 0, sigma, 1.0), v)
    return float(sigma), u, v


@dataclass(frozen=True, eq=False)
class Certificate:
    """Both ends of the sensitivity of a function in a ball about ``centre``."""

    lower: float
    """Attained at ``witness``."""
    upper: float
    """Exceeded in the ball with probability at most ``failure``, over random starts."""
    radius: float
    witness: Tensor
    norm: str
    centre: Tensor
    failure: float
    """Probability, over random starts, that a norm measured at a centre is too small."""

    @property
    def ratio(self) -> float:
        """upper / lower; 1 where both are 0."""
        return self.upper / self.lower if self.lower > 0 else (math.inf if self.upper > 0 else 1.0)

    def replay(self, f: Callable[..., Any], *, failure: float = 1e-9) -> Bracket:
        """Measure ``f`` at the witness again; raises if the certificate does not hold there."""
        call, witness = token_function(f, self.witness)
        moves = witness - self.centre.view_as(witness)
        ball = Ball.of(self.radius, self.norm, len(witness))
        if float((ball.within(moves) - moves).norm()) > 1e-6 * (1.0 + self.radius):
            raise ValueError("the witness lies outside the ball of this certificate.")
        bracket = spectral_norm(_derivative(call)(witness), failure=failure, tol=1e-6)
        if float(bracket.upper) < self.lower * (1 - 1e-6) or float(bracket.lower) > self.upper:
            raise ValueError(
                f"this certificate has {self.lower:.6g} to {self.upper:.6g}, and f measures "
                f"{float(bracket.lower):.6g} at its witness; it belongs to another function."
            )
        return bracket

    def save(self, path: str | Path) -> None:
        """Write the certificate to a safetensors file, for others to replay."""
        numbers = {
            name: getattr(self, name) for name in ("lower", "upper", "radius", "norm", "failure")
        }
        tensors = {"witness": self.witness.contiguous(), "centre": self.centre.contiguous()}
        write_atomic(Path(path), save(tensors, {"certificate": json.dumps(numbers)}))

    @classmethod
    def load(cls, path: str | Path) -> "Certificate":
        """Read a file that ``save`` wrote."""
        try:
            with safe_open(path, framework="pt") as file:
                numbers = json.loads((file.metadata() or {})["certificate"])
                witness, centre = file.get_tensor("witness"), file.get_tensor("centre")
            return cls(witness=witness, centre=centre, **numbers)
        except (SafetensorError, KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{path} is not a certificate: {error}.") from error


@torch.no_grad()  # a prior may learn; the ascent turns gradients on where it needs them
def certify(
    f: Callable[..., Any],
    x: Tensor,
    radius: float,
    norm: str = "fro",
    *,
    failure: float = 1e-9,
    steps: int = 60,
    restarts: int = 2,
    generator: torch.Generator | None = None,
) -> Certificate:
    """Bound the sensitivity of ``f`` at every x' within ``radius`` of x (N, M), from both sides.

    ``f`` is a layer of fenchel.sensitivity.layers, a torch module, or any function of one tensor,
    for which ``upper`` is infinite. A module with a part for which no bound is known is refused
    with a ValueError that names the part. Where f takes a batch of sequences, it receives x as a
    batch of one; x may be given as (1, N, M). ``steps`` of ascent are taken from the centre, along
    the top singular vector, from the witness families for attention, and from the best
    ``restarts`` of many random points.

    >>> certificate = certify(torch.nn.Tanh(), torch.ones(2, 3), radius=0.1)
    >>> 0.42 < certificate.lower <= certificate.upper < 0.5  # 1 - tanh(x)^2 is 0.42 at the centre
    True
    """
    (given,) = point(x)
    call, x = token_function(f, given)
    ball, inside = (Ball.of(r, norm, len(x)) for r in (radius, _rounded_radius(radius, x)))
    layer = f if isinstance(f, TokenLayer) else None
    if isinstance(f, nn.Module):
        try:
            layer = layer_of(f, call, x)
            require_agreement(layer, call, x, ball, generator)
        except Refused as reason:
            raise ValueError(
                f"no upper bound is known: {reason}. Known are {KNOWN}; certify(lambda x: f(x), "
                "...) gives the lower end alone."
            ) from reason.__cause__
    estimator, upper = NormEstimator(failure, generator), math.inf
    derivative = precise = _derivative(call if layer is None else layer)
    wide = x
    if layer is not None:
        exact: TokenLayer = with_dtype(layer, torch.float64, x.dtype)
        wide, precise = x.double(), exact.jacobian
        upper = exact.ball_bound(wide, ball, estimator).upper
    starts = _starts(layer, derivative, x, inside, restarts, generator)
    function = call if layer is None else layer
    peak = ascend(function, derivative, x, inside, starts, steps=steps, generator=generator)
    sigma = spectral_norm(precise(peak.X.to(wide)), tol=1e-6, generator=generator).lower
    lower = float(sigma) * (1.0 - ROUNDING * torch.finfo(wide.dtype).eps)
    witness = peak.X.view_as(given)
    return Certificate(lower, upper, radius, witness, norm, given, estimator.spent)


def token_function(f: Callable[..., Any], x: Tensor) -> tuple[Callable[[Tensor], Tensor], Tensor]:
    """f as a function of one sequence (N, M), and x as one; f may take a batch of one."""
    if x.dim() not in (2, 3) or (x.dim() == 3 and len(x) != 1):
        raise ValueError(
            f"a certificate is about one sequence (N, M) or (1, N, M), got shape {tuple(x.shape)}."
        )
    if isinstance(f, TokenLayer):
        return f, x[0] if x.dim() == 3 else x
    function = tensor_function(f)

    def batched(X: Tensor) -> Tensor:
        y: Tensor = function(X[None])
        if y.dim() < 2 or len(y) != 1:
            raise ValueError(f"a batch of one sequence gives shape {tuple(y.shape)}.")
        return y[0]

    if x.dim() == 3:
        return batched, x[0]
    with torch.no_grad():
        try:
            function(x.clone())
        except Exception as error:
            try:
                batched(x.clone())
            except Exception:  # the sentence about the tokens as they were given says more
                raise ValueError(
                    f"f is called with one sequence {tuple(x.shape)}, and with a batch of one; it "
                    f"takes neither ({type(error).__name__}: {error})."
                ) from error
            return batched, x
    return function, x


def _rounded_radius(radius: float, x: Tensor) -> float:
    """A radius whose points about x stay in the ball when they are rounded to the dtype of x."""
    lost = torch.finfo(x.dtype).eps * (float(x.double().norm()) + radius)
    return max(0.0, radius - lost)


def _derivative(f: Callable[..., Any]) -> Callable[[Tensor], Operator]:
    """X -> the Jacobian of f at X."""
    return f.jacobian if isinstance(f, TokenLayer) else (lambda X: jacobian(f, X))


def _starts(
    layer: TokenLayer | None,
    derivative: Callable[[Tensor], Operator],
    x: Tensor,
    ball: Ball,
    restarts: int,
    generator: torch.Generator | None,
) -> Iterator[Tensor]:
    yield x
    right = spectral_norm(derivative(x), tol=1e-2, generator=generator).right
    assert isinstance(right, Tensor)
    for sign in (1.0, -1.0):
        yield x + sign * linear_maximiser(ball, right)
    if isinstance(layer, SelfAttention) and layer.W_Q.dim() == 2:
        size = float(x.norm(dim=-1).amax())
        for X in families(layer.W_Q, layer.W_K, len(x), size):
            yield x + linear_maximiser(ball, X.to(x) - x)
    yield from random_starts(derivative, x, ball, restarts, generator=generator)
