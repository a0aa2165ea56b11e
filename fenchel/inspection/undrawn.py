"""Models laid out without drawing numbers for weights that will be read.

A model is laid out on the meta device, where tensors have shapes and no numbers. Its layers ask for
random numbers all the same, and torch answers by loading its compiler, which takes over a second.
"""

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor
from torch.nn import init
from torch.overrides import TorchFunctionMode

_DRAWS = (
    *(Tensor.normal_, Tensor.uniform_),
    *(init.normal_, init.uniform_, init.kaiming_uniform_),
)


class Undrawn(TorchFunctionMode):
    """Inside, nothing is drawn on the meta device; everywhere else as ever."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func in _DRAWS:
            into = args[0] if args else (kwargs or {})["tensor"]
            if into.is_meta:
                return into
        return func(*args, **kwargs or {})
