"""The axes of an attention call: checked, and reshaped to four.

    q (B, H, T, D)      k (B, G, S, D)      v (B, G, S, E)      G divides H

The batch of q and that of k and v broadcast, as they do in torch's own attention. An axis of
torch.func.vmap is taken element by element (``VmapByElement``).
"""

import math
from typing import Any

import torch
from torch import Tensor

from fenchel.torch_internals import autocast_enabled


def output_axes(q: Tensor, k: Tensor) -> tuple[int, ...]:
    """The axes of the outputs before T: the broadcast batch, then the heads of q."""
    return (*_batch(q, k), *q.shape[-3:-2])


def broadcast_batch(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v with four axes and one batch."""
    if q.dim() > 3 and q.shape[:-3] != k.shape[:-3]:
        q, k, v = (x.expand(*_batch(q, k), *x.shape[-3:]) for x in (q, k, v))
    return four_axes(q), four_axes(k), four_axes(v)


def _batch(q: Tensor, k: Tensor) -> tuple[int, ...]:
    return tuple(m if n == 1 else n for n, m in zip(q.shape[:-3], k.shape[:-3], strict=True))


def four_axes(x: Tensor) -> Tensor:
    """(batch and heads, in any number of axes, N, M) -> (B, H, N, M)."""
    if x.dim() == 4:
        return x
    return x[(None,) * (4 - x.dim())] if x.dim() < 4 else x.flatten(0, -4)


def under_autocast(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v of unequal dtypes in the dtype of torch.autocast, where it is on.

    Its rule for a product; it leaves float64 as it is.
    """
    dtypes = {q.dtype, k.dtype, v.dtype}
    if len(dtypes) == 1 or not autocast_enabled(q.device.type):
        return q, k, v
    if torch.float64 in dtypes or not all(dtype.is_floating_point for dtype in dtypes):
        return q, k, v
    dtype = torch.get_autocast_dtype(q.device.type)
    return q.to(dtype), k.to(dtype), v.to(dtype)


def check(
    q: Tensor, k: Tensor, v: Tensor, dropout: float = 0.0, softcap: float | None = None
) -> None:
    """Raises ValueError with the shapes where they do not fit together."""
    if min(q.dim(), k.dim(), v.dim()) < 2 or not q.dim() == k.dim() == v.dim():
        raise ValueError(
            f"attend needs q, k, v with the same number of axes, 2 or more; got {_shapes(q, k, v)}."
        )
    if q.shape[-1] != k.shape[-1]:
        raise ValueError(f"a query and a key must be equally wide; got {_shapes(q, k, v)}.")
    if k.shape[:-1] != v.shape[:-1]:
        raise ValueError(f"there must be one value for each key; got {_shapes(q, k, v)}.")
    if any(n != m and 1 not in (n, m) for n, m in zip(q.shape[:-3], k.shape[:-3], strict=True)):
        raise ValueError(
            f"q and k must hold the same batch, or one of them 1; got {_shapes(q, k, v)}."
        )
    H, G = (x.shape[-3] if x.dim() > 2 else 1 for x in (q, k))
    if G == 0 or H % G:
        raise ValueError(
            f"{G} heads of keys do not divide {H} heads of queries; got {_shapes(q, k, v)}."
        )
    if not q.dtype == k.dtype == v.dtype or not q.is_floating_point():
        raise ValueError(
            f"q, k and v must share one floating dtype; got {q.dtype}, {k.dtype}, {v.dtype}."
        )
    if not 0.0 <= dropout < 1.0:
        raise ValueError(f"dropout is a probability in [0, 1); got {dropout}.")
    if softcap is not None and not 0.0 < softcap < math.inf:
        raise ValueError(f"softcap is a finite number above 0, or None; got {softcap}.")


class VmapByElement(torch.autograd.Function):
    """A Function whose vmap rule runs one element after another, then stacks; None stays None."""

    @classmethod
    def vmap(cls, info: Any, in_dims: tuple[int | None, ...], *args: Any) -> Any:
        """(stacked outputs, their axes)."""
        along = list(zip(args, in_dims, strict=True))
        outs = [
            cls.apply(*(x if d is None else x.select(d, i) for x, d in along))  # type: ignore[no-untyped-call]
            for i in range(info.batch_size)
        ]
        columns = zip(*outs, strict=True)
        stacked = tuple(None if x[0] is None else torch.stack(x) for x in columns)
        return stacked, tuple(None if x is None else 0 for x in stacked)


def _shapes(q: Tensor, k: Tensor, v: Tensor) -> str:
    return f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
