"""One token of every sequence through a plain decoder, with nothing made twice.

    y = norm(x);   q, k, v = y W_qkv^T;   q, k turned;   x = x + attend(q, keys, values) W_o^T
    y = norm(x);   x = x + (f(y W_gate^T) * (y W_up^T)) W_down^T

A small model that reads one token spends more time on being called than on computing: each
operation costs some microseconds however few numbers it has. So here all memory is taken once,
the views into it are made once, weights are turned once (as views), and results are written
where they are needed: under thirty operations a layer instead of forty, and no modules between.

A query sees everything that the cache hands out: a window is the cache's business, and the fill
of unequal prompts is a mask. The R = H / G query heads that share keys stand under one another
as R queries of one head, so no key is repeated.

It is the forward pass of fenchel/model for T = 1 and a plain decoder
(fenchel/generation/plain_decoder.py);
``why_not`` says what else a model has, and then the model reads by itself.

B sequences, M width of the stream, H heads, G heads of keys, D width of a head, F width of the MLP.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.linalg import vector_norm
from torch.nn.functional import layer_norm, scaled_dot_product_attention

from fenchel.generation.kv_cache import KVCache
from fenchel.generation.plain_decoder import Norm, layer_of, norm_of, why_not_plain
from fenchel.model import Transformer
from fenchel.model.mlp import ACTIVATIONS
from fenchel.model.rotary_table import RotaryTable

SEVERAL = 4
"""Sequences from which on the layout of a result matters."""


def why_not(model: Transformer) -> str | None:
    """The first reason why a model cannot be read by ``Lean``, or None."""
    table = model.lm_head_weight
    if table.device.type != "cpu" or table.dtype not in (torch.float32, torch.float64):
        return f"it is in {table.dtype} on {table.device.type}"
    return why_not_plain(model)


class CpuStep:
    """Reads one token of each of ``batch`` sequences at a time, into a cache."""

    def __init__(self, model: Transformer, cache: KVCache, *, batch: int) -> None:
        config, table = model.config, model.lm_head_weight
        self.config, self.cache, self.embed = config, cache, model.embed.weight
        self.pos_embed = None if model.pos_embed is None else model.pos_embed.weight
        self.lm_head_weight, self.norm = table, norm_of(model.norm)
        self.activation: Callable[[Tensor], Tensor] = ACTIVATIONS[config.mlp]
        self.turning = RotaryTable(config) if config.positions == "rotary" else None
        self.layers = [layer_of(block) for block in model.blocks]
        self._take_memory(batch)

    def step(self, token_B: Tensor, token_mask_BS: Tensor | None = None) -> Tensor:
        """Logits behind the next token of each sequence: (B,) -> (B, V).

        ``token_mask_BS`` as in the model's forward. The logits are good until the next step.
        """
        cache, x = self.cache, self.x
        position_B = None if token_mask_BS is None else token_mask_BS.sum(-1) - 1
        torch.index_select(self.embed, 0, token_B, out=x)
        if self.pos_embed is not None:
            x.add_(self.pos_embed[cache.length if position_B is None else position_B])
        turn = self._turn(position_B)
        scale = self.config.score_scale
        for number, layer in enumerate(self.layers):
            y = self._normed(layer.before)
            layer.qkv.into(self.made, y)
            if turn is not None:
                cos, first, second = turn
                torch.mul(self.qk, cos, out=self.turned)
                self.turned_first.addcmul_(self.second, first)
                self.turned_second.addcmul_(self.first, second)
            keys, values = cache.append(number, self.k, self.v)
            mask = None
            if token_mask_BS is not None:
                mask = token_mask_BS[:, None, None, -keys.shape[2] :]
            mixed = scaled_dot_product_attention(self.q, keys, values, mask, scale=scale)
            layer.out.add_to(x, mixed.reshape(self.mixed))
            y = self._normed(layer.between)
            layer.up.into(self.wide, y)
            if layer.gate is None:
                wide = self.activation(self.wide)
            else:
                layer.gate.into(self.gated, y)
                wide = self.activation(self.gated).mul_(self.wide)
            layer.down.add_to(x, wide)
        cache.advance(1)
        y = self._normed(self.norm)
        return torch.mm(y, self.turned_table, out=self.logits)

    def _normed(self, norm: Norm) -> Tensor:
        """The stream as a branch reads it, (B, M)."""
        x, r = self.x, self.size
        if isinstance(norm, nn.LayerNorm):
            return layer_norm(x, norm.normalized_shape, norm.weight, norm.bias, norm.eps)
        vector_norm(x, 2, -1, True, out=r)
        torch.addcmul(self.epsilon, r, r, value=1.0 / x.shape[-1], out=r).rsqrt_()
        return torch.mul(x, r, out=self.y).mul_(norm.weight)

    def _turn(self, position_B: Tensor | None) -> tuple[Tensor, Tensor, Tensor] | None:
        """cos, and sin for the first and the second half of a head; each broadcasts to heads."""
        if self.turning is None:
            return None
        start = self.cache.length
        if position_B is None:
            cos, sin = self.turning.between(start, start + 1, self.x)
        else:
            cos, sin = (
                t.squeeze(1) for t in self.turning.at(position_B[:, None], start + 1, self.x)
            )
        first, second = sin.chunk(2, -1)
        return cos, first, second

    def _take_memory(self, B: int) -> None:
        c = self.config
        H, G, D, M, F = c.heads, c.groups, c.head_width, c.width, c.mlp_width
        new = self.embed.new_empty

        def made(width: int) -> Tensor:
            # How a result lies decides how the product is computed: for four sequences or more
            # the BLAS is up to twice as quick if theirs lie side by side.
            return new(B, width) if B < SEVERAL else new(width, B).t()

        self.x, self.y, self.wide, self.gated = new(B, M), new(B, M), made(F), made(F)
        self.logits, self.turned_table = made(c.vocabulary), self.lm_head_weight.t()
        self.size, self.epsilon = new(B, 1), self.embed.new_full((B, 1), c.epsilon)
        rows = (H + 2 * G) * D  # as the fused attention wants them, unless turning lays them so
        self.made = new(B, rows) if self.turning is None else made(rows)
        self.mixed = (B, H * D)
        heads = self.made.view(B, H + 2 * G, D)
        self.qk, self.v = heads[:, : H + G], heads[:, H + G :].unsqueeze(2)
        # Turning (a, b) is (a, b) (c, c) + (b, a) (-s, s): each half takes from the other.
        self.turned = self.qk
        if self.turning is not None:
            self.turned = new(B, H + G, D)
            self.first, self.second = self.qk.chunk(2, -1)
            self.turned_first, self.turned_second = self.turned.chunk(2, -1)
        self.q = self.turned.narrow(1, 0, H).view(B, G, H // G, D)
        self.k = self.turned[:, H:].unsqueeze(2)
