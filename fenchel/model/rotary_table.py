"""The rotation of queries and keys by position, from a table that is kept.

The angles of all positions are a tenth of the work of decoding one token of a small model, and
they never change; they are computed once, in float32 or better, for as many positions as were
asked for, and cut or gathered afterwards.
"""

import torch
from torch import Tensor

from fenchel.attention import Angles, LinearScaling, Llama3Scaling, NTKScaling, YarnScaling, angles
from fenchel.attention.rotary import RotaryScaling
from fenchel.model.config import ModelConfig

WHOLE = 8192
"""Positions up to which a compiled pass is given the table of the whole context."""


class RotaryTable:
    """One base and scaling, for heads of which ``config.rotary_width`` entries are turned."""

    def __init__(self, config: ModelConfig, *, local: bool = False) -> None:
        self.width, self.context = config.rotary_width, config.context
        self.base, self.scaling = config.rotary_base, scaling(config)
        if local and config.rotary_local_base is not None:
            self.base, self.scaling = config.rotary_local_base, None
        self._table = torch.empty(2, 0, 0)

    def between(self, start: int, end: int, like: Tensor) -> Angles:
        """Those of positions ``start`` to ``end``, (T, W)."""
        cos, sin = self._upto(end, like)
        return Angles(cos[start:end], sin[start:end])

    def at(self, positions_BT: Tensor, end: int, like: Tensor) -> Angles:
        """Those of any positions below ``end``, (B, 1, T, W)."""
        cos, sin = self._upto(end, like)
        return Angles(cos[positions_BT].unsqueeze(1), sin[positions_BT].unsqueeze(1))

    def _upto(self, end: int, like: Tensor) -> Angles:
        exact = torch.promote_types(like.dtype, torch.float32)
        if torch.compiler.is_compiling() and self.context <= WHOLE:
            end = self.context  # any length may come: of one table they are all parts
        cos, sin = self._kept(end, like.device, exact).unbind()
        return Angles(cos, sin)

    def _kept(self, end: int, device: torch.device, dtype: torch.dtype) -> Tensor:
        """The table, cos above sin, (2, positions, W), with at least ``end`` positions."""
        kept = self._table
        if kept.shape[1] < end or kept.device != device or kept.dtype != dtype:
            with torch.inference_mode(False):  # a table made while decoding serves training too
                positions = torch.arange(min(self.context, 2 * end), device=device)
                table = angles(
                    positions, self.width, base=self.base, scaling=self.scaling, dtype=dtype
                )
                self._table = torch.stack(table)
        return self._table

    # A constant of what is compiled: made inside of it, the angles would be computed anew for every
    # entry that they turn, forward and backward. torch.compiler.assume_constant_result does this,
    # and loads the compiler for everybody who imports this page.
    _kept._dynamo_marked_constant = True  # type: ignore[attr-defined]


def scaling(config: ModelConfig) -> RotaryScaling | None:
    """The change of speeds that the settings ask for."""
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
    return None


def sinusoids(positions: Tensor, width: int, *, base: float = 10000.0) -> Tensor:
    """The encoding of the first Transformer: positions (...) -> (..., width).

    Entry 2i is sin(m t_i), entry 2i + 1 is cos(m t_i), t_i = base^(-2i/width).
    """
    i = torch.arange(0, width, 2, dtype=torch.float64, device=positions.device)
    angle = positions.to(torch.float64).unsqueeze(-1) * base ** (-i / width)
    return torch.stack((angle.sin(), angle.cos()), -1).flatten(-2)[..., :width]
