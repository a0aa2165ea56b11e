"""Evaluation of a text by one or two models, whose tokenizers may differ.

    text = open_evaluation_text("book.txt")
    first = evaluate_text(model, tokenizer, text, name="first")
    second = evaluate_text(other, other_tokenizer, text, name="second")
    compare(first.evaluation, second.evaluation)

The text of a run is ``fenchel.pipeline.own_text``: its tokens are those that it was trained on or
held out, and documents of a tuned run are read one by one. Any other text is read in windows.

**Comparison.** Perplexity depends on the tokenizer: at 11 nats, "hello world" has perplexity 15.64
as four tokens and 2.72 as eleven characters. Bits per byte divide by the bytes of the text, which
are the same for both: 1.443. Loss and perplexity are therefore compared only within one tokenizer,
bits per byte across tokenizers, and no measure across two texts.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from hashlib import sha256
from typing import Any, NamedTuple

from fenchel.choice import Choice
from fenchel.data import (
    Document,
    DocumentIds,
    Ids,
    PackedBatches,
    ProgressCallback,
    TextTokenizer,
    open_text,
)
from fenchel.evaluate.calibration import Confidence, confidence, document_confidence
from fenchel.evaluate.score import (
    ChoiceScore,
    Score,
    default_stride,
    document_ids,
    require_decoder,
    score,
    score_choice,
    score_documents,
    truncate_ids,
)
from fenchel.model import Transformer

MEASURES = ("bits_per_byte", "loss", "perplexity")


@dataclass(frozen=True)
class Evaluation:
    """The score of a model, with the tokenizer and the text it depends on."""

    name: str
    score: Score | ChoiceScore
    tokenizer: str
    """A name or a ``fingerprint``, equal for equal tokenizers."""
    text: str
    """A name or a hash of the text, equal for equal texts."""


class Comparison(NamedTuple):
    """One measure of two models; the first is better if ``difference`` is negative."""

    by: str
    first: float
    second: float
    difference: float


def compare(first: Evaluation, second: Evaluation, *, by: str = "bits_per_byte") -> Comparison:
    """One measure of both; raises ValueError if it cannot be compared.

    >>> a = Evaluation("a", Score(2.0, 7.39, 1.4, 100), tokenizer="x", text="t")
    >>> b = Evaluation("b", Score(1.0, 2.72, 1.5, 200), tokenizer="y", text="t")
    >>> round(compare(a, b).difference, 2)
    -0.1
    """
    if by not in MEASURES:
        raise ValueError(f"models are compared by {', '.join(MEASURES)}; got {by!r}.")
    if first.text != second.text:
        raise ValueError(
            f"{first.name} read {first.text} and {second.name} read {second.text}; "
            "scores are compared on one text only."
        )
    if by != "bits_per_byte" and first.tokenizer != second.tokenizer:
        bits = (first.score.bits_per_byte, second.score.bits_per_byte)
        raise ValueError(
            f"{first.name} and {second.name} have different tokenizers, so their {by} counts "
            "different pieces and cannot be compared; compare bits_per_byte: "
            f"{bits[0]:.4f} against {bits[1]:.4f}."
        )
    a, b = getattr(first.score, by), getattr(second.score, by)
    return Comparison(by, a, b, a - b)


def fingerprint(tokenizer: TextTokenizer) -> str:
    """A hash of the tokenizer's file: equal for equal tokenizers."""
    return sha256(tokenizer.to_str().encode()).hexdigest()[:16]


class SeparateDocuments(NamedTuple):
    """Documents of a tuned run, which are read one by one."""

    ids: DocumentIds
    pack: Callable[..., PackedBatches]
    """Documents to rows of ``context`` positions, or of as many as in training where it is None."""
    conversations: bool

    @property
    def number(self) -> int:
        """How many there are."""
        return len(self.ids.starts) - 1

    def first(self, bytes: int, limit: int | None) -> "tuple[SeparateDocuments, int]":
        """Those up to a number of tokens to predict, and their share of the bytes."""
        if limit is None or limit >= (count := len(self.ids.targets())):
            return self, bytes
        first, _ = self.ids.split(limit)
        return self._replace(ids=first), max(1, round(bytes * limit / count))


class EvaluationText(NamedTuple):
    """A text that one or two models are evaluated on."""

    name: str
    bytes: int
    documents: Callable[[], Iterator[Document]]
    ids: Ids | SeparateDocuments | None = None
    """Its tokens, for a model with the tokenizer of ``fingerprint``."""
    fingerprint: str = ""


