"""A Hugging Face directory: what is in it, known for certain before memory is taken for it.

    config.json                     what the model is; ``model_type`` names its family
    model.safetensors               its weights in one file, or
    model.safetensors.index.json    {"weight_map": {tensor: file}} and the files it names
    tokenizer.json, generation_config.json, ...

Nobody has vouched for any of it. Only plain files that lie in the directory itself are opened:
no path, no pipe, no pickle, and no code whatever a file asks for. No link either, but for those
that a snapshot in the cache of Hugging Face consists of: from snapshots/REVISION to a file of the
folder blobs beside snapshots, called by its checksum. Sizes are read from
the headers (fenchel/checkpoints/safetensors_header.py) and compared with what the settings imply;
only then is a tensor mapped. A mapped tensor is the file's own pages, shared and read when touched:
a second copy exists only of what is changed afterwards.
"""

import os
import re
import stat
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open

from fenchel.checkpoints.safetensors_header import TensorEntry, read_header
from fenchel.files import Damaged, Notice, printable, read_json
from fenchel.model.families.config_reader import CONFIG

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
TOKENIZER = "tokenizer.json"
_LIMITS = {CONFIG: 2**20, INDEX: 8 * 2**20, TOKENIZER: 48 * 2**20}
_SEPARATORS = 3 * 2**20  # of a JSON file: a value costs up to 150 bytes, the largest in use has 2M
_SHARDS = 1000
_BLOB = re.compile(r"\.\./\.\./blobs/([0-9a-f]{40}|[0-9a-f]{64})")
_PICKLES = (".bin", ".pt", ".pth", ".pkl", ".ckpt")


class TensorLocation(NamedTuple):
    """Where a tensor lies, and what the header there says of it."""

    file: Path
    name: str
    entry: TensorEntry


class CheckpointDirectory(NamedTuple):
    """A directory whose settings were parsed and whose headers were verified."""

    path: Path
    config: dict[str, Any]
    tensors: dict[str, TensorLocation]


def open_directory(path: Path) -> CheckpointDirectory:
    """Settings and tensor table of a directory; no weight is read."""
    config = read_config(path)
    if has_file(path, WEIGHTS):
        shards = {WEIGHTS: read_header(regular_file(path, WEIGHTS))}
    elif has_file(path, INDEX):
        shards = _indexed(path)
    else:
        raise ValueError(_no_weights(path))
    tensors = {
        name: TensorLocation(path / file, name, entry)
        for file, entries in shards.items()
        for name, entry in entries.items()
    }
    return CheckpointDirectory(path, config, tensors)


def read_config(path: Path) -> dict[str, Any]:
    """config.json as plain values; code that it asks for is named and never run."""
    config = read_bounded_json(path, CONFIG)
    if not isinstance(config.get("model_type"), str):
        raise ValueError(f"{path / CONFIG} has no model_type, which would say what the model is.")
    if "auto_map" in config:
        warnings.warn(
            f"{path / CONFIG} asks for code of its own (auto_map); fenchel never runs it.",
            Notice,
            stacklevel=2,
        )
    return config


def read_bounded_json(path: Path, name: str) -> dict[str, Any]:
    """A JSON object of the directory, once its size and its number of values are bounded."""
    return read_json(bounded_json_file(path, name))


def has_file(path: Path, name: str) -> bool:
    """Whether anything by this name is there, be it a link to nowhere."""
    return os.path.lexists(path / name)


def bounded_json_file(path: Path, name: str) -> Path:
    """``regular_file``, if it is also one that parsing as JSON does not make into gigabytes."""
    file = regular_file(path, name)
    limit = _LIMITS.get(name, 2**20)
    if (size := file.stat().st_size) > limit:
        raise Damaged(f"{file} has {size} bytes; more than {limit} is not read.")
    data = file.read_bytes()
    if (values := sum(data.count(sign) for sign in b",:[{")) > _SEPARATORS:
        raise Damaged(f"{file} holds some {values} values; more than {_SEPARATORS} are not read.")
    return file


def regular_file(path: Path, name: str) -> Path:
    """``path / name``, if that is a file lying in the directory itself, or what stands for it."""
    if not name or Path(name).name != name or name[0] in ".~" or not _is_word(name):
        raise Damaged(
            f"{path} speaks of a file {printable(repr(name))}; "
            "only plain names of files in the directory itself are opened."
        )
    file = path / name
    try:
        mode = os.lstat(file).st_mode
    except OSError as error:
        raise Damaged(f"{file} cannot be read ({error.strerror}).") from None
    if stat.S_ISLNK(mode):
        if (blob := _blob(file)) is not None:
            return blob
        raise Damaged(
            f"{file} is a symbolic link out of the directory and is not followed; "
            "copy the directory with its links resolved (cp -rL)."
        )
    if not stat.S_ISREG(mode):
        raise Damaged(f"{file} is not a plain file.")
    return file


