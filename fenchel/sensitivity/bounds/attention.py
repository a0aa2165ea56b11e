"""Upper bounds for attention: of one row of weights, of self-attention at a point, on a ball.

One row, scores to weights (``row``, ``penalty``, ``entropy``). The derivative of a choice is
J = diag(s) - s s^T / sum(s); ``Choice.sensitivity`` gives its largest eigenvalue lambda exactly.
With s_1 >= s_2 >= ... and R = s_2 + s_3 + ... there is also

    lambda <= s_1 (R + s_2) / (s_1 + R),          for softmax p_1 (1 - p_1 + p_2) times beta,

smooth enough to train against. Proof: lambda in [s_2, s_1] solves s_1 / (s_1 - lambda) = sum over
i >= 2 of s_i / (lambda - s_i), the right side is at most R / (lambda - s_2), and clearing
denominators is the claim. Equality when the smaller weights are all equal, as they are for two.
R is a sum and never 1 - p_1: in a saturated row that difference has no correct digit.

If T scores have length at most s, centred or not, the entropy of their softmax is at least

    log(1 + (T - 1) b) + s sqrt(T (T - 1)) b / (1 + (T - 1) b),       b = exp(-s sqrt(T / (T - 1))),

attained by s sqrt((T-1)/T) (1, -1/(T-1), ..., -1/(T-1)).

Self-attention at a point X (n tokens): sigma_max of its Jacobian in X. With M = scale W_Q W_K^T, P
the weights, lambda_i the sensitivity of row i and spectral norms,

    generic    |W_V| (|P| + 2 L |X|^2 |M|)                   L the choice's own constant
    yudin      |W_V| (|P| + 2 |X|^2 |M| max_i b_i)           b_i >= lambda_i, the closed form above
    castin_at  |W_V| sqrt(n + (n + 1) r^2 R^2)               r the diameter of the tokens,
                                                             R = max over i of |M^T x_i|, |M x_i|

The first two hold since the weights move by dP_i = J_i dS_i, |dS| <= 2 |X| |M| |dX|, and
|dP X| <= max_i |J_i| |dS| |X|. The third is evaluated, for softmax, by the code released with its
paper; a proof is known when r R is at least about 4 / (3 sqrt n), so the function returns the
larger of it and |W_V| (sqrt(n + n r^2 R^2 / 4) + r R / 2), which always holds. All three grow with
|X| or n where the truth need not: ``covariance`` is tighter, and these are here for comparison. In
the norm max_i |x_i|, for any number of tokens and with C_i and D_i as in bounds/covariance.py,

    token_max  max_i  |W_V| + |C_i W_Q^T| scale + sqrt(|D_i| sum_j s_ij) |W_K q_i| scale.

Softmax self-attention for all tokens of length at most R, from only the weights. With
A = scale W_Q W_K^T, its Lipschitz constant on that set is at most

    ball            |W_V| ((1 + sqrt n) |A| R^2 + sqrt n)
    castin          sqrt(3) |W_V| sqrt(|A|^2 R^4 (4 n + 1) + n)
    token_max_ball  |W_V| (1 + 2 |A| R^2)                           for |X| = max_i |x_i|

Row i moves by W_V^T [C_i A^T dx_i + sum_j p_ij (x_j - m_i)(a_i . dx_j) + sum_j p_ij dx_j], with
|C_i| <= R^2 and |a_i| <= |A| R; Cauchy and Schwarz in p_i, and column sums of at most n, give the
first. The second is larger: |A| R^2 + 2 sqrt(n) |A| R^2 + sqrt(n) exceeds the first and is at most
the second. The third has no n, since rows sum to one. They hold under any prior. R^2 cannot be
improved (``witness.blowup``). After a norm layer R is ``normalised_radius``.

Attention by distances, which is Lipschitz on the whole space (``l2_attention``):

    Z = X W_Q,   P = softmax(-|z_i - z_j|^2 tau),   f(X) = P X A W_V,   A = tau W_Q W_Q^T

with tau = 1 / sqrt(D) and one matrix for queries and keys. For n tokens and H heads side by side,
mixed by W_O, and with phi(x) = x e^(x+1),

    Lip <= sqrt(n) tau (4 phi^-1(n - 1) + 1) sqrt(sum_h |W_Q^h|^4 |W_V^h|^2) |W_O|.

The paper is often quoted with the first power of |W_Q|. f is quadratic in W_Q at fixed weights, and
the first power is violated as soon as W_Q is scaled up by ten; the square is what the proof gives.

Proofs: docs/maths/sensitivity.md. Kim, Papamakarios and Mnih (2021), The Lipschitz constant of
self-attention. Zhai et al. (2023), Stabilizing transformer training by preventing attention entropy
collapse. Castin, Ablin and Peyre (2024), How smooth is attention? Yudin, Gaponov, Kudriashov and
Rakhuba (2025), Pay attention to attention distribution.
"""

