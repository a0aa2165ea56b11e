"""Rotary position embedding (RoPE): queries and keys rotated by an angle that grows with position.

Pairs of entries of x are points in a plane; at position m, pair i of a head of width W is rotated
by the angle m t_i:

    (a, b) -> (a cos m t_i - b sin m t_i,  a sin m t_i + b cos m t_i),     t_i = base^(-2i/W)

The product of a query rotated at m and a key rotated at n depends on m - n alone, and a rotation
keeps norms. Positions count from 0; W is the width of a head, not of the model.

Two layouts are in use, and mixing them up raises no error: "half" pairs entry i with i + W/2
(Llama, NeoX), "pairs" pairs 2i with 2i + 1 (the original paper, GPT-J). ``to_half`` reorders the
last axis of the second into the first.

For contexts longer than those trained on, the frequencies t_i are lowered:

    LinearScaling   t_i / s                             positions interpolated
    NTKScaling      base s^(W/(W-2)) in place of base   lowest frequency / s, highest unchanged
    YarnScaling     t_i (c_i + (1 - c_i)/s), c_i by the index i; scores multiplied by a factor
    Llama3Scaling   t_i (c_i + (1 - c_i)/s), c_i by the rotations of t_i in the trained context
    LongRopeScaling t_i / e_i, with a number per pair that was searched for

and to read content without position, the lowest ones may be left out:

    ProportionalScaling   t_i / s of the first pairs, 0 of the others (p-RoPE)

Su et al. (2021), RoFormer; Peng et al. (2023), YaRN; Ding et al. (2024), LongRoPE; Barbero et al.
(2025), Round and round we go (p-RoPE).
"""

import math
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor


class RotaryScaling(Protocol):
    """Frequencies for a longer context, and a factor on cos and sin."""

    def frequencies(self, t: Tensor, base: float, width: int) -> Tensor:
        """The scaled frequencies from the unscaled t (W/2,)."""

    @property
    def magnitude(self) -> float:
        """The factor on cos and sin: scores are multiplied by its square."""


@dataclass(frozen=True)
class LinearScaling(RotaryScaling):
    """Positions interpolated: every frequency divided by ``factor``."""

    factor: float

    magnitude = 1.0

    def frequencies(self, t: Tensor, base: float, width: int) -> Tensor:  # noqa: ARG002
        return t / self.factor


@dataclass(frozen=True)
class NTKScaling(RotaryScaling):
    """A larger base: the lowest frequency is divided by ``factor``, the highest is unchanged."""

    factor: float

    magnitude = 1.0

    def frequencies(self, t: Tensor, base: float, width: int) -> Tensor:
        if width < 4:
            raise ValueError(f"NTK scaling needs a width of 4 or more, got {width}.")
        new_base = base * self.factor ** (width / (width - 2))
        return _frequencies(new_base, width, t.dtype, t.device)


