"""Attention layers: self-attention, by dot products or by distance, and cross-attention.

    q, k, v = W_q x, W_k x, W_v x                 one product for all three
    q, k    = rotary(norm(q)), rotary(norm(k))    by the settings; q times a factor of its position
    v       = norm(v)                             where values are normalised; v may be W_k x
    out     = W_o (g * attend(q, k, v))           with an output gate g = sigmoid(W_g x), else g = 1

A layer may have no keys and values and attend to those of an earlier one (``kv_source``); it then
makes queries only, and cached are the keys and values of the earlier layer alone.

Under ``entmax_alpha_learned`` every head h has its own exponent of entmax, with a_h a parameter and
l, u the ends of its range (``LEARNED_ALPHA``),

    alpha_h = l + (u - l) sigmoid(a_h),    d alpha_h / d a_h = (alpha_h - l) (u - alpha_h) / (u - l)

and the derivative of the weights in alpha is that of fenchel/choice/entmax.py.

A gate per head is a sink whose score follows the others, r = log Z - logit g
(docs/maths/attention.md).

With scores="l2" a query prefers the keys near it. One matrix makes queries and keys, z = W_q x, and
the values are those of Kim et al., v = tau W_v W_q^T z with tau = D^(-1/2). The map is then
Lipschitz, which dot-product attention is not (fenchel/sensitivity/bounds/attention.py). The scores
are, with scale = tau unless ``score_scale`` is set,

    -scale |z_i - z_j|^2 = scale (2 z_i.z_j - |z_j|^2) - scale |z_i|^2.

The last term is the same for all keys of a query, and no choice map over the simplex depends on a
common shift. So this is dot-product attention with one more coordinate, at the scale 2 scale,

    (z_i, 1) . (z_j, -|z_j|^2 / 2),

and every back end serves it.

B sequences, T new positions, S positions with those in the cache, M width of the stream, H heads,
G heads of keys and values, D width per head.

Correia, Niculae and Martins (2019), Adaptively sparse transformers.
Kim, Papamakarios and Mnih (2021), The Lipschitz constant of self-attention.
"""

import math
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn.functional import pad, softplus

from fenchel.attention import Angles, Causal, Prior, Window, attend, rotate
from fenchel.attention.bias import add_sink
from fenchel.attention.spec import AttentionCall, AttentionSpec
from fenchel.choice import Choice, Entmax, by_name
from fenchel.model.config import LEARNED_ALPHA, ModelConfig
from fenchel.model.forward_context import CrossAttentionCache, ForwardContext, with_token_mask
from fenchel.model.norm import RMSNorm, norm
from fenchel.model.sigma_linear import linear_map, matrix_of

CAUSAL = Causal()
GATE_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "sigmoid": torch.sigmoid,
    "softplus": softplus,
}


