"""Initialisation: fresh parameters of a model.

    zero      a map of I inputs draws N(0, 1/I); the last map of every branch and an untied LM head
              are zero, so a fresh block is the identity and no depth rule is needed
    normal    every map draws N(0, s^2), s = ``initial_std``
    xavier    every map of I inputs and O outputs draws N(0, 2 / (I + O))

In all of them embeddings draw N(0, s^2), so that tied logits start near zero; biases and the scores
of sinks are zero, norms have gain 1. ``initial_qk`` multiplies the standard deviation of queries
and keys: smaller scores, more even attention. Under ``initial_distances`` the relative bias of head
h is ``DISTANCE_BIAS`` at h + 1 tokens back and 0 elsewhere: heads begin as an n-gram.
``initial_depth`` multiplies the standard deviation of the last map of every branch by
(2 L)^(-1/2), L layers: the sum of 2 L branches then varies like one.

Queries, keys and values are one matrix and are drawn as three. Under ``sigma_reparam`` a map that
would start at zero is drawn, and has gain 0 instead.

``post_norm_trouble`` warns of a depth that norms after the branches do not carry. A branch that is
drawn to multiply the variance of its input by v (1 under "xavier", M s^2 under "normal") adds a^2 v
of it, a the factor on branches, and every norm divides the sum by 1 + a^2 v: after 2 L branches the
embedding is (1 + a^2 v)^(-2 L) of the variance, about exp(-2 L a^2 v), and so is the gradient that
reaches the first layer compared with that of the last. The original Transformer had 2 L a^2 v = 12
and needed a warm-up; in a toy of docs/maths/model.md that learns at 12, half of the gain is lost at
16, and from 24 on nothing is learnt in 80 steps. Branches that start at zero, ``initial_depth`` and
``residual_scale="depth"`` (2 L a^2 v = 1) learn at any depth that was tried.

Glorot and Bengio (2010), Understanding the difficulty of training deep feedforward networks.
Xiong et al. (2020), On layer normalization in the transformer architecture.
"""

import math

import torch
from torch import Tensor, nn, split

from fenchel.model.attention import Attention, CrossAttention
from fenchel.model.block import Block
from fenchel.model.config import ModelConfig
from fenchel.model.delta_net import LARGEST_DECAY, LEAST_DECAY, GatedDeltaNet
from fenchel.model.mlp import MixtureOfExperts, Mlp
from fenchel.model.sigma_linear import SigmaLinear

Generator = torch.Generator | None
DISTANCE_BIAS = 5.0
"""Weight of about 0.7 on one of 64 keys with equal scores."""
POST_NORM_DEPTH = 12.0
"""The largest 2 L a^2 v without a warning: that of the original Transformer."""


def post_norm_trouble(config: ModelConfig) -> str | None:
    """A sentence of advice for a model too deep for norms after its branches, else None.

    >>> post_norm_trouble(ModelConfig(vocabulary=16, layers=24, norm_place="post")) is None
    True
    >>> deep = ModelConfig(vocabulary=16, layers=24, norm_place="post", initial="xavier")
    >>> print(post_norm_trouble(deep)[:58])
    norm_place="post" with 24 layers: the branches add 48 time
    """
    variance = {"zero": 0.0, "normal": config.width * config.initial_std**2, "xavier": 1.0}
    layers = config.layers
    size = 2 * layers * config.branch_scale**2 * variance[config.initial]
    if config.initial_depth:
        size /= 2 * layers
    if config.norm_place != "post" or size <= POST_NORM_DEPTH:
        return None
    return (
        f'norm_place="post" with {layers} layers: the branches add {size:.0f} times the variance '
        f"of the stream, {POST_NORM_DEPTH:.0f} is what training usually carries, and the first "
        'layers may learn nothing; use norm_place="pre", residual_scale="depth" or '
        "initial_depth=True."
    )