def _blob(link: Path) -> Path | None:
    """The plain file that a link of a snapshot stands for; None for any other link."""
    snapshots, target = link.parent.resolve().parent, os.readlink(link)
    if snapshots.name != "snapshots" or not _BLOB.fullmatch(target):
        return None
    blobs = snapshots.parent / "blobs"
    blob = blobs / Path(target).name
    plain = blob.is_file() and not blob.is_symlink() and not blobs.is_symlink()
    return blob if plain else None


@contextmanager
def open_tensors(directory: CheckpointDirectory) -> Iterator["TensorReader"]:
    """The tensors of a directory, each open_tensors when it is asked for."""
    with ExitStack() as stack:
        yield TensorReader(directory, stack)


class TensorReader:
    """TensorReader by name; see ``open_tensors``."""

    def __init__(self, directory: CheckpointDirectory, stack: ExitStack) -> None:
        self._directory, self._stack = directory, stack
        self._files: dict[Path, Any] = {}

    @property
    def path(self) -> Path:
        """The directory they lie in."""
        return self._directory.path

    def __getitem__(self, name: str) -> torch.Tensor:
        """A tensor on the file's own pages; changing it leaves the file alone."""
        file, there, entry = self._directory.tensors[name]
        try:
            if file not in self._files:
                self._files[file] = self._stack.enter_context(safe_open(file, framework="pt"))
            tensor: torch.Tensor = self._files[file].get_tensor(there)
        except (SafetensorError, OSError) as error:
            raise Damaged(f"{file} cannot be read ({printable(error)}).") from None
        if tuple(tensor.shape) != entry.shape:
            raise Damaged(f"{file} changed while it was read.")
        return tensor


def _indexed(path: Path) -> dict[str, dict[str, TensorEntry]]:
    """The headers of the files that an index names, once it is true to them."""
    index = read_bounded_json(path, INDEX)
    where = index.get("weight_map")
    if not isinstance(where, dict) or not where:
        raise Damaged(f"{path / INDEX} should have a weight_map from tensors to files.")
    if not all(isinstance(file, str) for file in where.values()):
        raise Damaged(f"{path / INDEX} has a weight_map that names something besides files.")
    names = sorted(set(where.values()))
    if len(names) > _SHARDS:
        raise Damaged(f"{path / INDEX} names {len(names)} files; more than {_SHARDS} is refused.")
    for name in names:
        if not name.endswith(".safetensors"):
            raise Damaged(f"{path / INDEX} names {printable(repr(name))}, no safetensors file.")
    shards = {name: read_header(regular_file(path, name)) for name in names}
    _require_true(path / INDEX, index, where, shards)
    return shards


def _require_true(
    index: Path,
    said: dict[str, Any],
    where: dict[str, str],
    shards: dict[str, dict[str, TensorEntry]],
) -> None:
    counted = Counter(name for entries in shards.values() for name in entries)
    for name, times in counted.items():
        if times > 1:
            raise Damaged(f"{index}: {printable(name)} lies in {times} of the files.")
        if name not in where:
            raise Damaged(
                f"{index} does not mention {printable(name)}, which lies in one of its files."
            )
    for name, file in where.items():
        if name not in shards[file]:
            raise Damaged(
                f"{index} looks for {printable(name)} in {printable(file)}, where it is not."
            )
    total = sum(entry.bytes for entries in shards.values() for entry in entries.values())
    about = said.get("metadata", {})
    claimed = about.get("total_size", total) if isinstance(about, dict) else None
    if claimed != total:
        raise Damaged(
            f"{index} claims total_size={printable(repr(claimed))} and its files hold "
            f"{total} bytes; correct the number or take it out."
        )


def _no_weights(path: Path) -> str:
    pickles = sorted(f.name for f in path.iterdir() if f.suffix in _PICKLES)
    if pickles:
        return (
            f"{path} holds its weights as {printable(pickles[0])}, and opening a pickle runs code, "
            f"so fenchel never does; save them as {WEIGHTS} where they are trusted."
        )
    return f"{path} holds neither {WEIGHTS} nor {INDEX}."


def _is_word(name: str) -> bool:
    return name.isprintable() and not set(name) & set('/\\:*?"<>|')
