"""The covariance bound: how far attention can move at a point, one number per head.

Row i of the outputs moves by

    do_i = sum_j p_ij dv_j  +  C_i dq_i scale  +  scale sum_j s_ij (v_j - m_i) (q_i . dk_j)
              mixing              query                         key

s_i is the spread of the choice times beta (p_i itself for softmax), m_i the s_i-weighted mean of
the values, C_i = sum_j s_ij (v_j - m_i) (k_j - .)^T their covariance with the keys, and
D_i = sum_j s_ij (v_j - m_i) (v_j - m_i)^T that with themselves. Hence

    mixing  |P|_2
    query   scale max_i |C_i|_2                               every query moves its own row only
    key     scale sqrt( max_j lambda_max( sum_i s_ij |D_i|_2 q_i q_i^T ) )

For the key term, Cauchy and Schwarz in the weights s_i give |sum_j s_ij (v_j - m_i) c_ij|^2 <=
|D_i|_2 sum_j s_ij c_ij^2 with c_ij = q_i . dk_j; sum over i, and gather by j. In self-attention
dq = dX W_Q and so on: the three numbers carry the weights' factors, and add up. In (q, k, v) moves
are separate coordinates, and the root of the sum of squares bounds all together.

Under a cap on the scores with slopes t_ij, row i has t_ij k_j in place of k_j, and
c_ij = t_ij q_i . dk_j: s_ij t_ij^2 takes the place of s_ij in the key term.

The bound holds at a point, always. It is within a factor of 3 of the norm on random inputs, and
exact on the known worst family. Full: O(n^2 d^2) time, O(n d^2) memory. Cheap: traces instead of
matrices and |P|_2^2 <= the largest column sum: O(n^2 d) time, O(n d) memory.

Keys that no input moves (``fixed``, the sink in front of the true keys) take part in the rows with
their weights, keys and values, and are left out of the columns: of |P|_2 and of the max over j.

Rounding. Everything is computed in float64. Queries, keys and values may have errors of length e_q,
e_k and e_v (those of X W). Scores then have errors of at most e_i in row i (``score_errors``),
and weights and spreads lie below p_max and s_max (``WeightBlocks.enlarged``).

Moments are taken about the row's own mean, which is subtracted first: in a difference of sums,
sum s v v^T - m m^T, no digit is left where a row attends to a cluster far from other tokens.
About any centre and with larger weights D_i is larger, so

    g_i = |sum_j s_max_ij (v_j - m_i) (v_j - m_i)^T|_2^(1/2) + e_v (sum_j s_max_ij)^(1/2)

bounds |D_i|_2^(1/2) whatever the rounding of m_i is; h_i is that of the keys, by the trace. |C_i|_2
is at most g_i h_i, and at most the computed one plus sum_j |s'_ij - s_ij| |v_j - m_i| |k_j - .|
plus what e_v and e_k add. The cheap form expands the square, which needs no (t, n, E) tensor, and
adds the rounding of that.

Derivation: docs/maths/sensitivity.md.
"""

from collections.abc import Iterator
from typing import NamedTuple, Unpack

import torch
from torch import Tensor

from fenchel.attention import AttentionSpec
from fenchel.attention.spec import AttentionKeywords
from fenchel.sensitivity.norms import largest, perron, spectral
from fenchel.sensitivity.rounding import (
    above,
    bound_dtype,
    lengths,
    outward,
    product,
    round_up,
    unit_size,
)
from fenchel.sensitivity.weight_blocks import (
    Projections,
    SpreadBlock,
    WeightBlocks,
    flat,
    project,
)

_BLOCK = 1 << 21  # numbers in one (N, t, n, E) tensor
_FLOOR = 1e-150  # added to a root whose square may have underflowed; entries are of order 1


class Terms(NamedTuple):
    """The bound on each cause of a move; every tensor is (B, H)."""

    mixing: Tensor
    """The values move under fixed weights."""
    query: Tensor
    """The weights of a row change because its query moves."""
    key: Tensor
    """The weights change because the keys move."""

    @property
    def total(self) -> Tensor:
        """The bound when all causes come from one move of X."""
        return above(above(self.mixing + self.query) + self.key)

    def separate(self, wrt: str) -> Tensor:
        """The bound when the inputs that ``wrt`` names, of "q", "k" and "v", move separately."""
        parts = {"q": self.query, "k": self.key, "v": self.mixing}
        # |a x + b y| <= sqrt(a^2 + b^2) for |x|^2 + |y|^2 <= 1.
        return outward(lengths(torch.stack([parts[name] for name in wrt], -1)))


