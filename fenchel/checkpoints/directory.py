"""The guarded reader of checkpoint directories: every file, ours or foreign, passes through here.

    config.json                     settings; ``model_type`` names the family in a foreign directory
    model.safetensors               the weights in one file, or
    model.safetensors.index.json    {"weight_map": {tensor: file}} and the files that it names
    tokenizer.json, generation_config.json, ...

A directory is hostile until checked. Only regular files of the directory itself are opened: no
path, no pipe, no pickle, and no code even if a file names some. Symbolic links are refused, except
those of a snapshot in the Hugging Face cache: from snapshots/REVISION to a file of the folder
blobs beside snapshots that is named by its checksum. Sizes are read from the headers
(``safetensors_header``) and compared with what the settings imply; only then is a tensor mapped.
A mapped tensor lives on the file's own pages, shared and read when touched, and is copied only
where it is written to.

The policies below hold for every reader: ``load``, ``convert`` and every command.

| what is found | what happens |
| --- | --- |
| a run checkpoint of another format | refused (``run_checkpoint``) |
| a run checkpoint that is damaged | skipped with a warning; the newest intact one is read |
| ``auto_map`` in config.json | a warning; the code is never run, the built-in class is used |
| ``transformers_weights``, adapters, kernels, backbones in config.json | refused (``_REFUSED``) |
| a manifest.json of ours | every file that it names is compared with it before it is used |
| a pickle beside safetensors | ignored |
| a pickle instead of safetensors | refused |
| an index beside model.safetensors | ignored; the single file is read |
| no tokenizer.json | refused where text is read; ``load_model`` needs none |
| a tokenizer with more ids than the vocabulary | refused |
| nan or inf among the weights | refused by tensor name |
| quantised weights | read as matrices with a notice, or refused by their method (``quantised``) |
| a size out of range, more layers than tensors | refused before a module is built |
| a missing, extra or misshapen tensor | refused by name |
| unknown keys of config.json | a warning that names them |
"""

import os
import re
import stat
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from safetensors import safe_open

from fenchel.checkpoints.quantised import KEY, Compute, find_quantised
from fenchel.checkpoints.safetensors_header import TensorEntry, read_header, system_errors
from fenchel.files import (
    MANIFEST,
    Damaged,
    Notice,
    manifest_files,
    printable,
    read_json,
    require_digest,
    require_size,
)
from fenchel.hub_cache import model_name
from fenchel.model.config import LARGEST
from fenchel.model.families.config_reader import CONFIG

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
OPTIMISER_INDEX = "optimiser.safetensors.index.json"
TOKENIZER = "tokenizer.json"
TOKENIZER_CONFIG = "tokenizer_config.json"
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}
"""Dtypes that weights may have, by the names that safetensors gives them."""
_BYTES = {
    CONFIG: 2**20,
    INDEX: 8 * 2**20,
    OPTIMISER_INDEX: 8 * 2**20,
    TOKENIZER: 48 * 2**20,
    TOKENIZER_CONFIG: 8 * 2**20,  # those of the Gemmas list 6,000 added tokens in over 1 MB
}
_OWN_WORDS = (b'"files"', b'"bytes"', b'"sha256"')
"""With "seal", words of a manifest of ours: a flipped bit leaves the one or the others."""
_SEPARATORS = 3 * 2**20  # of a JSON file: a value costs up to 150 bytes, the largest in use has 2M
_SHARDS = 1000
_BLOB = re.compile(r"\.\./\.\./blobs/([0-9a-f]{40}|[0-9a-f]{64})")
_PICKLES = (".bin", ".pt", ".pth", ".pkl", ".ckpt")
_SIZES = ("vocab_size", "hidden_size", "n_embd", "num_attention_heads", "n_head")
_DEPTHS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers")
_ANY_DEPTH = re.compile(r"(.*_)?(layers?|blocks?|depth)")
_REFUSED = {
    **dict.fromkeys(
        ("quantization_config", "compression_config"),
        "a variant that fenchel does not have; give the model in bfloat16 or float32",
    ),
    **dict.fromkeys(
        """
        adapter_config adapters backbone custom_generate distributed_config fusion_config
        kernel_config peft_config transformers_weights use_pretrained_backbone use_timm_backbone
        """.split(),
        "not followed; give a directory whose weights and settings are all its own",
    ),
}
"""Keys of config.json, at any depth, that lead a reader to other files, code or arithmetic."""
_ORIGINS = frozenset({"_name_or_path", "_model_name_or_path", "name_or_path", "auto_map"})
_FILE_NAME = re.compile(
    r".*\.(safetensors|bin|pt|pth|pkl|ckpt|gguf|json|py|so|txt|model|jinja)|[/~].*|.*(://|\.\./).*",
    re.DOTALL,
)


