"""Attention weights a block of rows at a time, so that no n by n matrix is ever held.

    p = choice.weights(scale q k^T, log_prior)          one block: (B, H, t, s)

A block has some queries (rows) and the keys any of them can see, as the prior's ``reach`` tells:
under a causal prior half of the work is never done. Its size is chosen for a fixed budget of
numbers, so memory is O(n d) and the multiplications stay large. Weights that fit in one block are
kept; otherwise every pass computes them again.

Grouped heads: k and v may have G heads for the H of q, G dividing H.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from fenchel.attention import Prior
from fenchel.choice import Choice

BUDGET = 1 << 22  # numbers in a block: 16 MB of float32, large enough for full-speed products


class Block(NamedTuple):
    """Some rows of the weights: ``p`` is (B, H, t, s) for queries ``rows`` and keys ``keys``."""

    rows: slice
    keys: slice
    p: Tensor


class Rows:
    """The weights of q (B, H, T, D) on k (B, G, S, D), to be walked through block by block."""

    def __init__(
        self,
        q: Tensor,
        k: Tensor,
        choice: Choice,
        prior: Prior | None,
        scale: float,
        budget: int = BUDGET,
    ) -> None:
        self.q, self.k, self.choice, self.prior, self.scale = q, k, choice, prior, scale
        self.B, self.H, self.T, _ = q.shape
        self.S = k.shape[2]
        if prior is not None:
            prior.check(self.B, self.H, self.T, self.S)
        self.step = max(1, budget // max(1, self.B * self.H * self.S))
        self._kept: Block | None = None

    def __iter__(self) -> Iterator[Block]:
        if self._kept is not None:
            yield self._kept
            return
        for first in range(0, self.T, self.step):
            rows = slice(first, min(first + self.step, self.T))
            keys = self._reach(rows)
            if keys.start < keys.stop:
                block = Block(rows, keys, self._weights(rows, keys))
                if rows == slice(0, self.T):
                    self._kept = block
                yield block

    def _reach(self, rows: slice) -> slice:
        if self.prior is None:
            return slice(0, self.S)
        shift = self.S - self.T  # the last query stands at the last key
        return slice(*self.prior.reach(rows.start + shift, rows.stop - 1 + shift, self.S))

    def _weights(self, rows: slice, keys: slice) -> Tensor:
        z = times(self.q[:, :, rows] * self.scale, self.k[:, :, keys].mT)
        if self.prior is None:
            return self.choice.weights(z)
        log_prior = self.prior.log(
            self.T,
            self.S,
            B=self.B,
            H=self.H,
            device=z.device,
            dtype=z.dtype,
            rows=rows,
            keys=keys,
        )
        return self.choice.weights(z, log_prior)


def times(x: Tensor, y: Tensor) -> Tensor:
    """x y with H heads of x for G of y: (..., H, t, M), (..., G, M, N) -> (..., H, t, N)."""
    H, t, M = x.shape[-3:]
    G = y.shape[-3]
    if G == H:
        return x @ y
    out = x.reshape(*x.shape[:-3], G, H // G * t, M) @ y
    return out.reshape(*out.shape[:-3], H, t, y.shape[-1])


def pulled(x: Tensor, g: Tensor, G: int) -> Tensor:
    """x^T g summed over a group: (..., H, t, s), (..., H, t, E) -> (..., G, s, E)."""
    H, t, s = x.shape[-3:]
    if G == H:
        return x.mT @ g
    R = H // G
    x = x.reshape(*x.shape[:-3], G, R * t, s)
    return x.mT @ g.reshape(*g.shape[:-3], G, R * t, g.shape[-1])


def spread_of(choice: Choice, p: Tensor) -> Tensor:
    """beta s, so that the Jacobian of the row is diag(s) - s s^T / sum(s): (..., K)."""
    # Hard has an infinite beta and no slope; inf * 0 would be nan.
    s = choice.spread(p)
    beta = choice.beta
    return s if beta == float("inf") else beta * s


def wide(*tensors: Tensor) -> tuple[Tensor, ...]:
    """The tensors cut off from any graph, in float32 or better."""
    dtype = tensors[0].dtype
    for x in tensors:
        dtype = torch.promote_types(dtype, x.dtype)
    dtype = torch.promote_types(dtype, torch.float32)
    return tuple(x.detach().to(dtype) for x in tensors)
