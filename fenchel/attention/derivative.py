"""The derivative of attention and of self-attention, written out in both directions.

**Forward.** When q, k, v move by dq, dk, dv, with z = scale q k^T, p the weights and J the
derivative of the choice in its scores,

    dz = scale (dq k^T + q dk^T)                         times 1 - (z / c)^2 if capped at c
    do = (J dz) v  +  p dv
         choosing     values

Autograd gives the same sum; this form keeps its two causes apart, which is what
fenchel.sensitivity bounds one at a time.

**Reverse.** For a gradient g of the outputs (the same J, since it is symmetric),

    gv = p^T g        gp = g v^T        gz = J gp        gq = scale gz k        gk = scale gz^T q

Rows of gz sum to zero: a common shift of the scores changes nothing. Shapes as in ``attend``; p, dz
and gz are (B, H, T, S).

**Self-attention** as a map of one sequence X to another:

    q = X W_Q,   k = X W_K,   v = X W_V
    Att(X) = p(P) X W_V,      P = X A X^T,      A = W_Q W_K^T / sqrt(D)

X is (..., N, M), one row per token; W_Q and W_K are (M, D), W_V is (M, E). p acts on rows. The
scale belongs to the head width D, not to M. For R of the shape of Att(X), the gradient of
<R, Att(X)> follows from that of attention,

    gX = gq W_Q^T + gk W_K^T + gv W_V^T,     gW_Q = X^T gq,   gW_K = X^T gk,   gW_V = X^T gv
"""

from typing import NamedTuple, Unpack

import torch
from torch import Tensor

from fenchel.attention import entmax_triton, tangent
from fenchel.attention.attend import attend
from fenchel.attention.backends import BACKENDS, describe
from fenchel.attention.reference import cap_slope, logits, mix, mix_transposed, score
from fenchel.attention.shapes import check, four_axes
from fenchel.attention.spec import AttentionKeywords, AttentionSpec


class Move(NamedTuple):
    """A first-order change of the output, split by cause; each is (B, H, T, E)."""

    choosing: Tensor
    """The part caused by the weights changing."""
    values: Tensor
    """The part caused by the values changing under fixed weights."""

    @property
    def total(self) -> Tensor:
        """The whole derivative."""
        return self.choosing + self.values


class Gradients(NamedTuple):
    """The gradients of <g, attend(q, k, v)>."""

    q: Tensor
    k: Tensor
    v: Tensor
    weights: Tensor
    """(B, H, T, S)."""
    scores: Tensor
    """(B, H, T, S), after the soft cap."""


class SelfGradients(NamedTuple):
    """Gradients of <R, Att(X)>, each of the shape of its variable."""

    X: Tensor
    W_Q: Tensor
    W_K: Tensor
    W_V: Tensor


def attend_with_tangent(
    qkv: tuple[Tensor, Tensor, Tensor],
    tangents: tuple[Tensor | None, Tensor | None, Tensor | None],
    **spec: Unpack[AttentionKeywords],
) -> tuple[Tensor, Tensor]:
    """``attend(q, k, v, **spec)`` and its derivative along ``tangents``; None is 0.

    Softmax on a GPU takes one pass for both (tangent.py), in O(T + S) memory; one derivative can be
    taken of the result, in q, k, v and in the tangents. Elsewhere: ``attend`` and ``attend_jvp``.

    >>> import torch
    >>> q = torch.eye(2).view(1, 1, 2, 2)
    >>> attend_with_tangent((q, q, q), (None, None, q), scale=0.0)[1][0, 0]
    tensor([[0.5000, 0.5000],
            [0.5000, 0.5000]])
    """
    _check_tangents(qkv, tangents)
    call = AttentionSpec(**spec)
    q, k, v = _four_axes(*qkv)
    if _kernels_serve(q, k, v, call) and any(dx is not None for dx in tangents):
        tq, tk, tv = (None if dx is None else four_axes(dx) for dx in tangents)
        o, to = tangent.attend_with_tangent(q, k, v, (tq, tk, tv), call)
        lead = qkv[0].shape[:-1]
        return o.reshape(*lead, -1), to.reshape(*lead, -1)
    return attend(*qkv, **call), attend_jvp(qkv, tangents, **call).total


def attend_jvp(
    qkv: tuple[Tensor, Tensor, Tensor],
    tangents: tuple[Tensor | None, Tensor | None, Tensor | None],
    **spec: Unpack[AttentionKeywords],
) -> Move:
    """The derivative of ``attend(q, k, v, **spec)`` along ``tangents``; None is 0.

    >>> import torch
    >>> q = torch.eye(2).view(1, 1, 2, 2)
    >>> attend_jvp((q, q, q), (None, None, q), scale=0.0).total[0, 0]
    tensor([[0.5000, 0.5000],
            [0.5000, 0.5000]])
    """
    _check_tangents(qkv, tangents)
    call = AttentionSpec(**spec)
    q, k, v = _four_axes(*qkv)
    axes, scale = qkv[0].shape[:-2], call.scale_for(q.shape[-1])
    dq, dk, dv = (None if dx is None else four_axes(dx) for dx in tangents)
    if _kernels_serve(q, k, v, call):
        nothing = v.new_zeros(*q.shape[:3], v.shape[-1]).reshape(*axes, -1, v.shape[-1])
        parts = (
            tangent.attend_with_tangent(q, k, v, part, call)[1].reshape(nothing.shape)
            if any(dx is not None for dx in part)
            else nothing
            for part in ((dq, dk, None), (None, None, dv))
        )
        return Move(*parts)
    if _entmax_kernels_serve(q, k, v, (dq, dk, dv), call):
        choosing, values = entmax_triton.jvp(q, k, v, (dq, dk, dv), call)
        lead = (*axes, q.shape[2], v.shape[3])
        return Move(choosing.reshape(lead), values.reshape(lead))
    z, log_u = logits(q, k, call)
    p = call.choice.weights(z, log_u)
    dz = z.new_zeros(()).expand_as(z)
    if dq is not None:
        dz = dz + score(dq, k, scale)
    if dk is not None:
        dz = dz + score(q, dk, scale)
    if (slope := cap_slope(z, call.softcap)) is not None:
        dz = dz * slope
    choosing = mix(call.choice.jacobian_product(p, dz), v)
    values = choosing.new_zeros(choosing.shape) if dv is None else mix(p, dv)
    return Move(
        choosing.reshape(*axes, *values.shape[-2:]), values.reshape(*axes, *values.shape[-2:])
    )


