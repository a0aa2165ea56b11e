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

**Packed tokens.** A server computes many tokens at once: the next ones of B sequences, or several
prompts. Norms, products and activations take tokens one by one, so ``PackedForward`` takes N tokens
of any sequences, one after another without padding, and leaves attention to its caller. Its
products are oneDNN's, by weights in a layout of its own, and add the stream, apply the activation
or multiply by the gate while results are in registers. That is a second copy of the weights: a
server makes it once, a single call does not.

It is the forward pass of fenchel/model for T = 1 and a plain decoder (generation/plain_decoder.py);
for any other model ``why_not_cpu_step`` names the reason, and the model itself is called.

B sequences, N tokens, M width of the stream, H heads, G heads of keys, D width per head, F width of
the MLP.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.linalg import vector_norm
from torch.nn.functional import gelu, layer_norm, relu, scaled_dot_product_attention, silu

from fenchel.generation.plain_decoder import (
    LinearWeights,
    PlainNorm,
    block_weights,
    plain_norm,
    why_not_plain,
)
from fenchel.model import Transformer
from fenchel.model.forward_context import Cache, Observer
from fenchel.model.mlp import ACTIVATIONS, gelu_tanh
from fenchel.model.rotary_table import RotaryTable
from fenchel.torch_internals import (
    packed_linear,
    packed_linear_weight,
    packed_linear_with,
    packs_linear_weights,
)

TRANSPOSED = range(2, 9)
"""Numbers of sequences for which products are faster with transposed results. 8 layers of width 512
on one core of an EPYC, transposed and not, in ms: 10.9 and 17.3 for two sequences, 13.0 and 16.0
for four, 18.8 and 19.2 for eight, 31.6 and 22.5 for twelve, 28.2 and 26.1 for 16."""

PACKED_BYTES = 1 << 30
"""Weights above this size are not packed: their copy would take the memory of the cache."""
PACKED_LEAST, PACKED_EXACT, PACKED_MULTIPLE = 5, 64, 8
"""Numbers of rows of a packed product: 5 at least, any up to 64, then multiples of 8.

oneDNN takes 6.7 ms for the products of five rows of a model of 8 layers of width 512 on a core of
an EPYC with AVX-512, and 8.6 for one row. It writes the code of a product at the first use of its
shapes, which takes about a millisecond: so shapes of many rows are few."""
ONEDNN_ACTIVATIONS = {
    silu: ("swish", ""),
    gelu: ("gelu", "none"),
    gelu_tanh: ("gelu", "tanh"),
    relu: ("relu", ""),
}
Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""The attention of a layer, by its number and the q (N, H, D), k and v (N, G, D) of all tokens:
(N, H D)."""


def why_not_cpu_step(model: Transformer) -> str | None:
    """The first reason why ``CpuStep`` cannot serve a model, or None."""
    table = model.lm_head_weight
    if table.device.type != "cpu" or table.dtype not in (torch.float32, torch.float64):
        return f"it is in {table.dtype} on {table.device.type}"
    return why_not_plain(model)


class StepAttention(NamedTuple):
    """The attention of one new token of each of B sequences to those in a cache.

    With ``lengths`` every sequence attends by a call of its own to its own keys: ``lengths`` has
    the number of its tokens with the new one, 0 where a row has none. Else ``mask`` is added to the
    scores, (B, 1, 1, S) or for the last S.
    """

    cache: Cache
    scale: float | None
    mask: Tensor | None = None
    lengths: Sequence[int] | None = None
    observe: Observer | None = None

    @classmethod
    def masked(
        cls,
        cache: Cache,
        scale: float | None,
        token_mask_BS: Tensor | None,
        observe: Observer | None,
        dtype: torch.dtype,
    ) -> "StepAttention":
        """Attention to the slots where ``token_mask_BS`` is True, to keys of this dtype."""
        mask = None
        if token_mask_BS is not None:
            mask = torch.zeros(token_mask_BS.shape, dtype=dtype)
            mask = mask.masked_fill_(~token_mask_BS, -torch.inf)[:, None, None]
        return cls(cache, scale, mask, None, observe)

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q (B, G, R, D), k and v (B, G, 1, D) -> (B, G, R, D)."""
        keys, values = self.cache.append(layer, k, v)
        q = q.to(keys.dtype)
        if self.observe is not None:
            self.observe(layer, q.flatten(1, 2).unsqueeze(2), keys, values)
        if self.lengths is not None:
            return self._one_by_one(q, keys, values, self.lengths)
        mask = None if self.mask is None else self.mask[..., -keys.shape[2] :]
        return scaled_dot_product_attention(q, keys, values, mask, scale=self.scale)

    def _one_by_one(
        self, q: Tensor, keys: Tensor, values: Tensor, lengths: Sequence[int]
    ) -> Tensor:
        """What a row without a token has is of no use."""
        o = torch.zeros_like(q)
        for b, n in enumerate(lengths):
            if n:
                row = slice(b, b + 1)
                first = max(0, keys.shape[2] - n)
                k, v = keys[row, :, first:], values[row, :, first:]
                o[row] = scaled_dot_product_attention(q[row], k, v, scale=self.scale)
        return o


