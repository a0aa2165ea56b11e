"""A model, a run or a directory to a Hugging Face directory that transformers loads.

    config.json               settings of the first family that expresses them exactly
    model.safetensors         weights by the names of that family; beyond SHARD bytes several files
                              and an index of them
    generation_config.json    ids of the tokens that begin, end and pad a text
    tokenizer.json, tokenizer_config.json
    manifest.json             size and SHA-256 of each of these

The directory appears whole or not at all. A model that no family can express is refused in one
sentence before anything is written.

``convert`` exports a run, or writes a Hugging Face directory again in another dtype. The latter
keeps its family: config.json keeps every key but the dtype and ``auto_map``, the files of the
tokenizer are copied byte for byte, and the weights pass the same checks as in ``load``. Masks,
tables and repeated tensors that the model does not need are left out.
"""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer

from fenchel.checkpoints.directory import (
    INDEX,
    TOKENIZER,
    WEIGHTS,
    CheckpointDirectory,
    bounded_json_file,
    has_file,
    open_directory,
    open_tensors,
    regular_file,
)
from fenchel.checkpoints.generation_config import GENERATION
from fenchel.checkpoints.load import load
from fenchel.checkpoints.run_checkpoint import is_run
from fenchel.checkpoints.weights import read_weights, write_weights
from fenchel.data import end_id, pad_id
from fenchel.files import committed, discard, require_space
from fenchel.model.config import ModelConfig
from fenchel.model.families import family_for, family_of
from fenchel.model.families.config_reader import CONFIG
from fenchel.model.sigma_linear import SigmaLinear, matrix_of
from fenchel.model.transformer import Transformer

TOKENIZER_CONFIG = "tokenizer_config.json"
SHARD = 5 * 10**9
"""Bytes of weights in one file."""
_BEGINNINGS = ("<s>", "<bos>", "<|begin_of_text|>", "[CLS]")


def save(
    model: Transformer,
    tokenizer: Tokenizer | None,
    path: str | Path,
    *,
    dtype: torch.dtype | None = None,
    overwrite: bool = False,
    shard: int = SHARD,
) -> None:
    """Write a Hugging Face directory, with the weights as they are or in another ``dtype``."""
    config, weights = export_state(model)
    family = family_for(config, weights)
    theirs = write_weights(weights, family, config, dtype)
    tokens = token_ids(tokenizer, config.kind)
    kind = str(next(iter(theirs.values())).dtype).removeprefix("torch.")
    files: dict[str, str | bytes] = {
        CONFIG: dumps({**family.write(config), **tokens, "dtype": kind}),
        GENERATION: dumps(tokens),
    }
    if tokenizer is not None:
        files[TOKENIZER] = tokenizer.to_str(pretty=True)
        files[TOKENIZER_CONFIG] = dumps(_tokenizer_config(tokenizer, tokens, config.context))
    write_directory(Path(path), files, theirs, overwrite=overwrite, shard=shard)


def export_state(model: Transformer) -> tuple[ModelConfig, dict[str, torch.Tensor]]:
    """Settings and weights without reparametrisation: gain W / sigma(W) becomes a plain matrix."""
    weights = dict(model.state_dict())
    for name, module in model.named_modules():
        if isinstance(module, SigmaLinear):
            weights[f"{name}.weight"] = matrix_of(module).detach()
            for part in ("gain", "left", "right"):
                del weights[f"{name}.{part}"]
    return replace(model.config, sigma_reparam=False), weights


def write_directory(
    path: Path,
    files: Mapping[str, str | bytes],
    tensors: Mapping[str, torch.Tensor],
    *,
    overwrite: bool,
    shard: int = SHARD,
) -> None:
    """Write files and tensors to a directory; a crash leaves it complete or as it was before."""
    require_free(path, overwrite=overwrite)
    path.parent.mkdir(parents=True, exist_ok=True)
    size = sum(tensor.nbytes for tensor in tensors.values())
    require_space(path.parent, size + sum(len(content) for content in files.values()) + 2**20)
    whole = path.with_name(f"{path.name}.new") if path.exists() else path
    with committed(whole, {"format": 1}) as folder:
        for name, content in files.items():
            data = content.encode() if isinstance(content, str) else content
            (folder / name).write_bytes(data)
        _write_tensors(folder, tensors, shard)
    if whole != path:
        discard(path)
        whole.rename(path)


def require_free(path: Path, *, overwrite: bool) -> None:
    """Refuse a target that exists and is not empty, unless ``overwrite`` is set."""
    if path.is_symlink() or (path.exists() and not path.is_dir()):
        raise ValueError(f"{path} exists and is no directory; choose another.")
    if path.is_dir() and any(path.iterdir()) and not overwrite:
        raise ValueError(
            f"{path} is not empty; choose another, or replace it with --force (overwrite=True)."
        )


