"""Initialisation: fresh parameters of a model.

    zero      a map of I inputs draws N(0, 1/I); the last map of every branch and an untied LM head
              are zero, so a fresh block is the identity and no depth rule is needed
    normal    every map draws N(0, s^2), s = ``initial_std``
    xavier    every map of I inputs and O outputs draws N(0, 2 / (I + O))

In all of them embeddings draw N(0, s^2), so that tied logits start near zero; biases and the scores
of sinks are zero, norms have gain 1. ``initial_qk`` multiplies the standard deviation of queries
and keys: smaller scores, more even attention. ``initial_depth`` multiplies that of the last map of
every branch by (2 L)^(-1/2), L layers: the sum of 2 L branches then varies like one.

Queries, keys and values are one matrix and are drawn as three. Under ``sigma_reparam`` a map that
would start at zero is drawn, and has gain 0 instead.

Glorot and Bengio (2010), Understanding the difficulty of training deep feedforward networks.
"""

import math

import torch
from torch import Tensor, nn, split

from fenchel.model.attention import Attention, CrossAttention
from fenchel.model.config import ModelConfig
from fenchel.model.mlp import MixtureOfExperts, Mlp
from fenchel.model.sigma_linear import SigmaLinear

Generator = torch.Generator | None


@torch.no_grad()
def initialise(model: nn.Module, config: ModelConfig, generator: Generator = None) -> None:
    """Draw every parameter of ``model`` anew, module by module in their order."""
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
    for module in model.modules():
        if isinstance(module, Attention | CrossAttention):
            _draw_qkv(module, config, generator)
    for module in model.modules():
        if isinstance(module, SigmaLinear):
            module.reset(1.0, generator)
    for last in last_maps(model):
        _scale_branch(last, config)


def last_maps(model: nn.Module) -> list[nn.Linear | nn.Parameter]:
    """The last map of every branch, in order."""
    maps: list[nn.Linear | nn.Parameter] = []
    for module in model.modules():
        if isinstance(module, Attention | CrossAttention):
            maps.append(module.out)
        elif isinstance(module, Mlp | MixtureOfExperts):
            maps.append(module.down)
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
    M, D = fused.in_features, config.head_width
    for rows, heads, scores in _parts(layer, config):
        if config.initial == "xavier":
            deviation = _deviation(config, M, heads * D)
            rows.normal_(0.0, deviation, generator=generator)
        if scores and config.initial_qk != 1.0:
            rows.mul_(config.initial_qk)


def _parts(
    layer: Attention | CrossAttention, config: ModelConfig
) -> list[tuple[Tensor, int, bool]]:
    """(rows of a weight, number of heads, whether they are queries or keys)."""
    H, G, D = config.heads, config.groups, config.head_width
    if isinstance(layer, CrossAttention):
        k, v = split(layer.kv.weight, G * D)
        return [(layer.q.weight, H, True), (k, G, True), (v, G, False)]
    if layer.l2:
        z, v = split(layer.qkv.weight, H * D)
        return [(z, H, True), (v, H, False)]
    q, k, v = split(layer.qkv.weight, [H * D, G * D, G * D])
    return [(q, H, True), (k, G, True), (v, G, False)]


def _scale_branch(last: nn.Linear | nn.Parameter, config: ModelConfig) -> None:
    factor = 0.0 if config.initial == "zero" else 1.0
    if config.initial_depth:
        factor *= (2 * config.layers) ** -0.5
    if isinstance(last, SigmaLinear):
        last.gain.fill_(factor)
    elif factor != 1.0:
        weight = last.weight if isinstance(last, nn.Linear) else last
        weight.mul_(factor)
