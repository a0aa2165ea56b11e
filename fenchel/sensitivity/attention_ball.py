"""Bounds on the Jacobian of self-attention that hold everywhere in a ball of inputs.

One head. Queries, keys and values are affine in their token, and queries and keys may be rotated
by position (RoPE):

    q_i = R_i (W_Q^T x_i + b_Q) = A_i x_i + ...,    k_j = B_j x_j + ...,    v_j = V x_j + ...

Tokens move by at most r = ``token`` each. Scores are scale q_i . k_j, s_ij is the spread of the
choice (p_ij for softmax), and k-_i, v-_i are the s_i-means of keys and values in row i. Below, the
factor beta scale belongs to A_i, and M bounds the norms |A_i^T B_j|_2 of all pairs.

Scores. Up to a shift of the row, which changes no weight, score ij moves by at most
    e_ij = r (|A_i^T (k_j - k-_i)| + |B_j^T q_i|) + r^2 M,
and weights rise with their own score and fall with the others, so every p'_ij lies between values
at corners of that box. s' follows from p', and |s'_ij - s_ij| <= d_ij.

Moments. For weights w: c_V(w) = |sum_j w_j (v_j - v-_i)(v_j - v-_i)^T|_2, and c_K(w) the same with
A_i^T (k_j - k-_i). A covariance about its own mean is the least, and moving tokens changes its
root by at most a_i |V| or a_i M, with a_i = r sqrt(sum_j s'_ij):
    |C'_V|^(1/2) <= c_V(s_max)^(1/2) + a_i |V|  =: g_i,     |C'_K|^(1/2) <= ... + a_i M  =: h_i.

Bound A, anywhere: mixing, query and key of the covariance bound with every quantity at its largest,
    |V| |p_max|_2 + max_i g_i h_i + K(s_max g^2) + M (max_j sum_i s_max g_i^2 r^2)^(1/2),
    K(w)^2 = max_j lambda_max( sum_i w_ij (B_j^T q_i)(B_j^T q_i)^T ).

Bound B, from the centre: the exact norm there, plus bounds of the change of each term,
    mixing  |V| |d_p|_2
    query   max_i  a_i (M c_V^(1/2) + |V| c_K^(1/2)) + a_i^2 |V| M
                   + (c_V(d) c_K(d))^(1/2) (1 + sum_j d_ij / sum_j s'_ij)
    key     M (...)^(1/2) as in A  +  |V| K(s_max a^2)
                   + K(d c_V(d)) + K(s_max c_V(d) sum d / sum s').

B tends to the exact value as r -> 0, A is the smaller one for large r. In the norm max_i |x_i| the
same pieces give max_i |V| + g_i h_i + g_i (sum_j s')^(1/2) (max_j |B_j^T q_i| + r M), free of n.

Rotations enter only through A_i and B_j: row i depends on the keys through A_i^T, column j on the
queries through B_j^T. Without rotations A_i = A and B_j = B, and these are the formulas of
docs/maths/sensitivity.md. For consecutive positions A_i^T B_j depends on j - i, and M is the
largest of 2 n - 1 norms; for others M = |A| |B|.

A sink is one more key, k_0 = 0 and v_0 = 0, that no token moves: its score moves by r |A_i^T k-_i|
alone, it takes part in means and moments, and neither in a_i nor in the columns of P, d and s.

Softmax, and Tsallis choices with alpha <= 2, whose spread rises with the weight; for other choices
the bounds are infinite. O(n^2 d^2) time and O(n^2) memory per head. Derivation:
docs/maths/sensitivity.md.
"""

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from fenchel.attention import AttentionSpec
from fenchel.attention.bias import add_sink
from fenchel.choice import Choice, Entmax, Softmax, Sparsemax
from fenchel.sensitivity.bounds.covariance import factor
from fenchel.sensitivity.norms import largest, nonnegative, spectral
from fenchel.sensitivity.perturbation import Ball
from fenchel.sensitivity.rounding import lengths, outward
from fenchel.sensitivity.weight_blocks import Projections, threshold

