"""A directory to a Hugging Face directory: a run exported, or a checkpoint in another dtype.

A run is written in the words of the first family that says exactly its settings. A Hugging Face
directory stays of its family: config.json keeps every key but the dtype, the tokenizer's files
are carried over as they are, and the weights pass the same checks as in ``load``. Masks, tables
and repeated tensors that nothing needs are left behind.
"""

from pathlib import Path
from typing import NamedTuple

import torch

from fenchel.model.directory import (
    CONFIG,
    TOKENIZER,
    holds,
    modest_file,
    open_directory,
    plain_file,
)
from fenchel.model.families import family_for, family_of
from fenchel.model.generation import GENERATION
from fenchel.model.load import is_run, load
from fenchel.model.save import TOKENIZER_CONFIG, dumps, plain, require_free, save, write_directory
from fenchel.model.weights import read_weights, write_weights

_JSON = (TOKENIZER, TOKENIZER_CONFIG, GENERATION, "special_tokens_map.json", "added_tokens.json")
_TEXT = ("vocab.json", "vocab.txt", "merges.txt", "chat_template.jinja")
_LONGEST = 64 * 2**20


class Converted(NamedTuple):
    """What was written."""

    family: str
    parameters: int
    dtype: torch.dtype


def convert(
    source: str | Path,
    target: str | Path,
    *,
    dtype: torch.dtype | None = None,
    which: str = "best",
    overwrite: bool = False,
) -> Converted:
    """Write ``target``; of a run its ``best`` or its ``newest`` checkpoint."""
    source, target = Path(source), Path(target)
    if target.resolve() == source.resolve():
        raise ValueError(f"{target} is the directory that is read; choose another.")
    require_free(target, overwrite=overwrite)  # before the work, and again when it is done
    if source.is_dir() and not is_run(source):
        return _recast(source, target, dtype, overwrite=overwrite)
    model, tokenizer, _ = load(source, which=which)
    save(model, tokenizer, target, dtype=dtype, overwrite=overwrite)
    config, weights = plain(model)
    kind = dtype or next(iter(weights.values())).dtype
    count = sum(weight.numel() for weight in weights.values())
    return Converted(family_for(config, weights).name, count, kind)


def _recast(source: Path, target: Path, dtype: torch.dtype | None, *, overwrite: bool) -> Converted:
    directory = open_directory(source)
    family = family_of(directory.config["model_type"], directory.tensors, source / CONFIG)
    config = family.read(directory.config, directory.tensors, source / CONFIG)
    weights = read_weights(directory, family, config)
    tensors = write_weights(weights, family, config, dtype)
    kind = next(iter(tensors.values())).dtype
    said = {k: v for k, v in directory.config.items() if k not in ("torch_dtype", "auto_map")}
    files = {CONFIG: dumps({**said, "dtype": str(kind).removeprefix("torch.")}).encode()}
    write_directory(target, files | _carried(source), tensors, overwrite=overwrite)
    return Converted(family.name, sum(t.numel() for t in tensors.values()), kind)


def _carried(source: Path) -> dict[str, bytes]:
    """The tokenizer's files and what is said about generating, byte for byte."""
    carried = {}
    for name in (*_JSON, *_TEXT):
        if not holds(source, name):
            continue
        file = modest_file(source, name) if name in _JSON else plain_file(source, name)
        if (size := file.stat().st_size) > _LONGEST:
            raise ValueError(f"{file} has {size} bytes; more than {_LONGEST} is not carried over.")
        carried[name] = file.read_bytes()
    return carried
