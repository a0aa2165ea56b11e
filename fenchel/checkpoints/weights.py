"""Tensors of a checkpoint directory to the state dict of a model, and back.

Names and shapes are compared before a byte of weights is read: those of the model come from a
Transformer on the meta device, where nothing is allocated, laid out as the family lays them out
(``Layout.split``); the headers must list exactly these.

Memory: a tensor that has the same layout in the file and in the model stays on the file's own
pages. Queries, keys and values that are three tensors of a family and one of ours are copied once,
layer by layer, and so are matrices that a family stores transposed (GPT-2) or interleaved per head
(NeoX, BLOOM). All else is pages that the system may drop and read again. Another dtype is a copy
of everything.
"""

import hashlib
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from fenchel.checkpoints.directory import (
    DTYPES,
    CheckpointDirectory,
    TensorReader,
    open_tensors,
    require_finite,
)
from fenchel.checkpoints.safetensors_header import system_errors
from fenchel.files import Damaged, printable, require_output
from fenchel.model.config import ModelConfig
from fenchel.model.families import Family, Match
from fenchel.model.transformer import meta_model

MAX_LAYERS = 4096
_LONGEST = 2000  # characters of a text in the metadata


def read_weights(
    directory: CheckpointDirectory,
    family: Family,
    config: ModelConfig,
    dtype: torch.dtype | None = None,
) -> dict[str, Tensor]:
    """The state dict of a Transformer from a directory of a family, in ``dtype`` or as stored."""
    directory = with_current_names(directory, family, config)
    require_enough_tensors(directory, config, listed=config.experts * family.lists_experts)
    ours = meta_state_dict(config)
    matches, prefix = family.matches(config, ours), family.prefix
    if prefix and not any(name.startswith(prefix) for name in directory.tensors):
        # A file of the body alone, saved without the LM head, has names without the prefix.
        without = (tuple(n.removeprefix(prefix) for n in match.theirs) for match in matches)
        matches = [m._replace(theirs=names) for m, names in zip(matches, without, strict=True)]
    shapes = {name: tuple(x.shape) for name, x in _laid_out(ours, matches)}
    _require_tensors(directory, shapes, optional=family.copies.keys())
    dtype = dtype or _common_dtype(directory, shapes)
    with open_tensors(directory, dtype) as tensors:
        _require_copies(directory, family, matches, tensors)
        return {
            match.ours: match.join(
                [_finite(tensors, name, directory).to(dtype) for name in match.theirs]
            )
            for match in matches
        }


def read_state_dict(
    directory: CheckpointDirectory,
    expected: Mapping[str, Tensor],
    dtype: torch.dtype | None = None,
) -> dict[str, Tensor]:
    """The tensors of a directory under the names and in the shapes of ``expected``."""
    _require_tensors(directory, {name: tuple(x.shape) for name, x in expected.items()})
    dtype = dtype or _common_dtype(directory, expected)
    with open_tensors(directory) as tensors:
        return {name: _finite(tensors, name, directory).to(dtype) for name in expected}


def write_weights(
    weights: Mapping[str, Tensor], family: Family, config: ModelConfig, dtype: torch.dtype | None
) -> dict[str, Tensor]:
    """The tensors of a state dict under the names and in the layouts of a family."""

    def as_stored(name: str, tensor: Tensor) -> Tensor:
        tensor = tensor.detach().to("cpu", dtype or tensor.dtype).contiguous()
        try:
            require_finite(tensor, name)
        except ValueError as error:
            raise ValueError(
                f"{str(error).rstrip('.')} as {tensor.dtype}; choose a dtype with a wider range."
            ) from None
        return tensor

    matches = family.matches(config, weights)
    return {name: as_stored(name, tensor) for name, tensor in _laid_out(weights, matches)}


def _laid_out(ours: Mapping[str, Tensor], matches: Iterable[Match]) -> Iterator[tuple[str, Tensor]]:
    """Our tensors as those of a family, by name; several of ours may be in one of theirs."""
    pending: dict[str, dict[int, Tensor]] = {}
    for match in matches:
        layout = match.layout
        tensors = match.split(ours[match.ours])
        for n, (name, tensor) in enumerate(zip(match.theirs, tensors, strict=True)):
            if layout.parts == 1 or n in layout.alone:
                yield name, tensor
                continue
            parts = pending.setdefault(name, {})
            parts[layout.part] = tensor
            if len(parts) == layout.parts:
                del pending[name]
                yield name, layout.merge([parts[number] for number in range(layout.parts)])


def meta_state_dict(config: ModelConfig) -> dict[str, Tensor]:
    """Names and shapes of the weights of a model, on the meta device."""
    try:
        return dict(meta_model(config).state_dict())
    except (RuntimeError, OverflowError) as error:
        raise ValueError(
            f"the settings give sizes that no tensor can have ({printable(error)})."
        ) from None


def with_current_names(
    directory: CheckpointDirectory, family: Family, config: ModelConfig
) -> CheckpointDirectory:
    """The directory without tensors that the model does not need, legacy names replaced."""
    tensors, unused = {}, family.unused(config)
    for stored_name, location in directory.tensors.items():
        if family.is_ignored(stored_name):
            continue
        name = family.current_name(stored_name)
        if unused is not None and re.fullmatch(unused, name):
            continue
        if name in tensors:
            raise Damaged(f"{directory.path} holds {printable(name)} under two names.")
        tensors[name] = location
    return directory._replace(tensors=tensors)


def own_settings(directory: CheckpointDirectory, family: Family) -> dict[str, Any]:
    """config.json of a directory, or of the text model inside it."""
    names = [family.current_name(name) for name in directory.tensors]
    return dict(family.settings_in(directory.config, names))


