"""Checkpoints of a run: complete and verified, or absent.

    checkpoints/step-000123/
        model.safetensors       weights in their training dtype
        optimiser.safetensors   every tensor of the optimiser's state
        config.json             the ModelConfig
        state.json              Progress, and the optimiser's state that is not tensors
        manifest.json           format, step, size and SHA-256 of the others, sealed

Of several processes each writes its own file, model-00001-of-00002.safetensors and so on, and
with an index as in Hugging Face directories, model.safetensors.index.json, that names
the file of every tensor; so is the optimiser's (fenchel/distributed/checkpoint.py). Both kinds are
read by any number of processes.

A folder is committed by one rename (``fenchel.files``); a run resumes from the newest intact one.
The learning rate, the batches and dropout are functions of the seed and the step, so resuming
needs no more of them than the step number. A damaged checkpoint is renamed to step-000123.damaged
until its step has been taken again.

``check`` runs before every read, by ``load`` and by ``restore``: it verifies the
seal, the format and the step. Format 2 renamed the parameters of the model.
"""

import errno
import json
import os
import re
import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from fenchel.checkpoints.directory import (
    DTYPES,
    INDEX,
    OPTIMISER_INDEX,
    TOKENIZER,
    WEIGHTS,
    CheckpointDirectory,
    indexed_headers,
    read_bounded_json,
    read_headers,
)
from fenchel.checkpoints.safetensors_header import system_errors
from fenchel.checkpoints.weights import read_state_dict
from fenchel.config import from_mapping
from fenchel.files import (
    CHECKPOINTS,
    MANIFEST,
    Damaged,
    NoSpace,
    Notice,
    committed,
    discard,
    read_json,
    read_sealed_json,
    require_space,
    sha256,
    verify,
)
from fenchel.model.families.config_reader import CONFIG

FORMAT = 2
"""The format of a run directory and of its checkpoints."""
BASE = "base"
"""Folder of a run that tunes a checkpoint: the files of that checkpoint beside its weights."""
OPTIMISER, STATE, TEXT = "optimiser.safetensors", "state.json", "text.json"
_FILE = re.compile(
    "|".join(map(re.escape, (WEIGHTS, INDEX, OPTIMISER, OPTIMISER_INDEX, CONFIG, STATE, MANIFEST)))
    + r"|(model|optimiser)-\d{5}-of-\d{5}\.safetensors"
)
_NAME = re.compile(r"step-(\d+)(\.damaged)?")
_ATTEMPTS = 100  # to read a checkpoint of a run that deletes it meanwhile

T = TypeVar("T")


class Stateful(Protocol):
    """An optimiser, or several as one: {member: {"state": ..., "param_groups": ...}}."""

    def state_dict(self) -> dict[str, Any]:
        """The state per parameter, and the settings of the groups."""

    def require_shapes(self, state: dict[str, Any]) -> None:
        """Refuse what ``state_dict`` never returns; raises ValueError."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what ``state_dict`` returned."""


@dataclass(frozen=True, kw_only=True)
class Progress:
    """The position of a run: all that does not follow from its settings and the step number."""

    step: int = 0
    """Steps taken, skipped ones included."""
    tokens: int = 0
    """Targets trained on, without those of skipped steps."""
    seconds: float = 0.0
    """Time spent training so far, over all resumes."""
    skipped: tuple[int, ...] = ()
    """Steps whose loss or gradient was not finite, numbered as in the metrics."""
    loss_sum: float = 0.0
    """Sum of losses since the last line of metrics."""
    loss_count: int = 0
    """Number of losses in ``loss_sum``."""
    best: float | None = None
    """Lowest validation loss so far, of steps that are saved."""
    best_step: int | None = None
    """The step that had it."""
    metrics_bytes: int = 0
    """Length of metrics.jsonl at this step; a resume truncates it to this."""
    loss_scale: float | None = None
    """Factor on the loss in float16; None in any other precision."""
    loss_scale_age: int = 0
    """Steps since that factor changed."""


def save(
    checkpoints: Path,
    progress: Progress,
    weights: Mapping[str, Tensor],
    optimiser: Mapping[str, Any],
    settings: Mapping[str, Any],
) -> Path:
    """Commit one checkpoint; NoSpace when the disk cannot take it, with nothing left behind.

    ``optimiser`` is the ``state_dict()`` of one that is ``Stateful``.
    """
    tensors, rest = flatten(optimiser)
    size = tensor_bytes(weights) + tensor_bytes(tensors)
    path = make_room(checkpoints, progress.step, size)
    try:
        with committed(path, manifest_header(progress)) as folder:
            write_tensors(weights, folder / WEIGHTS)
            write_tensors(tensors, folder / OPTIMISER)
            write_settings_and_state(folder, settings, progress, rest)
    except NoSpace as error:
        raise does_not_fit(size, checkpoints) from error
    return path


