"""Checkpoints that can be trusted: complete and verified, or not there.

    checkpoints/step-000123/
        model.safetensors       weights in their training dtype
        optimiser.safetensors   every tensor of the optimiser's state
        config.json             the model's settings
        state.json              Progress, and what of the optimiser's state is not a tensor
        manifest.json           format, step, size and SHA-256 of the others, sealed

A folder is committed by one rename (fenchel/files.py); the newest intact one is what a run
resumes from. The learning rate, the batches and dropout are functions of the seed and the
step, so a step number is all that they need to go on. One that turns out to be damaged is set
aside under the name step-000123.damaged until its step has been taken again.
"""

import json
import os
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from fenchel.config import from_mapping
from fenchel.files import Damaged, NoSpace, committed, discard, read_json, require_space, verify

FORMAT = 1
MODEL, OPTIMISER = "model.safetensors", "optimiser.safetensors"
CONFIG, STATE = "config.json", "state.json"
_NAME = re.compile(r"step-(\d+)(\.damaged)?")


class Stateful(Protocol):
    """An optimiser, or several behind one: {member: {"state": ..., "param_groups": ...}}."""

    def state_dict(self) -> dict[str, Any]:
        """What the optimiser remembers, and its settings."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The other way round."""


@dataclass(frozen=True, kw_only=True)
class Progress:
    """How far a run has come: all that a step number alone does not tell."""

    step: int = 0
    """Steps behind us, skipped ones included."""
    tokens: int = 0
    """Targets learnt from; those of skipped steps are not counted."""
    seconds: float = 0.0
    """Time spent training before this moment, over all resumes."""
    skipped: tuple[int, ...] = ()
    """Steps whose loss or gradient was not finite, numbered as in the metrics."""
    loss_sum: float = 0.0
    """Sum of losses since the last line of metrics."""
    loss_count: int = 0
    """How many losses that is."""
    best: float | None = None
    """Lowest validation loss so far."""
    best_step: int | None = None
    """The step that had it."""
    metrics_bytes: int = 0
    """Length of metrics.jsonl at this moment; what is beyond has yet to happen again."""
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
    path = checkpoints / f"step-{progress.step:06d}"
    if path.exists():  # from a time line that a resume from further back has left
        set_aside(path)
    header = {"format": FORMAT, "step": progress.step, "torch": torch.__version__}
    state = {**asdict(progress), "optimiser": rest}
    try:
        with committed(path, header) as folder:
            _save_file(weights, folder / MODEL)
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
    """Fill ``model`` and ``optimiser`` with what a checkpoint that passed ``check`` holds."""
    state = read_json(folder / STATE)
    _require_same_settings(folder / CONFIG, settings)
    weights = _load_file(folder / MODEL)
    _require_fit(folder / MODEL, weights, model.state_dict())
    groups = optimiser.state_dict()
    saved = unflatten(_load_file(folder / OPTIMISER), state.pop("optimiser", {}))
    for member in groups.keys() | saved.keys():
        if not _same_optimiser(groups.get(member), saved.get(member)):
            raise ValueError(f"{folder} was saved by another optimiser than the settings ask for.")
        groups[member]["state"] = saved.get(member, {}).get("state", {})
    progress = from_mapping(Progress, state)
    model.load_state_dict(dict(weights), strict=True)
    optimiser.load_state_dict(groups)  # rates and decays are those of today's settings
    return progress


def check(folder: Path) -> None:
    """Refuse a checkpoint with a byte out of place, or under the name of another step."""
    manifest = verify(folder)
    version, step = manifest.get("format"), manifest.get("step")
    if isinstance(version, int) and version > FORMAT:
        raise ValueError(
            f"{folder} has format {version}, this fenchel reads up to {FORMAT}; "
            "use the newer fenchel that wrote it."
        )
    if version != FORMAT or step != _step_of(folder):
        raise Damaged(f"{folder} holds step {step} of format {version}, not what its name says.")


def folders(checkpoints: Path) -> list[Path]:
    """All checkpoints that were committed, oldest first."""
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
    """Rename a checkpoint so that it is neither resumed from nor counted, and still there."""
    aside = folder.with_name(f"{folder.name}.damaged")
    if aside.exists():
        discard(aside)
    folder.rename(aside)


def rotate(checkpoints: Path, *, keep: int, best_step: int | None) -> None:
    """Delete the oldest beyond ``keep``, never the best, and what was set aside up to here."""
    there = folders(checkpoints)
    old = [folder for folder in there[:-keep] if _step_of(folder) != best_step]
    done = max(map(_step_of, there), default=-1)
    again = [f for f in _named(checkpoints, damaged=True) if _step_of(f) <= done]
    for folder in (*old, *again):
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
    found = ((path, _NAME.fullmatch(path.name)) for path in checkpoints.glob("step-*"))
    return sorted((p for p, name in found if name and bool(name[2]) == damaged), key=_step_of)


def _step_of(folder: Path) -> int:
    name = _NAME.fullmatch(folder.name)
    assert name is not None
    return int(name[1])


def _require_same_settings(path: Path, settings: Mapping[str, Any]) -> None:
    there = read_json(path)
    settings = json.loads(json.dumps(settings))  # a pattern of layers is a list in a file
    for key in sorted(settings.keys() & there.keys()):  # what only one names shows in the shapes
        if settings[key] != there[key]:
            raise ValueError(
                f"{path} says {key} is {there[key]}, the settings of the run say {settings[key]}; "
                "the settings of a model cannot change in a run that has begun."
            )


def _require_fit(path: Path, weights: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> None:
    for name in sorted(weights.keys() | wanted.keys()):
        if name not in weights:
            raise ValueError(f"{path} lacks {name}, which the settings ask for.")
        if name not in wanted:
            raise ValueError(f"{path} holds {name}, which the settings have no place for.")
        came, asked = ((tuple(t.shape), t.dtype) for t in (weights[name], wanted[name]))
        if came != asked:
            raise ValueError(f"{path}: {name} is {came}, the settings ask for {asked}.")
    if bad := not_finite(weights):
        raise ValueError(f"{path}: {bad[0]} holds {bad[1]} values that are not finite.")


def _same_optimiser(fresh: Mapping[str, Any] | None, saved: Mapping[str, Any] | None) -> bool:
    """Whether the saved state is about the parameters that this member moves, or is empty."""
    if fresh is None:
        return False
    indices = {index for group in fresh["param_groups"] for index in group["params"]}
    return saved is None or saved["state"].keys() <= indices


def _save_file(tensors: Mapping[str, Tensor], path: Path) -> None:
    try:
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path)
    except SafetensorError as error:  # it tells the number of a system's error only in words
        told = re.search(r"\(os error (\d+)\)", str(error))
        if told is None:
            raise
        raise OSError(int(told[1]), os.strerror(int(told[1])), str(path)) from error


def _load_file(path: Path) -> dict[str, Tensor]:
    try:
        return load_file(path)
    except SafetensorError as error:
        raise Damaged(f"{path} is not a safetensors file ({error}).") from None
