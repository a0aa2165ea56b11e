"""The forward pass of a plain decoder on a CPU, over tokens of any sequences, without modules.

    y = norm(x);   q, k, v = y W_qkv^T;   x = x + attend(rotary(q), keys, values) W_o^T
    y = norm(x);   x = x + (f(y W_gate^T) * (y W_up^T)) W_down^T

A small model that reads one token spends more time on calls than on arithmetic: each operation
costs some microseconds however few numbers it has. Here a layer takes 31 operations instead of 41,
8 of them views, and no modules in between; for one token 28. Norms, products and activations take
tokens one by one, so the N tokens of a pass belong to any sequences, one after another without
padding; each attends to its own row of the cache.

**Products** are those of torch on the weights as they are, or oneDNN's on packed weights: a copy in
a layout of its own, whose products add the stream, apply the activation or multiply by the gate
while results are in registers. A model in bfloat16 has its keys and values in float32: torch's
attention of one query is five times as fast to those.

**Attention of a step.** A query attends to all keys that the cache returns, or by a mask to those
that it sees. The R = H / G query heads that share keys are R queries of one head, so no key is
repeated. With ``invariant`` every sequence attends by a call of its own to its own keys, so that
its rounding does not depend on the other sequences.

It is the forward pass of fenchel/model for a plain decoder (generation/plain_decoder.py).

B sequences, N tokens, M width of the stream, H heads, G heads of keys, D width per head, F width of
the MLP.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.linalg import vector_norm
from torch.nn.functional import gelu, relu, scaled_dot_product_attention, silu

from fenchel.attention import Dense, attend
from fenchel.attention.prior import Positioned
from fenchel.attention.spec import AttentionCall, AttentionSpec
from fenchel.choice import Choice
from fenchel.generation.kv_cache import KVCache
from fenchel.generation.plain_decoder import (
    LinearWeights,
    PlainNorm,
    block_weights,
    plain_norm,
    why_not_plain,
)
from fenchel.generation.steering import ChoiceTable
from fenchel.model import ModelConfig, Transformer
from fenchel.model.forward_context import Observer
from fenchel.model.mlp import ACTIVATIONS, gelu_tanh
from fenchel.model.rotary_table import RotaryTable
from fenchel.torch_internals import (
    packed_linear,
    packed_linear_weight,
    packed_linear_with,
    packs_linear_weights,
)

TRANSPOSED = range(2, 9)
"""Numbers of tokens for which torch's products are faster with transposed results. 8 layers of
width 512 on one core of an EPYC, transposed and not, in ms: 10.9 and 17.3 for two tokens, 13.0 and
16.0 for four, 18.8 and 19.2 for eight, 31.6 and 22.5 for twelve, 28.2 and 26.1 for 16."""
PACKED_BYTES = 1 << 30
"""Weights above this size are not packed: their copy would take the memory of the cache."""
PACKED_LEAST, PACKED_EXACT, PACKED_MULTIPLE = 5, 64, 8
"""Numbers of rows of a packed product: 5 at least, any up to 64, then multiples of 8.