import math
import sys
from collections.abc import Callable
from typing import Unpack

import torch
from torch import Tensor

from fenchel.attention import AttentionSpec
from fenchel.attention.spec import AttentionKeywords
from fenchel.choice import Choice
from fenchel.sensitivity.bounds.covariance import (
    RowMoments,
    factor,
    factors_of,
    mixing,
    projection_errors,
    score_errors,
)
from fenchel.sensitivity.norms import spectral
from fenchel.sensitivity.rounding import (
    above,
    bound_dtype,
    lengths,
    outward,
    product,
    round_up,
    unit_size,
)
from fenchel.sensitivity.weight_blocks import WeightBlocks, curvature, project

_FLOOR = 1e-150  # added to lengths of entries of order 1, whose squares may have underflowed


def row(choice: Choice, p: Tensor) -> Tensor:
    """An upper bound on ``choice.sensitivity(p)``, differentiable: (..., K) -> (...)."""
    if choice.feasible == "box":
        bound = outward(choice.row_beta() * choice.spread(p).amax(-1), p.shape[-1])
        # below the normal numbers a share is rounded away
        return bound + (above(bound.detach()) - bound.detach())
    return _row_bound(curvature(choice, p))


def _row_bound(s: Tensor) -> Tensor:
    if s.shape[-1] < 2:
        return torch.zeros_like(s.sum(-1))
    top = s.topk(2, dim=-1)
    first, second = top.values.unbind(-1)
    others = s * torch.ones_like(s).scatter(-1, top.indices[..., :1], 0.0)
    rest = others.sum(-1)
    total = first + rest
    # The quotient is at most 2, and a product of two weights may underflow.
    return outward(first * ((rest + second) / torch.where(total > 0, total, 1.0)), s.shape[-1])


def penalty(choice: Choice, p: Tensor) -> Tensor:
    """Mean over heads of the log of the largest row bound of each: (..., H, T, K) -> ().

    To be added to a training loss, so that no row becomes very sensitive. The bound of a row that
    is exactly one-hot is 0; it counts as the smallest positive number of the dtype.
    """
    bound = row(choice, p).amax(-1)
    return bound.clamp(min=torch.finfo(bound.dtype).tiny).log().mean()


def entropy(T: int, size: float) -> float:
    """The least entropy of softmax over T scores of length at most ``size``. Attained."""
    if T < 1 or not size >= 0:
        raise ValueError(f"entropy needs T >= 1 scores of length >= 0; got T={T}, size={size}.")
    b = 0.0 if T == 1 else math.exp(-size * math.sqrt(T / (T - 1)))
    rest = (T - 1) * b
    if rest == 0.0:
        return 0.0
    least = math.log1p(rest) + size * math.sqrt(T * (T - 1)) * b / (1.0 + rest)
    return least * (1.0 - (64.0 + size) * sys.float_info.epsilon)  # exp(-x) is off by x eps


