"""What a model must beat: two ways to predict bytes that learn in seconds.

``bzip2_bits`` is the compressed size of the text itself. ``ngram_bits`` predicts each byte w
from the k = order bytes h before it by counts in a training text, mixed with the prediction
from one byte less (Witten and Bell, 1991, method C):

    p_k(w | h)  = (c(hw) + T(h) p_{k-1}(w | h')) / (c(h) + T(h))
    p_k         = p_{k-1}                             where h was never seen
    p_{-1}(w)   = 1 / 256

c(hw) counts w after h, c(h) = sum_w c(hw), T(h) is how many different bytes followed h, and
h' is h without its first byte. Each p_k sums to 1 over w. The bits are the mean of
-log2 p_order over all bytes of the test text; the first ones see what there is before them.

A string of k + 1 bytes is one number of 64 bits, so counting is sorting: O(n log n) an order.
"""

import bz2
from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]

_BYTE = np.uint64(8)


def bzip2_bits(text: bytes) -> float:
    """Bits a byte of ``text`` takes when compressed by bzip2 -9."""
    _require_text(text)
    return 8 * len(bz2.compress(text, 9)) / len(text)


def ngram_bits(train: bytes, test: bytes, order: int = 5) -> float:
    """Bits a byte of ``test`` costs, given ``order`` bytes before it and counts in ``train``."""
    _require_text(test)
    if not 0 <= order <= 7:
        raise ValueError(f"order={order} is outside 0 to 7: a byte and its context fill 64 bits.")
    seen, asked = (np.frombuffer(text, np.uint8) for text in (train, test))
    p = np.full(len(asked), 1 / 256)
    for k in range(order + 1):
        p[k:] = _refine(p[k:], _strings(seen, k + 1), _strings(asked, k + 1))
    return float(-np.log2(p).mean())


def _strings(text: Array, length: int) -> Array:
    """Every string of ``length`` bytes as a number: (N,) -> (N - length + 1,)."""
    count = max(0, len(text) - length + 1)
    code = np.zeros(count, np.uint64)
    for place in range(length):
        code = (code << _BYTE) | text[place : place + count].astype(np.uint64)
    return code


def _refine(p: Array, seen: Array, asked: Array) -> Array:
    """p_{k-1} to p_k for the ``asked`` strings hw, by counts of the ``seen`` ones: all (N,)."""
    if not len(seen):
        return p
    strings, c_hw = np.unique(seen, return_counts=True)
    contexts, first = np.unique(strings >> _BYTE, return_index=True)  # strings are in order
    c_h = np.add.reduceat(c_hw, first)
    T_h = np.diff(np.append(first, len(strings)))

    at, found = _look_up(strings, asked)
    count = np.where(found, c_hw[at], 0)
    at, found = _look_up(contexts, asked >> _BYTE)
    return np.where(found, (count + T_h[at] * p) / (c_h[at] + T_h[at]), p)


def _look_up(table: Array, keys: Array) -> tuple[Array, Array]:
    """Where each key stands in a sorted table, and whether it does."""
    at = np.minimum(np.searchsorted(table, keys), len(table) - 1)
    return at, table[at] == keys


def _require_text(text: bytes) -> None:
    if not text:
        raise ValueError("bits per byte of an empty text are not defined; give at least one byte.")