class TensorLocation(NamedTuple):
    """The file that holds a tensor, its name there, and its entry in the header.

    One that is stored quantised has the entry that it would have otherwise.
    """

    file: Path
    name: str
    entry: TensorEntry
    compute: Compute | None = None
    """How it is computed from tensors of the files; None where it is one of them."""


class CheckpointDirectory(NamedTuple):
    """A directory whose settings are parsed and whose headers are verified; no weight is read."""

    path: Path
    config: dict[str, Any]
    """config.json."""
    tensors: dict[str, TensorLocation]
    digests: Mapping[str, str] = MappingProxyType({})
    """SHA-256 of the files of weights, where a manifest of ours gives it."""
    parts: Mapping[str, TensorLocation] = MappingProxyType({})
    """The tensors that quantised weights are computed from."""

    @property
    def name(self) -> str:
        """The last part of the path, or the name of the model in the Hugging Face cache."""
        return model_name(self.path)

    @property
    def config_path(self) -> Path:
        """Where config.json is, for messages."""
        return self.path / CONFIG

    @property
    def model_type(self) -> str:
        """The family that config.json names; empty in a checkpoint of a run."""
        return str(self.config.get("model_type", ""))

    @property
    def architecture(self) -> str | None:
        """The transformers class that wrote the directory, such as "GPT2LMHeadModel", if given."""
        names = self.config.get("architectures")
        first = names[0] if isinstance(names, list) and names else None
        return first if isinstance(first, str) else None

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of most of the weights."""
        numbers: Counter[str] = Counter()
        for location in self.tensors.values():
            entry = location.entry
            numbers[entry.dtype] += entry.bytes if entry.dtype in DTYPES else 0
        return DTYPES[max(numbers, key=lambda dtype: numbers[dtype])]


def open_directory(path: Path) -> CheckpointDirectory:
    """Settings and tensor table of a Hugging Face directory.

    Where it has a manifest of ours, every file that this names is compared with it; the bytes of
    the weights when they are first used, by ``open_tensors``.
    """
    digests = verify_manifest(path)
    config = read_bounded_json(path, CONFIG)
    tensors = read_headers(path)
    if not isinstance(config.get("model_type"), str) or not config["model_type"]:
        raise ValueError(f"{path / CONFIG} has no model_type, which names the family of a model.")
    if "auto_map" in config:
        warnings.warn(
            f"{path / CONFIG} names its own code (auto_map); fenchel never runs it.",
            Notice,
            stacklevel=2,
        )
    directory = _dequantised(CheckpointDirectory(path, config, tensors, digests))
    for key, value in _walk(directory.config):
        if key in _REFUSED and value not in (None, False, "", [], {}):
            raise ValueError(f"{path / CONFIG}: {key} is {_REFUSED[key]}.")
    _require_floating_point(directory)
    _require_sizes(directory)
    return directory


def _dequantised(directory: CheckpointDirectory) -> CheckpointDirectory:
    """The directory with quantised weights as the matrices that they stand for, and a notice.

    The settings are then those of a model that is not quantised.
    """
    config, tensors = dict(directory.config), directory.tensors
    settings = config.pop(KEY, None)
    inner = config.get("text_config")
    if isinstance(inner, dict) and KEY in inner:
        config["text_config"] = {key: value for key, value in inner.items() if key != KEY}
        settings = settings or inner[KEY]
    entries = {name: location.entry for name, location in tensors.items()}
    found = find_quantised(settings, entries, str(directory.config_path))
    if found is None:
        return directory
    plain = {name: at for name, at in tensors.items() if name not in found.absorbed}
    for name, (entry, stored, compute) in found.matrices.items():
        plain[name] = tensors[stored]._replace(entry=entry, compute=compute)
    parts = {name: tensors[name] for name in found.absorbed}
    warnings.warn(
        f"{directory.path}: {len(found.matrices)} quantised matrices are read in "
        f"{next(iter(found.matrices.values()))[0].dtype}; activations are not quantised here, so "
        "logits differ slightly from those of the quantised model.",
        Notice,
        stacklevel=3,
    )
    return directory._replace(config=config, tensors=plain, parts=parts)


def verify_manifest(path: Path) -> dict[str, str]:
    """Compare a directory with its manifest of ours, if any; return the SHA-256 of its weights.

    The size of every file that the manifest names, and the bytes of those that are read whole.
    Files that it does not name are allowed, as people add pages and licences.
    """
    if not has_file(path, MANIFEST):
        return {}
    data = bounded_file(path, MANIFEST).read_bytes()
    if b'"seal"' not in data and not all(word in data for word in _OWN_WORDS):
        return {}  # of another program
    digests = {}
    with _own_change(path):
        for name, (size, digest) in manifest_files(regular_file(path, MANIFEST)).items():
            file = regular_file(path, name)
            require_size(file, size)
            if name.endswith(".safetensors"):
                digests[name] = digest
            elif size <= max(_BYTES.values()):
                require_digest(file, digest)
    return digests


@contextmanager
def _own_change(path: Path) -> Iterator[None]:
    """Context manager: the error of a changed file names the way to accept the change."""
    try:
        yield
    except Damaged as error:
        sentence = str(error).rstrip(".")
        raise Damaged(f"{sentence}; if the change is yours, delete {path / MANIFEST}.") from None


def require_no_file_names(directory: CheckpointDirectory) -> None:
    """Refuse a setting that names a file or an address, for a reader that may look for it."""
    for key, value in _walk(directory.config):
        if isinstance(value, str) and key not in _ORIGINS and _FILE_NAME.fullmatch(value):
            raise ValueError(
                f"{directory.config_path}: {printable(key)}={printable(repr(value))} names a file, "
                "which is not followed; remove the setting."
            )


def _walk(settings: Any) -> Iterator[tuple[str, Any]]:
    """Every key of nested objects with its value; an entry of a list has the key of the list."""
    pending: list[tuple[str, Any]] = [("", settings)]
    while pending:
        key, value = pending.pop()
        if key:
            yield key, value
        if isinstance(value, dict):
            pending.extend(value.items())
        elif isinstance(value, list):
            pending.extend((key, one) for one in value)


def read_headers(path: Path) -> dict[str, TensorLocation]:
    """Where every tensor of a directory is, from one file of weights or an index of several."""
    if has_file(path, WEIGHTS):
        shards = {WEIGHTS: read_header(regular_file(path, WEIGHTS))}
    elif has_file(path, INDEX):
        shards = indexed_headers(path)
    else:
        raise ValueError(_no_weights(path))
    return {
        name: TensorLocation(path / file, name, entry)
        for file, entries in shards.items()
        for name, entry in entries.items()
    }


def read_bounded_json(path: Path, name: str) -> dict[str, Any]:
    """A JSON object of the directory, after its size and its number of values are bounded."""
    return read_json(bounded_json_file(path, name))


def has_file(path: Path, name: str) -> bool:
    """Whether the directory has an entry of this name, a dangling link included."""
    return os.path.lexists(path / name)


def bounded_file(path: Path, name: str) -> Path:
    """``regular_file``, refused if it is larger than files of its name are."""
    file = regular_file(path, name)
    limit = _BYTES.get(name, 2**20)
    if (size := file.stat().st_size) > limit:
        raise Damaged(f"{file} has {size} bytes; more than {limit} is not read.")
    return file


def bounded_json_file(path: Path, name: str) -> Path:
    """``bounded_file``, refused if parsing it as JSON would take gigabytes."""
    file = bounded_file(path, name)
    data = file.read_bytes()
    if (values := sum(data.count(sign) for sign in b",:[{")) > _SEPARATORS:
        raise Damaged(f"{file} holds some {values} values; more than {_SEPARATORS} are not read.")
    return file


def regular_file(path: Path, name: str) -> Path:
    """``path / name`` if it is a regular file of the directory, or the blob that it links to."""
    plain = name.isprintable() and not set(name) & set('/\\:*?"<>|')
    if not name or Path(name).name != name or name[0] in ".~" or not plain:
        raise Damaged(
            f"{path} refers to a file {printable(repr(name))}; "
            "only plain names of files in the directory itself are opened."
        )
    file = path / name
    try:
        mode = os.lstat(file).st_mode
    except OSError as error:
        raise Damaged(f"{file} cannot be read ({error.strerror}).") from None
    if stat.S_ISLNK(mode):
        if (blob := _snapshot_blob(file)) is not None:
            return blob
        raise Damaged(
            f"{file} is a symbolic link out of the directory and is not followed; "
            "copy the directory with its links resolved (cp -rL)."
        )
    if not stat.S_ISREG(mode):
        raise Damaged(f"{file} is not a regular file.")
    return file


def _snapshot_blob(link: Path) -> Path | None:
    """The regular file that a link of a snapshot refers to; None for any other link."""
    snapshots, target = link.parent.resolve().parent, os.readlink(link)
    if snapshots.name != "snapshots" or not _BLOB.fullmatch(target):
        return None
    blobs = snapshots.parent / "blobs"
    blob = blobs / Path(target).name
    regular = blob.is_file() and not blob.is_symlink() and not blobs.is_symlink()
    return blob if regular else None


@contextmanager
def open_tensors(
    directory: CheckpointDirectory, dtype: torch.dtype | None = None
) -> Iterator["TensorReader"]:
    """The tensors of a directory by name, each mapped at its first use.

    Quantised weights are computed in ``dtype``, by default that of the other weights.
    """
    with ExitStack() as stack:
        yield TensorReader(directory, stack, dtype)


class TensorReader:
    """Tensors by name; see ``open_tensors``."""

    def __init__(
        self, directory: CheckpointDirectory, stack: ExitStack, dtype: torch.dtype | None = None
    ) -> None:
        self._directory, self._stack, self._dtype = directory, stack, dtype
        self._files: dict[Path, Any] = {}
        self._computed: tuple[str, torch.Tensor] | None = None

    def __getitem__(self, name: str) -> torch.Tensor:
        """A tensor on the file's own pages; writing to it does not change the file."""
        location = self._directory.tensors[name]
        if location.compute is None:
            return self._stored(location)
        if self._computed is None or self._computed[0] != name:  # two of ours may be in it
            dtype = self._dtype or DTYPES[location.entry.dtype]
            self._computed = None
            tensor = location.compute(lambda part: self._stored(self._directory.parts[part]), dtype)
            self._computed = name, tensor
        return self._computed[1]

    def _stored(self, location: TensorLocation) -> torch.Tensor:
        file, stored_name, entry, _ = location
        with system_errors(file):
            if file not in self._files:
                self._verify(file)
                self._files[file] = self._stack.enter_context(safe_open(file, framework="pt"))
            tensor: torch.Tensor = self._files[file].get_tensor(stored_name)
        if tuple(tensor.shape) != entry.shape:
            raise Damaged(f"{file} changed while it was read.")
        return tensor

    def _verify(self, file: Path) -> None:
        """Compare a file of weights with the manifest, before its first tensor is used."""
        if (digest := self._directory.digests.get(file.name)) is not None:
            with _own_change(self._directory.path):
                require_digest(file, digest)


