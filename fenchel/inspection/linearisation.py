"""Linearisation: a block as a function whose derivative at one input is cheap.

A spectral norm takes a dozen products with the derivative of a block at one input. Three things
are computed once instead of in every product.

The graph. ``GraphJacobian`` keeps the graph of f(x) and serves both directions from it:

    J^T u    one reverse pass through the graph of f(x)
    J v      J^T u is linear in u, and its own reverse pass takes v to J v

Forward mode would compute f again in every product; a spectral norm of a block takes two thirds of
that time. The price is memory, that of training on one sequence, and that f must be differentiable
twice.

Activations. Elementwise y = f(x) has the derivative diag(f'(x0)) at x0, so the tangent

    y0 + f'(x0) (x - x0)

has the value and the first derivative of f there. Autodiff goes through the tangent in one product
where GPT-2's activation takes a dozen, each over the widest tensor of a block
(``tangent_activations``). Some models have modules for their activations and some call torch's
functions, so both are replaced. Whether a module acts elementwise is tested, not read off its name:
its derivative must take a vector u of unequal numbers to f'(x0) u.

Attention. ``FrozenAttention`` is a function of (q, k, v) whose value is the attention output at the
recorded call, whatever its arguments, and whose derivatives are those of attention there. Blocks
call it as their attention override. Its weights are cached, strip by strip of rows, up to ``ROOM``
numbers over all layers, and computed again in every pass beyond that, so that memory stays O(n d)
for long texts.

A linearised block is right for first derivatives at the recorded input, and for nothing else.
"""

from collections.abc import Sequence
from functools import cached_property
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

from fenchel.attention import AttentionCall, attend, with_sink
from fenchel.inspection.trace import Map
from fenchel.model.mlp import clamped_silu, relu_squared
from fenchel.sensitivity.attention_jacobian import AttentionJacobian, attention_jacobian
from fenchel.sensitivity.autodiff import point, space
from fenchel.sensitivity.operator import Operator


@final
class GraphJacobian(Operator):
    """The derivative of ``f`` at ``x``."""

    def __init__(self, f: Map, x: Tensor) -> None:
        (x,) = point(x)
        with torch.enable_grad(), sdpa_kernel(SDPBackend.MATH):
            self.x = x.clone().requires_grad_()
            self.y = f(self.x)
            self.u = torch.zeros_like(self.y, requires_grad=True)
            (self.back,) = torch.autograd.grad(self.y, self.x, self.u, create_graph=True)
        self.domain = space((x,), 0, several=False)
        self.codomain = space((self.y,), 0, several=False)
        self.dtype, self.device = x.dtype, x.device

    def apply(self, v: Tensor) -> Tensor:
        """J v, one pass per vector."""
        return self._through(self.back, self.u, v.reshape(len(v), *self.x.shape))

    def adjoint(self, u: Tensor) -> Tensor:
        """J^T u, one pass per vector."""
        return self._through(self.y, self.x, u.reshape(len(u), *self.y.shape))

    def _through(self, of: Tensor, at: Tensor, seeds: Tensor) -> Tensor:
        products = [torch.autograd.grad(of, at, seed, retain_graph=True)[0] for seed in seeds]
        return torch.stack(products).reshape(len(seeds), -1)


def derivative(f: Map, x: Tensor) -> GraphJacobian:
    """The derivative of a map of streams at x (1, T, M), from a tensor (T, M)."""

    def of_one(X: Tensor) -> Tensor:
        y = f(X[None])
        return y[0] if y.dim() == 3 else y

    return GraphJacobian(of_one, x[0])


ACTIVATIONS = frozenset(
    {functional.gelu, functional.silu, functional.relu, relu_squared, clamped_silu}
)
"""Functions that are replaced by their tangents."""

_STEP = 0.6180339887498949  # of the golden ratio: multiples of it never repeat modulo 1
_AGREES = 1e-5  # of the largest number compared


def tangent_activations(module: nn.Module, f: Map) -> Map:
    """``f`` with the activations of ``module`` replaced by their tangents at its argument."""
    parts = [part for part in module.modules() if _bare(part)]

    def linearised(x: Tensor) -> Tensor:
        handles = [part.register_forward_hook(_tangent) for part in parts]
        try:
            with _Tangents():
                return f(x)
        finally:
            for handle in handles:
                handle.remove()

    return linearised