_BLOCK = 1 << 21  # numbers in one (H, t, n, d) tensor


class HeadBounds(NamedTuple):
    """Bounds that hold everywhere in a ball, per head: (H,)."""

    upper: Tensor
    """On the spectral norm |J'|_2, by A."""
    variation: Tensor
    """On |J' - J|_2 with J the Jacobian at the centre, by B."""
    token: Tensor
    """On the gain in the norm max_i |x_i|."""


class _Weights(NamedTuple):
    """Weights and spreads at the centre, their changes and maxima in the ball: (H, n, n) each."""

    p: Tensor
    p_off: Tensor
    p_max: Tensor
    s: Tensor
    s_off: Tensor
    s_max: Tensor


class _Head(NamedTuple):
    """The heads of one sequence; A_i and B_j are given by factors with F F^T = A_i A_i^T."""

    q: Tensor
    k: Tensor
    """(H, n, D)."""
    v: Tensor
    """V x_j up to a rotation: (H, n, E)."""
    A: Tensor
    B: Tensor
    """(H, n, D, r) with rotations, else (H, 1, D, r); beta scale is a factor of A and of q."""
    M: Tensor
    V: Tensor
    """Norms: (H,)."""
    fixed: int = 0
    """Keys and values in front that no token moves: 1 for a sink."""

    @property
    def rotated(self) -> bool:
        """Whether A_i and B_j depend on the position."""
        return self.A.shape[1] > 1

    def keys(self, centre: Tensor, rows: slice) -> Tensor:
        """A_i^T (k_j - centre_i) for some rows i: (H, t, n, r), from a centre (H, t, D)."""
        if not self.rotated:
            A = self.A[:, 0]
            return (self.k @ A).unsqueeze(1) - (centre @ A).unsqueeze(2)
        return (self.k.unsqueeze(1) - centre.unsqueeze(2)) @ self.A[:, rows]

    def query_sizes(self) -> Tensor:
        """beta scale |B_j^T q_i| of the keys that move: (H, n, n), (H, n, 1) without rotations."""
        if not self.rotated:
            size: Tensor = (self.q @ self.B[:, 0]).norm(dim=-1, keepdim=True)
            return size
        sizes = [(self.q @ B).norm(dim=-1) for B in self.B.unbind(1)]  # column by column
        return torch.stack(sizes, -1)


def bounded(choice: Choice) -> bool:
    """Whether this choice has finite bounds here: none under a temperature per query."""
    if isinstance(choice.beta, Tensor) and choice.beta.dim() > 1 and choice.beta.shape[-2] > 1:
        return False
    falls = bool(torch.as_tensor(choice.spread_falls).any())
    return isinstance(choice, Entmax | Softmax | Sparsemax) and not falls


def head_bounds(
    x: Projections,
    out: Tensor | None,
    spec: AttentionSpec,
    ball: Ball,
    sink: Tensor | None = None,
) -> HeadBounds:
    """Bounds for one sequence and all its heads; ``out`` is W_O per head, (H, E, M), or None.

    ``sink`` has the score of a sink for every head, (H,).
    """
    H, n = x.q.shape[1:3]
    if not bounded(spec.choice):
        infinite = x.q.new_full((H,), torch.inf)
        return HeadBounds(infinite, infinite, infinite)
    ball = _beyond_rounding(x, ball)
    if sink is not None:
        k, v, prior = add_sink(x.k, x.v, sink, spec.prior)
        x, spec = x._replace(k=k, v=v), replace(spec, prior=prior)
    head = _coordinates(x, out, spec)._replace(fixed=int(sink is not None))
    w = _weights(x, head, spec, ball)
    rows = _RowBounds(head, w, ball, exact_sum=isinstance(spec.choice, Softmax))
    return rows.bounds(n)


