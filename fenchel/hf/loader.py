"""A Hugging Face directory to a model of transformers, in float32 with its own eager attention.

transformers opens no file of the directory. Its settings are those that the guarded reader
(``fenchel.checkpoints.directory``) parsed, without the keys by which transformers would look for
code, kernels or other files, and its state dict is the tensors whose headers that reader verified.
A setting that names a file or an address is refused.

Memory: transformers builds a model on the meta device, where nothing is allocated, and fills it
afterwards. Each parameter and buffer that it registers there is counted, and the first beyond what
the files can fill ends the attempt. Afterwards every tensor must have come from the files, every
tensor of the files must have a place, and every number must be finite.

Written against transformers 5.22; nothing of it is imported before a model is loaded.
"""

import logging
import warnings
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from importlib import import_module
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as global_hooks

from fenchel.checkpoints.directory import (
    CheckpointDirectory,
    open_tensors,
    require_finite,
    require_no_file_names,
)
from fenchel.files import Damaged, Notice, printable
from fenchel.hf.adapter import needs_transformers

_ORIGINS = frozenset(
    """
    _name_or_path _model_name_or_path attn_implementation _attn_implementation auto_map
    custom_pipelines experts_implementation _experts_implementation name_or_path
    """.split()
)
"""Keys by which transformers looks for code, kernels or files, at any depth of a config.json."""
_TAGGED = ("Infinity", "-Infinity", "NaN")
"""Numbers that JSON lacks, which transformers writes as {"__float__": "Infinity"}."""
_SPARE = 2**24  # numbers that a model may have besides those of its files: tables, masks


def load_transformers_model(
    directory: CheckpointDirectory, *, bare_otherwise: bool = True, pooler_optional: bool = False
) -> nn.Module:
    """The model of the class that config.json names, or the bare model of its family.

    A class of another family, or one that transformers does not have, gives the bare model, whose
    files may hold a head besides; without ``bare_otherwise`` it is refused. ``pooler_optional``
    accepts a randomly initialised pooler where the files hold none.
    """
    with needs_transformers():
        transformers: Any = import_module("transformers")
    model_type = directory.model_type
    if model_type not in transformers.CONFIG_MAPPING:
        raise ValueError(
            f"transformers {transformers.__version__} has no family {printable(model_type)!r}."
        )
    require_no_file_names(directory)
    with quiet(), one_sentence(f"build this {printable(model_type)!r} model"):
        settings = _settings(directory.config)
        config = transformers.CONFIG_MAPPING[model_type].from_dict(settings)
        named = _named_class(transformers, directory)
        if named is None and not bare_otherwise:
            raise ValueError(f"{directory.config_path} names no architecture of transformers.")
        with open_tensors(directory) as tensors, _bounded_by(directory):
            model, info = (named or _bare_class(transformers, config)).from_pretrained(
                None,
                config=config,
                state_dict={name: tensors[name] for name in directory.tensors},
                local_files_only=True,
                trust_remote_code=False,
                dtype=torch.float32,
                attn_implementation="eager",
                ignore_mismatched_sizes=True,  # refused below, by name
                output_loading_info=True,
            )
    if named is None:
        info["unexpected_keys"] = ()  # the head of a class that is not known here
    _require_same_tensors(directory, info, pooler_optional=pooler_optional)
    for name, tensor in model.state_dict().items():
        if tensor.is_floating_point():
            require_finite(tensor, f"{directory.path}: {printable(name)}")
    loaded: nn.Module = model.eval()
    return loaded


def _settings(value: Any) -> Any:
    """The settings without the keys of ``_ORIGINS``, nested ones included, and with all numbers."""
    if isinstance(value, dict):
        if value.keys() == {"__float__"} and value["__float__"] in _TAGGED:
            return float(value["__float__"])
        return {k: _settings(v) for k, v in value.items() if k not in _ORIGINS}
    return [_settings(one) for one in value] if isinstance(value, list) else value


