"""Small random checkpoints as ``transformers`` saves them, each with a tokenizer, and a text."""

import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from fenchel.data import train_tokenizer

VOCABULARY, CONTEXT = 300, 48
SIZES = {
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": CONTEXT,
}


GROUPED = SIZES | {"num_key_value_heads": 2}
FAMILIES = {
    "gpt2": ("GPT2LMHeadModel", {"n_embd": 24, "n_layer": 2, "n_head": 3, "n_positions": CONTEXT}),
    "llama": ("LlamaForCausalLM", GROUPED),
    "mistral": ("MistralForCausalLM", GROUPED | {"sliding_window": 7}),
    "qwen3": ("Qwen3ForCausalLM", SIZES | {"num_key_value_heads": 1, "head_dim": 10}),
    "neox": ("GPTNeoXForCausalLM", SIZES),
    "bert": ("BertForMaskedLM", SIZES),
}
"""A model class of transformers and the settings of a small one."""


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

    def once(family: str) -> Path:
        import transformers  # seconds, and not every test here needs it

        path = folder / family
        if not path.exists():
            transformers.utils.logging.disable_progress_bar()
            name, sizes = FAMILIES[family]
            kind = getattr(transformers, name)
            # far from uniform weights, so that an error would show
            common = {"vocab_size": VOCABULARY, "initializer_range": 0.3}
            torch.manual_seed(0)
            kind(kind.config_class(**sizes | common)).save_pretrained(path)
            tokenizer.save(str(path / "tokenizer.json"))
        return path

    return once