oneDNN takes 6.7 ms for the products of five rows of a model of 8 layers of width 512 on a core of
an EPYC with AVX-512, and 8.6 for one row. It writes the code of a product at the first use of its
shapes, which takes about a millisecond: so shapes of many rows are few."""
Activation = Callable[[Tensor], Tensor]
ONEDNN_ACTIVATIONS = {
    silu: ("swish", ""),
    gelu: ("gelu", "none"),
    gelu_tanh: ("gelu", "tanh"),
    relu: ("relu", ""),
}


def why_not_cpu(model: Transformer) -> str | None:
    """The first reason why ``CpuForward`` cannot serve a model with its own weights, or None."""
    table = model.lm_head_weight
    if table.device.type != "cpu" or table.dtype not in (torch.float32, torch.float64):
        return f"it is in {table.dtype} on {table.device.type}"
    return why_not_plain(model)


def why_not_packed(model: Transformer) -> str | None:
    """The first reason why ``CpuForward`` cannot serve a model with packed weights, or None."""
    table = model.lm_head_weight
    if table.device.type != "cpu":
        return f"it is on {table.device.type}"
    if not packs_linear_weights(table.dtype):
        return f"torch packs no weights of {table.dtype} here"
    size = sum(p.numel() * p.element_size() for p in model.parameters())
    if size > PACKED_BYTES:
        return f"a copy of its weights would take {size:,} bytes, above {PACKED_BYTES:,}"
    return why_not_plain(model)


class PlainLinear(NamedTuple):
    """y = x W^T + b by the weights as they are."""

    transposed: Tensor
    bias: Tensor | None

    def __call__(
        self, x: Tensor, activation: Activation | None = None, y: Tensor | None = None
    ) -> Tensor:
        """f(x W^T + b); what f takes is in the memory of y where that is given."""
        # The layout of a result decides how BLAS computes the product: for a few tokens it is up to
        # twice as fast if their entries are adjacent.
        if y is None and (N := x.shape[0]) in TRANSPOSED:
            y = x.new_empty(self.transposed.shape[1], N).t()
        if self.bias is None:
            y = torch.mm(x, self.transposed, out=y)
        else:
            y = torch.addmm(self.bias, x, self.transposed, out=y)
        return y if activation is None else activation(y)

    def plus(self, x: Tensor, y: Tensor) -> Tensor:
        """x W^T + b + y, in the memory of y."""
        y.addmm_(x, self.transposed)
        return y if self.bias is None else y.add_(self.bias)

    def times(self, x: Tensor, y: Tensor) -> Tensor:
        """(x W^T + b) y, entry by entry."""
        return self(x).mul_(y)


class PackedLinear(NamedTuple):
    """y = x W^T + b by a packed W."""

    packed: Tensor
    bias: Tensor | None

    @classmethod
    def of(cls, weights: LinearWeights) -> "PackedLinear":
        """A packed copy."""
        rows = 32  # a layout for fewer rows is slower for many
        bias = None if weights.bias is None else weights.bias.detach()
        return cls(packed_linear_weight(weights.weight.detach(), rows), bias)

    def __call__(self, x: Tensor, activation: Activation | None = None) -> Tensor:
        """f(x W^T + b)."""
        named = ("none", "") if activation is None else ONEDNN_ACTIVATIONS[activation]
        return packed_linear(x, *self, named)

    def plus(self, x: Tensor, y: Tensor) -> Tensor:
        """x W^T + b + y."""
        return packed_linear_with(x, *self, y, "add")

    def times(self, x: Tensor, y: Tensor) -> Tensor:
        """(x W^T + b) y, entry by entry."""
        return packed_linear_with(x, *self, y, "mul")


Linear = PlainLinear | PackedLinear


class PlainRMSNorm(NamedTuple):
    """x / sqrt(mean x^2 + epsilon) g."""

    epsilon: Tensor
    """(1, 1)."""
    weight: Tensor

    @classmethod
    def of(cls, norm: PlainNorm) -> "PlainRMSNorm | PlainNorm":
        """The same norm in fewer operations, or the module itself."""
        if isinstance(norm, nn.LayerNorm) or norm.weight.dtype not in (
            torch.float32,
            torch.float64,
        ):
            return norm
        weight = norm.weight.detach()
        return cls(weight.new_full((1, 1), norm.eps), weight)

    def __call__(self, x: Tensor) -> Tensor:
        """(N, M) -> (N, M)."""
        N, M = x.shape
        if N == 1:  # the same in one operation less
            mean = torch.addmm(self.epsilon, x, x.t(), alpha=1.0 / M)
        else:
            r = vector_norm(x, 2, -1, True)
            mean = torch.addcmul(self.epsilon, r, r, value=1.0 / M)
        return x.mul(mean.rsqrt_()).mul_(self.weight)


Norm = PlainRMSNorm | PlainNorm
Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""The attention of a layer, by its number and the q (N, H, 1, D), k and v (N, G, 1, D) of all
tokens: (N, H D)."""


class CpuBlock(NamedTuple):
    """The weights of a block, in the order of their use."""

    attention_norm: Norm
    qkv: Linear
    out: Linear
    mlp_norm: Norm
    gate: Linear | None
    up: Linear
    down: Linear