def _bare(module: nn.Module) -> bool:
    """Whether it has no submodule, parameter or buffer."""
    members = (module.children(), module.parameters(), module.buffers())
    return all(next(iter(member), None) is None for member in members)


class _Tangents(TorchFunctionMode):
    """Within, the functions in ``ACTIVATIONS`` return their tangents."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **kwargs or {})
        tangent = _tangent(func, args, out) if func in ACTIVATIONS else None
        return out if tangent is None else tangent


def _tangent(_: Any, args: tuple[Any, ...], out: Any) -> Tensor | None:
    """The tangent that replaces ``out``; None where the function is not elementwise."""
    if len(args) != 1 or not isinstance(args[0], Tensor) or not isinstance(out, Tensor):
        return None
    x = args[0]
    if out is x or out.shape != x.shape or not (x.requires_grad and out.requires_grad):
        return None
    slope = _back(out, x, torch.ones_like(out))
    u = torch.arange(out.numel(), device=out.device, dtype=torch.float64).mul_(_STEP).frac_()
    u = u.sub_(0.5).to(out.dtype).view_as(out)
    diagonal, product = slope * u, _back(out, x, u)
    if not bool((diagonal - product).abs().amax() <= _AGREES * diagonal.abs().amax()):
        return None
    return out.detach() + slope * (x - x.detach())


def _back(out: Tensor, x: Tensor, u: Tensor) -> Tensor:
    (gradient,) = torch.autograd.grad(out, x, u, retain_graph=True)
    return gradient


ROOM = 1 << 28
"""The most weights that are cached, over all layers of a model."""
# Rows of a strip: with fewer the products are small, with more the masked future is computed too.
_STRIP, _GPU_STRIP = 128, 1024


class FrozenAttention:
    """An attention call, linearised where it was made."""

    def __init__(self, call: AttentionCall, *, keep: bool) -> None:
        self.call, self.keep = call, keep

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """The recorded output, (1, H, T, E), with the derivative of attention in q, k and v."""
        if k.shape[2] < self.call.k.shape[2]:  # without the sink that was recorded
            k, v = with_sink(k, v)
        out: Tensor = _Frozen.apply(self.derivative, self.output, q, k, v)  # type: ignore[no-untyped-call]
        return out

    @cached_property
    def output(self) -> Tensor:
        """The attention output of the call."""
        call = self.call
        with torch.no_grad():
            output: Tensor = attend(call.q, call.k, call.v, **call.spec, backend="blocked")
        return output

    @cached_property
    def derivative(self) -> AttentionJacobian:
        """Of all heads together, in (q, k, v)."""
        q, k, v, spec = self.call
        return attention_jacobian(q, k, v, **spec, budget=strip(self.call), cache=self.keep)


def freeze(calls: Sequence[AttentionCall]) -> list[FrozenAttention]:
    """The calls of a forward pass, linearised; their weights are cached if all of them fit."""
    numbers = sum(call.q.shape[1] * call.q.shape[2] * call.k.shape[2] for call in calls)
    return [FrozenAttention(call, keep=numbers <= ROOM) for call in calls]


def strip(call: AttentionCall) -> int:
    """The weights of a call that are computed at a time."""
    rows = _STRIP if call.q.device.type == "cpu" else _GPU_STRIP
    return rows * call.q.shape[1] * call.k.shape[2]


class _Frozen(torch.autograd.Function):
    """A constant value with a given derivative J."""

    @staticmethod
    def forward(ctx: Any, J: AttentionJacobian, output: Tensor, *_: Tensor) -> Tensor:
        ctx.J = J
        return output.clone()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        return None, None, *_Adjoint.apply(ctx.J, g)  # type: ignore[no-untyped-call]


class _Adjoint(torch.autograd.Function):
    """J^T g, which is linear in g: its own reverse is J."""

    @staticmethod
    def forward(ctx: Any, J: AttentionJacobian, g: Tensor) -> Any:
        ctx.J = J
        return J.T @ g

    @staticmethod
    def backward(ctx: Any, *moves: Tensor) -> Any:
        return None, ctx.J @ moves