def require_enough_tensors(
    directory: CheckpointDirectory, config: ModelConfig, *, per_layer: int = 1, listed: int = 0
) -> None:
    """Refuse sizes that the files cannot fill, before as many modules are built.

    ``listed`` experts per layer have tensors of their own.
    """
    layers = (config.distinct_layers or config.layers) + (config.encoder_layers or 0)
    if per_layer * layers > (count := len(directory.tensors)):
        raise ValueError(f"{directory.path} holds {count} tensors, too few for {layers} layers.")
    routed = sum(map(config.has_experts, range(layers)))
    if listed * routed > count:
        raise ValueError(
            f"{directory.path} holds {count} tensors, too few for {listed} experts in {routed} "
            "layers."
        )
    if config.layers > MAX_LAYERS:  # shared layers need no further tensors
        raise ValueError(
            f"{directory.path} has settings for {config.layers} layers, more than {MAX_LAYERS}."
        )
    largest = max(location.entry.bytes for location in directory.tensors.values())
    sizes = {
        "the vocabulary": config.vocabulary,
        "the residual stream": config.width,
        "the MLP": max(config.mlp_width, config.shared_hidden or 0, config.dense_hidden or 0),
        "the experts": config.experts,
        "the shared expert": config.shared_expert or 0,
        "all heads together": config.heads * (config.full_head_size or config.head_width),
        "the embedding of all layers": config.layers * config.per_layer_width,
    }
    for what, size in sizes.items():
        if size > largest:
            raise ValueError(
                f"{directory.path}: {size} for {what} does not fit the files, "
                f"whose largest tensor has {largest} bytes."
            )


def weights_fingerprint(model: nn.Module) -> str:
    """The SHA-256 of the name, shape and sum of every parameter, of its bits in bfloat16."""
    digest = hashlib.sha256()
    for name, parameter in model.named_parameters():
        bits = parameter.detach().to(torch.bfloat16).flatten().view(torch.int16)
        total = int(bits.sum(dtype=torch.int64))
        digest.update(f"{name} {tuple(parameter.shape)} {total}\n".encode())
    return digest.hexdigest()


def write_model_tensors(
    path: Path, tensors: Mapping[str, Tensor], about: Mapping[str, str]
) -> None:
    """Write tensors that belong to one model, such as a direction, where nothing is yet."""
    require_output(path, new=True)
    plain = {name: x.detach().float().cpu().contiguous() for name, x in tensors.items()}
    with system_errors(path):
        save_file(plain, path, dict(about))


def read_model_tensors(
    path: Path, model: nn.Module, fixed: Mapping[str, str], what: str, claim: str
) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors and the metadata of a file whose header was checked, of these weights.

    It is ``what``, such as "a lens", and its metadata ``fixed`` say ``claim``.
    """
    with system_errors(path), safe_open(path, framework="pt") as file:
        about = {key: printable(value, _LONGEST) for key, value in (file.metadata() or {}).items()}
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    if any(about.get(key) != value for key, value in fixed.items()):
        raise ValueError(f"{path} does not say {claim}.")
    if about.get("weights") != weights_fingerprint(model):
        raise ValueError(
            f"{path} was made with other weights of the same width; {what} does not carry over "
            "between models."
        )
    if not all(bool(x.isfinite().all()) for x in tensors.values()):
        raise ValueError(f"{path} holds nan or inf.")
    return tensors, about


def _require_tensors(
    directory: CheckpointDirectory,
    shapes: Mapping[str, tuple[int, ...]],
    optional: Iterable[str] = (),
) -> None:
    """Refuse files whose names, shapes or dtypes are not those that the settings imply."""
    path, tensors = directory.path, directory.tensors
    for name in sorted(shapes):
        shape = shapes[name]
        if name not in tensors:
            raise ValueError(f"{path} lacks {name}, which its settings require.")
        entry = tensors[name].entry
        if entry.shape != shape:
            raise ValueError(
                f"{path}: {name} has shape {list(entry.shape)}, its settings require {list(shape)}."
            )
        if entry.dtype not in DTYPES:
            raise ValueError(
                f"{path}: {name} is of {entry.dtype}; weights should be of {', '.join(DTYPES)}."
            )
    if extra := sorted(tensors.keys() - shapes.keys() - set(optional)):
        raise ValueError(
            f"{path} holds {printable(extra[0])}, which its settings have no place for."
        )


def _common_dtype(directory: CheckpointDirectory, names: Iterable[str]) -> torch.dtype:
    dtypes = {directory.tensors[name].entry.dtype for name in names}
    if len(dtypes) > 1:
        raise ValueError(
            f"{directory.path} mixes weights of {', '.join(sorted(dtypes))}; "
            "name the dtype that all should have."
        )
    return DTYPES[dtypes.pop()]


def _require_copies(
    directory: CheckpointDirectory, family: Family, matches: Iterable[Match], tensors: TensorReader
) -> None:
    """Refuse a repeated tensor that differs from its source: one of the two would be unused."""
    matched = {name for match in matches for name in match.theirs}
    for copy, source in family.copies.items():
        if copy not in directory.tensors or copy in matched:
            continue
        known = source if source in matched else source.removeprefix(family.prefix)
        if known not in matched or not torch.equal(tensors[copy], tensors[known]):
            raise ValueError(
                f"{directory.path}: {copy} differs from {source}, and the settings tie the two."
            )


def _finite(tensors: TensorReader, name: str, directory: CheckpointDirectory) -> Tensor:
    tensor = tensors[name]
    require_finite(tensor, f"{directory.path}: {name}")
    return tensor