@contextmanager
def _bounded_by(directory: CheckpointDirectory) -> Iterator[None]:
    """Context manager: refuses to build a meta-device model that needs more than the files hold.

    Tied weights are registered twice, and so is a buffer that a parent replaces.
    """
    entries = [location.entry for location in directory.tensors.values()]
    numbers = 2 * sum(torch.Size(entry.shape).numel() for entry in entries) + _SPARE
    left = {"parameters": 4 * len(entries) + 64, "buffers": 8 * len(entries) + 64}
    modules = 64 * (len(entries) + 64)

    def count(kind: str, tensor: torch.Tensor | None) -> None:
        nonlocal numbers
        if tensor is None or not tensor.is_meta:
            return
        left[kind] -= 1
        numbers -= tensor.numel()
        if numbers < 0 or left[kind] < 0:
            raise ValueError(
                f"{directory.path} has settings for a larger model than its files hold: one tensor "
                f"has shape {list(tensor.shape)}."
            )

    def count_module() -> None:
        nonlocal modules
        modules -= 1
        if modules < 0:
            raise ValueError(
                f"{directory.path} has settings for more layers than its {len(entries)} tensors."
            )

    with ExitStack() as stack:
        for handle in (
            global_hooks.register_module_parameter_registration_hook(
                lambda _module, _name, tensor: count("parameters", tensor)
            ),
            global_hooks.register_module_buffer_registration_hook(
                lambda _module, _name, tensor: count("buffers", tensor)
            ),
            global_hooks.register_module_module_registration_hook(
                lambda _module, _name, _child: count_module()
            ),
        ):
            stack.callback(handle.remove)
        yield


def _require_same_tensors(
    directory: CheckpointDirectory, info: Mapping[str, Any], *, pooler_optional: bool
) -> None:
    """Refuse files that lack a tensor of the model, misshape one or hold another besides."""
    path = directory.path
    missing = sorted(
        name for name in info["missing_keys"] if not (pooler_optional and "pooler" in name)
    )
    if info["mismatched_keys"]:
        name, stored, required = min(info["mismatched_keys"])
        raise ValueError(
            f"{path}: {printable(name)} has shape {list(stored)}, its settings require "
            f"{list(required)}."
        )
    if missing:
        raise ValueError(
            f"{path} lacks {len(missing)} tensors that its settings require, the first "
            f"{printable(missing[0])}."
        )
    if info["unexpected_keys"]:
        raise ValueError(
            f"{path} holds {printable(min(info['unexpected_keys']))}, which its settings have no "
            "place for."
        )
    if info["error_msgs"]:
        raise ValueError(f"{path} cannot be read ({printable(info['error_msgs'][0], 200)}).")


def gives_logits(model: nn.Module) -> bool:
    """Whether a model of transformers predicts tokens: the next ones, or masked ones."""
    config: Any = model.config
    return type(model).__name__ in _classes_with_head(config.model_type)


def _classes_with_head(model_type: str) -> set[str]:
    auto = import_module("transformers.models.auto.modeling_auto")
    tables = (auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES)
    return {table[model_type] for table in tables if model_type in table}


def _named_class(transformers: Any, directory: CheckpointDirectory) -> Any:
    """The class that config.json names, where it is a model of the family; else None."""
    named = getattr(transformers, directory.architecture or "", None)
    if isinstance(named, type) and issubclass(named, transformers.PreTrainedModel):
        family = getattr(getattr(named, "config_class", None), "model_type", None)
        # a family may share the class of another one, as InternLM 3 that of Llama
        if directory.model_type == family or named.__name__ in _classes_with_head(
            directory.model_type
        ):
            return named
    return None


def _bare_class(transformers: Any, config: Any) -> Any:
    bare = transformers.MODEL_MAPPING.get(type(config), None)
    if bare is None:
        raise ValueError(f"transformers has no bare model of the family {config.model_type!r}.")
    return bare[0] if isinstance(bare, tuple) else bare


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
    """The one boundary to transformers: any of its errors becomes a ValueError of one sentence.

    Its warnings are not shown; ours (``Notice``) are.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            warnings.simplefilter("default", Notice)
            yield
    except (MemoryError, Damaged):
        raise
    except Exception as error:
        reason = printable(" ".join(str(error).split()), 400).rstrip(".")
        cause = "" if isinstance(error, ValueError) else f"transformers cannot {action}: "
        raise ValueError(f"{cause}{reason}.") from None
