"""A model to a Hugging Face directory, which transformers loads and agrees with.

    config.json               settings in the words of the first family that says exactly them
    model.safetensors         weights by that family's names; beyond SHARD bytes in several files
                              and an index of them
    generation_config.json    which tokens begin, end and fill
    tokenizer.json, tokenizer_config.json
    manifest.json             size and SHA-256 of each of these

The directory appears whole or not at all. A model that no family can express is refused in one
sentence, before anything is written.
"""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer

from fenchel.data import end_id, pad_id
from fenchel.files import committed, discard, require_space
from fenchel.model.config import ModelConfig
from fenchel.model.directory import CONFIG, INDEX, TOKENIZER, WEIGHTS
from fenchel.model.families import family_for
from fenchel.model.generation import GENERATION
from fenchel.model.sigma import SigmaLinear, matrix_of
from fenchel.model.transformer import Transformer
from fenchel.model.weights import write_weights

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
    """Write ``path``, a Hugging Face directory; weights as they are or in another ``dtype``."""
    config, weights = plain(model)
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


def plain(model: Transformer) -> tuple[ModelConfig, dict[str, torch.Tensor]]:
    """Settings and weights with every map as the matrix it is: gain W / sigma(W) is one."""
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
    """Small files and tensors to a directory that is there whole, or as it was before."""
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
    """Refuse to write where something is, unless asked to."""
    if path.is_symlink() or (path.exists() and not path.is_dir()):
        raise ValueError(f"{path} is there already and is no directory; choose another.")
    if path.is_dir() and any(path.iterdir()) and not overwrite:
        raise ValueError(
            f"{path} is not empty; choose another, or have it replaced (--force, overwrite=True)."
        )


def token_ids(tokenizer: Tokenizer | None, kind: str) -> dict[str, int | None]:
    """The tokens that begin, end and fill, by the names that Hugging Face gives them."""
    names = ("bos_token_id", "eos_token_id", "pad_token_id")
    if tokenizer is None:  # said to be none, or each family would put in those of its own
        return dict.fromkeys(names)
    end, pad = end_id(tokenizer), pad_id(tokenizer)
    begin = next((i for s in _BEGINNINGS if (i := tokenizer.token_to_id(s)) is not None), end)
    ids: dict[str, int | None] = dict(zip(names, (begin, end, pad), strict=True))
    return ids | ({"decoder_start_token_id": pad} if kind == "encoder-decoder" else {})


def dumps(settings: Mapping[str, Any]) -> str:
    """JSON as these directories have it."""
    return json.dumps(settings, indent=2, sort_keys=True) + "\n"


def _tokenizer_config(
    tokenizer: Tokenizer, tokens: Mapping[str, int | None], context: int
) -> dict[str, Any]:
    spelt = {
        name.removesuffix("_id"): tokenizer.id_to_token(token)
        for name, token in tokens.items()
        if token is not None and name != "decoder_start_token_id"
    }
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": context,
        "clean_up_tokenization_spaces": False,
        **spelt,
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
