"""A neighbourhood of a sequence of tokens.

    |x'_j - x_j| <= token  for every token j,        |X' - X|_F <= total.

Both at once: "token" of radius r among n tokens is (r, r sqrt n), "fro" of radius r is (r, r).
Layers say how far they can carry such a set, so one description serves both norms and whole
networks.

What one token may use of the whole is a small linear programme: for w >= 0,

    share(w) = max  sum_i w_i t_i     over  0 <= t_i <= token^2,  sum_i t_i <= total^2,

solved by spending on the largest w first.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Ball:
    """All sequences near a given one."""

    token: float
    """No token moves further than this."""
    total: float
    """All of them together, as one vector, move no further than this."""

    @classmethod
    def of(cls, radius: float, norm: str, n: int) -> "Ball":
        """The ball of a radius in "fro" or "token" norm about n tokens."""
        if norm not in ("fro", "token"):
            raise ValueError(f'a ball is measured in norm "fro" or "token", got {norm!r}.')
        if not 0.0 <= radius < math.inf:
            raise ValueError(f"a radius is a finite number >= 0, got {radius}.")
        return cls(radius, radius * math.sqrt(n) if norm == "token" else radius)

    def share(self, w: Tensor) -> Tensor:
        """max of sum_i w_i t_i as above: (..., n) -> (...)."""
        if self.token == 0.0:
            return torch.zeros_like(w[..., 0])
        n = w.shape[-1]
        count = min(float(n), (self.total / self.token) ** 2 * (1.0 + 1e-12))
        places = torch.arange(n, dtype=w.dtype, device=w.device)
        spent = (count - places).clamp(0.0, 1.0)
        return self.token**2 * (w.sort(dim=-1, descending=True).values * spent).sum(-1)

    def within(self, moves: Tensor) -> Tensor:
        """The moves shortened, if they must be, to lie in the ball: (n, d) -> (n, d)."""
        length = moves.norm(dim=-1, keepdim=True)
        moves = moves * (self.token / length.clamp(min=self.token)) if self.token else moves * 0.0
        size = float(moves.norm())
        return moves * (self.total / size) if size > self.total else moves
