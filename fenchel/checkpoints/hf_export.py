"""A model, a run or a directory to a Hugging Face directory that transformers loads.

    config.json               settings of the first family that expresses them exactly
    model.safetensors         weights by the names of that family; beyond SHARD bytes several files
                              and an index of them
    generation_config.json    ids of the tokens that begin, end and pad a text; how to sample
    tokenizer.json, tokenizer_config.json, chat_template.jinja
    manifest.json             size and SHA-256 of each of these

The directory appears whole or not at all. A model that no family can express is refused in one
sentence before anything is written.

``convert`` exports a run, or writes a Hugging Face directory again in another dtype. The latter
keeps its family: config.json keeps every key but the dtype and ``auto_map``, the files of the
tokenizer are copied byte for byte, and the weights pass the same checks as in ``load``. Masks,
tables and repeated tensors that the model does not need are left out.
"""

import json
import os
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_file

from fenchel.checkpoints.directory import (
    INDEX,
    TOKENIZER,
    TOKENIZER_CONFIG,
    WEIGHTS,
    CheckpointDirectory,
    has_file,
    open_directory,
    open_tensors,
)
from fenchel.checkpoints.generation_config import GENERATION, TOKEN_IDS
from fenchel.checkpoints.load import load, load_adapted
from fenchel.checkpoints.peft_adapter import ADAPTER_WEIGHTS, adapter_files
from fenchel.checkpoints.run_checkpoint import is_run
from fenchel.checkpoints.safetensors_header import system_errors
from fenchel.checkpoints.tokenizer import COPIED, read_files
from fenchel.checkpoints.tuned_run import bases, read_base
from fenchel.checkpoints.weights import (
    meta_state_dict,
    own_settings,
    read_weights,
    write_weights,
)
from fenchel.choice.by_name import FIELD, choice_from_record
from fenchel.data import AnyTokenizer, TextTokenizer
from fenchel.files import (
    MANIFEST,
    Notice,
    committed,
    discard,
    manifest_of_all,
    printable,
    require_output,
    require_space,
)
from fenchel.model.attention import layer_choice
from fenchel.model.config import ModelConfig
from fenchel.model.families import Family, family_for, family_of
from fenchel.model.families.config_reader import CONFIG
from fenchel.model.families.setting_rows import HARMLESS
from fenchel.model.sigma_linear import SigmaLinear, matrix_of
from fenchel.model.transformer import Transformer

_HEADER = {"format": 1}
"""Entries of the manifest of an export besides its files; those of a run's folders have more."""
SHARD = 5 * 10**9
"""Bytes of weights in one file."""
_REPLACED = frozenset({"auto_map", "dtype", "torch_dtype", "attn_implementation"})
_NOT_NAMED = (".md", ".bin", ".pt", ".pth", ".h5", ".msgpack", ".onnx", ".safetensors", "")
"""Endings of files that no copy needs: pages, and other forms of the weights."""
_ALPHA = ModelConfig(vocabulary=1).entmax_alpha  # of a model whose choice has none
_BEGINNINGS = ("<s>", "<bos>", "<|begin_of_text|>", "[CLS]")


