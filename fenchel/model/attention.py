"""Attention by distance: keys near a query are chosen.

    z_ij = -scale |q_i - k_j|^2 = scale (2 q_i.k_j - |k_j|^2) - scale |q_i|^2

The last term is the same for all keys of a query, and no choice map sees a common shift. So this
is dot-product attention with one more coordinate,

    (q_i, 1) . (k_j, -|k_j|^2 / 2)          at the scale 2 scale,

and every back end serves it. When q and k come from one matrix the map is Lipschitz, which
dot-product attention is not (fenchel/sensitivity/bounds/attention.py).

Kim, Papamakarios and Mnih (2021), The Lipschitz constant of self-attention.

Attention layers: to other positions of the same sequence, and to what an encoder read.

    q, k, v = W_q x, W_k x, W_v x              one product for all three
    q, k    = turned(normed(q)), turned(normed(k))         as the settings say
    out     = W_o attend(q, k, v)

Under scores="l2" one matrix makes queries and keys, z = W_q x, and the values are those of Kim et
al., v = tau W_v W_q^T z with tau = D^(-1/2), for which the layer is Lipschitz; the scores are
-tau |z_i - z_j|^2 unless ``score_scale`` says otherwise.

B sequences, T positions, S positions seen so far, M width of the stream, H heads, G heads of keys
and values, D width of a head.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from fenchel.attention import Causal, Prior, Sink, Window, attend, rotate, with_sink
from fenchel.choice import Choice, by_name
from fenchel.model.config import ModelConfig
from fenchel.model.forward_context import ForwardContext, Memory, among
from fenchel.model.norm import norm
from fenchel.model.sigma_linear import linear_map, matrix_of


def by_distance(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """q and k whose product is -|q - k|^2 / 2 + |q|^2 / 2: (..., T, D) -> (..., T, D + 1)."""
    half_square = 0.5 * k.square().sum(-1, keepdim=True)
    return pad(q, (0, 1), value=1.0), torch.cat((k, -half_square), -1)


CAUSAL = Causal()


class Question(NamedTuple):
    """The arguments of ``attend``: attend(**question._asdict(), return_weights=True) shows all."""

    q: Tensor
    k: Tensor
    v: Tensor
    choice: Choice
    prior: Prior | None
    scale: float | None
    softcap: float | None


def shape_of(config: ModelConfig, layer: int) -> Prior | None:
    """Where a layer may look if all slots are present: back, both ways, or within a window."""
    window = config.window(layer)
    if config.kind == "encoder":
        return None if window is None else Window(window - 1, window - 1)
    return CAUSAL if window is None else Window(window - 1, 0)


class Attention(nn.Module):
    """Every position asks, those it may look at answer."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        H, G, D = config.heads, config.groups, config.head_width
        self.heads, self.groups, self.head_width = H, G, D
        self.layer, self.dropout = layer, _dropout(config)
        self.choice: Choice = by_name(config.choice_of(layer), alpha=config.alpha)
        self.shape, self.local = shape_of(config, layer), config.window(layer) is not None
        self.scale, self.softcap = config.score_scale, config.softcap
        self.layout, self.by_distance = config.rotary_layout, config.scores == "l2"
        rows = 2 * H * D if self.by_distance else (H + 2 * G) * D
        sigma = config.sigma_reparam
        self.qkv = linear_map(config.width, rows, bias=config.has_qkv_bias, sigma=sigma)
        self.q_norm = norm(config, D) if config.qk_norm else None
        self.k_norm = norm(config, D) if config.qk_norm else None
        self.sink = nn.Parameter(torch.zeros(H)) if config.sinks else None
        self.out = linear_map(H * D, config.width, bias=config.bias, sigma=sigma)

    def forward(self, x_BTM: Tensor, sight: ForwardContext, layer: int | None = None) -> Tensor:
        """(B, T, M) -> (B, T, M); ``layer`` where it is not the one this was built for."""
        layer = self.layer if layer is None else layer
        q_BHTD, k_BGTD, v_BGTD = self._made(x_BTM, sight)
        if sight.cache is not None:
            k_BGTD, v_BGTD = sight.cache.append(layer, k_BGTD, v_BGTD)
        told = None if sight.observe is None else sight.observe(layer, q_BHTD, k_BGTD, v_BGTD)
        mixed_BHTD = self._mixed(q_BHTD, k_BGTD, v_BGTD, sight) if told is None else told
        mixed: Tensor = self.out(mixed_BHTD.transpose(1, 2).flatten(2))
        return mixed

    def _mixed(
        self, q_BHTD: Tensor, k_BGSD: Tensor, v_BGSD: Tensor, sight: ForwardContext
    ) -> Tensor:
        """What every query makes of what it sees, (B, H, T, D)."""
        q, k, v, choice, prior, scale, softcap = self.question(q_BHTD, k_BGSD, v_BGSD, sight)
        p = self.dropout if self.training else 0.0
        return attend(q, k, v, choice=choice, prior=prior, scale=scale, softcap=softcap, dropout=p)

    def question(self, q: Tensor, k: Tensor, v: Tensor, sight: ForwardContext) -> Question:
        """What the layer asks of ``attend`` with its q (B, H, T, D) and k, v (B, G, S, D)."""
        prior, scale = sight.prior(self.shape, q, k), self.scale
        if self.by_distance:
            scale = 2 * (self.head_width**-0.5 if scale is None else scale)
            q, k = by_distance(q, k)
        if self.sink is not None:
            prior = Sink(self.sink, prior)
            k, v = with_sink(k, v)
        return Question(q, k, v, self.choice, prior, scale, self.softcap)

    def _made(self, x_BTM: Tensor, sight: ForwardContext) -> tuple[Tensor, Tensor, Tensor]:
        """Queries (B, H, T, D), keys and values (B, G, T, D)."""
        H, G, D = self.heads, self.groups, self.head_width
        turn = sight.turns[int(self.local)]
        if self.by_distance:
            return self._near(x_BTM, sight)
        made = self.qkv(x_BTM)
        if turn is None and self.q_norm is None:
            q, k, v = (_heads(part, D) for part in torch.split(made, [H * D, G * D, G * D], dim=-1))
            return q, k, v
        # Cut before the heads are turned to the front: the gradients then join in the order in
        # which they lie in memory.
        qk, v = torch.split(made, [(H + G) * D, G * D], dim=-1)
        qk, v_BGTD = _heads(qk, D), _heads(v, D)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = torch.split(qk, [H, G], dim=1)
            qk = torch.cat((self.q_norm(q), self.k_norm(k)), dim=1)
        if turn is not None:
            qk = rotate(qk, turn, layout=self.layout)
        q_BHTD, k_BGTD = torch.split(qk, [H, G], dim=1)
        return q_BHTD, k_BGTD, v_BGTD

    def _near(self, x_BTM: Tensor, sight: ForwardContext) -> tuple[Tensor, Tensor, Tensor]:
        """One z for queries and keys, and values that shrink with it."""
        H, D, turn = self.heads, self.head_width, sight.turns[int(self.local)]
        W_q, W_v = matrix_of(self.qkv).view(2, H, D, -1)
        z_BHTD = (x_BTM @ W_q.flatten(0, 1).T).unflatten(-1, (H, D)).transpose(1, 2)
        v_BHTD = z_BHTD @ (D**-0.5 * W_q @ W_v.mT)
        if turn is not None:
            z_BHTD = rotate(z_BHTD, turn, layout=self.layout)
        return z_BHTD, z_BHTD, v_BHTD


