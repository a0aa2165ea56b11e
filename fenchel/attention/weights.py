"""The weights of chosen queries and heads, beside a back end that keeps none.

A fused or blocked back end never holds the (B, H, T, S) weights. To look at some of them, name the
rows and the heads: they are computed alone, a block of rows at a time, and nothing else is.
"""

from collections.abc import Sequence
from dataclasses import fields, replace

import torch
from torch import Tensor

from fenchel.attention.prior import Place, Prior
from fenchel.attention.reference import cap
from fenchel.attention.shapes import check, four
from fenchel.choice import Choice, Softmax

_SOFTMAX = Softmax()
_BLOCK = 1 << 22  # scores at a time


def attention_weights(
    q: Tensor,
    k: Tensor,
    *,
    rows: Sequence[int] | Tensor | None = None,
    heads: Sequence[int] | Tensor | None = None,
    choice: Choice = _SOFTMAX,
    prior: Prior | None = None,
    scale: float | None = None,
    softcap: float | None = None,
) -> Tensor:
    """p for queries ``rows`` of heads ``heads`` (None for all; negative counts from the end).

    q (B, H, T, D), k (B, G, S, D) -> (B, len(heads), len(rows), S)
    """
    check(q, k, k, softcap=softcap)
    q, k = four(q), four(k)
    (B, H, T, D), (_, G, S, _) = q.shape, k.shape
    if prior is not None:
        prior.check(B, H, T, S)
    t, h = _chosen(rows, T, "row", q.device), _chosen(heads, H, "head", q.device)
    wide = torch.promote_types(q.dtype, torch.float32)
    queries = q[:, h][:, :, t].to(wide) * (D**-0.5 if scale is None else scale)
    keys = k[:, h // (H // G)].to(wide).mT
    height = max(1, _BLOCK // max(1, B * len(h) * S))
    blocks = [queries.new_empty(B, len(h), 0, S)]
    for some, part in zip(torch.split(queries, height, 2), torch.split(t, height), strict=True):
        z = cap(some @ keys, softcap)
        at = _place(B, h, part + (S - T), S)
        blocks.append(
            _of(choice, h, part).weights(z, None if prior is None else _log(prior, at, z))
        )
    return torch.cat(blocks, 2).to(q.dtype)


def _chosen(
    which: Sequence[int] | Tensor | None, size: int, name: str, device: torch.device
) -> Tensor:
    if which is None:
        return torch.arange(size, device=device)
    index = torch.as_tensor(which, dtype=torch.int64, device=device).view(-1)
    wrong = index[(index < -size) | (index >= size)]
    if len(wrong):
        raise ValueError(f"there is no {name} {int(wrong[0])} among {size}.")
    return index % max(size, 1)


def _place(B: int, h: Tensor, i: Tensor, S: int) -> Place:
    b, j = torch.arange(B, device=h.device), torch.arange(S, device=h.device)
    return Place(
        b.view(-1, 1, 1, 1), h.view(1, -1, 1, 1), i.view(1, 1, -1, 1), j.view(1, 1, 1, -1), S
    )


def _log(prior: Prior, at: Place, z: Tensor) -> Tensor:
    open_, bias = prior.admits(at), prior.bias(at)
    log_u = z.new_zeros(()) if bias is None else bias.to(z.dtype)
    return log_u if open_ is None else torch.where(open_, log_u, -torch.inf)


def _of(choice: Choice, h: Tensor, t: Tensor) -> Choice:
    """The map with those entries of its tensors that belong to heads h and rows t."""
    cut = {}
    for field in fields(choice):  # type: ignore[arg-type]
        x = getattr(choice, field.name)
        if isinstance(x, Tensor) and x.dim() > 0:
            x = x[(None,) * (4 - x.dim())]
            x = x if x.shape[1] == 1 else x[:, h]
            cut[field.name] = x if x.shape[2] == 1 else x[:, :, t]
    return replace(choice, **cut) if cut else choice  # type: ignore[type-var]
