"""A checkpoint directory to a model: checked first, then allocated, then filled.

Two kinds of directory are read, both by the guarded reader (``directory``):

    a run directory             its checkpoints/step-NNNNNN, see ``run_checkpoint``
    a Hugging Face directory    settings and weights of a family (``fenchel.model.families``)

A run that trains adapters (``tuned_run``) is its checkpoint with these merged.
Either has a tokenizer.json. Weights must match the settings exactly: names and shapes are
compared with what the settings imply before a byte of weights is read, and what is read stays on
the file's own pages.
"""

import json
import warnings
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple

import torch

from fenchel.checkpoints.directory import CheckpointDirectory, has_file, open_directory
from fenchel.checkpoints.peft_adapter import ADAPTER_CONFIG, merge_adapter
from fenchel.checkpoints.run_checkpoint import is_run, model_files, read_checkpoint
from fenchel.checkpoints.tokenizer import JSON_FILES, TEXT_FILES, read_files, read_tokenizer
from fenchel.checkpoints.tuned_run import TunedCheckpoint, read_base
from fenchel.checkpoints.weights import (
    meta_state_dict,
    own_settings,
    read_state_dict,
    read_weights,
    require_enough_tensors,
)
from fenchel.config import from_mapping, parse_toml
from fenchel.data import TextTokenizer
from fenchel.files import CHECKPOINTS, Notice, printable, read_regular
from fenchel.hub_cache import find_checkpoint, require_checkpoint
from fenchel.model.config import ModelConfig
from fenchel.model.families import family_of
from fenchel.model.families.config_reader import CONFIG
from fenchel.model.lora import AdapterWeights, adapters, add_lora, merge
from fenchel.model.transformer import Transformer, meta_model

_TENSORS_PER_LAYER = 4  # the fewest that a block of a Transformer has: qkv, out, up, down
_BESIDE = (CONFIG, *JSON_FILES, *TEXT_FILES)


class Loaded(NamedTuple):
    """The contents of a checkpoint directory."""

    model: Transformer
    tokenizer: TextTokenizer
    config: ModelConfig


def load(
    path: str | Path,
    *,
    which: str = "best",
    dtype: torch.dtype | None = None,
    adapter: str | Path | None = None,
) -> Loaded:
    """The model and tokenizer of a run directory or a Hugging Face directory.

    "ORGANISATION/NAME" or "ORGANISATION/NAME@REVISION" is looked up in the Hugging Face cache.
    Of a run, its ``best`` checkpoint or its ``newest``; a Hugging Face directory has only one.
    Weights keep the dtype they were saved in unless another is given. ``adapter`` is a directory of
    PEFT whose LoRA adapters are merged into the weights.
    """
    path = find_checkpoint(path)
    model = load_model(path, which=which, dtype=dtype, adapter=adapter)
    tokenizer = read_tokenizer(path, model.config.vocabulary)
    return Loaded(model, tokenizer, model.config)


def load_model(
    path: str | Path,
    *,
    which: str = "best",
    dtype: torch.dtype | None = None,
    adapter: str | Path | None = None,
) -> Transformer:
    """``load`` without the tokenizer."""
    path = find_checkpoint(path)
    if adapter is None:
        return _load(path, which, dtype, ())
    model = _load(path, which, _wide(dtype), ())
    merge_adapter(model, find_checkpoint(adapter))
    return model.to(dtype=dtype)


def load_adapted(run: str | Path, *, which: str = "best") -> Transformer:
    """The model of a run that trains adapters, with the adapters not merged into its weights."""
    run = Path(run)
    base = read_base(run) if is_run(run) else None
    if base is None or base.lora is None:
        raise ValueError(f"{run} is not a run that trains adapters (fenchel tune --lora).")
    return _load_adapted(run, base, which, ())


def _load_adapted(
    run: Path, base: TunedCheckpoint, which: str, above: tuple[Path, ...]
) -> Transformer:
    """``load_adapted`` of a run that the runs ``above`` tune."""
    assert base.lora is not None
    if run.resolve() in above:
        raise ValueError(f"{run} tunes itself, by way of {base.path}.")
    model = _load(base.path, "best", None, (*above, run.resolve()))
    base.require_same(model)
    add_lora(model, **asdict(base.lora))
    expected = adapters(model)
    tensors = read_checkpoint(run, which, lambda found: read_state_dict(found, expected))
    AdapterWeights(model).load_state_dict(tensors)
    return model.eval()


def _load(
    path: Path, which: str, dtype: torch.dtype | None, above: tuple[Path, ...]
) -> Transformer:
    require_checkpoint(path)
    if which not in ("best", "newest"):
        raise ValueError(f'which={which!r} should be "best" or "newest".')
    files: dict[str, bytes] = {}
    if is_run(path):
        base = read_base(path)
        if base is not None and base.lora is not None:
            model = _load_adapted(path, base, which, above)
            merge(model.to(dtype=_wide(dtype)))
            model.source_files = read_files(model_files(path), _BESIDE)
            return model.to(dtype=dtype)
        config, weights = read_checkpoint(path, which, lambda found: _read_run(found, dtype))
        _warn_of_loss(path / "config.toml")
        if base is not None:
            files = read_files(model_files(path), _BESIDE)
    elif has_file(path, CONFIG):
        directory = open_directory(path)
        where = directory.config_path
        family = family_of(directory.model_type, directory.tensors, where, directory.config)
        config = family.read(directory.config, directory.tensors, where)
        weights = read_weights(directory, family, config, dtype)
        files = read_files(path, _BESIDE)
        if family.inner:  # the text model is one of its own from here on
            files[CONFIG] = json.dumps(own_settings(directory, family)).encode()
    elif has_file(path, ADAPTER_CONFIG):
        raise ValueError(
            f"{path} is an adapter and no model; give the model that it was trained for and "
            f"--adapter {path}, or merge the two by fenchel convert MODEL OUT --adapter {path}."
        )
    else:
        raise ValueError(
            f"{path} holds neither the {CHECKPOINTS} of a run nor the {CONFIG} of a model."
        )
    model = build(config, weights).to(dtype=dtype)
    model.source_files = files
    return model


def _wide(dtype: torch.dtype | None) -> torch.dtype | None:
    """The dtype in which adapters are merged into weights that become ``dtype``."""
    return None if dtype is None else torch.promote_types(dtype, torch.float32)


def build(config: ModelConfig, weights: dict[str, torch.Tensor]) -> Transformer:
    """A Transformer of these settings whose parameters are these tensors, not copies."""
    model = meta_model(config)
    model.load_state_dict(weights, strict=True, assign=True)
    return model.eval()


def _read_run(
    directory: CheckpointDirectory, dtype: torch.dtype | None
) -> tuple[ModelConfig, dict[str, torch.Tensor]]:
    config = from_mapping(ModelConfig, directory.config)
    require_enough_tensors(directory, config, per_layer=_TENSORS_PER_LAYER)
    return config, read_state_dict(directory, meta_state_dict(config), dtype)


def _warn_of_loss(settings: Path) -> None:
    """Warn of a run that was trained by a loss whose predictions are not a softmax."""
    try:
        train = parse_toml(read_regular(settings, 2**20)).get("train", {})
    except (OSError, ValueError):  # the weights can be used without it
        return
    loss = train.get("loss", "cross_entropy") if isinstance(train, dict) else "cross_entropy"
    if loss != "cross_entropy":
        warnings.warn(
            f"{settings.parent} was trained by train.loss={printable(loss)}: its logits are not "
            "those of a softmax, so sampling from one fits them badly; --temperature 0 does.",
            Notice,
            stacklevel=4,
        )
