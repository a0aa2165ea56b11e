"""Comparison of two models on one text.

Perplexity depends on the tokenizer: at 11 nats, "hello world" has perplexity 15.64 as four tokens
and 2.72 as eleven characters. Bits per byte divide by the bytes of the text, which are the same for
both: 1.443. Loss and perplexity are therefore compared only within one tokenizer, bits per byte
across tokenizers, and no measure across two texts.
"""

from dataclasses import dataclass
from hashlib import sha256
from typing import NamedTuple

from fenchel.data import TextTokenizer
from fenchel.evaluate.score import ChoiceScore, Score

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