def make_room(checkpoints: Path, step: int, size: int) -> Path:
    """The path of the checkpoint of a step, where nothing is, on a disk with room for it."""
    checkpoints.mkdir(exist_ok=True)  # deleted while the run trained; the rest of it is there
    require_space(checkpoints, int(1.2 * size) + 2**16)
    path = checkpoints / _folder_name(step)
    if path.exists():  # from a time line that a resume from further back has left
        set_aside(path)
    return path


def manifest_header(progress: Progress) -> dict[str, Any]:
    """The entries of a manifest besides its files."""
    return {"format": FORMAT, "step": progress.step, "torch": torch.__version__}


def write_settings_and_state(
    folder: Path, settings: Mapping[str, Any], progress: Progress, rest: Mapping[str, Any]
) -> None:
    """config.json and state.json; ``rest`` is the optimiser's state that is not tensors."""
    state = {**asdict(progress), "optimiser": rest}
    (folder / CONFIG).write_text(json.dumps(settings, indent=1) + "\n", encoding="utf-8")
    (folder / STATE).write_text(json.dumps(state, indent=1) + "\n", encoding="utf-8")


def does_not_fit(size: int, checkpoints: Path) -> NoSpace:
    """The error of a checkpoint of ``size`` bytes on a full disk."""
    return NoSpace(
        f"no space: a checkpoint of {size / 2**20:.1f} MiB does not fit in {checkpoints}."
    )


def tensor_bytes(tensors: Mapping[str, Tensor]) -> int:
    """How many bytes tensors have in a file, without its header."""
    return sum(t.numel() * t.element_size() for t in tensors.values())


class Weights(Protocol):
    """A model, or what holds its parameters for several processes."""

    def state_dict(self) -> dict[str, Any]:
        """The parameters by name; their shapes and dtypes are read."""

    def load_state_dict(self, weights: Any, *, strict: bool = True) -> Any:
        """Set all of them."""


def restore(
    folder: Path, model: Weights, optimiser: Stateful, settings: Mapping[str, Any]
) -> Progress:
    """Fill ``model`` and ``optimiser`` from a checkpoint that passed ``check``."""
    directory = open_folder(folder)
    _require_same_settings(directory, settings)
    expected = model.state_dict()
    _require_same_dtypes(directory, expected)
    weights = read_state_dict(directory, expected)
    progress, rest = _read_state(folder)
    groups = optimiser.state_dict()
    try:
        saved = unflatten(_load_optimiser(folder), rest)
    except ValueError:  # a name that is not member.index.name
        raise Damaged(f"{folder} does not hold the state of an optimiser.") from None
    for member in groups.keys() | saved.keys():
        if not _same_optimiser(groups.get(member), saved.get(member)):
            raise ValueError(f"{folder} was saved by another optimiser than that of the settings.")
        groups[member]["state"] = saved.get(member, {}).get("state", {})
    try:
        optimiser.require_shapes(groups)
    except ValueError as error:  # sealed, and yet not the state of these parameters
        raise ValueError(f"{folder / OPTIMISER}: {error}") from None
    model.load_state_dict(weights, strict=True)
    optimiser.load_state_dict(groups)  # rates and decays are those of today's settings
    return progress


def _read_state(folder: Path) -> tuple[Progress, dict[str, Any]]:
    """state.json: the progress, and the state of the optimiser that is not tensors."""
    path = folder / STATE
    state = read_json(path)
    rest = state.pop("optimiser", {})
    try:
        progress = from_mapping(Progress, state)
    except ValueError as error:
        raise Damaged(f"{path} is not the state of a run ({error}).") from None
    numbers = (progress.tokens, progress.seconds, progress.metrics_bytes, progress.loss_count)
    if progress.step != _step_of(folder) or not isinstance(rest, dict) or min(numbers) < 0:
        raise Damaged(f"{path} is not the state of a run after step {_step_of(folder)}.")
    return progress, rest


def is_run(path: Path) -> bool:
    """Whether a directory is that of a run; if not, it may be a Hugging Face directory."""
    return (path / CHECKPOINTS).is_dir()


def model_files(path: Path) -> Path:
    """The folder of the files beside the weights of a model: tokenizer, templates, generation.

    The directory itself, but the folder ``BASE`` of a run that tunes a checkpoint, once its
    manifest is verified.
    """
    if not is_run(path) or not os.path.lexists(path / BASE):
        return path
    verify(path / BASE)
    return path / BASE


