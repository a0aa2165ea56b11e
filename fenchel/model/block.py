"""A block: attention, cross-attention and an MLP, each a residual branch; and a stack of them.

    pre        x = x + a f(norm(x))                for f = attention, then (cross), then mlp
    post       x = norm(x + a f(x))
    both       x = x + a post_norm(f(norm(x)))
    after      x = x + a post_norm(f(x))           both, with the identity for norm
    parallel   x = x + a attention(norm(x)) + a mlp(norm'(x))

In a layer of ``delta_layers`` a gated DeltaNet (delta_net.py) stands in the place of attention.

With ``per_layer_width`` a third branch reads an embedding e of the token that is this layer's own
(fenchel/model/transformer.py), and with ``layer_scale`` a block ends with a factor s:

    x = x + a norm(W_out (f(W_gate x) * e)),    x = s x

a is ``residual_scale``, 1 unless set. Under initial="zero" the last map of every branch starts at
zero, so a fresh pre-norm block is the identity and a deep stack of them trains from the first step.

The encoder of an encoder-decoder is a stack without a causal mask, run once per source:

    memory_BSM = norm(block(... block(x_BSM)))

It shares the embedding of its Transformer and has its own blocks, norm and relative bias.

**Recomputation** (activation checkpointing). A backward pass reads what the forward pass has
computed, A bytes per position and layer (distributed/plan.py). With ``context.recompute`` a block
keeps only its input, 4 M of them, and computes the rest again when the backward pass reaches it:

    forward     x_l+1 = block_l(x_l)                        x_0, x_1, ..., x_L are kept
    backward    block_l(x_l) again, then its gradient       for l = L - 1, ..., 0

One more forward pass of work, for the activations of one block instead of L. The second pass is the
first one, to the bit: it has the same random numbers, autocast, buffers and shared priors, and
leaves none of them changed. So the gradients have the bits of a pass that keeps everything.

B sequences, T positions, S positions of the source or of the keys, M width of the stream.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.functional import dropout
from torch.utils.checkpoint import checkpoint

from fenchel.attention import ALiBi, Dense, Prior, RelativeBias
from fenchel.model.attention import Attention, CrossAttention
from fenchel.model.config import ModelConfig
from fenchel.model.delta_net import GatedDeltaNet
from fenchel.model.forward_context import ForwardContext, Observer
from fenchel.model.mlp import ACTIVATIONS, MixtureOfExperts, Mlp
from fenchel.model.norm import norm

NO_CONTEXT = ForwardContext()


class Block(nn.Module):
    """Attention or DeltaNet, cross-attention beside an encoder, and an MLP: residual branches."""

    layer_scale: Tensor | None

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        both, after = config.norm_place in ("both", "after"), config.norm_place == "after"

        def norm_before(*, first: bool = False) -> nn.Module:
            return nn.Identity() if after or first else norm(config)

        self.attention_norm = norm_before(first=layer == 0 and not config.first_norm)
        self.attention: Attention | GatedDeltaNet = (
            GatedDeltaNet(config, layer) if config.is_delta(layer) else Attention(config, layer)
        )
        self.attention_post_norm = norm(config) if both else None
        if config.kind == "encoder-decoder":
            self.cross_attention_norm: nn.Module | None = norm_before()
            self.cross_attention: CrossAttention | None = CrossAttention(config, layer)
            self.cross_attention_post_norm = norm(config) if both else None
        else:
            self.cross_attention_norm = self.cross_attention = None
            self.cross_attention_post_norm = None
        routed = config.has_experts(layer)
        own_norms = routed and config.expert_norms
        self.mlp_norm = nn.Identity() if own_norms else norm_before()
        self.mlp = (MixtureOfExperts if routed else Mlp)(config.at_layer(layer))
        self.mlp_post_norm = norm(config) if both else None
        self.per_layer_gate = self.per_layer_out = self.per_layer_norm = None
        if P := config.per_layer_width:
            self.per_layer_gate = nn.Linear(config.width, P, bias=False)
            self.per_layer_out = nn.Linear(P, config.width, bias=False)
            self.per_layer_norm = norm(config)
        self.activation = ACTIVATIONS[config.mlp]
        self.register_buffer("layer_scale", torch.ones(1) if config.layer_scale else None)
        self.post, self.parallel = config.norm_place == "post", config.parallel
        self.scale, self.dropout = config.branch_scale, config.dropout
        self.shared = config.block_count < config.layers

    def forward(
        self, x_BTM: Tensor, context: ForwardContext = NO_CONTEXT, layer: int | None = None
    ) -> Tensor:
        """(B, T, M) -> (B, T, M); ``layer`` where a block serves several layers (ALBERT)."""
        layer = (
            layer if self.shared else None
        )  # its own, which is not an argument of a compiled graph
        if context.recompute and torch.is_grad_enabled():
            return _recomputed(self, x_BTM, context, layer)
        return self.branches(x_BTM, context, layer)

    def branches(self, x_BTM: Tensor, context: ForwardContext, layer: int | None) -> Tensor:
        """What ``forward`` computes, once, or again in the backward pass."""
        x_BTM = self._attention_and_mlp(x_BTM, context, layer)
        if self.per_layer_gate is not None and self.per_layer_out is not None:
            assert context.per_layer is not None  # Transformer.forward computes it
            e_BTP = context.per_layer[:, :, self.attention.layer]
            branch = self.per_layer_out(self.activation(self.per_layer_gate(x_BTM)) * e_BTP)
            x_BTM = self._add(x_BTM, branch, self.per_layer_norm)
        return x_BTM if self.layer_scale is None else x_BTM * self.layer_scale

    def _attention_and_mlp(
        self, x_BTM: Tensor, context: ForwardContext, layer: int | None
    ) -> Tensor:
        if self.post:
            return self._forward_post_norm(x_BTM, context, layer)
        attended = self.attention(self.attention_norm(x_BTM), context, layer)
        if self.parallel:
            mlp = self.mlp(self.mlp_norm(x_BTM))
            x_BTM = self._add(x_BTM, attended, self.attention_post_norm)
            return self._add(x_BTM, mlp, self.mlp_post_norm)
        x_BTM = self._add(x_BTM, attended, self.attention_post_norm)
        if self.cross_attention is not None and self.cross_attention_norm is not None:
            branch = self.cross_attention(self.cross_attention_norm(x_BTM), context, layer)
            x_BTM = self._add(x_BTM, branch, self.cross_attention_post_norm)
        return self._add(x_BTM, self.mlp(self.mlp_norm(x_BTM)), self.mlp_post_norm)

    def _forward_post_norm(
        self, x_BTM: Tensor, context: ForwardContext, layer: int | None
    ) -> Tensor:
        x_BTM = self.attention_norm(self._add(x_BTM, self.attention(x_BTM, context, layer)))
        if self.cross_attention is not None and self.cross_attention_norm is not None:
            branch = self.cross_attention(x_BTM, context, layer)
            x_BTM = self.cross_attention_norm(self._add(x_BTM, branch))
        out: Tensor = self.mlp_norm(self._add(x_BTM, self.mlp(x_BTM)))
        return out

    def _add(self, x_BTM: Tensor, branch: Tensor, post_norm: nn.Module | None = None) -> Tensor:
        """x + a dropout(post_norm(branch))."""
        if post_norm is not None:
            branch = post_norm(branch)
        branch = self._drop(branch)
        return x_BTM + branch if self.scale == 1.0 else x_BTM + self.scale * branch

    def _drop(self, branch: Tensor) -> Tensor:
        return dropout(branch, self.dropout, self.training) if self.dropout else branch


def _recomputed(block: Block, x_BTM: Tensor, context: ForwardContext, layer: int | None) -> Tensor:
    """The output of a block that keeps only its input and runs again in the backward pass.

    Observers see the first pass only. What they compute from queries and keys is kept as it is.
    """
    branches = block.branches  # as it is now: training may have put a compiled one in its place
    priors, buffers = dict(context.priors), [b.clone() for b in block.buffers()]
    lent = dict(context.lent_kv)
    observe = None if context.observe is None else _kept(context.observe)
    first: ForwardContext | None = replace(context, observe=observe)

    def run(x_BTM: Tensor) -> Tensor:
        nonlocal first
        with _uncached_casts(x_BTM, enabled=not block.shared):
            if first is not None:
                given, first = first, None
                return branches(x_BTM, given, layer)
            again = replace(context, observe=None, priors=dict(priors), lent_kv=dict(lent))
            with _state_of_first_pass(block, buffers):
                return branches(x_BTM, again, layer)

    out: Tensor = checkpoint(run, x_BTM, use_reentrant=False)
    return out


def _kept(observe: Observer) -> Observer:
    """The observer, with what autograd saves in it kept, and not computed again."""

    def call(layer: int, q: Tensor, k: Tensor, v: Tensor) -> None:
        with saved_tensors_hooks(lambda x: x, lambda x: x):
            observe(layer, q, k, v)

    return call


def _uncached_casts(x_BTM: Tensor, *, enabled: bool) -> AbstractContextManager[object]:
    """Context manager: autocast does not store the casts of weights until the end of a pass.

    A block casts each weight once. One that serves several layers (``enabled=False``) shares the
    cast, whose gradient is then summed in the dtype of the cast.
    """
    kind = x_BTM.device.type
    if not (enabled and torch.is_autocast_enabled(kind)):
        return nullcontext()
    return torch.autocast(kind, torch.get_autocast_dtype(kind), cache_enabled=False)


@contextmanager
def _state_of_first_pass(block: Block, buffers: list[Tensor]) -> Iterator[None]:
    """Context manager: the buffers of a block are these, and as before afterwards.

    The balance of experts, which a pass leaves in its module, is put back too. With that of the
    second pass the activations of every layer would stay in memory.
    """
    now, mlp = [b.clone() for b in block.buffers()], block.mlp
    balance = mlp.balance if isinstance(mlp, MixtureOfExperts) else None
    _copy_to_buffers(block, buffers)
    try:
        yield
    finally:  # the pass ends by an exception where it has all that is needed
        _copy_to_buffers(block, now)
        if isinstance(mlp, MixtureOfExperts):
            mlp.balance = balance


@torch.no_grad()
def _copy_to_buffers(block: Block, values: list[Tensor]) -> None:
    for b, value in zip(block.buffers(), values, strict=True):
        b.copy_(value)


class Encoder(nn.Module):
    """The encoder of an encoder-decoder: the embedded source to what the decoder attends to."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        layers = config.encoder_layers or config.layers
        config = replace(config, kind="encoder", layers=layers, encoder_layers=None)
        self.config = config
        self.relative_bias = relative_bias_table(config)
        self.blocks = nn.ModuleList(Block(config, n) for n in range(config.block_count))
        self.norm = norm(config) if config.final_norm else None

    def forward(self, x_BSM: Tensor, context: ForwardContext) -> Tensor:
        """(B, S, M) -> (B, S, M)."""
        x_BSM = run_blocks(self.blocks, self.config, x_BSM, context)
        return x_BSM if self.norm is None else self.norm(x_BSM)


