"""A directory to a model: checked first, then allocated, then filled.

A checkpoint folder is sealed by a manifest (fenchel/files.py) and holds

    config.json         the ModelConfig
    model.safetensors   its weights, one tensor a parameter, by the names of the Transformer

A run directory holds such folders under checkpoints/step-NNNNNN and tokenizer.json beside
them. Weights must match the settings exactly: names and shapes are compared with what the
settings imply before a byte of weights is read.
"""

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

CONFIG, WEIGHTS, STATE = "config.json", "model.safetensors", "state.json"


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
    with torch.device("meta"):
        model = Transformer(config)
    model.load_state_dict(weights, strict=True, assign=True)
    return Loaded(model.eval(), load_tokenizer(run / "tokenizer.json"), config)


def checkpoint(run: Path, which: str = "newest") -> Path:
    """The newest intact checkpoint of a run, or the one it names as best."""
    for folder in sorted((run / "checkpoints").glob("step-*"), reverse=True):
        try:
            verify(folder)
        except Damaged:
            continue
        best = read_json(folder / STATE).get("best_step")
        chosen = run / "checkpoints" / f"step-{best:06d}" if isinstance(best, int) else folder
        if which == "best" and chosen != folder and chosen.is_dir():
            verify(chosen)
            return chosen
        return folder
    raise ValueError(f"{run} holds no intact checkpoint.")


def read_weights(folder: Path) -> tuple[ModelConfig, dict[str, torch.Tensor]]:
    """Settings and weights of a checkpoint folder, once they are known to belong together."""
    config = from_mapping(ModelConfig, read_json(folder / CONFIG))
    require_match(folder / WEIGHTS, config)
    weights = load_file(folder / WEIGHTS)
    for name, tensor in weights.items():
        if bad := int((~tensor.isfinite()).sum()):
            raise ValueError(f"{folder / WEIGHTS}: {name} holds {bad} values that are not finite.")
    return config, weights


def require_match(path: Path, config: ModelConfig) -> None:
    """Refuse weights whose names or shapes are not those the settings imply."""
    try:
        with safe_open(path, framework="pt") as file:
            there = {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise Damaged(f"{path} is not a safetensors file ({error}).") from None
    if config.layers > len(there):  # before as many modules are built
        raise ValueError(f"{path} holds {len(there)} tensors, too few for {config.layers} layers.")
    with torch.device("meta"):  # shapes only: a hostile config allocates nothing
        expected = {k: list(v.shape) for k, v in Transformer(config).state_dict().items()}
    for name in sorted(expected.keys() | there.keys()):
        if name not in there:
            raise ValueError(f"{path} lacks {name}, which its settings ask for.")
        if name not in expected:
            raise ValueError(f"{path} holds {name}, which its settings have no place for.")
        if there[name] != expected[name]:
            raise ValueError(
                f"{path}: {name} has shape {there[name]}, its settings ask for {expected[name]}."
            )
