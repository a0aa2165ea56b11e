"""The weights of a Hugging Face directory, looked over before anything is built from them.

Only safetensors are read: a pickle runs code. Every file is a plain name inside the directory,
its header says what is in it, and every number in it is finite. Nothing of the model's size is in
memory while this is done: one tensor at a time.
"""

from pathlib import Path
from typing import Any, NamedTuple

from safetensors import SafetensorError, safe_open

from fenchel.files import Damaged
from fenchel.model.directory import INDEX, holds, plain_file, read_plain_json
from fenchel.model.directory import WEIGHTS as WHOLE
from fenchel.model.weights import is_finite

_KINDS = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_PIECE = 1 << 24


class Weights(NamedTuple):
    """What the files hold."""

    shapes: dict[str, tuple[int, ...]]
    kind: str
    """What most of the numbers are, such as "bfloat16"."""


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
    if holds(folder, WHOLE):
        return [plain_file(folder, WHOLE)]  # an index beside it is not read by anybody
    if holds(folder, INDEX):
        table = read_plain_json(folder, INDEX).get("weight_map")
        names = sorted({str(n) for n in table.values()}) if isinstance(table, dict) else []
        if not names:
            raise Damaged(f"{folder / INDEX} does not list files of its own folder.")
        return [plain_file(folder, name) for name in names]
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
