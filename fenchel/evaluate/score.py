"""Loss, perplexity and bits per byte of a model on a text.

    loss           mean over targets of -log p(target | tokens before it), in nats
    perplexity     exp(loss), V for a uniform model; depends on the tokenizer
    bits_per_byte  sum of the losses / (bytes that the targets spell x log 2); independent of the
                   tokenizer

``score_choice`` measures a model that was trained by the Fenchel-Young loss of another choice map:
its prediction is p = weights(logits). A sparse p may give a target probability 0. Perplexity and
bits per byte are then infinite; the loss, the accuracy and the share of targets outside the support
remain.

Every token but the first is a target exactly once. The windows have ``context`` tokens and begin
``stride`` tokens apart, by default half a context: a target then has at least half a context before
it, except near the start of the text. The last window ends with the text, so its targets have more.
Windows that are a whole context apart are those of lm-evaluation-harness.

Of W processes each reads every W-th batch of windows (``Sharing``). The sums of all batches are
gathered and added in the order of the text, so that the result has the bits of one process.

Memory is bounded by the weights, ``LOGITS`` and ``ACTIVATIONS``, whatever the text, the context and
the vocabulary.

**Divergence.** With the laws p of the tuned model and q of the base model at a position,

    KL(p || q) = sum_v p_v (log p_v - log q_v)       nats,

averaged over the scored tokens of documents. It is a measurement on these documents, not a bound.
Both models read the same rows (B, T); logits are compared in blocks (N, V).
"""

import math
from array import array
from collections import deque
from collections.abc import Iterable, Iterator
from itertools import chain
from operator import itemgetter
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from fenchel.choice import Choice
from fenchel.data import (
    Document,
    Ids,
    PackedBatches,
    ProgressCallback,
    TextTokenizer,
    open_text,
    windows,
)
from fenchel.data.packing import IGNORED
from fenchel.generation.kv_cache import KVCache
from fenchel.model import ModelConfig, Transformer, evaluating
from fenchel.torch_internals import off_mps


class Sharing(Protocol):
    """The processes that share an evaluation."""

    @property
    def rank(self) -> int:
        """The number of this process, from 0."""

    @property
    def size(self) -> int:
        """How many there are."""

    def gather(self, value: Any) -> list[Any]:
        """The plain value of every process, by rank."""


class Score(NamedTuple):
    """Result of ``score``; the loss is in nats per token."""

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
    stride: int | None = None,
    limit: int | None = None,
    batch: int = 32,
    progress: ProgressCallback | None = None,
    shared: Sharing | None = None,
) -> Score:
    """Evaluate a model on ``ids``, of which all but the first spell ``bytes`` bytes.

    ``limit`` is the largest number of targets; the bytes of a part of the text are estimated in
    proportion to its targets. ``model`` maps ids (B, T) to logits (B, T, V).

    >>> class Uniform(nn.Module):
    ...     def forward(self, ids: Tensor) -> Tensor:
    ...         return torch.zeros(*ids.shape, 256)
    >>> round(score(Uniform(), np.arange(9), bytes=8, context=4).bits_per_byte, 4)
    8.0
    """
    if bytes < 1:
        raise ValueError(f"bytes={bytes} should be those that the targets spell, at least 1.")
    part = ids if limit is None else ids[: limit + 1]
    blocks, sums = list[tuple[int, int]](), list[Tensor]()
    for number, logits_NV, targets_N in predictions(
        model, part, context=context, stride=stride, batch=batch, progress=progress, shared=shared
    ):
        blocks.append((number, len(targets_N)))
        sums.append(_loss_sum(logits_NV, targets_N))
    total, count = 0.0, 0
    numbers = torch.stack(sums).tolist() if sums else []  # one wait for the device
    found = [(*block, [total]) for block, total in zip(blocks, numbers, strict=True)]
    for _, targets, (loss_sum,) in _in_order(found, shared):
        total += loss_sum
        count += targets
    loss = _number(total / count)
    share = bytes * count / (len(ids) - 1)
    return Score(loss, _exp(loss), total / (share * math.log(2.0)), count)