def generic(
    X: Tensor,
    W_Q: Tensor,
    W_K: Tensor,
    W_V: Tensor,
    **keywords: Unpack[AttentionKeywords],
) -> Tensor:
    """|W_V| (|P| + 2 L |X|^2 |M|). At a point; any choice with a constant L."""
    point = _Point(X, W_Q, W_K, W_V, AttentionSpec(**keywords))
    constant = torch.as_tensor(point.rows.spec.choice.lipschitz(point.rows.S))
    return point.through_scores(constant.to(point.x.X).amax().expand(point.rows.lead))


def yudin(
    X: Tensor,
    W_Q: Tensor,
    W_K: Tensor,
    W_V: Tensor,
    **keywords: Unpack[AttentionKeywords],
) -> Tensor:
    """|W_V| (|P| + 2 |X|^2 |M| max_i b_i). At a point; any choice."""
    point = _Point(X, W_Q, W_K, W_V, AttentionSpec(**keywords))
    slope = point.x.q.new_zeros(len(point.rows.q))
    for block in point.rows.enlarged(score_errors(point.rows, point.errors)):
        slope = torch.maximum(slope, _row_bound(block.s_max).amax(-1))
    return point.through_scores(slope.view(point.rows.lead))


def castin_at(
    X: Tensor, W_Q: Tensor, W_K: Tensor, W_V: Tensor, *, scale: float | None = None
) -> Tensor:
    """|W_V| sqrt(n + (n + 1) r^2 R^2), the data form. At a point; softmax, masked or not."""
    point = _Point(X, W_Q, W_K, W_V, AttentionSpec(scale=scale))
    x, n, M = point.x, point.rows.T, point.x.X.shape[-1]
    X_unit, unit = unit_size(x.X, (-2, -1))
    far = torch.cdist(X_unit, X_unit, compute_mode="donot_use_mm_for_euclid_dist")
    diameter = product(outward(far.amax((-2, -1)) + _FLOOR, M).reshape(-1, 1), unit.reshape(-1, 1))
    pairs = (x.q, factor(x.W[1])), (x.k, factor(x.W[0]))
    longest = torch.maximum(*(_longest_product(a, F) for a, F in pairs))
    gains = [lengths(w.flatten(-2)) for w in x.W[:2]]
    rounding = 8.0 * torch.finfo(x.q.dtype).eps * (M + x.q.shape[-1])
    longest = longest + rounding * product(lengths(x.X).amax(-1).reshape(-1, 1), *gains)
    z = product(diameter, longest, torch.full_like(longest, abs(point.rows.scale)))
    released = math.sqrt(n + 1) * torch.hypot(z, torch.full_like(z, math.sqrt(n / (n + 1))))
    proven = math.sqrt(n) * torch.hypot(z / 2, torch.ones_like(z)) + z / 2
    return point.result(product(spectral(x.W[2]), torch.maximum(released, proven)))


def _longest_product(a: Tensor, F: Tensor) -> Tensor:
    """The longest row of a F: (B, H, n, D), (B or 1, H, D, r) -> (B, H)."""
    (a, unit), (F, factor_unit) = (unit_size(x, (-2, -1)) for x in (a, F))
    return product(lengths(a @ F).amax(-1), unit[..., 0, 0], factor_unit[..., 0, 0])


def token_max(
    X: Tensor,
    W_Q: Tensor,
    W_K: Tensor,
    W_V: Tensor,
    **keywords: Unpack[AttentionKeywords],
) -> Tensor:
    """How far any token can move when none moves further than 1. At a point; free of n."""
    point = _Point(X, W_Q, W_K, W_V, AttentionSpec(**keywords))
    moments = RowMoments(point.rows, point.x.v, factors_of(point.x), point.errors, cheap=False)
    worst = torch.zeros_like(moments.gain_v)
    for block in moments:
        size = lengths(moments.q[:, block.rows]) + moments.e_q.unsqueeze(-1)
        key = block.root * block.weight.sum(-1).sqrt() * size
        parts = (block.query, moments.query_units), (key, moments.key_units)
        query, key = (product(part, *(u.unsqueeze(-1) for u in units)) for part, units in parts)
        worst = torch.maximum(worst, (query + key).amax(-1))
    worst = outward(worst, 2 * moments.terms)
    return point.result(spectral(point.x.W[2]) + worst.view(point.rows.lead))


