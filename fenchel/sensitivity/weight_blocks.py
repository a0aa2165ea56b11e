"""Attention weights one block of rows at a time, so that no n by n matrix is stored.

    p = choice.weights(z, log_prior),  z = scale q k^T        one block: (N, t, s) with N = B H

Under a soft cap c the scores are c tanh(z / c), and a move dz is multiplied by 1 - tanh(z / c)^2,
entry by entry: the ``slope`` of a block.

A block is a tile of rows (fenchel/attention/tiles.py) with the keys that the prior leaves open to
any of them: under a causal prior half of the work is skipped. Its size follows from a budget of
numbers, so memory is O(n d) and the products stay large. Weights that fit in one block are cached;
others are computed again in every pass unless ``cache`` is set.

Keys and values that several heads share are repeated, O(n d) numbers, so that every product is one
batched multiplication.
"""

import math
from collections.abc import Iterator, Sequence
from copy import copy
from typing import NamedTuple

import torch
from torch import Tensor

from fenchel.attention import AttentionSpec
from fenchel.attention.reference import cap_slope
from fenchel.attention.shapes import four_axes
from fenchel.attention.tiles import ScoreTile, row_tiles, score_tiles
from fenchel.choice import Choice, Entmax, Sparsemax
from fenchel.choice.base import require_simplex
from fenchel.sensitivity.rounding import lengths

# Numbers in a block: on a CPU as many as the cache holds, on a GPU enough to fill it.
BUDGET, GPU_BUDGET = 1 << 21, 1 << 26
_ROUNDING = 512.0  # units of rounding in a weight besides those of its score: exp, log u, the sum
_TINY = 1e-300  # added to weights, which may have underflowed
_SPREAD = 1e-4  # rows with more than this share beside the largest s lose at most four digits


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
    """The key of largest s, (N, t, 1); None where no row is nearly one-hot."""
    slope: Tensor | None = None
    """The derivative of the soft cap, (N, t, s); None without one."""

    def choice_jvp_(self, dz: Tensor) -> Tensor:
        """The move of the weights for a move dz of the scores (N, t, s), which is overwritten.

        ``Choice.jacobian_product`` with s computed once. A common shift of dz changes nothing;
        the shift that makes dz 0 at the heaviest key keeps saturated rows exact, where the plain
        difference of two large numbers would be only rounding error.
        """
        if self.heaviest is not None:
            dz -= dz.gather(-1, self.heaviest)
        dz *= self.s
        return dz.addcmul_(self.s, dz.sum(-1, keepdim=True) * self.inverse, value=-1.0)


class SpreadBlock(NamedTuple):
    """A block of weights with what the rounding of its scores leaves open: (N, t, s) each."""

    rows: slice
    keys: slice
    s: Tensor
    """The spread as computed, times beta."""
    p_max: Tensor
    s_max: Tensor
    """The largest weights and spreads of scores within the error of the computed ones."""
    p_off: Tensor
    s_off: Tensor
    """How far such weights and spreads are from the computed ones, at most."""
    slope: Tensor | None

    def part(self, rows: slice) -> "SpreadBlock":
        """Some of its rows, counted from its first."""
        first = self.rows.start
        s, p_max, s_max, p_off, s_off = (x[:, rows] for x in self[2:7])
        slope = None if self.slope is None else self.slope[:, rows]
        rows = slice(first + rows.start, first + rows.stop)
        return SpreadBlock(rows, self.keys, s, p_max, s_max, p_off, s_off, slope)