class OneTokenHeads:
    """Rotated queries and keys, and values, of one token, in memory whose views are made once.

    The rotation of (a, b) is (a, b) (c, c) + (b, a) (-s, s): each half adds the other.
    """

    def __init__(self, config: ModelConfig, like: Tensor) -> None:
        H, G, D = config.heads, config.groups, config.head_width
        self.qkv = like.new_empty(1, (H + 2 * G) * D)
        self.qk, self.v = self.qkv.view(1, H + 2 * G, 1, D).split_with_sizes((H + G, G), 1)
        self.first, self.second = self.qk.chunk(2, -1)
        self.rotated = torch.empty_like(self.qk)
        self.rotated_first, self.rotated_second = self.rotated.chunk(2, -1)
        self.q, self.k = self.rotated.split_with_sizes((H, G), 1)

    def __call__(
        self, cos: Tensor, minus_s: Tensor, s: Tensor, linear: Linear, y: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v of the stream after the norm; the next call overwrites them."""
        assert isinstance(linear, PlainLinear)
        linear(y, None, self.qkv)
        torch.mul(self.qk, cos, out=self.rotated)
        self.rotated_first.addcmul_(self.second, minus_s)
        self.rotated_second.addcmul_(self.first, s)
        return self.q, self.k, self.v


class CpuForward:
    """The forward pass of a plain decoder over N tokens of any sequences."""

    def __init__(
        self, model: Transformer, *, packed: bool = False, invariant: bool = False
    ) -> None:
        self.config, self.embed = model.config, model.embed.weight
        self.packed, self.invariant = packed, invariant
        self.pos_embed = None if model.pos_embed is None else model.pos_embed.weight
        self.norm = PlainRMSNorm.of(plain_norm(model.norm))
        self.activation: Activation = ACTIVATIONS[self.config.mlp]
        rotary = self.config.positions == "rotary"
        self.rotary_table = RotaryTable(self.config) if rotary else None

        def linear(weights: LinearWeights) -> Linear:
            return PackedLinear.of(weights) if packed else PlainLinear(*weights)

        self.blocks = [
            CpuBlock(
                PlainRMSNorm.of(layer.attention_norm),
                linear(layer.qkv),
                linear(layer.out),
                PlainRMSNorm.of(layer.mlp_norm),
                None if layer.gate is None else linear(layer.gate),
                linear(layer.up),
                linear(layer.down),
            )
            for layer in map(block_weights, model.blocks)
        ]
        self.lm_head = linear(LinearWeights(model.lm_head_weight.t(), None))
        self.one_token_heads = OneTokenHeads(self.config, self.embed) if rotary else None
        specs = (layer.spec for layer in model.attention_layers())
        self.attention: list[dict[str, Any]] = [dict(spec) for spec in specs]
        """How the layers attend: the settings of ``attend``."""

    def read(
        self,
        cache: Sequence[KVCache],
        parts: Sequence[Sequence[int]],
        *,
        every: bool = False,
        observe: Observer | None = None,
        steer: Mapping[int, Tensor] | None = None,
        choices: ChoiceTable | None = None,
    ) -> Tensor:
        """What the LM head takes at the last token of every part, or at ``every`` token.

        Each part continues the row of its ``cache``; they are one after another, without padding.
        ``steer`` is added to the streams after layers, (N, M) each. -> (P or N, M)
        """
        stops = [*accumulate(map(len, parts))]
        spans = [*zip([0, *stops], stops, strict=False)]
        positions = [
            torch.arange(c.length, c.length + len(p)) for c, p in zip(cache, parts, strict=True)
        ]

        def attend_parts(layer: int, q_NH1D: Tensor, k_NG1D: Tensor, v_NG1D: Tensor) -> Tensor:
            outputs = []
            for at, (row, (first, last)) in enumerate(zip(cache, spans, strict=True)):
                q, k, v = (x[first:last].transpose(0, 2) for x in (q_NH1D, k_NG1D, v_NG1D))
                k, v = row.append(layer, k, v)
                q = q.to(k.dtype)
                if observe is not None:
                    observe(layer, q, k, v)
                spec = self.attention[layer]
                placed = row.key_positions(layer) if last - first == 1 else None
                if placed is not None:
                    spec = {**spec, "prior": Positioned(spec["prior"], placed)}
                table = None if choices is None else choices.row(at)
                if table is None:
                    o = attend(q, k, v, **spec)
                else:
                    position_BS = row.positions_of(layer, k.shape[2], last - first)
                    prior = spec["prior"] + Dense(table.bias(layer, position_BS))
                    changed = AttentionSpec(**{**spec, "prior": prior})
                    o = table.attend(layer, AttentionCall(table.scaled(layer, q), k, v, changed))
                outputs.append(o[0].transpose(0, 1))
            return torch.cat(outputs).flatten(1)

        tokens = torch.tensor([token for part in parts for token in part])
        wanted = None if every else [stop - 1 for stop in stops]
        end = max(c.length + len(p) for c, p in zip(cache, parts, strict=True))
        x = self._forward(tokens, torch.cat(positions), end, attend_parts, wanted, steer)
        for row, part in zip(cache, parts, strict=True):
            row.advance(len(part))
        return x

    def step(
        self,
        cache: KVCache,
        token_B: Tensor,
        observe: Observer | None = None,
        steer: Mapping[int, Tensor] | None = None,
        choices: ChoiceTable | None = None,
    ) -> Tensor:
        """Logits after one more token of every row: (B,) -> (B, V)."""
        B, H, G, D = (
            token_B.shape[0],
            self.config.heads,
            self.config.groups,
            self.config.head_width,
        )
        grouped = None if G == H else (B, G, H // G, D)
        scale = self.config.score_scale
        masks: dict[Tensor, Tensor] = {}

        def attend_rows(layer: int, q_BH1D: Tensor, k_BG1D: Tensor, v_BG1D: Tensor) -> Tensor:
            keys, values = cache.append(layer, k_BG1D, v_BG1D)
            added = None
            if choices is not None:
                q_BH1D = choices.scaled(layer, q_BH1D)
                position_BS = cache.positions_of(layer, keys.shape[2], 1)
                added = choices.bias(layer, position_BS).view(B, G, H // G, -1).to(keys.dtype)
            q = q_BH1D if grouped is None else q_BH1D.reshape(grouped)
            if q.dtype != keys.dtype:
                q = q.to(keys.dtype)
            if observe is not None:
                observe(layer, q.flatten(1, 2).unsqueeze(2), keys, values)
            maps = [] if choices is None else choices.maps(layer)
            if self.invariant or maps:
                o = self._one_by_one(cache, layer, q, keys, values, added, maps)
                return o.reshape(B, -1)
            mask, visible_BS = None, cache.visible(layer)
            if visible_BS is not None:
                if visible_BS not in masks:
                    zeros = torch.zeros(visible_BS.shape, dtype=keys.dtype)
                    masks[visible_BS] = zeros.masked_fill_(~visible_BS, -torch.inf)[:, None, None]
                mask = masks[visible_BS].expand(B, 1, 1, -1)
            if added is not None:
                mask = added if mask is None else mask + added
            o = scaled_dot_product_attention(q, keys, values, mask, scale=scale)
            return o.reshape(B, -1)

        positions_B1, n = cache.new_positions(1), cache.length
        position = n if positions_B1 is None else positions_B1[:, 0]
        x = self._forward(token_B, position, n + 1, attend_rows, steer=steer)
        cache.advance(1)
        return self.lm_head(x)

    def logits(self, x_NM: Tensor) -> Tensor:
        """The LM head: (N, M) -> (N, V)."""
        return self.lm_head(x_NM)

    def _one_by_one(
        self,
        cache: KVCache,
        layer: int,
        q: Tensor,
        keys: Tensor,
        values: Tensor,
        added: Tensor | None,
        maps: Sequence[tuple[int, int, Choice]],
    ) -> Tensor:
        """The attention of every row to its own keys, by a call of its own.

        ``added`` is added to the scores of rows in which it is not zero: (B, G, H / G, S).
        ``maps`` are rows and heads with maps of their own.
        """
        o, scale = torch.empty_like(q), self.config.score_scale
        R, lookback = cache.layers[layer].slots, cache.layers[layer].lookback
        seen_only = cache.key_positions(layer) is None  # the keys of a window are its own then
        for b, n in enumerate(cache.starts):
            row, S, mask = slice(b, b + 1), min(n + 1, R, keys.shape[2]), None
            if lookback is not None and n > lookback and lookback + 1 < R and not seen_only:
                token_S = n - (n - torch.arange(S)) % R
                mask = torch.zeros(1, S, dtype=q.dtype)
                mask = mask.masked_fill_(token_S < n - lookback, -torch.inf)
            if added is not None and bool(added[row].any()):
                own = added[row, :, :, :S]
                mask = own if mask is None else mask + own
            k, v = keys[row, :, :S], values[row, :, :S]
            o[row] = scaled_dot_product_attention(q[row], k, v, mask, scale=scale)
            for _, head, choice in (one for one in maps if one[0] == b):
                g, t = (slice(n, n + 1) for n in divmod(head, q.shape[2]))
                log_u = None if mask is None else mask.expand(1, *q.shape[1:3], S)[:, g, t]
                call = q[row, g, t], k[:, g], v[:, g]
                o[row, g, t] = attend(*call, choice=choice, prior=log_u, scale=scale)
        return o

    def _forward(
        self,
        token_N: Tensor,
        position: Tensor | int,
        end: int,
        attend: Attend,
        wanted: Sequence[int] | None = None,
        steer: Mapping[int, Tensor] | None = None,
    ) -> Tensor:
        """What the LM head takes at the ``wanted`` tokens, all by default: (N,) -> (N, M).

        ``position`` (N,), or one of all tokens, is below ``end``. Of the other tokens the last
        block computes keys and values alone.
        """
        c, N = self.config, token_N.shape[0]
        P = self._rows(N)  # rows beyond N are computed and not used
        if P == N:
            x = self.embed.index_select(0, token_N)
        else:
            x = self.embed.new_zeros(P, c.width)
            torch.index_select(self.embed, 0, token_N, out=x[:N])
        if self.pos_embed is not None:
            x[:N] += self.pos_embed[position]
        rotary = None
        if self.rotary_table is not None:
            if isinstance(position, int):
                cos, sin = self.rotary_table.between(position, end, x)
            else:
                cos, sin = self.rotary_table.at(position.unsqueeze(1), end, x)
            rotary = (cos, sin) if cos.dtype == x.dtype else (cos.to(x.dtype), sin.to(x.dtype))
        heads: Callable[[Linear, Tensor], Sequence[Tensor]] = partial(self._heads, rotary, N)
        if P == 1 and rotary is not None and self.one_token_heads is not None:
            cos, (minus_s, s) = rotary[0], rotary[1].chunk(2, -1)
            heads = partial(self.one_token_heads, cos, minus_s, s)
        for number, block in enumerate(self.blocks):
            q, k, v = heads(block.qkv, block.attention_norm(x))
            o = attend(number, q, k, v)
            if o.dtype != x.dtype or P != N:
                attended, o = o, x.new_zeros(P, o.shape[1])
                o[:N] = attended
            if wanted is not None and number == len(self.blocks) - 1:
                N = len(wanted)
                P = self._rows(N)
                rows = [*wanted, *[0] * (P - N)]
                x, o = x[rows], o[rows]
            x = block.out.plus(o, x)
            y = block.mlp_norm(x)
            if block.gate is None:
                wide = block.up(y, self.activation)
            else:
                wide = block.up.times(y, block.gate(y, self.activation))
            x = block.down.plus(wide, x)
            if steer is not None and number in steer:
                v_NM = steer[number]
                last = wanted is not None and number == len(self.blocks) - 1
                x[:N] += v_NM[wanted] if last else v_NM
        return self.norm(x if P == N else x[:N])

    def _heads(
        self, rotary: tuple[Tensor, Tensor] | None, N: int, linear: Linear, y: Tensor
    ) -> Sequence[Tensor]:
        """Rotated q (N, H, 1, D) and k (N, G, 1, D), and v, of the stream after the norm."""
        H, G, D = self.config.heads, self.config.groups, self.config.head_width
        qkv = linear(y)
        if rotary is None:
            qkv = qkv.contiguous()  # rotated queries are; the fused attention needs it
        heads = qkv.view(-1, H + 2 * G, 1, D)
        heads = heads if heads.shape[0] == N else heads[:N]
        if rotary is None:
            return heads.split_with_sizes((H, G, G), 1)
        cos, sin = rotary
        qk, v = heads.split_with_sizes((H + G, G), 1)
        qk = torch.addcmul(qk * cos, qk.roll(D // 2, -1), sin)
        return *qk.split_with_sizes((H, G), 1), v

    def _rows(self, N: int) -> int:
        """The rows of a product of N tokens."""
        if not self.packed:
            return N
        if N > PACKED_EXACT:
            return -(-N // PACKED_MULTIPLE) * PACKED_MULTIPLE
        return max(N, PACKED_LEAST)