def require_finite(tensor: torch.Tensor, name: str) -> None:
    """Refuse nan and inf; one pass without a temporary of the tensor's size where all is well."""
    if not tensor.numel():
        return
    low, high = tensor.aminmax()
    if not bool(low.isfinite() and high.isfinite()):
        count = int((~tensor.isfinite()).sum())
        raise ValueError(f"{name} holds {count} values that are not finite.")


def _require_floating_point(directory: CheckpointDirectory) -> None:
    """Refuse quantised weights without settings, and files without a floating-point tensor."""
    dtypes = {location.entry.dtype for location in directory.tensors.values()}
    for name, location in directory.tensors.items():
        if location.entry.dtype.startswith("F8"):
            raise ValueError(
                f"{location.file}: {printable(name)} is of {location.entry.dtype}, and no "
                f"{KEY} says how it is quantised; give the model in bfloat16 or float32."
            )
    if not dtypes & DTYPES.keys():
        raise ValueError(f"{directory.path} holds no tensor of floating-point numbers.")


def _require_sizes(directory: CheckpointDirectory) -> None:
    """Refuse sizes that no model has, and more layers than there are tensors for.

    Some families give a list of sizes, one per layer.
    """
    most = 4 * len(directory.tensors)
    misfit = f"does not fit the {len(directory.tensors)} tensors of the weights"
    sizes = LARGEST, f"should be a whole number, 1 to {LARGEST}"
    bounds = dict.fromkeys(_SIZES, sizes) | dict.fromkeys(_DEPTHS, (most, misfit))
    for key, value in _walk(directory.config):
        if type(value) is int and value > most and _ANY_DEPTH.fullmatch(key):
            raise _wrong_size(directory, key, value, misfit)
    for key, (largest, sentence) in bounds.items():
        size = directory.config.get(key)
        if size is None or (isinstance(size, list) and key in _SIZES):
            continue
        if type(size) is not int or not 0 < size <= largest:
            raise _wrong_size(directory, key, size, sentence)


