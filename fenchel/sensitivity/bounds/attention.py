"""Bounds of self-attention at a point, by others and by us: sigma_max of the Jacobian in X.

With M = scale W_Q W_K^T, P the weights and lambda_i the sensitivity of row i,

    generic    |W_V| (|P| + 2 L |X|^2 |M|)                   L the choice's own constant
    yudin      |W_V| (|P| + 2 |X|^2 |M| max_i b_i)           b_i >= lambda_i, the closed form
    castin_at  |W_V| sqrt(n + (n + 1) r^2 R^2)               r the diameter of the tokens,
                                                             R = max over i of |M^T x_i|, |M x_i|

Norms are spectral. The first two hold since the weights move by dP_i = J_i dS_i, |dS| <=
2 |X| |M| |dX|, and |dP X| <= max_i |J_i| |dS| |X|. The third is evaluated, for softmax, by the code
released with its paper; we can prove it when r R is at least about 4 / (3 sqrt n), and take the
larger of it and |W_V| (sqrt(n + n r^2 R^2 / 4) + r R / 2), which always holds. Proofs:
docs/maths/sensitivity.md. All three grow with |X| or n where the truth need not:
``covariance`` is the one to use.

Token by token, for |X| = max_i |x_i| and any number of tokens,

    token_max  max_i  |W_V| + |C_i W_Q^T| scale + sqrt(|D_i| sum_j s_ij) |W_K q_i| scale,

with C_i and D_i as in fenchel.sensitivity.bounds.covariance.

Yudin et al. (2025). Castin, Ablin and Peyre (2024), How smooth is attention?
"""

import torch
from torch import Tensor

from fenchel.attention import Prior
from fenchel.choice import Choice, Softmax
from fenchel.sensitivity.bounds.covariance import factor, mixing, moment
from fenchel.sensitivity.bounds.scores import row
from fenchel.sensitivity.norms import largest, outward, spectral
from fenchel.sensitivity.rows import Projected, Rows, flat, project

_SOFTMAX = Softmax()


def generic(
    X: Tensor,
    W_Q: Tensor,
    W_K: Tensor,
    W_V: Tensor,
    *,
    choice: Choice = _SOFTMAX,
    prior: Prior | None = None,
    scale: float | None = None,
) -> Tensor:
    """|W_V| (|P| + 2 L |X|^2 |M|). At a point; any choice with a constant L."""
    x, rows = _at(X, W_Q, W_K, W_V, choice, prior, scale)
    slope = torch.as_tensor(choice.lipschitz(rows.S), dtype=X.dtype, device=X.device)
    return _through_scores(x, rows, slope.amax())


def yudin(
    X: Tensor,
    W_Q: Tensor,
    W_K: Tensor,
    W_V: Tensor,
    *,
    choice: Choice = _SOFTMAX,
    prior: Prior | None = None,
    scale: float | None = None,
) -> Tensor:
    """|W_V| (|P| + 2 |X|^2 |M| max_i b_i). At a point; any choice."""
    x, rows = _at(X, W_Q, W_K, W_V, choice, prior, scale)
    slope = x.q.new_zeros(rows.lead)
    for block in rows:
        p = block.p.view(*rows.lead, *block.p.shape[1:])
        slope = torch.maximum(slope, row(choice, p).amax(-1))
    return _through_scores(x, rows, slope)


def castin_at(
    X: Tensor, W_Q: Tensor, W_K: Tensor, W_V: Tensor, *, scale: float | None = None
) -> Tensor:
    """|W_V| sqrt(n + (n + 1) r^2 R^2), the data form. At a point; softmax, masked or not."""
    x, rows = _at(X, W_Q, W_K, W_V, _SOFTMAX, None, scale)
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
    *,
    choice: Choice = _SOFTMAX,
    prior: Prior | None = None,
    scale: float | None = None,
) -> Tensor:
    """How far any token can move when none moves further than 1. At a point; free of n."""
    x, rows = _at(X, W_Q, W_K, W_V, choice, prior, scale)
    F_Q, F_K = (flat(factor(w).expand(*rows.lead, -1, -1)) for w in x.W[:2])
    k, v = (y - y.mean(-2, keepdim=True) for y in (rows.k, flat(x.v)))
    worst = k.new_zeros(len(k))
    for block in rows:
        here, keys = block.rows, block.keys
        C = moment(block.s, v[:, keys], k[:, keys]) @ F_Q.unsqueeze(1)
        D = moment(block.s, v[:, keys], v[:, keys])
        size = (rows.q[:, here] @ F_K).norm(dim=-1)
        key = (largest(D) * block.s.sum(-1)).sqrt() * size
        worst = torch.maximum(worst, abs(rows.scale) * (spectral(C) + key).amax(-1))
    return outward(spectral(x.W[2]) + worst.view(rows.lead)).reshape(x.axes)


def _at(
    X: Tensor,
    W_Q: Tensor,
    W_K: Tensor,
    W_V: Tensor,
    choice: Choice,
    prior: Prior | None,
    scale: float | None,
) -> tuple[Projected, Rows]:
    x = project(X, W_Q, W_K, W_V)
    scale = x.q.shape[-1] ** -0.5 if scale is None else scale
    return x, Rows(x.q, x.k, choice, prior, scale)


def _through_scores(x: Projected, rows: Rows, slope: Tensor) -> Tensor:
    size = spectral(x.X).reshape(-1, 1)
    M = abs(rows.scale) * spectral(factor(x.W[0]).mT @ factor(x.W[1]))
    P = mixing(rows).view(rows.lead)
    bound = spectral(x.W[2]) * (P + 2.0 * slope * size.square() * M)
    return outward(bound).reshape(x.axes)