class WeightBlocks:
    """The weights of q (B, H, T, D) on k (B, H, S, D), iterated block by block."""

    def __init__(
        self,
        q: Tensor,
        k: Tensor,
        spec: AttentionSpec,
        budget: int | None = None,
        *,
        cache: bool = False,
    ) -> None:
        """``budget`` bounds the numbers in one block; ``cache`` keeps all blocks once computed."""
        self.spec, self.scale = spec, spec.scale_for(q.shape[-1])
        self.B, self.H, self.T, _ = q.shape
        self.S = k.shape[2]
        if spec.prior is not None:
            spec.prior.check(self.B, self.H, self.T, self.S)
        self.q, self.k = flat(q), flat(k)
        self.scaled_q, self.scaled_k = self.scale * self.q, self.scale * self.k
        if budget is None:
            budget = BUDGET if q.device.type == "cpu" else GPU_BUDGET
        self.budget = budget
        self.height = max(1, budget // max(1, self.B * self.H * self.S))
        self.cache = cache or self.whole
        self._error: float | None = None
        self._cached: tuple[WeightBlock, ...] | None = None

    @property
    def whole(self) -> bool:
        """Whether one block has all rows."""
        return self.height >= self.T

    def single(self) -> "WeightBlocks":
        """The same weights in float32: rounded where one block has them all, else recomputed."""
        other = copy(self)
        for name in ("q", "k", "scaled_q", "scaled_k"):
            setattr(other, name, getattr(self, name).float())
        other._cached = tuple(_rounded(block) for block in self) if self.whole else None
        other._error = self.error if self.whole else None
        return other

    @property
    def error(self) -> float:
        """The relative error of a weight, which is the rounding of its score: 4 eps |q| |k|."""
        if self._error is None:
            q, k = (float(lengths(x).amax()) if x.numel() else 0.0 for x in (self.q, self.k))
            beta = float(torch.as_tensor(self.spec.choice.score_scale).max())
            self._error = 4.0 * torch.finfo(self.q.dtype).eps * beta * abs(self.scale) * q * k
        return self._error

    def double(self) -> "WeightBlocks":
        """The same weights computed in float64."""
        if self.q.dtype == torch.float64:
            return self
        q, k = (x.double().view(*self.lead, *x.shape[1:]) for x in (self.q, self.k))
        return WeightBlocks(q, k, self.spec, self.budget, cache=self.cache)

    def enlarged(self, errors: Tensor) -> Iterator[SpreadBlock]:
        """The blocks, with what scores that are off by at most ``errors`` (N, T) leave open.

        Softmax: p' <= exp(2 e) p. A threshold map p = response(x - nu): nu moves by at most e, so
        p' <= response(x - nu + 2 e), and likewise from below. Other maps: as softmax, given that
        the support is the computed one.
        """
        choice, eps = self.spec.choice, torch.finfo(self.q.dtype).eps
        scale = float(torch.as_tensor(choice.score_scale).max())
        errors = errors * scale + _ROUNDING * eps
        if isinstance(choice, Entmax | Sparsemax):
            for scored in self._scored():
                yield self._threshold_block(scored, errors)
            return
        for block in self:
            e = errors[:, block.rows].unsqueeze(-1).clamp(max=350.0)
            p, grown, share = block.p, torch.exp(2.0 * e), torch.expm1(2.0 * e)
            s = flat(curvature(choice, p.view(*self.lead, *p.shape[1:])))
            p_max, s_max = ((w + _TINY) * grown for w in (p, s))
            p_off, s_off = (w * share + _TINY for w in (p, s))
            p_max, s_max = p_max.clamp(max=1.0), s_max.clamp(max=scale)
            yield SpreadBlock(block.rows, block.keys, s, p_max, s_max, p_off, s_off, block.slope)

    def _threshold_block(self, scored: ScoreTile, errors: Tensor) -> SpreadBlock:
        choice, tile = scored.choice, scored.tile
        slope = cap_slope(scored.z, self.spec.softcap)
        x, _ = choice.scores(scored.z, scored.log_prior(), -1)
        p = choice.choose(x)
        peak = x.amax(-1, keepdim=True)
        e = errors.view(*self.lead, -1, 1)[:, :, tile.rows]
        e = e + _ROUNDING * torch.finfo(x.dtype).eps * torch.where(peak.isfinite(), peak.abs(), 0.0)
        p_max, p_min = (
            torch.where(x > -torch.inf, choice.response(x - threshold(choice, x, p) + move), 0.0)
            for move in (2.0 * e, -2.0 * e)
        )
        p_max, p_min = p_max.clamp(0.0, 1.0), p_min.clamp(0.0, 1.0)
        s, ends = choice.spread(p), [choice.spread(p_max), choice.spread(p_min)]
        falls = torch.as_tensor(choice.spread_falls)
        ends[1] = torch.where(falls & (p_max > 0) & (p_min == 0), torch.inf, ends[1])
        s_max, s_min = torch.maximum(*ends), torch.minimum(*ends)
        s_max, s_min = torch.maximum(s_max, s), torch.minimum(s_min, s)
        scale = choice.score_scale
        s_off, p_off = torch.maximum(s_max - s, s - s_min), torch.maximum(p_max - p, p - p_min)
        s, s_max, s_off = (flat(scale * y) for y in (s, s_max, s_off))
        p_max, p_off = flat(p_max), flat(p_off)
        slope = None if slope is None else flat(slope)
        return SpreadBlock(tile.rows, tile.keys, s, p_max, s_max, p_off, s_off, slope)

    @property
    def lead(self) -> tuple[int, int]:
        """(B, H), which are one axis in every block."""
        return self.B, self.H

    def __iter__(self) -> Iterator[WeightBlock]:
        if not self.cache:
            return self._compute()
        if self._cached is None:
            self._cached = tuple(_without_shift(block) for block in self._compute())
        return iter(self._cached)

    def cached(self) -> Sequence[WeightBlock]:
        """The blocks if they are cached, else none; blocks computed anew all have a shift."""
        return tuple(self) if self.cache else ()

    def _scored(self) -> Iterator[ScoreTile]:
        q, k = (x.view(self.B, self.H, *x.shape[1:]) for x in (self.q, self.k))
        rows = row_tiles(q, k, self.spec.prior, height=self.height)
        open_rows = [tile for tile in rows if tile.keys.start < tile.keys.stop]
        return score_tiles(q, k, self.spec, open_rows)

    def _compute(self) -> Iterator[WeightBlock]:
        return (self._block(scored) for scored in self._scored())

    def _block(self, scored: ScoreTile) -> WeightBlock:
        tile, choice = scored.tile, self.spec.choice
        slope = cap_slope(scored.z, self.spec.softcap)  # before the prior is added to the scores
        weights = self._weights(scored)
        p, s = flat(weights), flat(curvature(choice, weights))
        total = s.sum(-1, keepdim=True)
        inverse = torch.where(total > 0, 1.0 / total, 0.0)
        slope = None if slope is None else flat(slope)
        heaviest = s.argmax(-1, keepdim=True)
        return WeightBlock(tile.rows, tile.keys, p, s, inverse, heaviest, slope)

    def _weights(self, scored: ScoreTile) -> Tensor:
        """The weights (B, H, t, s); the scores may be overwritten."""
        choice = self.spec.choice
        if isinstance(choice.beta, Tensor) or choice.beta == math.inf:
            return scored.weights()  # under Hard a prior shifts no score
        # beta z + log u = beta (z + log u / beta): the prior is added only where it is not 0,
        # which under a causal mask is a strip along the diagonal.
        return choice.weights(scored.add_log_prior_(1.0 / choice.beta))


def _rounded(block: WeightBlock) -> WeightBlock:
    """The block in float32."""
    p, s, inverse = (x.float() for x in (block.p, block.s, block.inverse))
    slope = None if block.slope is None else block.slope.float()
    return block._replace(p=p, s=s, inverse=inverse, slope=slope)


def _without_shift(block: WeightBlock) -> WeightBlock:
    """A block for many products, without the shift that only nearly one-hot rows need."""
    s = block.s
    fixed = (s > 0).sum(-1, keepdim=True) <= 1  # one key to choose from: nothing can move
    s = s.masked_fill(fixed, 0.0)
    rest = (s.sum(-1, keepdim=True) - s.amax(-1, keepdim=True)) * block.inverse
    spread_out = bool((fixed | (rest > _SPREAD)).all())
    return block._replace(s=s, heaviest=None if spread_out else block.heaviest)


class Projections(NamedTuple):
    """Queries, keys and values of X, four axes each, with the weights that produced them."""

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
    shapes_of_lead = (X.shape[:-2], *(w.shape[:-3] for w in W))
    lead = tuple(torch.broadcast_shapes(*shapes_of_lead))  # type: ignore[no-untyped-call]
    X = X.expand(*lead, *X.shape[-2:])
    q, k, v = (four_axes(X.unsqueeze(-3) @ w) for w in W)
    flat = [w[None] if w.dim() == 3 else w.expand(*lead, *w.shape[-3:]).flatten(0, -4) for w in W]
    return Projections(X, q, k, v, (flat[0], flat[1], flat[2]), (*lead, H) if headed else lead)


def threshold(choice: Choice, x: Tensor, p: Tensor) -> Tensor:
    """nu of p = response(x - nu), from the largest weight; 0 where all is forbidden: (..., 1)."""
    top = p.argmax(-1, keepdim=True)
    nu = x.gather(-1, top) - choice.slope(p.gather(-1, top))
    return torch.where(nu.isfinite(), nu, 0.0)


def cut(x: Tensor, part: slice) -> Tensor:
    """Positions ``part`` of (N, n, m); all of them cost nothing, where a view costs a dispatch."""
    return x if part.stop - part.start == x.shape[1] else x[:, part]


def flat(x: Tensor) -> Tensor:
    """(B, H, n, m) -> (N, n, m), N = B H."""
    return x.reshape(-1, *x.shape[2:])


def repeat_heads(x: Tensor, H: int, dim: int = 1) -> Tensor:
    """Each of G shared heads repeated for its H / G query heads: (B, G, ...) -> (B, H, ...)."""
    G = x.shape[dim]
    return x if G == H else x.repeat_interleave(H // G, dim)


def curvature(choice: Choice, p: Tensor) -> Tensor:
    """beta times the spread of the choice: its derivative is diag(s) - s s^T / sum(s)."""
    require_simplex(choice, "the closed form of a Jacobian of attention")
    s, scale = choice.spread(p), choice.score_scale
    if not isinstance(scale, Tensor) and scale == 1.0:
        return s  # not worth a pass
    return scale * s


def wide(*tensors: Tensor) -> tuple[Tensor, ...]:
    """The tensors detached from any graph, in float32 or better."""
    dtype = tensors[0].dtype
    for x in tensors:
        dtype = torch.promote_types(dtype, x.dtype)
    dtype = torch.promote_types(dtype, torch.float32)
    return tuple(x.detach().to(dtype) for x in tensors)