def save(
    model: Transformer,
    tokenizer: AnyTokenizer | None,
    path: str | Path,
    *,
    dtype: torch.dtype | None = None,
    overwrite: bool = False,
    shard: int = SHARD,
) -> Family:
    """Write a Hugging Face directory, with the weights as they are or in another ``dtype``.

    A model that ``load`` read from a Hugging Face directory keeps what this directory has besides
    the weights: ids of special tokens, generation settings, the settings of the tokenizer, the chat
    template. Other models get ids and settings from the tokenizer. Returns the family.
    """
    tokenizer = None if tokenizer is None else TextTokenizer.wrap(tokenizer)
    config, weights = export_state(model)
    source = _Source.of(model, tokenizer)
    config, attached = source.without_attached(config)
    try:
        family = family_for(config, weights, source.config.get("model_type"))
    except ValueError as error:
        if config.bias == model.config.bias:
            raise
        raise ValueError(
            f"a direction is saved as a bias, and {error} Save the model without the direction, "
            "beside the file of it."
        ) from None
    theirs = write_weights(weights, family, config, dtype)
    tokens = source.tokens or token_ids(tokenizer, config.kind)
    kind = str(next(iter(theirs.values())).dtype).removeprefix("torch.")
    settings = source.harmless | tokens | family.write(config) | attached | {"dtype": kind}
    files: dict[str, str | bytes] = {CONFIG: dumps(settings), GENERATION: dumps(tokens)}
    if tokenizer is not None:
        files[TOKENIZER_CONFIG] = dumps(_tokenizer_config(tokenizer, tokens, config.context))
        files |= {TOKENIZER: tokenizer.to_str(pretty=True), **source.files}
    elif GENERATION in source.files:
        files[GENERATION] = source.files[GENERATION]
    write_directory(Path(path), files, theirs, overwrite=overwrite, shard=shard)
    return family


class _Source(NamedTuple):
    """What a model's directory had besides the weights; empty for a model that has none."""

    config: dict[str, Any]
    files: dict[str, bytes]

    @classmethod
    def of(cls, model: Transformer, tokenizer: TextTokenizer | None) -> "_Source":
        """The source of a loaded model, unless its ids are those of another tokenizer."""
        files = dict(model.source_files)
        config = json.loads(files.pop(CONFIG, b"{}"))
        ids = [config[key] for key in TOKEN_IDS if type(config.get(key)) is int]
        if tokenizer is not None and max(ids, default=-1) >= tokenizer.vocabulary_size:
            return cls({}, {})
        return cls(config, files)

    @property
    def tokens(self) -> dict[str, Any]:
        """The ids of special tokens."""
        return {key: self.config[key] for key in TOKEN_IDS if key in self.config}

    @property
    def harmless(self) -> dict[str, Any]:
        """Settings that do not affect what the model computes."""
        return {k: v for k, v in self.config.items() if k in HARMLESS and k not in _REPLACED}

    def without_attached(self, config: ModelConfig) -> tuple[ModelConfig, dict[str, Any]]:
        """The settings without the map that was attached to the source, and the field for it."""
        record = self.config.get(FIELD)
        if record is None or config.entmax_alpha_learned:  # which no record holds
            return config, {}
        if choice_from_record(record) != layer_choice(config, 0):
            return config, {}
        return replace(config, choice="softmax", entmax_alpha=_ALPHA, beta=1.0), {FIELD: record}


def export_state(model: Transformer) -> tuple[ModelConfig, dict[str, torch.Tensor]]:
    """Settings and weights without reparametrisation: gain W / sigma(W) becomes a plain matrix.

    A steered model has a bias in some blocks (``Transformer.steered``); where its settings have
    none, they get biases, and those of all other maps are zero.
    """
    weights, config = dict(model.state_dict()), replace(model.config, sigma_reparam=False)
    for name, module in model.named_modules():
        if isinstance(module, SigmaLinear):
            weights[f"{name}.weight"] = matrix_of(module).detach()
            for part in ("gain", "left", "right"):
                del weights[f"{name}.{part}"]
    if weights.keys() - meta_state_dict(config).keys():
        config = replace(config, bias=True, qkv_bias=None)
        for name, empty in meta_state_dict(config).items():
            if name not in weights:
                weights[name] = model.lm_head_weight.detach().new_zeros(empty.shape)
    return config, weights


def write_directory(
    path: Path,
    files: Mapping[str, str | bytes],
    tensors: Mapping[str, torch.Tensor],
    *,
    overwrite: bool,
    shard: int = SHARD,
    weights: str = WEIGHTS,
) -> None:
    """Write files and tensors to a directory; a crash leaves it complete or as it was before.

    ``weights`` is the name of their file where one has room for all.
    """
    require_free(path, overwrite=overwrite)
    path.parent.mkdir(parents=True, exist_ok=True)
    size = sum(tensor.nbytes for tensor in tensors.values())
    require_space(path.parent, size + sum(len(content) for content in files.values()) + 2**20)
    whole = _beside(path) if path.exists() else path
    with committed(whole, _HEADER) as folder:
        for name, content in files.items():
            data = content.encode() if isinstance(content, str) else content
            (folder / name).write_bytes(data)
        _write_tensors(folder, tensors, shard, weights)
    if whole != path:
        discard(path)
        whole.rename(path)


