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
from fenchel.optim.score.gram import Grams, damped, inverse_root, over_groups, partner_grams
from fenchel.optim.score.line import Heads, Line
from fenchel.optim.score.processes import mean_over_processes

NORMS = ("spectral", "frobenius", "raw")


def direction(line: Line, W: Heads, gradient: Heads, norm: str, damping: float) -> Heads:
    """The move to size; ``line`` starts at W."""
    if norm == "raw":
        return Heads(-gradient.Q, -gradient.K)
    grams = partner_grams(line)
    groups = W.K.shape[1]
    A_K = damped(grams.K, damping).repeat_interleave(line.group, dim=1)
    A_Q = damped(over_groups(grams.Q, groups), damping)
    if norm == "spectral":
        return Heads(_spectral(A_K, gradient.Q), _spectral(A_Q, gradient.K))
    return _frobenius(line, W, gradient, grams, damping)


def _spectral(A: Tensor, g: Tensor) -> Tensor:
    root = inverse_root(A)
    turned = root @ g
    return -root @ orthogonal(turned.flatten(0, 1)).view_as(turned)


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
    x, open_ = line.at.x.unsqueeze(2), line.at.open
    C_Q = second_moment_of(x[..., line.at.queries, :], open_.sum(4))
    return C_Q, second_moment_of(x, open_.sum(3))


def second_moment_of(x: Tensor, count: Tensor) -> Tensor:
    """Of inputs (L, n, 1, T, M) counted (L, n, 1, T) times: (L, M, M)."""
    flat, weight = x.flatten(1, 3), count.to(x.dtype).flatten(1).unsqueeze(-1)
    moment = (flat * weight).mT @ flat / weight.sum(1, keepdim=True).clamp(min=1)
    return mean_over_processes(moment)


def _right_solve(Y: Tensor, C: Tensor) -> Tensor:
    """Y C^-1 for Y (L, H, D, M) and symmetric positive definite C (L, M, M)."""
    columns = Y.flatten(1, 2).mT
    solved: Tensor = torch.cholesky_solve(columns, torch.linalg.cholesky(C))
    return solved.mT.reshape(Y.shape)