def _beyond_rounding(x: Projections, ball: Ball) -> Ball:
    """The ball, grown by a move of every token that is larger than the rounding of X W."""
    n, M = x.X.shape[-2:]
    size = 4.0 * (M + 8) * M**0.5 * torch.finfo(x.X.dtype).eps * float(lengths(x.X).amax())
    return Ball(ball.token + size, ball.total + n**0.5 * size)


def _coordinates(x: Projections, out: Tensor | None, spec: AttentionSpec) -> _Head:
    q, k, v = x.q[0], x.k[0], x.v[0]
    beta, scale = spec.choice.beta, spec.scale_for(q.shape[-1])
    factor_of_scores = scale * (beta.reshape(-1, 1, 1) if isinstance(beta, Tensor) else beta)
    F_Q, F_K, F_V = (factor(w[0]) for w in x.W)
    V = F_V.mT
    if out is not None:
        F_O = factor(out.mT)
        v, V = v @ F_O, V @ F_O
    A, B = factor_of_scores * F_Q, F_K
    if x.rotations is None:
        M = spectral(A.mT @ B)
        A, B = A.unsqueeze(1), B.unsqueeze(1)
    else:
        M = _pair_norm(A, B, x.rotations)
        A, B = (x.rotations @ F.unsqueeze(1) for F in (A, B))  # (H, n, D, r)
    return _Head(factor_of_scores * q, k, v, A, B, M, spectral(V))


def _pair_norm(A: Tensor, B: Tensor, R: Tensor) -> Tensor:
    """max over i, j of |A^T R_i^T R_j B|_2, from above: A, B (H, D, r), R (n, D, D) -> (H,).

    Rotations in fixed planes commute, so for equal steps R_i^T R_(i+1) the product R_i^T R_j is
    R_0^T R_(j-i) or its transpose. ``uneven`` bounds what unequal steps add.
    """
    n, sizes = len(R), spectral(A) * spectral(B)
    steps = R[:-1].mT @ R[1:]
    uneven = 2.0 * n * (steps - steps[:1]).square().sum((-2, -1)).sqrt().max() if n > 1 else 0.0
    ahead = R[0].mT @ R
    offsets = torch.cat([ahead, ahead[1:].mT])
    largest_offset = spectral(A.mT.unsqueeze(1) @ offsets @ B.unsqueeze(1)).amax(-1)
    return torch.minimum(sizes * spectral(R).amax() ** 2, largest_offset + uneven * sizes)


def _weights(x: Projections, head: _Head, spec: AttentionSpec, ball: Ball) -> _Weights:
    choice, prior = spec.choice, spec.prior
    z = spec.scale_for(x.q.shape[-1]) * x.q @ x.k.mT  # (1, H, n, n)
    H, n, S = z.shape[1:]
    log_prior = None
    if prior is not None:
        log_prior = prior.log(n, S, B=1, H=H, device=z.device, dtype=z.dtype)
    p = choice.weights(z, log_prior)[0]
    s = choice.spread(p)
    e = _score_moves(head, s, ball)
    scores = choice.scores(z, log_prior, -1)[0][0]
    if isinstance(choice, Softmax):
        low, high = _softmax_box(scores, e)
    else:
        low, high = _threshold_box(choice, scores, e)
    slack = 2048.0 * torch.finfo(p.dtype).eps  # corners are rounded too
    low, high = low * (1.0 - slack), high * (1.0 + slack)
    s_low, s_high = choice.spread(low), choice.spread(high)
    return _Weights(
        p,
        torch.maximum(high - p, p - low).clamp(min=0.0),
        high,
        s,
        torch.maximum(s_high - s, s - s_low).clamp(min=0.0),
        s_high,
    )


