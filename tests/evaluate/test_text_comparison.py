"""fenchel/evaluate/text.py: what may stand side by side."""

import math

import pytest

from fenchel.data import train_tokenizer
from fenchel.evaluate import Evaluation, Score, compare, fingerprint


def reading(name: str, pieces: int, *, tokenizer: str, text: str = "hello world") -> Evaluation:
    """ "hello world" at 11 nats, cut into so many pieces."""
    loss = 11.0 / pieces
    score = Score(loss, math.exp(loss), 11.0 / (11 * math.log(2.0)), pieces)
    return Evaluation(name, score, tokenizer, text)


FOUR = reading("four", 4, tokenizer="pieces")
ELEVEN = reading("eleven", 11, tokenizer="characters")


@pytest.mark.parametrize("by", ["perplexity", "loss"])
def test_perplexities_of_different_tokenizers_are_refused_with_bits_offered(by: str) -> None:
    assert FOUR.score.perplexity == pytest.approx(15.64, abs=0.005)
    assert ELEVEN.score.perplexity == pytest.approx(2.72, abs=0.005)
    with pytest.raises(ValueError) as error:
        compare(FOUR, ELEVEN, by=by)
    told = str(error.value)
    assert "different tokenizers" in told
    assert "bits_per_byte: 1.4427 against 1.4427" in told
    assert "\n" not in told


def test_bits_per_byte_compare_across_tokenizers() -> None:
    found = compare(FOUR, ELEVEN)
    assert found == ("bits_per_byte", found.first, found.second, 0.0)
    assert found.first == pytest.approx(1.4427, abs=5e-5)


def test_perplexities_of_one_tokenizer_compare() -> None:
    other = reading("other", 11, tokenizer="pieces")
    assert compare(FOUR, other, by="perplexity").difference == pytest.approx(15.64 - 2.72, abs=0.01)


def test_two_texts_are_never_compared() -> None:
    with pytest.raises(ValueError, match="one text"):
        compare(FOUR, reading("x", 4, tokenizer="pieces", text="another"))
    with pytest.raises(ValueError, match="bits_per_byte, loss"):
        compare(FOUR, FOUR, by="size")


def test_fingerprints_of_different_tokenizers_differ() -> None:
    texts = ["the sea shore and the sea shells of the shore"] * 3
    one, same, other = (train_tokenizer(texts, size) for size in (265, 265, 270))
    assert fingerprint(one) == fingerprint(same) != fingerprint(other)
