"""Bounds for the layers around attention, at a point, over a ball, or everywhere.

Norm layers act on each token: y = gamma (x - mean) / s with s = sqrt(var + eps), or y = gamma x / r
with r = sqrt(mean x^2 + eps). Their Jacobians have norm at most max|gamma| / s, exactly 1 / s
without gamma as soon as the width leaves a direction free (3 for LayerNorm, 2 for RMSNorm). s
depends on x:

    at a point          max|gamma| / s(x)
    within radius rho   max|gamma| / sqrt(max(0, |x - mean| - rho)^2 / d + eps)
    everywhere          max|gamma| / sqrt(eps), reached at a constant token: 316 for eps = 1e-5

That factor 316 makes every product of global constants useless; the local one is near 1. Near the
constant token |x - mean| - rho cancels, so the rounding of |x| is subtracted from it.

Activations act on each number; the constant is the largest slope, over all numbers or over
[x - rho, x + rho]: the slope is monotone between its extrema, which are listed below. Slopes are
those of torch's functions, whose softplus is x itself above 20.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import softplus

from fenchel.config import did_you_mean
from fenchel.sensitivity.norms import spectral
from fenchel.sensitivity.rounding import bound_dtype, outward, round_up, unit_size


def norm_layer(
    x: Tensor | None = None,
    weight: Tensor | None = None,
    *,
    eps: float = 1e-5,
    kind: str = "layer",
    radius: float | Tensor = 0.0,
) -> Tensor:
    """The norm layer's gain for every token within ``radius`` of x: (..., d) -> (...).

    ``kind`` is "layer" or "rms". Without x: everywhere.
    """
    if kind not in ("layer", "rms"):
        raise ValueError(f'a norm layer is of kind "layer" or "rms", got {kind!r}.')
    if eps < 0 or bool(torch.as_tensor(radius < 0).any()):
        raise ValueError(f"eps and radius cannot be negative; got {eps} and {radius}.")
    gain = torch.ones((), dtype=torch.float64) if weight is None else weight.abs().amax().double()
    if x is None:
        dtype = torch.float64 if weight is None else bound_dtype(weight)
        return round_up(outward(gain * (eps**-0.5 if eps > 0 else math.inf)), dtype)
    d, dtype = x.shape[-1], bound_dtype(x)
    y, size = unit_size(x.double(), (-1,))
    size = size[..., 0]
    centred = y - y.mean(-1, keepdim=True) if kind == "layer" else y
    rounding = 4.0 * (d + 8) * torch.finfo(y.dtype).eps * torch.linalg.vector_norm(y, dim=-1)
    near = (torch.linalg.vector_norm(centred, dim=-1) - rounding - radius / size).clamp(min=0.0)
    spread = torch.hypot(near * (size / math.sqrt(d)), torch.full_like(near, math.sqrt(eps)))
    return round_up(outward(gain.to(spread) / spread, d), dtype)


def linear(W: Tensor) -> Tensor:
    """|W|_2. Everywhere; exact."""
    return round_up(outward(spectral(W.double()), sum(W.shape[-2:])), bound_dtype(W))


class Slope(NamedTuple):
    """The slope of an activation, elementwise, and the points of its extrema."""

    at: Callable[[Tensor], Tensor]
    turns: tuple[float, ...]
    steepest: float
    """The largest absolute slope anywhere."""


def _gelu(x: Tensor) -> Tensor:
    return 0.5 * torch.erfc(-x / math.sqrt(2.0)) + x * torch.exp(-0.5 * x.square()) / math.sqrt(
        2.0 * math.pi
    )


def _gelu_tanh(x: Tensor) -> Tensor:
    c = math.sqrt(2.0 / math.pi)
    x = x.clamp(-1e3, 1e3)  # beyond, the slope is constant and x^3 overflows
    t = torch.tanh(c * (x + 0.044715 * x**3))
    return 0.5 * (1.0 + t) + 0.5 * x * (1.0 - t.square()) * c * (1.0 + 3 * 0.044715 * x.square())


def _silu(x: Tensor) -> Tensor:
    s = torch.sigmoid(x)
    return s * (1.0 + x * (1.0 - s))


def _mish(x: Tensor) -> Tensor:
    t = torch.tanh(softplus(x))
    return t + x * (1.0 - t.square()) * torch.sigmoid(x)


_SILU_TURN, _QUICK = 2.3993572805154677, 1.702

# Extrema of the slope are roots of the second derivative; at a kink the larger slope counts.
SLOPES = {
    "identity": Slope(torch.ones_like, (), 1.0),
    "relu": Slope(lambda x: (x >= 0).to(x), (), 1.0),
    "relu2": Slope(lambda x: 2.0 * x.clamp(min=0.0), (), math.inf),
    "leaky_relu": Slope(lambda x: torch.ones_like(x).masked_fill(x < 0, 0.01), (), 1.0),
    "elu": Slope(lambda x: torch.where(x >= 0, 1.0, x.clamp(max=0.0).exp()), (), 1.0),
    "softplus": Slope(lambda x: torch.where(x > 20.0, 1.0, torch.sigmoid(x)), (), 1.0),
    "tanh": Slope(lambda x: 1.0 - torch.tanh(x).square(), (0.0,), 1.0),
    "sigmoid": Slope(lambda x: torch.sigmoid(x) * torch.sigmoid(-x), (0.0,), 0.25),
    "gelu": Slope(_gelu, (-math.sqrt(2.0), math.sqrt(2.0)), 1.1289041451851548),
    "gelu_tanh": Slope(_gelu_tanh, (-1.4185040087908284, 1.4185040087908284), 1.1289930686587718),
    "silu": Slope(_silu, (-_SILU_TURN, _SILU_TURN), 1.0998393201288669),
    "quick_gelu": Slope(
        lambda x: _silu(_QUICK * x), (-_SILU_TURN / _QUICK, _SILU_TURN / _QUICK), 1.0998393201288669
    ),
    "mish": Slope(_mish, (-2.2563763963607931, 1.4905711794854285), 1.0884981612517279),
}


def activation(name: str, x: Tensor | None = None, *, radius: float | Tensor = 0.0) -> Tensor:
    """The largest absolute slope within ``radius`` of every number of x; without x, anywhere."""
    if name not in SLOPES:
        raise ValueError(f"there is no activation {name!r}; {did_you_mean(name, SLOPES)}")
    if x is None:
        return torch.tensor(SLOPES[name].steepest, dtype=torch.float64)
    low, _, high = slope_range(name, x, radius)
    return round_up(torch.maximum(low.abs(), high.abs()), bound_dtype(x))


def slope_limits(name: str) -> tuple[float, float]:
    """The least and the largest slope of an activation anywhere, rounded outward.

    >>> slope_limits("relu"), [round(x, 3) for x in slope_limits("gelu")]
    ((-1e-12, 1.000000000001), [-0.129, 1.129])
    """
    steepest, slope = float(activation(name)), SLOPES[name]
    at = torch.tensor((-1e3, *slope.turns, 1e3), dtype=torch.float64)  # monotone between these
    return float(slope.at(at).amin()) - 1e-12, steepest + 1e-12


def slope_range(name: str, x: Tensor, radius: float | Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The least slope within ``radius`` of each number of x, the slope there, and the largest.

    In float64, the ends rounded outward.
    """
    slope, x = SLOPES[name], x.double()
    left, right = (
        torch.nextafter(x + sign * radius, torch.full_like(x, sign * torch.inf))
        for sign in (-1.0, 1.0)
    )
    ends, centre = (slope.at(left), slope.at(right)), slope.at(x)
    low, high = torch.minimum(*ends), torch.maximum(*ends)
    for turn in slope.turns:
        extreme = slope.at(torch.full_like(x, turn))
        inside = (left <= turn) & (turn <= right)
        low = torch.where(inside, torch.minimum(low, extreme), low)
        high = torch.where(inside, torch.maximum(high, extreme), high)
    rounding = 64.0 * torch.finfo(x.dtype).eps * (1.0 + high.abs())
    return torch.minimum(low, centre) - rounding, centre, torch.maximum(high, centre) + rounding
