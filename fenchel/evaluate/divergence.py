"""How far a model's laws of the next token have moved from those of the model it was made from.

With the laws p of the tuned model and q of the base model at a position,

    KL(p || q) = sum_v p_v (log p_v - log q_v)       nats,

averaged over the scored tokens of documents. It is a measurement on these documents, not a bound.
Both models read the same rows (B, T); logits are compared in blocks (N, V).
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from fenchel.data import PackedBatches
from fenchel.evaluate.score import document_predictions
from fenchel.model import Transformer


class Law(NamedTuple):
    """The likeliest next tokens at one position, before and after."""

    kl: float
    target: int
    """The token that follows in the text."""
    base: list[tuple[int, float]]
    """Tokens with their probabilities."""
    tuned: list[tuple[int, float]]


def document_kl(
    model: Transformer, base: Transformer, documents: PackedBatches, *, limit: int | None = None
) -> float:
    """The mean of KL(model || base) over the scored tokens, in nats per token.

    With a ``limit`` rows are read until they have that many targets.

    >>> import numpy as np
    >>> from fenchel.data import DocumentIds
    >>> from fenchel.model import ModelConfig
    >>> model = Transformer(ModelConfig(vocabulary=9, context=8, width=8, heads=1, layers=1))
    >>> documents = DocumentIds(np.arange(7), np.array([0, 4, 7]))
    >>> document_kl(model, model, PackedBatches(documents, batch=1, context=8, seed=0))
    0.0
    """
    total, count = 0.0, 0
    for p_NV, q_NV, _ in _laws(model, base, documents, limit):
        total += float(_kl(p_NV, q_NV).sum())
        count += len(p_NV)
    return total / count


def changed_laws(
    model: Transformer, base: Transformer, documents: PackedBatches, *, count: int, limit: int
) -> list[Law]:
    """The ``count`` positions with the largest KL, with the three likeliest tokens of both."""
    found: list[Law] = []
    for p_NV, q_NV, targets in _laws(model, base, documents, limit):
        kl_N = _kl(p_NV, q_NV)
        for n in kl_N.topk(min(count, len(kl_N))).indices.tolist():
            pairs = [_likeliest(log_NV[n]) for log_NV in (q_NV, p_NV)]
            found.append(Law(float(kl_N[n]), int(targets[n]), *pairs))
    return sorted(found, key=lambda law: -law.kl)[:count]


def _laws(
    model: Transformer, base: Transformer, documents: PackedBatches, limit: int | None
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Blocks of both log-probabilities (N, V), in float64, and targets."""
    new = document_predictions(model, documents, limit=limit)
    old = document_predictions(base, documents, limit=limit)
    for (logits_NV, targets_N), (base_NV, _) in zip(new, old, strict=True):
        yield logits_NV.double().log_softmax(-1), base_NV.double().log_softmax(-1), targets_N


def _kl(p_NV: Tensor, q_NV: Tensor) -> Tensor:
    """Of log-probabilities; a token of probability 0 contributes nothing."""
    terms = p_NV.exp() * (p_NV - q_NV)
    return torch.where(p_NV.isneginf(), 0.0, terms).sum(-1).clamp(min=0.0)


def _likeliest(log_V: Tensor, count: int = 3) -> list[tuple[int, float]]:
    top = log_V.exp().topk(min(count, len(log_V)))
    return list(zip(top.indices.tolist(), top.values.tolist(), strict=True))
