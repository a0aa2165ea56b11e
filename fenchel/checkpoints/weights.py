"""Weights of a Hugging Face directory to those of a Transformer, and back.

Names and shapes are compared before a byte of weights is read: ours come from the Transformer
built on the meta device, where nothing is allocated, and are laid out as the family lays them
(``split``); the headers must say exactly that.

What memory it takes: a tensor that lies as ours does stays on the file's own pages. Queries,
keys and values that are three of theirs and one of ours are copied once, layer by layer, and so
are maps that theirs keeps turned (GPT-2) or head by head (NeoX, BLOOM); the copy takes their
place. Everything else is pages that the system may drop and read again. Another dtype is a copy
of everything.
"""

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from fenchel.checkpoints.directory import CheckpointDirectory, TensorReader, open_tensors
from fenchel.files import Damaged, printable
from fenchel.model.config import ModelConfig
from fenchel.model.families import Family, Match
from fenchel.model.transformer import meta_model

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}
"""What numbers a model's weights may be, as safetensors calls them."""

MOST_LAYERS = 4096


def read_weights(
    directory: CheckpointDirectory,
    family: Family,
    config: ModelConfig,
    dtype: torch.dtype | None = None,
) -> dict[str, Tensor]:
    """Our state dict of a directory, in ``dtype`` or as the files have it."""
    directory = with_current_names(directory, family)
    _require_enough(directory, config)
    ours = meta_state_dict(config)
    matches = _without_prefix(family.matches(config, ours), family, directory)
    _require_match(directory, matches, ours, family, config)
    kind = dtype or _common_dtype(directory, matches)
    with open_tensors(directory) as tensors:
        _require_copies(directory, family, matches, tensors)
        return {match.ours: _ours(match, tensors, config, kind) for match in matches}


def write_weights(
    weights: Mapping[str, Tensor], family: Family, config: ModelConfig, dtype: torch.dtype | None
) -> dict[str, Tensor]:
    """Their tensors, by the names of the family."""
    theirs = {}
    for match in family.matches(config, weights):
        parts = match.lie.split(weights[match.ours].detach(), config)
        for name, part in zip(match.theirs, parts, strict=True):
            theirs[name] = part.to("cpu", dtype or part.dtype).contiguous()
            if not is_finite(theirs[name]):
                raise ValueError(
                    f"{name} holds a value that is not finite as {theirs[name].dtype}; "
                    "choose a dtype with a wider range."
                )
    return theirs


def is_finite(tensor: Tensor) -> bool:
    """Whether every number is one; in one pass and without another tensor as large."""
    if not tensor.numel():
        return True
    low, high = tensor.aminmax()
    return bool(low.isfinite() and high.isfinite())


def meta_state_dict(config: ModelConfig) -> dict[str, Tensor]:
    """Names and shapes of a model's weights, without their numbers."""
    try:
        return dict(meta_model(config).state_dict())
    except (RuntimeError, OverflowError) as error:
        raise ValueError(
            f"the settings ask for what no tensor can hold ({printable(error)})."
        ) from None


def with_current_names(directory: CheckpointDirectory, family: Family) -> CheckpointDirectory:
    """The directory without what nothing needs, older names replaced."""
    tensors = {}
    for there, place in directory.tensors.items():
        if family.is_ignored(there):
            continue
        name = family.current_name(there)
        if name in tensors:
            raise Damaged(f"{directory.path} holds {printable(name)} under two names.")
        tensors[name] = place
    return directory._replace(tensors=tensors)


def _require_enough(directory: CheckpointDirectory, config: ModelConfig) -> None:
    """Refuse sizes that the files cannot fill, before as many modules are built."""
    layers = (config.distinct_layers or config.layers) + (config.encoder_layers or 0)
    if layers > (count := len(directory.tensors)):
        raise ValueError(f"{directory.path} holds {count} tensors, too few for {layers} layers.")
    if config.layers > MOST_LAYERS:  # shared ones need no tensors of their own
        raise ValueError(f"{directory.path} asks for {config.layers} layers, over {MOST_LAYERS}.")
    largest = max(place.entry.bytes for place in directory.tensors.values())
    sizes = {
        "the vocabulary": config.vocabulary,
        "the stream": config.width,
        "the MLP": config.mlp_width,
        "all heads together": config.heads * config.head_width,
    }
    for what, size in sizes.items():
        if size > largest:
            raise ValueError(
                f"{directory.path}: {size} for {what} does not fit the files, "
                f"whose largest tensor has {largest} bytes."
            )


def _without_prefix(
    matches: list[Match], family: Family, directory: CheckpointDirectory
) -> list[Match]:
    """Names as a file saved without a head has them, if this is one."""
    prefix = family.prefix
    if not prefix or any(name.startswith(prefix) for name in directory.tensors):
        return matches
    return [m._replace(theirs=tuple(n.removeprefix(prefix) for n in m.theirs)) for m in matches]


def _require_match(
    directory: CheckpointDirectory,
    matches: Iterable[Match],
    ours: Mapping[str, Tensor],
    family: Family,
    config: ModelConfig,
) -> None:
    """Refuse files whose names, shapes or kinds are not those that the settings imply."""
    path, there = directory.path, directory.tensors
    wanted: dict[str, list[int]] = {}
    for match in matches:
        parts = match.lie.split(ours[match.ours], config)
        wanted |= {n: list(p.shape) for n, p in zip(match.theirs, parts, strict=True)}
    for name, shape in wanted.items():
        if name not in there:
            raise ValueError(f"{path} lacks {name}, which its settings ask for.")
        _, _, entry = there[name]
        if list(entry.shape) != shape:
            raise ValueError(
                f"{path}: {name} has shape {list(entry.shape)}, its settings ask for {shape}."
            )
        if entry.dtype not in DTYPES:
            raise ValueError(
                f"{path}: {name} is of {entry.dtype}; weights should be of {', '.join(DTYPES)}."
            )
    for name in there.keys() - wanted.keys() - family.copies.keys():
        raise ValueError(f"{path} holds {printable(name)}, which its settings have no place for.")


def _common_dtype(directory: CheckpointDirectory, matches: Iterable[Match]) -> torch.dtype:
    kinds = {directory.tensors[name].entry.dtype for match in matches for name in match.theirs}
    if len(kinds) > 1:
        raise ValueError(
            f"{directory.path} mixes weights of {', '.join(sorted(kinds))}; "
            "name the dtype that all should have."
        )
    return DTYPES[kinds.pop()]


def _require_copies(
    directory: CheckpointDirectory, family: Family, matches: Iterable[Match], tensors: TensorReader
) -> None:
    """What a file repeats must be a repetition, or one of the two would go unused."""
    placed = {name for match in matches for name in match.theirs}
    for copy, source in family.copies.items():
        if copy not in directory.tensors or copy in placed:
            continue
        known = source if source in placed else source.removeprefix(family.prefix)
        if known not in placed or not torch.equal(tensors[copy], tensors[known]):
            raise ValueError(
                f"{directory.path}: {copy} differs from {source}, and the settings tie the two."
            )


def _ours(match: Match, tensors: TensorReader, config: ModelConfig, dtype: torch.dtype) -> Tensor:
    parts = []
    for name in match.theirs:
        part = tensors[name]
        if not is_finite(part):
            raise ValueError(f"{tensors.path}: {name} holds values that are not finite.")
        parts.append(part.to(dtype))
    return match.lie.join(parts, config)
