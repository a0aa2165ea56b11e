"""Attention weights a block of rows at a time, so that no n by n matrix is ever held.

    p = choice.weights(scale q k^T, log_prior)          one block: (B, H, t, s)

A block has some queries (rows) and the keys any of them can see, as the prior's ``reach`` tells:
under a causal prior half of the work is never done. Its size is chosen for a fixed budget of
numbers, so memory is O(n d) and the multiplications stay large. Weights that fit in one block are
kept; otherwise every pass computes them again.

Grouped heads: k and v may have G heads for the H of q, G dividing H.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fenchel.attention import Prior
from fenchel.attention.shapes import four
from fenchel.choice import Choice, Hard

# Numbers in a block: on a CPU what stays near the cores, on a GPU what keeps all of it busy.
BUDGET, GPU_BUDGET = 1 << 21, 1 << 26


class Block(NamedTuple):
    """Some rows of the weights, for queries ``rows`` and keys ``keys``."""

    rows: slice
    keys: slice
    p: Tensor
    """(B, H, t, s)."""
    s: Tensor
    """beta times the spread of the choice: its derivative is diag(s) - s s^T / sum(s)."""
    inverse: Tensor
    """1 / sum(s), and 0 for a row without any: (B, H, t, 1)."""
    heaviest: Tensor
    """The key of largest s: (B, H, t, 1)."""

    def turned(self, dz: Tensor) -> Tensor:
        """The move of the weights when the scores move by dz, which is overwritten.

        ``Choice.jacobian_product`` with s kept from product to product. A common shift of dz does
        nothing; the one that makes the heaviest key stand still keeps saturated rows exact, where
        the plain difference of two large numbers would leave rounding for an answer.
        """
        index = self.heaviest.expand(*dz.shape[:-1], 1)
        dz -= dz.gather(-1, index)
        dz *= self.s
        return dz.addcmul_(self.s, dz.sum(-1, keepdim=True) * self.inverse, value=-1.0)


class Rows:
    """The weights of q (B, H, T, D) on k (B, G, S, D), to be walked through block by block."""

    def __init__(
        self,
        q: Tensor,
        k: Tensor,
        choice: Choice,
        prior: Prior | None,
        scale: float,
        budget: int | None = None,
    ) -> None:
        self.q, self.k, self.choice, self.prior, self.scale = q, k, choice, prior, scale
        self.B, self.H, self.T, _ = q.shape
        self.S = k.shape[2]
        self.scaled_q, self.scaled_k = scale * q, scale * k
        if prior is not None:
            prior.check(self.B, self.H, self.T, self.S)
        if budget is None:
            budget = BUDGET if q.device.type == "cpu" else GPU_BUDGET
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
                block = self._block(rows, keys)
                if rows == slice(0, self.T):
                    self._kept = block
                yield block

    def _reach(self, rows: slice) -> slice:
        if self.prior is None:
            return slice(0, self.S)
        shift = self.S - self.T  # the last query stands at the last key
        return slice(*self.prior.reach(rows.start + shift, rows.stop - 1 + shift, self.S))

    def _block(self, rows: slice, keys: slice) -> Block:
        p = self._weights(rows, keys)
        s = spread(self.choice, p)
        total = s.sum(-1, keepdim=True)
        inverse = torch.where(total > 0, 1.0 / total, 0.0)
        return Block(rows, keys, p, s, inverse, s.argmax(-1, keepdim=True))

    def _weights(self, rows: slice, keys: slice) -> Tensor:
        z = times(self.scaled_q[:, :, rows], self.k[:, :, keys].mT)
        if self.prior is None:
            return self.choice.weights(z)
        beta = self.choice.beta
        if isinstance(beta, Tensor) or isinstance(self.choice, Hard):
            return self.choice.weights(z, self._log_prior(rows, keys))
        # beta z + log u = beta (z + log u / beta): the prior is added where it is not 0 alone,
        # which under a causal mask is a strip along the diagonal.
        shift = self.S - self.T
        low, high = self.prior.free(rows.start + shift, rows.stop - 1 + shift, self.S)
        low, high = max(low, keys.start), min(high, keys.stop)
        if low >= high:
            low = high = keys.start
        for part in (slice(keys.start, low), slice(high, keys.stop)):
            if part.start < part.stop:
                inside = z[..., part.start - keys.start : part.stop - keys.start]
                inside += self._log_prior(rows, part) / beta
        return self.choice.weights(z)

    def _log_prior(self, rows: slice, keys: slice) -> Tensor:
        assert self.prior is not None
        return self.prior.log(
            self.T,
            self.S,
            B=self.B,
            H=self.H,
            device=self.q.device,
            dtype=self.q.dtype,
            rows=rows,
            keys=keys,
        )


class Projected(NamedTuple):
    """X brought to queries, keys and values, four axes each, and how it got there."""

    X: Tensor
    """(*lead, N, M)."""
    q: Tensor
    k: Tensor
    v: Tensor
    """(B, H, N, D), (B, G, N, D), (B, G, N, E), with B all of ``lead``."""
    W: tuple[Tensor, Tensor, Tensor]
    """W_Q, W_K, W_V: (B or 1, H or G, M, D or E)."""
    axes: tuple[int, ...]
    """``lead``, and the heads if the weights had any."""


def project(X: Tensor, W_Q: Tensor, W_K: Tensor, W_V: Tensor, *, each: bool = True) -> Projected:
    """X (..., N, M) by weights (M, D), or (..., H, M, D) where heads come before.

    ``each`` repeats grouped keys and values, so that every head has its own.
    """
    X, W_Q, W_K, W_V = wide(X, W_Q, W_K, W_V)
    shapes = ", ".join(str(tuple(w.shape)) for w in (W_Q, W_K, W_V))
    if X.dim() < 2 or any(w.dim() < 2 or w.shape[-2] != X.shape[-1] for w in (W_Q, W_K, W_V)):
        raise ValueError(
            "self-attention needs X (..., N, M) and weights (..., M, D); got X "
            f"{tuple(X.shape)} and weights {shapes}."
        )
    headed = W_Q.dim() > 2
    W = [w if w.dim() > 2 else w[None] for w in (W_Q, W_K, W_V)]
    H, G = W[0].shape[-3], W[1].shape[-3]
    if H % G or W[2].shape[-3] != G or W_Q.shape[-1] != W_K.shape[-1]:
        raise ValueError(
            "W_Q and W_K must be equally wide, and heads of keys divide heads of queries; got "
            f"weights {shapes}."
        )
    if each and G < H:
        W = [W[0], *(w.repeat_interleave(H // G, -3) for w in W[1:])]
    lead = _broadcast(X.shape[:-2], *(w.shape[:-3] for w in W))
    X = X.expand(*lead, *X.shape[-2:])
    q, k, v = (four(X.unsqueeze(-3) @ w) for w in W)
    flat = [w[None] if w.dim() == 3 else w.expand(*lead, *w.shape[-3:]).flatten(0, -4) for w in W]
    return Projected(X, q, k, v, (flat[0], flat[1], flat[2]), (*lead, H) if headed else lead)


def times(x: Tensor, y: Tensor) -> Tensor:
    """x y with H heads of x for G of y: (..., H, t, M), (..., G, M, N) -> (..., H, t, N)."""
    H, t, M = x.shape[-3:]
    G = y.shape[-3]
    if G == H:
        return product(x, y)
    out = product(x.reshape(*x.shape[:-3], G, H // G * t, M), y)
    return out.reshape(*out.shape[:-3], H, t, y.shape[-1])


def pulled(x: Tensor, g: Tensor, G: int) -> Tensor:
    """x^T g summed over a group: (..., H, t, s), (..., H, t, E) -> (..., G, s, E)."""
    H, t, s = x.shape[-3:]
    if G == H:
        return product(x.mT, g)
    R = H // G
    x = x.reshape(*x.shape[:-3], G, R * t, s)
    return product(x.mT, g.reshape(*g.shape[:-3], G, R * t, g.shape[-1]))


def product(x: Tensor, y: Tensor) -> Tensor:
    """x @ y; where nothing broadcasts, without the dozen small steps matmul takes to find out."""
    lead, other = x.shape[:-2], y.shape[:-2]
    count = lead.numel()
    if count != other.numel():
        return x @ y
    if len(other) > len(lead):
        lead = other
    if count == 1:
        return torch.mm(x.view(x.shape[-2:]), y.view(y.shape[-2:])).view(
            *lead, x.shape[-2], y.shape[-1]
        )
    x, y = x.reshape(count, *x.shape[-2:]), y.reshape(count, *y.shape[-2:])
    return torch.bmm(x, y).view(*lead, x.shape[-2], y.shape[-1])


def spread(choice: Choice, p: Tensor) -> Tensor:
    """beta times the spread of the choice: its derivative is diag(s) - s s^T / sum(s)."""
    s, beta = choice.spread(p), choice.beta
    if isinstance(choice, Hard) or (not isinstance(beta, Tensor) and beta == 1.0):
        return s  # an infinite beta times no slope would be nan, and 1 is not worth a pass
    return beta * s


def _broadcast(*shapes: Sequence[int]) -> tuple[int, ...]:
    return tuple(torch.broadcast_shapes(*shapes))  # type: ignore[no-untyped-call]


def wide(*tensors: Tensor) -> tuple[Tensor, ...]:
    """The tensors cut off from any graph, in float32 or better."""
    dtype = tensors[0].dtype
    for x in tensors:
        dtype = torch.promote_types(dtype, x.dtype)
    dtype = torch.promote_types(dtype, torch.float32)
    return tuple(x.detach().to(dtype) for x in tensors)