@torch.no_grad()
def score_documents(
    model: Transformer,
    documents: PackedBatches,
    *,
    bytes: int,
    limit: int | None = None,
    progress: ProgressCallback | None = None,
) -> Score:
    """``score`` of documents, each read without the others, at the tokens that are scored.

    ``bytes`` are those of the text that these tokens spell. With a ``limit`` rows are read until
    they have that many targets.

    >>> from fenchel.data import DocumentIds
    >>> model = Transformer(ModelConfig(vocabulary=9, context=8, width=8, heads=1, layers=1))
    >>> documents = DocumentIds(np.arange(7), np.array([0, 4, 7]))
    >>> rows = PackedBatches(documents, batch=1, context=8, seed=0)
    >>> score_documents(model, rows, bytes=5).tokens
    5
    """
    total, count = 0.0, 0
    pairs = document_predictions(model, documents, limit=limit, progress=progress)
    for logits_NV, targets_N in pairs:
        total += float(_loss_sum(logits_NV, targets_N))
        count += len(targets_N)
    loss = _number(total / count)
    share = bytes * count / (documents.targets + documents.cut_off)
    return Score(loss, _exp(loss), total / (share * math.log(2.0)), count)


@torch.no_grad()
def document_predictions(
    model: Transformer,
    documents: PackedBatches,
    *,
    limit: int | None = None,
    progress: ProgressCallback | None = None,
) -> Iterator[tuple[Tensor, Tensor]]:
    """Blocks of logits (N, V) and targets (N,), row by row; every scored token once."""
    require_decoder(model)
    device, count = model.lm_head_weight.device, 0
    rows = _rows(model)
    with evaluating(model):
        for batch in documents.in_order():
            inputs, targets, segments = batch.to(device)
            scored = targets != IGNORED
            x_NM = model(inputs, segments_BT=segments, return_hidden=True)[scored]
            y_N = targets[scored]
            for x, y in zip(torch.split(x_NM, rows), torch.split(y_N, rows), strict=True):
                yield model.logits(x), y
            count += len(y_N)
            if progress is not None:
                progress("reading", count, documents.targets)
            if limit is not None and count >= limit:
                return


class ChoiceScore(NamedTuple):
    """A model on a text, its prediction p being the weights of a choice map."""

    loss: float
    """Mean Fenchel-Young loss per target."""
    accuracy: float
    """Share of targets that have the largest logit."""
    support: float
    """Mean number of tokens with p > 0."""
    uncovered: float
    """Share of targets with p = 0."""
    perplexity: float
    """exp of the mean of -log p(target); infinite if any target is uncovered."""
    bits_per_byte: float
    tokens: int


@torch.no_grad()
def score_choice(
    model: nn.Module,
    ids: Ids,
    *,
    choice: Choice,
    bytes: int,
    context: int,
    stride: int | None = None,
    limit: int | None = None,
    batch: int = 32,
    shared: Sharing | None = None,
) -> ChoiceScore:
    """``score`` of a model whose prediction is ``choice.weights(logits)``."""
    part = ids if limit is None else ids[: limit + 1]
    blocks: list[Block] = []
    for number, logits_NV, targets_N in predictions(
        model, part, context=context, stride=stride, batch=batch, shared=shared
    ):
        p_NV = choice.weights(logits_NV.float())
        p_N = p_NV.gather(-1, targets_N.unsqueeze(-1)).squeeze(-1)
        measures = (
            choice.loss(logits_NV.float(), targets_N),
            logits_NV.argmax(-1) == targets_N,
            (p_NV > 0).sum(-1),
            p_N == 0,
            -p_N.log(),
        )
        values = torch.stack([_sum(m) for m in measures]).tolist()
        blocks.append((number, len(targets_N), values))
    sums, count = torch.zeros(5, dtype=torch.float64), 0
    for _, targets, values in _in_order(blocks, shared):
        sums += torch.tensor(values, dtype=torch.float64)
        count += targets
    loss, accuracy, support, uncovered, nats = (sums / count).tolist()
    _number(loss)
    bits = nats * (len(ids) - 1) / (bytes * math.log(2.0))
    return ChoiceScore(loss, accuracy, support, uncovered, _exp(nats), bits, count)


