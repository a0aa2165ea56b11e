"""attend: values mixed by the choice each query makes among the keys.

    s = scale * q k^T,     z = c tanh(s / c) with a soft cap c, else s
    p = choice.weights(z, log_prior),     o = p v

T queries, S keys, D the width of a query and a key, E the width of a value, G heads of keys and
values for H heads of queries (G divides H: multi-head, grouped-query, multi-query attention).

One definition, several ways to compute it, in one table (backends.py), which the docstring of
``attend`` lists. ``backend_support`` gives, for a call, the reason why each of them cannot compute
it. "auto" takes the quickest that serves; plain softmax goes to sdpa with nothing in between.

torch's fused kernels have no second derivative, and whether one will be taken (a backward pass with
create_graph=True, then another) is not known when ``attend`` is called: torch raises then, and
``backend="reference"``, ``"blocked"`` or, on a GPU, ``"tangent"`` has them all. A second derivative
by torch.func is known, and so is forward mode: auto leaves torch's fused kernels out.

Dropout draws from torch's default generator in every back end, since the fused kernels take no
other. A query that no key is open to gets zeros, with zero derivatives.
"""

from dataclasses import replace
from functools import partial
from typing import Any, Literal, Unpack, overload
from warnings import warn

from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function_unary

from fenchel.attention.backends import (
    BACKENDS,
    CallFacts,
    backend_named,
    describe,
    leave_out,
    takes_sink_as_factor,
)
from fenchel.attention.bias import Sink, with_sink
from fenchel.attention.mask import Causal
from fenchel.attention.prior import PriorLike
from fenchel.attention.sdpa import causal_flag, fused, fused_sink, fuses_sink
from fenchel.attention.shapes import broadcast_batch, check, output_axes, under_autocast
from fenchel.attention.spec import (
    SOFTMAX,
    AttentionKeywords,
    AttentionSpec,
    ChoiceLike,
    as_choice,
    with_temperature,
)
from fenchel.choice import Softmax
from fenchel.torch_internals import carries_tangents, in_func_transform, is_compiler_failure


