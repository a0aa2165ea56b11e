"""Bounds of one row: scores to weights.

The derivative of a choice is J = diag(s) - s s^T / sum(s). ``Choice.sensitivity`` gives its largest
eigenvalue lambda exactly. With s_1 >= s_2 >= ... and R = s_2 + s_3 + ... there is also

    lambda <= s_1 (R + s_2) / (s_1 + R),          for softmax p_1 (1 - p_1 + p_2) times beta,

smooth enough to train against. Proof: lambda in [s_2, s_1] solves s_1 / (s_1 - lambda) = sum over
i >= 2 of s_i / (lambda - s_i), the right side is at most R / (lambda - s_2), and clearing
denominators is the claim. Equality when the smaller weights are all equal, as they are for two.
R is a sum and never 1 - p_1: in a saturated row that difference has no correct digit, and the
"bound" came out below the truth.

Entropy. If the scores of a row of T have length at most s, centred or not, its entropy is at least

    log(1 + (T - 1) b) + s sqrt(T (T - 1)) b / (1 + (T - 1) b),       b = exp(-s sqrt(T / (T - 1))),

attained by s sqrt((T-1)/T) (1, -1/(T-1), ..., -1/(T-1)).

Yudin, Gaponov, Kudriashov and Rakhuba (2025), Pay attention to attention distribution (lambda).
Zhai et al. (2023), Stabilizing transformer training by preventing attention entropy collapse.
"""

import math

import torch
from torch import Tensor

from fenchel.choice import Choice
from fenchel.sensitivity.norms import outward
from fenchel.sensitivity.rows import spread


def row(choice: Choice, p: Tensor) -> Tensor:
    """``choice.sensitivity(p)`` is at most this; differentiable: (..., K) -> (...). At a point."""
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
    """log of the largest row bound of each head, meaned over heads: (..., H, T, K) -> ().

    To be added to a training loss, where it keeps every row from being sensitive. A row that is
    one-hot to the last bit has no logarithm; it counts as the smallest number the dtype holds.
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
