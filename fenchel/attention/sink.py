"""Attention under a sink as a factor of attention without one.

With o and lse = log Z of the true keys and r the score of the sink, whose value is 0,

    g  = sigmoid(lse - r) = Z / (Z + e^r)        o' = g o        lse' = log(Z + e^r)

are the outputs with the sink and their normaliser, and with m = <go, o'> of every query the
gradients are gr = -(1 - g) m, glse = (1 - g) m and g go for o. On a GPU each is one pass over the
outputs (kernels/sink_factor.py).

Shapes: o (B, H, T, E), lse and r (B, H, T).
"""

from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor


def apply_sink(o: Tensor, lse: Tensor, r: Tensor, *, in_place: bool) -> tuple[Tensor, Tensor]:
    """(o', lse'), without derivatives; ``in_place`` writes o' into o where that saves memory."""
    if _has_kernel(o):
        from fenchel.kernels import sink_factor

        out = o if in_place else torch.empty_like(o)
        return out, sink_factor.apply_sink(o, lse, r, out)
    r = r.to(lse.dtype)
    share = torch.sigmoid(lse - r).unsqueeze(-1)
    return (share * o).to(o.dtype), torch.logaddexp(lse, r)


def sink_gradients(
    go: Tensor, out: Tensor, lse: Tensor, r: Tensor, *, of_o: bool
) -> tuple[Tensor, Tensor | None]:
    """gr, which is -glse, and the gradient of o where it is needed."""
    if _has_kernel(out):
        from fenchel.kernels import sink_factor

        return sink_factor.sink_gradients(go, out, lse, r, of_o=of_o)
    r = r.to(lse.dtype)
    mean = (go.to(lse.dtype) * out.to(lse.dtype)).sum(-1)
    gr = -torch.sigmoid(r - lse) * mean
    return gr, (torch.sigmoid(lse - r).unsqueeze(-1) * go).to(out.dtype) if of_o else None


def with_sink_factor(o: Tensor, lse: Tensor, r: Tensor) -> Tensor:
    """o', with derivatives in all three."""
    if torch.compiler.is_compiling() or not _has_kernel(o):
        share = torch.sigmoid(lse - r.to(lse.dtype))
        return (share.unsqueeze(-1) * o).to(o.dtype)
    if not (torch.is_grad_enabled() and any(x.requires_grad for x in (o, lse, r))):
        return apply_sink(o, lse, r, in_place=True)[0]
    out: Tensor = _SinkFactor.apply(o, lse, r)  # type: ignore[no-untyped-call]
    return out


def _has_kernel(o: Tensor) -> bool:
    return o.is_cuda and not torch.compiler.is_compiling() and find_spec("triton") is not None


class _SinkFactor(torch.autograd.Function):
    """o' = g o by the kernels."""

    @staticmethod
    def forward(ctx: Any, o: Tensor, lse: Tensor, r: Tensor) -> Tensor:
        out, _ = apply_sink(o, lse, r, in_place=False)
        ctx.save_for_backward(out, lse, r)
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, go: Tensor) -> tuple[Tensor | None, ...]:
        out, lse, r = ctx.saved_tensors
        gr, g_o = sink_gradients(go, out, lse, r, of_o=True)
        return g_o, -gr, gr
