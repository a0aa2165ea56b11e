"""fenchel/evaluate/baseline.py against a slow reference made of dictionaries."""

import bz2
import math
from collections import Counter, defaultdict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fenchel.data.text import open_text
from fenchel.evaluate.baseline import bzip2_bits, ngram_bits


class Slow:
    """Witten-Bell by the definition, one byte at a time."""

    def __init__(self, train: bytes, order: int) -> None:
        self.order = order
        self.after: dict[bytes, Counter[int]] = defaultdict(Counter)
        for k in range(order + 1):
            for i in range(k, len(train)):
                self.after[train[i - k : i]][train[i]] += 1

    def p(self, w: int, h: bytes) -> float:
        below = self.p(w, h[1:]) if h else 1 / 256
        if h not in self.after:
            return below
        counts = self.after[h]
        return (counts[w] + len(counts) * below) / (counts.total() + len(counts))

    def bits(self, test: bytes) -> float:
        spent = [
            -math.log2(self.p(w, test[max(0, i - self.order) : i])) for i, w in enumerate(test)
        ]
        return sum(spent) / len(spent)


few = st.lists(st.sampled_from([0, 97, 98, 99, 255]), max_size=60).map(bytes)


@given(few, few.filter(len), st.integers(0, 7))
def test_it_equals_the_definition(train: bytes, test: bytes, order: int) -> None:
    assert ngram_bits(train, test, order) == pytest.approx(Slow(train, order).bits(test), rel=1e-12)


@settings(max_examples=10)
@given(few, few, st.integers(0, 5))
def test_the_next_bytes_share_a_probability_of_one(train: bytes, h: bytes, order: int) -> None:
    slow = Slow(train, order)
    assert sum(slow.p(w, h[len(h) - min(order, len(h)) :]) for w in range(256)) == pytest.approx(1)
    spent = ngram_bits(train, h, order) * len(h) if h else 0.0
    shares = [
        2 ** (spent - ngram_bits(train, h + bytes([w]), order) * (len(h) + 1)) for w in range(256)
    ]
    assert sum(shares) == pytest.approx(1)


def test_without_training_every_byte_costs_eight_bits() -> None:
    assert ngram_bits(b"", b"anything") == 8.0


def test_what_was_seen_often_costs_little_and_more_context_helps() -> None:
    train, test = b"she sells sea shells " * 50, b"sea shells she sells"
    costs = [ngram_bits(train, test, order) for order in range(6)]
    assert costs == sorted(costs, reverse=True)
    assert costs[5] < 0.5 < 2 < costs[0]


def test_bzip2_is_the_size_of_the_compressed_text() -> None:
    text = b" ".join(b"%d" % (n * n) for n in range(50_000))  # longer than a block of bzip2 -1
    assert bzip2_bits(text) == 8 * len(bz2.compress(text, compresslevel=9)) / len(text)


def test_an_empty_text_and_an_order_out_of_reach_are_refused() -> None:
    for measure in (bzip2_bits, lambda text: ngram_bits(b"a", text)):
        with pytest.raises(ValueError, match="empty"):
            measure(b"")
    for order in (-1, 8):
        with pytest.raises(ValueError, match=f"order={order}"):
            ngram_bits(b"a", b"a", order)


def test_the_published_numbers_of_the_default_text() -> None:
    messages = [document.text.encode() for document in open_text("sotu").documents()]
    whole = b"\n".join(messages)
    assert bzip2_bits(whole) == pytest.approx(1.7744, abs=1e-4)
    cut = int(0.9 * len(whole))
    by_date = ngram_bits(whole[:cut], whole[cut : cut + 200_000])
    assert by_date == pytest.approx(1.5700, abs=1e-4)
    train = b"\f".join(m for i, m in enumerate(messages) if i % 10 != 9)
    assert ngram_bits(train, b"\f".join(messages[9::10])) == pytest.approx(1.5203, abs=1e-4)
