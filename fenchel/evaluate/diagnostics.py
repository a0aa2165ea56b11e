"""Mistakes that raise no error and make a model worse, each with its symptom, detector and remedy.

    scale        the scores are multiplied by 1/sqrt(D) twice or never, by 1/sqrt(d_model), or a
                 temperature is in both the scale and the map
    collapse     most heads of a layer give all weight to one key: entropy near 0
    uniform      no head of a layer uses its scores: the weights are those of the prior
    post-norm    norms after the branches of a model too deep for them, at its beginning
    neighbours   the lengths of embedding rows decide which rows are near by the inner product

A detector reads a model and a few tokens and gives sentences; it can be wrong, so its sentence
has the number on which it rests. ``fenchel doctor DIR`` prints them. A head that attends to the
previous token has an entropy near 0 and is healthy: collapse is a property of a layer.

With p the weights of a row and u those with every score 0 (the prior), a row that chooses has
a total variation TV(p, u) = sum |p - u| / 2 well above 0. It is finite for sparse maps too, where
KL(p || u) may not be.
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from fenchel.attention import attend, entropy, scale_warning
from fenchel.evaluate.attention import attention_calls
from fenchel.model import Transformer
from fenchel.model.initialisation import post_norm_trouble
from fenchel.torch_internals import to_float64

LOW_ENTROPY = 0.05
"""Nats; a row of 8 or more open keys has 2.08 if it is uniform."""
MOST = 0.75
"""The share of heads that makes a layer."""
NO_CHOICE = 0.02
"""Total variation between the weights and the prior, on average over rows."""
FEW_KEYS = 8
"""Rows with fewer open keys are left out: a row of one key has entropy 0 by necessity."""
LENGTH_DECIDES = 0.5
"""The share of rows whose nearest by the inner product is among the longest hundredth."""
_SAMPLE = 256


class Pitfall(NamedTuple):
    """A mistake: how it shows, what to do, and a function from a model and ids to sentences.

    >>> from fenchel.evaluate import PITFALLS
    >>> [each.name for each in PITFALLS]
    ['scale', 'collapse', 'uniform', 'post-norm', 'neighbours']
    """

    name: str
    symptom: str
    remedy: str
    detect: Callable[[Transformer, Tensor], list[str]]


class Finding(NamedTuple):
    """A sentence of a detector, with the pitfall's remedy."""

    pitfall: str
    sentence: str
    remedy: str


@torch.no_grad()
def pitfalls(model: Transformer, ids_BT: Tensor) -> list[Finding]:
    """What the detectors find in a model on some tokens; 16 or more per sequence tell most.

    >>> from fenchel.model import ModelConfig
    >>> model = Transformer(ModelConfig(vocabulary=64, width=32, layers=1, heads=2))
    >>> [found.pitfall for found in pitfalls(model, torch.arange(32)[None])]
    []
    """
    return [
        Finding(each.name, sentence, each.remedy)
        for each in PITFALLS
        for sentence in each.detect(model, ids_BT)
    ]


def wrong_scale(model: Transformer, ids_BT: Tensor) -> list[str]:
    """A sentence per layer whose scale looks like a mistake."""
    return [
        f"layer {layer}: {sentence}"
        for layer, call in enumerate(attention_calls(model, ids_BT))
        if (sentence := scale_warning(call.q, call.k, width=model.config.width, **call.spec))
    ]


def collapsed_layers(model: Transformer, ids_BT: Tensor) -> list[str]:
    """A sentence per layer in which most heads have an entropy near 0."""
    sentences = []
    for layer, per_head in _per_head(model, ids_BT, lambda p, _: entropy(p)):
        share = to_float64(per_head < LOW_ENTROPY).mean().item()
        if share >= MOST:
            sentences.append(
                f"layer {layer}: {share:.0%} of the heads have less than {LOW_ENTROPY} nats of "
                f"entropy (median {per_head.median().item():.3f})."
            )
    return sentences


