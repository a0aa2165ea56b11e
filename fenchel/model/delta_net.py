"""Gated DeltaNet: a layer whose memory is one matrix per head, in place of attention (Qwen3.5).

    u       = silu(conv(W_in x))                         causal, one filter per channel, K taps
    q, k, v = u in its heads;  q, k = q / |q|, k / |k|   (|q|^2 + 1e-6 under the root)
    b_t     = sigmoid(W_b x_t)                           rate of learning, one per value head
    g_t     = -e^A softplus(W_a x_t + a)                 log of the decay, one per value head
    o_t     = the gated delta rule (fenchel/attention/delta_rule.py)
    out     = W_o (rms(o_t) w * silu(W_z x_t))           rms and its gain w over the E of a head

The layer has no positions and no weights over keys: what it knows of the past is the state S
(D, E) of every head and the last K - 1 inputs of the filter. A cache holds these two, in memory
that does not grow (``RecurrentCache``), and cannot go back to an earlier token. Padding neither
decays nor corrects the state; each document of a packed row begins with a state of 0.

B sequences, T new positions, M width of the stream, G heads of queries and keys of width D, H heads
of values of width E, C = 2 G D + H E channels, K taps.
"""

from typing import NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.nn.functional import conv1d, rms_norm, silu, softplus

from fenchel.attention.delta_rule import delta_rule, delta_rule_by_step
from fenchel.model.config import ModelConfig
from fenchel.model.forward_context import ForwardContext
from fenchel.model.sigma_linear import linear_map

LARGEST_DECAY, LEAST_DECAY = 16.0, 0.01
"""Between which e^A of a fresh layer is drawn, as in transformers."""
_NORM_EPS = 1e-6


class DeltaState(NamedTuple):
    """What a layer knows of the past."""

    taps: Tensor
    """The last inputs of the filter, (B, C, K - 1)."""
    memory: Tensor
    """S of every head, (B, H, D, E), in float32 or better."""


@runtime_checkable
class RecurrentCache(Protocol):
    """A cache that also stores the states of layers without keys."""

    @property
    def new_tokens(self) -> Tensor | None:
        """How many of the T new tokens each row has, (B,); None is all."""

    def state(self, layer: int) -> DeltaState:
        """The state of a layer before the new tokens: 0 in rows that have no token yet."""

    def set_state(self, layer: int, state: DeltaState) -> None:
        """The state of a layer after them."""


