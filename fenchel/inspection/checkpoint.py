"""A Hugging Face directory, looked at before anybody builds a model from it.

The directory is data: nothing in it is run. What is refused here is refused whoever would read it
(``fenchel.inspection.opening``): code of its own, weights that are damaged or not finite, a folder
without a tokenizer, sizes that are none, more layers than there are weights for. Cheap questions
come first.
"""

from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import Tokenizer

from fenchel.data import load_tokenizer
from fenchel.inspection.weights import Weights, look_over
from fenchel.model.config import LARGEST
from fenchel.model.directory import CONFIG, TOKENIZER, holds, modest_file, read_plain_json
from fenchel.model.header import shown

_DEPTHS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers")
_SIZES = ("vocab_size", "hidden_size", "n_embd", "num_attention_heads", "n_head")


class Checkpoint(NamedTuple):
    """What a directory says and holds."""

    folder: Path
    config: dict[str, Any]
    """config.json."""
    family: str
    """Its model_type."""
    weights: Weights
    tokenizer: Tokenizer

    @property
    def name(self) -> str:
        """The folder's name."""
        return self.folder.resolve().name

    @property
    def architecture(self) -> str | None:
        """The class it was saved from, such as "GPT2LMHeadModel"; None where it does not say."""
        named = self.config.get("architectures")
        first = named[0] if isinstance(named, list) and named else None
        return first if isinstance(first, str) else None


def look_at(folder: Path) -> Checkpoint | None:
    """The directory, once it was looked over; None where there is no config.json."""
    if not holds(folder, CONFIG):
        return None
    config = read_plain_json(folder, CONFIG)
    family = config.get("model_type")
    if "auto_map" in config:
        raise ValueError(f"{folder} brings code of its own (auto_map), which is not run.")
    if not isinstance(family, str) or not family:
        raise ValueError(f"{folder / CONFIG} does not say its model_type.")
    if config.get("is_encoder_decoder"):
        raise ValueError(
            f"{family!r} is an encoder and a decoder; only one or the other can be inspected."
        )
    _require_sizes(config, folder)
    if not holds(folder, TOKENIZER):
        raise ValueError(
            f"{folder} holds no tokenizer.json; save the model's fast tokenizer there."
        )
    tokenizer = load_tokenizer(modest_file(folder, TOKENIZER))
    weights = look_over(folder)
    _require_depth(config, weights, folder)
    return Checkpoint(folder, config, family, weights, tokenizer)


def _require_sizes(config: dict[str, Any], folder: Path) -> None:
    """Refuse a size that no model has; some families give a list, one for each layer."""
    for key in _SIZES:
        size = config.get(key)
        if size is None or isinstance(size, list):
            continue
        if type(size) is not int or not 0 < size <= LARGEST:
            raise ValueError(
                f"{folder / CONFIG}: {key}={shown(repr(size), 40)} should be a whole "
                f"number, 1 to {LARGEST}."
            )


def _require_depth(config: dict[str, Any], weights: Weights, folder: Path) -> None:
    """Refuse a config of more layers than there are tensors, before as many are built."""
    for key in _DEPTHS:
        depth = config.get(key, 1)
        if type(depth) is not int or not 0 < depth <= 4 * len(weights.shapes):
            raise ValueError(
                f"{folder / CONFIG} asks for {key}={shown(depth, 40)} and the weights hold "
                f"{len(weights.shapes)} tensors."
            )