class _Point:
    """Self-attention at X in float64, for scores without a soft cap."""

    def __init__(
        self, X: Tensor, W_Q: Tensor, W_K: Tensor, W_V: Tensor, spec: AttentionSpec
    ) -> None:
        if spec.softcap is not None:
            raise ValueError("this bound is for scores without a soft cap; use bounds.covariance.")
        self.dtype = bound_dtype(X, W_Q, W_K, W_V)
        self.x = project(*(A.double() for A in (X, W_Q, W_K, W_V)))
        self.rows = WeightBlocks(self.x.q, self.x.k, spec)
        self.errors = projection_errors(self.x)

    def through_scores(self, slope: Tensor) -> Tensor:
        """|W_V| (|P| + 2 slope |X|^2 |M|) for a slope (B, H)."""
        x, rows = self.x, self.rows
        size, M = spectral(x.X).reshape(-1, 1), _pair_norm(x.W[0], x.W[1])
        P = mixing(rows)
        for block in rows.enlarged(score_errors(rows, self.errors)):
            P = P + lengths(block.p_off.flatten(1))
        P = P.view(rows.lead).clamp(max=rows.T**0.5)
        scores = product(slope, size, M, size, torch.full_like(size, 2.0 * abs(rows.scale)))
        return self.result(product(spectral(x.W[2]), P + scores))

    def result(self, bound: Tensor) -> Tensor:
        """``bound`` (B, H), beyond its rounding, in the dtype and axes of the inputs."""
        n, M = self.x.X.shape[-2:]
        bound = above(outward(bound, n + 4 * (M + sum(w.shape[-1] for w in self.x.W))))
        return round_up(bound, self.dtype).reshape(self.x.axes)


def _pair_norm(W_Q: Tensor, W_K: Tensor) -> Tensor:
    """|W_Q W_K^T|_2, from above: (..., M, D) -> (...)."""
    (A, a), (B, b) = (unit_size(factor(w), (-2, -1)) for w in (W_Q, W_K))
    # Where the product cancels, its rounding is that of its terms.
    rounding = 8.0 * sum(W_Q.shape[-2:]) * torch.finfo(A.dtype).eps
    size = spectral(A.mT @ B) + rounding * lengths(A.flatten(-2)) * lengths(B.flatten(-2))
    return product(size, a[..., 0, 0], b[..., 0, 0])


def ball(
    W_Q: Tensor,
    W_K: Tensor,
    W_V: Tensor,
    *,
    n: int,
    radius: float | Tensor,
    scale: float | None = None,
) -> Tensor:
    """|W_V| ((1 + sqrt n) |A| R^2 + sqrt n). On a ball of tokens; softmax."""
    root = math.sqrt(n)
    return _on_ball(W_Q, W_K, W_V, radius, scale, lambda a: (1.0 + root) * a + root)


def castin(
    W_Q: Tensor,
    W_K: Tensor,
    W_V: Tensor,
    *,
    n: int,
    radius: float | Tensor,
    scale: float | None = None,
) -> Tensor:
    """sqrt(3) |W_V| sqrt(|A|^2 R^4 (4 n + 1) + n). On a ball of tokens; softmax."""

    def bound(a: Tensor) -> Tensor:
        hypot: Tensor = torch.hypot(math.sqrt(4 * n + 1) * a, torch.full_like(a, math.sqrt(n)))
        return math.sqrt(3.0) * hypot

    return _on_ball(W_Q, W_K, W_V, radius, scale, bound)


