"""Checkpoints of a run: complete and verified, or absent.

    checkpoints/step-000123/
        model.safetensors       weights in their training dtype
        optimiser.safetensors   every tensor of the optimiser's state
        config.json             the ModelConfig
        state.json              Progress, and the optimiser's state that is not tensors
        manifest.json           format, step, size and SHA-256 of the others, sealed

A folder is committed by one rename (``fenchel.files``); a run resumes from the newest intact one.
The learning rate, the batches and dropout are functions of the seed and the step, so resuming
needs no more of them than the step number. A damaged checkpoint is renamed to step-000123.damaged
until its step has been taken again.

``check`` stands in front of every reader, of ``load`` and of ``restore`` alike: it verifies the
seal, the format and the step. Format 2 renamed the parameters of the model.
"""

import json
import os
import re
import warnings
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from fenchel.checkpoints.directory import (
    DTYPES,
    WEIGHTS,
    CheckpointDirectory,
    read_bounded_json,
    read_headers,
)
from fenchel.checkpoints.weights import read_state_dict
from fenchel.config import from_mapping
from fenchel.files import (
    Damaged,
    NoSpace,
    Notice,
    committed,
    discard,
    read_json,
    require_space,
    verify,
)
from fenchel.model.families.config_reader import CONFIG

FORMAT = 2
"""The format of a run directory and of its checkpoints."""
CHECKPOINTS = "checkpoints"
OPTIMISER, STATE = "optimiser.safetensors", "state.json"
_NAME = re.compile(r"step-(\d+)(\.damaged)?")


class Stateful(Protocol):
    """An optimiser, or several behind one: {member: {"state": ..., "param_groups": ...}}."""

    def state_dict(self) -> dict[str, Any]:
        """The state per parameter, and the settings of the groups."""

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
    """Lowest validation loss so far."""
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
    optimiser: Stateful,
    settings: Mapping[str, Any],
) -> Path:
    """Commit one checkpoint; NoSpace when the disk cannot take it, with nothing left behind."""
    tensors, rest = flatten(optimiser.state_dict())
    size = sum(t.numel() * t.element_size() for t in (*weights.values(), *tensors.values()))
    require_space(checkpoints, int(1.2 * size) + 2**16)
    path = checkpoints / _folder_name(progress.step)
    if path.exists():  # from a time line that a resume from further back has left
        set_aside(path)
    header = {"format": FORMAT, "step": progress.step, "torch": torch.__version__}
    state = {**asdict(progress), "optimiser": rest}
    try:
        with committed(path, header) as folder:
            _save_file(weights, folder / WEIGHTS)
            _save_file(tensors, folder / OPTIMISER)
            (folder / CONFIG).write_text(json.dumps(settings, indent=1) + "\n")
            (folder / STATE).write_text(json.dumps(state, indent=1) + "\n")
    except NoSpace as error:
        raise NoSpace(
            f"no space: a checkpoint of {size / 2**20:.1f} MiB does not fit in {checkpoints}."
        ) from error
    return path


def restore(
    folder: Path, model: torch.nn.Module, optimiser: Stateful, settings: Mapping[str, Any]
) -> Progress:
    """Fill ``model`` and ``optimiser`` from a checkpoint that passed ``check``."""
    directory = open_folder(folder)
    _require_same_settings(directory, settings)
    expected = model.state_dict()
    _require_same_dtypes(directory, expected)
    weights = read_state_dict(directory, expected)
    state = read_json(folder / STATE)
    groups = optimiser.state_dict()
    saved = unflatten(_load_file(folder / OPTIMISER), state.pop("optimiser", {}))
    for member in groups.keys() | saved.keys():
        if not _same_optimiser(groups.get(member), saved.get(member)):
            raise ValueError(f"{folder} was saved by another optimiser than the settings ask for.")
        groups[member]["state"] = saved.get(member, {}).get("state", {})
    progress = from_mapping(Progress, state)
    model.load_state_dict(weights, strict=True)
    optimiser.load_state_dict(groups)  # rates and decays are those of today's settings
    return progress