@dataclass(frozen=True)
class YarnScaling(RotaryScaling):
    """High frequencies unchanged, low ones interpolated, those between blended linearly by index.

    ``fast`` and ``slow`` are the rotations within ``trained`` positions at which the blend begins
    and ends; ``attention`` overrides the factor 0.1 log(factor) + 1 on cos and sin.
    """

    factor: float
    trained: int
    fast: float = 32.0
    slow: float = 1.0
    attention: float | None = None
    truncate: bool = True

    @property
    def magnitude(self) -> float:
        if self.attention is not None:
            return self.attention
        return 0.1 * math.log(self.factor) + 1.0 if self.factor > 1 else 1.0

    def frequencies(self, t: Tensor, base: float, width: int) -> Tensor:
        low, high = (self._index(count, base, width) for count in (self.fast, self.slow))
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, width - 1)
        i = torch.arange(width // 2, dtype=t.dtype, device=t.device)
        c = 1 - ((i - low) / max(high - low, 1e-3)).clamp(0, 1)
        return t * (c + (1 - c) / self.factor)

    def _index(self, rotations: float, base: float, width: int) -> float:
        """The index of the pair that makes ``rotations`` within the trained context."""
        return width * math.log(self.trained / (rotations * 2 * math.pi)) / (2 * math.log(base))


@dataclass(frozen=True)
class Llama3Scaling(RotaryScaling):
    """High frequencies unchanged, low ones divided, those between blended linearly by rotations.

    ``high`` and ``low`` are the rotations within ``trained`` positions at which the blend begins
    and ends.
    """

    factor: float
    trained: int
    low: float = 1.0
    high: float = 4.0

    magnitude = 1.0

    def frequencies(self, t: Tensor, base: float, width: int) -> Tensor:  # noqa: ARG002
        rotations = self.trained * t / (2 * math.pi)
        c = ((rotations - self.low) / (self.high - self.low)).clamp(0, 1)
        return t * (c + (1 - c) / self.factor)


@dataclass(frozen=True)
class LongRopeScaling(RotaryScaling):
    """Every frequency divided by a number of its own; cos and sin times ``magnitude``.

    >>> LongRopeScaling((1.0, 4.0)).frequencies(torch.tensor([1.0, 0.5]), 10000.0, 4)
    tensor([1.0000, 0.1250])
    """

    divisors: tuple[float, ...]
    magnitude: float = 1.0

    def frequencies(self, t: Tensor, base: float, width: int) -> Tensor:  # noqa: ARG002
        return t / torch.tensor(self.divisors, dtype=t.dtype, device=t.device)


@dataclass(frozen=True)
class ProportionalScaling(RotaryScaling):
    """The highest frequencies, ``fraction`` of all, divided by ``factor``; the others are 0.

    >>> ProportionalScaling(0.5).frequencies(torch.tensor([1.0, 0.5]), 10000.0, 4)
    tensor([1., 0.])
    """

    fraction: float
    factor: float = 1.0

    magnitude = 1.0

    def frequencies(self, t: Tensor, base: float, width: int) -> Tensor:  # noqa: ARG002
        i = torch.arange(width // 2, device=t.device)
        return torch.where(i < int(self.fraction * width // 2), t / self.factor, 0.0)


class Angles(NamedTuple):
    """cos and sin of the angles, (T, W) or (B, 1, T, W), as ``rotate`` multiplies by them.

    With c, s the W/2 cosines and sines of the pairs, cos = (c, c) and sin = (-s, s).
    """

    cos: Tensor
    sin: Tensor


def angles(
    positions: Tensor,
    width: int,
    *,
    base: float = 10000.0,
    scaling: RotaryScaling | None = None,
    dtype: torch.dtype = torch.float32,
) -> Angles:
    """cos and sin for positions (T,) or (B, T) and heads of ``width``, once per forward pass.

    Computed in float32, as in the training of public checkpoints, or better when ``dtype`` is.

    >>> angles(torch.arange(4), 8).cos.shape
    torch.Size([4, 8])
    """
    if width < 2 or width % 2:
        raise ValueError(f"rotary positions rotate pairs, so the width must be even; got {width}.")
    if positions.dim() not in (1, 2):
        raise ValueError(f"positions are (T,) or (B, T), got {tuple(positions.shape)}.")
    exact = torch.promote_types(dtype, torch.float32)
    t = _frequencies(base, width, exact, positions.device)
    if scaling is not None:
        t = scaling.frequencies(t, base, width)
    angle = positions.to(exact).unsqueeze(-1) * t
    if positions.dim() == 2:
        angle = angle.unsqueeze(1)
    c, s = angle.cos(), angle.sin()
    if scaling is not None and scaling.magnitude != 1.0:
        c, s = c * scaling.magnitude, s * scaling.magnitude
    return Angles(torch.cat((c, c), -1).to(dtype), torch.cat((-s, s), -1).to(dtype))


def rotate(x: Tensor, by: Angles, *, layout: str = "half") -> Tensor:
    """x (B, H, T, D) rotated; entries beyond the width of the angles are unchanged.

    >>> rotate(torch.ones(1, 1, 1, 2), angles(torch.tensor([0]), 2))
    tensor([[[[1., 1.]]]])
    """
    cos, sin = by.cos, by.sin
    W = cos.shape[-1]
    if x.shape[-1] > W:
        return torch.cat((rotate(x[..., :W], by, layout=layout), x[..., W:]), -1)
    if x.shape[-1] < W:
        raise ValueError(f"the angles are {W} wide and the heads only {x.shape[-1]}.")
    if cos.dtype != x.dtype:
        cos, sin = cos.to(x.dtype), sin.to(x.dtype)
    if layout == "half":  # (a, b) (c, c) + (b, a) (-s, s): three passes, no slices
        return torch.addcmul(x * cos, x.roll(W // 2, -1), sin)
    if layout == "pairs":
        a, b = x[..., 0::2], x[..., 1::2]
        c, s = cos[..., : W // 2], sin[..., W // 2 :]
        return torch.stack((a * c - b * s, a * s + b * c), -1).flatten(-2)
    raise ValueError(f'a rotary layout is "half" or "pairs", got {layout!r}.')


def rotary(
    x: Tensor,
    positions: Tensor,
    *,
    base: float = 10000.0,
    scaling: RotaryScaling | None = None,
    layout: str = "half",
) -> Tensor:
    """x (B, H, T, D) rotated for positions (T,) or (B, T): ``angles`` and ``rotate`` in one call.

    >>> rotary(torch.ones(1, 1, 2, 2), torch.tensor([0, 1])).norm(dim=-1)
    tensor([[[1.4142, 1.4142]]])
    """
    exact = torch.promote_types(x.dtype, torch.float32)
    by = angles(positions, x.shape[-1], base=base, scaling=scaling, dtype=exact)
    return rotate(x, by, layout=layout)


def to_half(x: Tensor) -> Tensor:
    """Last axis from the "pairs" layout to "half"; apply it to q and k (or their weights) alike."""
    return torch.cat((x[..., 0::2], x[..., 1::2]), -1)


def to_pairs(x: Tensor) -> Tensor:
    """Last axis from the "half" layout to "pairs"."""
    a, b = x.chunk(2, -1)
    return torch.stack((a, b), -1).flatten(-2)


def _frequencies(base: float, width: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """t_i = base^(-2i/W), (W/2,)."""
    exponent = torch.arange(0, width, 2, dtype=dtype, device=device) / width
    return 1.0 / base**exponent
