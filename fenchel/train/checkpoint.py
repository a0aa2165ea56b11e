"""Checkpoints that can be trusted: complete and verified, or not there.

    checkpoints/step-000123/
        model.safetensors       weights in their training dtype
        optimiser.safetensors   every tensor of the optimiser's state
        config.json             the model's settings
        state.json              Progress, and what of the optimiser's state is not a tensor
        manifest.json           size and SHA-256 of the others, sealed

A folder is committed by one rename (fenchel/files.py); the newest intact one is what a run
resumes from. The learning rate, the batches and dropout are functions of the seed and the
step, so a step number is all that they need to go on.
"""

import json
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from fenchel.files import Damaged, NoSpace, committed, read_json, require_space, verify

MODEL, OPTIMISER = "model.safetensors", "optimiser.safetensors"
CONFIG, STATE = "config.json", "state.json"


class Stateful(Protocol):
    """An optimiser, or several behind one."""

    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: dict[str, Any]) -> None: ...


@dataclass(frozen=True)
class Progress:
    """How far a run has come: all that a step number alone does not tell."""

    step: int = 0
    tokens: int = 0
    seconds: float = 0.0
    """Time spent training before this moment, over all resumes."""
    skipped: tuple[int, ...] = ()
    """Steps whose loss or gradient was not finite."""
    loss_sum: float = 0.0
    """Sum of losses since the last line of metrics."""
    loss_count: int = 0
    best: float | None = None
    best_step: int | None = None
    metrics_bytes: int = 0


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
    if path.exists():
        try:
            verify(path)
            return path  # a resume that made no step; the bits would be the same
        except Damaged:
            path.rename(path.with_name(f"{path.name}.damaged"))
    header = {"format": 1, "step": progress.step, "torch": torch.__version__}
    try:
        with committed(path, header) as folder:
            save_file({k: v.contiguous() for k, v in weights.items()}, folder / MODEL)
            save_file(tensors, folder / OPTIMISER)
            (folder / CONFIG).write_text(json.dumps(settings, indent=1) + "\n")
            state = {**asdict(progress), "optimiser": rest}
            (folder / STATE).write_text(json.dumps(state, indent=1) + "\n")
    except (OSError, SafetensorError) as error:
        if isinstance(error, NoSpace) or "space" in str(error).lower():
            raise NoSpace(
                f"no space: a checkpoint of {size / 2**20:.1f} MiB does not fit in {checkpoints}."
            ) from error
        raise
    return path


def restore(folder: Path, model: torch.nn.Module, optimiser: Stateful) -> Progress:
    """Fill ``model`` and ``optimiser`` with what a verified checkpoint holds."""
    state = read_json(folder / STATE)
    weights = load_file(folder / MODEL)
    for name, tensor in weights.items():
        if bad := int((~tensor.isfinite()).sum()):
            raise ValueError(f"{folder / MODEL}: {name} holds {bad} values that are not finite.")
    model.load_state_dict(weights, strict=True)
    groups = optimiser.state_dict()
    saved = unflatten(load_file(folder / OPTIMISER), state["optimiser"])
    for member, fresh in groups.items():  # rates and decays come from the settings of today
        fresh["state"] = saved.get(member, {}).get("state", {})
    optimiser.load_state_dict(groups)
    known = {field.name for field in fields(Progress)}
    values = {key: value for key, value in state.items() if key in known}
    return Progress(**{**values, "skipped": tuple(values.get("skipped", ()))})


def folders(checkpoints: Path) -> list[Path]:
    """All checkpoints that were committed, oldest first."""
    committed_ones = (p for p in checkpoints.glob("step-*") if p.name[5:].isdigit())
    return sorted(committed_ones, key=lambda p: int(p.name[5:]))


def newest(checkpoints: Path) -> tuple[Path | None, list[str]]:
    """The newest intact checkpoint, and a sentence for each newer one that is not."""
    passed_over = []
    for folder in reversed(folders(checkpoints)):
        try:
            verify(folder)
            return folder, passed_over
        except Damaged as error:
            passed_over.append(f"{folder.name} is passed over: {error}")
    return None, passed_over


def rotate(checkpoints: Path, *, keep: int, best_step: int | None) -> None:
    """Delete the oldest beyond ``keep``, never the best; a half-deleted one is never read."""
    for folder in folders(checkpoints)[:-keep]:
        if int(folder.name[5:]) != best_step:
            trash = folder.rename(folder.with_name(f"{folder.name}.tmp-trash"))
            shutil.rmtree(trash, ignore_errors=True)


def flatten(state: Mapping[str, Any]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors of {member: {"state": {index: {name: value}}}} by dotted name, and the rest."""
    tensors: dict[str, Tensor] = {}
    rest: dict[str, Any] = {}
    for member, whole in state.items():
        for index, values in whole["state"].items():
            for name, value in values.items():
                key = f"{member}.{index}.{name}"
                if isinstance(value, Tensor):
                    tensors[key] = value.contiguous()
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
