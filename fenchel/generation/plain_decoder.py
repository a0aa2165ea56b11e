"""What a plain decoder is, and its weights in the order of their use.

    y = norm(x);   q, k, v = y W_qkv^T;   x = x + attend(rotary(q), keys, values) W_o^T
    y = norm(x);   x = x + (f(y W_gate^T) * (y W_up^T)) W_down^T

Two modules compute a decoding step of such a model without calling its submodules:
generation/cpu_step.py on a CPU, and the fused step of generation/fused_step.py on a GPU. They
support the settings in ``SUPPORTED``; ``why_not_plain`` names what else a model has. The fused step
also serves entmax and sparsemax (``decode_alpha``).
"""

from dataclasses import fields
from typing import NamedTuple

import torch
from torch import Tensor, nn

from fenchel.attention.spec import SOFTMAX
from fenchel.choice import Choice, Entmax, Softmax, Sparsemax
from fenchel.model import ModelConfig, Transformer
from fenchel.model.attention import Attention
from fenchel.model.block import Block
from fenchel.model.mlp import Mlp
from fenchel.model.norm import RMSNorm
from fenchel.torch_internals import has_forward_hooks

SUPPORTED = frozenset(
    """vocabulary context width layers heads kv_heads head_size hidden norm positions rotary_base
    rotary_scaling rotary_factor rotary_trained_context rotary_slow rotary_fast rotary_attention
    rotary_truncate windows score_scale mlp tied bias qkv_bias dropout attention_dropout mlp_dropout
    epsilon entmax_alpha initial initial_std initial_qk initial_distances initial_depth""".split()
)
"""Settings that those modules read, or that do not change a trained model; the others must have
their default values."""
CHOICE_SETTINGS = frozenset(("choice", "layer_choices", "beta"))
POSITIONS = ("rotary", "learned", "none")
MLPS = ("swiglu", "geglu", "geglu_tanh", "gelu", "gelu_tanh", "relu")
_MODULES = {Transformer, Block, Attention, Mlp, RMSNorm}
_KNOWN = {*_MODULES, nn.Linear, nn.Embedding, nn.LayerNorm, nn.ModuleList}


def decode_alpha(choice: Choice) -> float | None:
    """The alpha of the maps that a GPU decodes: 1 for softmax; None for any other map.

    Above 2 the power r = 1 / (alpha - 1) of the threshold search is below 1, and it may not end.

    >>> decode_alpha(Softmax()), decode_alpha(Entmax(1.5)), decode_alpha(Sparsemax())
    (1.0, 1.5, 2.0)
    """
    if not isinstance(choice, Softmax | Entmax | Sparsemax) or isinstance(choice.beta, Tensor):
        return None
    if not isinstance(choice, Entmax):
        return 1.0 if isinstance(choice, Softmax) else 2.0
    alpha = choice.alpha
    return alpha if not isinstance(alpha, Tensor) and 1 < alpha <= 2 else None


def why_not_plain(model: Transformer, *, sparse: bool = False) -> str | None:
    """The first thing that makes a model more than a plain decoder, or None.

    With ``sparse`` the maps of ``decode_alpha`` count as plain, at any temperature.
    """
    config, table = model.config, model.lm_head_weight
    supported = SUPPORTED | CHOICE_SETTINGS if sparse else SUPPORTED
    for field in fields(ModelConfig):
        value = getattr(config, field.name)
        if field.name not in supported and value != field.default:
            return f"{field.name} is {value!r}"
    if config.mlp not in MLPS:
        return f"mlp is {config.mlp!r}"
    if config.positions not in POSITIONS:
        return f"positions are {config.positions!r}"
    if torch.is_autocast_enabled(table.device.type):
        return "autocast changes dtypes on the way"
    if any(p.dtype != table.dtype for p in model.parameters()):
        return "its parameters have several dtypes"
    for module in model.modules():
        if has_forward_hooks(module):
            return f"its {type(module).__name__} has a forward hook"
        if type(module) not in _KNOWN:
            return f"it has a {type(module).__name__}"
        if isinstance(module, Attention) and module.choice != SOFTMAX:
            if sparse and decode_alpha(module.choice) is not None:
                continue
            return f"a layer chooses by {module.choice}"
    return None


class LinearWeights(NamedTuple):
    """y = x W^T + b, with W^T ready for ``mm``."""

    transposed: Tensor
    bias: Tensor | None

    @property
    def weight(self) -> Tensor:
        """W itself, (N, K)."""
        return self.transposed.t()

    def into(self, y: Tensor, x: Tensor) -> None:
        """Write x W^T + b into y."""
        if self.bias is None:
            torch.mm(x, self.transposed, out=y)
        else:
            torch.addmm(self.bias, x, self.transposed, out=y)

    def add_to(self, y: Tensor, x: Tensor) -> None:
        """Add x W^T + b to y."""
        y.addmm_(x, self.transposed)
        if self.bias is not None:
            y.add_(self.bias)


PlainNorm = RMSNorm | nn.LayerNorm


class BlockWeights(NamedTuple):
    """The weights of a block in the order of their use, and its choice map."""

    choice: Choice
    attention_norm: PlainNorm
    qkv: LinearWeights
    out: LinearWeights
    mlp_norm: PlainNorm
    gate: LinearWeights | None
    up: LinearWeights
    down: LinearWeights


def block_weights(block: nn.Module) -> BlockWeights:
    """The weights of a block, as views."""
    assert isinstance(block, Block)
    assert isinstance(block.mlp, Mlp)
    attention, mlp = block.attention, block.mlp
    assert isinstance(attention, Attention)
    return BlockWeights(
        attention.choice,
        plain_norm(block.attention_norm),
        _linear(attention.qkv),
        _linear(attention.out),
        plain_norm(block.mlp_norm),
        None if mlp.gate is None else _linear(mlp.gate),
        _linear(mlp.up),
        _linear(mlp.down),
    )


def _linear(layer: nn.Linear) -> LinearWeights:
    return LinearWeights(layer.weight.t(), layer.bias)


def plain_norm(module: nn.Module | None) -> PlainNorm:
    """The module, narrowed to the type of a plain decoder's norm."""
    assert isinstance(module, RMSNorm | nn.LayerNorm)
    return module
