"""Small random checkpoints as ``transformers`` saves them, each with a tokenizer, and a text."""

import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import (
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from transformers.utils import logging

from fenchel.data import train_tokenizer

VOCABULARY, CONTEXT = 300, 48
SIZES = {
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": CONTEXT,
    "initializer_range": 0.3,  # far from uniform weights, so that an error would show
}


def gpt2() -> PreTrainedModel:
    sizes = {"n_embd": 24, "n_layer": 2, "n_head": 3, "n_positions": CONTEXT}
    return GPT2LMHeadModel(GPT2Config(vocab_size=VOCABULARY, initializer_range=0.3, **sizes))


FAMILIES: dict[str, Callable[[], PreTrainedModel]] = {
    "gpt2": gpt2,
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SIZES, num_key_value_heads=2)),
    "mistral": lambda: MistralForCausalLM(
        MistralConfig(**SIZES, num_key_value_heads=2, sliding_window=7)
    ),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SIZES, num_key_value_heads=1, head_dim=10)),
    "neox": lambda: GPTNeoXForCausalLM(GPTNeoXConfig(**SIZES)),
    "bert": lambda: BertForMaskedLM(BertConfig(**SIZES)),
}


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    draw = random.Random(0)
    words = "the people of these States have peace and trade with every nation".split()
    path = tmp_path_factory.mktemp("text") / "speech.txt"
    path.write_text(" ".join(draw.choices(words, k=120)))
    return path


@pytest.fixture(scope="session")
def save(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A function that saves a family once and gives its folder."""
    folder = tmp_path_factory.mktemp("checkpoints")
    tokenizer = train_tokenizer([text.read_text()], VOCABULARY)
    logging.disable_progress_bar()

    def once(family: str) -> Path:
        path = folder / family
        if not path.exists():
            torch.manual_seed(0)
            FAMILIES[family]().save_pretrained(path)
            tokenizer.save(str(path / "tokenizer.json"))
        return path

    return once
