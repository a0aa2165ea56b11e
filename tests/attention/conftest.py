"""Inputs for attention: every size differs, so that no transposition can hide."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

Draw = Callable[..., Tensor]


@pytest.fixture
def draw() -> Draw:
    """Normal float64 numbers of a shape, the same in every run."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64, generator=generator).to(dtype)

    return normal


@pytest.fixture
def qkv(draw: Draw) -> tuple[Tensor, Tensor, Tensor]:
    """B=2, H=6, G=3, T=4, S=7, D=5, E=3."""
    return draw(2, 6, 4, 5), draw(2, 3, 7, 5), draw(2, 3, 7, 3)
