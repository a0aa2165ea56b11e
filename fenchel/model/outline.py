"""A model laid out without numbers, for weights that will be read.

On the meta device tensors have shapes and no numbers. A model's layers ask for random numbers there
all the same, and torch answers by loading its compiler, which takes over a second; so nothing is
drawn.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import init
from torch.overrides import TorchFunctionMode

from fenchel.model.config import ModelConfig
from fenchel.model.transformer import Transformer

_DRAWS = (
    *(Tensor.normal_, Tensor.uniform_),
    *(init.normal_, init.uniform_, init.kaiming_uniform_),
)


def outline(config: ModelConfig) -> Transformer:
    """A model on the meta device."""
    with _Undrawn(), torch.device("meta"):
        return Transformer(config)


class _Undrawn(TorchFunctionMode):
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
