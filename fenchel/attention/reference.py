"""Attention as it is defined: score the keys, choose among them, mix the values.

    s = scale * q k^T                      (B, H, T, S)
    z = c tanh(s / c)                      with a soft cap c, else s
    p = choice.weights(z, log_prior)       each query's row in the feasible set of the choice
    o = p v                                (B, H, T, E)

Plain PyTorch, O(T S) memory, every map, every prior, every derivative. All other back ends are
measured against this one. Half precision is widened to float32 for the scores and the weights and
narrowed again at the end: a bfloat16 score of 1e4 would be off by 32. With grouped heads (G of k
and v for H of q, H = R G) the R query heads of a group are stacked along the rows, so that keys
are never repeated.

torch.autocast would narrow the products again. ``without_autocast`` switches it off around a block
of code, ``full_precision`` around a function, and ``product`` computes one matrix product and all
its derivatives without it.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.nn.functional import dropout as drop

from fenchel.attention.prior import Prior
from fenchel.attention.spec import AttentionSpec
from fenchel.choice.base import is_plain
from fenchel.torch_internals import autocast_enabled

P = ParamSpec("P")
R = TypeVar("R")


def score(q: Tensor, k: Tensor, scale: float) -> Tensor:
    """s = scale * q k^T: (B, H, T, D), (B, G, S, D) -> (B, H, T, S)."""
    wide = torch.promote_types(q.dtype, torch.float32)
    return _grouped(q.to(wide) * scale, k.to(wide).transpose(-1, -2))


def cap(z: Tensor, softcap: float | None) -> Tensor:
    """c tanh(z / c), close to z while it is small and never beyond c; None returns z."""
    return z if softcap is None else softcap * torch.tanh(z / softcap)


def cap_slope(capped: Tensor, softcap: float | None) -> Tensor | None:
    """The derivative of ``cap`` where its value is ``capped``, 1 - (capped / c)^2; None is 1."""
    return None if softcap is None else 1.0 - (capped / softcap).square()


def mix(p: Tensor, v: Tensor) -> Tensor:
    """o = p v: (B, H, T, S), (B, G, S, E) -> (B, H, T, E)."""
    return _grouped(p, v.to(p.dtype)).to(v.dtype)


def mix_transposed(p: Tensor, g: Tensor, G: int) -> Tensor:
    """p^T g summed over the heads of a group: (B, H, T, S), (B, H, T, E) -> (B, G, S, E)."""
    B, H, T, S = p.shape
    R = H // G
    rows = p.reshape(B, G, R * T, S).transpose(-1, -2)
    return product(rows, g.reshape(B, G, R * T, g.shape[-1]))


def log_prior(prior: Prior | None, z: Tensor) -> Tensor | None:
    """log u for scores z (B, H, T, S), in their dtype; None for no prior."""
    if prior is None:
        return None
    B, H, T, S = z.shape
    return prior.log(T, S, B=B, H=H, device=z.device, dtype=z.dtype)


def logits(q: Tensor, k: Tensor, spec: AttentionSpec) -> tuple[Tensor, Tensor | None]:
    """(z, log u) in float32 or better, z (B, H, T, S): what ``spec.choice`` chooses from."""
    z = cap(score(q, k, spec.scale_for(q.shape[-1])), spec.softcap)
    return z, log_prior(spec.prior, z)


def weights(q: Tensor, k: Tensor, spec: AttentionSpec) -> Tensor:
    """p, in float32 or better: (B, H, T, D), (B, G, S, D) -> (B, H, T, S)."""
    return spec.choice.weights(*logits(q, k, spec))


def attend(
    q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, dropout: float
) -> tuple[Tensor, Tensor]:
    """(outputs (B, H, T, E), weights (B, H, T, S)), the weights after dropout."""
    p = weights(q, k, spec)
    if dropout:
        p = drop(p, dropout)
    return mix(p, v), p


def without_autocast(x: Tensor) -> AbstractContextManager[Any]:
    """A context in which torch.autocast does not narrow products on the device of x.

    >>> x = torch.eye(2)
    >>> with torch.autocast("cpu", dtype=torch.bfloat16), without_autocast(x):
    ...     (x @ x).dtype
    torch.float32
    """
    device = x.device.type
    if autocast_enabled(device):
        return torch.autocast(device, enabled=False)
    return nullcontext()


def full_precision(f: Callable[P, R]) -> Callable[P, R]:
    """f with torch.autocast switched off on every device, as a decorator.

    >>> @full_precision
    ... def square(x):
    ...     return x @ x
    >>> with torch.autocast("cpu", dtype=torch.bfloat16):
    ...     square(torch.eye(2)).dtype
    torch.float32
    """

    @wraps(f)
    def exact(*args: P.args, **kwargs: P.kwargs) -> R:
        on = [device for device in ("cpu", "cuda") if torch.is_autocast_enabled(device)]
        if not on:
            return f(*args, **kwargs)
        with ExitStack() as stack:
            for device in on:
                stack.enter_context(torch.autocast(device, enabled=False))
            return f(*args, **kwargs)

    return exact


def product(x: Tensor, y: Tensor) -> Tensor:
    """x y in their own dtype, also under torch.autocast, and so are its derivatives."""
    if not autocast_enabled(x.device.type):
        return torch.matmul(x, y)
    if is_plain(x) and is_plain(y):
        out: Tensor = _Product.apply(x, y)  # type: ignore[no-untyped-call]
        return out
    with without_autocast(x):
        return torch.matmul(x, y)


class _Product(torch.autograd.Function):
    """x y, whose derivatives are ``product`` again.

    Autograd computes the backward pass of a matrix product under the autocast state at the call of
    ``backward``, whatever it was in the forward pass.
    """

    @staticmethod
    def forward(x: Tensor, y: Tensor) -> Tensor:
        with without_autocast(x):
            return torch.matmul(x, y)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        del output
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor]:
        x, y = ctx.saved_tensors
        return product(g, y.mT), product(x.mT, g)

    @staticmethod
    def jvp(ctx: Any, dx: Tensor | None, dy: Tensor | None) -> Tensor:
        x, y = ctx.saved_tensors
        terms = [] if dx is None else [product(dx, y)]
        terms += [] if dy is None else [product(x, dy)]
        return sum(terms[1:], terms[0])


def _grouped(x: Tensor, y: Tensor) -> Tensor:
    """x y where x (B, H, T, M) has R heads for each of y's (B, G, M, N): -> (B, H, T, N)."""
    B, H, T, M = x.shape
    G = y.shape[1]
    if G == H:
        return product(x, y)
    stacked = x.reshape(B, G, H // G * T, M)
    return product(stacked, y).view(B, H, T, y.shape[-1])
