"""Where to go: the direction of a head's query and key weights, from their gradients.

With g_Q, g_K the gradients (momentum included), A_K, A_Q the partner Grams (gram.py) and C_Q, C_K
the second moments of the inputs over the same pairs, weights written as rows (D, M):

    spectral     U_Q = -A_K^-1/2 polar(A_K^-1/2 g_Q)            steepest when the score change of
                 U_K = -A_Q^-1/2 polar(A_Q^-1/2 g_K)            a unit input is bounded
    frobenius    U_Q = -(Y C_Q^-1 - Y W_Q^T A_Q^-1 W_Q / 2),    Y = A_K^-1 g_Q
                 U_K = -(Y C_K^-1 - Y W_K^T A_K^-1 W_K / 2),    Y = A_Q^-1 g_K
                 the closed form of solvers.exact with mean second moments for the mask and the
                 batch; the term with 1/2 is left out under rotation and norms, where it has no
                 such form
    raw          U = -g

polar is the orthogonal factor (Muon's quintic). Only the direction counts: size.py sets how far.
"""

import torch
from torch import Tensor

from fenchel.optim.muon import orthogonal
from fenchel.optim.score.gram import (
    Grams,
    damped,
    damped_inverse_root,
    over_groups,
    partner_grams,
)
from fenchel.optim.score.line import Heads, Line
from fenchel.optim.score.processes import mean_over_processes

NORMS = ("spectral", "frobenius", "raw")


def direction(line: Line, W: Heads, gradient: Heads, norm: str, damping: float) -> Heads:
    """The move to size; ``line`` starts at W."""
    if norm == "raw":
        return Heads(-gradient.Q, -gradient.K)
    grams = partner_grams(line)
    if norm == "spectral":
        return _spectral(line, gradient, grams, damping)
    return _frobenius(line, W, gradient, grams, damping)


def _spectral(line: Line, g: Heads, grams: Grams, damping: float) -> Heads:
    """Queries and keys side by side, since both are matrices of one shape."""
    H, G = g.Q.shape[1], g.K.shape[1]
    both = torch.cat((grams.K, over_groups(grams.Q, G)), dim=1)
    root = damped_inverse_root(both, damping)
    if line.group > 1:
        of_keys, of_queries = torch.split(root, G, dim=1)
        root = torch.cat((of_keys.repeat_interleave(line.group, dim=1), of_queries), dim=1)
    turned = root @ torch.cat(g, dim=1)
    # as Muon does: bfloat16 on a GPU
    ready = turned.bfloat16() if turned.is_cuda and turned.dtype == torch.float32 else turned
    polar = orthogonal(ready.flatten(0, 1)).view_as(turned).to(turned.dtype)
    return Heads(*torch.split((root @ polar).neg_(), [H, G], dim=1))


def _frobenius(line: Line, W: Heads, g: Heads, grams: Grams, damping: float) -> Heads:
    groups = W.K.shape[1]
    each_Q, each_K = damped(grams.Q, damping), damped(grams.K, damping)
    shared_Q = damped(over_groups(grams.Q, groups), damping)
    all_K = each_K.repeat_interleave(line.group, dim=1)
    Y_Q, Y_K = torch.linalg.solve(all_K, g.Q), torch.linalg.solve(shared_Q, g.K)
    C_Q, C_K = (damped(C, damping) for C in input_moments(line))
    U_Q, U_K = _right_solve(Y_Q, C_Q), _right_solve(Y_K, C_K)
    bent = line.at.turn is not None or line.normed
    if not bent:
        U_Q = U_Q - 0.5 * Y_Q @ W.Q.mT @ torch.linalg.solve(each_Q, W.Q)
        U_K = U_K - 0.5 * Y_K @ W.K.mT @ torch.linalg.solve(each_K, W.K)
    return Heads(-U_Q, -U_K)


def input_moments(line: Line) -> tuple[Tensor, Tensor]:
    """Means of x x^T over queries and over keys of the open pairs, (L, M, M) each."""
    (L, n), open_ = line.at.x.shape[:2], line.at.grid.open
    asked, asking = (open_.sum(axis).expand(L, n, 1, -1) for axis in (3, 4))
    return second_moment_of(line.x_q, asking), second_moment_of(line.at.x, asked)


def second_moment_of(x: Tensor, count: Tensor) -> Tensor:
    """Of inputs (L, n, T, M) counted (L, n, 1, T) times: (L, M, M)."""
    flat = x.flatten(1, 2).to(torch.promote_types(x.dtype, torch.float32))
    weight = count.to(flat.dtype).flatten(1).unsqueeze(-1)
    moment = (flat * weight).mT @ flat / weight.sum(1, keepdim=True).clamp(min=1)
    return mean_over_processes(moment)


def _right_solve(Y: Tensor, C: Tensor) -> Tensor:
    """Y C^-1 for Y (L, H, D, M) and symmetric positive definite C (L, M, M)."""
    columns = Y.flatten(1, 2).mT
    solved: Tensor = torch.cholesky_solve(columns, torch.linalg.cholesky(C))
    return solved.mT.reshape(Y.shape)
