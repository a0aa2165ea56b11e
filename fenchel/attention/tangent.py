"""Softmax attention with every first and second derivative, by kernels on a GPU.

The kernels (fenchel/kernels/tangent_attention.py) give the outputs o and, for tangents of q, k and
v, their tangent to = J (tq, tk, tv); and for gradients go and gto of the two,

    second(go, gto) = the gradients of <go, o> + <gto, to> in q, k, v and in the tangents.

All derivatives up to the second are these two products, with J the derivative of attention at
(q, k, v) and g a gradient of o:

    forward              J t                                   the tangent
    reverse              J^T g                                 second(g, none) without tangents
    forward of reverse   d (J^T g) along (t, tg)               second(tg, g)
    reverse of forward   the gradients of <gto, J t>           second(0, gto)
    reverse of reverse   the gradients of <J^T g, u> = <g, J u>:
                         J u in g, and second(0, g) along u in q, k, v

in O(T + S) memory. A third derivative raises. The back end is for calls that carry tangents or are
differentiated twice by torch.func, which torch's kernels refuse, or when requested by name;
``attend_with_tangent`` is the explicit form, one pass for the outputs and their tangent.

torch.compile does not trace these functions: it would drop their forward derivative without an
error. A call that it traces is refused by name and served by another back end.
"""

from dataclasses import dataclass, replace
from functools import cache
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fenchel.attention.prior import as_band
from fenchel.attention.shapes import VmapByElement
from fenchel.attention.spec import SOFTMAX, AttentionSpec

if TYPE_CHECKING:
    from fenchel.kernels.tangent_attention import ForwardResult

QKVTangents = tuple[Tensor | None, Tensor | None, Tensor | None]
"""Of q, k and v; None is 0."""


def widest(dtype: torch.dtype) -> int:
    """The largest width of a head that the kernels take."""
    return 64 if dtype == torch.float32 else 128


@cache
def runs_on(device: str) -> bool:
    """Whether the kernels run there: their tiles are for sm_90 (Hopper) and its shared memory.

    On a machine without a GPU the answer is that for one of those.
    """
    if device != "cuda" or torch.version.hip is not None or find_spec("triton") is None:
        return False
    return not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] == 9


def attend(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, dropout: float) -> Tensor:
    """Outputs: (B, H, T, D), (B, G, S, D), (B, G, S, E) -> (B, H, T, E)."""
    assert not dropout
    if isinstance(beta := spec.choice.beta, Tensor):  # a temperature per row is part of the queries
        q, spec = q * beta.to(q.dtype), replace(spec, choice=SOFTMAX)
    out: Tensor = _Attend.apply(KernelCall(spec), q, k, v)[0]  # type: ignore[no-untyped-call]
    return out


def attend_with_tangent(
    q: Tensor, k: Tensor, v: Tensor, tangents: QKVTangents, spec: AttentionSpec
) -> tuple[Tensor, Tensor]:
    """(o, to) in one pass; differentiable once in q, k, v and the tangents."""
    o, to, _, _ = _AttendWithTangent.apply(KernelCall(spec), q, k, v, *tangents)  # type: ignore[no-untyped-call]
    return o, to


