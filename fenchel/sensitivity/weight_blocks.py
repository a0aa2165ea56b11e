"""Attention weights a block of rows at a time, so that no n by n matrix is ever held.

    p = choice.weights(z, log_prior),  z = scale q k^T        one block: (N, t, s) with N = B H

Under a cap c the scores are c tanh(z / c), and of a move dz of what is capped 1 - tanh(z / c)^2 is
left, entry by entry: the ``slope`` of a block.

A block has some queries (rows) and the keys that the prior's ``key_range`` gives for them:
under a causal prior half of the work is never done. Its size is chosen for a fixed budget of
numbers, so memory is O(n d) and the multiplications stay large. Weights that fit in one block are
kept; otherwise every pass computes them again.

Keys and values shared by a group of heads are repeated, O(n d) numbers, so that every product is
one batched multiplication.
"""

import math
from collections.abc import Iterator, Sequence
from copy import copy
from typing import NamedTuple

import torch
from torch import Tensor

from fenchel.attention import AttentionSpec
from fenchel.attention.reference import cap, cap_slope
from fenchel.attention.shapes import four_axes
from fenchel.choice import Choice

# Numbers in a block: on a CPU what stays near the cores, on a GPU what keeps all of it busy.
BUDGET, GPU_BUDGET = 1 << 21, 1 << 26
_SPREAD = 1e-4  # a row whose lighter keys weigh more than this loses four digits at the most


class WeightBlock(NamedTuple):
    """Some rows of the weights, for queries ``rows`` and keys ``keys``; N is B H."""

    rows: slice
    keys: slice
    p: Tensor
    """(N, t, s)."""
    s: Tensor
    """beta times the spread of the choice: its derivative is diag(s) - s s^T / sum(s)."""
    inverse: Tensor
    """1 / sum(s), and 0 for a row without any: (N, t, 1)."""
    heaviest: Tensor | None
    """The key of largest s, (N, t, 1); None where no row is near to one-hot."""
    slope: Tensor | None = None
    """What a cap leaves of a move of the scores, (N, t, s); None without one."""

    def turned(self, dz: Tensor) -> Tensor:
        """The move of the weights when the scores move by dz (N, t, s), which is overwritten.

        ``Choice.jacobian_product`` with s kept from product to product. A common shift of dz does
        nothing; the one that makes the heaviest key stand still keeps saturated rows exact, where
        the plain difference of two large numbers would leave rounding for an answer.
        """
        if self.heaviest is not None:
            dz -= dz.gather(-1, self.heaviest)
        dz *= self.s
        return dz.addcmul_(self.s, dz.sum(-1, keepdim=True) * self.inverse, value=-1.0)