class PackedLinear(NamedTuple):
    """y = x W^T + b with a packed W."""

    packed: Tensor
    bias: Tensor | None

    @classmethod
    def of(cls, weights: LinearWeights) -> "PackedLinear":
        """A packed copy."""
        rows = 32  # a layout for fewer rows is slower for many
        bias = None if weights.bias is None else weights.bias.detach()
        return cls(packed_linear_weight(weights.weight.detach(), rows), bias)

    def __call__(self, x: Tensor, activation: tuple[str, str] = ("none", "")) -> Tensor:
        """f(x W^T + b)."""
        return packed_linear(x, *self, activation)

    def plus(self, x: Tensor, y: Tensor) -> Tensor:
        """x W^T + b + y."""
        return packed_linear_with(x, *self, y, "add")

    def times(self, x: Tensor, y: Tensor) -> Tensor:
        """(x W^T + b) y, entry by entry."""
        return packed_linear_with(x, *self, y, "mul")


class PackedBlock(NamedTuple):
    """The packed weights of a block, in the order of their use."""

    attention_norm: PlainNorm
    qkv: PackedLinear
    out: PackedLinear
    mlp_norm: PlainNorm
    gate: PackedLinear | None
    up: PackedLinear
    down: PackedLinear


def _rows(N: int) -> int:
    """The rows of a product of N tokens.

    >>> _rows(1), _rows(33), _rows(99)
    (5, 33, 104)
    """
    if N > PACKED_EXACT:
        return -(-N // PACKED_MULTIPLE) * PACKED_MULTIPLE
    return max(N, PACKED_LEAST)


class PackedForward:
    """The forward pass of a plain decoder over N tokens of any sequences, by packed weights."""

    def __init__(self, model: Transformer) -> None:
        self.config, self.embed = model.config, model.embed.weight
        self.pos_embed = None if model.pos_embed is None else model.pos_embed.weight
        self.norm = plain_norm(model.norm)
        self.epsilon = self.embed.new_full((1, 1), self.config.epsilon)
        self.activation = ONEDNN_ACTIVATIONS[ACTIVATIONS[self.config.mlp]]
        rotary = self.config.positions == "rotary"
        self.rotary_table = RotaryTable(self.config) if rotary else None
        self.blocks = [
            PackedBlock(
                layer.attention_norm,
                PackedLinear.of(layer.qkv),
                PackedLinear.of(layer.out),
                layer.mlp_norm,
                None if layer.gate is None else PackedLinear.of(layer.gate),
                PackedLinear.of(layer.up),
                PackedLinear.of(layer.down),
            )
            for layer in map(block_weights, model.blocks)
        ]
        self.lm_head = PackedLinear.of(LinearWeights(model.lm_head_weight.t(), None))
        specs = (layer.spec for layer in model.attention_layers())
        self.attention: list[dict[str, Any]] = [dict(spec) for spec in specs]
        """How the layers attend: the settings of ``attend``."""
        self.unlimited = replace(model.config, windows=())
        """The settings of a cache in which no prompt displaces the keys of another."""

    @classmethod
    def of(cls, model: Transformer) -> "PackedForward | None":
        """None where packing is not possible, or takes too much memory."""
        table = model.lm_head_weight
        size = sum(p.numel() * p.element_size() for p in model.parameters())
        if table.device.type != "cpu" or not packs_linear_weights(table.dtype):
            return None
        return cls(model) if size <= PACKED_BYTES and why_not_plain(model) is None else None

    def __call__(
        self,
        token_N: Tensor,
        position_N: Tensor,
        attend: Attend,
        wanted: Sequence[int] | None = None,
    ) -> Tensor:
        """What the LM head takes at the ``wanted`` tokens, all by default: (N,) -> (N, M).

        Of the other tokens the last block computes keys and values alone.
        """
        c, N = self.config, len(token_N)
        H, G, D = c.heads, c.groups, c.head_width
        x = self.embed.new_zeros(_rows(N), c.width)  # rows beyond N are computed and not used
        torch.index_select(self.embed, 0, token_N, out=x[:N])
        if self.pos_embed is not None:
            x[:N] += self.pos_embed[position_N]
        rotary = self._rotary(position_N)
        o = x.new_zeros(len(x), H * D)
        o_NC = o[:N]
        for number, block in enumerate(self.blocks):
            qkv = block.qkv(self._norm(block.attention_norm, x))
            heads = qkv.view(len(x), H + 2 * G, D)[:N]
            qk, v = heads[:, : H + G], heads[:, H + G :]
            if rotary is not None:
                cos, sin = rotary
                qk = torch.addcmul(qk * cos, qk.roll(D // 2, -1), sin)
            o_NC.copy_(attend(number, qk[:, :H], qk[:, H:], v))
            if wanted is not None and number == len(self.blocks) - 1:
                N = len(wanted)
                rows = [*wanted, *[0] * (_rows(N) - N)]
                x, o = x[rows], o[rows]
            x = block.out.plus(o, x)
            y = self._norm(block.mlp_norm, x)
            if block.gate is None:
                wide = block.up(y, self.activation)
            else:
                wide = block.up.times(y, block.gate(y, self.activation))
            x = block.down.plus(wide, x)
        return self._norm(self.norm, x[:N])

    def step(self, token_B: Tensor, position_B: Tensor, attention: StepAttention) -> Tensor:
        """Logits after one more token of each sequence: (B,) -> (B, V)."""
        B, G, D = len(token_B), self.config.groups, self.config.head_width

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            q = q.view(B, G, -1, D)
            return attention(layer, q, k.unsqueeze(2), v.unsqueeze(2)).reshape(B, -1)

        return self.logits(self(token_B, position_B, attend))

    def logits(self, x_NM: Tensor) -> Tensor:
        """The LM head: (N, M) -> (N, V)."""
        return self.lm_head(x_NM)

    def _rotary(self, position_N: Tensor) -> tuple[Tensor, Tensor] | None:
        """cos and sin, (N, 1, D)."""
        if self.rotary_table is None:
            return None
        table, like = self.rotary_table, self.embed
        cos, sin = table.at(position_N[:, None], int(position_N.max()) + 1, like)
        return cos.squeeze(1).to(like.dtype), sin.squeeze(1).to(like.dtype)

    def _norm(self, norm: PlainNorm, x: Tensor) -> Tensor:
        """The norm of the stream, (N, M)."""
        if isinstance(norm, nn.LayerNorm) or x.dtype != torch.float32:
            return cast(Tensor, norm(x))
        r = vector_norm(x, 2, -1, True)
        r = torch.addcmul(self.epsilon, r, r, value=1.0 / x.shape[-1]).rsqrt_()
        return x.mul(r).mul_(norm.weight)


class CpuStep:
    """A decoding step for ``batch`` sequences, one token each, with a KV cache.

    With ``copy`` it reads copies of the weights, which are faster for one sequence: 7.0 instead of
    9.5 ms for the products of 8 layers of width 512 on a core of an EPYC.
    """

    def __init__(self, model: Transformer, cache: Cache, *, batch: int, copy: bool = False) -> None:
        config, table = model.config, model.lm_head_weight
        self.config, self.cache, self.embed = config, cache, model.embed.weight
        self.pos_embed = None if model.pos_embed is None else model.pos_embed.weight
        self.norm = plain_norm(model.norm)
        self.activation: Callable[[Tensor], Tensor] = ACTIVATIONS[config.mlp]
        self.rotary_table = RotaryTable(config) if config.positions == "rotary" else None
        self.layers = [block_weights(block) for block in model.blocks]
        self.lm_head = LinearWeights(table.t(), None)
        if copy:
            self.layers = [layer.copy() for layer in self.layers]
            self.lm_head = self.lm_head.copy()
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
        attend = StepAttention.masked(cache, scale, token_mask_BS, observe, x.dtype)
        attend = attend._replace(lengths=lengths)
        for number, layer in enumerate(self.layers):
            y = self._norm(layer.attention_norm)
            layer.qkv.into(self.qkv, y)
            if rotary is not None:
                cos, first, second = rotary
                torch.mul(self.qk, cos, out=self.rotated)
                self.rotated_first.addcmul_(self.second, first)
                self.rotated_second.addcmul_(self.first, second)
            attended = attend(number, self.q, self.k, self.v)
            layer.out.add_to(x, attended.reshape(self.attended_shape))
            y = self._norm(layer.mlp_norm)
            layer.up.into(self.wide, y)
            if layer.gate is None:
                wide = self.activation(self.wide)
            else:
                layer.gate.into(self.gated, y)
                wide = self.activation(self.gated).mul_(self.wide)
            layer.down.add_to(x, wide)
        cache.advance(1)
        y = self._norm(self.norm)
        self.lm_head.into(self.logits, y)
        return self.logits

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
            return new(width, B).t() if B in TRANSPOSED else new(B, width)

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
