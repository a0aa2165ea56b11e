"""Sound directories, of which hostile copies are made."""

import json
from pathlib import Path

import pytest
import torch

from fenchel.checkpoints import load, save
from fenchel.data import train_tokenizer
from fenchel.model import ModelConfig, Transformer

SHAPE = {"vocabulary": 300, "context": 16, "width": 24, "layers": 2, "heads": 4}
LLAMA = ModelConfig(**SHAPE, kv_heads=2, hidden=20, tied=False)
GPT2 = ModelConfig(**SHAPE, norm="layer", mlp="gelu", positions="learned", bias=True)
NEOX = ModelConfig(**SHAPE, norm="layer", mlp="gelu", bias=True, rotary_fraction=0.4, parallel=True)
GEMMA3 = ModelConfig(
    **SHAPE,
    mlp="geglu_tanh",
    norm_plus_one=True,
    norm_place="both",
    qk_norm=True,
    embedding_scale=24**0.5,
    windows=(4, 0),
    rotary_base=1e6,
    rotary_local_base=1e4,
)
BLOOM = ModelConfig(
    **SHAPE, norm="layer", positions="alibi", bias=True, mlp="gelu_tanh", embedding_norm=True
)
ALBERT = ModelConfig(
    **SHAPE,
    kind="encoder",
    norm="layer",
    norm_place="post",
    final_norm=False,
    bias=True,
    positions="learned",
    mlp="gelu_tanh",
    embedding_norm=True,
    embedding_width=10,
    distinct_layers=1,
    token_types=2,
    lm_head_transform=True,
    lm_head_bias=True,
)
T5 = ModelConfig(
    **SHAPE,
    kind="encoder-decoder",
    positions="buckets",
    buckets=8,
    mlp="relu",
    score_scale=1.0,
    logit_scale=24**-0.5,
)


@pytest.fixture(scope="session")
def sound(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Sound directories: a Llama in one file and in several, and one of each other kind."""
    home = tmp_path_factory.mktemp("sound")
    tokenizer = train_tokenizer(["some words, and some more"], 300)
    paths = {}
    for name, config, shard in (
        ("llama", LLAMA, 10**9),
        ("sharded", LLAMA, 10_000),
        ("gpt2", GPT2, 10**9),
        ("gpt_neox", NEOX, 10**9),
        ("gemma3_text", GEMMA3, 10**9),
        ("bloom", BLOOM, 10**9),
        ("albert", ALBERT, 10**9),
        ("t5", T5, 10**9),
    ):
        model = Transformer(config, generator=torch.Generator().manual_seed(3))
        paths[name] = home / name
        save(model, tokenizer, paths[name], shard=shard)
        load(paths[name])
        kind = json.loads((paths[name] / "config.json").read_text())["model_type"]
        assert name in (kind, "sharded")
    return paths
