"""Small models whose sizes all differ, with no weight at zero."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from fenchel.model import ModelConfig, Transformer

SIZES = {
    "vocabulary": 37,
    "context": 11,
    "width": 24,
    "layers": 3,
    "heads": 4,
    "kv_heads": 2,
    "hidden": 20,
}

Build = Callable[..., Transformer]


@pytest.fixture
def settings() -> Callable[..., ModelConfig]:
    """V=37, T up to 11, M=24, H=4, G=2, D=6, hidden=20, 3 layers; any of it changed by name."""
    return lambda **changes: ModelConfig(**{**SIZES, **changes})


@pytest.fixture
def build(settings: Callable[..., ModelConfig]) -> Build:
    """A model in float64 whose every parameter was drawn: a fresh one's branches are zero."""

    def stirred(**changes: Any) -> Transformer:
        generator = torch.Generator().manual_seed(0)
        model = Transformer(settings(**changes), generator=generator).double()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter += 0.2 * torch.randn(
                    parameter.shape, dtype=torch.float64, generator=generator
                )
        return model.eval()

    return stirred


@pytest.fixture
def ids() -> Tensor:
    """(3, 9) of 37."""
    return torch.randint(37, (3, 9), generator=torch.Generator().manual_seed(1))