class CrossAttention(nn.Module):
    """Every position of the decoder asks, all those of the encoder answer."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        M, H, G, D = config.width, config.heads, config.groups, config.head_width
        self.groups, self.head_width, self.layer = G, D, layer
        self.dropout = _dropout(config)
        self.scale, self.softcap = config.score_scale, config.softcap
        self.choice: Choice = by_name(config.choice_of(layer), alpha=config.alpha)
        bias, sigma = config.has_qkv_bias, config.sigma_reparam
        self.q = linear_map(M, H * D, bias=bias, sigma=sigma)
        self.kv = linear_map(M, 2 * G * D, bias=bias, sigma=sigma)
        self.out = linear_map(H * D, M, bias=config.bias, sigma=sigma)

    def forward(self, x_BTM: Tensor, sight: ForwardContext, layer: int | None = None) -> Tensor:
        """(B, T, M) -> (B, T, M)."""
        memory_BSM, D = sight.memory, self.head_width
        assert memory_BSM is not None  # the Transformer asks for it

        def make() -> tuple[Tensor, Tensor]:
            k, v = self.kv(memory_BSM).chunk(2, dim=-1)
            return _heads(k, D), _heads(v, D)

        layer = self.layer if layer is None else layer
        cache = sight.cache
        k_BGSD, v_BGSD = cache.remember(layer, make) if isinstance(cache, Memory) else make()
        prior = among(None, sight.memory_present, k_BGSD.shape[2])
        q_BHTD = _heads(self.q(x_BTM), D)
        p = self.dropout if self.training else 0.0
        mixed_BHTD = attend(
            q_BHTD,
            k_BGSD,
            v_BGSD,
            choice=self.choice,
            prior=prior,
            scale=self.scale,
            softcap=self.softcap,
            dropout=p,
        )
        mixed: Tensor = self.out(mixed_BHTD.transpose(1, 2).flatten(2))
        return mixed


def _heads(x_BTC: Tensor, D: int) -> Tensor:
    """(B, T, heads D) -> (B, heads, T, D)."""
    B, T, _ = x_BTC.shape
    return x_BTC.view(B, T, -1, D).transpose(1, 2)


def _dropout(config: ModelConfig) -> float:
    return config.dropout if config.attention_dropout is None else config.attention_dropout
