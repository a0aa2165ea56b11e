"""Attention by distance: keys near a query are chosen.

    z_ij = -scale |q_i - k_j|^2 = scale (2 q_i.k_j - |k_j|^2) - scale |q_i|^2

The last term is the same for all keys of a query, and no choice map sees a common shift. So this
is dot-product attention with one more coordinate,

    (q_i, 1) . (k_j, -|k_j|^2 / 2)          at the scale 2 scale,

and every back end serves it. When q and k come from one matrix the map is Lipschitz, which
dot-product attention is not (fenchel/sensitivity/bounds/l2.py).

Kim, Papamakarios and Mnih (2021), The Lipschitz constant of self-attention.
"""

import torch
from torch import Tensor
from torch.nn.functional import pad


def by_distance(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """q and k whose product is -|q - k|^2 / 2 + |q|^2 / 2: (..., T, D) -> (..., T, D + 1)."""
    half_square = 0.5 * k.square().sum(-1, keepdim=True)
    return pad(q, (0, 1), value=1.0), torch.cat((k, -half_square), -1)
