"""The Jacobian of any function at a point, without its matrix.

    J = jacobian(f, x)        J @ v = d/dt f(x + t v) at 0,    <J.T @ u, v> = <u, J @ v>

J v is forward mode (torch.func.jvp), J^T u reverse mode (torch.func.vjp). Both run under the plain
back end of torch's attention: the fused ones have no forward derivative, and a spectral norm needs
both directions of the same function.

f is a function of one tensor, of several (then x is a tuple), or a module. What it returns may be
a tensor, a tuple that begins with one, or a Hugging Face output, of which ``logits`` or
``last_hidden_state`` is taken. A Hugging Face model receives x as ``inputs_embeds``, and
torch.nn.MultiheadAttention one x as queries, keys and values.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, cached_property
from inspect import signature
from typing import Any, final
from warnings import catch_warnings, simplefilter

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn.attention import SDPBackend, sdpa_kernel

from fenchel.sensitivity.operator import Operator, Space, Tensors
from fenchel.torch_internals import carries_tangents

Function = Callable[..., Any]
_OUTPUTS = ("logits", "last_hidden_state")


@final
class Jacobian(Operator):
    """The derivative of ``f`` at ``x``, both directions exact."""

    def __init__(self, f: Function, x: Tensors, batch: int = 0) -> None:
        self.f, self.x = tensor_function(f), point(x)
        self.domain = space(self.x, batch, several=not isinstance(x, Tensor))
        self.codomain = space((_evaluate(self.f, self.x),), batch, several=False)
        if self.codomain.batch != self.domain.batch:
            raise ValueError(
                f"batch={batch} needs an f that acts on each leading index by itself; this one "
                f"takes {self.domain.batch} and gives {self.codomain.batch}."
            )
        self.dtype, self.device = self.x[0].dtype, self.x[0].device

    def apply(self, v: Tensor) -> Tensor:
        """J v, one forward-mode pass per vector."""
        _load_forward_mode()
        with torch.no_grad(), plain_kernels():
            moves = [torch.func.jvp(self.f, self.x, self._parts(move))[1] for move in v]
        return self.codomain.flatten([torch.stack(moves)])

    def adjoint(self, u: Tensor) -> Tensor:
        """J^T u, one reverse-mode pass per vector."""
        with torch.no_grad(), plain_kernels():
            backs = [self._pull(self.codomain.unflatten(gradient[None])[0][0]) for gradient in u]
        return self.domain.flatten([torch.stack(parts) for parts in zip(*backs, strict=True)])

    def _parts(self, move: Tensor) -> tuple[Tensor, ...]:
        return tuple(part[0] for part in self.domain.unflatten(move[None]))

    @cached_property
    def _pull(self) -> Callable[[Tensor], tuple[Tensor, ...]]:
        pull: Callable[[Tensor], tuple[Tensor, ...]] = torch.func.vjp(self.f, *self.x)[1]
        return pull


@cache
def _load_forward_mode() -> None:
    """torch loads its rules at the first dual number, with a DeprecationWarning about its own."""
    if not carries_tangents():
        with catch_warnings(), forward_ad.dual_level():
            simplefilter("ignore", DeprecationWarning)
            forward_ad.make_dual(torch.zeros(()), torch.zeros(()))  # type: ignore[no-untyped-call]


@contextmanager
def plain_kernels() -> Iterator[None]:
    """Attention by torch's plain kernels: the fused ones have no forward or second derivative."""
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)  # nn.MultiheadAttention, encoder layers
    try:
        with sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)


def jacobian(f: Function, x: Tensors, *, batch: int = 0) -> Jacobian:
    """The Jacobian of ``f`` at ``x``, matrix-free.

    ``batch`` leading axes are declared independent: f must act on each of their indices by itself,
    and J is then one operator per index.

    >>> J = jacobian(torch.sin, torch.zeros(3))
    >>> J @ torch.ones(3), J.shape
    (tensor([1., 1., 1.]), (3, 3))
    """
    return Jacobian(f, x, batch)


def point(x: Tensors) -> tuple[Tensor, ...]:
    """The point of a derivative: floating tensors, detached from any graph."""
    parts = (x,) if isinstance(x, Tensor) else tuple(x)
    for part in parts:
        if not part.is_floating_point():
            raise ValueError(
                f"a derivative needs floating point inputs, got {part.dtype}; for token ids take "
                "the Jacobian in the embeddings."
            )
        if not part.isfinite().all():
            raise ValueError("a derivative needs finite inputs; got inf or nan.")
    return tuple(part.detach() for part in parts)


def space(x: Sequence[Tensor], batch: int, *, several: bool) -> Space:
    """The space of tensors whose first ``batch`` axes are those of a batch."""
    if any(part.dim() < batch or part.shape[:batch] != x[0].shape[:batch] for part in x):
        raise ValueError(
            f"batch={batch} needs that many equal leading axes; got "
            f"{[tuple(part.shape) for part in x]}."
        )
    return Space(tuple(tuple(p.shape[batch:]) for p in x), tuple(x[0].shape[:batch]), several)


def tensor_function(f: Function) -> Function:
    """``f`` as a function of tensors that returns one tensor."""
    if isinstance(f, nn.Module) and any(
        isinstance(part, nn.Dropout) and part.p > 0 and part.training for part in f.modules()
    ):
        raise ValueError(
            "f applies dropout at random, so it has no single derivative; call f.eval() first."
        )
    if isinstance(f, nn.MultiheadAttention):  # a function of one tensor where it is self-attention
        return lambda *x: f(*(x * 3 if len(x) == 1 else x), need_weights=False)[0]
    embeds = isinstance(f, nn.Module) and "inputs_embeds" in signature(f.forward).parameters

    def call(*x: Tensor) -> Tensor:
        return _tensor(f(inputs_embeds=x[0]) if embeds else f(*x))

    return call


def _tensor(y: Any) -> Tensor:
    if isinstance(y, Mapping):
        y = next((y[name] for name in _OUTPUTS if name in y), None)
    elif isinstance(y, tuple | list) and y:
        y = y[0]
    if not isinstance(y, Tensor):
        raise ValueError(
            f"f must give a tensor, a tuple that begins with one, or an output with one of "
            f"{_OUTPUTS}; got {type(y).__name__}."
        )
    return y


def _evaluate(f: Function, x: tuple[Tensor, ...]) -> Tensor:
    with torch.no_grad(), plain_kernels():
        y: Tensor = f(*x)
    return y
