"""How far self-attention can move anywhere in a ball: two sure bounds, and the lesser counts.

One head, tokens x_j within ``token`` = r of where they are, s_ij the spread of the choice (p_ij for
softmax), y_ij = x_j less the s_i-mean; V, M the value and score matrices (scores x_i^T M x_j).

Scores. Up to a shift of the row, which does nothing, score ij moves by at most
    e_ij = r (|M y_ij| + |M^T x_i|) + r^2 |M|,
and weights rise with their own score and fall with the others, so every p'_ij lies between values
at corners of that box. s' follows from p', and |s'_ij - s_ij| <= d_ij.

Moments. For weights w: c_V(w) = |sum_j w_j V y_j (V y_j)^T|_2, c_M(w) the same with M. A covariance
about its own mean is the least, and moving tokens changes its root by at most a_i, with
a_i = r sqrt(sum_j s'_ij):
    |V C'_i V^T|^(1/2) <= c_V(s_max)^(1/2) + a_i |V|  =: g_i,     |M C'_i M^T|^(1/2) <= ... =: h_i.

Bound A, anywhere: mixing, query and key of the covariance bound with every quantity at its largest,
    |V| |p_max|_2 + max_i g_i h_i + K(s_max g^2) + |M| (max_j sum_i s_max g_i^2 r^2)^(1/2),
    K(w)^2 = max_j lambda_max( sum_i w_ij (M^T x_i)(M^T x_i)^T ).

Bound B, from the centre: the exact norm there, plus what bounds the change of each term,
    mixing  |V| |d_p|_2
    query   max_i  a_i (|M| c_V^(1/2) + |V| c_M^(1/2)) + a_i^2 |V| |M|
                   + (c_V(d) c_M(d))^(1/2) (1 + sum_j d_ij / sum_j s'_ij)
    key     |M| (...)^(1/2) as in A  +  |V| K(s_max a^2)
                   + K(d c_V(d)) + K(s_max c_V(d) sum d / sum s').

B tends to the exact value as r -> 0, A is the better one for large r. In the norm max_i |x_i| the
same pieces give max_i |V| + g_i h_i + g_i (sum_j s')^(1/2) (|M^T x_i| + r |M|), free of n.

Softmax, and Tsallis choices with alpha <= 2, whose spread rises with the weight; others have no
bound here. O(n^2 d^2) time and O(n^2) memory a head. Derivation: docs/maths/sensitivity.md.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from fenchel.attention import Prior
from fenchel.choice import Choice, Entmax, Softmax, Sparsemax
from fenchel.sensitivity.ball import Ball
from fenchel.sensitivity.bounds.covariance import factor
from fenchel.sensitivity.norms import largest, nonnegative, outward, spectral
from fenchel.sensitivity.weight_blocks import Projections

_BLOCK = 1 << 21  # numbers in one (H, t, n, d) tensor


class HeadBounds(NamedTuple):
    """What holds everywhere in a ball, for each head: (H,)."""

    upper: Tensor
    """The largest spectral norm, by A."""
    variation: Tensor
    """The largest |J' - J|_2 against the centre, by B."""
    token: Tensor
    """The largest gain in the norm max_i |x_i|."""


class _Weights(NamedTuple):
    """Weights at the centre and where they may go: every tensor (H, n, n)."""

    p: Tensor
    p_off: Tensor
    p_max: Tensor
    s: Tensor
    s_off: Tensor
    s_max: Tensor


class _Head(NamedTuple):
    """One sequence in the coordinates of its heads."""

    a: Tensor
    """M^T x_i up to a rotation: (H, n, r)."""
    y: Tensor
    """M x_j up to a rotation: (H, n, r)."""
    v: Tensor
    """V x_j up to a rotation: (H, n, E)."""
    M: Tensor
    V: Tensor
    """Spectral norms: (H,)."""


def bounded(choice: Choice) -> bool:
    """Whether the bounds here hold for this choice."""
    if isinstance(choice, Entmax):
        return bool(torch.as_tensor(choice.alpha <= 2.0).all())
    return isinstance(choice, Softmax | Sparsemax)


def head_bounds(
    x: Projections,
    out: Tensor | None,
    choice: Choice,
    prior: Prior | None,
    scale: float,
    ball: Ball,
) -> HeadBounds:
    """Bounds for one sequence and all its heads; ``out`` is W_O by heads, (H, E, M), or none."""
    H, n = x.q.shape[1:3]
    if not bounded(choice):
        none = x.q.new_full((H,), torch.inf)
        return HeadBounds(none, none, none)
    head = _coordinates(x, out, choice, scale)
    w = _weights(x, head, choice, prior, scale, ball)
    rows = _Rows(head, w, ball, exact_sum=isinstance(choice, Softmax))
    return rows.bounds(n)