def read_checkpoint(run: Path, which: str, read: Callable[[CheckpointDirectory], T]) -> T:
    """``read`` of the newest intact checkpoint of a run, or of the best if it is intact.

    Damaged checkpoints are skipped with a warning; one of another format is refused. A run that
    still trains may delete a checkpoint while it is read: the then newest is read instead.
    """
    for _ in range(_ATTEMPTS):
        folder, damaged = _choose(run / CHECKPOINTS, which)
        try:
            result = None if folder is None else read(open_folder(folder))
        except (OSError, ValueError, RuntimeError):  # safetensors raises all three
            if folder is None or folder.exists():
                raise
            continue
        for skipped, reason in damaged.items():
            warnings.warn(f"{skipped.name} is skipped: {reason}", Notice, stacklevel=4)
        if result is None:
            raise ValueError(f"{run} holds no intact checkpoint.")
        return result
    raise ValueError(f"{run} deletes its checkpoints faster than they are read; try again.")


def _choose(checkpoints: Path, which: str) -> tuple[Path | None, dict[Path, str]]:
    """The newest intact checkpoint or the best, and what is wrong with those before it."""
    folder, damaged = newest(checkpoints)
    if folder is None or which != "best":
        return folder, damaged
    try:
        best = read_json(folder / STATE).get("best_step")
    except Damaged:  # deleted since; the caller tries again
        return folder, damaged
    named = folder.with_name(_folder_name(best)) if type(best) is int else folder
    if named != folder and named.is_dir():
        try:
            check(named)
            return named, damaged
        except Damaged as error:
            damaged[named] = str(error)
    return folder, damaged


def open_folder(folder: Path) -> CheckpointDirectory:
    """Settings and tensor table of a checkpoint that passed ``check``."""
    return CheckpointDirectory(folder, read_bounded_json(folder, CONFIG), read_headers(folder))


def check_tokenizer(run: Path) -> None:
    """Refuse a tokenizer.json that is not the one which text.json of the run names by its hash."""
    if not os.path.lexists(run / TEXT):
        return
    expected = read_sealed_json(run / TEXT).get("tokenizer_sha256")
    if not isinstance(expected, str):
        raise Damaged(f"{run / TEXT} does not name the text that the run reads.")
    path = run / TOKENIZER
    if not path.is_file() or sha256(path) != expected:
        raise Damaged(
            f"{path} is not the tokenizer the run began with (SHA-256 was {expected[:12]}); "
            "put that one back."
        )


def check(folder: Path) -> None:
    """Refuse a checkpoint with a byte out of place, of another format or of another step."""
    manifest = verify(folder)
    version, step = manifest.get("format"), manifest.get("step")
    if type(version) is not int:
        raise Damaged(f"{folder} has no format.")
    require_format(version, folder)
    if step != _step_of(folder):
        raise Damaged(
            f"{folder} holds step {step} of format {version}, which differs from its name."
        )


def require_format(version: int, path: Path) -> None:
    """Refuse a run of another format than ``FORMAT``: it may mean other things by the same names.

    >>> require_format(2, Path("runs/a"))
    """
    if version > FORMAT:
        advice = "use the newer fenchel that wrote it"
    elif version < FORMAT:
        advice = "use the older fenchel that wrote it, or train again"
    else:
        return
    raise ValueError(f"{path} has format {version}, this fenchel reads format {FORMAT}; {advice}.")


def is_checkpoint_name(name: str) -> bool:
    """Whether a folder of this name in ``checkpoints`` is one that a run makes."""
    return _NAME.fullmatch(name) is not None


def folders(checkpoints: Path) -> list[Path]:
    """All committed checkpoints, oldest first."""
    return _named(checkpoints, damaged=False)


def newest(checkpoints: Path) -> tuple[Path | None, dict[Path, str]]:
    """The newest intact checkpoint, and what is wrong with each newer one.

    One that is deleted while it is checked, by a run that still trains, is not counted as damaged.
    """
    for _ in range(_ATTEMPTS):
        wrong: dict[Path, str] = {}
        deleted = False
        for folder in reversed(folders(checkpoints)):
            try:
                check(folder)
                return folder, wrong
            except Damaged as error:
                if os.path.lexists(folder):
                    wrong[folder] = str(error)
                deleted = deleted or folder not in wrong
        if not deleted:
            break
    return None, wrong


def set_aside(folder: Path) -> None:
    """Rename a checkpoint so that it is kept but neither resumed from nor counted."""
    aside = folder.with_name(f"{folder.name}.damaged")
    if os.path.lexists(aside):
        _discard(aside)
    folder.rename(aside)


