"""Softmax attention by torch's own fused kernels.

scaled_dot_product_attention solves exactly the Shannon case, softmax(beta scale q k^T + log u) v.
The prior is passed as a flag where the kernels have one (causal, as many queries as keys), not at
all where it forbids nothing (one causal query on its whole cache), and as a dense mask otherwise.
beta is multiplied into the scale.

Derivatives: reverse only. torch raises on forward mode and on a second derivative; it does not
return zeros. ``attend`` therefore never picks this back end while a tangent is carried.

**A sink** is a factor of the same call without one (attention/sink.py). The derivative of torch's
kernels is a function of the outputs and the normaliser of the rows: with p_j = exp(z_j - lse') and
sum_j p_j <go, v_j> = <go, o'>, they give the gradients of q, k and v under the sink if they are
given o' and lse' in place of o and lse.

**bfloat16 on a CPU.** There the backward pass of torch's kernel takes four fifths of the time of
attention and is slower than in float32. Short sequences that are trained are therefore computed by
batched products, with the weights of the forward pass kept for the backward pass:

    s  = scale q k^T + log u      p  = softmax(s)                        o  = p v
    gp = go v^T                   gs = p (gp - sum over keys of p gp)    gv = p^T go
    gq = scale gs k               gk = scale gs^T q

Forward and backward of 32 sequences of 128, 2 heads of 64, take 8 ms instead of 29 on one core
(fused in float32: 18); at 1024 positions the two are level.
"""

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from fenchel.attention.bias import Sink
from fenchel.attention.mask import Causal
from fenchel.attention.prior import Prior, PriorLike
from fenchel.attention.sink import apply_sink, sink_gradients
from fenchel.attention.spec import AttentionSpec
from fenchel.torch_internals import (
    autocast_enabled,
    fused_attention,
    fused_attention_backward,
    in_func_transform,
    softmax_backward,
)

SHORT = 512
"""The longest sequence, in queries and in keys, whose weights are kept for the backward pass."""


def causal_flag(prior: PriorLike, T: int, S: int) -> bool | None:
    """``is_causal`` where torch's kernels apply the prior without a mask; None where they cannot.

    >>> causal_flag(None, 4, 4), causal_flag(Causal(), 4, 4), causal_flag(Causal(), 1, 4)
    (False, True, False)
    """
    if prior is None:
        return False
    if type(prior) is Causal and not prior.strict:
        if T == 1:
            return False
        if T == S:  # by branches: under torch.compile the comparison may be symbolic
            return True
    return None


def attend(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, dropout: float) -> Tensor:
    """Outputs: (B, H, T, D), (B, G, S, D), (B, G, S, E) -> (B, H, T, E)."""
    B, H, T, D = q.shape
    scale, beta = spec.scale_for(D), spec.choice.beta
    if isinstance(beta, Tensor):  # a learned temperature must stay in the graph
        q, beta = q * beta.to(q.dtype), 1.0
    if scale == 0.0:  # torch scales after it masks, and 0 times -inf is nan
        q, scale = q * 0.0, 1.0
    if type(spec.prior) is Sink and (spec.prior.outside or spec.prior.padded):
        true_k, true_v = spec.prior.without_sink(k, v)
        sizes = (T, true_k.shape[2], D, v.shape[3])
        if fuses_sink(spec.prior.prior, q.device.type, q.dtype, sizes, dropout):
            return fused_sink(q, true_k, true_v, spec.prior, scale * beta)
    S = k.shape[2]
    mask, flag = None, causal_flag(spec.prior, T, S)
    if flag is None and spec.prior is not None:
        mask = spec.prior.log(T, S, B=B, H=H, device=q.device, dtype=q.dtype)
    if mask is None:
        return fused(q, k, v, dropout, causal=flag is True, scale=scale * beta)
    return scaled_dot_product_attention(
        q, k, v, mask, dropout, scale=scale * beta, enable_gqa=k.shape[1] != H
    )


def fuses_sink(
    prior: Prior | None,
    device: str,
    dtype: torch.dtype,
    sizes: tuple[int, int, int, int],
    dropout: float,
) -> bool:
    """Whether the kernels serve a sink beside a prior as a factor, for sizes (T, S, D, E).

    S counts the keys without the sink.
    """
    if dropout or in_func_transform():
        return False
    # off in sdpa_kernel(SDPBackend.MATH), which second derivatives need
    if not torch.backends.cuda.flash_sdp_enabled():  # type: ignore[no-untyped-call]
        return False
    T, S, D, E = sizes
    if D != E or min(T, S, D) < 1:
        return False
    if device == "cpu":
        learned = prior.tensors() if prior is not None and torch.is_grad_enabled() else ()
        return not any(x.requires_grad for x in learned)
    half = dtype in (torch.float16, torch.bfloat16) and D % 8 == 0 and D <= 256
    return device == "cuda" and half and causal_flag(prior, T, S) is not None


def fused_sink(q: Tensor, k: Tensor, v: Tensor, prior: Sink, scale: float) -> Tensor:
    """Outputs under a sink whose key and value are not in k and v."""
    if autocast_enabled(q.device.type):  # as torch does for its own function
        q, k, v = (x.to(torch.get_autocast_dtype(q.device.type)) for x in (q, k, v))
    (B, H, T, _), S, inner = q.shape, k.shape[2], prior.prior
    mask, flag = None, causal_flag(inner, T, S)
    if flag is None and inner is not None:
        mask = inner.log(T, S, B=B, H=H, device=q.device, dtype=q.dtype).expand(B, H, T, S)
    r_BHT = prior.by_query.to(q.device, torch.promote_types(q.dtype, torch.float32))
    out: Tensor = _FusedSink.apply(  # type: ignore[no-untyped-call]
        q, k, v, r_BHT.expand(B, H, T), mask, flag is True, scale
    )
    return out


