"""A Hugging Face directory to a model of transformers, in float32 with its own eager attention.

The directory has passed the guarded reader (``fenchel.checkpoints.directory``): its files, headers,
dtypes and sizes are checked before transformers sees them. transformers is restricted to local
files, to safetensors and to its own classes: no code of the directory runs. Afterwards every
tensor must have come from the files, and every number must be finite.

Written against transformers 5.22; nothing of it is imported before a model is loaded.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import torch
from torch import nn

from fenchel.checkpoints.directory import CheckpointDirectory, require_finite
from fenchel.files import printable


def load_transformers_model(
    directory: CheckpointDirectory, *, pooler_optional: bool = False
) -> nn.Module:
    """The model of the class that config.json names, or the bare model of its family.

    A class of another family, or one that transformers does not have, gives the bare model.
    ``pooler_optional`` accepts a randomly initialised pooler where the files hold none.
    """
    transformers = _transformers()
    model_type = directory.model_type
    if model_type not in transformers.CONFIG_MAPPING:
        raise ValueError(
            f"transformers {transformers.__version__} has no family {printable(model_type)!r}."
        )
    with quiet(), one_sentence(f"build this {model_type!r} model"):
        model, info = _model_class(transformers, directory).from_pretrained(
            directory.path,
            local_files_only=True,
            use_safetensors=True,
            trust_remote_code=False,
            dtype=torch.float32,
            attn_implementation="eager",
            output_loading_info=True,
        )
    missing = sorted(
        name for name in info["missing_keys"] if not (pooler_optional and "pooler" in name)
    )
    if missing:
        raise ValueError(
            f"{directory.path} lacks {len(missing)} tensors that its settings ask for, the first "
            f"{missing[0]}."
        )
    for name, tensor in model.state_dict().items():
        if tensor.is_floating_point():
            require_finite(tensor, f"{directory.path}: {name}")
    loaded: nn.Module = model.eval()
    return loaded


def gives_logits(model: nn.Module) -> bool:
    """Whether a model of transformers predicts tokens: the next ones, or masked ones."""
    auto = import_module("transformers.models.auto.modeling_auto")
    config: Any = model.config
    tables = (auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES)
    return type(model).__name__ in {table.get(config.model_type) for table in tables}


def _model_class(transformers: Any, directory: CheckpointDirectory) -> Any:
    named = getattr(transformers, directory.architecture or "", None)
    if isinstance(named, type) and issubclass(named, transformers.PreTrainedModel):
        family = getattr(getattr(named, "config_class", None), "model_type", None)
        if family == directory.model_type:
            return named
    return transformers.AutoModel


def _transformers() -> Any:
    try:
        return import_module("transformers")
    except ImportError:
        raise ValueError(
            "models of transformers need transformers 5 or newer; pip install 'fenchel[hf]'."
        ) from None


@contextmanager
def quiet() -> Iterator[None]:
    """Turn the log messages and progress bars of transformers off."""
    from transformers.utils import logging as transformers_logging

    level = transformers_logging.get_verbosity()
    bars = transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity(logging.CRITICAL)
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        transformers_logging.set_verbosity(level)
        if bars:
            transformers_logging.enable_progress_bar()  # type: ignore[no-untyped-call]


@contextmanager
def one_sentence(action: str) -> Iterator[None]:
    """The one boundary to transformers: any of its errors becomes a ValueError of one sentence."""
    try:
        yield
    except (MemoryError, ValueError):
        raise
    except Exception as error:
        reason = printable(" ".join(str(error).split()), 300).rstrip(".")
        raise ValueError(f"transformers cannot {action}: {reason}.") from None
