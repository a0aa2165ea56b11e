"""Baselines without a neural network: bits per byte of bzip2 and of an n-gram model of bytes.

``bzip2_bits`` is the compressed size of the text itself. ``ngram_bits`` predicts each byte w
from the k = order bytes h before it by counts in a training text, mixed with the prediction
from one byte less (Witten and Bell, 1991, method C):

    p_k(w | h)  = (c(hw) + T(h) p_{k-1}(w | h')) / (c(h) + T(h))
    p_k         = p_{k-1}                             if h does not occur in training
    p_{-1}(w)   = 1 / 256

c(hw) counts w after h, c(h) = sum_w c(hw), T(h) is how many different bytes followed h, and
h' is h without its first byte. Each p_k sums to 1 over w. The bits are the mean of
-log2 p_order over all bytes of the test text; the first bytes have a shorter context.

A string of k + 1 bytes is one number of 64 bits, so counting is sorting: O(n log n) per order.
"""

import bz2
from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]

_BYTE = np.uint64(8)


def bzip2_bits(text: bytes) -> float:
    """Bits per byte of ``text`` compressed by bzip2 -9.

    >>> bzip2_bits(b"abcd" * 1000) < 0.2
    True
    """
    _require_text(text)
    return 8 * len(bz2.compress(text, 9)) / len(text)


def ngram_bits(train: bytes, test: bytes, order: int = 5) -> float:
    """Bits per byte of ``test`` under the model of ``order`` bytes of context counted in ``train``.

    >>> round(ngram_bits(b"ab" * 500, b"ab" * 50, order=1), 2)
    0.01
    """
    _require_text(test)
    if not 0 <= order <= 7:
        raise ValueError(f"order={order} is outside 0 to 7: a byte and its context fill 64 bits.")
    train_bytes, test_bytes = (np.frombuffer(text, np.uint8) for text in (train, test))
    p = np.full(len(test_bytes), 1 / 256)
    for k in range(order + 1):
        p[k:] = _refine(p[k:], _strings(train_bytes, k + 1), _strings(test_bytes, k + 1))
    return float(-np.log2(p).mean())


def _strings(text: Array, length: int) -> Array:
    """Every string of ``length`` bytes as a number: (N,) -> (N - length + 1,)."""
    count = max(0, len(text) - length + 1)
    code = np.zeros(count, np.uint64)
    for place in range(length):
        code = (code << _BYTE) | text[place : place + count].astype(np.uint64)
    return code


def _refine(p: Array, train: Array, test: Array) -> Array:
    """p_{k-1} to p_k for the strings hw of ``test``, by counts of those of ``train``: all (N,)."""
    if not len(train):
        return p
    strings, c_hw = np.unique(train, return_counts=True)
    contexts, first = np.unique(strings >> _BYTE, return_index=True)  # strings are sorted
    c_h = np.add.reduceat(c_hw, first)
    T_h = np.diff(np.append(first, len(strings)))

    at, present = _look_up(strings, test)
    count = np.where(present, c_hw[at], 0)
    at, present = _look_up(contexts, test >> _BYTE)
    return np.where(present, (count + T_h[at] * p) / (c_h[at] + T_h[at]), p)


def _look_up(table: Array, keys: Array) -> tuple[Array, Array]:
    """The index of each key in a sorted table, and whether it is there."""
    at = np.minimum(np.searchsorted(table, keys), len(table) - 1)
    return at, table[at] == keys


def _require_text(text: bytes) -> None:
    if not text:
        raise ValueError("bits per byte of an empty text are not defined; give at least one byte.")
