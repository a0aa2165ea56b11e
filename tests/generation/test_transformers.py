"""Generation against transformers: greedy words, token for token, from the same weights.

The weights are carried over by hand here, so that this page depends on no file format.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
)

from fenchel.generation import generate
from fenchel.model import ModelConfig, Transformer

V, CONTEXT, M, LAYERS, H = 67, 96, 32, 3, 4
WINDOW = 7
SIZES: dict[str, Any] = {
    "vocabulary": V,
    "context": CONTEXT,
    "width": M,
    "layers": LAYERS,
    "heads": H,
    "hidden": 48,
}
COMMON: dict[str, Any] = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": 0}
GATED: dict[str, Any] = {
    **COMMON,
    "vocab_size": V,
    "hidden_size": M,
    "intermediate_size": 48,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": H,
    "num_key_value_heads": 2,
    "max_position_embeddings": CONTEXT,
    "initializer_range": 0.2,  # so that words differ
}


def as_llama(theirs: Any, **settings: Any) -> Transformer:
    """Ours with the weights of a Llama or a Mistral."""
    body = theirs.model
    ours = Transformer(ModelConfig(**SIZES, kv_heads=2, tied=False, epsilon=1e-6, **settings))
    pairs = [
        (ours.embed.weight, body.embed_tokens.weight),
        (ours.norm.weight, body.norm.weight),
        (ours.lm_head.weight, theirs.lm_head.weight),
    ]
    for mine, other in zip(ours.blocks, body.layers, strict=True):
        look, think = other.self_attn, other.mlp
        qkv = torch.cat([look.q_proj.weight, look.k_proj.weight, look.v_proj.weight])
        pairs += [
            (mine.attention_norm.weight, other.input_layernorm.weight),
            (mine.attention.qkv.weight, qkv),
            (mine.attention.out.weight, look.o_proj.weight),
            (mine.mlp_norm.weight, other.post_attention_layernorm.weight),
            (mine.mlp.gate.weight, think.gate_proj.weight),
            (mine.mlp.up.weight, think.up_proj.weight),
            (mine.mlp.down.weight, think.down_proj.weight),
        ]
    return carried(ours, pairs)


def as_gpt2(theirs: Any) -> Transformer:
    """Ours with the weights of a GPT-2, whose maps are stored as inputs x outputs."""
    body = theirs.transformer
    settings = {"norm": "layer", "positions": "learned", "mlp": "gelu_tanh", "bias": True}
    ours = Transformer(ModelConfig(**SIZES, epsilon=1e-5, **settings))
    pairs = [
        (ours.embed.weight, body.wte.weight),
        (ours.pos_embed.weight, body.wpe.weight),
        (ours.norm.weight, body.ln_f.weight),
        (ours.norm.bias, body.ln_f.bias),
    ]
    for mine, other in zip(ours.blocks, body.h, strict=True):
        maps = [
            (mine.attention.qkv, other.attn.c_attn),
            (mine.attention.out, other.attn.c_proj),
            (mine.mlp.up, other.mlp.c_fc),
            (mine.mlp.down, other.mlp.c_proj),
        ]
        norms = [(mine.attention_norm, other.ln_1), (mine.mlp_norm, other.ln_2)]
        pairs += [(a.weight, b.weight.T) for a, b in maps]
        pairs += [(a.weight, b.weight) for a, b in norms]
        pairs += [(a.bias, b.bias) for a, b in maps + norms]
    return carried(ours, pairs)


@torch.no_grad()
def carried(ours: Transformer, pairs: list[tuple[Tensor, Tensor]]) -> Transformer:
    assert {id(p) for p in ours.parameters()} == {id(p) for p, _ in pairs}
    for mine, other in pairs:
        mine.copy_(other)
    return ours.eval()


def llama() -> tuple[nn.Module, Transformer]:
    theirs = LlamaForCausalLM(LlamaConfig(**GATED, tie_word_embeddings=False))
    return theirs, as_llama(theirs)


def mistral() -> tuple[nn.Module, Transformer]:
    config = MistralConfig(**GATED, tie_word_embeddings=False, sliding_window=WINDOW)
    theirs = MistralForCausalLM(config)
    return theirs, as_llama(theirs, windows=(WINDOW,))


def gpt2() -> tuple[nn.Module, Transformer]:
    config = GPT2Config(
        **COMMON,
        vocab_size=V,
        n_positions=CONTEXT,
        n_embd=M,
        n_layer=LAYERS,
        n_head=H,
        n_inner=48,
        initializer_range=0.2,
    )
    theirs = GPT2LMHeadModel(config)
    return theirs, as_gpt2(theirs)


@pytest.fixture(scope="module", params=[llama, mistral, gpt2], ids=lambda f: f.__name__)
def pair(request: pytest.FixtureRequest) -> tuple[Any, Transformer]:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        build: Callable[[], tuple[nn.Module, Transformer]] = request.param
        theirs, ours = build()
    return theirs.eval(), ours


def words(theirs: Any, ids: Tensor, present: Tensor, count: int, **settings: Any) -> Tensor:
    """The new tokens that transformers says."""
    said: Tensor = theirs.generate(
        ids, attention_mask=present.long(), max_new_tokens=count, do_sample=False, **settings
    )
    return said[:, ids.shape[1] :]


@pytest.mark.parametrize("cache", ["model", "float16"])
@pytest.mark.parametrize("draft", [0, 5])
def test_greedy_tokens_are_theirs_with_every_cache(
    cache: Any, draft: int, pair: tuple[Any, Transformer], prompts: Callable[..., Tensor]
) -> None:
    theirs, ours = pair
    ids = prompts(1, 12, vocabulary=V)
    expected = words(theirs, ids, torch.ones_like(ids), 80)
    said = generate(ours, ids, max_new_tokens=80, temperature=0.0, cache=cache, draft=draft)
    assert said[:, 12:].tolist() == expected.tolist()
    assert len(set(expected[0].tolist())) > 3  # not one word for ever


def test_unequal_prompts_and_a_penalty_give_their_tokens(
    pair: tuple[Any, Transformer], prompts: Callable[..., Tensor]
) -> None:
    theirs, ours = pair
    rows = [prompts(n, vocabulary=V, seed=n) for n in (3, 11, 6)]
    ids, present = torch.zeros(3, 11, dtype=torch.long), torch.zeros(3, 11)
    for b, row in enumerate(rows):
        ids[b, 11 - len(row) :], present[b, 11 - len(row) :] = row, 1
    said = generate(ours, rows, max_new_tokens=40, temperature=0.0)
    expected = words(theirs, ids, present, 40)
    for b, row in enumerate(rows):
        assert said[b][len(row) :].tolist() == expected[b].tolist()
    varied = generate(ours, rows[1:2], max_new_tokens=40, temperature=0.0, repetition_penalty=1.3)
    alone = words(theirs, ids[1:2], present[1:2], 40, repetition_penalty=1.3)
    assert varied[0][11:].tolist() == alone[0].tolist()
