"""The derivative of a map at a point, both directions from one graph that is kept.

    J^T u    one reverse pass through the graph of f(x)
    J v      J^T u is linear in u, and its own reverse pass takes v to J v

So the map itself is computed once, where forward mode would compute it again at every product: a
spectral norm of a block takes two thirds of the time. The price is memory, that of training on one
sequence, and that everything in f must be differentiable twice.
"""

from typing import final

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from fenchel.inspection.subject import Map
from fenchel.sensitivity.autodiff import point, space
from fenchel.sensitivity.operator import Operator


@final
class Graph(Operator):
    """The derivative of ``f`` at ``x``."""

    def __init__(self, f: Map, x: Tensor) -> None:
        (x,) = point(x)
        with torch.enable_grad(), sdpa_kernel(SDPBackend.MATH):
            self.x = x.clone().requires_grad_()
            self.y = f(self.x)
            self.u = torch.zeros_like(self.y, requires_grad=True)
            (self.back,) = torch.autograd.grad(self.y, self.x, self.u, create_graph=True)
        self.domain = space((x,), 0, several=False)
        self.codomain = space((self.y,), 0, several=False)
        self.dtype, self.device = x.dtype, x.device

    def apply(self, v: Tensor) -> Tensor:
        """J v, a pass a vector."""
        return self._through(self.back, self.u, v.reshape(len(v), *self.x.shape))

    def adjoint(self, u: Tensor) -> Tensor:
        """J^T u, a pass a vector."""
        return self._through(self.y, self.x, u.reshape(len(u), *self.y.shape))

    def _through(self, of: Tensor, at: Tensor, seeds: Tensor) -> Tensor:
        found = [torch.autograd.grad(of, at, seed, retain_graph=True)[0] for seed in seeds]
        return torch.stack(found).reshape(len(seeds), -1)


def derivative(f: Map, x: Tensor) -> Graph:
    """The derivative of a map of streams at x (1, T, M), from a tensor (T, M)."""

    def of_one(X: Tensor) -> Tensor:
        y = f(X[None])
        return y[0] if y.dim() == 3 else y

    return Graph(of_one, x[0])