def _score_moves(head: _Head, s: Tensor, ball: Ball) -> Tensor:
    """e_ij, the largest move of score ij up to a shift of its row: (H, n, n)."""
    r = ball.token
    total = s.sum(-1, keepdim=True)
    mean = s @ head.k / torch.where(total > 0, total, 1.0)
    far = [head.keys(mean[:, rows], rows).norm(dim=-1) for rows in _row_slices(head)]
    moves: Tensor = r * torch.cat(far, 1)
    moves[..., head.fixed :] += r * head.query_sizes() + r * r * head.M.view(-1, 1, 1)
    sizes = lengths(head.q).unsqueeze(-1) * lengths(head.k).amax(-1).view(-1, 1, 1)
    return moves + (head.q.shape[-1] + 8) * torch.finfo(s.dtype).eps * sizes  # of the products


def _row_slices(head: _Head) -> list[slice]:
    """Rows whose (H, t, n, r) tensors have at most ``_BLOCK`` numbers."""
    (H, n, D), S = head.q.shape, head.k.shape[1]
    width = max(D, head.v.shape[-1], head.A.shape[-1], 1)
    step = max(1, _BLOCK // max(1, H * S * width))
    return [slice(first, min(first + step, n)) for first in range(0, n, step)]


def _softmax_box(x: Tensor, e: Tensor) -> tuple[Tensor, Tensor]:
    """The smallest and largest weights when every score x moves by at most e.

    Both are logistic functions of a difference: in a large ball the factors exp(e) of the keys
    differ by more than the range of the dtype, their logarithms do not.
    """
    return _one_against_others(x - e, x + e), _one_against_others(x + e, x - e)


def _one_against_others(own: Tensor, others: Tensor) -> Tensor:
    """exp(own_j) / (exp(own_j) + sum over k != j of exp(others_k)), and 0 where own_j is -inf."""
    closed = torch.full_like(others[..., :1], -torch.inf)
    before = torch.cat((closed, others[..., :-1]), -1).logcumsumexp(-1)
    after = torch.cat((others[..., 1:], closed), -1).flip(-1).logcumsumexp(-1).flip(-1)
    rest = torch.logaddexp(before, after)
    return torch.where(own > -torch.inf, torch.sigmoid(own - rest), 0.0)


def _threshold_box(choice: Choice, x: Tensor, e: Tensor) -> tuple[Tensor, Tensor]:
    """``_softmax_box`` for p = response(x - nu) with a threshold nu, which rises with x."""
    nu_low, nu_high = (threshold(choice, y, choice.choose(y)) for y in (x - e, x + e))
    slack = 16.0 * torch.finfo(x.dtype).eps
    nu_low, nu_high = nu_low - slack * (1.0 + nu_low.abs()), nu_high + slack * (1.0 + nu_high.abs())
    high = choice.response(x + e - nu_low).clamp(0.0, 1.0)
    low = choice.response(x - e - nu_high).clamp(0.0, 1.0)
    # Weights sum to one: the extremes of the others bound each of them.
    open_ = x > -torch.inf
    high = torch.where(open_, high, 0.0)
    low = torch.where(open_, low, 0.0)
    rest_high = (1.0 + slack) - (low.sum(-1, keepdim=True) - low)
    rest_low = (1.0 - slack) - (high.sum(-1, keepdim=True) - high)
    any_open = open_.any(-1, keepdim=True)
    return torch.maximum(low, torch.where(any_open, rest_low, 0.0)), torch.minimum(high, rest_high)


class _RowBounds:
    """The pieces of both bounds row by row: every tensor (H, n)."""

    def __init__(self, head: _Head, w: _Weights, ball: Ball, exact_sum: bool) -> None:
        self.head, self.w, self.ball = head, w, ball
        self.sum_max = torch.ones_like(w.s[..., 0]) if exact_sum else w.s_max.sum(-1)
        self.off = w.s_off.sum(-1)
        # a_i: a bound on the weighted move of the tokens in row i
        moving = w.s_max[..., head.fixed :]
        self.moved = torch.minimum(self.sum_max, moving.sum(-1))
        self.shift = torch.minimum(
            ball.token * self.moved.sqrt(), ball.total * moving.amax(-1).sqrt()
        )
        self.query_size = head.query_sizes().amax(-1)
        self._moments()

    def _moments(self) -> None:
        """c_V and c_K of the changes d and of the maxima s_max."""
        head, w = self.head, self.w
        total = w.s.sum(-1, keepdim=True)
        inverse = torch.where(total > 0, 1.0 / torch.where(total > 0, total, 1.0), 0.0)
        parts: dict[str, list[Tensor]] = {name: [] for name in ("vd", "kd", "vm", "km", "v", "k")}
        middle = head.v.mean(1, keepdim=True), head.k.mean(1, keepdim=True)
        for rows in _row_slices(head):
            mean_v, mean_k = ((w.s[:, rows] @ z) * inverse[:, rows] for z in (head.v, head.k))
            centred = {
                "v": (head.v.unsqueeze(1) - mean_v.unsqueeze(2), head.v - middle[0]),
                "k": (head.keys(mean_k, rows), head.keys(middle[1].expand_as(mean_k), rows)),
            }
            for name, (y, about) in centred.items():
                for kind, weight in (("d", w.s_off), ("m", w.s_max)):
                    half = weight[:, rows].unsqueeze(-1).sqrt() * y
                    parts[name + kind].append(largest(half.mT @ half))
                size = about.square().sum(-1).amax(-1, keepdim=name == "v")
                parts[name].append(size.expand_as(parts[name + "m"][-1]))
        self.vd, self.kd, vm, km, v, k = (torch.cat(parts[name], 1) for name in parts)
        # No covariance is larger than the squared distance of the farthest token from one centre.
        self.vm, self.km = torch.minimum(vm, v * self.sum_max), torch.minimum(km, k * self.sum_max)

    def bounds(self, n: int) -> HeadBounds:
        """A, B and the bound in the token norm."""
        head, r = self.head, self.ball.token
        p_max, p_off, s_max, s_off = (
            x[..., head.fixed :] for x in (self.w.p_max, self.w.p_off, self.w.s_max, self.w.s_off)
        )
        V, M = head.V.unsqueeze(-1), head.M.unsqueeze(-1)
        g = self.vm.sqrt() + self.shift * V
        h = self.km.sqrt() + self.shift * M
        moved_queries = M[:, 0] * self._shared(s_max * g.square().unsqueeze(-1))
        mixing = head.V * nonnegative(p_max).clamp(max=n**0.5)
        anywhere = mixing + (g * h).amax(-1) + self._column(s_max, g.square()) + moved_queries
        move = self.shift * (M * self.vm.sqrt() + V * self.km.sqrt()) + self.shift**2 * V * M
        switch = (self.vd * self.kd).sqrt() * (1.0 + self.off)  # sum_j s'_ij >= 1
        key = head.V * self._column(s_max, self.shift.square())
        key = key + self._column(s_off, self.vd) + self._column(s_max, self.vd * self.off)
        change = head.V * nonnegative(p_off) + (move + switch).amax(-1) + moved_queries + key
        token = V + g * h + g * self.moved.sqrt() * (self.query_size + r * M)
        return HeadBounds(outward(anywhere), outward(change), outward(token.amax(-1)))

    def _column(self, weights: Tensor, rows: Tensor) -> Tensor:
        """K(w) for w_ij = weights_ij rows_i: (H, n, n), (H, n) -> (H,)."""
        head = self.head
        w = (weights * rows.unsqueeze(-1)).mT  # (H, j, i)
        q = head.q if head.rotated else head.q @ head.B[:, 0]
        columns = [w @ (q[..., c : c + 1] * q) for c in range(q.shape[-1])]
        moments = torch.stack(columns, -2)  # (H, j, D, D)
        if head.rotated:
            moments = head.B.mT @ moments @ head.B
        return largest(moments).amax(-1).sqrt()

    def _shared(self, weights: Tensor) -> Tensor:
        """(max_j sum_i w_ij |dx_i|^2)^(1/2) over the ball: (H, n, n) -> (H,)."""
        return self.ball.share(weights.mT).amax(-1).sqrt()
