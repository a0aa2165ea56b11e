"""Baselines without a neural network: bits per byte of bzip2 and of an n-gram model of bytes.

``bzip2_bits`` is the compressed size of the text itself. ``ngram_bits`` predicts each byte w
from the k = order bytes h before it by counts in a training text, mixed with the prediction
from a context one byte shorter (Witten and Bell, 1991, method C):

    p_k(w | h)  = (c(hw) + T(h) p_{k-1}(w | h')) / (c(h) + T(h))
    p_k         = p_{k-1}                             if h does not occur in training
    p_{-1}(w)   = 1 / 256

c(hw) counts w after h, c(h) = sum_w c(hw), T(h) is how many different bytes followed h, and
h' is h without its first byte. Each p_k sums to 1 over w. The bits are the mean of
-log2 p_order over all bytes of the test text; the first bytes have a shorter context.

A string of bytes is one number of 64 bits, so counting is sorting. Both texts are sorted once, by
the order + 1 bytes from each place: shorter strings are then sorted too, since they are the first
bytes of longer ones, but for those at the end of the text, which are inserted.
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
    table, ending = _sorted_strings(train, order + 1)
    codes = _strings(test, order + 1)
    starts = np.argsort(codes)
    codes = codes[starts]
    p = np.full(len(test), 1 / 256)
    for k in range(order + 1):
        cut = _BYTE * np.uint64(order - k)  # what a string of order + 1 bytes has beyond k + 1
        known, more = table >> cut, np.sort(ending[: max(0, len(ending) - k)] >> cut)
        known = np.insert(known, np.searchsorted(known, more), more)
        inside = starts < len(test) - k
        at = starts[inside] + k
        p[at] = _refine(p[at], known, codes[inside] >> cut)
    return float(-np.log2(p).mean())


def _strings(text: bytes, length: int) -> Array:
    """The ``length`` bytes from each place as one number, with zeros beyond the end: (N,)."""
    padded = np.frombuffer(text + bytes(length), np.uint8)
    code = np.zeros(len(text), np.uint64)
    for place in range(length):
        code = (code << _BYTE) | padded[place : place + len(text)]
    return code


def _sorted_strings(text: bytes, length: int) -> tuple[Array, Array]:
    """The strings of ``length`` bytes, sorted, and the shorter ones at the end, longest first."""
    codes = _strings(text, length)
    whole = max(0, len(text) - length + 1)
    return np.sort(codes[:whole]), codes[whole:]


def _refine(p: Array, train: Array, test: Array) -> Array:
    """p_{k-1} to p_k for the strings hw of ``test``, by counts of those of ``train``; sorted."""
    if not len(train):
        return p
    strings, c_hw = _counts(train)
    contexts, T_h = _counts(strings >> _BYTE)
    c_h = np.add.reduceat(c_hw, np.cumsum(T_h) - T_h)

    at, present = _look_up(strings, test)
    count = np.where(present, c_hw[at], 0)
    at, present = _look_up(contexts, test >> _BYTE)
    return np.where(present, (count + T_h[at] * p) / (c_h[at] + T_h[at]), p)


def _counts(ordered: Array) -> tuple[Array, Array]:
    """The different numbers of a sorted array, and how often each occurs."""
    first = np.flatnonzero(np.concatenate([[True], ordered[1:] != ordered[:-1]]))
    return ordered[first], np.diff(np.append(first, len(ordered)))


def _look_up(table: Array, keys: Array) -> tuple[Array, Array]:
    """The index of each key in a sorted table, and whether it is there."""
    at = np.minimum(np.searchsorted(table, keys), len(table) - 1)
    return at, table[at] == keys


def _require_text(text: bytes) -> None:
    if not text:
        raise ValueError("bits per byte of an empty text are not defined; give at least one byte.")