class Factors(NamedTuple):
    """F_Q, F_K, F_V with F F^T = W^T W, (B or 1, H, D, r); None is the identity."""

    q: Tensor | None = None
    k: Tensor | None = None
    v: Tensor | None = None


class Errors(NamedTuple):
    """How far q, k and v may be from their exact values, as lengths: numbers or (B H,)."""

    q: Tensor | float = 0.0
    k: Tensor | float = 0.0
    v: Tensor | float = 0.0


_NONE, _EXACT = Factors(), Errors()


def factor(W: Tensor) -> Tensor:
    """F with F F^T = W^T W, so that |A W^T|_2 = |A F|_2: (..., M, D) -> (..., D, r)."""
    return W.mT if W.shape[-2] <= W.shape[-1] else torch.linalg.qr(W, mode="r").R.mT


def covariance(
    X: Tensor,
    W_Q: Tensor,
    W_K: Tensor,
    W_V: Tensor,
    *,
    cheap: bool = False,
    **keywords: Unpack[AttentionKeywords],
) -> Tensor:
    """An upper bound on sigma_max of self-attention in X (..., N, M), one number per head.

    >>> X = torch.eye(2)
    >>> covariance(X, X, X, X)  # sigma_max is 1.3520
    tensor(1.6977)
    """
    return covariance_terms(X, W_Q, W_K, W_V, cheap=cheap, **keywords).total


def covariance_terms(
    X: Tensor,
    W_Q: Tensor,
    W_K: Tensor,
    W_V: Tensor,
    *,
    cheap: bool = False,
    **keywords: Unpack[AttentionKeywords],
) -> Terms:
    """``covariance`` as its three terms: mixing, query and key."""
    x = project(*(A.double() for A in (X, W_Q, W_K, W_V)))
    rows = WeightBlocks(x.q, x.k, AttentionSpec(**keywords))
    per_head = terms(rows, x.v, factors_of(x), cheap=cheap, errors=projection_errors(x))
    dtype = bound_dtype(X, W_Q, W_K, W_V)
    return Terms(*(round_up(term, dtype).reshape(x.axes) for term in per_head))


def factors_of(x: Projections) -> Factors:
    """The factors of the weights."""
    return Factors(*(factor(w) for w in x.W))


def projection_errors(x: Projections) -> Errors:
    """The rounding of X W, as lengths per sequence and head: (B H,) each."""
    M, B = x.X.shape[-1], len(x.q)
    size = 2.0 * (M + 4) * torch.finfo(x.X.dtype).eps * lengths(x.X).amax(-1).reshape(B, 1)
    return Errors(*(product(size, lengths(w.flatten(-2))).reshape(-1) for w in x.W))


def score_errors(rows: WeightBlocks, errors: Errors) -> Tensor:
    """How far any score of a row may be off by rounding: (N, T)."""
    q, k = lengths(rows.q), lengths(rows.k).amax(-1, keepdim=True)
    e_q, e_k = (_column(e) for e in (errors.q, errors.k))
    rounding = (rows.q.shape[-1] + 8) * torch.finfo(q.dtype).eps
    return abs(rows.scale) * (rounding * q * k + e_q * (k + e_k) + q * e_k)


def _column(e: Tensor | float) -> Tensor | float:
    """(N,) -> (N, 1)."""
    return e.unsqueeze(-1) if isinstance(e, Tensor) else e


class RowBlock(NamedTuple):
    """The moments of some rows, in the units of ``RowMoments``; N is B H."""

    rows: slice
    keys: slice
    query: Tensor
    """|C_i F_Q|_2, from above: (N, t)."""
    root: Tensor
    """g_i: (N, t)."""
    weight: Tensor
    """s_max_ij, times the square of the slope of a soft cap: (N, t, s)."""
    p_max: Tensor
    p_off: Tensor
    """The largest weights, and their distance from those computed: (N, t, s)."""


