"""A linear map whose largest singular value is a separate parameter.

    W^ = g W / sigma(W),        sigma(W) = |W|_2 = max <a, W b> over unit a, b

The size of W then has no effect on the map, and its norm is one number g that learns slowly: the
entropy of attention cannot collapse in a few steps.

a and b are buffers that follow W by one power iteration per training pass, so sigma costs two
products with a vector. A training step does it once for all of its passes instead: it sets
``iterations`` to 0 and calls ``power_iterate`` (fenchel/train/step.py, and for several processes
fenchel/distributed/owners.py). For fixed a, b the derivative of sigma is a b^T, which is exact
where they are the top singular vectors. Shapes: W (O, I), a (O,), b (I,).

Zhai et al. (2023), Stabilizing transformer training by preventing attention entropy collapse.
"""

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, normalize

_INITIAL_ITERATIONS = 30  # after a fresh draw: the spectral gap of a random matrix is small


class SigmaLinear(nn.Linear):
    """nn.Linear with ``gain`` () for its largest singular value."""

    left: Tensor
    right: Tensor
    iterations = 1
    """Power iterations of a training pass."""

    def __init__(self, inputs: int, outputs: int, bias: bool = True) -> None:
        super().__init__(inputs, outputs, bias)
        self.gain = nn.Parameter(torch.ones(()))
        self.register_buffer("left", torch.zeros(outputs))
        self.register_buffer("right", torch.zeros(inputs))

    def forward(self, x: Tensor) -> Tensor:
        """(..., I) -> (..., O)."""
        if self.training and torch.is_grad_enabled():
            self.power_iterate(self.iterations)
        return linear(x, self.matrix, self.bias)

    @property
    def matrix(self) -> Tensor:
        """g W / sigma(W), (O, I)."""
        # Copies: the next power iteration must not change what this step's gradient needs. FSDP2
        # gathers the weight in another dtype and gives the gain an axis.
        W = self.weight
        sigma = self.left.to(W.dtype, copy=True) @ W @ self.right.to(W.dtype, copy=True)
        return W * (self.gain.reshape(()) / sigma)

    @torch.no_grad()
    def power_iterate(self, iterations: int) -> None:
        """Move ``left`` and ``right`` towards the top singular vectors of the weight."""
        if self.weight.is_meta:  # there is nothing to compute, and torch takes its time for it
            return
        for _ in range(iterations):
            self.left.copy_(normalize(self.weight @ self.right, dim=0))
            self.right.copy_(normalize(self.weight.T @ self.left, dim=0))

    @torch.no_grad()
    def reset(self, gain: float, generator: torch.Generator | None = None) -> None:
        """Set the gain, and compute the top singular vectors of fresh weights."""
        self.gain.fill_(gain)
        self.right.normal_(generator=generator)
        self.power_iterate(_INITIAL_ITERATIONS)


def linear_map(inputs: int, outputs: int, *, bias: bool, sigma: bool) -> nn.Linear:
    """A linear map inside a block: nn.Linear, or SigmaLinear with ``sigma``."""
    kind = SigmaLinear if sigma else nn.Linear
    return kind(inputs, outputs, bias=bias)


def matrix_of(layer: nn.Linear) -> Tensor:
    """The matrix of a linear map, (O, I): its weight, or ``matrix`` where it has one."""
    matrix: Tensor = getattr(layer, "matrix", layer.weight)
    return matrix
