"""attend: values mixed by the choice each query makes among the keys.

    p = choice.weights(scale * q k^T, log_prior),     o = p v

Scores s may be softly capped at c on their way, s -> c tanh(s / c), before the prior joins them.

T queries, S keys, D the width of a query and a key, E the width of a value, G heads of keys and
values for H heads of queries (G divides H: multi-head, grouped-query, multi-query attention).

One definition, several ways to compute it; ``serves`` says which of them can take a call, and why
the others cannot:

    reference    as written above, O(T S) memory, every derivative
    blocked      tile by tile, O(T + S) memory, every map, derivatives in both directions
    sdpa         torch's fused softmax, reverse derivative
    flex         FlexAttention, compiled: softmax under any prior, reverse derivative on a GPU
    auto         the quickest that serves; plain softmax goes to sdpa with nothing in between

Dropout draws from torch's default generator in every back end, since the fused kernels take no
other. A query that no key is open to gets zeros, with zero derivatives.
"""

from typing import Literal, overload

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn.functional import scaled_dot_product_attention

from fenchel.attention import backends, blocked, flex, reference, sdpa
from fenchel.attention.prior import Causal, Prior
from fenchel.attention.shapes import broadcast_batch, check, output_axes
from fenchel.attention.spec import SOFTMAX
from fenchel.choice import Choice, Softmax

_ONE_PIECE = 1 << 16  # scores: below this the bookkeeping of tiles costs more than it saves


@overload
def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    choice: Choice = ...,
    prior: Prior | None = ...,
    scale: float | None = ...,
    softcap: float | None = ...,
    dropout: float = ...,
    backend: str = ...,
    return_weights: Literal[False] = ...,
) -> Tensor: ...
@overload
def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    choice: Choice = ...,
    prior: Prior | None = ...,
    scale: float | None = ...,
    softcap: float | None = ...,
    dropout: float = ...,
    backend: str = ...,
    return_weights: Literal[True],
) -> tuple[Tensor, Tensor]: ...
def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    choice: Choice = SOFTMAX,
    prior: Prior | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    dropout: float = 0.0,
    backend: str = "auto",
    return_weights: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Outputs, or (outputs, weights).

    q (B, H, T, D), k (B, G, S, D), v (B, G, S, E) -> (B, H, T, E), weights (B, H, T, S)

    ``scale`` multiplies q.k and is 1/sqrt(D) unless given; ``softcap`` bounds what comes out of it.
    There may be fewer axes before T (the missing ones count as 1) or more (the last is the heads,
    the others together are the batch).
    """
    if backend == "auto" and type(choice) is Softmax and softcap is None and not return_weights:
        # The common case in as few steps as possible: small models feel every microsecond.
        beta = choice.beta
        axes = q.shape
        if type(beta) is float and forward_ad._current_level < 0 and len(axes) == 4 == k.ndim:
            direct, causal = prior is None, False
            if type(prior) is Causal and not prior.strict:
                T = axes[2]
                if T == 1:
                    direct = True
                elif k.shape[2] == T:  # by branches: compiled, a comparison may stay a symbol
                    direct = causal = True
            if direct:
                if beta != 1.0:
                    scale = beta * (axes[3] ** -0.5 if scale is None else scale)
                try:
                    return scaled_dot_product_attention(
                        q, k, v, None, dropout, causal, scale=scale, enable_gqa=True
                    )
                except RuntimeError:
                    check(q, k, v, dropout)  # our sentence, if the shapes are what was wrong
                    raise
    return _attend(q, k, v, choice, prior, scale, softcap, dropout, backend, return_weights)


def serves(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    choice: Choice = SOFTMAX,
    prior: Prior | None = None,
    softcap: float | None = None,
    dropout: float = 0.0,
    return_weights: bool = False,
) -> dict[str, str | None]:
    """For each back end, why it cannot take this call, or None: arguments as in ``attend``."""
    check(q, k, v, dropout, softcap)
    call = _describe(*broadcast_batch(q, k, v), choice, prior, softcap, dropout, return_weights)
    return {name: backends.why_not(name, call) for name in backends.BACKENDS}


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    choice: Choice,
    prior: Prior | None,
    scale: float | None,
    softcap: float | None,
    dropout: float,
    backend: str,
    return_weights: bool,
) -> Tensor | tuple[Tensor, Tensor]:
    check(q, k, v, dropout, softcap)
    axes = output_axes(q, k)
    q, k, v = broadcast_batch(q, k, v)
    if prior is not None:
        prior.check(q.shape[0], q.shape[1], q.shape[2], k.shape[2])
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    call = _describe(q, k, v, choice, prior, softcap, dropout, return_weights)
    if backend == "auto":
        backend = _pick(call, q.shape[0])
    elif reason := backends.why_not(backend, call):
        raise ValueError(f'backend "{backend}" cannot serve this call: {reason}.')
    if backend == "reference":
        out, p = reference.attend(q, k, v, choice, prior, scale, dropout, softcap)
    elif backend == "blocked":
        out = blocked.attend(q, k, v, choice, prior, scale, dropout, softcap)
    elif backend == "flex":
        out = flex.attend(q, k, v, choice, prior, scale, dropout, softcap)
    else:
        out = sdpa.attend(q, k, v, choice, prior, scale, dropout)
    out = out.reshape(*axes, *out.shape[-2:])
    return (out, p.to(q.dtype).reshape(*axes, *p.shape[-2:])) if return_weights else out


def _pick(call: backends.Call, B: int) -> str:
    """The quickest that serves: fused, else in one piece if that is small, else in tiles."""
    if backends.why_not("sdpa", call) is None:
        return "sdpa"
    small = B * call.H * call.T * call.S <= _ONE_PIECE
    return "reference" if small or backends.why_not("blocked", call) else "blocked"


def _describe(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    choice: Choice,
    prior: Prior | None,
    softcap: float | None,
    dropout: float,
    weights: bool,
) -> backends.Call:
    beta = getattr(choice, "beta", 1.0)
    settings = [x for x in (beta, getattr(choice, "alpha", None)) if isinstance(x, Tensor)]
    carried = [*settings, *(prior.tensors() if prior is not None else ())]
    grad = torch.is_grad_enabled()
    learns = grad and any(x.requires_grad for x in carried)
    return backends.Call(
        choice=type(choice).__name__,
        device=q.device.type,
        dtype=q.dtype,
        H=q.shape[1],
        G=k.shape[1],
        T=q.shape[2],
        S=k.shape[2],
        D=q.shape[3],
        E=v.shape[3],
        prior=prior is not None,
        learns=learns,
        gradient=grad and any(x.requires_grad for x in (q, k, v, *carried)),
        tangent=forward_ad._current_level >= 0,
        dropout=dropout,
        weights=weights,
        transformed=learns and _transformed(),
        softcap=softcap is not None,
        warms=isinstance(beta, Tensor),
    )


def _transformed() -> bool:
    """Whether torch.func is at work: it has no public question for it."""
    compiling = torch.compiler.is_compiling()
    return not compiling and torch._C._functorch.peek_interpreter_stack() is not None
