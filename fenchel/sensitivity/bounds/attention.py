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

Softmax self-attention for all tokens of length at most R, from the weights alone. With
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
from typing import Unpack

import torch
from torch import Tensor

from fenchel.attention import AttentionSpec
from fenchel.attention.spec import AttentionKeywords
from fenchel.choice import Choice
from fenchel.sensitivity.bounds.covariance import factor, mixing, moment
from fenchel.sensitivity.norms import largest, outward, spectral
from fenchel.sensitivity.weight_blocks import Projections, WeightBlocks, flat, project, spread


def row(choice: Choice, p: Tensor) -> Tensor:
    """An upper bound on ``choice.sensitivity(p)``, differentiable: (..., K) -> (...)."""
    s = spread(choice, p)
    if s.shape[-1] < 2:
        return torch.zeros_like(s.sum(-1))
    top = s.topk(2, dim=-1)
    first, second = top.values.unbind(-1)
    others = s * torch.ones_like(s).scatter(-1, top.indices[..., :1], 0.0)
    rest = others.sum(-1)
    total = first + rest
    return outward(first * (rest + second) / torch.where(total > 0, total, 1.0))


def penalty(choice: Choice, p: Tensor) -> Tensor:
    """Mean over heads of the log of the largest row bound of each: (..., H, T, K) -> ().

    To be added to a training loss, so that no row becomes very sensitive. The bound of a row that
    is exactly one-hot is 0; it counts as the smallest positive number of the dtype.
    """
    bound = row(choice, p).amax(-1)
    return bound.clamp(min=torch.finfo(bound.dtype).tiny).log().mean()


def entropy(T: int, size: float) -> float:
    """The least entropy of softmax over T scores of length at most ``size``. Attained."""
    if T < 1 or size < 0:
        raise ValueError(f"entropy needs T >= 1 scores of length >= 0; got T={T}, size={size}.")
    if T == 1:
        return 0.0
    b = math.exp(-size * math.sqrt(T / (T - 1)))
    rest = (T - 1) * b
    return math.log1p(rest) + size * math.sqrt(T * (T - 1)) * b / (1.0 + rest)


def generic(
    X: Tensor,
    W_Q: Tensor,
    W_K: Tensor,
    W_V: Tensor,
    **keywords: Unpack[AttentionKeywords],
) -> Tensor:
    """|W_V| (|P| + 2 L |X|^2 |M|). At a point; any choice with a constant L."""
    x, rows = _at(X, W_Q, W_K, W_V, AttentionSpec(**keywords))
    slope = torch.as_tensor(rows.spec.choice.lipschitz(rows.S), dtype=X.dtype, device=X.device)
    return _through_scores(x, rows, slope.amax())


def yudin(
    X: Tensor,
    W_Q: Tensor,
    W_K: Tensor,
    W_V: Tensor,
    **keywords: Unpack[AttentionKeywords],
) -> Tensor:
    """|W_V| (|P| + 2 |X|^2 |M| max_i b_i). At a point; any choice."""
    x, rows = _at(X, W_Q, W_K, W_V, AttentionSpec(**keywords))
    slope = x.q.new_zeros(rows.lead)
    for block in rows:
        p = block.p.view(*rows.lead, *block.p.shape[1:])
        slope = torch.maximum(slope, row(rows.spec.choice, p).amax(-1))
    return _through_scores(x, rows, slope)


def castin_at(
    X: Tensor, W_Q: Tensor, W_K: Tensor, W_V: Tensor, *, scale: float | None = None
) -> Tensor:
    """|W_V| sqrt(n + (n + 1) r^2 R^2), the data form. At a point; softmax, masked or not."""
    x, rows = _at(X, W_Q, W_K, W_V, AttentionSpec(scale=scale))
    n = rows.T
    far = torch.cdist(x.X, x.X).amax((-2, -1)).reshape(-1, 1)
    keys, queries = (
        abs(rows.scale) * (a @ factor(w)).norm(dim=-1).amax(-1)
        for a, w in ((x.q, x.W[1]), (x.k, x.W[0]))
    )
    z = far * torch.maximum(keys, queries)
    released = (n + (n + 1) * z.square()).sqrt()
    proven = (n + n * z.square() / 4).sqrt() + z / 2
    return outward(spectral(x.W[2]) * torch.maximum(released, proven)).reshape(x.axes)


