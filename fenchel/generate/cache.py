"""Keys and values of positions already read, in memory taken once.

A position's key and value do not change when later positions arrive, so a new token needs one
query against what is held: O(S) work a step instead of O(S^2). The tensors have their final
size from the start and are written in place; what is handed out are views of the filled part.

Shapes: a layer's keys and values are (B, G, S, D); room for S positions is taken at once.
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
        shape = (2 * config.layers, batch, config.groups, positions, config.head_width)
        # Cut into layers once: to take a layer out at every step costs as much as to write it.
        room = torch.empty(shape, dtype=dtype, device=device).unbind()
        self.keys, self.values = room[: config.layers], room[config.layers :]
        self.positions, self.length = positions, 0

    def append(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Write (B, G, T, D) behind what layer ``layer`` holds and give back all of it."""
        T = k.shape[2]
        end = self.length + T
        if end > self.positions:
            raise ValueError(f"the cache has room for {self.positions} positions, not {end}.")
        keys, values = self.keys[layer], self.values[layer]
        keys.narrow(2, self.length, T).copy_(k)
        values.narrow(2, self.length, T).copy_(v)
        return keys.narrow(2, 0, end), values.narrow(2, 0, end)

    def advance(self, positions: int) -> None:
        """Count positions that every layer has appended."""
        self.length += positions

    def clear(self) -> None:
        """Forget everything and keep the memory."""
        self.length = 0