def l2_as_dot_product(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """q and k whose product is -|q - k|^2 / 2 + |q|^2 / 2: (..., T, D) -> (..., T, D + 1).

    >>> q, k = l2_as_dot_product(torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0, 5.0]]))
    >>> (q @ k.T).item()  # -(4 + 9) / 2 + (1 + 4) / 2
    -4.0
    """
    half_square = 0.5 * k.square().sum(-1, keepdim=True)
    return pad(q, (0, 1), value=1.0), torch.cat((k, -half_square), -1)


def layer_mask(config: ModelConfig, layer: int) -> Prior | None:
    """Which keys the queries of a layer may choose: causal, all, or those within a window."""
    window = config.window(layer)
    if config.kind == "encoder":
        return None if window is None else Window(window - 1, window - 1)
    return CAUSAL if window is None else Window(window - 1, 0)


def layer_choice(config: ModelConfig, layer: int) -> Choice:
    """The choice map of a layer; with learned exponents that of a fresh one."""
    settings = {"alpha": config.entmax_alpha, "beta": config.beta, "log_odds": config.log_odds}
    return by_name(config.choice_of(layer), **settings)


class AttentionHeads(nn.Module):
    """Heads that choose among keys by one map, or by entmax with an exponent each."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.fixed_choice = layer_choice(config, layer)
        """The map with numbers, of which learned exponents replace alpha."""
        self.alpha_logit: nn.Parameter | None = None
        if config.learns_alpha(layer):
            low, high = LEARNED_ALPHA
            odds = (config.entmax_alpha - low) / (high - config.entmax_alpha)
            self.alpha_logit = nn.Parameter(torch.full((config.heads,), math.log(odds)))
            """a of the module docstring."""

    @property
    def choice(self) -> Choice:
        """The map of all heads, for scores (B, H, T, S)."""
        if self.alpha_logit is None:
            return self.fixed_choice
        assert isinstance(self.fixed_choice, Entmax)
        wide = torch.promote_types(self.alpha_logit.dtype, torch.float32)
        low, high = LEARNED_ALPHA
        alpha = low + (high - low) * torch.sigmoid(self.alpha_logit.to(wide))
        return replace(self.fixed_choice, alpha=alpha.view(-1, 1, 1))


class Attention(AttentionHeads):
    """Multi-head self-attention with grouped keys and values (MHA, GQA, MQA)."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__(config, layer)
        source = config.kv_source(layer)
        assert source is not None  # ModelConfig requires it
        self.kv_source, self.borrows = source, source != layer
        self.lends = any(config.kv_source(n) == layer for n in range(layer + 1, config.layers))
        config = config.at_layer(layer)
        H, G, D = config.heads, config.groups, config.head_width
        self.heads, self.groups, self.head_width = H, G, D
        self.layer, self.dropout = layer, _dropout(config)
        self.mask, self.local = layer_mask(config, layer), config.window(layer) is not None
        self.scale, self.softcap = config.score_scale, config.softcap
        self.rotary_layout, self.l2 = config.rotary_layout, config.scores == "l2"
        self.rotates, self.joint_norm = config.rotates(layer), config.qk_norm_width == "all"
        self.tempered, self.window = config.tempered(layer), config.window(layer)
        self.length_scale = None
        if self.tempered and config.temperature == "log":
            once = math.log(max(2, self.window or config.context))
            self.length_scale = nn.Parameter(torch.full((H,), 1.0 / once))
            """s of Scalable-Softmax, at first such that the longest query has the factor 1."""
        own, full = source == layer, config.window(layer) is None
        values = 0 if config.keys_as_values and full else G * D
        self.rows = [H * D, G * D, values] if own else [H * D, 0, 0]
        """Rows of ``qkv`` for queries, keys and values."""
        rows = 2 * H * D if self.l2 else sum(self.rows)
        sigma = config.sigma_reparam
        self.qkv = linear_map(config.width, rows, bias=config.has_qkv_bias, sigma=sigma)
        joint = self.joint_norm
        self.q_norm = norm(config, H * D if joint else D) if config.qk_norm else None
        self.k_norm = norm(config, G * D if joint else D) if config.qk_norm and own else None
        self.v_norm = RMSNorm(D, config.epsilon, False) if config.value_norm and own else None
        kind = config.sink_score if config.sinks else None
        self.off_by_one = kind == "zero"
        self.sink = nn.Parameter(torch.zeros(H)) if kind == "head" else None
        self.sink_map = nn.Linear(config.width, H) if kind == "token" else None
        self.output_gate: nn.Linear | None = None
        if config.gate_width:
            bias = config.has_qkv_bias
            self.output_gate = linear_map(config.width, config.gate_width, bias=bias, sigma=sigma)
        self.gate_activation = GATE_ACTIVATIONS[config.gate_activation]
        self.out = linear_map(H * D, config.width, bias=config.bias, sigma=sigma)

    def angles(self, context: ForwardContext) -> Angles | None:
        """Rotary angles of the queries and keys of this layer; None where it does not rotate."""
        return context.rotary[int(self.local)] if self.rotates else None

    def temperature(self, context: ForwardContext) -> Tensor | None:
        """The factor on queries by position, which broadcasts to (B, H, T, 1); None is 1."""
        beta = context.query_scale
        if beta is None or not self.tempered:
            return None
        if self.length_scale is None:
            return beta
        if self.window is not None:  # no query of this layer sees more keys
            beta = beta.clamp(max=math.log(max(2, self.window)))
        return self.length_scale.view(-1, 1, 1) * beta

    def sink_scores(self, x_BTM: Tensor) -> Tensor | None:
        """The scores of the sink, (H,) or (B, H, T); None where the layer has none."""
        if self.sink_map is None:
            return x_BTM.new_zeros(self.heads) if self.off_by_one else self.sink
        scores: Tensor = self.sink_map(x_BTM).transpose(1, 2)
        return scores

    @property
    def spec(self) -> AttentionSpec:
        """How the layer attends to sequences without padding, position bias or sink."""
        return AttentionSpec(self.choice, self.mask, self.scale, self.softcap)

    def forward(self, x_BTM: Tensor, context: ForwardContext, layer: int | None = None) -> Tensor:
        """(B, T, M) -> (B, T, M); ``layer`` where a block serves several layers (ALBERT)."""
        layer = self.layer if layer is None else layer
        q_BHTD, k_BGTD, v_BGTD = self._project(x_BTM, self.angles(context))
        if (beta := self.temperature(context)) is not None:
            q_BHTD = q_BHTD * beta
        key_positions = None
        if self.borrows:
            k_BGTD, v_BGTD = context.lent_kv[self.kv_source]
        elif context.cache is not None:
            k_BGTD, v_BGTD = context.cache.append(layer, k_BGTD, v_BGTD)
        elif context.part is not None:
            k_BGTD, v_BGTD = context.part.gather(k_BGTD, v_BGTD)
        if self.lends:
            context.lent_kv[layer] = k_BGTD, v_BGTD
        if context.cache is not None and q_BHTD.shape[2] == 1:
            key_positions = context.cache.key_positions(layer)
        if context.part is not None:
            return self._attend_part(q_BHTD, k_BGTD, v_BGTD, x_BTM, context, layer)
        if context.observe is not None:
            context.observe(layer, q_BHTD, k_BGTD, v_BGTD)
        sink = self.sink_scores(x_BTM)
        qkv, override, o_BHTD = (q_BHTD, k_BGTD, v_BGTD), context.attention_override, None
        if override is not None:
            o_BHTD = override(layer, self.attention_call(*qkv, context, key_positions, sink))
        if o_BHTD is None:
            call = self.attention_call(*qkv, context, key_positions)
            o_BHTD = _attend(call, self.dropout if self.training else 0.0, sink)
        return self._project_out(o_BHTD, x_BTM)

    def gate_values(self, x_BTM: Tensor) -> Tensor | None:
        """The factors on the outputs of the heads: (B, T, M) -> (B, T, H, 1 or D), or None."""
        if self.output_gate is None:
            return None
        u_BTC: Tensor = self.output_gate(x_BTM)
        return self.gate_activation(u_BTC).view(*u_BTC.shape[:2], self.heads, -1)

    def _project_out(self, o_BHTD: Tensor, x_BTM: Tensor) -> Tensor:
        """W_o of the heads side by side, times the gate: (B, T, M)."""
        o_BTHD, gate = o_BHTD.transpose(1, 2), self.gate_values(x_BTM)
        out: Tensor = self.out((o_BTHD if gate is None else gate * o_BTHD).flatten(2))
        return out

    def _attend_part(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        x_BTM: Tensor,
        context: ForwardContext,
        layer: int,
    ) -> Tensor:
        """The output for some positions of the sequences, from k and v of all of them."""
        assert context.part is not None
        p, outputs, sink = self.dropout if self.training else 0.0, [], self.sink_scores(x_BTM)
        for rows, end in context.part.chunks(k.shape[2]):
            chunk = q[:, :, rows], k[:, :, :end], v[:, :, :end]
            if context.observe is not None:
                context.observe(layer, *chunk)
            own = sink if sink is None or sink.dim() == 1 else sink[:, :, rows]
            outputs.append(_attend(self.attention_call(*chunk, context), p, own))
        return self._project_out(torch.cat(outputs, dim=2), x_BTM)

    def attention_call(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        context: ForwardContext,
        key_positions: Tensor | None = None,
        sink: Tensor | None = None,
    ) -> AttentionCall:
        """The call of ``attend`` for q (B, H, T, D) and k, v (B, G, S, D).

        ``sink`` are the scores of ``sink_scores``.
        """
        prior, scale = context.prior(self.mask, q, k, key_positions), self.scale
        if self.l2:
            scale = 2 * AttentionSpec(scale=scale).scale_for(self.head_width)
            q, k = l2_as_dot_product(q, k)
        if sink is not None:
            k, v, prior = add_sink(k, v, sink, prior)
        return AttentionCall(q, k, v, AttentionSpec(self.choice, prior, scale, self.softcap))

    def _project(self, x_BTM: Tensor, rotary: Angles | None) -> tuple[Tensor, Tensor, Tensor]:
        """Queries (B, H, T, D), keys and values (B, G, T, D)."""
        H, D = self.heads, self.head_width
        if self.l2:
            return self._project_l2(x_BTM, rotary)
        qkv = self.qkv(x_BTM)
        if rotary is None and self.q_norm is None and self.rows[2]:
            q, k, v = (_heads(part, D) for part in torch.split(qkv, self.rows, dim=-1))
            return q, k, self._normalise_values(v)
        # Cut before the axis of the heads moves to the front: the gradients are then joined in the
        # order in which they lie in memory.
        HD, GD, own_values = self.rows
        qk, v = torch.split(qkv, [HD + GD, own_values], dim=-1)
        v_BGTD = _heads(v if own_values else qk[..., HD:], D)
        if self.joint_norm:
            qk = self._normalise(qk, [HD, GD], -1)
        qk = _heads(qk, D)
        if not self.joint_norm:
            qk = self._normalise(qk, [H, GD // D], 1)
        if rotary is not None:
            qk = rotate(qk, rotary, layout=self.rotary_layout)
        q_BHTD, k_BGTD = torch.split(qk, [H, GD // D], dim=1)
        return q_BHTD, k_BGTD, self._normalise_values(v_BGTD)

    def _normalise(self, qk: Tensor, sizes: list[int], dim: int) -> Tensor:
        """Queries and keys, side by side along ``dim``, each by its norm."""
        if self.q_norm is None:
            return qk
        q, k = torch.split(qk, sizes, dim=dim)
        return torch.cat((self.q_norm(q), k if self.k_norm is None else self.k_norm(k)), dim=dim)

    def _normalise_values(self, v_BGTD: Tensor) -> Tensor:
        return v_BGTD if self.v_norm is None else self.v_norm(v_BGTD)

    def _project_l2(self, x_BTM: Tensor, rotary: Angles | None) -> tuple[Tensor, Tensor, Tensor]:
        """One z for queries and keys, and v = tau W_v W_q^T z."""
        H, D = self.heads, self.head_width
        W_q, W_v = matrix_of(self.qkv).view(2, H, D, -1)
        z_BHTD = (x_BTM @ W_q.flatten(0, 1).T).unflatten(-1, (H, D)).transpose(1, 2)
        v_BHTD = z_BHTD @ (D**-0.5 * W_q @ W_v.mT)
        if rotary is not None:
            z_BHTD = rotate(z_BHTD, rotary, layout=self.rotary_layout)
        return z_BHTD, z_BHTD, v_BHTD


class CrossAttention(AttentionHeads):
    """Multi-head attention of the decoder's positions to the encoder's output."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__(config, layer)
        M, H, G, D = config.width, config.heads, config.groups, config.head_width
        self.groups, self.head_width, self.layer = G, D, layer
        self.dropout = _dropout(config)
        self.scale, self.softcap = config.score_scale, config.softcap
        bias, sigma = config.has_qkv_bias, config.sigma_reparam
        self.q = linear_map(M, H * D, bias=bias, sigma=sigma)
        self.kv = linear_map(M, 2 * G * D, bias=bias, sigma=sigma)
        self.out = linear_map(H * D, M, bias=config.bias, sigma=sigma)

    def forward(self, x_BTM: Tensor, context: ForwardContext, layer: int | None = None) -> Tensor:
        """(B, T, M) -> (B, T, M)."""
        memory_BSM, D = context.memory, self.head_width
        assert memory_BSM is not None  # Transformer.forward requires it

        def project() -> tuple[Tensor, Tensor]:
            k, v = self.kv(memory_BSM).chunk(2, dim=-1)
            return _heads(k, D), _heads(v, D)

        layer = self.layer if layer is None else layer
        cache = context.cache
        if isinstance(cache, CrossAttentionCache):
            k_BGSD, v_BGSD = cache.cross_kv(layer, project)
        else:
            k_BGSD, v_BGSD = project()
        prior = with_token_mask(None, context.memory_mask, k_BGSD.shape[2])
        q_BHTD = _heads(self.q(x_BTM), D)
        spec = AttentionSpec(self.choice, prior, self.scale, self.softcap)
        call = AttentionCall(q_BHTD, k_BGSD, v_BGSD, spec)
        o_BHTD = _attend(call, self.dropout if self.training else 0.0)
        out: Tensor = self.out(o_BHTD.transpose(1, 2).flatten(2))
        return out


def _attend(call: AttentionCall, dropout: float, sink: Tensor | None = None) -> Tensor:
    q, k, v, spec = call
    # One by one: torch.compile of 2.11 unpacks no mapping but a dict.
    return attend(
        q,
        k,
        v,
        choice=spec.choice,
        prior=spec.prior,
        scale=spec.scale,
        softcap=spec.softcap,
        sink=sink,
        dropout=dropout,
    )


def _heads(x_BTC: Tensor, D: int) -> Tensor:
    """(B, T, heads D) -> (B, heads, T, D)."""
    B, T, C = x_BTC.shape
    return x_BTC.view(B, T, C // D, D).transpose(1, 2)


def _dropout(config: ModelConfig) -> float:
    return config.dropout if config.attention_dropout is None else config.attention_dropout