@overload
def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    choice: ChoiceLike = ...,
    prior: PriorLike = ...,
    scale: float | None = ...,
    softcap: float | None = ...,
    sink: Tensor | float | None = ...,
    beta: Tensor | float | None = ...,
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
    choice: ChoiceLike = ...,
    prior: PriorLike = ...,
    scale: float | None = ...,
    softcap: float | None = ...,
    sink: Tensor | float | None = ...,
    beta: Tensor | float | None = ...,
    dropout: float = ...,
    backend: str = ...,
    return_weights: Literal[True],
) -> tuple[Tensor, Tensor]: ...
def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    choice: ChoiceLike = SOFTMAX,
    prior: PriorLike = None,
    scale: float | None = None,
    softcap: float | None = None,
    sink: Tensor | float | None = None,
    beta: Tensor | float | None = None,
    dropout: float = 0.0,
    backend: str = "auto",
    return_weights: bool = False,
    **unknown: Any,
) -> Tensor | tuple[Tensor, Tensor]:
    """Outputs, or (outputs, weights).

    q (B, H, T, D), k (B, G, S, D), v (B, G, S, E) -> (B, H, T, E), weights (B, H, T, S)

    ``choice`` is a map, its class or its name; ``prior`` a Prior, or a tensor that broadcasts to
    (B, H, T, S): True in a bool tensor means "may attend", a float tensor is added to the scores.
    ``scale`` multiplies q.k and is 1/sqrt(D) by default; ``softcap`` bounds the scores. ``sink`` is
    the score of one more key, whose value is 0, so that weights may sum to less than 1: a number,
    one per head (H,), or one per query, which broadcasts to (B, H, T). ``beta`` multiplies the
    inverse temperature of the choice: a number, or a tensor that broadcasts to (B, H, T, 1)
    (fenchel/attention/temperature.py has the usual ones). Both may learn. There may be fewer axes
    before T (the missing ones count as 1) or more (the last is the heads, the others together are
    the batch). ``backend`` is one of

        "auto"         the quickest that serves the call
        "reference"    the definition, O(T S) memory, every derivative
        "blocked"      tile by tile, O(T + S) memory, every map, first and second derivatives
        "sdpa"         torch's fused softmax, first derivatives in reverse
        "flex"         FlexAttention, compiled: softmax under any prior, reverse on a GPU
        "triton"       entmax on a GPU, sparse in tiles of scores, first derivatives in reverse
        "tangent"      kernels of a GPU: softmax, first and second derivatives, also forward

    A second derivative of softmax (create_graph=True) needs "reference", "blocked" or "tangent".

    >>> import torch
    >>> from fenchel.attention import Causal
    >>> x = torch.eye(3).view(1, 1, 3, 3)
    >>> attend(x, x, x, prior=Causal(), scale=0.0)[0, 0]
    tensor([[1.0000, 0.0000, 0.0000],
            [0.5000, 0.5000, 0.0000],
            [0.3333, 0.3333, 0.3333]])
    """
    if unknown:
        raise TypeError(_hint(next(iter(unknown))))
    if type(q) is not Tensor and has_torch_function_unary(q):  # a subclass that follows its use
        given: dict[str, Any] = {"choice": choice, "prior": prior, "scale": scale}
        given |= {"softcap": softcap, "sink": sink, "beta": beta, "dropout": dropout}
        given |= {"backend": backend, "return_weights": return_weights}
        out: Tensor | tuple[Tensor, Tensor]
        out = handle_torch_function(attend, (q,), q, k, v, **given)  # type: ignore[arg-type]
        return out
    if beta is not None:
        choice = with_temperature(as_choice(choice), beta)
    if backend == "auto" and type(choice) is Softmax and softcap is None and not return_weights:
        # The common case in as few steps as possible: it costs microseconds in small models.
        of_choice = choice.beta
        if (
            type(of_choice) is float
            and not carries_tangents()
            and not in_func_transform()
            and q.ndim == k.ndim == v.ndim == 4
        ):
            B, H, T, D = q.shape
            B_k, G, S, D_k = k.shape
            B_v, G_v, S_v, _ = v.shape
            causal = None
            # torch's kernels compare too little: with fewer or more values than keys they read
            # outside the tensors. What does not fit, and what broadcasts, takes the general path.
            if B == B_k == B_v and G == G_v > 0 == H % G and S_v == S and D == D_k > 0:
                causal = causal_flag(prior, T, S)
            if causal is not None and scale != 0.0 and 0.0 <= dropout < 1.0:
                factor = scale
                if of_choice != 1.0:
                    factor = of_choice * (D**-0.5 if scale is None else scale)
                try:
                    if sink is None:
                        return fused(q, k, v, dropout, causal=causal, scale=factor)
                    inner = prior if isinstance(prior, Causal) else None
                    if q.dtype == k.dtype == v.dtype and fuses_sink(
                        inner, q.device.type, q.dtype, (T, S, D, v.shape[3]), dropout
                    ):
                        outside = Sink(sink, inner, outside=True)
                        outside.check(B, H, T, S + 1)
                        return fused_sink(q, k, v, outside, D**-0.5 if factor is None else factor)
                except RuntimeError:
                    check(q, k, v, dropout)  # raises our message if the dtypes differ
                    raise
    asked = AttentionSpec(choice, prior, scale, softcap)
    prepare = partial(_prepare, q, k, v, asked, dropout, return_weights, sink, backend)
    queries, keys, values, spec, facts = prepare()
    taken = backend_named(backend, facts)
    try:
        out, p = taken.attend(queries, keys, values, spec, dropout)
    except Exception as error:
        name = taken.name
        if backend != "auto" or name not in ("flex", "triton") or not is_compiler_failure(error):
            raise
        leave_out(taken, facts)
        warn(
            f'back end "{name}" did not compile ({type(error).__name__}); another one serves '
            "calls of this kind from now on.",
            RuntimeWarning,
            stacklevel=2,
        )
        queries, keys, values, spec, facts = prepare()
        out, p = backend_named(backend, facts).attend(queries, keys, values, spec, dropout)
    axes_out = output_axes(q, k)
    out = out.reshape(*axes_out, *out.shape[-2:])
    if not return_weights:
        return out
    assert p is not None
    p = p if sink is None else p[..., 1:]
    return out, p.to(out.dtype).reshape(*axes_out, *p.shape[-2:])


