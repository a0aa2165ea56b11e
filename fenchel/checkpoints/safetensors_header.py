"""The header of a safetensors file, verified before anything relies on it.

A file is  n (8 bytes, little endian) | a JSON object of n bytes | data,  and the object has for
each tensor

    "name": {"dtype": "F32", "shape": [3, 4], "data_offsets": [begin, end]}

The checks are stricter than those of the safetensors library: no name twice, no unprintable name,
no field besides those three, at most 8 axes, and tensors that fill the data from its first byte to
its last without gap or overlap. Sizes are compared as integers, so that a false size costs no
memory; parsing the largest header that is accepted takes about 0.1 GB. A file that is mostly holes
is refused: it claims terabytes at no cost to its author, and reading them takes hours.
"""

import json
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import SafetensorError

from fenchel.files import Damaged, no_duplicates, printable

MAX_BYTES = 8 * 2**20
"""The most bytes of a header; the largest in use have a tenth of it."""
MAX_TENSORS = 100_000
"""The most tensors in one file."""
BITS = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0"), 8),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 16),
    **dict.fromkeys(("U32", "I32", "F32"), 32),
    **dict.fromkeys(("U64", "I64", "F64"), 64),
}
"""Bits per number, by the name that safetensors gives the dtype."""
_ERRNO = re.compile(r"\(os error (\d+)\)|in read-only mode: [^()]*\((\d+)\)")
_DENSE = 2**26  # bytes up to which a file may be a hole: to read them takes no time
_AXES = 8
_SEPARATORS = 16 * MAX_TENSORS
_NAME = 512


@contextmanager
def system_errors(path: Path) -> Iterator[None]:
    """Context manager: system errors that safetensors or torch give only as text become OSError.

    Any other complaint of safetensors means that the file is not one of its files: Damaged.
    """
    try:
        yield
    except FileNotFoundError:
        path.open("rb").close()  # safetensors gives this name to every failure to open a file
        raise
    except (SafetensorError, RuntimeError) as error:
        if (match := _ERRNO.search(str(error))) is not None:
            number = int(match[1] or match[2])
            raise OSError(number, os.strerror(number), str(path)) from error
        if isinstance(error, SafetensorError):
            raise Damaged(f"{path} is not a safetensors file ({printable(error)}).") from None
        raise


class TensorEntry(NamedTuple):
    """The header's entry for one tensor."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int

    @property
    def bytes(self) -> int:
        """Size of the tensor in the file."""
        return self.end - self.begin


def read_header(path: Path) -> dict[str, TensorEntry]:
    """Every tensor of a file by name, in the order of the data."""
    status = path.stat()
    size, stored = status.st_size, 512 * status.st_blocks
    if stored and size > max(_DENSE, 16 * stored):  # some network disks count no blocks
        raise Damaged(
            f"{path} has {size} bytes, of which the disk holds {stored}; a file of holes is not "
            "read."
        )
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 10 or not 2 <= length <= min(MAX_BYTES, size - 8):
            raise Damaged(
                f"{path} is not a safetensors file: of its {size} bytes it claims "
                f"{length} for a header, and 2 to {MAX_BYTES} can be."
            )
        text = file.read(length)
    entries = _entries(text, path)
    _require_filled(entries, size - 8 - length, path)
    return entries


def _entries(text: bytes, path: Path) -> dict[str, TensorEntry]:
    if not text.startswith(b"{"):
        raise Damaged(f"{path} is not a safetensors file: its header does not begin with {{.")
    if sum(text.count(sign) for sign in b",:[{") > _SEPARATORS:  # nested lists take memory
        raise Damaged(f"{path} has a header of more values than {MAX_TENSORS} tensors need.")
    try:
        header = json.loads(text.decode("utf-8"), object_pairs_hook=no_duplicates)
    except (ValueError, RecursionError) as error:
        raise Damaged(f"{path} has a header that is not JSON ({printable(error)}).") from None
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise Damaged(f"{path} has a __metadata__ that is not an object of strings.")
    if len(header) > MAX_TENSORS:
        raise Damaged(f"{path} holds {len(header)} tensors; more than {MAX_TENSORS} are not read.")
    entries = {name: _entry(name, fields, path) for name, fields in header.items()}
    return dict(sorted(entries.items(), key=lambda item: (item[1].begin, item[1].end)))


def _entry(name: str, fields: Any, path: Path) -> TensorEntry:
    if not 0 < len(name) <= _NAME or not name.isprintable():
        raise Damaged(f"{path} names a tensor {printable(repr(name))}, which is not a plain name.")
    where = f"{path}: {printable(name)}"
    if not isinstance(fields, dict) or fields.keys() != {"dtype", "shape", "data_offsets"}:
        raise Damaged(f"{where} should have a dtype, a shape and data_offsets, and nothing else.")
    dtype, shape, offsets = fields["dtype"], fields["shape"], fields["data_offsets"]
    if not isinstance(dtype, str) or dtype not in BITS:
        raise Damaged(f"{where} is of {printable(repr(dtype))}, which is not a known dtype.")
    if not _are_sizes(shape) or len(shape) > _AXES:
        raise Damaged(f"{where} should have a shape of at most {_AXES} whole numbers.")
    if not _are_sizes(offsets) or len(offsets) != 2:
        raise Damaged(f"{where} should have two data_offsets.")
    entry = TensorEntry(dtype, tuple(shape), offsets[0], offsets[1])
    needed = BITS[dtype] // 8
    for axis in shape:
        needed *= axis
    if needed != entry.bytes:
        raise Damaged(
            f"{where} takes bytes {entry.begin} to {entry.end}, and its shape needs {needed}."
        )
    return entry


def _require_filled(entries: dict[str, TensorEntry], size: int, path: Path) -> None:
    offset = 0
    for name, entry in entries.items():
        if entry.begin != offset:
            raise Damaged(
                f"{path}: {printable(name)} begins at byte {entry.begin} of the data and the one "
                f"before it ends at {offset}; tensors may neither overlap nor leave a gap."
            )
        offset = entry.end
    if offset != size:
        raise Damaged(
            f"{path} has {size} bytes of data and its tensors take {offset}; it is not whole."
        )


def _are_sizes(value: Any) -> bool:
    return isinstance(value, list) and all(type(n) is int and 0 <= n < 2**62 for n in value)
