"""Rotary angles from a table; sinusoidal position embeddings.

Computing the angles takes a tenth of the time of decoding one token of a small model, and they
never change. They are computed once, in float32 or better, for the largest position so far, and
sliced or gathered afterwards.
"""

import torch
from torch import Tensor
from torch.nn.functional import embedding

from fenchel.attention import (
    Angles,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    NTKScaling,
    ProportionalScaling,
    YarnScaling,
    angles,
)
from fenchel.attention.rotary import RotaryScaling
from fenchel.model.config import ModelConfig
from fenchel.torch_internals import constant_when_compiled, to_float64

COMPILED_POSITIONS = 8192
"""Contexts up to which a compiled pass uses the table of the whole context."""


class RotaryTable:
    """cos and sin for the ``config.rotary_width`` rotated entries per head, with one base."""

    def __init__(self, config: ModelConfig, *, local: bool = False) -> None:
        served = (n for n in range(config.layers) if (config.window(n) is not None) == local)
        config = config.at_layer(next(served, 0))
        self.width, self.context = config.rotary_width, config.context
        self.base, self.scaling = config.rotary_base, scaling(config)
        if local and config.rotary_local_base is not None:
            self.base, self.scaling = config.rotary_local_base, None
        self._table = torch.empty(2, 0, 0)

    def between(self, start: int, end: int, x: Tensor) -> Angles:
        """Angles of positions ``start`` to ``end``, (T, W), on the device of x, for its dtype."""
        cos, sin = self._angles_below(end, x)
        return Angles(cos[start:end], sin[start:end])

    def at(self, positions_BT: Tensor, end: int, x: Tensor) -> Angles:
        """Angles of positions below ``end``, (B, 1, T, W), on the device of x, for its dtype."""
        cos, sin = (embedding(positions_BT, angle) for angle in self._angles_below(end, x))
        return Angles(cos.unsqueeze(1), sin.unsqueeze(1))

    def _angles_below(self, end: int, x: Tensor) -> Angles:
        exact = torch.promote_types(x.dtype, torch.float32)
        if torch.compiler.is_compiling() and self.context <= COMPILED_POSITIONS:
            end = self.context  # one constant for all lengths, instead of a graph per length
        cos, sin = self._cached_table(end, x.device, exact).unbind()
        return Angles(cos, sin)

    # Traced, the angles would be computed anew for every entry, forward and backward.
    @constant_when_compiled
    def _cached_table(self, end: int, device: torch.device, dtype: torch.dtype) -> Tensor:
        """cos and sin, (2, positions, W), of at least ``end`` positions."""
        table = self._table
        if table.shape[1] < end or table.device != device or table.dtype != dtype:
            with torch.inference_mode(False):  # a table made while decoding serves training too
                positions = torch.arange(min(self.context, 2 * end), device=device)
                cos_sin = angles(
                    positions, self.width, base=self.base, scaling=self.scaling, dtype=dtype
                )
                self._table = table = torch.stack(cos_sin)
        return table  # another thread may have replaced it by a shorter one


def scaling(config: ModelConfig) -> RotaryScaling | None:
    """The frequency scaling of the settings."""
    factor, trained = config.rotary_factor, config.rotary_trained_context or config.context
    slow, fast = config.rotary_slow or 1.0, config.rotary_fast
    match config.rotary_scaling:
        case "linear":
            return LinearScaling(factor)
        case "ntk":
            return NTKScaling(factor)
        case "yarn":
            attention, truncate = config.rotary_attention, config.rotary_truncate
            return YarnScaling(factor, trained, fast or 32.0, slow, attention, truncate)
        case "llama3":
            return Llama3Scaling(factor, trained, slow, fast or 4.0)
        case "longrope":
            divisors = config.rotary_long if config.context > trained else config.rotary_short
            return LongRopeScaling(divisors, config.rotary_attention or 1.0)
        case "proportional":
            return ProportionalScaling(config.rotary_fraction, factor)
    return None


def sinusoids(positions: Tensor, width: int, *, base: float = 10000.0) -> Tensor:
    """Position embeddings of the original Transformer: positions (...) -> (..., width).

    Entry 2i is sin(m t_i), entry 2i + 1 is cos(m t_i), t_i = base^(-2i/width).

    >>> sinusoids(torch.tensor([0]), 4).tolist()
    [[0.0, 1.0, 0.0, 1.0]]
    """
    wide = to_float64(positions)
    i = torch.arange(0, width, 2, dtype=torch.float64, device=wide.device)
    angle = wide.unsqueeze(-1) * base ** (-i / width)
    return torch.stack((angle.sin(), angle.cos()), -1).flatten(-2)[..., :width]
