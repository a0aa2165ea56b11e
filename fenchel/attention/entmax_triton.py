"""Entmax and sparsemax attention by the Triton kernels of fenchel/kernels/entmax_attention.py.

They take priors that are a band of keys around the position of the query, a range of keys per
sequence, and a bias -slope |i - j|: any sum of ``Causal``, ``Window``, ``Padding`` and ``ALiBi``,
as one ``Band``. beta and the scale are one factor of the scores; a beta
that is a tensor multiplies the queries, and learns there.

One derivative: in reverse by ``attend``, where a second one raises and tangents and transforms of
torch.func are refused by name, and along tangents by ``jvp``, which ``attend_jvp`` calls. Under
torch.compile the kernels are two operations that it does not trace.
"""

import os
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from fenchel.attention.prior import as_band
from fenchel.attention.spec import AttentionSpec, exponent
from fenchel.kernels.band import Band

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
    left, right, *tensors, _ = as_band(spec.prior, k.shape[2], q.device)
    q = q if sign is None else q * sign
    call: tuple[Any, ...] = (q, k, v, *tensors, alpha, factor, left, right)
    results: Any
    if torch.compiler.is_compiling():
        results = _entmax_attention(*call)
    elif torch.is_grad_enabled() and any(x.requires_grad for x in call[:3]):
        results = _Attend.apply(*call)  # type: ignore[no-untyped-call]
    else:
        results = _forward(*call)  # a Function costs 0.1 ms more: torch inspects its signature
    out: Tensor = results[0]
    return out


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


_NUMBERS = (None,) * 7
"""The gradients of the arguments behind q, k and v."""


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *tensors, alpha, factor, left, right = inputs
    ctx.numbers = alpha, factor, left, right
    ctx.save_for_backward(*tensors, *output[1:])


def _saved(ctx: Any, g: Tensor) -> tuple[Any, ...]:
    """The arguments of ``_backward``."""
    q, k, v, start, stop, slopes, *saved = ctx.saved_tensors
    return g, q, k, v, start, stop, slopes, *ctx.numbers, *saved


class _Attend(torch.autograd.Function):
    """(o, C, tau, tiles, counts, hits) of the kernels."""

    @staticmethod
    def forward(*call: Any) -> Any:
        return _forward(*call)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.mark_non_differentiable(*output[1:])
        _save(ctx, inputs, output)

    @staticmethod
    def backward(ctx: Any, g: Tensor, *_: Any) -> Any:
        return *_Reverse.apply(*_saved(ctx, g)), *_NUMBERS  # type: ignore[no-untyped-call]


class _Reverse(torch.autograd.Function):
    """The gradients of <g, o> in q, k and v."""

    @staticmethod
    def forward(*call: Any) -> Any:
        return _backward(*call)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        """Nothing is saved: there is no second derivative."""

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:  # noqa: ARG004
        raise RuntimeError(
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


def _traced_backward(ctx: Any, g: Tensor, *_: Any) -> Any:
    return *_entmax_attention_backward(*_saved(ctx, g)), *_NUMBERS


_entmax_attention.register_autograd(_traced_backward, setup_context=_save)