def rotate(checkpoints: Path, *, keep: int, best_step: int | None) -> None:
    """Delete the oldest beyond ``keep``, never the best, and renamed ones up to the newest step."""
    committed_folders = folders(checkpoints)
    old = [folder for folder in committed_folders[:-keep] if _step_of(folder) != best_step]
    newest_step = max(map(_step_of, committed_folders), default=-1)
    retaken = [f for f in _named(checkpoints, damaged=True) if _step_of(f) <= newest_step]
    for folder in (*old, *retaken):
        with suppress(OSError):  # an old one too many does no harm; the next rotation tries again
            _discard(folder)


def _discard(folder: Path) -> None:
    """Delete a checkpoint, unless it holds a file that no checkpoint has."""
    if folder.is_symlink() or all(_FILE.fullmatch(file.name) for file in folder.iterdir()):
        discard(folder)
    else:
        raise FileExistsError(errno.ENOTEMPTY, "it holds other files than a checkpoint", folder)


def not_finite(weights: Mapping[str, Tensor]) -> tuple[str, int] | None:
    """The first tensor that holds nan or inf, and how many of them."""
    for name, tensor in weights.items():
        if bad := int((~tensor.isfinite()).sum()):
            return name, bad
    return None


def flatten(state: Mapping[str, Any]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors of {member: {"state": {index: {name: value}}}} by dotted name, and the rest."""
    tensors: dict[str, Tensor] = {}
    rest: dict[str, Any] = {}
    for member, whole in state.items():
        for index, values in whole["state"].items():
            for name, value in values.items():
                key = f"{member}.{index}.{name}"
                if isinstance(value, Tensor):
                    tensors[key] = value
                else:
                    rest[key] = value
    return tensors, rest


def unflatten(tensors: Mapping[str, Tensor], rest: Mapping[str, Any]) -> dict[str, Any]:
    """The inverse of ``flatten``."""
    state: dict[str, Any] = {}
    for key, value in (*tensors.items(), *rest.items()):
        member, index, name = key.split(".", 2)
        values = state.setdefault(member, {"state": {}})["state"].setdefault(int(index), {})
        values[name] = value
    return state


def _named(checkpoints: Path, *, damaged: bool) -> list[Path]:
    names = ((path, _NAME.fullmatch(path.name)) for path in checkpoints.glob("step-*"))
    return sorted((p for p, name in names if name and bool(name[2]) == damaged), key=_step_of)


def _step_of(folder: Path) -> int:
    name = _NAME.fullmatch(folder.name)
    assert name is not None
    return int(name[1])


def _folder_name(step: int) -> str:
    return f"step-{step:06d}"


def _require_same_settings(directory: CheckpointDirectory, settings: Mapping[str, Any]) -> None:
    saved = directory.config
    settings = json.loads(json.dumps(settings))  # a pattern of layers is a list in a file
    for key in sorted(settings.keys() & saved.keys()):  # what only one names shows in the shapes
        if settings[key] != saved[key]:
            raise ValueError(
                f"{directory.config_path} has {key}={saved[key]}, the settings of the run have "
                f"{key}={settings[key]}; the settings of a model cannot change after its first "
                "step."
            )


def _require_same_dtypes(directory: CheckpointDirectory, expected: Mapping[str, Tensor]) -> None:
    for name in sorted(directory.tensors.keys() & expected.keys()):
        dtype = directory.tensors[name].entry.dtype
        if DTYPES.get(dtype) != expected[name].dtype:
            raise ValueError(
                f"{directory.path}: {name} is of {dtype}, the settings need {expected[name].dtype}."
            )


def _same_optimiser(fresh: Mapping[str, Any] | None, saved: Mapping[str, Any] | None) -> bool:
    """Whether the saved state is about the parameters that this member moves, or is empty."""
    if fresh is None:
        return False
    indices = {index for group in fresh["param_groups"] for index in group["params"]}
    return saved is None or saved["state"].keys() <= indices


def write_tensors(tensors: Mapping[str, Tensor], path: Path) -> None:
    """Write a safetensors file."""
    with system_errors(path):
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path)


def _load_optimiser(folder: Path) -> dict[str, Tensor]:
    """The tensors of the optimiser's state, from one file or from those of several processes."""
    several = (folder / OPTIMISER_INDEX).exists()
    tensors: dict[str, Tensor] = {}
    for name in indexed_headers(folder, OPTIMISER_INDEX) if several else [OPTIMISER]:
        with system_errors(folder / name):
            tensors |= load_file(folder / name)
    return tensors
