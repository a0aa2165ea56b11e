"""Entmax and sparsemax attention by the Triton kernels of fenchel/kernels/entmax_attention.py.

They take priors that are a band of keys around the position of the query, a range of keys per
sequence, and a bias -slope |i - j|: any sum of ``Causal``, ``Window``, ``Padding`` and ``ALiBi``,
as one ``Band``. beta and the scale are one factor of the scores; a beta
that is a tensor multiplies the queries, and learns there.

One derivative, in reverse or along tangents, by autograd, by forward_ad and by the transforms of
torch.func, vmap among them; ``jvp``, which ``attend_jvp`` calls, gives the tangent by cause. A
second derivative is refused by name where it can be foreseen, and raises elsewhere. Under
torch.compile the kernels are two operations that it does not trace.
"""

import os
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from fenchel.attention.prior import Prior, as_band
from fenchel.attention.shapes import VmapByElement
from fenchel.attention.spec import AttentionSpec, exponent
from fenchel.kernels.band import Band
from fenchel.torch_internals import carries_tangents, in_func_transform

WIDEST = 128
LONGEST = 1 << 20
"""Queries or keys: numbers of tiles are stored in 16 bits."""
BAND_FIELDS = ("left", "right", "start", "stop", "slopes")
"""What the kernels have of a ``Band``."""
_TRITON = find_spec("triton") is not None
"""Looked up once: torch.compile traces ``can_run``, and need not trace the import system."""


def can_run(device: str) -> bool:
    """Whether kernels run there: on a GPU, or in Triton's interpreter, which tests use."""
    if device == "cuda":
        return torch.version.hip is None and _TRITON
    return device == "cpu" and os.environ.get("TRITON_INTERPRET") == "1"


def attend(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, dropout: float) -> Tensor:
    """Outputs: (B, H, T, D), (B, G, S, D), (B, G, S, E) -> (B, H, T, E)."""
    assert not dropout
    alpha, factor, sign = _numbers(spec, q)
    q = q if sign is None else q * sign
    compiling = torch.compiler.is_compiling()
    if not compiling and _is_differentiated(q, k, v):
        out: Tensor = _Attend.apply(q, k, v, spec.prior, alpha, factor)[0]  # type: ignore[no-untyped-call]
        return out
    # Without a Function, which costs 0.1 ms more: torch inspects its signature.
    left, right, *tensors, _ = as_band(spec.prior, k.shape[2], q.device)
    call: tuple[Any, ...] = (q, k, v, *tensors, alpha, factor, left, right)
    return (_entmax_attention if compiling else _forward)(*call)[0]


def _is_differentiated(*tensors: Tensor) -> bool:
    """Whether autograd records the call, or it has tangents or is inside torch.func."""
    recorded = torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
    return recorded or carries_tangents() or in_func_transform()


def jvp(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    tangents: tuple[Tensor | None, Tensor | None, Tensor | None],
    spec: AttentionSpec,
) -> tuple[Tensor, Tensor]:
    """The derivative along tangents by cause: (choosing, values) of ``derivative.Move``.

    Nothing is recorded for autograd: not for tensors that require a gradient.
    """
    from fenchel.kernels.entmax_attention import attend_entmax, attend_entmax_jvp

    dq, dk, dv = tangents
    alpha, factor, sign = _numbers(spec, q)
    if sign is not None:
        q, dq = q * sign, None if dq is None else dq * sign
    band = as_band(spec.prior, k.shape[2], q.device)
    out, saved = attend_entmax(q, k, v, alpha, factor, band)
    found = attend_entmax_jvp(q, k, v, (dq, dk, dv), saved, alpha, factor, band)
    choosing, values = (torch.zeros_like(out) if x is None else x for x in found)
    return choosing, values


def _numbers(spec: AttentionSpec, q: Tensor) -> tuple[float, float, Tensor | float | None]:
    """alpha, scale times beta without its sign, and what else multiplies the queries."""
    alpha = exponent(spec.choice)
    assert alpha is not None
    factor, beta = spec.scale_for(q.shape[-1]), spec.choice.beta
    sign: Tensor | float | None = None
    if isinstance(beta, Tensor):
        sign = beta.to(q.dtype)
    else:
        factor *= beta
    if factor < 0.0:
        factor, sign = -factor, -1.0 if sign is None else -sign
    return alpha, factor, sign