def _coordinates(x: Projections, out: Tensor | None, choice: Choice, scale: float) -> _Head:
    q, k, v = x.q[0], x.k[0], x.v[0]
    F_Q, F_K, F_V = (factor(w[0]) for w in x.W)
    beta = choice.beta.reshape(-1, 1, 1) if isinstance(choice.beta, Tensor) else choice.beta
    V = F_V.mT
    if out is not None:
        F_O = factor(out.mT)
        v, V = v @ F_O, V @ F_O
    M = spectral(beta * scale * F_Q.mT @ F_K)
    return _Head(beta * scale * q @ F_K, beta * scale * k @ F_Q, v, M, spectral(V))


def _weights(
    x: Projections, head: _Head, choice: Choice, prior: Prior | None, scale: float, ball: Ball
) -> _Weights:
    z = scale * x.q @ x.k.mT  # (1, H, n, n)
    H, n = z.shape[1:3]
    log_prior = None
    if prior is not None:
        log_prior = prior.log(n, n, B=1, H=H, device=z.device, dtype=z.dtype)
    p = choice.weights(z, log_prior)[0]
    s = choice.spread(p)
    e = _score_moves(head, s, ball)
    if isinstance(choice, Softmax):
        low, high = _softmax_box(p, e)
    else:
        scores = choice.scores(z, log_prior, -1)[0][0]
        low, high = _threshold_box(choice, scores, e)
    dust = 16.0 * torch.finfo(p.dtype).eps  # corners are rounded too
    low, high = low * (1.0 - dust), high * (1.0 + dust)
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
    """e_ij: how far score ij can move, up to a shift of its row: (H, n, n)."""
    r = ball.token
    total = s.sum(-1, keepdim=True)
    mean = s @ head.y / torch.where(total > 0, total, 1.0)
    far = torch.cdist(mean, head.y)  # |M y_ij|
    own = head.a.norm(dim=-1, keepdim=True)  # |M^T x_i|
    moves: Tensor = r * (far + own) + r * r * head.M.view(-1, 1, 1)
    return moves


def _softmax_box(p: Tensor, e: Tensor) -> tuple[Tensor, Tensor]:
    """The least and the largest weights when every score moves by at most e."""
    # Divide by the largest factor of the row first: exp(e) may overflow, ratios do not.
    top = e.amax(-1, keepdim=True)
    rise, fall = p * (e - top).exp(), p * (-e - top).exp()
    rises, falls = rise.sum(-1, keepdim=True), fall.sum(-1, keepdim=True)
    high = rise + (falls - fall).clamp(min=0.0)
    low = fall + (rises - rise).clamp(min=0.0)
    return _ratio(fall, low), _ratio(rise, high).clamp(max=1.0)


def _threshold_box(choice: Choice, x: Tensor, e: Tensor) -> tuple[Tensor, Tensor]:
    """The same for a choice that has a threshold: p = response(x - nu), and nu rises with x."""
    nu_low, nu_high = (_threshold(choice, x + sign * e) for sign in (-1.0, 1.0))
    dust = 16.0 * torch.finfo(x.dtype).eps
    nu_low, nu_high = nu_low - dust * (1.0 + nu_low.abs()), nu_high + dust * (1.0 + nu_high.abs())
    high = choice.response(x + e - nu_low).clamp(0.0, 1.0)
    low = choice.response(x - e - nu_high).clamp(0.0, 1.0)
    # Weights sum to one, so none exceeds what the others leave, nor falls below it.
    open_ = x > -torch.inf
    high = torch.where(open_, high, 0.0)
    low = torch.where(open_, low, 0.0)
    left = (1.0 + dust) - (low.sum(-1, keepdim=True) - low)
    kept = (1.0 - dust) - (high.sum(-1, keepdim=True) - high)
    some = open_.any(-1, keepdim=True)
    return torch.maximum(low, torch.where(some, kept, 0.0)), torch.minimum(high, left)


def _threshold(choice: Choice, x: Tensor) -> Tensor:
    p = choice.choose(x)
    top = p.argmax(-1, keepdim=True)
    nu = x.gather(-1, top) - choice.slope(p.gather(-1, top))
    return torch.where(nu.isfinite(), nu, 0.0)