def _wrong_size(
    directory: CheckpointDirectory, key: str, value: object, sentence: str
) -> ValueError:
    shown = f"{printable(key)}={printable(repr(value), 40)}"
    return ValueError(f"{directory.config_path}: {shown} {sentence}.")


def indexed_headers(path: Path, index_name: str = INDEX) -> dict[str, dict[str, TensorEntry]]:
    """The headers of the files that an index names, after comparing it with them."""
    index, where = read_bounded_json(path, index_name), path / index_name
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise Damaged(f"{where} should have a weight_map from tensors to files.")
    if not all(isinstance(file, str) for file in weight_map.values()):
        raise Damaged(f"{where} has a weight_map that names something besides files.")
    names = sorted(set(weight_map.values()))
    if len(names) > _SHARDS:
        raise Damaged(f"{where} names {len(names)} files; more than {_SHARDS} is refused.")
    for name in names:
        if not name.endswith(".safetensors"):
            raise Damaged(f"{where} names {printable(repr(name))}, no safetensors file.")
    shards = {name: read_header(regular_file(path, name)) for name in names}
    _require_index_agrees(where, index, weight_map, shards)
    return shards


def _require_index_agrees(
    path: Path,
    index: dict[str, Any],
    weight_map: dict[str, str],
    shards: dict[str, dict[str, TensorEntry]],
) -> None:
    """Refuse an index that differs from the headers of its files."""
    files_per_tensor = Counter(name for entries in shards.values() for name in entries)
    for name, count in files_per_tensor.items():
        if count > 1:
            raise Damaged(f"{path}: {printable(name)} lies in {count} of the files.")
        if name not in weight_map:
            raise Damaged(
                f"{path} does not mention {printable(name)}, which lies in one of its files."
            )
    for name, file in weight_map.items():
        if name not in shards[file]:
            raise Damaged(f"{path} places {printable(name)} in {printable(file)}, where it is not.")
    total = sum(entry.bytes for entries in shards.values() for entry in entries.values())
    metadata = index.get("metadata", {})
    total_size = metadata.get("total_size", total) if isinstance(metadata, dict) else None
    if total_size != total:
        raise Damaged(
            f"{path} claims total_size={printable(repr(total_size))} and its files hold {total} "
            "bytes; correct the number or remove it."
        )


def _no_weights(path: Path) -> str:
    pickles = sorted(f.name for f in path.iterdir() if f.suffix in _PICKLES)
    if pickles:
        return (
            f"{path} holds its weights as {printable(pickles[0])}, and opening a pickle runs code, "
            f"so fenchel never does; save them as {WEIGHTS} where they are trusted."
        )
    return f"{path} holds neither {WEIGHTS} nor {INDEX}."