class TextEvaluation(NamedTuple):
    """A model, what it read of a text, and the result."""

    model: Transformer
    ids: Ids | SeparateDocuments
    bytes: int
    context: int
    """Tokens per window, or of a document at once."""
    stride: int | None
    """Tokens between the beginnings of two windows; None where documents are read one by one."""
    evaluation: Evaluation
    left_out: int = 0
    """Tokens of answers beyond the context, which are not predicted."""

    @property
    def documents(self) -> SeparateDocuments | None:
        """The documents, where they were read one by one."""
        return self.ids if isinstance(self.ids, SeparateDocuments) else None

    def confidence(self, progress: ProgressCallback | None = None) -> Confidence:
        """Calibration on the second half of what was read, by the temperature of the first."""
        model, ids, context = self.model, self.ids, self.context
        if not isinstance(ids, SeparateDocuments):
            return confidence(model, ids, context=context, stride=self.stride, progress=progress)
        count = len(ids.ids.targets())
        if count < 4:
            raise ValueError(f"the text has {count} tokens to predict; calibration needs 4.")
        first, second = (ids.pack(half, context=context) for half in ids.ids.split(count // 2))
        return document_confidence(model, first, second, progress=progress)


def open_evaluation_text(name: str) -> EvaluationText:
    """A built-in text, a text file, a folder or a .jsonl file."""
    text = open_text(name)
    return EvaluationText(name, text.size, text.documents)


def common_text(
    text: EvaluationText,
    first: TextTokenizer,
    second: TextTokenizer,
    *,
    limit: int | None = None,
    names: tuple[str, str] = ("the first model", "the second"),
) -> EvaluationText:
    """The text for two models: where their tokenizers differ, documents and not tokens.

    ``limit`` is then the number of tokens of the first, whose text both read.
    """
    if fingerprint(first) == fingerprint(second):
        return text
    if isinstance(text.ids, SeparateDocuments) and text.ids.conversations:
        raise ValueError(
            f"{names[0]} was tuned on conversations, which are tokens of its own template, and "
            f"{names[1]} has another tokenizer; name a text with --text."
        )
    if limit is None:
        return text._replace(ids=None)
    documents: list[Document] = []
    left = limit
    for document in text.documents():
        ids = first.encode(document.text)
        if len(ids) >= left:  # a cut inside a character would decode to U+FFFD
            begin = first.decode(ids[:left]).rstrip("\ufffd")
            documents.append(document._replace(text=document.text[: len(begin)]))
            break
        documents.append(document)
        left -= len(ids)
    size = sum(len(document.text.encode()) for document in documents)
    name = f"{text.name}, its first {limit:,} tokens"
    return EvaluationText(name, size, lambda: iter(documents))


def evaluate_text(
    model: Transformer,
    tokenizer: TextTokenizer,
    text: EvaluationText,
    *,
    name: str = "model",
    limit: int | None = None,
    context: int | None = None,
    stride: int | None = None,
    choice: Choice | None = None,
    progress: ProgressCallback | None = None,
) -> TextEvaluation:
    """Evaluate a model, called ``name``, on the first ``limit`` targets of a text, or on all.

    ``context`` and ``stride`` are those of ``score``; a context beyond the model's is read by
    ``Transformer.with_context``. ``choice`` is the map whose weights are the model's predictions,
    for a softmax None.
    """
    require_decoder(model)
    trained, hashed = model.config.context, fingerprint(tokenizer)
    if context is not None and context > trained:
        model = model.with_context(context)
    elif context is not None and context < 1:
        raise ValueError(f"--context {context} should be 1 or more.")
    result: Score | ChoiceScore
    ids = text.ids if text.fingerprint == hashed else None
    if isinstance(ids, SeparateDocuments):
        if stride is not None:
            raise ValueError(
                "--stride is the distance of windows, and the documents of a tuned run are read "
                "one by one; leave it out, or name a text with --text."
            )
        ids, size = ids.first(text.bytes, limit)
        rows = ids.pack(ids.ids, context=context)
        if context is None and rows.context > trained:  # a shorter one than that of the run
            rows = ids.pack(ids.ids, context=trained)
        result = score_documents(model, rows, bytes=size, progress=progress)
        evaluation = Evaluation(name, result, hashed, text.name)
        return TextEvaluation(model, ids, size, rows.context, None, evaluation, rows.cut_off)
    context = context or trained
    stride = default_stride(context) if stride is None else stride
    if not 1 <= stride <= context:
        raise ValueError(f"--stride {stride} should be 1 to {context}, the tokens of a window.")
    if ids is not None:
        ids, size = truncate_ids(ids, text.bytes, limit)
    else:
        documents, about = text.documents(), text.bytes
        ids, size = document_ids(tokenizer, documents, about, limit=limit, progress=progress)
    options: dict[str, Any] = {"bytes": size, "context": context, "stride": stride}
    if choice is None:
        result = score(model, ids, progress=progress, **options)
    else:
        if progress is not None:
            progress("reading", 0, 0)
        result = score_choice(model, ids, choice=choice, **options)
    evaluation = Evaluation(name, result, hashed, text.name)
    return TextEvaluation(model, ids, size, context, stride, evaluation)