def _ratio(a: Tensor, b: Tensor) -> Tensor:
    return a / torch.where(b > 0, b, 1.0)


class _Rows:
    """The pieces of both bounds, row by row: every tensor (H, n)."""

    def __init__(self, head: _Head, w: _Weights, ball: Ball, exact_sum: bool) -> None:
        self.head, self.w, self.ball = head, w, ball
        self.sum_max = torch.ones_like(w.s[..., 0]) if exact_sum else w.s_max.sum(-1)
        self.off = w.s_off.sum(-1)
        # a_i: the tokens row i looks at move, weighted, by at most this
        widest = w.s_max.amax(-1).sqrt()
        self.shift = torch.minimum(ball.token * self.sum_max.sqrt(), ball.total * widest)
        self.own = head.a.norm(dim=-1)
        self._moments()

    def _moments(self) -> None:
        head, w = self.head, self.w
        total = w.s.sum(-1, keepdim=True)
        inverse = torch.where(total > 0, 1.0 / torch.where(total > 0, total, 1.0), 0.0)
        found: dict[str, list[Tensor]] = {name: [] for name in ("vd", "md", "vm", "mm")}
        n = w.p.shape[-1]
        step = max(1, _BLOCK // max(1, head.v.shape[0] * n * max(head.v.shape[-1], 1)))
        for first in range(0, n, step):
            rows = slice(first, min(first + step, n))
            for name, z in (("v", head.v), ("m", head.y)):
                mean = (w.s[:, rows] @ z) * inverse[:, rows]
                y = z.unsqueeze(1) - mean.unsqueeze(2)  # (H, t, n, d)
                for kind, weight in (("d", w.s_off), ("m", w.s_max)):
                    half = weight[:, rows].unsqueeze(-1).sqrt() * y
                    found[name + kind].append(largest(half.mT @ half))
        self.vd, self.md, vm, mm = (torch.cat(found[k], 1) for k in found)
        self.vm, self.mm = self._capped(vm, head.v), self._capped(mm, head.y)

    def _capped(self, moment: Tensor, z: Tensor) -> Tensor:
        """No covariance is larger than the spread of all tokens about one centre."""
        about = (z - z.mean(1, keepdim=True)).square().sum(-1).amax(-1, keepdim=True)
        return torch.minimum(moment, about * self.sum_max)

    def bounds(self, n: int) -> HeadBounds:
        """A, B and the bound in the token norm."""
        head, w, r = self.head, self.w, self.ball.token
        V, M = head.V.unsqueeze(-1), head.M.unsqueeze(-1)
        g = self.vm.sqrt() + self.shift * V
        h = self.mm.sqrt() + self.shift * M
        turned = M[:, 0] * self._shared(w.s_max * g.square().unsqueeze(-1))
        mixing = head.V * nonnegative(w.p_max).clamp(max=n**0.5)
        anywhere = mixing + (g * h).amax(-1) + self._column(w.s_max, g.square()) + turned
        move = self.shift * (M * self.vm.sqrt() + V * self.mm.sqrt()) + self.shift**2 * V * M
        switch = (self.vd * self.md).sqrt() * (1.0 + self.off)  # sum_j s'_ij >= 1
        key = head.V * self._column(w.s_max, self.shift.square())
        key = key + self._column(w.s_off, self.vd) + self._column(w.s_max, self.vd * self.off)
        change = head.V * nonnegative(w.p_off) + (move + switch).amax(-1) + turned + key
        token = V + g * h + g * self.sum_max.sqrt() * (self.own + r * M)
        return HeadBounds(outward(anywhere), outward(change), outward(token.amax(-1)))

    def _column(self, weights: Tensor, rows: Tensor) -> Tensor:
        """K(w) for w_ij = weights_ij rows_i: (H, n, n), (H, n) -> (H,)."""
        a = self.head.a
        w = (weights * rows.unsqueeze(-1)).mT  # (H, j, i)
        seen = [w @ (a[..., c : c + 1] * a) for c in range(a.shape[-1])]
        return largest(torch.stack(seen, -2)).amax(-1).sqrt()

    def _shared(self, weights: Tensor) -> Tensor:
        """(max_j sum_i w_ij |dx_i|^2)^(1/2) over the ball: (H, n, n) -> (H,)."""
        return self.ball.share(weights.mT).amax(-1).sqrt()