def attend_vjp(
    qkv: tuple[Tensor, Tensor, Tensor], g: Tensor, **spec: Unpack[AttentionKeywords]
) -> Gradients:
    """The gradients of <g, attend(q, k, v, **spec)>, with those of the weights and the scores."""
    call = AttentionSpec(**spec)
    q, k, v = _four_axes(*qkv)
    axes, scale, G = qkv[0].shape[:-2], call.scale_for(q.shape[-1]), k.shape[1]
    z, log_u = logits(q, k, call)
    p = call.choice.weights(z, log_u)
    wide = four_axes(g).to(p.dtype)
    gp = mix(wide, v.to(p.dtype).transpose(-1, -2))
    gz = call.choice.jacobian_product(p, gp)
    slope = cap_slope(z, call.softcap)
    gs = gz if slope is None else gz * slope  # of the scores before the cap
    grads = (
        scale * mix(gs, k.to(p.dtype)),
        scale * mix_transposed(gs, q.to(p.dtype), G),
        mix_transposed(p, wide, G),
    )
    gq, gk, gv = (x.to(y.dtype).reshape(y.shape) for x, y in zip(grads, qkv, strict=True))
    weights, scores = (x.reshape(*axes, *x.shape[-2:]) for x in (gp, gz))
    return Gradients(gq, gk, gv, weights, scores)


def self_attention(
    X: Tensor,
    W_Q: Tensor,
    W_K: Tensor,
    W_V: Tensor,
    *,
    backend: str = "auto",
    **spec: Unpack[AttentionKeywords],
) -> Tensor:
    """Att(X): (..., N, M) -> (..., N, E); one head, so a prior is called with H = 1.

    >>> import torch
    >>> X = torch.eye(2)
    >>> self_attention(X, X, X, X, scale=0.0)
    tensor([[0.5000, 0.5000],
            [0.5000, 0.5000]])
    """
    q, k, v = ((X @ W).unsqueeze(-3) for W in (W_Q, W_K, W_V))
    return attend(q, k, v, **spec, backend=backend).squeeze(-3)


def self_attention_vjp(
    X: Tensor, W_Q: Tensor, W_K: Tensor, W_V: Tensor, R: Tensor, **spec: Unpack[AttentionKeywords]
) -> SelfGradients:
    """The gradients of <R, Att(X)> in closed form; weights get the sum over leading axes."""
    qkv = ((X @ W_Q).unsqueeze(-3), (X @ W_K).unsqueeze(-3), (X @ W_V).unsqueeze(-3))
    grads = attend_vjp(qkv, R.unsqueeze(-3), **spec)
    gq, gk, gv = (g.squeeze(-3) for g in (grads.q, grads.k, grads.v))
    rows = X.flatten(0, -2)
    gW_Q, gW_K, gW_V = (rows.mT @ g.flatten(0, -2) for g in (gq, gk, gv))
    return SelfGradients(gq @ W_Q.mT + gk @ W_K.mT + gv @ W_V.mT, gW_Q, gW_K, gW_V)


def _check_tangents(
    qkv: tuple[Tensor, Tensor, Tensor], tangents: tuple[Tensor | None, Tensor | None, Tensor | None]
) -> None:
    for x, dx in zip(qkv, tangents, strict=True):
        if dx is not None and dx.shape != x.shape:
            raise ValueError(
                f"a tangent has its tensor's shape; got {tuple(dx.shape)} for {tuple(x.shape)}."
            )


def _kernels_serve(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> bool:
    """Whether the kernels of tangent.py serve the call, with one reverse derivative left."""
    facts = describe(q, k, v, spec)
    prior = spec.prior
    if facts.tangent or facts.transformed or facts.beta_is_tensor:
        return False
    if BACKENDS["tangent"].why_not(facts) is not None:
        return False
    if prior is not None:
        prior.check(q.shape[0], q.shape[1], q.shape[2], k.shape[2])
    return True


def _entmax_kernels_serve(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    tangents: tuple[Tensor | None, Tensor | None, Tensor | None],
    spec: AttentionSpec,
) -> bool:
    """Whether the kernels of entmax_triton.py serve a call on a GPU that nothing differentiates."""
    facts = describe(q, k, v, spec)
    followed = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tangents)
    if facts.device != "cuda" or facts.compiling or facts.gradient or followed:
        return False
    if BACKENDS["triton"].why_not(facts) is not None:
        return False
    if spec.prior is not None:
        spec.prior.check(q.shape[0], q.shape[1], q.shape[2], k.shape[2])
    return True


def _four_axes(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    check(q, k, v)
    if q.shape[:-3] != k.shape[:-3]:
        raise ValueError(
            f"q and k must hold the same batch; got {tuple(q.shape)}, {tuple(k.shape)}."
        )
    return four_axes(q), four_axes(k), four_axes(v)