def run_blocks(
    blocks: nn.ModuleList, config: ModelConfig, x_BTM: Tensor, context: ForwardContext
) -> Tensor:
    """All layers in order; with ``distinct_layers`` a block serves consecutive layers."""
    layers_per_block = config.layers // len(blocks)
    for layer in range(config.layers):
        x_BTM = blocks[layer // layers_per_block](x_BTM, context, layer)
        if context.steer is not None and layer in context.steer:
            x_BTM = x_BTM + context.steer[layer]
    return x_BTM


def relative_bias_table(config: ModelConfig) -> nn.Embedding | None:
    """The learned bias of T5's distance buckets, (buckets, H), shared by all layers."""
    return nn.Embedding(config.buckets, config.heads) if config.has_buckets else None


def position_bias(
    config: ModelConfig,
    relative_bias: nn.Embedding | None,
    T: int,
    S: int,
    *,
    one_shape: bool = True,
) -> Prior | None:
    """The prior over distances of all layers, for T queries and S keys: ALiBi's or T5's.

    ``one_shape=False`` for calls of ``attend`` with other numbers of queries or keys.
    """
    if relative_bias is None:
        return ALiBi(config.heads) if config.positions == "alibi" else None
    table = relative_bias.weight
    bias = RelativeBias(table, config.kind == "encoder", config.bucket_distance)
    if any(config.windows) or not one_shape:  # a layer with a window has fewer keys than S
        return bias
    return Dense(bias.log(T, S, H=config.heads, device=table.device, dtype=table.dtype))
