"""Activations at a point: their slopes kept.

At x0 the derivative of y = f(x), number by number, is diag(f'(x0)), so around x0 the tangent

    y0 + f'(x0) (x - x0)

has the value and the first derivative of f. Autodiff goes through the tangent in one product where
GPT-2's activation alone takes it a dozen, each over the widest tensor of a block and at every step
of a spectral norm.

Some models have modules for their activations and some call torch's functions, so both are met.
Which modules act number by number is not read off their names: a module without weights is put to
the test, on the tensor it was given. Its derivative takes a vector u of unequal numbers to
f'(x0) u if it is diagonal, and to something else if it is not.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from fenchel.inspection.subject import Map

BENT = frozenset({functional.gelu, functional.silu, functional.relu})
"""Functions that are activations wherever they are called."""

_STEP = 0.6180339887498949  # of the golden ratio: multiples of it never repeat modulo 1
_AGREES = 1e-5  # of the largest number compared


def settled(module: nn.Module, f: Map) -> Map:
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
