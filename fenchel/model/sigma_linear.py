"""A linear map whose largest singular value is a parameter of its own.

    W^ = g W / sigma(W),        sigma(W) = |W|_2 = max <a, W b> over unit a, b

The weights then grow or shrink without changing the map, and how strongly it stretches is one
number g that learns slowly: the entropy of attention cannot collapse in a few steps.

a and b are kept from step to step and follow W by one round of power iteration a step, so sigma
costs two products with a vector. For fixed a, b the derivative of sigma is a b^T, which is exact
where they are the top singular vectors. Shapes: W (O, I), a (O,), b (I,).

Zhai et al. (2023), Stabilizing transformer training by preventing attention entropy collapse.
"""

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, normalize

_FIRST = 30  # rounds after a fresh draw: the gap of a random matrix is small


class SigmaLinear(nn.Linear):
    """nn.Linear with ``gain`` () for its largest singular value."""

    left: Tensor
    right: Tensor

    def __init__(self, inputs: int, outputs: int, bias: bool = True) -> None:
        super().__init__(inputs, outputs, bias)
        self.gain = nn.Parameter(torch.ones(()))
        self.register_buffer("left", torch.zeros(outputs))
        self.register_buffer("right", torch.zeros(inputs))

    def forward(self, x: Tensor) -> Tensor:
        """(..., I) -> (..., O)."""
        if self.training and torch.is_grad_enabled():
            self.follow(1)
        return linear(x, self.matrix, self.bias)

    @property
    def matrix(self) -> Tensor:
        """g W / sigma(W), (O, I)."""
        # Copies: the next step's round must not change what this step's gradient needs.
        sigma = self.left.clone() @ self.weight @ self.right.clone()
        return self.weight * (self.gain / sigma)

    @torch.no_grad()
    def follow(self, rounds: int) -> None:
        """Bring the singular vectors nearer to those of the weights."""
        for _ in range(rounds):
            self.left.copy_(normalize(self.weight @ self.right, dim=0))
            self.right.copy_(normalize(self.weight.T @ self.left, dim=0))

    @torch.no_grad()
    def begin(self, gain: float, generator: torch.Generator | None = None) -> None:
        """Fresh singular vectors for fresh weights."""
        self.gain.fill_(gain)
        self.right.normal_(generator=generator)
        self.follow(_FIRST)


def linear_map(inputs: int, outputs: int, *, bias: bool, sigma: bool) -> nn.Linear:
    """A linear map inside a block, as the settings want it."""
    kind = SigmaLinear if sigma else nn.Linear
    return kind(inputs, outputs, bias=bias)


def matrix_of(layer: nn.Linear) -> Tensor:
    """What a linear map multiplies by, (O, I): its weight, or what it makes of it."""
    made: Tensor = getattr(layer, "matrix", layer.weight)
    return made
