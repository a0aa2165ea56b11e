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

Derivation: docs/maths/sensitivity.md.
"""

from typing import NamedTuple, Unpack

import torch
from torch import Tensor

from fenchel.attention import AttentionSpec
from fenchel.attention.spec import AttentionKeywords
from fenchel.sensitivity.norms import largest, perron, spectral
from fenchel.sensitivity.weight_blocks import WeightBlocks, flat, project


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
        return self.mixing + self.query + self.key


class Factors(NamedTuple):
    """F_Q, F_K, F_V with F F^T = W^T W, (B or 1, H, D, r); None is the identity."""

    q: Tensor | None = None
    k: Tensor | None = None
    v: Tensor | None = None


_NONE = Factors()


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
    x = project(X, W_Q, W_K, W_V)
    rows = WeightBlocks(x.q, x.k, AttentionSpec(**keywords))
    per_head = terms(rows, x.v, Factors(*(factor(w) for w in x.W)), cheap=cheap)
    return Terms(*(term.reshape(x.axes) for term in per_head))


def terms(rows: WeightBlocks, v: Tensor, factors: Factors = _NONE, *, cheap: bool = False) -> Terms:
    """The three numbers for the weights in ``rows`` on the values v (B, H, S, E)."""
    B, H = rows.lead
    F = Factors(*(None if f is None else flat(f.expand(B, H, *f.shape[2:])) for f in factors))
    k, v = rows.k, flat(v)
    v = v - v.mean(-2, keepdim=True)  # moments do not depend on the origin, unless slopes multiply
    k = k - k.mean(-2, keepdim=True) if rows.spec.softcap is None else k
    computed = _cheap(rows, k, v, F) if cheap else _full(rows, k, v, F)
    gain = 1.0 if F.v is None else spectral(F.v)
    # Moments are differences of sums: allow for their rounding before calling this a bound.
    eps = torch.finfo(v.dtype).eps
    size = v.norm(dim=-1).amax(-1)
    rounding = 64 * eps * abs(rows.scale) * size * (k.norm(dim=-1).amax(-1) + size)
    grow = 1.0 + 64 * eps
    return Terms(
        (gain * computed.mixing * grow).view(B, H),
        (computed.query * grow + rounding).view(B, H),
        (computed.key * grow + rounding).view(B, H),
    )


def _full(rows: WeightBlocks, k: Tensor, v: Tensor, F: Factors) -> Terms:
    N, S, D = k.shape
    query = k.new_zeros(N)
    moments = k.new_zeros(N, S, D, D)
    for block in rows:
        keys, s, t, q = block.keys, block.s, block.slope, rows.q[:, block.rows]
        C = moment(s, v[:, keys], k[:, keys], t)
        C = C if F.q is None else C @ F.q.unsqueeze(1)
        query = torch.maximum(query, spectral(C).amax(-1))
        own = largest(moment(s, v[:, keys], v[:, keys]))
        w = _sloped(s, t, 2) * own.unsqueeze(-1)
        for a in range(D):
            moments[:, keys, a] += w.mT @ (q[..., a : a + 1] * q)
    moments = moments if F.k is None else F.k.unsqueeze(1).mT @ moments @ F.k.unsqueeze(1)
    key = largest(moments).amax(-1).sqrt()
    return Terms(mixing(rows), abs(rows.scale) * query, abs(rows.scale) * key)


def _cheap(rows: WeightBlocks, k: Tensor, v: Tensor, F: Factors) -> Terms:
    N, S, _ = k.shape
    query, columns, sums = k.new_zeros(N), k.new_zeros(N, S), k.new_zeros(N, S)
    for block in rows:
        keys, s, t, q = block.keys, block.s, block.slope, rows.q[:, block.rows]
        q = q if F.k is None else q @ F.k
        own, other = variance(s, v[:, keys]), variance(s, k[:, keys], t)
        query = torch.maximum(query, (own * other).sqrt().amax(-1))
        w = _sloped(s, t, 2) * (own * q.square().sum(-1)).unsqueeze(-1)
        columns[:, keys] += w.sum(-2)
        sums[:, keys] += block.p.sum(-2)
    query = query if F.q is None else query * spectral(F.q)
    scale = abs(rows.scale)
    # Rows of P sum to one at most, so its norm is at most the root of the largest column sum.
    return Terms(sums.amax(-1).sqrt(), scale * query, scale * columns.amax(-1).sqrt())


def moment(s: Tensor, x: Tensor, y: Tensor, t: Tensor | None = None) -> Tensor:
    """sum_j s_ij (x_j - mean) (y_j - mean)^T, the means weighted by s_i; t_ij y_j for y_j with t.

    (..., t, n), (..., n, E), (..., n, D) -> (..., t, E, D). One column of x at a time, so that no
    (t, n, E) tensor is made.
    """
    sloped = _sloped(s, t, 1)
    total = s.sum(-1, keepdim=True)
    inverse = torch.where(total > 0, 1.0 / torch.where(total > 0, total, 1.0), 0.0)
    mean_x, sum_y = s @ x * inverse, sloped @ y
    rows = [
        (sloped * x[..., None, :, e]) @ y - mean_x[..., e : e + 1] * sum_y
        for e in range(x.shape[-1])
    ]
    return torch.stack(rows, -2)


def variance(s: Tensor, x: Tensor, t: Tensor | None = None) -> Tensor:
    """The trace of the moment of x, or of t_ij x_j: (..., t, n), (..., n, E) -> (..., t)."""
    total = s.sum(-1)
    mean = _sloped(s, t, 1) @ x
    square = (_sloped(s, t, 2) @ x.square().sum(-1, keepdim=True)).squeeze(-1)
    rest = square - mean.square().sum(-1) / torch.where(total > 0, total, 1.0)
    if t is not None:  # the mean was not subtracted, so the difference may be rounding alone
        rest = rest + 64 * torch.finfo(x.dtype).eps * square
    return rest.clamp(min=0.0)


def _sloped(s: Tensor, t: Tensor | None, power: int) -> Tensor:
    return s if t is None else s * t**power


def mixing(rows: WeightBlocks) -> Tensor:
    """An upper bound of |P|_2, within about a percent: (N,)."""

    def step(y: Tensor) -> Tensor:
        out = torch.zeros_like(y)
        for block in rows:
            p, keys = block.p, block.keys
            out[:, keys] += (p.mT @ (p @ y[:, keys].unsqueeze(-1))).squeeze(-1)
        return out

    return perron(step, rows.k.new_ones(rows.k.shape[:2]))
