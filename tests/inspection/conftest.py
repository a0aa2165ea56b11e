"""Small random checkpoints as ``transformers`` saves them, each with a tokenizer, and a text."""

import random
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

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
TOKENS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
NEAR = "sliding_attention"
FAMILIES = {
    "granite": (
        "GraniteForCausalLM",
        GROUPED | {"attention_multiplier": 0.3, "residual_multiplier": 0.5, "logits_scaling": 3.0},
    ),
    "olmo2": ("Olmo2ForCausalLM", GROUPED),
    "olmo3": ("Olmo3ForCausalLM", GROUPED | {"sliding_window": 7}),
    "smollm3": (
        "SmolLM3ForCausalLM",
        GROUPED | {"no_rope_layers": [0, 1], "pad_token_id": 0},
    ),
    "roberta": ("RobertaForMaskedLM", SIZES | {"max_position_embeddings": CONTEXT + 2}),
    "mpnet": ("MPNetForMaskedLM", SIZES | {"max_position_embeddings": CONTEXT + 2}),
    "modernbert": (
        "ModernBertForMaskedLM",
        SIZES | TOKENS | {"local_attention": 6, "layer_types": ["full_attention", NEAR]},
    ),
    "nanochat": ("NanoChatForCausalLM", GROUPED),
    "ministral3": (
        "Ministral3ForCausalLM",
        GROUPED
        | TOKENS
        | {
            "head_dim": 6,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 500.0,
                "factor": 4.0,
                "original_max_position_embeddings": 12,
                "llama_4_scaling_beta": 0.5,
            },
        },
    ),
    "qwen3_moe": (
        "Qwen3MoeForCausalLM",
        GROUPED | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 20},
    ),
    "phi3": ("Phi3ForCausalLM", GROUPED | {"sliding_window": 7, "pad_token_id": 0}),
    "gpt2": ("GPT2LMHeadModel", {"n_embd": 24, "n_layer": 2, "n_head": 3, "n_positions": CONTEXT}),
    "llama": ("LlamaForCausalLM", GROUPED),
    "mistral": ("MistralForCausalLM", GROUPED | {"sliding_window": 7}),
    "qwen3": ("Qwen3ForCausalLM", SIZES | {"num_key_value_heads": 1, "head_dim": 10}),
    "gemma": ("GemmaForCausalLM", SIZES | {"num_key_value_heads": 1, "head_dim": 6}),
    "gemma2": (
        "Gemma2ForCausalLM",
        GROUPED | {"head_dim": 6, "sliding_window": 7, "attn_logit_softcapping": 1.5},
    ),
    "gemma4": (
        "Gemma4ForCausalLM",
        GROUPED
        | TOKENS
        | {
            "num_hidden_layers": 4,
            "layer_types": [NEAR, "full_attention", NEAR, "full_attention"],
            "head_dim": 6,
            "global_head_dim": 8,
            "sliding_window": 7,
            "num_kv_shared_layers": 2,
            "hidden_size_per_layer_input": 6,
            "vocab_size_per_layer_input": VOCABULARY,
        },
    ),
    "gemma3n": (
        "Gemma3nForCausalLM",
        GROUPED
        | TOKENS
        | {
            "layer_types": [NEAR, "full_attention"],
            "head_dim": 6,
            "num_kv_shared_layers": 0,
            "hidden_size_per_layer_input": 6,
            "vocab_size_per_layer_input": VOCABULARY,
            "activation_sparsity_pattern": [0.0, 0.0],
            "laurel_rank": 4,
        },
    ),
    "neox": ("GPTNeoXForCausalLM", SIZES | {"hidden_size": 32}),
    "bloom": ("BloomForCausalLM", {"hidden_size": 24, "n_layer": 2, "n_head": 3}),
    "bert": ("BertForMaskedLM", SIZES),
    "bert_body": ("BertModel", SIZES),
    "albert": ("AlbertForMaskedLM", SIZES | {"embedding_size": 10}),
    "opt": ("OPTForCausalLM", SIZES | {"ffn_dim": 40, "word_embed_proj_dim": 24, "init_std": 0.3}),
    "phi": ("PhiForCausalLM", SIZES | {"hidden_size": 32}),
    "distilbert": (
        "DistilBertForMaskedLM",
        {"dim": 24, "hidden_dim": 40, "n_layers": 2, "n_heads": 4},
    ),
}
"""A model class of transformers and the settings of a small one."""


class Eager(NamedTuple):
    """What a model of transformers does by itself on some ids."""

    weights: Tensor
    """(L, H, T, T)."""
    streams: tuple[Tensor, ...]
    """(1, T, M) before each block."""
    logits: Tensor | None
    """(V,) of the last token."""
    parameters: int


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


@pytest.fixture(scope="session")
def ids() -> Tensor:
    return torch.arange(3, 33)[None] * 7 % VOCABULARY


@pytest.fixture(scope="session")
def eager(save: Callable[[str], Path], ids: Tensor) -> Callable[[str], Eager]:
    """A function that runs a saved family by transformers alone, its attention written out."""

    @cache
    def once(family: str) -> Eager:
        import transformers

        kind = getattr(transformers, FAMILIES[family][0])
        model = kind.from_pretrained(
            save(family), attn_implementation="eager", dtype=torch.float32
        ).eval()
        with torch.no_grad():
            out = model(input_ids=ids, output_attentions=True, output_hidden_states=True)
        logits = out.logits[0, -1] if "logits" in out else None
        return Eager(
            torch.stack(out.attentions)[:, 0],
            out.hidden_states,
            logits,
            sum(p.numel() for p in model.parameters()),
        )

    return once
