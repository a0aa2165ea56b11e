"""Fresh parameters.

    zero      a map of I inputs draws N(0, 1/I); the last map of every branch and an untied read-out
              are zero, so the logits start as those of the embedding alone and no depth rule is
              needed
    normal    every map draws N(0, s^2), s = ``initial_std``
    xavier    every map of I inputs and O outputs draws N(0, 2 / (I + O))

In all of them embeddings draw N(0, s^2), so that tied logits start near zero; biases and the scores
of sinks are zero, norms have gain 1. ``initial_qk`` multiplies the standard deviation of queries
and keys: smaller scores, more even attention. ``initial_depth`` multiplies that of the last map of
every branch by (2 L)^(-1/2), L layers: the sum of 2 L branches then varies like one.

Queries, keys and values lie in one matrix and are drawn as three. Under ``sigma_reparam`` a map
that would start at zero is drawn, and has gain 0 instead.

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
            _shape_scores(module, config, generator)
    for module in model.modules():
        if isinstance(module, SigmaLinear):
            module.begin(1.0, generator)
    for last in last_maps(model):
        _begin_branch(last, config)


def last_maps(model: nn.Module) -> list[nn.Linear | nn.Parameter]:
    """The last map of every branch, in order."""
    found: list[nn.Linear | nn.Parameter] = []
    for module in model.modules():
        if isinstance(module, Attention | CrossAttention):
            found.append(module.out)
        elif isinstance(module, Mlp | MixtureOfExperts):
            found.append(module.down)
    return found


def _draw(weight: Tensor, config: ModelConfig, generator: Generator) -> None:
    """weight (..., O, I)."""
    outputs, inputs = weight.shape[-2:]
    weight.normal_(0.0, _deviation(config, inputs, outputs), generator=generator)


def _deviation(config: ModelConfig, inputs: int, outputs: int) -> float:
    if config.initial == "normal":
        return config.initial_std
    return inputs**-0.5 if config.initial == "zero" else math.sqrt(2.0 / (inputs + outputs))


def _shape_scores(
    layer: Attention | CrossAttention, config: ModelConfig, generator: Generator
) -> None:
    """Queries, keys and values by their own sizes, and the first two smaller where asked."""
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
    """(rows of a weight, how many heads they make, whether those are compared)."""
    H, G, D = config.heads, config.groups, config.head_width
    if isinstance(layer, CrossAttention):
        k, v = split(layer.kv.weight, G * D)
        return [(layer.q.weight, H, True), (k, G, True), (v, G, False)]
    if layer.l2:
        z, v = split(layer.qkv.weight, H * D)
        return [(z, H, True), (v, H, False)]
    q, k, v = split(layer.qkv.weight, [H * D, G * D, G * D])
    return [(q, H, True), (k, G, True), (v, G, False)]


def _begin_branch(last: nn.Linear | nn.Parameter, config: ModelConfig) -> None:
    factor = 0.0 if config.initial == "zero" else 1.0
    if config.initial_depth:
        factor *= (2 * config.layers) ** -0.5
    if isinstance(last, SigmaLinear):
        last.gain.fill_(factor)
    elif factor != 1.0:
        weight = last.weight if isinstance(last, nn.Linear) else last
        weight.mul_(factor)
