"""Certificates: how sensitive a function can be anywhere in a ball, from both sides.

    lower <= max over X' in the ball of |J(X')|_2 <= upper

``lower`` comes with the X' that attains it, found by ascent; ``upper`` is what the layer's reach
proves. |J|_2 is the spectral norm between token matrices under the Frobenius norm, and so upper is
a Lipschitz constant on the ball, which is convex. The ball is measured in the Frobenius norm
("fro") or token by token ("token"); see fenchel.sensitivity.ball.

For a function that is not one of fenchel.sensitivity.layers, or a torch module that is one, nothing
is proved and upper is infinite.
"""

import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from fenchel.files import write_atomic
from fenchel.sensitivity.ascent import climb, furthest, promising
from fenchel.sensitivity.autodiff import jacobian, point
from fenchel.sensitivity.ball import Ball
from fenchel.sensitivity.golub_kahan import Bracket, spectral_norm
from fenchel.sensitivity.layers import SelfAttention, layer_of
from fenchel.sensitivity.operator import Operator
from fenchel.sensitivity.reach import Gauge, Layer
from fenchel.sensitivity.witness import families


@dataclass(frozen=True, eq=False)
class Certificate:
    """What is known of the sensitivity in a ball about ``centre``."""

    lower: float
    """Attained at ``witness``."""
    upper: float
    """Never exceeded in the ball, but with probability ``failure``."""
    radius: float
    witness: Tensor
    norm: str
    centre: Tensor
    failure: float
    """The chance, over the random starts, that a norm measured at a centre came out too small."""

    @property
    def ratio(self) -> float:
        """upper / lower; 1 where both are 0."""
        return self.upper / self.lower if self.lower > 0 else (math.inf if self.upper > 0 else 1.0)

    def replay(self, f: Callable[..., Any], *, failure: float = 1e-9) -> Bracket:
        """Measure ``f`` at the witness again; refuse if the certificate does not hold there."""
        moves = self.witness - self.centre
        ball = Ball.of(self.radius, self.norm, _tokens(self.centre))
        if float((ball.within(moves) - moves).norm()) > 1e-6 * (1.0 + self.radius):
            raise ValueError("the witness lies outside the ball of this certificate.")
        found = spectral_norm(_derivative(f)(self.witness), failure=failure, tol=1e-6)
        if float(found.upper) < self.lower * (1 - 1e-6) or float(found.lower) > self.upper:
            raise ValueError(
                f"this certificate says {self.lower:.6g} to {self.upper:.6g}, and f measures "
                f"{float(found.lower):.6g} at its witness; it belongs to another function."
            )
        return found

    def save(self, path: str | Path) -> None:
        """Write it to a safetensors file, for others to replay."""
        numbers = {
            name: getattr(self, name) for name in ("lower", "upper", "radius", "norm", "failure")
        }
        tensors = {"witness": self.witness.contiguous(), "centre": self.centre.contiguous()}
        write_atomic(Path(path), save(tensors, {"certificate": json.dumps(numbers)}))

    @classmethod
    def load(cls, path: str | Path) -> "Certificate":
        """Read what ``save`` wrote."""
        try:
            with safe_open(path, framework="pt") as file:
                numbers = json.loads((file.metadata() or {})["certificate"])
                witness, centre = file.get_tensor("witness"), file.get_tensor("centre")
            return cls(witness=witness, centre=centre, **numbers)
        except (SafetensorError, KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{path} is not a certificate: {error}.") from error


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

    ``f`` is a layer of fenchel.sensitivity.layers, a module of torch.nn, or any function of one
    tensor. ``steps`` of ascent are taken from the centre, along the top singular vector, from the
    witness families for attention, and from the best ``restarts`` of many random points.
    """
    (x,) = point(x)
    if x.dim() != 2:
        raise ValueError(f"a certificate is about one sequence (N, M), got shape {tuple(x.shape)}.")
    ball = Ball.of(radius, norm, _tokens(x))
    layer = layer_of(f)
    gauge = Gauge(failure, generator)
    upper = math.inf if layer is None else layer.reach(x, ball, gauge).upper
    derivative = _derivative(f)
    starts = _starts(layer, derivative, x, ball, restarts, generator)
    climbed = layer if layer is not None else f
    peak = climb(climbed, derivative, x, ball, starts, steps=steps, generator=generator)
    found = spectral_norm(derivative(peak.X), tol=1e-6, generator=generator)
    return Certificate(float(found.lower), upper, radius, peak.X, norm, x, gauge.spent)


def _derivative(f: Callable[..., Any]) -> Callable[[Tensor], Operator]:
    """X -> the Jacobian of f at X, streamed where f is known."""
    layer = layer_of(f)
    return (lambda X: jacobian(f, X)) if layer is None else layer.jacobian


def _starts(
    layer: Layer | None,
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
        yield x + sign * furthest(ball, right)
    if isinstance(layer, SelfAttention) and layer.W_Q.dim() == 2:
        size = float(x.norm(dim=-1).amax())
        for X in families(layer.W_Q, layer.W_K, len(x), size):
            yield x + furthest(ball, X.to(x) - x)
    yield from promising(derivative, x, ball, restarts, generator=generator)


def _tokens(x: Tensor) -> int:
    return x.shape[-2]
