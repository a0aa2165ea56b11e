"""Two models on one text: which numbers may stand side by side.

The same string probability gives another perplexity under another tokenizer: at 11 nats, "hello
world" has perplexity 15.64 in four pieces and 2.72 in eleven characters. Bits per byte divide by
what does not change, the bytes of the text: 1.443 for both. So loss and perplexity are compared
within one tokenizer, bits per byte across all of them, and nothing across two texts.
"""

from dataclasses import dataclass
from hashlib import sha256
from typing import NamedTuple

from tokenizers import Tokenizer

from fenchel.evaluate.score import Score

MEASURES = ("bits_per_byte", "loss", "perplexity")


@dataclass(frozen=True)
class Evaluation:
    """A model on a text, with what the numbers depend on."""

    name: str
    score: Score
    tokenizer: str
    """A name or a fingerprint: equal when the tokenizers are."""
    text: str
    """The same of the text that was read."""


class Comparison(NamedTuple):
    """One measure of two models; ``difference`` below 0 says the first is better."""

    by: str
    first: float
    second: float
    difference: float


def compare(first: Evaluation, second: Evaluation, *, by: str = "bits_per_byte") -> Comparison:
    """The two side by side, or a ValueError that says why they may not be."""
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


def fingerprint(tokenizer: Tokenizer) -> str:
    """Equal for tokenizers whose files say the same."""
    return sha256(tokenizer.to_str().encode()).hexdigest()[:16]
