"""Inputs for sensitivity: seeded, in float64, and the kinds of operators that exist."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

Draw = Callable[..., Tensor]
Instance = Callable[..., tuple[Tensor, Tensor, Tensor, Tensor]]


@pytest.fixture
def generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


@pytest.fixture
def draw(generator: torch.Generator) -> Draw:
    """Normal float64 numbers of a shape, the same in every run."""

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64, generator=generator)

    return normal


@pytest.fixture
def spread_out(generator: torch.Generator) -> Draw:
    """10^u for u uniform between two exponents: sizes of every order."""

    def sizes(low: float, high: float, *shape: int) -> Tensor:
        u = torch.rand(*shape, dtype=torch.float64, generator=generator)
        return 10.0 ** (low + (high - low) * u)

    return sizes


@pytest.fixture
def instance(draw: Draw) -> Instance:
    """Tokens of length sqrt(d) and random weights, as in the tables of docs/maths/sensitivity.md.

    With score scale c / sqrt(d) the scores have standard deviation c.
    """

    def make(n: int, d: int, batch: tuple[int, ...] = ()) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        X = draw(*batch, n, d)
        X = X / X.norm(dim=-1, keepdim=True) * math.sqrt(d)
        heads = (*batch, 1) if batch else ()
        W_Q, W_K, W_V = (draw(*heads, d, d) / math.sqrt(d) for _ in range(3))
        return X, W_Q, W_K, W_V

    return make


def truth(D: Tensor) -> Tensor:
    """The spectral norms of matrices, by singular value decomposition."""
    norms: Tensor = torch.linalg.matrix_norm(D, 2)
    return norms