def require_free(path: Path, *, overwrite: bool, reads: Iterable[str | Path | None] = ()) -> None:
    """Refuse a target that is not empty, or that is one of ``reads``, holds one or lies in one.

    ``overwrite`` replaces only a directory that this module has written, with nothing added to it.
    """
    require_output(path, folder=True, reads=reads)
    if not path.exists():
        return
    if any(path.iterdir()):
        if not overwrite:
            raise ValueError(f"{path} is not empty; choose another, or replace it with --force.")
        manifest = manifest_of_all(path) or {}
        if manifest.keys() != _HEADER.keys() | {"files", "seal"}:
            raise ValueError(
                f"{path} holds files that no export of fenchel has written, so it is not replaced; "
                "remove it, or choose another."
            )
    require_output(_beside(path), folder=True)  # where it is written first


def _beside(path: Path) -> Path:
    """Where a directory is written that replaces another."""
    return path.with_name(f"{path.name}.new-{os.getpid()}")


def token_ids(tokenizer: TextTokenizer | None, kind: str) -> dict[str, int | None]:
    """The ids of the tokens that begin, end and pad, by their names in Hugging Face configs."""
    names = ("bos_token_id", "eos_token_id", "pad_token_id")
    if tokenizer is None:  # explicit nulls: transformers would fill in the family's defaults
        return dict.fromkeys(names)
    end, pad = tokenizer.end_id, tokenizer.pad_id
    begin = next((i for s in _BEGINNINGS if (i := tokenizer.token_to_id(s)) is not None), end)
    begin = tokenizer.begin_ids[-1] if tokenizer.begin_ids else begin
    ids: dict[str, int | None] = dict(zip(names, (begin, end, pad), strict=True))
    return ids | ({"decoder_start_token_id": pad} if kind == "encoder-decoder" else {})


def dumps(settings: Mapping[str, Any]) -> str:
    """JSON in the form of Hugging Face directories."""
    return json.dumps(settings, indent=2, sort_keys=True) + "\n"