def token_max_ball(
    W_Q: Tensor, W_K: Tensor, W_V: Tensor, *, radius: float | Tensor, scale: float | None = None
) -> Tensor:
    """|W_V| (1 + 2 |A| R^2), in the norm max_i |x_i|. On a ball of tokens; softmax; free of n."""
    return _on_ball(W_Q, W_K, W_V, radius, scale, lambda a: 1.0 + 2.0 * a)


def _on_ball(
    W_Q: Tensor,
    W_K: Tensor,
    W_V: Tensor,
    radius: float | Tensor,
    scale: float | None,
    bound: Callable[[Tensor], Tensor],
) -> Tensor:
    """|W_V| bound(|A| R^2)."""
    dtype, D = bound_dtype(W_Q, W_K, W_V), W_Q.shape[-1]
    pair = _pair_norm(W_Q.double(), W_K.double())
    R = torch.as_tensor(radius, dtype=torch.float64, device=pair.device)
    c = torch.as_tensor(abs(AttentionSpec(scale=scale).scale_for(D)), dtype=R.dtype).to(R)
    size = product(spectral(W_V.double()), bound(product(pair, R, R, c)))
    return round_up(above(outward(size, 4 * (W_Q.shape[-2] + D))), dtype)


def normalised_radius(d: int, weight: Tensor | None = None, bias: Tensor | None = None) -> float:
    """The largest length of a token after a LayerNorm or RMSNorm of width d."""
    root = math.sqrt(d)
    root = root if root.is_integer() else math.nextafter(root, math.inf)
    if weight is None and bias is None:
        return root
    longest = root * (1.0 if weight is None else float(weight.double().abs().amax()))
    size = longest + (0.0 if bias is None else float(lengths(bias.double())))
    return size * (1.0 + (64.0 + d) * sys.float_info.epsilon)


def l2_attention(W_Q: Tensor, W_V: Tensor, W_O: Tensor | None = None, *, n: int) -> Tensor:
    """The bound for W_Q (H, M, D) or (M, D), W_V (H, M, E), W_O (H E, M) or none. Global."""
    if n < 1:
        raise ValueError(f"attention needs n >= 1 tokens, got n={n}.")
    dtype = bound_dtype(W_Q, W_V, *(() if W_O is None else (W_O,)))
    W_Q, W_V = (w.double() if w.dim() > 2 else w.double()[None] for w in (W_Q, W_V))
    Q = spectral(W_Q)
    total = lengths(product(Q, spectral(W_V), Q))
    out = torch.ones_like(total) if W_O is None else spectral(W_O.double())
    constant = math.sqrt(n / W_Q.shape[-1]) * (4.0 * _inverse_phi(n - 1) + 1.0)
    bound = product(total, out, torch.full_like(total, constant))
    return round_up(above(outward(bound, 4 * (sum(W_Q.shape) + W_V.shape[-1]))), dtype)


def distance_attention(X: Tensor, W_Q: Tensor, W_V: Tensor) -> Tensor:
    """f(X) for one head: (..., n, M), (M, D), (M, E) -> (..., n, E)."""
    tau = W_Q.shape[-1] ** -0.5
    Z = X @ W_Q
    square = Z.square().sum(-1)
    distance = square.unsqueeze(-1) + square.unsqueeze(-2) - 2.0 * Z @ Z.mT
    out: Tensor = torch.softmax(-tau * distance, -1) @ Z @ (tau * W_Q.mT @ W_V)
    return out


def _inverse_phi(y: float) -> float:
    """x >= 0 with x e^(x + 1) = y, from above: Newton on x + log x = log y - 1."""
    if y == 0:
        return 0.0
    x = max(1e-3, math.log1p(y))
    for _ in range(60):
        x = max(x * (1.0 + math.log(y) - 1.0 - math.log(x)) / (1.0 + x), 1e-12)
    return x * (1.0 + 1e-12)
