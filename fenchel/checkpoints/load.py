"""A directory to a model: checked first, then allocated, then filled.

Two kinds of directory are read, both hostile until checked. A run directory holds checkpoint
folders under checkpoints/step-NNNNNN, each sealed by a manifest (fenchel/files.py), with

    config.json         the ModelConfig
    model.safetensors   its weights, one tensor a parameter, by the names of the Transformer

A Hugging Face directory (fenchel/checkpoints/directory.py) holds the settings and weights of a
family
(fenchel/model/families). Beside either stands tokenizer.json. Weights must match the settings
exactly: names and shapes are compared with what the settings imply before a byte of weights is
read, and what is read stays on the file's own pages.
"""

import warnings
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from tokenizers import Tokenizer

from fenchel.checkpoints.directory import (
    TOKENIZER,
    WEIGHTS,
    bounded_json_file,
    has_file,
    open_directory,
)
from fenchel.checkpoints.safetensors_header import read_header
from fenchel.checkpoints.weights import DTYPES, meta_state_dict, read_weights
from fenchel.config import from_mapping
from fenchel.data import load_tokenizer
from fenchel.files import Damaged, Notice, printable, read_json, verify
from fenchel.model.config import ModelConfig
from fenchel.model.families import family_of
from fenchel.model.families.config_reader import CONFIG
from fenchel.model.transformer import Transformer, meta_model

CHECKPOINTS = "checkpoints"
STATE = "state.json"


class Loaded(NamedTuple):
    """What a directory held."""

    model: Transformer
    tokenizer: Tokenizer
    config: ModelConfig


def load(path: str | Path, *, which: str = "best", dtype: torch.dtype | None = None) -> Loaded:
    """The model and tokenizer of a run directory or a Hugging Face directory.

    Of a run, its ``best`` checkpoint or its ``newest``; a Hugging Face directory has but one.
    Weights keep the dtype they were saved in unless another is given.
    """
    path = Path(path)
    model = load_model(path, which=which, dtype=dtype)
    if not has_file(path, TOKENIZER):
        raise ValueError(
            f"{path} has no {TOKENIZER}; fenchel.model.load_model reads its weights alone."
        )
    tokenizer = load_tokenizer(bounded_json_file(path, TOKENIZER))
    if (size := tokenizer.get_vocab_size()) > model.config.vocabulary:
        raise ValueError(
            f"{path / TOKENIZER} has {size} ids and the model knows {model.config.vocabulary}; "
            "it is not the tokenizer this model was trained with."
        )
    return Loaded(model, tokenizer, model.config)


def load_model(
    path: str | Path, *, which: str = "best", dtype: torch.dtype | None = None
) -> Transformer:
    """``load`` without the tokenizer."""
    path = Path(path)
    if not path.is_dir():
        raise ValueError(f"there is no run directory or checkpoint {path}.")
    if which not in ("best", "newest"):
        raise ValueError(f'which={which!r} should be "best" or "newest".')
    if not is_run(path) and not has_file(path, CONFIG):
        raise ValueError(
            f"{path} holds neither the {CHECKPOINTS} of a run nor the {CONFIG} of a model."
        )
    if is_run(path):
        config, weights = read_checkpoint(checkpoint(path, which))
    else:
        directory = open_directory(path)
        family = family_of(directory.config["model_type"], directory.tensors, path / CONFIG)
        config = family.read(directory.config, directory.tensors, path / CONFIG)
        weights = read_weights(directory, family, config, dtype)
    model = meta_model(config)
    model.load_state_dict(weights, strict=True, assign=True)
    return model.to(dtype=dtype).eval()


def is_run(path: Path) -> bool:
    """Whether a directory is that of a run; if not, it may be a Hugging Face one."""
    return (path / CHECKPOINTS).is_dir()


def checkpoint(run: Path, which: str = "newest") -> Path:
    """The newest intact checkpoint of a run, or the one that it names as best.

    One that is damaged is passed over with a warning.
    """
    found = _intact(run)
    if found is None:
        raise ValueError(f"{run} holds no intact checkpoint.")
    best = read_json(found / STATE).get("best_step")
    if which == "newest" or not isinstance(best, int):
        return found
    named = run / CHECKPOINTS / f"step-{best:06d}"
    return named if named == found or (named.is_dir() and _is_intact(named)) else found


def _intact(run: Path) -> Path | None:
    numbers = {
        int(folder.name[5:]): folder
        for folder in (run / CHECKPOINTS).glob("step-*")
        if folder.name[5:].isdecimal()  # not what a writer that died left behind
    }
    newest_first = (numbers[number] for number in sorted(numbers, reverse=True))
    return next((folder for folder in newest_first if _is_intact(folder)), None)


def _is_intact(folder: Path) -> bool:
    try:
        verify(folder)
    except Damaged as error:
        warnings.warn(f"{folder.name} is passed over: {error}", Notice, stacklevel=5)
        return False
    return True


def read_checkpoint(folder: Path) -> tuple[ModelConfig, dict[str, torch.Tensor]]:
    """Settings and weights of a checkpoint folder, once they are known to belong together."""
    config = from_mapping(ModelConfig, read_json(folder / CONFIG))
    require_match(folder / WEIGHTS, config)
    try:
        weights = load_file(folder / WEIGHTS)
    except SafetensorError as error:
        raise Damaged(f"{folder / WEIGHTS} cannot be read ({error}).") from None
    for name, tensor in weights.items():
        if bad := int((~tensor.isfinite()).sum()):
            raise ValueError(f"{folder / WEIGHTS}: {name} holds {bad} values that are not finite.")
    return config, weights


def require_match(path: Path, config: ModelConfig) -> None:
    """Refuse weights whose names, shapes or kinds are not those the settings imply."""
    there = read_header(path)
    kinds = {entry.dtype for entry in there.values()}
    # Before as many modules are built: a block has six tensors at the least.
    if 6 * (config.distinct_layers or config.layers) > len(there):
        raise ValueError(f"{path} holds {len(there)} tensors, too few for {config.layers} layers.")
    expected = {name: tuple(tensor.shape) for name, tensor in meta_state_dict(config).items()}
    for name in sorted(expected.keys() | there.keys()):
        if name not in there:
            raise ValueError(f"{path} lacks {name}, which its settings ask for.")
        if name not in expected:
            raise ValueError(
                f"{path} holds {printable(name)}, which its settings have no place for."
            )
        if there[name].shape != expected[name]:
            raise ValueError(
                f"{path}: {name} has shape {list(there[name].shape)}, "
                f"its settings ask for {list(expected[name])}."
            )
    if len(kinds) != 1 or not kinds <= DTYPES.keys():
        raise ValueError(
            f"{path} holds tensors of {', '.join(sorted(kinds))}; "
            f"they should all be of one of {', '.join(DTYPES)}."
        )
