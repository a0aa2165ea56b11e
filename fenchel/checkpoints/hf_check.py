"""A Hugging Face directory, looked at before anybody builds a model from it.

The directory is data: nothing in it is run. What is refused here is refused whoever would read it
(``fenchel.inspection.loader``): code of its own, weights that are damaged or not finite, a folder
without a tokenizer, sizes that are none, more layers than there are weights for. Cheap questions
come first.

The weights of a Hugging Face directory, looked over before anything is built from them.

Only safetensors are read: a pickle runs code. Every file is a plain name inside the directory,
its header says what is in it, and every number in it is finite. Nothing of the model's size is in
memory while this is done: one tensor at a time.
"""

from pathlib import Path
from typing import Any, NamedTuple

from safetensors import SafetensorError, safe_open
from tokenizers import Tokenizer

from fenchel.checkpoints.directory import (
    INDEX,
    TOKENIZER,
    bounded_json_file,
    has_file,
    read_bounded_json,
    regular_file,
)
from fenchel.checkpoints.directory import WEIGHTS as WHOLE
from fenchel.checkpoints.weights import is_finite
from fenchel.data import load_tokenizer
from fenchel.files import Damaged, printable
from fenchel.model.config import LARGEST
from fenchel.model.families.config_reader import CONFIG

_DEPTHS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers")
_SIZES = ("vocab_size", "hidden_size", "n_embd", "num_attention_heads", "n_head")


class Weights(NamedTuple):
    """What the files hold."""

    shapes: dict[str, tuple[int, ...]]
    kind: str
    """What most of the numbers are, such as "bfloat16"."""


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
    if not has_file(folder, CONFIG):
        return None
    config = read_bounded_json(folder, CONFIG)
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
    if not has_file(folder, TOKENIZER):
        raise ValueError(
            f"{folder} holds no tokenizer.json; save the model's fast tokenizer there."
        )
    tokenizer = load_tokenizer(bounded_json_file(folder, TOKENIZER))
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
                f"{folder / CONFIG}: {key}={printable(repr(size), 40)} should be a whole "
                f"number, 1 to {LARGEST}."
            )


def _require_depth(config: dict[str, Any], weights: Weights, folder: Path) -> None:
    """Refuse a config of more layers than there are tensors, before as many are built."""
    for key in _DEPTHS:
        depth = config.get(key, 1)
        if type(depth) is not int or not 0 < depth <= 4 * len(weights.shapes):
            raise ValueError(
                f"{folder / CONFIG} asks for {key}={printable(depth, 40)} and the weights hold "
                f"{len(weights.shapes)} tensors."
            )


_KINDS = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_PIECE = 1 << 24


def look_over(folder: Path) -> Weights:
    """Names, shapes and kinds of all tensors, once every one of them is known to be finite."""
    shapes: dict[str, tuple[int, ...]] = {}
    sizes: dict[str, int] = {}
    for file in _files(folder):
        try:
            with safe_open(file, framework="pt") as tensors:
                for name in tensors.keys():  # noqa: SIM118
                    part = tensors.get_slice(name)
                    shapes[name] = tuple(part.get_shape())
                    kind = str(part.get_dtype())
                    sizes[kind] = sizes.get(kind, 0) + max(1, _count(shapes[name]))
                    if kind in _KINDS:
                        _require_finite(part, shapes[name], f"{file.name}: {name[:80]}")
                    elif kind.startswith("F"):
                        raise ValueError(
                            f"{file.name}: {name[:80]} is of {kind}, and quantised weights cannot "
                            "be inspected; give the model in bfloat16 or float32."
                        )
        except (SafetensorError, OSError) as error:
            raise Damaged(f"{file} is not a whole safetensors file ({error}).") from None
    known = {kind: size for kind, size in sizes.items() if kind in _KINDS}
    if not known:
        raise ValueError(f"{folder} holds no tensor of floating point numbers.")
    return Weights(shapes, _KINDS[max(known, key=lambda kind: known[kind])])


def _files(folder: Path) -> list[Path]:
    if has_file(folder, WHOLE):
        return [regular_file(folder, WHOLE)]  # an index beside it is not read by anybody
    if has_file(folder, INDEX):
        table = read_bounded_json(folder, INDEX).get("weight_map")
        names = sorted({str(n) for n in table.values()}) if isinstance(table, dict) else []
        if not names:
            raise Damaged(f"{folder / INDEX} does not list files of its own folder.")
        return [regular_file(folder, name) for name in names]
    if any(folder.glob("*.bin")) or any(folder.glob("*.pt")):
        raise ValueError(
            f"{folder} holds its weights as a pickle, which runs code when it is read; save the "
            "model with safetensors first."
        )
    raise ValueError(f"{folder} holds no {WHOLE}; give the folder of a checkpoint.")


def _require_finite(part: Any, shape: tuple[int, ...], name: str) -> None:
    rows = max(1, _PIECE // max(1, _count(shape[1:])))
    pieces = [part[()]] if not shape else [part[i : i + rows] for i in range(0, shape[0], rows)]
    bad = sum(0 if is_finite(piece) else int((~piece.isfinite()).sum()) for piece in pieces)
    if bad:
        raise ValueError(f"{name} holds {bad} values that are not finite.")


def _count(shape: tuple[int, ...]) -> int:
    total = 1
    for size in shape:
        total *= size
    return total
