"""The direction of a step of query and key weights, from their gradients.

**Partner Grams.** To first order, with dq = dW_Q x and R the rotation by position (the identity
without rotary positions), the scores of a head move by

    dS_ij = scale <R_i dq_i, k_j> + scale <q_i, R_j dk_j>        q, k after norm and rotation,

so a move of the queries is measured by A_K = E (R_i^T k_j)(R_i^T k_j)^T and a move of the keys by
A_Q = E (R_j^T q_i)(R_j^T q_i)^T, both over the pairs (i, j) of the grid
(docs/maths/score_descent.md). With rotation the mean runs over ROTATIONS positions of the other
side, and each sequence of a group of up to STRIDE uses its own share of them. Keys shared by a
group of heads are measured by the mean of A_Q over the group.

**Directions.** With g_Q, g_K the gradients (momentum included) and C_Q, C_K the second moments of
the inputs over the same pairs, weights written as rows (D, M):

    spectral     U_Q = -A_K^-1/2 polar(A_K^-1/2 g_Q)            steepest when the score change of
                 U_K = -A_Q^-1/2 polar(A_Q^-1/2 g_K)            a unit input is bounded
    frobenius    U_Q = -(Y C_Q^-1 - Y W_Q^T A_Q^-1 W_Q / 2),    Y = A_K^-1 g_Q
                 U_K = -(Y C_K^-1 - Y W_K^T A_K^-1 W_K / 2),    Y = A_Q^-1 g_K
                 the closed form of exact_step.py with mean second moments in place of the mask and
                 the batch; the term with 1/2 is omitted under rotation and norms, where it has no
                 such form
    raw          U = -g

polar is the orthogonal factor, computed by Muon's quintic iteration. Only the direction matters
here: step_size.py sets the length.
"""

import math
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from fenchel.attention import Angles, rotate
from fenchel.optim.muon import orthogonal
from fenchel.optim.score.probe import mean_over_processes
from fenchel.optim.score.score_change import HeadWeights, ScoreLine, by_group, fused, second_moment

ROTATIONS = 8
"""Positions over which a Gram is averaged under rotation."""
STRIDE = 4
"""Sequences that share these positions among themselves, at most."""


class PartnerGrams(NamedTuple):
    """Second moments of the partners: K is (L, G, D, D), Q is (L, H, D, D)."""

    K: Tensor
    """A_K, which measures queries."""
    Q: Tensor
    """A_Q per head; the mean over a group measures its keys."""


def partner_grams(line: ScoreLine) -> PartnerGrams:
    """The partner Grams at the start of a line."""
    if line.inputs.angles is None or line.angles_q is None:
        queries, keys = _pair_counts(line)
        return PartnerGrams(second_moment(line.start_k, keys), second_moment(line.start_q, queries))
    mask, layout = line.inputs.grid.mask, line.pairs[0].layout
    return PartnerGrams(
        _rotation_averaged(line.start_k, line.angles_q, mask, layout),
        _rotation_averaged(line.start_q, line.inputs.angles, mask.mT, layout),
    )


def _pair_counts(line: ScoreLine) -> tuple[Tensor, Tensor]:
    """In how many pairs of the grid each query and each key is, (L, n, 1, positions) each."""
    (L, n), mask = line.inputs.x.shape[:2], line.inputs.grid.mask
    keys, queries = (mask.sum(axis).expand(L, n, 1, -1) for axis in (3, 4))
    return queries, keys


class PositionSample(NamedTuple):
    """Positions s at which rotations are sampled.

    Sequence i uses the positions first + step (i mod stride + k stride), k < per_sequence: some of
    the stride * per_sequence positions, and all of them are used equally often over the batch.
    """

    first: int
    step: int
    stride: int
    per_sequence: int


