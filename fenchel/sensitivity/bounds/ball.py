"""Bounds of softmax self-attention for all tokens of length at most R, from the weights alone.

With A = scale W_Q W_K^T and n tokens, the Lipschitz constant between any two inputs whose tokens
lie in the ball of radius R about the origin is at most

    ball            |W_V| ((1 + sqrt n) |A| R^2 + sqrt n)
    castin          sqrt(3) |W_V| sqrt(|A|^2 R^4 (4 n + 1) + n)
    token_max_ball  |W_V| (1 + 2 |A| R^2)                           for |X| = max_i |x_i|

Row i moves by W_V^T [C_i A^T dx_i + sum_j p_ij (x_j - m_i)(a_i . dx_j) + sum_j p_ij dx_j], with
|C_i| <= R^2 and |a_i| <= |A| R; Cauchy and Schwarz in p_i, and column sums of at most n, give the
first. The second, of Castin, Ablin and Peyre, is larger: |A| R^2 + 2 sqrt(n) |A| R^2 + sqrt(n) is
more than the first, and at most it by Cauchy and Schwarz. The third has no n: rows sum to one.
They hold under any prior. R^2 cannot be improved: fenchel.sensitivity.witness.blowup.

A norm layer before attention gives R: ``normalised_radius``.
"""

import math

import torch
from torch import Tensor

from fenchel.sensitivity.bounds.covariance import factor
from fenchel.sensitivity.norms import outward, spectral


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
    """The longest token a LayerNorm or RMSNorm of width d can give."""
    longest = math.sqrt(d) * (1.0 if weight is None else float(weight.abs().amax()))
    return longest + (0.0 if bias is None else float(bias.norm()))


def _sizes(W_Q: Tensor, W_K: Tensor, W_V: Tensor, scale: float | None) -> tuple[Tensor, Tensor]:
    scale = W_Q.shape[-1] ** -0.5 if scale is None else scale
    A = abs(scale) * spectral(factor(W_Q).mT @ factor(W_K))
    return A, torch.as_tensor(spectral(W_V))
