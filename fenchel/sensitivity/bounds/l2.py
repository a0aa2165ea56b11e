"""Attention by distances, the Lipschitz relative of dot-product attention.

    Z = X W_Q,   P = softmax(-|z_i - z_j|^2 tau),   f(X) = P X A W_V,   A = tau W_Q W_Q^T

with tau = 1 / sqrt(D) and queries and keys made by one matrix. For n tokens and H heads side by
side, mixed by W_O, on the whole space

    Lip <= sqrt(n) tau (4 phi^-1(n - 1) + 1) sqrt(sum_h |W_Q^h|^4 |W_V^h|^2) |W_O|,

phi(x) = x e^(x+1).

The paper is often quoted with the first power of |W_Q|. f(X) is quadratic in W_Q at fixed weights,
and the first power is violated as soon as W_Q is scaled up by ten; the square is what the proof
gives (docs/maths/sensitivity.md).

Kim, Papamakarios and Mnih (2021), The Lipschitz constant of self-attention, Theorem 3.2.
"""

import math

import torch
from torch import Tensor

from fenchel.sensitivity.norms import outward, spectral


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
