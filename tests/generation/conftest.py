"""Small models whose every part matters, and a tokenizer, for all tests of generation."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from fenchel.data import TextTokenizer, train_tokenizer
from fenchel.generation.fused_step import Step
from fenchel.model import ModelConfig, Transformer

V, CONTEXT = 31, 16


@pytest.fixture(scope="session")
def lively() -> Callable[..., Transformer]:
    """A model of some shape with no weight at zero, the same at every call."""

    def build(**settings: Any) -> Transformer:
        usual = {"vocabulary": V, "context": CONTEXT, "width": 32, "heads": 4, "layers": 2}
        model = Transformer(ModelConfig(**{**usual, **settings})).eval()
        with torch.no_grad():
            for p in model.parameters():
                noise = torch.randn(p.shape, generator=torch.Generator().manual_seed(p.numel()))
                p.copy_(noise * (p.shape[-1] ** -0.5 if p.ndim > 1 else 0.2) + (p.ndim == 1))
        return model

    return build


def run_and_keep(step: Step, _: torch.device) -> Step:
    """A recording that is the step itself and, as the capture of a CUDA graph does, runs it."""
    step()
    return step


@pytest.fixture(scope="session")
def prompts() -> Callable[..., Tensor]:
    """Random ids."""

    def draw(*shape: int, vocabulary: int = V, seed: int = 5) -> Tensor:
        return torch.randint(vocabulary, shape, generator=torch.Generator().manual_seed(seed))

    return draw


@pytest.fixture(scope="session")
def tokenizer() -> TextTokenizer:
    return train_tokenizer(["the sea shells, the shore; größer 東京 🐚\n" * 9], 300)
