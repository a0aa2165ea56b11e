"""One decoding step of a plain decoder on a CPU, without modules and without allocations.

    y = norm(x);   q, k, v = y W_qkv^T;   x = x + attend(rotary(q), keys, values) W_o^T
    y = norm(x);   x = x + (f(y W_gate^T) * (y W_up^T)) W_down^T

A small model that reads one token spends more time on calls than on arithmetic: each operation
costs some microseconds however few numbers it has. So all memory is allocated once, the views into
it are made once, weights are transposed once (as views), and results are written where they are
needed: under thirty operations per layer instead of forty, and no modules in between.

A query attends to all keys that the cache returns: the cache applies a window, and the padding of
unequal prompts is a mask. The R = H / G query heads that share keys are R queries of one head, so
no key is repeated. With ``lengths`` every sequence attends by a call of its own to its own keys:
the rounding of its sums then depends on its own length and on no other's.

**Packed weights.** oneDNN computes products of a few rows faster with matrices in a layout of its
own, which is a second copy of the weights (``PackedWeights``): a server makes it once, a single
call does not.

It is the forward pass of fenchel/model for T = 1 and a plain decoder (generation/plain_decoder.py);
for any other model ``why_not_cpu_step`` names the reason, and the model itself is called.

B sequences, M width of the stream, H heads, G heads of keys, D width per head, F width of the MLP.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.linalg import vector_norm
from torch.nn.functional import layer_norm, scaled_dot_product_attention

from fenchel.generation.plain_decoder import (
    LinearWeights,
    PlainNorm,
    block_weights,
    plain_norm,
    why_not_plain,
)
from fenchel.model import Transformer
from fenchel.model.forward_context import Cache, Observer
from fenchel.model.mlp import ACTIVATIONS
from fenchel.model.rotary_table import RotaryTable
from fenchel.torch_internals import packed_linear, packed_linear_weight, packs_linear_weights

TRANSPOSED = range(2, 9)
"""Numbers of sequences for which products are faster with transposed results. 8 layers of width 512
on one core of an EPYC, transposed and not, in ms: 10.9 and 17.3 for two sequences, 13.0 and 16.0
for four, 18.8 and 19.2 for eight, 31.6 and 22.5 for twelve, 28.2 and 26.1 for 16."""


PACKED = range(2, 65)
"""Numbers of sequences for which packed weights are used. The products of the same model in ms,
with packed weights and with the better layout of results, on a busy core: 11.6 and 12.8 for two
sequences, 16.4 and 20.2 for eight, 22.3 and 25.6 for 16, 36.9 and 37.8 for 32."""
PACKED_BYTES = 1 << 30
"""Weights above this size are not packed: their copy would take the memory of the cache."""


def why_not_cpu_step(model: Transformer) -> str | None:
    """The first reason why ``CpuStep`` cannot serve a model, or None."""
    table = model.lm_head_weight
    if table.device.type != "cpu" or table.dtype not in (torch.float32, torch.float64):
        return f"it is in {table.dtype} on {table.device.type}"
    return why_not_plain(model)


class PackedLinear(NamedTuple):
    """``LinearWeights`` with a packed W."""

    packed: Tensor
    bias: Tensor | None

    def into(self, y: Tensor, x: Tensor) -> None:
        """Write x W^T + b into y."""
        y.copy_(packed_linear(x, self.packed, self.bias))

    def add_to(self, y: Tensor, x: Tensor) -> None:
        """Add x W^T + b to y."""
        y.add_(packed_linear(x, self.packed, self.bias))


class Products(NamedTuple):
    """The products of a block."""

    qkv: LinearWeights | PackedLinear
    out: LinearWeights | PackedLinear
    gate: LinearWeights | PackedLinear | None
    up: LinearWeights | PackedLinear
    down: LinearWeights | PackedLinear


class PackedWeights(NamedTuple):
    """The weights of all products of a model, packed once for steps of any of ``PACKED``."""

    layers: Sequence[Products]
    lm_head: PackedLinear

    @classmethod
    def of(cls, model: Transformer) -> "PackedWeights | None":
        """None where packing is not possible, or takes too much memory."""
        table = model.lm_head_weight
        size = sum(p.numel() * p.element_size() for p in model.parameters())
        if table.dtype != torch.float32 or size > PACKED_BYTES or not packs_linear_weights():
            return None
        layers = []
        for layer in map(block_weights, model.blocks):
            gate = None if layer.gate is None else _pack(layer.gate)
            packed = _pack(layer.qkv), _pack(layer.out), gate, _pack(layer.up), _pack(layer.down)
            layers.append(Products(*packed))
        return cls(layers, _pack(LinearWeights(table.t(), None)))


def _pack(weights: LinearWeights) -> PackedLinear:
    rows = 8  # the layout hardly depends on it
    bias = None if weights.bias is None else weights.bias.detach()
    return PackedLinear(packed_linear_weight(weights.weight.detach(), rows), bias)


class CpuStep:
    """A decoding step for ``batch`` sequences, one token each, with a KV cache.

    With ``packed`` its products are those of the packed weights, for numbers of sequences for which
    they are faster.
    """

    def __init__(
        self,
        model: Transformer,
        cache: Cache,
        *,
        batch: int,
        packed: PackedWeights | None = None,
    ) -> None:
        config, table = model.config, model.lm_head_weight
        self.config, self.cache, self.embed = config, cache, model.embed.weight
        self.pos_embed = None if model.pos_embed is None else model.pos_embed.weight
        self.norm = plain_norm(model.norm)
        self.activation: Callable[[Tensor], Tensor] = ACTIVATIONS[config.mlp]
        self.rotary_table = RotaryTable(config) if config.positions == "rotary" else None
        self.layers = [block_weights(block) for block in model.blocks]
        self.lm_head: LinearWeights | PackedLinear = LinearWeights(table.t(), None)
        self.products: Sequence[Products] = [
            Products(layer.qkv, layer.out, layer.gate, layer.up, layer.down)
            for layer in self.layers
        ]
        self.packed = packed is not None and batch in PACKED
        if packed is not None and self.packed:
            self.products, self.lm_head = packed
        self._allocate(batch)

    def step(
        self,
        token_B: Tensor,
        token_mask_BS: Tensor | None = None,
        observe: Observer | None = None,
        *,
        lengths: Sequence[int] | None = None,
    ) -> Tensor:
        """Logits after one more token of each sequence: (B,) -> (B, V).

        ``token_mask_BS`` and ``observe`` as in the forward pass of the model. Instead of the mask
        ``lengths``: the number of tokens of each sequence with the new one, which are in its last
        slots; 0 where a row has none. The next step overwrites the logits, and the next layer the
        queries.
        """
        cache, x = self.cache, self.x
        position_B = None if token_mask_BS is None else token_mask_BS.sum(-1) - 1
        if lengths is not None:
            position_B = torch.tensor(lengths).sub_(1).clamp_(min=0)
        torch.index_select(self.embed, 0, token_B, out=x)
        if self.pos_embed is not None:
            x.add_(self.pos_embed[cache.length if position_B is None else position_B])
        rotary = self._rotary(position_B)
        scale = self.config.score_scale
        for number, (layer, product) in enumerate(zip(self.layers, self.products, strict=True)):
            y = self._norm(layer.attention_norm)
            product.qkv.into(self.qkv, y)
            if rotary is not None:
                cos, first, second = rotary
                torch.mul(self.qk, cos, out=self.rotated)
                self.rotated_first.addcmul_(self.second, first)
                self.rotated_second.addcmul_(self.first, second)
            keys, values = cache.append(number, self.k, self.v)
            if lengths is not None:
                attended = self._attend_one_by_one(keys, values, lengths)
            else:
                mask = None
                if token_mask_BS is not None:
                    mask = token_mask_BS[:, None, None, -keys.shape[2] :]
                attended = scaled_dot_product_attention(self.q, keys, values, mask, scale=scale)
            if observe is not None:
                observe(number, self.q.flatten(1, 2).unsqueeze(2), keys, values)
            product.out.add_to(x, attended.reshape(self.attended_shape))
            y = self._norm(layer.mlp_norm)
            product.up.into(self.wide, y)
            if product.gate is None:
                wide = self.activation(self.wide)
            else:
                product.gate.into(self.gated, y)
                wide = self.activation(self.gated).mul_(self.wide)
            product.down.add_to(x, wide)
        cache.advance(1)
        y = self._norm(self.norm)
        self.lm_head.into(self.logits, y)
        return self.logits

    def _attend_one_by_one(self, keys: Tensor, values: Tensor, lengths: Sequence[int]) -> Tensor:
        """The attention output, (B, G, R, D); what a row without a token has is of no use."""
        o, scale = torch.zeros_like(self.q), self.config.score_scale
        for b, n in enumerate(lengths):
            if n:
                row = slice(b, b + 1)
                first = max(0, keys.shape[2] - n)
                k, v = keys[row, :, first:], values[row, :, first:]
                o[row] = scaled_dot_product_attention(self.q[row], k, v, scale=scale)
        return o

    def _norm(self, norm: PlainNorm) -> Tensor:
        """The norm of the stream, (B, M)."""
        x, r = self.x, self.size
        if isinstance(norm, nn.LayerNorm):
            return layer_norm(x, norm.normalized_shape, norm.weight, norm.bias, norm.eps)
        vector_norm(x, 2, -1, True, out=r)
        torch.addcmul(self.epsilon, r, r, value=1.0 / x.shape[-1], out=r).rsqrt_()
        return torch.mul(x, r, out=self.y).mul_(norm.weight)

    def _rotary(self, position_B: Tensor | None) -> tuple[Tensor, Tensor, Tensor] | None:
        """cos, and sin for the first and second half of each head; they broadcast over heads."""
        if self.rotary_table is None:
            return None
        start = self.cache.length
        if position_B is None:
            cos, sin = self.rotary_table.between(start, start + 1, self.x)
        else:
            cos, sin = (
                t.squeeze(1) for t in self.rotary_table.at(position_B[:, None], start + 1, self.x)
            )
        first, second = sin.chunk(2, -1)
        return cos, first, second

    def _allocate(self, B: int) -> None:
        c = self.config
        H, G, D, M, F = c.heads, c.groups, c.head_width, c.width, c.mlp_width
        new = self.embed.new_empty

        def result(width: int) -> Tensor:
            # The layout of a result decides how BLAS computes the product: for a few sequences it
            # is up to twice as fast if their entries are adjacent.
            transposed = B in TRANSPOSED and not self.packed
            return new(width, B).t() if transposed else new(B, width)

        self.x, self.y, self.wide, self.gated = new(B, M), new(B, M), result(F), result(F)
        self.logits = result(c.vocabulary)
        self.size, self.epsilon = new(B, 1), self.embed.new_full((B, 1), c.epsilon)
        rows = (H + 2 * G) * D  # contiguous for the fused attention, unless rotation copies them
        self.qkv = new(B, rows) if self.rotary_table is None else result(rows)
        self.attended_shape = (B, H * D)
        heads = self.qkv.view(B, H + 2 * G, D)
        self.qk, self.v = heads[:, : H + G], heads[:, H + G :].unsqueeze(2)
        # The rotation of (a, b) is (a, b) (c, c) + (b, a) (-s, s): each half adds the other.
        self.rotated = self.qk
        if self.rotary_table is not None:
            self.rotated = new(B, H + G, D)
            self.first, self.second = self.qk.chunk(2, -1)
            self.rotated_first, self.rotated_second = self.rotated.chunk(2, -1)
        self.q = self.rotated.narrow(1, 0, H).view(B, G, H // G, D)
        self.k = self.rotated[:, H:].unsqueeze(2)