class _FusedSink(torch.autograd.Function):
    """The outputs of torch's kernels under a sink of score r (B, H, T)."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        r: Tensor,
        mask: Tensor | None,
        causal: bool,
        scale: float,
    ) -> Tensor:
        o, lse, *rest = fused_attention(q, k, v, mask, causal=causal, scale=scale)
        out, total = apply_sink(o, lse, r, in_place=True)
        ctx.save_for_backward(q, k, v, r, out, lse, total, mask)
        ctx.rest, ctx.causal, ctx.scale = rest, causal, scale
        return out

    @staticmethod
    def backward(ctx: Any, go: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, r, out, lse, total, mask = ctx.saved_tensors
        gq, gk, gv = fused_attention_backward(
            go, (q, k, v), (out, total, *ctx.rest), mask, causal=ctx.causal, scale=ctx.scale
        )
        gr = None
        if ctx.needs_input_grad[3]:
            gr, _ = sink_gradients(go, out, lse, r, of_o=False)
        return gq, gk, gv, gr, None, None, None


def fused(
    q: Tensor, k: Tensor, v: Tensor, dropout: float, *, causal: bool, scale: float | None
) -> Tensor:
    """Softmax attention without a mask tensor, by the quicker way: shapes as in ``attend``."""
    if q.is_cpu and not dropout and _trains_short(q, k, v):
        factor = q.shape[-1] ** -0.5 if scale is None else scale
        bf16 = torch.bfloat16
        with torch.autocast("cpu", enabled=False):
            out: Tensor = _ShortSoftmax.apply(  # type: ignore[no-untyped-call]
                q.to(bf16), k.to(bf16), v.to(bf16), causal, factor
            )
        return out
    return scaled_dot_product_attention(
        q, k, v, None, dropout, causal, scale=scale, enable_gqa=k.shape[1] != q.shape[1]
    )


def _trains_short(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether a call on a CPU computes in bfloat16, is differentiated, and is short."""
    if not 0 < q.shape[2] <= SHORT or not 0 < k.shape[2] <= SHORT:
        return False
    if not torch.is_grad_enabled() or not any(x.requires_grad for x in (q, k, v)):
        return False
    if torch.is_autocast_enabled("cpu"):
        dtypes = (torch.bfloat16, torch.float32)  # which autocast casts
        half = torch.get_autocast_dtype("cpu") == torch.bfloat16
        half = half and all(x.dtype in dtypes for x in (q, k, v))
    else:
        half = q.dtype == k.dtype == v.dtype == torch.bfloat16
    return half and not torch.compiler.is_compiling() and not in_func_transform()


@lru_cache(maxsize=16)
def _causal_log(T: int, groups: int) -> Tensor:
    """log u of the causal prior in bfloat16, once per query head of a group: (groups T, T)."""
    closed = torch.full((T, T), -torch.inf, dtype=torch.bfloat16).triu(1)
    return closed.repeat(groups, 1)


class _ShortSoftmax(torch.autograd.Function):
    """Softmax attention by batched products; the query heads of a group are rows of one product."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> Tensor:
        (B, H, T, D), (G, S), E = q.shape, k.shape[1:3], v.shape[3]
        q_NRD = q.reshape(B * G, H // G * T, D)
        k_NSD, v_NSE = k.reshape(B * G, S, D), v.reshape(B * G, S, E)
        log_u = _causal_log(T, H // G) if causal else q.new_zeros(1, 1)
        s_NRS = torch.baddbmm(log_u, q_NRD, k_NSD.mT, alpha=scale)
        p_NRS = torch.softmax(s_NRS, -1)
        ctx.save_for_backward(q_NRD, k_NSD, v_NSE, p_NRS)
        ctx.scale, ctx.shapes = scale, (q.shape, k.shape, v.shape)
        return torch.bmm(p_NRS, v_NSE).view(B, H, T, E)

    @staticmethod
    def backward(ctx: Any, go: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():  # p is a constant here: a derivative would be lost
            raise RuntimeError(
                "softmax attention in bfloat16 has no second derivative on a CPU; take "
                'backend="reference".'
            )
        q_NRD, k_NSD, v_NSE, p_NRS = ctx.saved_tensors
        go_NRE = go.reshape(*q_NRD.shape[:2], -1)
        gv_NSE = torch.bmm(p_NRS.mT, go_NRE)
        gp_NRS = torch.bmm(go_NRE, v_NSE.mT)
        gs_NRS = softmax_backward(gp_NRS, p_NRS)
        gq_NRD = torch.baddbmm(q_NRD, gs_NRS, k_NSD, beta=0.0, alpha=ctx.scale)
        gk_NSD = torch.baddbmm(k_NSD, gs_NRS.mT, q_NRD, beta=0.0, alpha=ctx.scale)
        shapes = ctx.shapes
        gradients = (gq_NRD, gk_NSD, gv_NSE)
        return *(g.view(x) for g, x in zip(gradients, shapes, strict=True)), None, None
