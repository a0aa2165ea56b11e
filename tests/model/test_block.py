"""fenchel/model/block.py: a block against its definition, head by head."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import gelu, silu

from fenchel.attention import rotary
from fenchel.model import ModelConfig, Transformer
from fenchel.model.attention import Attention
from fenchel.model.block import Block
from fenchel.model.forward_context import ForwardContext
from fenchel.model.mlp import Mlp

Settings = Callable[..., ModelConfig]
Build = Callable[..., Transformer]


def stream(*shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(3)
    return torch.randn(*shape, dtype=torch.float64, generator=generator)


def count(module: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def test_attention_has_four_width_squared_weights(settings: Settings) -> None:
    config = settings(width=512, heads=8, kv_heads=None)
    attention = Attention(config, 0)
    assert config.head_width == 64
    assert count(attention.qkv) == 3 * 512**2 == 786_432
    assert count(attention) == 4 * 512**2 == 1_048_576


def test_a_gelu_mlp_has_eight_width_squared_weights_and_its_biases(settings: Settings) -> None:
    wide = settings(width=512, mlp="gelu", hidden=None)
    assert count(Mlp(wide)) == 8 * 512**2
    assert count(Mlp(settings(width=512, mlp="gelu", hidden=None, bias=True))) == 2_099_712


def test_grouped_heads_save_keys_and_values_alone(settings: Settings) -> None:
    full, grouped = (count(Attention(settings(kv_heads=G), 0)) for G in (4, 1))
    assert full - grouped == 2 * 3 * 6 * 24


@pytest.mark.parametrize("norm", ["rms", "layer"])
@pytest.mark.parametrize("bias", [False, True])
def test_a_fresh_block_is_the_identity(settings: Settings, norm: str, bias: bool) -> None:
    model = Transformer(settings(norm=norm, bias=bias, positions="none"))
    x = stream(2, 5, 24).float()
    assert torch.equal(model.blocks[1](x), x)


def test_attention_equals_a_loop_over_heads_with_the_mask_written_out(build: Build) -> None:
    model = build(layers=1, bias=True)
    attention = model.blocks[0].attention
    x_BTM = stream(2, 7, 24)
    H, G, D = 4, 2, 6
    W, b = attention.qkv.weight, attention.qkv.bias
    qkv = x_BTM @ W.T + b
    places, heads = torch.arange(7), []
    for h in range(H):
        g = h // (H // G)
        at = [h * D, (H + g) * D, (H + G + g) * D]
        q, k, v = (qkv[..., start : start + D] for start in at)
        q, k = (rotary(part.unsqueeze(1), places).squeeze(1) for part in (q, k))
        scores = (q @ k.mT / D**0.5).masked_fill(places[:, None] < places, -torch.inf)
        heads.append(scores.softmax(-1) @ v)
    wanted = torch.cat(heads, -1) @ attention.out.weight.T + attention.out.bias
    context = ForwardContext(rotary=model._rotary(0, 7, None, x_BTM))
    torch.testing.assert_close(attention(x_BTM, context), wanted)


@pytest.mark.parametrize("mlp", ["swiglu", "gelu"])
def test_the_mlp_is_its_formula(build: Build, mlp: str) -> None:
    part = build(mlp=mlp, layers=1).blocks[0].mlp
    x = stream(2, 5, 24)
    wide = x @ part.up.weight.T
    bent = gelu(wide) if mlp == "gelu" else silu(x @ part.gate.weight.T) * wide
    torch.testing.assert_close(part(x), bent @ part.down.weight.T)


def test_each_branch_reads_the_normalised_stream_and_is_added_to_it(build: Build) -> None:
    block = build(layers=1, positions="none").blocks[0]
    assert isinstance(block, Block)
    x = stream(2, 5, 24)
    middle = x + block.attention(block.attention_norm(x), ForwardContext())
    torch.testing.assert_close(block(x), middle + block.mlp(block.mlp_norm(middle)))


def test_a_decoder_is_embedding_blocks_a_last_norm_and_the_tied_table(
    build: Build, ids: Tensor
) -> None:
    model = build(positions="none")
    x = model.embed.weight[ids]
    for block in model.blocks:
        x = block(x)
    torch.testing.assert_close(model(ids), model.norm(x) @ model.embed.weight.T)
    assert not torch.allclose(model(ids), x @ model.embed.weight.T)


def test_an_observer_sees_what_attention_uses(build: Build, ids: Tensor) -> None:
    model, seen = build(), []

    def observe(layer: int, *qkv: Tensor) -> None:
        seen.append((layer, [tuple(part.shape) for part in qkv]))

    assert torch.equal(model(ids, observe=observe), model(ids))
    assert seen == [(n, [(3, 4, 9, 6), (3, 2, 9, 6), (3, 2, 9, 6)]) for n in range(3)]


@pytest.mark.parametrize("where", ["branch", "weights"])
def test_dropout_is_for_training_alone(build: Build, where: str, monkeypatch: Any) -> None:
    model = build(dropout=0.5, layers=1)
    block, x = model.blocks[0], stream(2, 5, 24)
    context = ForwardContext(rotary=model._rotary(0, 5, None, x))
    assert torch.equal(block(x, context), block(x, context))
    block.train()
    if where == "weights":
        monkeypatch.setattr(block, "_drop", lambda branch: branch)
    else:
        block.attention.eval()
    torch.manual_seed(0)
    assert not torch.equal(block(x, context), block(x, context))