class RowMoments:
    """The moments of the rows of attention, from above, block by block.

    Values, keys, queries and factors are divided by powers of two near their largest entries, so
    that no square overflows or vanishes; ``query_units`` and ``key_units`` are these powers.
    """

    def __init__(
        self,
        rows: WeightBlocks,
        v: Tensor,
        factors: Factors,
        errors: Errors,
        *,
        cheap: bool,
        fixed: int = 0,
    ) -> None:
        """``v`` (B, H, S, E); the first ``fixed`` keys and values are constants."""
        self.blocks, self.cheap, self.fixed = rows.double(), cheap, fixed
        F_Q, F_K, F_V = (None if f is None else _per_head(f, *rows.lead) for f in factors)
        self.score_errors = score_errors(self.blocks, errors)
        self.v, value, self.e_v = _scaled(flat(v).double(), errors.v)
        self.k, key, self.e_k = _scaled(self.blocks.k, errors.k)
        q, query, e_q = _scaled(self.blocks.q, errors.q)
        (N, S, D), self.eps = self.k.shape, torch.finfo(self.v.dtype).eps
        self.terms = S + 4 * (D + self.v.shape[-1])
        one = self.v.new_ones(N)
        scale, factor_q, factor_k = one * abs(rows.scale), one, one
        self.F_Q, self.gain_q = F_Q, one
        if F_Q is not None:
            self.F_Q, factor_q = unit_size(F_Q, (1, 2))
            self.gain_q = outward(spectral(self.F_Q), D)
        if F_K is not None:
            F_K, factor_k = unit_size(F_K, (1, 2))
            rounding = 8.0 * (D + F_K.shape[-1]) * self.eps * lengths(q).amax(-1)
            q, e_q = q @ F_K, (e_q + rounding) * lengths(F_K.flatten(1))
        self.q, self.e_q = q, e_q
        self.gain_v = one if F_V is None else spectral(F_V)
        self.query_units = [x.flatten() for x in (value, key, factor_q, scale)]
        self.key_units = [x.flatten() for x in (value, query, factor_k, scale)]

    def __iter__(self) -> Iterator[RowBlock]:
        width = max(1, self.v.shape[-1], self.k.shape[-1])
        for block in self.blocks.enlarged(self.score_errors):
            N, t, n = block.s.shape
            step = t if self.cheap else max(1, _BLOCK // max(1, N * n * width))
            for first in range(0, t, step):
                yield self._moments(block.part(slice(first, min(first + step, t))))

    def _moments(self, block: SpreadBlock) -> RowBlock:
        e_k, weight, total = self.e_k.unsqueeze(-1), block.s_max, block.s_max.sum(-1)
        if block.slope is not None:  # its own rounding, and its change with the score
            cap = self.blocks.spec.softcap
            assert cap is not None
            off = (16.0 * self.eps + self.score_errors[:, block.rows] / cap).clamp(max=1.0)
            e_k = e_k + 2.0 * off
            weight = weight * (block.slope + off.unsqueeze(-1)).clamp(max=1.0).square()
        g, h, nearer = (self._traces if self.cheap else self._matrices)(block)
        root, other = g + self.e_v.unsqueeze(-1) * total.sqrt(), h + e_k * total.sqrt()
        query = root * other * self.gain_q.unsqueeze(-1)
        if nearer is not None:
            nearer = nearer + (root * other - g * h) * self.gain_q.unsqueeze(-1)
            query = torch.where(nearer < query, nearer, query)  # nan where nothing is certain
        return RowBlock(block.rows, block.keys, query, root, weight, block.p_max, block.p_off)

    def _matrices(self, block: SpreadBlock) -> tuple[Tensor, Tensor, Tensor | None]:
        """Roots of |D_i|_2 and of the keys' trace, and |C_i F_Q|_2 with its rounding: (N, t)."""
        v, k = self.v[:, None, block.keys], self.k[:, None, block.keys]
        k = k if block.slope is None else block.slope.unsqueeze(-1) * k
        x, y = (_centred(block.s, z) for z in (v, k))
        half = block.s_max.sqrt().unsqueeze(-1) * x
        g = outward(largest(half.mT @ half), self.terms).sqrt() + _FLOOR
        C = (block.s.unsqueeze(-1) * x).mT @ y
        C = C if self.F_Q is None else C @ self.F_Q.unsqueeze(1)
        far, wide = x.norm(dim=-1), y.norm(dim=-1)
        h = outward((block.s_max * wide.square()).sum(-1), self.terms).sqrt() + _FLOOR
        changed = (block.s_off * far * wide).sum(-1)
        off = block.s_off + self.terms * self.eps * block.s
        least = (block.s - block.s_off).clamp(min=0.0).sum(-1)
        means = (off * far).sum(-1) * (off * wide).sum(-1) / least
        rounding = self.terms * self.eps * g * h
        return g, h, spectral(C) + (changed + means + rounding) * self.gain_q.unsqueeze(-1)

    def _traces(self, block: SpreadBlock) -> tuple[Tensor, Tensor, Tensor | None]:
        """Roots of the traces of both moments."""
        v, k = self.v[:, block.keys], self.k[:, block.keys]
        k = k - k.mean(-2, keepdim=True) if block.slope is None else k
        g = self._variance(block.s_max, v - v.mean(-2, keepdim=True), None)
        return g.sqrt(), self._variance(block.s_max, k, block.slope).sqrt(), None

    def _variance(self, s: Tensor, x: Tensor, t: Tensor | None) -> Tensor:
        """The trace of the moment of x, or of t_ij x_j, from above: (N, t, n), (N, n, E)."""
        total = s.sum(-1)
        sloped = s if t is None else s * t
        mean, squares = sloped @ x, x.square().sum(-1, keepdim=True)
        square = ((sloped if t is None else sloped * t) @ squares).squeeze(-1)
        rest = square - mean.square().sum(-1) / torch.where(total > 0, total, 1.0)
        rounding = self.terms * self.eps * (square + 16.0 * self.eps * total)
        return rest.clamp(min=0.0) + rounding + _FLOOR**2

    def gather(self) -> Terms:
        """The three numbers: (N,) each."""
        (N, S, _), r = self.k.shape, self.q.shape[-1]
        query, moved = self.v.new_zeros(N), self.v.new_zeros(N)
        columns, sums = self.v.new_zeros(N, S), self.v.new_zeros(N, S)
        moments = self.v.new_zeros(N, S, *(() if self.cheap else (r, r)))
        for block in self:
            keys, q = block.keys, self.q[:, block.rows]
            query = torch.maximum(query, block.query.amax(-1))
            w = block.weight * block.root.square().unsqueeze(-1)
            columns[:, keys] += w.sum(-2)
            moved += block.p_off.square().sum((-2, -1))
            if self.cheap:
                moments[:, keys] += (w * q.square().sum(-1, keepdim=True)).sum(-2)
                sums[:, keys] += block.p_max.sum(-2)
                continue
            for a in range(r):
                moments[:, keys, a] += w.mT @ (q[..., a : a + 1] * q)
        moments, columns, sums = (x[:, self.fixed :] for x in (moments, columns, sums))
        top = moments if self.cheap else largest(moments)
        key = top.amax(-1).sqrt() + self.e_q * columns.amax(-1).sqrt() + _FLOOR
        # Rows of P sum to one at most, so its norm is at most the root of the largest column sum.
        mixed = sums.amax(-1).sqrt()
        if not self.cheap:
            mixed = mixing(self.blocks, self.fixed) + moved.sqrt()
        mixed = mixed.clamp(max=self.blocks.T**0.5)
        query, key = product(query, *self.query_units), product(key, *self.key_units)
        parts = product(mixed, self.gain_v), query, key
        return Terms(*(above(outward(part, 2 * self.terms + self.blocks.T)) for part in parts))


def terms(
    rows: WeightBlocks,
    v: Tensor,
    factors: Factors = _NONE,
    *,
    cheap: bool = False,
    errors: Errors = _EXACT,
    fixed: int = 0,
) -> Terms:
    """The three numbers for the weights in ``rows`` on the values v (B, H, S, E), in float64."""
    per_head = RowMoments(rows, v, factors, errors, cheap=cheap, fixed=fixed).gather()
    return Terms(*(term.view(rows.lead) for term in per_head))


def _per_head(f: Tensor, B: int, H: int) -> Tensor:
    return flat(f.double().expand(B, H, *f.shape[2:]))


def _scaled(x: Tensor, error: Tensor | float) -> tuple[Tensor, Tensor, Tensor]:
    """x (N, n, m) over its size, the size (N, 1, 1), and the error over it (N,)."""
    _, size = unit_size(x, (1, 2))
    error = torch.as_tensor(error, dtype=x.dtype, device=x.device).expand(len(x))
    # Where x is only rounding error, the error is the larger of the two.
    size = torch.maximum(size, unit_size(error.view(-1, 1, 1), (1, 2))[1]) if error.any() else size
    return x / size, size, error / size.flatten()


def _centred(s: Tensor, x: Tensor) -> Tensor:
    """x_ij minus its s-weighted mean over j, which is subtracted twice: (N, t or 1, n, E)."""
    total = s.sum(-1, keepdim=True)
    share = (s / torch.where(total > 0, total, 1.0)).unsqueeze(-2)
    for _ in range(2):  # the second mean is the rounding of the first
        x = x - share @ x
    return x


def mixing(rows: WeightBlocks, fixed: int = 0) -> Tensor:
    """An upper bound of |P|_2, within about a percent, without the first ``fixed`` keys: (N,)."""

    def step(y: Tensor) -> Tensor:
        y = torch.nn.functional.pad(y, (fixed, 0))
        out = torch.zeros_like(y)
        for block in rows:
            p, keys = block.p, block.keys
            out[:, keys] += (p.mT @ (p @ y[:, keys].unsqueeze(-1))).squeeze(-1)
        return out[:, fixed:]

    N, S = rows.k.shape[:2]
    return perron(step, rows.k.new_ones(N, S - fixed))
