"""Which layer broke first.

A NaN spreads: one broken layer makes every later activation and every gradient NaN, so the
names that matter are the first module, in the order of the forward pass, whose output is not
finite; or, when the forward pass is clean, the last parameter in that order whose gradient is
not finite, since the backward pass meets it first.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn


def first_broken(model: nn.Module, forward: Callable[[], object]) -> str:
    """A phrase that names the place; ``forward`` reads the offending batch again."""
    if weights := [n for n, p in model.named_parameters() if not p.isfinite().all()]:
        return f"the weights {weights[0]} are not finite"
    if output := _first_output(model, forward):
        return f"the output of {output} is the first that is not finite"
    gradients = [
        name
        for name, p in model.named_parameters()
        if p.grad is not None and not p.grad.isfinite().all()
    ]
    if gradients:
        return f"the gradient of {gradients[-1]} is the first that is not finite"
    return "the loss itself is not finite"


def _first_output(model: nn.Module, forward: Callable[[], object]) -> str | None:
    broken: list[str] = []

    def watch(name: str) -> Callable[[nn.Module, Any, Any], None]:
        def look(module: nn.Module, args: Any, output: Any) -> None:
            if isinstance(output, Tensor) and not output.isfinite().all():
                broken.append(name)

        return look

    leaves = [(n, m) for n, m in model.named_modules() if not list(m.children())]
    handles = [module.register_forward_hook(watch(name)) for name, module in leaves]
    try:
        with torch.no_grad():
            forward()
    finally:
        for handle in handles:
            handle.remove()
    return broken[0] if broken else None
