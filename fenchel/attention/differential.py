"""Differential attention: the difference of two choices over the same keys.

    o_h = p(q_2h) v - lambda p(q_(2h+1)) v        lambda in (0, 1): a number, per head or per query

Query heads 2h and 2h + 1 share keys and values, so that the weights p(q_2h) - lambda p(q_(2h+1))
sum to 1 - lambda and may be negative: what both choose alike cancels. Each p is a member of the
family; their difference is none of a single score, and its derivative is the difference of theirs.
Both are one call of ``attend`` with 2 H query heads, which every back end serves, in the form of
Differential Transformer V2.

Shapes: q (B, 2 H, T, D), k (B, G, S, D), v (B, G, S, E) with G dividing H, lambda a number, (H,) or
what broadcasts to (B, H, T) -> (B, H, T, E).

Ye et al. (2024), Differential transformer.
"""

from typing import Any

from torch import Tensor

from fenchel.attention.attend import attend


def differential_attend(
    q: Tensor, k: Tensor, v: Tensor, weight: Tensor | float, **keywords: Any
) -> Tensor:
    """attend(q_even) - weight attend(q_odd); keywords as in ``attend``.

    >>> import torch
    >>> q = torch.zeros(1, 2, 1, 2)
    >>> differential_attend(q, q[:, :1], torch.ones(1, 1, 1, 3), 0.25)
    tensor([[[[0.7500, 0.7500, 0.7500]]]])
    """
    heads, groups = q.shape[-3] if q.dim() > 2 else 1, k.shape[-3] if k.dim() > 2 else 1
    if heads % (2 * groups):
        raise ValueError(
            "differential attention has two query heads for every output head, and both share "
            f"their keys; got {heads} query heads and {groups} of keys."
        )
    if keywords.pop("return_weights", False):
        raise ValueError("differential attention has two weights per key; call attend for them.")
    out: Tensor = attend(q, k, v, **keywords)
    first, second = out[..., 0::2, :, :], out[..., 1::2, :, :]
    if isinstance(weight, Tensor) and weight.dim():
        weight = (weight.view(-1, 1) if weight.dim() == 1 else weight).unsqueeze(-1).to(out.dtype)
    return first - weight * second