def _rotation_averaged(x: Tensor, angles: Angles, mask: Tensor, layout: str) -> Tensor:
    """Mean of (R_s^T x)(R_s^T x)^T over pairs (s, x), x (L, n, H, X, D).

    ``angles`` (L or 1, n or 1, 1, S, W) at the s, ``mask`` (L or 1, n or 1, 1, S, X).
    """
    n, S = x.shape[1], mask.shape[3]
    J = min(ROTATIONS, S)
    stride = next(j for j in range(STRIDE, 0, -1) if n % j == 0 and J % j == 0)
    positions = PositionSample(S // J // 2, S // J, stride, J // stride)
    if fused(x):
        from fenchel.kernels.rotary_moments import rotated_moments as rotated_moments_kernel

        sums = rotated_moments_kernel(x, *angles, mask, positions, layout=layout)
    else:
        sums = rotated_moments(x, *angles, mask, positions, layout=layout)
    pairs = _per_sequence(mask, n, positions)
    count = pairs.sum(dim=(1, 2, 3, 4), dtype=sums.dtype) * (n // stride // pairs.shape[1])
    return mean_over_processes(sums / count.clamp(min=1).view(-1, 1, 1, 1))


def rotated_moments(
    x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor, positions: PositionSample, *, layout: str
) -> Tensor:
    """The sums of fenchel/kernels/rotary_moments.py, in float32 or better: (L, H, D, D)."""
    L, n, H, _, D = x.shape
    stride, per_sequence = positions.stride, positions.per_sequence
    x = torch.unflatten(x, 1, (n // stride, stride))
    weight = _per_sequence(mask, n, positions).unsqueeze(3).to(x.dtype)  # (L, n / j, j, 1, k, X)
    heavy = x.unsqueeze(5) * weight.mT.unsqueeze(-1)  # (L, n / j, j, H, X, k, D)
    sums = _bmm_float32(heavy.flatten(5).mT.flatten(0, 3), x.flatten(0, 3))
    sums = sums.view(L, n // stride, stride, H, per_sequence, D, D)
    c, s = (
        _per_sequence(part, n, positions)[:, :, :, None, :, None].to(sums.dtype)
        for part in (cos, sin)
    )
    if c.shape[1] == 1:  # sequences of one rotation are added first: there is less to rotate
        sums = sums.sum(1, keepdim=True)
    back = Angles(c, -s)
    return rotate(rotate(sums, back, layout=layout).mT, back, layout=layout).sum(dim=(1, 2, 4))


def _per_sequence(y: Tensor, n: int, positions: PositionSample) -> Tensor:
    """y at the positions of sequence (i, j).

    (L or 1, n or 1, 1, S, X) -> (L or 1, n / stride or 1, j, k, X).
    """
    first, step, stride, per_sequence = positions
    y = y[..., first : first + step * stride * per_sequence : step, :]
    # after the transpose axis 3 is that of the sequence
    y = torch.unflatten(y, 3, (per_sequence, stride)).transpose(3, 4)
    if y.shape[1] == 1:
        return y.squeeze(2)
    own = torch.unflatten(y.squeeze(2), 1, (n // stride, stride))
    return own.diagonal(dim1=2, dim2=3).movedim(-1, 2)


def _bmm_float32(A: Tensor, B: Tensor) -> Tensor:
    """A batch of products in float32 or better: a rounded Gram may have no root."""
    if A.is_cuda and A.dtype == torch.bfloat16:  # whose sums are float32 anyway
        return torch.bmm(A, B, out_dtype=torch.float32)
    wide = torch.promote_types(A.dtype, torch.float32)
    return torch.bmm(A.to(wide), B.to(wide))


def over_groups(x: Tensor, groups: int) -> Tensor:
    """Mean over the query heads of each key head: (L, H, ...) -> (L, G, ...)."""
    return by_group(x, groups).mean(2)


def damped(A: Tensor, damping: float) -> Tensor:
    """A plus the share ``damping`` of its mean eigenvalue, times the identity."""
    diagonal = A.diagonal(dim1=-2, dim2=-1)
    more = damping * diagonal.mean(-1, keepdim=True).clamp(min=1e-12)
    return A + torch.diag_embed(more.expand_as(diagonal))


def inverse_root(A: Tensor, least: float = 1e-4) -> Tensor:
    """A^-1/2 of positive definite A (..., D, D) by a coupled Newton-Schulz iteration.

        Y <- Y T,  Z <- T Z,  T = a - b Z Y        from Y = A / |A|, Z = 1

    Only products of small matrices, so that all heads of all layers are computed at once. No
    eigenvalue lies below ``least`` times the Frobenius norm |A|; see ``_schedule``.
    """
    size = torch.linalg.matrix_norm(A)[..., None, None].clamp(min=1e-12)
    eye = torch.eye(A.shape[-1], dtype=A.dtype, device=A.device)
    Y = (A / size).flatten(0, -3)
    Z = eye.expand_as(Y)
    for a, b in _schedule(least, 8.0 * torch.finfo(A.dtype).eps):
        T = torch.baddbmm(eye, Z, Y, beta=a, alpha=-b)
        Y, Z = torch.bmm(Y, T), torch.bmm(T, Z)
    root: Tensor = Z.view_as(A) * size.rsqrt()
    return root


def damped_inverse_root(A: Tensor, damping: float) -> Tensor:
    """(A + lambda)^-1/2 of positive semidefinite A (..., D, D).

    No eigenvalue is then below lambda = damping tr A / D, and |A + lambda| <= (1 + damping) tr A.
    """
    least = damping / (A.shape[-1] * (1.0 + damping))
    return inverse_root(damped(A, damping), least)


@lru_cache
def _schedule(least: float, near: float) -> list[tuple[float, float]]:
    """The factors (a, b) of T per round, until every eigenvalue is within ``near`` of 1.

    A round takes the square root x in [l, 1] of an eigenvalue of Z Y to x (a - b x^2). Of the
    cubics whose largest value on [l, 1] is 1 the one with equal ends brings l furthest up:

        b = a / (1 + l + l^2),   a = 3 / (2 x),   x^2 = (1 + l + l^2) / 3        its maximum at x

    at first 2.6 times a round, and 3/2, 1/2, which is Newton-Schulz, in the limit l = 1.
    """
    low, rounds = math.sqrt(least), list[tuple[float, float]]()
    while 1.0 - low > near and len(rounds) < 60:
        ends = 1.0 + low + low * low
        a = 1.5 / math.sqrt(ends / 3.0)
        b = a / ends
        rounds.append((a, b))
        low *= a - b * low * low
    return [*rounds, (1.5, 0.5)]


NORMS = ("spectral", "frobenius", "raw")


def direction(
    line: ScoreLine, W: HeadWeights, gradient: HeadWeights, norm: str, damping: float
) -> HeadWeights:
    """The direction of the step of the norm ``norm``; ``line`` starts at W."""
    if norm == "raw":
        return HeadWeights(-gradient.Q, -gradient.K)
    grams = partner_grams(line)
    if norm == "spectral":
        return _spectral(line, gradient, grams, damping)
    return _frobenius(line, W, gradient, grams, damping)


def _spectral(line: ScoreLine, g: HeadWeights, grams: PartnerGrams, damping: float) -> HeadWeights:
    """Queries and keys in one batch, since their matrices have one shape."""
    H, G = g.Q.shape[1], g.K.shape[1]
    both = torch.cat((grams.K, over_groups(grams.Q, G)), dim=1)
    root = damped_inverse_root(both, damping)
    if line.group > 1:
        of_keys, of_queries = torch.split(root, G, dim=1)
        root = torch.cat((of_keys.repeat_interleave(line.group, dim=1), of_queries), dim=1)
    whitened = root @ torch.cat(g, dim=1)
    # bfloat16 on a GPU, as in Muon
    fast = whitened.is_cuda and whitened.dtype == torch.float32
    ready = whitened.bfloat16() if fast else whitened
    polar = orthogonal(ready.flatten(0, 1)).view_as(whitened).to(whitened.dtype)
    return HeadWeights(*torch.split((root @ polar).neg_(), [H, G], dim=1))


def _frobenius(
    line: ScoreLine, W: HeadWeights, g: HeadWeights, grams: PartnerGrams, damping: float
) -> HeadWeights:
    groups = W.K.shape[1]
    each_Q, each_K = damped(grams.Q, damping), damped(grams.K, damping)
    shared_Q = damped(over_groups(grams.Q, groups), damping)
    all_K = each_K.repeat_interleave(line.group, dim=1)
    Y_Q, Y_K = torch.linalg.solve(all_K, g.Q), torch.linalg.solve(shared_Q, g.K)
    C_Q, C_K = (damped(C, damping) for C in input_moments(line))
    U_Q, U_K = _right_solve(Y_Q, C_Q), _right_solve(Y_K, C_K)
    if line.inputs.angles is None and not line.has_qk_norm:
        U_Q = U_Q - 0.5 * Y_Q @ W.Q.mT @ torch.linalg.solve(each_Q, W.Q)
        U_K = U_K - 0.5 * Y_K @ W.K.mT @ torch.linalg.solve(each_K, W.K)
    return HeadWeights(-U_Q, -U_K)


def input_moments(line: ScoreLine) -> tuple[Tensor, Tensor]:
    """Means of x x^T over queries and over keys of the grid, (L, M, M) each."""
    inputs = zip((line.x_q, line.inputs.x), _pair_counts(line), strict=True)
    of_queries, of_keys = (second_moment(x.unsqueeze(2), count).squeeze(1) for x, count in inputs)
    return of_queries, of_keys


def _right_solve(Y: Tensor, C: Tensor) -> Tensor:
    """Y C^-1 for Y (L, H, D, M) and symmetric positive definite C (L, M, M)."""
    columns = Y.flatten(1, 2).mT
    solved: Tensor = torch.cholesky_solve(columns, torch.linalg.cholesky(C))
    return solved.mT.reshape(Y.shape)