def token_max(
    X: Tensor,
    W_Q: Tensor,
    W_K: Tensor,
    W_V: Tensor,
    **keywords: Unpack[AttentionKeywords],
) -> Tensor:
    """How far any token can move when none moves further than 1. At a point; free of n."""
    x, rows = _at(X, W_Q, W_K, W_V, AttentionSpec(**keywords))
    F_Q, F_K = (flat(factor(w).expand(*rows.lead, -1, -1)) for w in x.W[:2])
    k, v = (y - y.mean(-2, keepdim=True) for y in (rows.k, flat(x.v)))
    worst = k.new_zeros(len(k))
    for block in rows:
        block_rows, keys = block.rows, block.keys
        C = moment(block.s, v[:, keys], k[:, keys]) @ F_Q.unsqueeze(1)
        D = moment(block.s, v[:, keys], v[:, keys])
        size = (rows.q[:, block_rows] @ F_K).norm(dim=-1)
        key = (largest(D) * block.s.sum(-1)).sqrt() * size
        worst = torch.maximum(worst, abs(rows.scale) * (spectral(C) + key).amax(-1))
    return outward(spectral(x.W[2]) + worst.view(rows.lead)).reshape(x.axes)


def _at(
    X: Tensor,
    W_Q: Tensor,
    W_K: Tensor,
    W_V: Tensor,
    spec: AttentionSpec,
) -> tuple[Projections, WeightBlocks]:
    if spec.softcap is not None:
        raise ValueError("this bound is for scores without a soft cap; use bounds.covariance.")
    x = project(X, W_Q, W_K, W_V)
    return x, WeightBlocks(x.q, x.k, spec)


def _through_scores(x: Projections, rows: WeightBlocks, slope: Tensor) -> Tensor:
    size = spectral(x.X).reshape(-1, 1)
    M = abs(rows.scale) * spectral(factor(x.W[0]).mT @ factor(x.W[1]))
    P = mixing(rows).view(rows.lead)
    bound = spectral(x.W[2]) * (P + 2.0 * slope * size.square() * M)
    return outward(bound).reshape(x.axes)


def ball(
    W_Q: Tensor, W_K: Tensor, W_V: Tensor, *, n: int, radius: float, scale: float | None = None
) -> Tensor:
    """|W_V| ((1 + sqrt n) |A| R^2 + sqrt n). On a ball of tokens; softmax."""
    A, V = _sizes(W_Q, W_K, W_V, scale)
    root = math.sqrt(n)
    return outward(V * ((1.0 + root) * A * radius**2 + root))


def castin(
    W_Q: Tensor, W_K: Tensor, W_V: Tensor, *, n: int, radius: float, scale: float | None = None
) -> Tensor:
    """sqrt(3) |W_V| sqrt(|A|^2 R^4 (4 n + 1) + n). On a ball of tokens; softmax."""
    A, V = _sizes(W_Q, W_K, W_V, scale)
    return outward(V * (3.0 * (A.square() * radius**4 * (4 * n + 1) + n)).sqrt())


def token_max_ball(
    W_Q: Tensor, W_K: Tensor, W_V: Tensor, *, radius: float, scale: float | None = None
) -> Tensor:
    """|W_V| (1 + 2 |A| R^2), in the norm max_i |x_i|. On a ball of tokens; softmax; free of n."""
    A, V = _sizes(W_Q, W_K, W_V, scale)
    return outward(V * (1.0 + 2.0 * A * radius**2))


def normalised_radius(d: int, weight: Tensor | None = None, bias: Tensor | None = None) -> float:
    """The largest length of a token after a LayerNorm or RMSNorm of width d."""
    longest = math.sqrt(d) * (1.0 if weight is None else float(weight.abs().amax()))
    return longest + (0.0 if bias is None else float(bias.norm()))


def _sizes(W_Q: Tensor, W_K: Tensor, W_V: Tensor, scale: float | None) -> tuple[Tensor, Tensor]:
    A = abs(AttentionSpec(scale=scale).scale_for(W_Q.shape[-1])) * spectral(
        factor(W_Q).mT @ factor(W_K)
    )
    return A, torch.as_tensor(spectral(W_V))


def l2_attention(W_Q: Tensor, W_V: Tensor, W_O: Tensor | None = None, *, n: int) -> Tensor:
    """The bound for W_Q (H, M, D) or (M, D), W_V (H, M, E), W_O (H E, M) or none. Global."""
    if n < 1:
        raise ValueError(f"attention needs n >= 1 tokens, got n={n}.")
    W_Q, W_V = (w if w.dim() > 2 else w[None] for w in (W_Q, W_V))
    heads = spectral(W_Q).square() * spectral(W_V)
    tau = W_Q.shape[-1] ** -0.5
    total = heads.square().sum(-1).sqrt()
    if W_O is not None:
        total = total * spectral(W_O)
    return outward(math.sqrt(n) * tau * (4.0 * _inverse_phi(n - 1) + 1.0) * total)


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