class _Attend(VmapByElement):
    """(o, C, tau, tiles, counts, hits) of the kernels.

    The prior becomes a ``Band`` inside the Functions, where tensors that it makes are plain:
    outside they belong to a transform of torch.func, and a kernel cannot read them.
    """

    @staticmethod
    def forward(
        q: Tensor, k: Tensor, v: Tensor, prior: Prior | None, alpha: float, factor: float
    ) -> Any:
        from fenchel.kernels.entmax_attention import attend_entmax

        out, saved = attend_entmax(q, k, v, alpha, factor, as_band(prior, k.shape[2], q.device))
        return out, *saved

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        *tensors, ctx.prior, ctx.alpha, ctx.factor = inputs
        ctx.mark_non_differentiable(*output[1:])
        ctx.save_for_backward(*tensors, *output[1:])
        ctx.save_for_forward(*tensors, *output[1:])

    @staticmethod
    def backward(ctx: Any, g: Tensor, *_: Any) -> Any:
        numbers = ctx.prior, ctx.alpha, ctx.factor
        return *_Reverse.apply(*numbers, g, *ctx.saved_tensors), None, None, None  # type: ignore[no-untyped-call]

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        numbers = ctx.prior, ctx.alpha, ctx.factor
        (do,) = _Tangent.apply(*numbers, *tangents[:3], *ctx.saved_tensors)  # type: ignore[no-untyped-call]
        return do, *(None,) * 5


class _OneDerivative(VmapByElement):
    """A derivative of which there is none."""

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        """Nothing is saved."""

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:  # noqa: ARG004
        raise RuntimeError(_NO_SECOND)

    @staticmethod
    def jvp(ctx: Any, *_: Any) -> Any:  # noqa: ARG004
        raise RuntimeError(_NO_SECOND)


class _Reverse(_OneDerivative):
    """The gradients of <g, o> in q, k and v."""

    @staticmethod
    def forward(
        prior: Prior | None,
        alpha: float,
        factor: float,
        g: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *saved: Tensor,
    ) -> Any:
        from fenchel.kernels.entmax_attention import Saved, attend_entmax_backward

        band = as_band(prior, k.shape[2], q.device)
        return attend_entmax_backward(g, q, k, v, Saved(*saved), alpha, factor, band)


class _Tangent(_OneDerivative):
    """The derivative of o along tangents of q, k and v."""

    @staticmethod
    def forward(
        prior: Prior | None,
        alpha: float,
        factor: float,
        dq: Tensor | None,
        dk: Tensor | None,
        dv: Tensor | None,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *saved: Tensor,
    ) -> tuple[Tensor]:
        from fenchel.kernels.entmax_attention import Saved, attend_entmax_jvp

        band, found = as_band(prior, k.shape[2], q.device), Saved(*saved)
        parts = attend_entmax_jvp(q, k, v, (dq, dk, dv), found, alpha, factor, band)
        return (sum((x for x in parts if x is not None), torch.zeros_like(found.C)),)


_NO_SECOND = (
    "the second derivative of entmax attention is not implemented in the Triton kernels; "
    'attend(..., backend="blocked") has it.'
)


def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    start: Tensor | None,
    stop: Tensor | None,
    slopes: Tensor | None,
    alpha: float,
    factor: float,
    left: int | None,
    right: int | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    from fenchel.kernels.entmax_attention import attend_entmax

    out, saved = attend_entmax(q, k, v, alpha, factor, Band(left, right, start, stop, slopes))
    return out, *saved


def _backward(
    g: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    start: Tensor | None,
    stop: Tensor | None,
    slopes: Tensor | None,
    alpha: float,
    factor: float,
    left: int | None,
    right: int | None,
    C: Tensor,
    tau: Tensor,
    tiles: Tensor,
    counts: Tensor,
    hits: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    from fenchel.kernels.entmax_attention import Saved, attend_entmax_backward

    saved = Saved(C, tau, tiles, counts, hits)
    band = Band(left, right, start, stop, slopes)
    return attend_entmax_backward(g, q, k, v, saved, alpha, factor, band)


_entmax_attention = torch.library.custom_op("fenchel::entmax_attention", _forward, mutates_args=())
_entmax_attention_backward = torch.library.custom_op(
    "fenchel::entmax_attention_backward", _backward, mutates_args=()
)


@_entmax_attention.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> Any:
    del k
    from fenchel.kernels.entmax_attention import allocate

    return allocate(q, v)


@_entmax_attention_backward.register_fake
def _(g: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: Any) -> Any:
    del g
    from fenchel.kernels.entmax_attention import allocate_gradients

    return allocate_gradients(q, k, v)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *tensors, alpha, factor, left, right = inputs
    ctx.numbers = alpha, factor, left, right
    ctx.save_for_backward(*tensors, *output[1:])


def _traced_backward(ctx: Any, g: Tensor, *_: Any) -> Any:
    q, k, v, start, stop, slopes, *saved = ctx.saved_tensors
    call = g, q, k, v, start, stop, slopes, *ctx.numbers, *saved
    return *_entmax_attention_backward(*call), *(None,) * 7


_entmax_attention.register_autograd(_traced_backward, setup_context=_save)
