"""Keys and values of positions already read, in memory taken once.

A position's key and value do not change when later positions arrive, so a new token needs one
query against what is held: O(S) work a step instead of O(S^2). The tensors have their final
size from the start and are written in place; what is handed out are views of the filled part.

Shapes: keys and values are (layers, B, G, S, D); S_max positions fit.
"""

import torch
from torch import Tensor

from fenchel.model import ModelConfig


class KeyValueCache:
    """Room for ``positions`` keys and values of every layer."""

    def __init__(
        self,
        config: ModelConfig,
        *,
        batch: int,
        positions: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        shape = (config.layers, batch, config.groups, positions, config.head_width)
        self.keys = torch.empty(shape, dtype=dtype, device=device)
        self.values = torch.empty(shape, dtype=dtype, device=device)
        self.length = 0

    def append(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Write (B, G, T, D) behind what layer ``layer`` holds and give back all of it."""
        end = self.length + k.shape[2]
        if end > self.keys.shape[3]:
            raise ValueError(f"the cache has room for {self.keys.shape[3]} positions, not {end}.")
        self.keys[layer, :, :, self.length : end] = k
        self.values[layer, :, :, self.length : end] = v
        return self.keys[layer, :, :, :end], self.values[layer, :, :, :end]

    def advance(self, positions: int) -> None:
        """Count positions that every layer has appended."""
        self.length += positions

    def clear(self) -> None:
        """Forget everything and keep the memory."""
        self.length = 0
