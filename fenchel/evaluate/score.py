"""How well a model predicts a text.

    loss           mean over targets of -log p(target | what came before), in nats
    perplexity     exp(loss): of a uniform model it is V. It depends on the tokenizer
    bits_per_byte  sum of the losses / (bytes of the text x log 2). It does not

Every token but the first is a target exactly once. A target is predicted with at least half a
context before it, except near the start of the text.
"""

import math
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from fenchel.data import Ids, encode, end_id, open_text, windows
from fenchel.model import evaluating


class Score(NamedTuple):
    """A model on a text."""

    loss: float
    perplexity: float
    bits_per_byte: float
    tokens: int


@torch.no_grad()
def score(
    model: nn.Module,
    ids: Ids,
    *,
    bytes: int,
    context: int,
    limit: int | None = None,
    batch: int = 32,
) -> Score:
    """Read ``ids``, the tokens of ``bytes`` bytes; at most the first ``limit`` of them.

    Of a text that is read in part, the bytes are taken in proportion to its targets.
    """
    if bytes < 1:
        raise ValueError(f"bytes={bytes} should be the size of the text, at least 1.")
    part = ids if limit is None else ids[: limit + 1]
    total, count = 0.0, 0
    for logits_NV, targets_N in predictions(model, part, context=context, batch=batch):
        losses_N = cross_entropy(logits_NV.float(), targets_N, reduction="none")
        total += float(losses_N.sum(dtype=torch.float64))
        count += len(losses_N)
    loss = total / count
    read = bytes * count / (len(ids) - 1)
    return Score(loss, _exp(loss), total / (read * math.log(2.0)), count)


@torch.no_grad()
def predictions(
    model: nn.Module, ids: Ids, *, context: int, batch: int = 32
) -> Iterator[tuple[Tensor, Tensor]]:
    """Logits (N, V) and targets (N,), some at a time; every id but the first is a target once."""
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    with evaluating(model):
        for window in windows(ids, context=context, stride=max(1, context // 2), batch=batch):
            scored_BT = window.scored.to(device)
            logits_BTV = model(window.inputs.to(device))
            yield logits_BTV[scored_BT], window.targets.to(device)[scored_BT]


def _exp(loss: float) -> float:
    return math.exp(loss) if loss < 700.0 else math.inf  # math.exp raises where it overflows


def text_ids(tokenizer: Tokenizer, source: str) -> tuple[Ids, int]:
    """The ids of a whole text, each document after an end, and its bytes."""
    end, size = end_id(tokenizer), 0
    found = [end]
    for document in open_text(source).documents():
        found += [*encode(tokenizer, document.text), end]
        size += len(document.text.encode())
    return np.array(found, dtype=np.uint32), size
