"""The derivative of a map at a point, both directions from one graph that is kept.

    J^T u    one reverse pass through the graph of f(x)
    J v      J^T u is linear in u, and its own reverse pass takes v to J v

So the map itself is computed once, where forward mode would compute it again at every product: a
spectral norm of a block takes two thirds of the time. The price is memory, that of training on one
sequence, and that everything in f must be differentiable twice.

Activations at a point: their slopes kept.

At x0 the derivative of y = f(x), number by number, is diag(f'(x0)), so around x0 the tangent

    y0 + f'(x0) (x - x0)

has the value and the first derivative of f. Autodiff goes through the tangent in one product where
GPT-2's activation alone takes it a dozen, each over the widest tensor of a block and at every step
of a spectral norm.

Some models have modules for their activations and some call torch's functions, so both are met.
Which modules act number by number is not read off their names: a module without weights is put to
the test, on the tensor it was given. Its derivative takes a vector u of unequal numbers to
f'(x0) u if it is diagonal, and to something else if it is not.

Attention held at a point: its outputs and its weights kept, its derivatives in both directions.

A spectral norm takes a dozen products with the derivative at one place. Between them q, k and v
stay as they are, so the weights are computed once and kept, a strip of rows at a time: under a
causal prior a strip ends where its last query stands, and what no query may see costs nothing.

``Held`` is a function of (q, k, v) for autodiff (``fenchel.inspection.linearisation``) to meet
inside a
module: its value is the output
that was kept, whatever it is given, and its derivatives are those of attention at the place it was
made. It is right wherever derivatives at that place are asked for, and nowhere else.

Weights are kept up to ``ROOM`` numbers and computed again at every pass beyond, so memory stays
O(n d) for long texts.

How it gets inside: ``hold`` makes the parts of a block that are there for derivatives name what
is held while they run, and whoever calls attention in them asks ``answer`` first.
"""

from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from functools import cached_property
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

from fenchel.attention import AttentionCall, attend
from fenchel.inspection.trace import BlockTrace, Branch, Map
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
        """J v, a pass a vector."""
        return self._through(self.back, self.u, v.reshape(len(v), *self.x.shape))

    def adjoint(self, u: Tensor) -> Tensor:
        """J^T u, a pass a vector."""
        return self._through(self.y, self.x, u.reshape(len(u), *self.y.shape))

    def _through(self, of: Tensor, at: Tensor, seeds: Tensor) -> Tensor:
        found = [torch.autograd.grad(of, at, seed, retain_graph=True)[0] for seed in seeds]
        return torch.stack(found).reshape(len(seeds), -1)


def derivative(f: Map, x: Tensor) -> GraphJacobian:
    """The derivative of a map of streams at x (1, T, M), from a tensor (T, M)."""

    def of_one(X: Tensor) -> Tensor:
        y = f(X[None])
        return y[0] if y.dim() == 3 else y

    return GraphJacobian(of_one, x[0])


BENT = frozenset({functional.gelu, functional.silu, functional.relu})
"""Functions that are activations wherever they are called."""

_STEP = 0.6180339887498949  # of the golden ratio: multiples of it never repeat modulo 1
_AGREES = 1e-5  # of the largest number compared


def tangent_activations(module: nn.Module, f: Map) -> Map:
    """``f`` for derivatives where it is called, with the activations of ``module`` as tangents."""
    parts = [part for part in module.modules() if _bare(part)]

    def near(x: Tensor) -> Tensor:
        handles = [part.register_forward_hook(_tangent) for part in parts]
        try:
            with _Tangents():
                return f(x)
        finally:
            for handle in handles:
                handle.remove()

    return near


def _bare(module: nn.Module) -> bool:
    """Whether it holds nothing: no part, no weight, no buffer."""
    held = (module.children(), module.parameters(), module.buffers())
    return all(next(iter(some), None) is None for some in held)


