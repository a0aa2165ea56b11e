"""Which layer broke first.

A nan spreads: one broken layer makes every later activation and every gradient nan, so what
matters is where it came from. That is, in this order,

    weights that are not finite;
    else the first module, in the order of the forward pass, that gives or is given something
    not finite (what it is given was computed between modules, such as a choice of attention);
    else the loss, which a step reads out of the last of them;
    else the last parameter in that order whose gradient is not finite, since the backward
    pass meets it first;
    else the sum of squares under the gradient's norm.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn


def first_broken(model: nn.Module, forward: Callable[[], object], loss: Tensor | float) -> str:
    """A phrase that names the place; ``forward`` reads the offending batch again."""
    parameters = list(model.named_parameters())
    for name, p in parameters:
        if not p.isfinite().all():
            return f"the weights {name} are not finite"
    if place := _first_place(model, forward):
        return f"the {place} is the first that is not finite"
    if not torch.as_tensor(loss).isfinite():
        return "the loss is the first that is not finite"
    for name, p in reversed(parameters):
        if p.grad is not None and not p.grad.isfinite().all():
            return f"the gradient of {name} is the first that is not finite"
    return "the gradient is finite and too large for its norm to be"


def _first_place(model: nn.Module, forward: Callable[[], object]) -> str | None:
    found: list[str] = []

    def before(name: str) -> Callable[[nn.Module, Any], None]:
        def look(_module: nn.Module, given: Any) -> None:
            if not found and not _finite(given):
                found.append(f"input of {name}")

        return look

    def after(name: str) -> Callable[[nn.Module, Any, Any], None]:
        def look(_module: nn.Module, _given: Any, output: Any) -> None:
            if not found and not _finite(output):
                found.append(f"output of {name}" if name else "output of the model")

        return look

    handles = []
    for name, module in model.named_modules():
        if not list(module.children()):  # of the others, the parts tell more than the whole
            handles.append(module.register_forward_pre_hook(before(name)))
        handles.append(module.register_forward_hook(after(name)))
    try:
        with torch.no_grad():
            forward()
    finally:
        for handle in handles:
            handle.remove()
    return found[0] if found else None


def _finite(value: Any) -> bool:
    if isinstance(value, tuple | list):
        return all(_finite(item) for item in value)
    return not isinstance(value, Tensor) or bool(value.isfinite().all())
