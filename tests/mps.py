"""A device "mps" made of CPU tensors that, like MPS, has no float64.

Inside ``simulated_mps()`` tensors can be moved to "mps" and made there. They say that their device
is "mps"; float64 there is the TypeError of torch, and without gradients a tensor of the CPU beside
one of "mps" is an error too. What MPS computes is left to the workflow that runs on macOS.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Thread
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

MPS = torch.device("mps")


class OnMPS(Tensor):
    """A tensor that says it is on "mps"."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return compute(super().__torch_function__, func, types, args, kwargs or {})


def tree_map(function: Callable[[Any], Any], value: Any) -> Any:
    """``function`` of every part of nested tuples, lists and dictionaries."""
    if isinstance(value, dict):
        return {key: tree_map(function, one) for key, one in value.items()}
    if isinstance(value, list | tuple) and not isinstance(value, torch.Size):
        parts = [tree_map(function, one) for one in value]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    return function(value)


def tree_leaves(value: Any) -> list[Any]:
    leaves: list[Any] = []

    def add(leaf: Any) -> Any:
        leaves.append(leaf)
        return leaf

    tree_map(add, value)
    return leaves


def is_mps(value: object) -> bool:
    if isinstance(value, str):
        return value.partition(":")[0] == "mps"
    return isinstance(value, OnMPS) or (isinstance(value, torch.device) and value.type == "mps")


def on_mps(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    if value.dtype == torch.float64:
        raise TypeError("Cannot convert a MPS Tensor to float64 dtype")
    return value if isinstance(value, OnMPS) else value.as_subclass(OnMPS)


def plain(value: Any) -> Any:
    return value.as_subclass(Tensor) if isinstance(value, OnMPS) else value


MOVES = {Tensor.cpu, Tensor.to, Tensor.tolist, Tensor.numpy, Tensor.item, Tensor.as_subclass}
COMPARED = {"copy_", "_has_compatible_shallow_copy_type"}
"""Functions that take tensors of two devices."""


def compute(default: Any, func: Any, types: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """A function of tensors of which some are, or will be, on "mps"."""
    name = getattr(func, "__name__", "")
    if func == Tensor.device.__get__:  # type: ignore[attr-defined]
        return MPS
    if func is Tensor.__deepcopy__:  # torch asks for a method of the subclass that makes tensors
        return on_mps(plain(args[0]).clone())
    words = [*args[1:], *kwargs.values()]
    if func is Tensor.cpu or (func is Tensor.to and torch.device("cpu") in words):
        return plain(args[0]).to(*(w for w in words if isinstance(w, torch.dtype)))
    tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
    strangers = [x for x in tensors if not isinstance(x, OnMPS) and x.dim()]
    if strangers and not torch.is_grad_enabled() and name not in COMPARED and func not in MOVES:
        raise RuntimeError(f"{name}: expected all tensors to be on mps, got one on cpu")
    out = default(func, types, *tree_map(_to_cpu, (args, kwargs)))
    return tree_map(on_mps, out) if func not in MOVES or func is Tensor.to else out


def _to_cpu(value: Any) -> Any:
    return torch.device("cpu") if not isinstance(value, Tensor) and is_mps(value) else value


class _Factories(TorchFunctionMode):
    """Functions that make a tensor on a device that is named, or move one there."""

    def __torch_function__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        leaves = tree_leaves((args[1:] if func is Tensor.to else (), kwargs))
        if not any(map(is_mps, leaves)) or any(isinstance(x, OnMPS) for x in tree_leaves(args)):
            return func(*args, **kwargs)
        if func is Tensor.to and any(isinstance(x, OnMPS) for x in args[1:]):  # x.to(other)
            args = (args[0], args[1].dtype, *args[2:])
        args, kwargs = tree_map(_to_cpu, (args, kwargs))
        return tree_map(on_mps, func(*args, **kwargs))


@contextmanager
def simulated_mps() -> Iterator[None]:
    """Within, "mps" is a device, and torch reports it."""
    run = Thread.run

    def run_with_factories(thread: Thread) -> None:  # a mode belongs to a thread
        with _Factories():
            run(thread)

    with pytest.MonkeyPatch.context() as patch, _Factories():
        patch.setattr(Thread, "run", run_with_factories)
        patch.setattr(torch.backends.mps, "is_available", lambda: True)
        patch.setattr(torch.mps, "recommended_max_memory", lambda: 2**34)
        # A module that is moved gets new parameters; torch would put the new numbers into the old.
        replaced = "get_overwrite_module_params_on_conversion"
        patch.setattr(torch.__future__, replaced, lambda: True)
        yield
