"""A directory to a model: checked first, then allocated, then filled.

A checkpoint folder is sealed by a manifest (fenchel/files.py) and holds

    config.json         the ModelConfig
    model.safetensors   its weights, one tensor a parameter, by the names of the Transformer

A run directory holds such folders under checkpoints/step-NNNNNN and tokenizer.json beside
them. Weights must match the settings exactly: names and shapes are compared with what the
settings imply before a byte of weights is read.
"""

import warnings
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from tokenizers import Tokenizer

from fenchel.config import from_mapping
from fenchel.data import load_tokenizer
from fenchel.files import Damaged, read_json, verify
from fenchel.model.config import ModelConfig
from fenchel.model.transformer import Transformer

CHECKPOINTS = "checkpoints"
CONFIG, WEIGHTS, STATE = "config.json", "model.safetensors", "state.json"
KINDS = {"F64", "F32", "F16", "BF16"}
"""What numbers a model's weights may be, as safetensors calls them."""


class Loaded(NamedTuple):
    """What a directory held."""

    model: Transformer
    tokenizer: Tokenizer
    config: ModelConfig


def load(path: str | Path, *, which: str = "best") -> Loaded:
    """The model and tokenizer of a run directory: its ``best`` checkpoint or its ``newest``."""
    run = Path(path)
    if not run.is_dir():
        raise ValueError(f"there is no run directory {run}.")
    folder = checkpoint(run, which)
    config, weights = read_weights(folder)
    tokenizer = load_tokenizer(run / "tokenizer.json")
    if (size := tokenizer.get_vocab_size()) > config.vocabulary:
        raise ValueError(
            f"{run / 'tokenizer.json'} has {size} ids and the model knows {config.vocabulary}; "
            "it is not the tokenizer this model was trained with."
        )
    with torch.device("meta"):
        model = Transformer(config)
    model.load_state_dict(weights, strict=True, assign=True)
    return Loaded(model.eval(), tokenizer, config)


def checkpoint(run: Path, which: str = "newest") -> Path:
    """The newest intact checkpoint of a run, or the one that it names as best.

    One that is damaged is passed over with a warning.
    """
    if which not in ("best", "newest"):
        raise ValueError(f'which={which!r} should be "best" or "newest".')
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
        warnings.warn(f"{folder.name} is passed over: {error}", stacklevel=4)
        return False
    return True


def read_weights(folder: Path) -> tuple[ModelConfig, dict[str, torch.Tensor]]:
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
    try:
        with safe_open(path, framework="pt") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
            there = {name: list(one.get_shape()) for name, one in slices.items()}
            kinds = {one.get_dtype() for one in slices.values()}
    except (SafetensorError, OSError) as error:
        raise Damaged(f"{path} is not a safetensors file ({error}).") from None
    # Before as many modules are built: a block has six tensors at the least.
    if 6 * config.layers > len(there):
        raise ValueError(f"{path} holds {len(there)} tensors, too few for {config.layers} layers.")
    with torch.device("meta"):  # shapes only: a hostile config allocates nothing
        expected = {k: list(v.shape) for k, v in Transformer(config).state_dict().items()}
    for name in sorted(expected.keys() | there.keys()):
        if name not in there:
            raise ValueError(f"{path} lacks {name}, which its settings ask for.")
        if name not in expected:
            raise ValueError(f"{path} holds {name[:80]!r}, which its settings have no place for.")
        if there[name] != expected[name]:
            raise ValueError(
                f"{path}: {name} has shape {there[name]}, its settings ask for {expected[name]}."
            )
    if len(kinds) != 1 or not kinds <= KINDS:
        raise ValueError(
            f"{path} holds tensors of {', '.join(sorted(kinds))}; "
            f"they should all be of one of {', '.join(sorted(KINDS))}."
        )
