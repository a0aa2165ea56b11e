"""Floating-point operations of a forward pass, counted from the settings.

A product of (T, I) and (I, O) takes 2 T I O operations. For T positions of a sequence and S keys,
per layer:

    projections    2 T M (H + 2 G) D + 2 T H D M       queries, keys and values; the output
    gate           2 T M H, or 2 T M H D               an output gate per head, per element
    scores         2 H T S D + 2 H T S D               q k^T, and weights times values
    mlp            4 T M F, or 6 T M F when gated      per expert that a token uses; router 2 T M X
    delta rule     2 T H (3 D E + C (2 D + E))         in place of the scores, in chunks of C
    embedding      4 T M P                             of a layer, where layers have their own

With G = H, H D = M and S = T these are 8 T M^2 and 4 T^2 M: equal at T = 2 M, so the square of the
length is the smaller part of attention up to twice the width, and an MLP of F = 4 M adds 16 T M^2.
Attention weights have H T S entries per layer, the factor H included. Once per pass:

    lm_head        2 T M V                             and the maps of a narrow embedding or of one
                                                       per layer, 2 T M L P

Counted are products of matrices, as torch.utils.flop_counter counts them; norms, activations, the
choice map, rotations and additions are O(T M) or O(H T S) and far cheaper. scores="l2" makes
values of its queries, 2 T M H D + 2 T H D^2 operations, by a matrix of 2 M H D^2 that one pass
computes once for all sequences. A mask shortens nothing here: the count is that of dense
attention, of which a causal kernel may do half. A backward pass takes twice the operations of
the forward pass, so a training step of B sequences takes 3 B times the total.

T positions, S keys, M width of the stream, H heads, G key heads, D their width, F width inside the
MLP, X experts, P width of an embedding per layer, V vocabulary, L layers.
"""

from typing import NamedTuple

from fenchel.attention.delta_rule import CHUNK
from fenchel.model.config import ModelConfig


class Flops(NamedTuple):
    """Operations of a forward pass over one sequence, all layers together."""

    projections: int
    """Queries, keys, values, the output of attention and its gate."""
    scores: int
    """q k^T, and the weights times the values."""
    mlp: int
    """With the branch of an embedding per layer."""
    lm_head: int
    """With the maps between the embedding and the stream."""

    @property
    def total(self) -> int:
        """The sum of all parts."""
        return sum(self)

    @property
    def attention(self) -> int:
        """Projections and scores."""
        return self.projections + self.scores


def forward_flops(config: ModelConfig, T: int, *, S: int | None = None) -> Flops:
    """Operations of a forward pass over ``T`` positions that attend to ``S`` keys, T by default.

    T = 1 with S = n counts the decoding of one token with a cache of n - 1.

    >>> config = ModelConfig(vocabulary=1000, width=64, layers=1, heads=4, mlp="gelu", context=512)
    >>> flops = forward_flops(config, T=128)  # T = 2 M
    >>> flops.projections == flops.scores == 8 * 128 * 64**2
    True
    """
    if config.kind == "encoder-decoder":
        raise ValueError(
            'forward_flops counts one stack of blocks; kind="encoder-decoder" has two and '
            "cross-attention between them."
        )
    S = T if S is None else S
    layers = [_layer_flops(config, layer, T, S) for layer in range(config.layers)]
    projections, scores, mlp = (sum(part) for part in zip(*layers, strict=True))
    M = config.width
    E = config.embedding_width or M
    inner = E if config.lm_head_transform else M
    lm_head = 2 * T * inner * config.vocabulary if config.lm_head else 0
    if config.lm_head_transform:
        lm_head += 2 * T * M * E
    if config.embedding_width is not None:
        lm_head += 2 * T * E * M  # into the stream
        if config.tied and not config.lm_head_transform:
            lm_head += 2 * T * M * E  # and back
            lm_head -= 2 * T * (M - E) * config.vocabulary if config.lm_head else 0
    lm_head += 2 * T * M * config.layers * config.per_layer_width
    return Flops(projections, scores, mlp, lm_head)


def _layer_flops(config: ModelConfig, layer: int, T: int, S: int) -> tuple[int, int, int]:
    """Projections, scores and MLP of one layer."""
    own, full = config.kv_source(layer) == layer, config.window(layer) is None
    config = config.at_layer(layer)
    M, H, G, D = config.width, config.heads, config.groups, config.head_width
    keys = G * D if own else 0
    values = 0 if config.keys_as_values and full else keys
    projections, scores = 2 * T * M * (H * D + keys + values), 4 * H * T * S * D
    if config.scores == "l2":  # one map of queries and keys, values by W_q W_v^T of every head
        projections = 2 * T * M * H * D + 2 * H * D * D * (T + M)
        scores += 2 * H * T * S  # one more coordinate, for the lengths of keys
    projections += 2 * T * (H * D + config.gate_width) * M
    if config.is_delta(layer):
        projections, scores = _delta_flops(config, T)
    mlp = expert = (6 if config.gated else 4) * T * M * config.mlp_width
    if config.has_experts(layer):
        mlp = config.experts_per_token * expert + 2 * T * M * config.experts
        mlp += (6 if config.gated else 4) * T * M * (config.shared_expert or 0)
        mlp += 2 * T * M * config.shared_expert_gate
    return projections, scores, mlp + 4 * T * M * config.per_layer_width


def _delta_flops(config: ModelConfig, T: int) -> tuple[int, int]:
    """Projections and delta rule of one layer of gated DeltaNet."""
    keys, values, H = config.delta_keys, config.delta_values, config.delta_value_heads
    D, E, C = config.delta_key_width, config.delta_value_width, min(T, CHUNK) if T > 1 else 0
    rows = 2 * keys + 3 * values + 2 * H
    return 2 * T * config.width * rows, 2 * T * H * (3 * D * E + C * (2 * D + E))


def attention_entries(config: ModelConfig, T: int) -> int:
    """Attention weights of a forward pass that stores all of them: L H T^2, L layers of attention.

    >>> attention_entries(ModelConfig(vocabulary=10, layers=2, heads=2), T=100)
    40000
    """
    attention = sum(not config.is_delta(layer) for layer in range(config.layers))
    return attention * config.heads * T * T


def training_flops(config: ModelConfig, *, batch: int, T: int | None = None) -> int:
    """Operations of a training step of ``batch`` sequences: 3 forward passes each.

    >>> config = ModelConfig(vocabulary=1000)
    >>> training_flops(config, batch=8) == 24 * forward_flops(config, config.context).total
    True
    """
    return 3 * batch * forward_flops(config, config.context if T is None else T).total