@torch.no_grad()
def initialise(model: nn.Module, config: ModelConfig, generator: Generator = None) -> None:
    """Draw every parameter of ``model`` again, module by module in their order."""
    for module in model.modules():
        if isinstance(module, nn.Linear):
            _draw(module.weight, config, generator)
            if module.bias is not None:
                module.bias.zero_()
        elif isinstance(module, nn.Embedding):
            module.weight.normal_(0.0, config.initial_std, generator=generator)
        elif isinstance(module, MixtureOfExperts):
            for weight in (module.gate, module.up, module.down):
                if weight is not None:
                    _draw(weight, config, generator)
            for bias in (module.gate_bias, module.up_bias, module.down_bias):
                if bias is not None:
                    bias.zero_()
        elif isinstance(module, GatedDeltaNet):
            module.filter.normal_(0.0, module.filter.shape[-1] ** -0.5, generator=generator)
            module.decay_log.uniform_(LEAST_DECAY, LARGEST_DECAY, generator=generator).log_()
            module.decay_bias.fill_(1.0)
            module.gain.fill_(1.0)
    for module in model.modules():
        if isinstance(module, Attention | CrossAttention):
            _draw_qkv(module, config, generator)
        if isinstance(module, Attention) and module.sink_map is not None:
            module.sink_map.weight.zero_()
        table = getattr(module, "relative_bias", None)
        if config.initial_distances and isinstance(table, nn.Embedding):
            buckets, heads = table.weight.shape
            head = torch.arange(heads)
            table.weight.zero_()[(head + 1) % buckets, head] = DISTANCE_BIAS
    for module in model.modules():
        if isinstance(module, SigmaLinear):
            module.reset(1.0, generator)
    for last in last_maps(model):
        _scale_branch(last, config)


def last_maps(model: nn.Module) -> list[nn.Linear | nn.Parameter]:
    """The last map of every branch."""
    maps: list[nn.Linear | nn.Parameter] = []
    for module in model.modules():
        if isinstance(module, Attention | CrossAttention):
            maps.append(module.out)
        elif isinstance(module, GatedDeltaNet):
            maps.append(module.out_proj)
        elif isinstance(module, Mlp | MixtureOfExperts):
            maps.append(module.down)
        elif isinstance(module, Block) and module.per_layer_out is not None:
            maps.append(module.per_layer_out)
    return maps


def _draw(weight: Tensor, config: ModelConfig, generator: Generator) -> None:
    """Draw a weight (..., O, I)."""
    outputs, inputs = weight.shape[-2:]
    weight.normal_(0.0, _deviation(config, inputs, outputs), generator=generator)


def _deviation(config: ModelConfig, inputs: int, outputs: int) -> float:
    if config.initial == "normal":
        return config.initial_std
    return inputs**-0.5 if config.initial == "zero" else math.sqrt(2.0 / (inputs + outputs))


def _draw_qkv(layer: Attention | CrossAttention, config: ModelConfig, generator: Generator) -> None:
    """Draw queries, keys and values by their own sizes, and scale the first two."""
    fused = layer.qkv if isinstance(layer, Attention) else layer.kv
    for rows, scores in _parts(layer):
        if config.initial == "xavier" and len(rows):
            deviation = _deviation(config, fused.in_features, len(rows))
            rows.normal_(0.0, deviation, generator=generator)
        if scores and config.initial_qk != 1.0:
            rows.mul_(config.initial_qk)


def _parts(layer: Attention | CrossAttention) -> list[tuple[Tensor, bool]]:
    """Rows of a weight, and whether they are queries or keys."""
    if isinstance(layer, CrossAttention):
        k, v = layer.kv.weight.chunk(2)
        return [(layer.q.weight, True), (k, True), (v, False)]
    if layer.l2:
        z, v = layer.qkv.weight.chunk(2)
        return [(z, True), (v, False)]
    q, k, v = split(layer.qkv.weight, layer.rows)
    return [(q, True), (k, True), (v, False)]


def _scale_branch(last: nn.Linear | nn.Parameter, config: ModelConfig) -> None:
    factor = 0.0 if config.initial == "zero" else 1.0
    if config.initial_depth:
        factor *= (2 * config.layers) ** -0.5
    if isinstance(last, SigmaLinear):
        last.gain.fill_(factor)
    elif factor != 1.0:
        weight = last.weight if isinstance(last, nn.Linear) else last
        weight.mul_(factor)
