"""Moves of the weights that leave the scores where they are, taken out.

For any M (k, k) the move (W_Q M, -W_K M^T) changes no score to first order, and (dW_Q, dW_K) and

    (dW_Q + W_Q M,  dW_K - W_K M^T)

change them alike. The shortest of these has M from the Sylvester equation

    (W_Q^T W_Q) M + M (W_K^T W_K) = dW_K^T W_K - W_Q^T dW_Q,

solved in the eigenvectors of the two Grams. It is orthogonal to every gauge move, hence the
pseudo-inverse solution of J dW = J(dW_Q, dW_K). What is shortest depends on the basis the weights
are written in: this choice is not invariant under (W_Q A, W_K A^-T) unless A is orthogonal.
"""

import torch
from torch import Tensor

from fenchel.optim.score.operator import Weights


def remove_gauge(W_Q: Tensor, W_K: Tensor, dW_Q: Tensor, dW_K: Tensor) -> Weights:
    """The shortest move of the weights with the same first-order score change: (d, k) each."""
    a, U = torch.linalg.eigh(W_Q.mT @ W_Q)
    b, V = torch.linalg.eigh(W_K.mT @ W_K)
    wanted = U.mT @ (dW_K.mT @ W_K - W_Q.mT @ dW_Q) @ V
    sums = a.clamp(min=0).unsqueeze(-1) + b.clamp(min=0)
    largest = sums.amax()
    # where both Grams vanish, M moves nothing: leave it zero
    solvable = sums > torch.finfo(sums.dtype).eps * largest
    M = U @ torch.where(solvable, wanted / torch.where(solvable, sums, 1.0), 0.0) @ V.mT
    return Weights(dW_Q + W_Q @ M, dW_K - W_K @ M.mT)