Block = tuple[int, int, list[float]]
"""The number of a batch of windows, the targets of a block of it, and sums over them."""


def _in_order(blocks: list[Block], shared: Sharing | None) -> list[Block]:
    """The blocks of all processes, in the order of the text."""
    if shared is None:
        return blocks
    return sorted(chain.from_iterable(shared.gather(blocks)), key=itemgetter(0))  # stable


def _loss_sum(logits_NV: Tensor, targets_N: Tensor) -> Tensor:
    wide = torch.promote_types(logits_NV.dtype, torch.float32)
    return _sum(cross_entropy(logits_NV.to(wide), targets_N, reduction="none"))


def _sum(x_N: Tensor) -> Tensor:
    """The sum in float64."""
    return off_mps(x_N).sum(dtype=torch.float64)


def _number(loss: float) -> float:
    """The loss, refused if it is nan: then a logit is."""
    if math.isnan(loss):
        raise ValueError(
            "the model's logits are not numbers on this text; its weights or settings overflow."
        )
    return loss


LOGITS = {"cpu": 1 << 24, "cuda": 1 << 26}
"""The most logits in memory at once: 64 MiB in float32, and 256 MiB to keep a GPU busy."""
ACTIVATIONS = 1 << 26
"""About the most numbers of a layer in memory at once."""