def _tokenizer_config(
    tokenizer: TextTokenizer, tokens: Mapping[str, int | None], context: int
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


def _write_tensors(
    folder: Path, tensors: Mapping[str, torch.Tensor], shard: int, single: str
) -> None:
    shards: list[dict[str, torch.Tensor]] = [{}]
    room = shard
    for name, tensor in tensors.items():
        if tensor.nbytes > room and shards[-1]:
            shards.append({})
            room = shard
        shards[-1][name] = tensor
        room -= tensor.nbytes
    if len(shards) == 1:
        with system_errors(folder / single):
            save_file(shards[0], folder / single, metadata={"format": "pt"})
        return
    where: dict[str, str] = {}
    for number, part in enumerate(shards, 1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        with system_errors(folder / file):
            save_file(part, folder / file, metadata={"format": "pt"})
        where |= dict.fromkeys(part, file)
    total = sum(tensor.nbytes for tensor in tensors.values())
    (folder / INDEX).write_text(
        dumps({"metadata": {"total_size": total}, "weight_map": where}), encoding="utf-8"
    )


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
    adapter: str | Path | None = None,
    change: Callable[[Transformer], Transformer] | None = None,
    overwrite: bool = False,
) -> Converted:
    """Write a run or a Hugging Face directory as the Hugging Face directory ``target``.

    ``which`` selects the ``best`` or the ``newest`` checkpoint of a run; ``adapter`` is a directory
    of PEFT that is merged into the weights; ``change`` gives the model that is written instead of
    the one that was read, such as a steered one.
    """
    source, target = Path(source), Path(target)
    reads = [source, adapter, *bases(source)]  # checked before the work
    require_free(target, overwrite=overwrite, reads=reads)
    as_it_is = adapter is None and change is None
    if as_it_is and not is_run(source) and has_file(source, CONFIG):
        return _recast(source, target, dtype, overwrite=overwrite)
    wide = None if dtype is None else torch.promote_types(dtype, torch.float32)
    model, tokenizer, _ = load(source, which=which, adapter=adapter, dtype=wide)
    model = model if change is None else change(model)
    family = save(model, tokenizer, target, dtype=dtype, overwrite=overwrite)
    _, weights = export_state(model)
    kind = dtype or next(iter(weights.values())).dtype
    count = sum(weight.numel() for weight in weights.values())
    return Converted(family.name, count, kind)


def convert_to_peft(
    source: str | Path, target: str | Path, *, which: str = "best", overwrite: bool = False
) -> int:
    """Write the adapters of a run as the PEFT directory ``target``; returns how many numbers."""
    source, target = Path(source), Path(target)
    require_free(target, overwrite=overwrite, reads=[source, *bases(source)])
    model = load_adapted(source, which=which)
    base = read_base(source)
    assert base is not None
    files, tensors = adapter_files(model, base=str(base.path))
    write_directory(target, files, tensors, overwrite=overwrite, weights=ADAPTER_WEIGHTS)
    return sum(tensor.numel() for tensor in tensors.values())


def _recast(source: Path, target: Path, dtype: torch.dtype | None, *, overwrite: bool) -> Converted:
    directory = open_directory(source)
    family = family_of(directory.model_type, directory.tensors, source / CONFIG, directory.config)
    config = family.read(directory.config, directory.tensors, source / CONFIG)
    weights = read_weights(directory, family, config)
    tensors = write_weights(weights, family, config, dtype)
    kind = next(iter(tensors.values())).dtype
    own = own_settings(directory, family)
    settings = {k: v for k, v in own.items() if k not in ("torch_dtype", "auto_map")}
    files = {CONFIG: dumps({**settings, "dtype": str(kind).removeprefix("torch.")}).encode()}
    copied = read_files(source, COPIED)
    _name_dropped(directory, copied)
    write_directory(target, files | copied, tensors, overwrite=overwrite)
    return Converted(family.name, sum(t.numel() for t in tensors.values()), kind)


def write_copy(source: CheckpointDirectory, target: Path, settings: Mapping[str, Any]) -> None:
    """A checked directory again, with ``settings`` added to its config.json.

    Tensors are copied by name, in their own dtype; of the other files, those of the tokenizer and
    generation_config.json.
    """
    config = {k: v for k, v in source.config.items() if k != "auto_map"}
    files = {CONFIG: dumps({**config, **settings}).encode()}
    copied = read_files(source.path, COPIED)
    _name_dropped(source, copied)
    with open_tensors(source) as tensors:
        weights = {name: tensors[name] for name in source.tensors}
        write_directory(target, files | copied, weights, overwrite=False)


def _name_dropped(source: CheckpointDirectory, copied: Collection[str]) -> None:
    """Warn of what a copy of a directory leaves out, such as the pooling of sentence-transformers.

    Pages for readers, hidden files and other forms of the weights are not named.
    """
    kept = {CONFIG, MANIFEST, INDEX, *copied}
    left = sorted(
        file.name
        for file in source.path.iterdir()
        if file.name not in kept
        and not file.name.startswith(".")
        and (file.is_dir() or file.suffix.lower() not in _NOT_NAMED)
    )
    if left:
        more = f" and {len(left) - 8} more" if len(left) > 8 else ""
        warnings.warn(
            f"{source.path}: {', '.join(printable(name, 60) for name in left[:8])}{more} "
            f"{'is' if len(left) == 1 else 'are'} not copied; copy what is needed by hand.",
            Notice,
            stacklevel=4,
        )