def is_run(path: Path) -> bool:
    """Whether a directory is that of a run; if not, it may be a Hugging Face directory."""
    return (path / CHECKPOINTS).is_dir()


def open_checkpoint(run: Path, which: str = "newest") -> CheckpointDirectory:
    """The newest intact checkpoint of a run, or the best if it is intact.

    Damaged checkpoints are skipped with a warning; one of another format is refused.
    """
    folder, damaged = newest(run / CHECKPOINTS)
    if folder is not None and which == "best":
        best = read_json(folder / STATE).get("best_step")
        named = folder.with_name(_folder_name(best)) if type(best) is int else folder
        if named != folder and named.is_dir():
            try:
                check(named)
                folder = named
            except Damaged as error:
                damaged[named] = str(error)
    for skipped, reason in damaged.items():
        warnings.warn(f"{skipped.name} is skipped: {reason}", Notice, stacklevel=4)
    if folder is None:
        raise ValueError(f"{run} holds no intact checkpoint.")
    return open_folder(folder)


def open_folder(folder: Path) -> CheckpointDirectory:
    """Settings and tensor table of a checkpoint that passed ``check``."""
    return CheckpointDirectory(folder, read_bounded_json(folder, CONFIG), read_headers(folder))


def check(folder: Path) -> None:
    """Refuse a checkpoint with a byte out of place, of another format or of another step."""
    manifest = verify(folder)
    version, step = manifest.get("format"), manifest.get("step")
    if type(version) is not int:
        raise Damaged(f"{folder} has no format.")
    require_format(version, folder)
    if step != _step_of(folder):
        raise Damaged(f"{folder} holds step {step} of format {version}, not what its name says.")


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


def folders(checkpoints: Path) -> list[Path]:
    """All committed checkpoints, oldest first."""
    return _named(checkpoints, damaged=False)


def newest(checkpoints: Path) -> tuple[Path | None, dict[Path, str]]:
    """The newest intact checkpoint, and what is wrong with each newer one."""
    wrong: dict[Path, str] = {}
    for folder in reversed(folders(checkpoints)):
        try:
            check(folder)
            return folder, wrong
        except Damaged as error:
            wrong[folder] = str(error)
    return None, wrong


def set_aside(folder: Path) -> None:
    """Rename a checkpoint so that it is kept but neither resumed from nor counted."""
    aside = folder.with_name(f"{folder.name}.damaged")
    if aside.exists():
        discard(aside)
    folder.rename(aside)


def rotate(checkpoints: Path, *, keep: int, best_step: int | None) -> None:
    """Delete the oldest beyond ``keep``, never the best, and renamed ones up to the newest step."""
    committed_folders = folders(checkpoints)
    old = [folder for folder in committed_folders[:-keep] if _step_of(folder) != best_step]
    newest_step = max(map(_step_of, committed_folders), default=-1)
    retaken = [f for f in _named(checkpoints, damaged=True) if _step_of(f) <= newest_step]
    for folder in (*old, *retaken):
        with suppress(OSError):  # an old one too many does no harm; the next rotation tries again
            discard(folder)


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
                f"{directory.path}: {name} is of {dtype}, the settings ask for "
                f"{expected[name].dtype}."
            )


def _same_optimiser(fresh: Mapping[str, Any] | None, saved: Mapping[str, Any] | None) -> bool:
    """Whether the saved state is about the parameters that this member moves, or is empty."""
    if fresh is None:
        return False
    indices = {index for group in fresh["param_groups"] for index in group["params"]}
    return saved is None or saved["state"].keys() <= indices


def _save_file(tensors: Mapping[str, Tensor], path: Path) -> None:
    try:
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path)
    except SafetensorError as error:  # it gives the errno only in its message
        errno = re.search(r"\(os error (\d+)\)", str(error))
        if errno is None:
            raise
        raise OSError(int(errno[1]), os.strerror(int(errno[1])), str(path)) from error


def _load_file(path: Path) -> dict[str, Tensor]:
    try:
        return load_file(path)
    except SafetensorError as error:
        raise Damaged(f"{path} is not a safetensors file ({error}).") from None