@torch.no_grad()
def predictions(
    model: nn.Module,
    ids: Ids,
    *,
    context: int,
    stride: int | None = None,
    batch: int = 32,
    progress: ProgressCallback | None = None,
    shared: Sharing | None = None,
) -> Iterator[tuple[int, Tensor, Tensor]]:
    """The number of a batch of windows, and of blocks of it logits (N, V) and targets (N,).

    Every id but the first is a target once. A window of a Transformer is read in slices of its
    positions, with a KV cache between them, and the logits are computed for a block of positions at
    a time: the memory does not grow with the text, and with the vocabulary only where one row has
    more than ``LOGITS``. Of several processes each has its own batches. Every one makes equally
    many passes, of which the last may not count: where a model is divided, a pass needs all.
    """
    rank, size = (0, 1) if shared is None else (shared.rank, shared.size)
    stride = default_stride(context) if stride is None else stride
    if isinstance(model, Transformer):
        require_decoder(model)
        T = min(context, max(1, len(ids) - 1))
        batch = max(1, min(batch, _slice(model.config, T) // T))
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    done, number = 0, -1
    with evaluating(model):
        for number, window in enumerate(windows(ids, context=context, stride=stride, batch=batch)):
            if number % size == rank:
                for logits_NV, targets_N in _blocks(model, *(x.to(device) for x in window)):
                    yield number, logits_NV, targets_N
            if progress is not None:
                done += int(window.scored.sum())
                progress("reading", done, len(ids) - 1)
        if rank > number % size:  # the others read the last batches meanwhile
            deque(_blocks(model, *(x.to(device) for x in window)), maxlen=0)


def default_stride(context: int) -> int:
    """How far the next window begins after a window of ``context`` tokens: half of it."""
    return max(1, context // 2)


def _blocks(
    model: nn.Module, inputs_BT: Tensor, targets_BT: Tensor, scored_BT: Tensor
) -> Iterator[tuple[Tensor, Tensor]]:
    """Logits and targets of the scored positions of a batch, in bounded memory."""
    if not isinstance(model, Transformer):
        yield model(inputs_BT)[scored_BT], targets_BT[scored_BT]
        return
    rows = _rows(model)
    for part, x_BtM in _hidden(model, inputs_BT):
        scored_Bt = scored_BT[:, part]
        x_NM, targets_N = x_BtM[scored_Bt], targets_BT[:, part][scored_Bt]
        for x, y in zip(torch.split(x_NM, rows), torch.split(targets_N, rows), strict=True):
            yield model.logits(x), y


def _rows(model: Transformer) -> int:
    """Positions whose logits are in memory at once."""
    device = model.lm_head_weight.device.type
    return max(1, LOGITS.get(device, LOGITS["cpu"]) // model.config.vocabulary)


def _hidden(model: Transformer, inputs_BT: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """The inputs of the LM head at a slice of the positions, (B, t, M)."""
    (B, T), table = inputs_BT.shape, model.lm_head_weight
    size = max(1, _slice(model.config, T) // B)
    if size >= T:
        yield slice(0, T), model(inputs_BT, return_hidden=True)
        return
    cache = KVCache(model.config, batch=B, positions=T, dtype=table.dtype, device=table.device)
    for start in range(0, T, size):
        part = slice(start, start + size)
        yield part, model(inputs_BT[:, part], cache=cache, return_hidden=True)


def _slice(config: ModelConfig, S: int) -> int:
    """Positions per pass: the MLP and the scores against S keys stay within ``ACTIVATIONS``."""
    return max(16, ACTIVATIONS // max(3 * config.mlp_width, config.heads * S))


def require_decoder(model: Transformer) -> None:
    """Raises for a model that does not predict the next token of a text."""
    if model.config.kind != "decoder":
        raise ValueError(
            f"a model of kind={model.config.kind!r} does not predict the next token of a text, so "
            "it has no loss or perplexity on one; use a decoder."
        )


def _exp(loss: float) -> float:
    return math.exp(loss) if loss < 700.0 else math.inf  # math.exp raises on overflow


def text_ids(
    tokenizer: TextTokenizer,
    source: str,
    *,
    limit: int | None = None,
    progress: ProgressCallback | None = None,
) -> tuple[Ids, int]:
    """Ids of a text and the bytes that all but the first spell.

    The tokenizer's template begins it (``begin_ids``). Between two documents stand the end token
    and the tokens that begin a text, or one of them if they are the same. With a
    ``limit`` only as many documents are read as give that many targets, and the result is truncated
    by ``truncate_ids``.
    """
    text = open_text(source)
    documents = text.documents()
    return document_ids(tokenizer, documents, text.size, limit=limit, progress=progress)


def document_ids(
    tokenizer: TextTokenizer,
    documents: Iterable[Document],
    total: int,
    *,
    limit: int | None = None,
    progress: ProgressCallback | None = None,
) -> tuple[Ids, int]:
    """``text_ids`` of documents, ``total`` being about their size in bytes."""
    begin, size = tokenizer.begin_ids, 0
    between = [tokenizer.end_id] if tokenizer.has_end else []
    between += begin if begin != between else []
    ids = array("I", begin)
    for document in documents:
        ids.extend(between if size and not document.continues else ())
        ids.extend(tokenizer.encode(document.text))
        size += len(document.text.encode())
        if progress is not None:
            progress("encoding", min(size, total), total)
        if limit is not None and len(ids) > limit:
            break
    if progress is not None:
        progress("encoding", total, total)
    size -= tokenizer.spelled_bytes(ids[:1])
    return truncate_ids(np.array(ids, dtype=np.uint32), max(1, size), limit)


def truncate_ids(ids: Ids, bytes: int, limit: int | None) -> tuple[Ids, int]:
    """The ids up to target number ``limit`` and their share of the bytes; all for None.

    >>> truncate_ids(np.arange(11), 40, 5)
    (array([0, 1, 2, 3, 4, 5]), 20)
    """
    if limit is not None and limit < 1:
        raise ValueError(f"{limit} tokens leave nothing to predict; give at least 1.")
    count = len(ids) - 1
    if limit is None or limit >= count:
        return ids, bytes
    return ids[: limit + 1], max(1, round(bytes * limit / count))


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

    >>> from fenchel.data import DocumentIds
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