class GatedDeltaNet(nn.Module):
    """The gated delta rule with its filter, gates and norm, as one branch of a block."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.layer, self.epsilon = layer, config.epsilon
        self.heads, self.groups = config.delta_value_heads, config.delta_key_heads
        self.key_width, self.value_width = config.delta_key_width, config.delta_value_width
        M, H, keys, values = config.width, self.heads, config.delta_keys, config.delta_values
        sigma = config.sigma_reparam
        self.in_proj = linear_map(M, 2 * keys + values, bias=False, sigma=sigma)
        self.filter = nn.Parameter(torch.empty(2 * keys + values, config.delta_kernel))
        self.gate = linear_map(M, values, bias=False, sigma=sigma)
        self.rate = nn.Linear(M, H, bias=False)
        self.decay = nn.Linear(M, H, bias=False)
        self.decay_log = nn.Parameter(torch.empty(H))
        self.decay_bias = nn.Parameter(torch.ones(H))
        self.gain = nn.Parameter(torch.ones(self.value_width))
        self.out_proj = linear_map(values, M, bias=False, sigma=sigma)

    def forward(self, x_BTM: Tensor, context: ForwardContext, layer: int | None = None) -> Tensor:
        """(B, T, M) -> (B, T, M); ``layer`` where a block serves several layers."""
        layer = self.layer if layer is None else layer
        if context.part is not None:
            raise ValueError(
                "a gated DeltaNet layer reads a sequence from its beginning; context parallelism "
                "cannot split it."
            )
        cache, counts_B, state, T = context.cache, None, None, x_BTM.shape[1]
        if cache is not None:
            if not isinstance(cache, RecurrentCache):
                raise ValueError(f"{type(cache).__name__} has no place for the states of DeltaNet.")
            counts_B, state = cache.new_tokens, cache.state(layer)
        present_BT = None if context.token_mask is None else context.token_mask[:, -T:]
        if counts_B is not None:
            present_BT = torch.arange(T, device=x_BTM.device) < counts_B.unsqueeze(-1)
        if present_BT is not None:
            x_BTM = x_BTM * present_BT.unsqueeze(-1).to(x_BTM.dtype)
        u_BTC, taps = self._filtered(self.in_proj(x_BTM), state, counts_B, context.segments)
        q, k, v = self._heads(u_BTC)
        b_BHT = self.rate(x_BTM).sigmoid().mT
        wide = torch.promote_types(x_BTM.dtype, torch.float32)
        a_BTH = softplus(self.decay(x_BTM).to(wide) + self.decay_bias.to(wide))
        g_BHT = (-self.decay_log.to(wide).exp() * a_BTH).mT
        if present_BT is not None:
            b_BHT = b_BHT * present_BT.unsqueeze(1).to(b_BHT.dtype)
            g_BHT = g_BHT * present_BT.unsqueeze(1).to(wide)
        memory = None if state is None else state.memory
        if state is not None and T == 1:
            o, memory = delta_rule_by_step(q, k, v, g_BHT, b_BHT, state=memory)
        else:
            o, memory = delta_rule(q, k, v, g_BHT, b_BHT, state=memory, segments=context.segments)
        if cache is not None:
            assert isinstance(cache, RecurrentCache)
            cache.set_state(layer, DeltaState(taps, memory))
        return self._project_out(o, x_BTM)

    def _filtered(
        self,
        y_BTC: Tensor,
        state: DeltaState | None,
        counts_B: Tensor | None,
        segments_BT: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """The filter on inputs y and those before them, and the last inputs of every row."""
        B, T, C = y_BTC.shape
        K = self.filter.shape[-1]
        taps = y_BTC.new_zeros(B, C, K - 1) if state is None else state.taps.to(y_BTC.dtype)
        y_BCT = torch.cat((taps, y_BTC.mT), -1)
        if segments_BT is not None:
            u_BCT = self._by_document(y_BCT, segments_BT)
        else:
            u_BCT = conv1d(y_BCT, self.filter.unsqueeze(1), groups=C)
        if counts_B is None:
            last = y_BCT[..., T:]
        else:  # the K - 1 inputs up to the last token of every row
            at = counts_B.unsqueeze(-1) + torch.arange(K - 1, device=y_BCT.device)
            last = y_BCT.gather(-1, at.unsqueeze(1).expand(B, C, K - 1))
        return silu(u_BCT.mT), last

    def _by_document(self, y_BCT: Tensor, segments_BT: Tensor) -> Tensor:
        """The filter, tap by tap, on inputs of the same document."""
        T, K = segments_BT.shape[1], self.filter.shape[-1]
        before = segments_BT.new_full((len(segments_BT), K - 1), -1)
        padded = torch.cat((before, segments_BT), 1)
        total = torch.zeros_like(y_BCT[..., :T])
        for j in range(K):
            same = (padded[:, j : j + T] == segments_BT).unsqueeze(1)
            total = total + self.filter[:, j, None] * torch.where(same, y_BCT[..., j : j + T], 0.0)
        return total

    def _heads(self, u_BTC: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q and k of length 1, (B, G, T, D), and v (B, H, T, E)."""
        G, D, H, E = self.groups, self.key_width, self.heads, self.value_width
        wide = u_BTC.to(torch.promote_types(u_BTC.dtype, torch.float32))
        q, k, v = torch.split(wide, [G * D, G * D, H * E], dim=-1)
        lead = u_BTC.shape[:2]
        q, k = (_unit(x.reshape(*lead, G, D).transpose(1, 2)) for x in (q, k))
        return q, k, v.reshape(*lead, H, E).transpose(1, 2)

    def _project_out(self, o_BHTE: Tensor, x_BTM: Tensor) -> Tensor:
        """W_o of the normalised heads side by side, times the gate: (B, T, M)."""
        o = rms_norm(o_BHTE.transpose(1, 2), (self.value_width,), eps=self.epsilon)
        o = (o.to(x_BTM.dtype) * self.gain).flatten(2)
        out: Tensor = self.out_proj(o * silu(self.gate(x_BTM)))
        return out


def _unit(x: Tensor) -> Tensor:
    """x / sqrt(|x|^2 + eps)."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + _NORM_EPS)