def token_ids(tokenizer: Tokenizer | None, kind: str) -> dict[str, int | None]:
    """The ids of the tokens that begin, end and pad, by their names in Hugging Face configs."""
    names = ("bos_token_id", "eos_token_id", "pad_token_id")
    if tokenizer is None:  # explicit nulls: transformers would fill in the family's defaults
        return dict.fromkeys(names)
    end, pad = end_id(tokenizer), pad_id(tokenizer)
    begin = next((i for s in _BEGINNINGS if (i := tokenizer.token_to_id(s)) is not None), end)
    ids: dict[str, int | None] = dict(zip(names, (begin, end, pad), strict=True))
    return ids | ({"decoder_start_token_id": pad} if kind == "encoder-decoder" else {})


def dumps(settings: Mapping[str, Any]) -> str:
    """JSON in the form of Hugging Face directories."""
    return json.dumps(settings, indent=2, sort_keys=True) + "\n"


def _tokenizer_config(
    tokenizer: Tokenizer, tokens: Mapping[str, int | None], context: int
) -> dict[str, Any]:
    special_tokens = {
        name.removesuffix("_id"): tokenizer.id_to_token(token)
        for name, token in tokens.items()
        if token is not None and name != "decoder_start_token_id"
    }
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": context,
        "clean_up_tokenization_spaces": False,
        **special_tokens,
    }


def _write_tensors(folder: Path, tensors: Mapping[str, torch.Tensor], shard: int) -> None:
    shards: list[dict[str, torch.Tensor]] = [{}]
    room = shard
    for name, tensor in tensors.items():
        if tensor.nbytes > room and shards[-1]:
            shards.append({})
            room = shard
        shards[-1][name] = tensor
        room -= tensor.nbytes
    if len(shards) == 1:
        save_file(shards[0], folder / WEIGHTS, metadata={"format": "pt"})
        return
    where: dict[str, str] = {}
    for number, part in enumerate(shards, 1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        save_file(part, folder / file, metadata={"format": "pt"})
        where |= dict.fromkeys(part, file)
    total = sum(tensor.nbytes for tensor in tensors.values())
    (folder / INDEX).write_text(dumps({"metadata": {"total_size": total}, "weight_map": where}))


_JSON = (TOKENIZER, TOKENIZER_CONFIG, GENERATION, "special_tokens_map.json", "added_tokens.json")
_TEXT = ("vocab.json", "vocab.txt", "merges.txt", "chat_template.jinja")
_MAX_BYTES = 64 * 2**20


class Converted(NamedTuple):
    """The family, size and dtype of the directory that ``convert`` wrote."""

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
    """Write a run or a Hugging Face directory as the Hugging Face directory ``target``.

    ``which`` selects the ``best`` or the ``newest`` checkpoint of a run.
    """
    source, target = Path(source), Path(target)
    if target.resolve() == source.resolve():
        raise ValueError(f"{target} is also the source; choose another.")
    require_free(target, overwrite=overwrite)  # before the work, and again when it is done
    if source.is_dir() and not is_run(source):
        return _recast(source, target, dtype, overwrite=overwrite)
    model, tokenizer, _ = load(source, which=which)
    save(model, tokenizer, target, dtype=dtype, overwrite=overwrite)
    config, weights = export_state(model)
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
    settings = {k: v for k, v in directory.config.items() if k not in ("torch_dtype", "auto_map")}
    files = {CONFIG: dumps({**settings, "dtype": str(kind).removeprefix("torch.")}).encode()}
    write_directory(target, files | _copied_files(source), tensors, overwrite=overwrite)
    return Converted(family.name, sum(t.numel() for t in tensors.values()), kind)


def write_copy(source: CheckpointDirectory, target: Path, settings: Mapping[str, Any]) -> None:
    """A checked directory again, with ``settings`` added to its config.json.

    Tensors are copied by name, in their own dtype; of the other files, those of the tokenizer and
    generation_config.json.
    """
    config = {k: v for k, v in source.config.items() if k != "auto_map"}
    files = {CONFIG: dumps({**config, **settings}).encode()}
    with open_tensors(source) as tensors:
        weights = {name: tensors[name] for name in source.tensors}
        write_directory(target, files | _copied_files(source.path), weights, overwrite=False)


def _copied_files(source: Path) -> dict[str, bytes]:
    """The files of the tokenizer and generation_config.json, byte for byte."""
    files = {}
    for name in (*_JSON, *_TEXT):
        if not has_file(source, name):
            continue
        file = bounded_json_file(source, name) if name in _JSON else regular_file(source, name)
        if (size := file.stat().st_size) > _MAX_BYTES:
            raise ValueError(f"{file} has {size} bytes; more than {_MAX_BYTES} is not copied.")
        files[name] = file.read_bytes()
    return files