@dataclass(frozen=True, eq=False)
class KernelCall:
    """What is fixed in a call, as the kernels take it."""

    spec: AttentionSpec

    def keywords(self, q: Tensor, k: Tensor) -> dict[str, Any]:
        """The scale with the temperature, and the prior as the kernels take it.

        It is called inside the Functions, where tensors that it makes are plain: outside they
        belong to a transform of torch.func, and a kernel cannot read them.
        """
        scale = self.spec.scale_for(q.shape[-1]) * float(self.spec.choice.beta)
        return {"scale": scale, "band": as_band(self.spec.prior, k.shape[2], q.device)}

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        tangents: QKVTangents = (None, None, None),
        known: tuple[Tensor, Tensor] | None = None,
    ) -> "ForwardResult":
        """Outputs, and their tangent along ``tangents``; ``known`` are (o, lse)."""
        from fenchel.kernels.tangent_attention import Tangents, tangent_attention

        tangents = _in_dtype_of(q, tangents)
        return tangent_attention(q, k, v, Tangents(*tangents), known=known, **self.keywords(q, k))

    def vjp(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        tangents: QKVTangents,
        found: "ForwardResult",
        go: Tensor | None,
        gto: Tensor | None,
        *,
        of_tangents: bool = True,
    ) -> tuple[Tensor | None, ...]:
        """The gradients of <go, o> + <gto, to> in q, k, v and in the tangents that are not None."""
        from fenchel.kernels.tangent_attention import Tangents, tangent_attention_vjp

        tangents = _in_dtype_of(q, tangents)
        first, second = tangent_attention_vjp(
            q,
            k,
            v,
            Tangents(*tangents),
            found,
            go,
            gto,
            of_tangents=of_tangents,
            **self.keywords(q, k),
        )
        return *first, *second


class JacobianKernels:
    """Products with J at q (B, H, T, D), k (B, H, S, D), v (B, H, S, E), in their dtype.

    o and lse are computed once; a product with J takes five products of tiles then, and one with
    J^T seven.
    """

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> None:
        self.at, self.call = (q, k, v), KernelCall(spec)
        self.found = self.call.forward(q, k, v)

    def push(self, tangents: QKVTangents) -> Tensor:
        """J (tq, tk, tv): (B, H, T, E)."""
        to = self.call.forward(*self.at, tangents, (self.found.o, self.found.lse)).to
        assert to is not None
        return to

    def pull(self, g: Tensor) -> tuple[Tensor | None, ...]:
        """J^T g, the gradients of q, k and v."""
        return self.call.vjp(*self.at, (None, None, None), self.found, g, None)[:3]


