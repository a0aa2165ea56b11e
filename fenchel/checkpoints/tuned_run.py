"""The checkpoint that a run tunes, as the run records it.

    base/                      files of that checkpoint beside its weights: tokenizer, templates
    base/manifest.json         sealed; where the checkpoint is, the SHA-256 of its weights, and the
                               adapters that the run trains, if it trains adapters

A run that trains all weights needs the checkpoint until it has written its first. A run that trains
adapters keeps only these in its checkpoints, and is read as the checkpoint with its adapters
merged; it needs the checkpoint as long as it is used.
"""

import hashlib
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch

from fenchel.checkpoints.run_checkpoint import BASE
from fenchel.config import from_mapping, to_mapping
from fenchel.files import Damaged, committed, discard, read_manifest
from fenchel.model.lora import LoraConfig
from fenchel.model.transformer import Transformer


class TunedCheckpoint(NamedTuple):
    """What a run records of the checkpoint that it tunes."""

    path: Path
    weights: str
    """The SHA-256 of its weights."""
    conversations: bool
    """Whether the run reads conversations, and not texts."""
    lora: LoraConfig | None
    """The adapters of the run; None where it trains all weights."""

    def require_same(self, model: Transformer) -> None:
        """Refuse a model of other weights."""
        if weights_sha256(model) != self.weights:
            raise ValueError(
                f"{self.path} has other weights than when the run began that tunes it; put the old "
                "ones back, or start a new run."
            )


def write_base(run: Path, checkpoint: TunedCheckpoint, files: Mapping[str, bytes]) -> None:
    """Write the folder base of a run; one of a start that was killed is replaced."""
    header: dict[str, Any] = {
        "kind": BASE,
        "checkpoint": str(checkpoint.path),
        "weights": checkpoint.weights,
        "conversations": checkpoint.conversations,
    }
    if checkpoint.lora is not None:
        header["lora"] = to_mapping(checkpoint.lora)
    if (run / BASE).exists():
        discard(run / BASE)
    with committed(run / BASE, header) as folder:
        for name, content in files.items():
            (folder / name).write_bytes(content)


def read_base(run: Path) -> TunedCheckpoint | None:
    """The checkpoint that a run tunes; None where it trains a model from the start."""
    if not (run / BASE).is_dir():
        return None
    record = read_manifest(run / BASE)
    values = [record.get(name) for name in ("checkpoint", "weights", "conversations")]
    path, weights, conversations = values
    lora = record.get("lora")
    if (
        not isinstance(path, str)
        or not isinstance(weights, str)
        or not isinstance(conversations, bool)
        or not isinstance(lora, dict | None)
    ):
        raise Damaged(f"{run / BASE} does not name the checkpoint that the run tunes.")
    config = None if lora is None else from_mapping(LoraConfig, lora)
    return TunedCheckpoint(Path(path), weights, conversations, config)


def bases(run: Path) -> list[Path]:
    """The checkpoints that a run needs in order to be read: it tunes one, which may tune another.

    Of a run whose record cannot be read there are none: it is refused when it is.
    """
    found: list[Path] = []
    with suppress(ValueError, OSError):
        while (base := read_base(run)) is not None and base.path not in found:
            found.append(run := base.path)
    return found


def weights_sha256(model: Transformer) -> str:
    """The SHA-256 of the names, dtypes, shapes and bytes of all weights."""
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
        digest.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy())
    return digest.hexdigest()