class WeightBlocks:
    """The weights of q (B, H, T, D) on k (B, H, S, D), to be walked through block by block."""

    def __init__(
        self,
        q: Tensor,
        k: Tensor,
        spec: AttentionSpec,
        budget: int | None = None,
    ) -> None:
        self.spec, self.choice, self.prior = spec, spec.choice, spec.prior
        self.scale, self.softcap = spec.scale_for(q.shape[-1]), spec.softcap
        prior, scale = self.prior, self.scale
        self.B, self.H, self.T, _ = q.shape
        self.S = k.shape[2]
        if prior is not None:
            prior.check(self.B, self.H, self.T, self.S)
        self.q, self.k = flat(q), flat(k)
        self.scaled_q, self.scaled_k = scale * self.q, scale * self.k
        if budget is None:
            budget = BUDGET if q.device.type == "cpu" else GPU_BUDGET
        self.step = max(1, budget // max(1, self.B * self.H * self.S))
        self._kept: WeightBlock | None = None

    @property
    def whole(self) -> bool:
        """Whether one block holds all rows, and is kept."""
        return self.step >= self.T

    def single(self) -> "WeightBlocks":
        """The same weights in float32: rounded from what is kept, or computed so."""
        other = copy(self)
        for name in ("q", "k", "scaled_q", "scaled_k"):
            setattr(other, name, getattr(self, name).float())
        if self.whole:
            for block in self:
                p, s, inverse = (x.float() for x in (block.p, block.s, block.inverse))
                slope = None if block.slope is None else block.slope.float()
                other._kept = block._replace(p=p, s=s, inverse=inverse, slope=slope)
        return other

    @property
    def lead(self) -> tuple[int, int]:
        """(B, H), which stand as one axis in every block."""
        return self.B, self.H

    def __iter__(self) -> Iterator[WeightBlock]:
        if self._kept is not None:
            yield self._kept
            return
        for first in range(0, self.T, self.step):
            rows = slice(first, min(first + self.step, self.T))
            keys = self._reach(rows)
            if keys.start < keys.stop:
                block = self._block(rows, keys)
                if self.whole:
                    self._kept = block = _eased(block)
                yield block

    def ready(self) -> Sequence[WeightBlock]:
        """The blocks if all are kept; others come with every key of theirs to be shifted by."""
        return tuple(self) if self.whole else ()

    def _reach(self, rows: slice) -> slice:
        if self.prior is None:
            return slice(0, self.S)
        shift = self.S - self.T  # the last query stands at the last key
        return slice(*self.prior.key_range(rows.start + shift, rows.stop - 1 + shift, self.S))

    def _block(self, rows: slice, keys: slice) -> WeightBlock:
        weights, slope = self._weights(rows, keys)
        p, s = flat(weights), flat(spread(self.choice, weights))
        total = s.sum(-1, keepdim=True)
        inverse = torch.where(total > 0, 1.0 / total, 0.0)
        return WeightBlock(rows, keys, p, s, inverse, s.argmax(-1, keepdim=True), slope)

    def _weights(self, rows: slice, keys: slice) -> tuple[Tensor, Tensor | None]:
        """The weights (B, H, t, s), and the slope of the cap (N, t, s) where there is one."""
        z = cap(torch.bmm(self.scaled_q[:, rows], self.k[:, keys].mT), self.softcap)
        slope = cap_slope(z, self.softcap)  # before the prior joins the scores
        return self._chosen(z.view(self.B, self.H, *z.shape[1:]), rows, keys), slope

    def _chosen(self, z: Tensor, rows: slice, keys: slice) -> Tensor:
        """The weights for scores z (B, H, t, s), which may be overwritten."""
        if self.prior is None:
            return self.choice.weights(z)
        beta = self.choice.beta
        if isinstance(beta, Tensor) or beta == math.inf:  # under Hard a prior shifts no score
            return self.choice.weights(z, self._log_prior(rows, keys))
        # beta z + log u = beta (z + log u / beta): the prior is added where it is not 0 alone,
        # which under a causal mask is a strip along the diagonal.
        shift = self.S - self.T
        low, high = self.prior.zero_range(rows.start + shift, rows.stop - 1 + shift, self.S)
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


def _eased(block: WeightBlock) -> WeightBlock:
    """A block that will be used often, without what its rows turn out not to need."""
    s = block.s
    # A row with one key to choose cannot move: its s counts for nothing, and neither does rounding.
    sure = (s > 0).sum(-1, keepdim=True) <= 1
    s = s.masked_fill(sure, 0.0)
    rest = (s.sum(-1, keepdim=True) - s.amax(-1, keepdim=True)) * block.inverse
    settled = bool((sure | (rest > _SPREAD)).all())
    return block._replace(s=s, heaviest=None if settled else block.heaviest)


class Projections(NamedTuple):
    """X brought to queries, keys and values, four axes each, and how it got there."""

    X: Tensor
    """(*lead, N, M)."""
    q: Tensor
    k: Tensor
    v: Tensor
    """(B, H, N, D), (B, H, N, D), (B, H, N, E), with B all of ``lead``."""
    W: tuple[Tensor, Tensor, Tensor]
    """W_Q, W_K, W_V: (B or 1, H, M, D or E)."""
    axes: tuple[int, ...]
    """``lead``, and the heads if the weights had any."""
    rotations: Tensor | None = None
    """R_i of each position, (N, D, D), already applied to q and k; None without any."""


def project(X: Tensor, W_Q: Tensor, W_K: Tensor, W_V: Tensor) -> Projections:
    """X (..., N, M) times weights (M, D), or (..., H, M, D) with an axis of heads.

    Weights of keys and values that several heads share are repeated, one copy per head.
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
    W = [repeat_heads(w, H, -3) for w in W]
    lead = _broadcast(X.shape[:-2], *(w.shape[:-3] for w in W))
    X = X.expand(*lead, *X.shape[-2:])
    q, k, v = (four_axes(X.unsqueeze(-3) @ w) for w in W)
    flat = [w[None] if w.dim() == 3 else w.expand(*lead, *w.shape[-3:]).flatten(0, -4) for w in W]
    return Projections(X, q, k, v, (flat[0], flat[1], flat[2]), (*lead, H) if headed else lead)


def cut(x: Tensor, part: slice) -> Tensor:
    """Positions ``part`` of (N, n, m); all of them cost nothing, where a view costs a dispatch."""
    return x if part.stop - part.start == x.shape[1] else x[:, part]


def flat(x: Tensor) -> Tensor:
    """(B, H, n, m) -> (N, n, m): the axes that only stand side by side, as one."""
    return x.reshape(-1, *x.shape[2:])


def repeat_heads(x: Tensor, H: int, dim: int = 1) -> Tensor:
    """One for every head of q, where G heads are shared: (B, G, ...) -> (B, H, ...)."""
    G = x.shape[dim]
    return x if G == H else x.repeat_interleave(H // G, dim)


def spread(choice: Choice, p: Tensor) -> Tensor:
    """beta times the spread of the choice: its derivative is diag(s) - s s^T / sum(s)."""
    s, scale = choice.spread(p), choice.score_scale
    if not isinstance(scale, Tensor) and scale == 1.0:
        return s  # not worth a pass
    return scale * s


def _broadcast(*shapes: Sequence[int]) -> tuple[int, ...]:
    return tuple(torch.broadcast_shapes(*shapes))  # type: ignore[no-untyped-call]


def wide(*tensors: Tensor) -> tuple[Tensor, ...]:
    """The tensors cut off from any graph, in float32 or better."""
    dtype = tensors[0].dtype
    for x in tensors:
        dtype = torch.promote_types(dtype, x.dtype)
    dtype = torch.promote_types(dtype, torch.float32)
    return tuple(x.detach().to(dtype) for x in tensors)
