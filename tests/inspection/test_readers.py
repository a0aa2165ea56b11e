"""Who reads a checkpoint, ours or transformers, does not matter: eager attention is the law."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fenchel.checkpoints.directory import open_directory
from fenchel.checkpoints.tokenizer import read_tokenizer
from fenchel.inspection.foreign_model import open_foreign
from fenchel.inspection.heads import row_stats, row_weights
from fenchel.inspection.our_model import open_known
from fenchel.inspection.trace import ForwardTrace

BOTH = ("gpt2", "mistral", "gemma2", "bert")
OURS = (
    *BOTH,
    "llama",
    "qwen3",
    "gemma",
    "gemma4",
    "neox",
    "bloom",
    "albert",
    "granite",
    "phi3",
    "olmo2",
    "olmo3",
    "smollm3",
    "distilbert",
    "roberta",
    "mpnet",
    "modernbert",
    "nanochat",
    "ministral3",
    "qwen3_moe",
)
THEIRS = (*BOTH, "opt", "phi", "distilbert")
READERS = [*((open_known, family) for family in OURS), *((open_foreign, f) for f in THEIRS)]


@pytest.fixture(params=READERS, ids=lambda one: f"{one[0].__name__}-{one[1]}")
def trace(
    request: pytest.FixtureRequest, save: Callable[[str], Path], ids: Tensor
) -> tuple[str, ForwardTrace]:
    """A family, and what a reader made of it."""
    reader, family = request.param
    folder = save(family)
    return family, reader(open_directory(folder), read_tokenizer(folder)).trace(ids)


def test_maps_and_entropies_are_those_of_eager_attention(
    trace: tuple[str, ForwardTrace], eager: Callable[[str], Any], ids: Tensor
) -> None:
    family, found = trace
    theirs = eager(family).weights
    ours = torch.stack([row_weights(p.attention, ids.shape[1]) for p in found.blocks])
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)
    entropy = torch.stack([row_stats(p.attention).entropy for p in found.blocks])
    wanted = torch.special.entr(theirs.double()).sum(-1)
    torch.testing.assert_close(entropy.double(), wanted, rtol=0, atol=1e-5)


def test_streams_and_logits_are_those_of_the_model(
    trace: tuple[str, ForwardTrace], eager: Callable[[str], Any]
) -> None:
    family, found = trace
    _, streams, logits, _ = eager(family)
    for block, before in zip(found.blocks, streams, strict=False):
        size = float(before.abs().amax())
        torch.testing.assert_close(block.input, before, rtol=1e-5, atol=1e-5 * size)
        torch.testing.assert_close(block.forward(block.input), block.output)
        block.forward(block.input.flip(1))  # changes no later block, also where it uses these keys
    assert found.lm_head is not None
    again = found.lm_head(found.blocks[-1].output)
    torch.testing.assert_close(again, logits, rtol=1e-4, atol=1e-5 * float(logits.abs().amax()))
