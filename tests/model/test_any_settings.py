"""Settings thrown together at random are refused in one sentence, or make a sound model.

The table of test_contract.py holds what people use; here are combinations nobody thought of.
"""

import random
from typing import Any

import pytest
import torch

from fenchel.generation.kv_cache import KVCache
from fenchel.model import ModelConfig, Transformer

OPTIONS: dict[str, list[Any]] = {
    "kv_heads": [None, 1, 2],
    "head_size": [None, 6, 10],
    "norm": ["rms", "layer"],
    "positions": ["rotary", "learned", "sinusoidal", "alibi", "buckets", "none"],
    "mlp": ["swiglu", "geglu", "geglu_tanh", "gelu", "gelu_tanh", "relu"],
    "choice": ["softmax", "entmax", "sparsemax"],
    "tied": [True, False],
    "bias": [False, True],
    "kind": ["decoder", "decoder", "encoder", "encoder-decoder"],
    "distinct_layers": [None, 1],
    "embedding_width": [None, 10],
    "token_types": [0, 2],
    "embedding_norm": [False, True],
    "norm_place": ["pre", "post", "both"],
    "norm_plus_one": [False, True],
    "final_norm": [True, False],
    "qk_norm": [False, True],
    "residual_scale": [1.0, "depth"],
    "parallel": [False, True],
    "rotary_layout": ["half", "pairs"],
    "rotary_fraction": [1.0, 0.67],
    "rotary_local_base": [None, 50.0],
    "rotary_scaling": [None, "linear", "ntk", "yarn", "llama3"],
    "windows": [(), (3,), (3, 0)],
    "layer_choices": [(), ("softmax", "entmax")],
    "scores": ["dot", "dot", "l2"],
    "score_scale": [None, 0.5],
    "softcap": [None, 2.0],
    "sinks": [False, True],
    "gate": ["none", "head", "element"],
    "gate_activation": ["sigmoid", "sigmoid", "softplus"],
    "qkv_bias": [None, True],
    "sigma_reparam": [False, True],
    "experts": [0, 3],
    "mlp_dropout": [0.0, 0.2],
    "logit_softcap": [None, 5.0],
    "lm_head_bias": [False, True],
    "lm_head_transform": [False, True],
    "pooler": [False, True],
    "initial": ["zero", "normal", "xavier"],
    "initial_depth": [False, True],
}
V, T = 37, 7


def settings(seed: int) -> ModelConfig | str:
    """Some settings at random, or the sentence that refused them."""
    rng = random.Random(seed)
    some = rng.sample(sorted(OPTIONS), rng.randint(2, 9))
    thrown = {name: rng.choice(OPTIONS[name]) for name in some}
    sizes = {"vocabulary": V, "context": 9, "width": 24, "layers": 2, "heads": 4, "hidden": 16}
    try:
        return ModelConfig(**sizes, **thrown)
    except ValueError as refusal:
        return str(refusal)


@pytest.mark.parametrize("seed", range(48))
def test_it_is_refused_in_a_sentence_or_sound(seed: int) -> None:
    config = settings(seed)
    if isinstance(config, str):
        assert config.endswith((".", "?"))
        return
    generator = torch.Generator().manual_seed(seed)
    model = Transformer(config, generator=generator).double().eval()
    with torch.no_grad():
        for p in model.parameters():
            p += 0.2 * torch.randn(p.shape, dtype=p.dtype, generator=generator)
    ids = torch.randint(V, (2, T), generator=generator)
    memory = {} if model.encoder is None else {"memory_BSM": model.encode(ids)}
    own = {name: value[1:] for name, value in memory.items()}

    whole = model(ids, **memory)
    present = torch.arange(T) >= torch.tensor([[0], [2]])
    padded = model(ids, token_mask_BS=present, **memory)
    torch.testing.assert_close(padded[0], whole[0])
    torch.testing.assert_close(padded[1, 2:], model(ids[1:, 2:], **own)[0])
    if config.kind != "encoder":
        cache = KVCache(config, batch=2, positions=T, dtype=torch.float64)
        with torch.no_grad():
            parts = [model(part, cache=cache, **memory) for part in ids.split([3, 1, 1, 2], 1)]
        torch.testing.assert_close(torch.cat(parts, 1), whole)
    whole.square().sum().backward()
    for name, p in model.named_parameters():
        assert name.startswith("pooler.") or (p.grad is not None and p.grad.isfinite().all()), name