def uniform_layers(model: Transformer, ids_BT: Tensor) -> list[str]:
    """A sentence per layer in which every head has the weights of its prior."""
    sentences = []
    for layer, per_head in _per_head(model, ids_BT, lambda p, u: (p - u).abs().sum(-1) / 2):
        if per_head.max() < NO_CHOICE:
            sentences.append(
                f"layer {layer}: the scores move less than {per_head.max().item():.1e} of the "
                "weight of any head away from its prior."
            )
    return sentences


def deep_post_norm(model: Transformer, ids_BT: Tensor) -> list[str]:  # noqa: ARG001  a detector
    """A sentence if the model was too deep at its beginning for norms after its branches."""
    sentence = post_norm_trouble(model.config)
    return [] if sentence is None else [sentence]


def unequal_embeddings(model: Transformer, ids_BT: Tensor) -> list[str]:  # noqa: ARG001
    """A sentence if long rows of the embedding are near to everything by the inner product."""
    table = model.embed.weight.detach()
    length = torch.linalg.vector_norm(table, dim=1, dtype=torch.float32)
    longest = torch.zeros(len(table), dtype=torch.bool, device=table.device)
    longest[length.topk(max(1, len(table) // 100)).indices] = True
    some = torch.linspace(0, len(table) - 1, min(_SAMPLE, len(table)), device=table.device).long()
    products = (table[some] @ table.T).float()  # the table itself keeps its dtype: it may be large
    products[torch.arange(len(some), device=table.device), some] = -torch.inf
    cosines = products / length.clamp_min(torch.finfo(torch.float32).tiny)
    by_product, by_cosine = (
        to_float64(longest[near.argmax(-1)]).mean().item() for near in (products, cosines)
    )
    if by_product < LENGTH_DECIDES or by_cosine >= LENGTH_DECIDES:
        return []
    return [
        f"the nearest row by the inner product is one of the longest 1 % for {by_product:.0%} of "
        f"the rows, by the cosine for {by_cosine:.0%}."
    ]


def _per_head(
    model: Transformer, ids_BT: Tensor, measure: Callable[[Tensor, Tensor], Tensor]
) -> Iterator[tuple[int, Tensor]]:
    """The number of a layer and, per head, the mean of a measure over rows with enough open keys.

    ``measure`` takes the weights (B, H, T, S) and those with every score 0.
    """
    for layer, call in enumerate(attention_calls(model, ids_BT)):
        p, u = (
            to_float64(attend(q, call.k, call.v, **call.spec, return_weights=True)[1])
            for q in (call.q, torch.zeros_like(call.q))
        )
        rows = to_float64((u > 0).sum(-1) >= FEW_KEYS)
        if rows.any():
            yield layer, (measure(p, u) * rows).sum((0, 2)) / rows.sum((0, 2))


PITFALLS = (
    Pitfall(
        "scale",
        "Attention is far sharper or far flatter than its scores suggest from the first step on.",
        "Divide by the square root of the head width once; put a temperature only into beta.",
        wrong_scale,
    ),
    Pitfall(
        "collapse",
        "Weights near 0 and 1, little gradient through the scores, loss that stalls or jumps.",
        "Limit the scores: model.qk_norm, train.qk_clip, or a lower learning rate.",
        collapsed_layers,
    ),
    Pitfall(
        "uniform",
        "Every token gets the same mixture, and the tokens of deep layers become equal.",
        "Look for queries or keys that were initialised too small, or a beta applied twice.",
        uniform_layers,
    ),
    Pitfall(
        "post-norm",
        "The loss of a deep model with norms after its branches does not fall at first.",
        'Set norm_place="pre", residual_scale="depth" or initial_depth=true; or warm up longer.',
        deep_post_norm,
    ),
    Pitfall(
        "neighbours",
        "A few rows are near to everything when embeddings are compared by the inner product.",
        "Compare by the cosine where length is a nuisance: fenchel.evaluate.neighbours does.",
        unequal_embeddings,
    ),
)
"""Every mistake that has a detector; docs/pitfalls.md is made from it."""