class _Tangents(TorchFunctionMode):
    """Inside, the functions in ``BENT`` give their tangents."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        out = func(*args, **kwargs or {})
        straight = _tangent(func, args, out) if func in BENT else None
        return out if straight is None else straight


def _tangent(_: Any, args: tuple[Any, ...], out: Any) -> Tensor | None:
    """What a module or function is to give instead of ``out``; None to leave it."""
    if len(args) != 1 or not isinstance(args[0], Tensor) or not isinstance(out, Tensor):
        return None
    x = args[0]
    if out is x or out.shape != x.shape or not (x.requires_grad and out.requires_grad):
        return None
    slope = _back(out, x, torch.ones_like(out))
    u = torch.arange(out.numel(), device=out.device, dtype=torch.float64).mul_(_STEP).frac_()
    u = u.sub_(0.5).to(out.dtype).view_as(out)
    wanted, found = slope * u, _back(out, x, u)
    if not bool((wanted - found).abs().amax() <= _AGREES * wanted.abs().amax()):
        return None
    return out.detach() + slope * (x - x.detach())


def _back(out: Tensor, x: Tensor, u: Tensor) -> Tensor:
    (found,) = torch.autograd.grad(out, x, u, retain_graph=True)
    return found


ROOM = 1 << 28
"""Weights kept at the most, over all layers of a model."""
# Queries at a time: fewer and products are small, more and the future is computed too.
_STRIP, _GPU_STRIP = 128, 1024


class FrozenAttention:
    """One call of attention at the place where it was made."""

    def __init__(self, call: AttentionCall, *, keep: bool) -> None:
        self.call, self.keep = call, keep

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """The output that was kept, (1, H, T, E), for autodiff to take the derivative of."""
        out: Tensor = _Held.apply(self.derivative, self.output, q, k, v)  # type: ignore[no-untyped-call]
        return out

    @cached_property
    def output(self) -> Tensor:
        """attend at the place."""
        call = self.call
        with torch.no_grad():
            output: Tensor = attend(call.q, call.k, call.v, **call.spec, backend="blocked")
        return output

    @cached_property
    def derivative(self) -> AttentionJacobian:
        """All heads together, in (q, k, v)."""
        return frozen_derivative(self.call, keep=self.keep)


_answering: ContextVar[FrozenAttention | None] = ContextVar("answering", default=None)


def answer(q: Tensor, k: Tensor, v: Tensor) -> Tensor | None:
    """What is held for the call of attention under way, (1, H, T, E); None where nothing is."""
    held = _answering.get()
    return None if held is None else held(q, k, v)


def hold(blocks: Sequence[BlockTrace]) -> tuple[BlockTrace, ...]:
    """The blocks, with the attention of each held for its derivatives."""
    calls = [block.attention for block in blocks]
    keep = sum(c.q.shape[1] * c.q.shape[2] * c.k.shape[2] for c in calls) <= ROOM
    return tuple(_with(block, FrozenAttention(block.attention, keep=keep)) for block in blocks)


def _with(block: BlockTrace, held: FrozenAttention) -> BlockTrace:
    near, branch = _answered(block.linearised, held), block.attention_branch
    attending = None if branch is None else Branch(_answered(branch.f, held), branch.x)
    return block._replace(linearised=near, attention_branch=attending)


def _answered(f: Map, held: FrozenAttention) -> Map:
    """``f`` with its call of attention answered by what is held."""

    def near(x: Tensor) -> Tensor:
        token = _answering.set(held)
        try:
            return f(x)
        finally:
            _answering.reset(token)

    return near


def frozen_derivative(
    call: AttentionCall, *, keep: bool = True, each: bool = False
) -> AttentionJacobian:
    """The derivative of a call in (q, k, v): one operator, or one per head with ``each``."""
    strip = _STRIP if call.q.device.type == "cpu" else _GPU_STRIP
    budget = strip * call.q.shape[1] * call.k.shape[2]
    return attention_jacobian(
        call.q, call.k, call.v, **call.spec, each=each, budget=budget, cache=keep
    )


class _Held(torch.autograd.Function):
    """The value that is kept, with the derivative that is kept."""

    @staticmethod
    def forward(ctx: Any, J: AttentionJacobian, output: Tensor, *_: Tensor) -> Tensor:
        ctx.J = J
        return output.clone()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        return None, None, *_Pulled.apply(ctx.J, g)  # type: ignore[no-untyped-call]


class _Pulled(torch.autograd.Function):
    """J^T g, which is linear in g: its own reverse is J."""

    @staticmethod
    def forward(ctx: Any, J: AttentionJacobian, g: Tensor) -> Any:
        ctx.J = J
        return J.T @ g

    @staticmethod
    def backward(ctx: Any, *moves: Tensor) -> Any:
        return None, ctx.J @ moves