class _Attend(VmapByElement):
    """(o, lse) from q, k, v."""

    @staticmethod
    def forward(call: KernelCall, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        found = call.forward(q, k, v)
        return found.o, found.lse

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        ctx.call, *tensors = inputs
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(*tensors, *output)
        ctx.save_for_forward(*tensors, *output)

    @staticmethod
    def backward(ctx: Any, g: Tensor, _: Tensor | None) -> Any:
        return None, *_Reverse.apply(ctx.call, g, *ctx.saved_tensors)  # type: ignore[no-untyped-call]

    @staticmethod
    def jvp(ctx: Any, _: None, *tangents: Tensor | None) -> tuple[Tensor, None]:
        q, k, v, o, lse = ctx.saved_tensors
        to, _mu = _Tangent.apply(ctx.call, q, k, v, *tangents, o, lse)  # type: ignore[no-untyped-call]
        return to, None


class _Reverse(VmapByElement):
    """J^T g."""

    @staticmethod
    def forward(call: KernelCall, g: Tensor, *at: Tensor) -> tuple[Tensor | None, ...]:
        from fenchel.kernels.tangent_attention import ForwardResult

        q, k, v, o, lse = at
        found = ForwardResult(o, None, lse, None)
        return call.vjp(q, k, v, (None, None, None), found, g, None)[:3]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        del output
        ctx.call, *tensors = inputs
        ctx.save_for_backward(*tensors)
        ctx.save_for_forward(*tensors)

    @staticmethod
    def backward(ctx: Any, *u: Tensor | None) -> Any:
        g, q, k, v, o, lse = ctx.saved_tensors
        if all(x is None for x in u):
            return (None,) * 7
        to, mu = _Tangent.apply(ctx.call, q, k, v, *u, o, lse)  # type: ignore[no-untyped-call]
        second = _Second.apply(ctx.call, q, k, v, *u, o, to, lse, mu, None, g)  # type: ignore[no-untyped-call]
        return None, to, *second[:3], None, None

    @staticmethod
    def jvp(ctx: Any, _: None, tg: Tensor | None, *tangents: Tensor | None) -> Any:
        g, q, k, v, o, lse = ctx.saved_tensors
        if all(x is None for x in tangents[:3]):
            return _Reverse.apply(ctx.call, tg, q, k, v, o, lse)  # type: ignore[no-untyped-call]
        to, mu = _Tangent.apply(ctx.call, q, k, v, *tangents[:3], o, lse)  # type: ignore[no-untyped-call]
        return _Second.apply(ctx.call, q, k, v, *tangents[:3], o, to, lse, mu, tg, g)[:3]  # type: ignore[no-untyped-call]


class _Tangent(VmapByElement):
    """(to, mu) from q, k, v, the tangents, and (o, lse) of the same q, k, v."""

    @staticmethod
    def forward(call: KernelCall, *at: Any) -> tuple[Tensor | None, Tensor | None]:
        q, k, v, tq, tk, tv, o, lse = at
        found = call.forward(q, k, v, (tq, tk, tv), (o, lse))
        return found.to, found.mu

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        ctx.call, *tensors = inputs
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(*tensors, *output)

    @staticmethod
    def backward(ctx: Any, gto: Tensor, _: Tensor | None) -> Any:
        q, k, v, tq, tk, tv, o, lse, to, mu = ctx.saved_tensors
        grads = _Second.apply(ctx.call, q, k, v, tq, tk, tv, o, to, lse, mu, None, gto)  # type: ignore[no-untyped-call]
        return None, *grads, None, None

    @staticmethod
    def jvp(ctx: Any, *_: Any) -> Any:
        raise NotImplementedError(_NO_FORWARD_TWICE)


class _AttendWithTangent(VmapByElement):
    """(o, to, lse, mu) from q, k, v and the tangents, in one pass."""

    @staticmethod
    def forward(call: KernelCall, *at: Any) -> tuple[Tensor | None, ...]:
        q, k, v, tq, tk, tv = at
        return tuple(call.forward(q, k, v, (tq, tk, tv)))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.call, *tensors = inputs
        ctx.mark_non_differentiable(*output[2:])
        ctx.save_for_backward(*tensors, *output)

    @staticmethod
    def backward(ctx: Any, go: Tensor, gto: Tensor, *_: Tensor | None) -> Any:
        q, k, v, tq, tk, tv, o, to, lse, mu = ctx.saved_tensors
        grads = _Second.apply(ctx.call, q, k, v, tq, tk, tv, o, to, lse, mu, go, gto)  # type: ignore[no-untyped-call]
        return None, *grads

    @staticmethod
    def jvp(ctx: Any, *_: Any) -> Any:
        raise NotImplementedError(_NO_FORWARD_TWICE)


class _Second(VmapByElement):
    """The gradients of <go, o> + <gto, to> in q, k, v and the tangents that are not None."""

    @staticmethod
    def forward(call: KernelCall, *at: Any) -> tuple[Tensor | None, ...]:
        from fenchel.kernels.tangent_attention import ForwardResult

        q, k, v, tq, tk, tv, o, to, lse, mu, go, gto = at
        return call.vjp(q, k, v, (tq, tk, tv), ForwardResult(o, to, lse, mu), go, gto)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor | None, ...]) -> None:
        """Nothing is saved."""

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise NotImplementedError(_NO_THIRD)

    @staticmethod
    def jvp(ctx: Any, *_: Any) -> Any:
        raise NotImplementedError(_NO_THIRD)


_NO_THIRD = (
    'backend "tangent" has first and second derivatives; a third one needs backend="reference".'
)
_NO_FORWARD_TWICE = (
    'backend "tangent" has one forward derivative, and a reverse one of it; a second forward one '
    'needs backend="reference".'
)


def _in_dtype_of(q: Tensor, tangents: QKVTangents) -> QKVTangents:
    """The tangents in the dtype of q."""
    tq, tk, tv = (None if x is None else x.to(q.dtype) for x in tangents)
    return tq, tk, tv