def backend_support(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    sink: Tensor | float | None = None,
    beta: Tensor | float | None = None,
    dropout: float = 0.0,
    return_weights: bool = False,
    **spec: Unpack[AttentionKeywords],
) -> dict[str, str | None]:
    """For each back end, why it cannot serve this call, or None: arguments as in ``attend``.

    >>> import torch
    >>> q = torch.zeros(1, 2, 4, 16)
    >>> backend_support(q, q, q, return_weights=True)["sdpa"]
    "torch's fused kernels cannot return the weights"
    """
    full = _with_beta(AttentionSpec(**spec), beta)
    facts = _prepare(q, k, v, full, dropout, return_weights, sink, "reference")[-1]
    return {name: backend.why_not(facts) for name, backend in BACKENDS.items()}


def selected_backend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    sink: Tensor | float | None = None,
    beta: Tensor | float | None = None,
    dropout: float = 0.0,
    return_weights: bool = False,
    **spec: Unpack[AttentionKeywords],
) -> str:
    """The back end that ``backend="auto"`` takes for this call: arguments as in ``attend``.

    >>> import torch
    >>> q = torch.zeros(1, 2, 4, 16)
    >>> selected_backend(q, q, q)
    'sdpa'
    """
    full = _with_beta(AttentionSpec(**spec), beta)
    facts = _prepare(q, k, v, full, dropout, return_weights, sink, "auto")[-1]
    return backend_named("auto", facts).name


def _with_beta(spec: AttentionSpec, beta: Tensor | float | None) -> AttentionSpec:
    return spec if beta is None else replace(spec, choice=with_temperature(spec.choice, beta))


def _prepare(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    spec: AttentionSpec,
    dropout: float,
    return_weights: bool,
    sink: Tensor | float | None,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor, AttentionSpec, CallFacts]:
    """q, k, v with four axes, one batch and one dtype, their spec, and the facts of the call.

    A sink becomes a part of the prior, and the first key unless the back end takes it as a factor:
    the facts are then those of the call without it.
    """
    q, k, v = under_autocast(q, k, v)
    check(q, k, v, dropout, spec.softcap)
    q, k, v = broadcast_batch(q, k, v)
    if spec.prior is not None:
        spec.prior.check(q.shape[0], q.shape[1], q.shape[2], k.shape[2])
    if sink is None:
        return q, k, v, spec, describe(q, k, v, spec, dropout, return_weights)
    prior = Sink(sink, spec.prior, outside=True)
    prior.check(q.shape[0], q.shape[1], q.shape[2], k.shape[2] + 1)
    if backend in ("auto", "sdpa", "flex") and type(spec.choice) is Softmax:
        facts = describe(q, k, v, spec, dropout, return_weights, learned=(prior.scores,))
        if takes_sink_as_factor(backend, facts):
            return q, k, v, replace(spec, prior=prior), facts
    k, v = with_sink(k, v)
    spec = replace(spec, prior=replace(prior, padded=True, outside=False))
    return q, k, v, spec, describe(q, k, v, spec, dropout, return_weights)


_OF_SDPA = {
    "is_causal": "prior=fenchel.Causal()",
    "attn_mask": "prior=mask, where True means that a key may be attended to, as in torch",
    "dropout_p": "dropout=",
    "enable_gqa": "no flag: heads are grouped by the shapes of q and k",
}
"""Arguments of torch's scaled_dot_product_attention, and what they are here."""


def _hint(name: str) -> str:
    hint = f"; here it is {_OF_SDPA[name]}" if name in _OF_SDPA else ""
    return f"attend() got an unexpected keyword argument {name!r}{hint}."
