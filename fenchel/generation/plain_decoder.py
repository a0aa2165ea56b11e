"""What a plain decoder is, and its weights in the order in which they are used.

    y = norm(x);   q, k, v = y W_qkv^T;   q, k turned;   x = x + attend(q, keys, values) W_o^T
    y = norm(x);   x = x + (f(y W_gate^T) * (y W_up^T)) W_down^T

Two pages read one token through such a model without calling its modules: lean.py on a CPU and
fused.py on a GPU. They know the settings in ``VARIES``; ``unusual`` names what else a model has.
"""

from dataclasses import fields
from typing import NamedTuple

import torch
from torch import Tensor, nn

from fenchel.attention import attend
from fenchel.model import ModelConfig, Transformer
from fenchel.model.attention import Attention
from fenchel.model.block import Block
from fenchel.model.mlp import Mlp
from fenchel.model.norm import RMSNorm

VARIES = frozenset(
    """vocabulary context width layers heads kv_heads head_size hidden norm positions rotary_base
    rotary_scaling rotary_factor rotary_trained_context rotary_slow rotary_fast rotary_attention
    rotary_truncate windows score_scale mlp tied bias qkv_bias dropout attention_dropout mlp_dropout
    epsilon alpha initial initial_std initial_qk initial_depth""".split()
)
"""Settings that those pages read or that do not matter to a trained model; others must be usual."""
USUAL = (attend.__kwdefaults__ or {})["choice"]
"""Softmax, as ``attend`` makes it unless told otherwise; the fused kernel knows no other."""
POSITIONS = ("rotary", "learned", "none")
_OURS = {Transformer, Block, Attention, Mlp, RMSNorm}
_KNOWN = {*_OURS, nn.Linear, nn.Embedding, nn.LayerNorm, nn.ModuleList}


def why_not_plain(model: Transformer) -> str | None:
    """The first thing that makes a model more than a plain decoder, or None."""
    config, table = model.config, model.lm_head_weight
    for field in fields(ModelConfig):
        value = getattr(config, field.name)
        if field.name not in VARIES and value != field.default:
            return f"{field.name} is {value!r}"
    if config.positions not in POSITIONS:
        return f"positions are {config.positions!r}"
    if torch.is_autocast_enabled(table.device.type):
        return "autocast changes dtypes on the way"
    if any(p.dtype != table.dtype for p in model.parameters()):
        return "its parameters are of several kinds"
    for module in model.modules():
        if module._forward_hooks or module._forward_pre_hooks:
            return f"somebody watches its {type(module).__name__}"
        if type(module) not in _KNOWN:
            return f"it has a {type(module).__name__}"
        if isinstance(module, Attention) and module.choice != USUAL:
            return f"a layer chooses by {module.choice}"
    return None


class Map(NamedTuple):
    """y = x W^T + b, ready for ``mm``."""

    turned: Tensor
    bias: Tensor | None

    @property
    def weight(self) -> Tensor:
        """W itself, (N, K)."""
        return self.turned.t()

    def into(self, y: Tensor, x: Tensor) -> None:
        """Y = x W^T + b."""
        if self.bias is None:
            torch.mm(x, self.turned, out=y)
        else:
            torch.addmm(self.bias, x, self.turned, out=y)

    def add_to(self, y: Tensor, x: Tensor) -> None:
        """Y <- y + x W^T + b."""
        y.addmm_(x, self.turned)
        if self.bias is not None:
            y.add_(self.bias)


Norm = RMSNorm | nn.LayerNorm


class Layer(NamedTuple):
    """The weights of a block in the order in which they are used."""

    before: Norm
    qkv: Map
    out: Map
    between: Norm
    gate: Map | None
    up: Map
    down: Map


def layer_of(block: nn.Module) -> Layer:
    """A block's weights, as views."""
    assert isinstance(block, Block)
    assert isinstance(block.mlp, Mlp)
    look, think = block.attention, block.mlp
    return Layer(
        norm_of(block.attention_norm),
        _map(look.qkv),
        _map(look.out),
        norm_of(block.mlp_norm),
        None if think.gate is None else _map(think.gate),
        _map(think.up),
        _map(think.down),
    )


def _map(layer: nn.Linear) -> Map:
    return Map(layer.weight.t(), layer.bias)


def norm_of(module: nn.Module | None) -> Norm:
    """A norm as what it is."""
    assert isinstance(module, RMSNorm | nn.LayerNorm)
    return module
