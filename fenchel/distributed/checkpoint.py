"""Checkpoints of several processes, and the loop that takes, evaluates and saves together.

    checkpoints/step-000123/
        model-00001-of-00002.safetensors        whole tensors, each written by its owner
        model.safetensors.index.json            the file of every tensor, as in Hugging Face's
        optimiser-00001-of-00002.safetensors    the state of the parameters of an owner
        optimiser.safetensors.index.json
        config.json, state.json, manifest.json  by rank 0, as in one process

A checkpoint is complete and verified, or absent, whichever process ends at which moment:

    1.  rank 0 makes the temporary folder and gives its name to all
    2.  every rank writes its files, flushes and hashes them: hashing is parallel, too
    3.  names and hashes, or the sentence of what went wrong, are gathered by all
    4.  rank 0 writes the indexes, settings and state, seals the folder and renames it
    5.  all learn that it is there

A failure in any step is raised on every rank, and rank 0 removes the folder. Tensors are whole and
numbered as in one process, so a checkpoint is read by any number of processes, and nothing in it is
pickled.
"""

import json
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from signal import Signals
from typing import Any

from fenchel.checkpoints import run_checkpoint
from fenchel.checkpoints.directory import INDEX, OPTIMISER_INDEX
from fenchel.checkpoints.run_checkpoint import Progress
from fenchel.distributed.cells import CellStepper
from fenchel.distributed.owners import Owners
from fenchel.distributed.processes import World
from fenchel.files import (
    NoSpace,
    StorageFailed,
    committed,
    describe,
    full_disk_as_no_space,
    sha256,
    sync,
)
from fenchel.train import Loop, RunDir
from fenchel.train.loop import StopSignals


def save(
    checkpoints: Path,
    progress: Progress,
    owners: Owners,
    settings: Mapping[str, Any],
) -> None:
    """Commit one checkpoint together; NoSpace or StorageFailed on every rank, with nothing left."""
    world, weights = owners.world, owners.owned_tensors
    if world.size == 1:
        state = owners.optimiser.state_dict()
        run_checkpoint.save(checkpoints, progress, weights, state, settings)
        return
    tensors, rest = run_checkpoint.flatten(owners.optimiser.state_dict())
    own = run_checkpoint.tensor_bytes(weights) + run_checkpoint.tensor_bytes(tensors)
    counts = world.gather([len(weights), len(tensors), own, rest])
    size = sum(row[2] for row in counts)
    together = {key: value for row in counts for key, value in row[3].items()}
    digests: dict[str, str] = {}
    with ExitStack() as stack:
        folder = ""
        with _Agreed(world) as agreed:
            if world.first:
                path = run_checkpoint.make_room(checkpoints, progress.step, size)
                header = run_checkpoint.manifest_header(progress)
                folder = str(stack.enter_context(committed(path, header, digests)))
        agreed.require(size, checkpoints)
        at = Path(world.share(folder))
        written: dict[str, list[Any]] = {}
        with _Agreed(world) as agreed, full_disk_as_no_space(at):
            for kind, part, mine in (("model", 0, weights), ("optimiser", 1, tensors)):
                if mine:
                    name = _file_name(kind, world.rank, [row[part] for row in counts])
                    run_checkpoint.write_tensors(mine, at / name)
                    sync(at / name)
                    nbytes = run_checkpoint.tensor_bytes(mine)
                    written[name] = [sha256(at / name), sorted(mine), nbytes]
        agreed.require(size, checkpoints)
        files = {name: row for one in world.gather(written) for name, row in one.items()}
        with _Agreed(world) as agreed:
            if world.first:
                digests |= {name: row[0] for name, row in files.items()}
                with full_disk_as_no_space(at):
                    for kind, index in (("model", INDEX), ("optimiser", OPTIMISER_INDEX)):
                        part_of = {n: f for n, f in files.items() if n.startswith(f"{kind}-")}
                        _write_index(at / index, part_of)
                    run_checkpoint.write_settings_and_state(at, settings, progress, together)
                stack.close()  # seals the folder and renames it
        agreed.require(size, checkpoints)


class _Agreed:
    """Context manager: a storage error on any rank is raised on all ranks."""

    def __init__(self, world: World) -> None:
        self.world, self.error = world, ["", ""]

    def __enter__(self) -> "_Agreed":
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> bool:
        if error is not None and not isinstance(error, OSError):
            return False
        if isinstance(error, OSError):
            known = isinstance(error, NoSpace | StorageFailed)
            sentence = str(error) if known else describe(error)
            self.error = ["space" if isinstance(error, NoSpace) else "storage", sentence]
        return True

    def require(self, size: int, checkpoints: Path) -> None:
        """Raise the first error of any rank, on every rank."""
        for kind, sentence in self.world.gather(self.error):
            if kind == "space":
                raise run_checkpoint.does_not_fit(size, checkpoints)
            if kind:
                raise StorageFailed(f"{sentence.rstrip('.')}; the checkpoint was not written.")


def _file_name(kind: str, rank: int, counts: list[int]) -> str:
    """The file of a rank, numbered among those that have tensors.

    >>> _file_name("model", 2, [3, 0, 5])
    'model-00002-of-00002.safetensors'
    """
    number, total = sum(map(bool, counts[: rank + 1])), sum(map(bool, counts))
    return f"{kind}-{number:05d}-of-{total:05d}.safetensors"


def _write_index(path: Path, files: Mapping[str, list[Any]]) -> None:
    """{"metadata": {"total_size": bytes}, "weight_map": {tensor: file}}."""
    if not files:  # an optimiser without state
        return
    index = {
        "metadata": {"total_size": sum(row[2] for row in files.values())},
        "weight_map": {tensor: file for file, row in files.items() for tensor in row[1]},
    }
    path.write_text(json.dumps(index, indent=1) + "\n", encoding="utf-8")


class ReadOnlyRunDir(RunDir):
    """The run directory as every rank but the first has it: nothing is written."""

    def log(self, line: Mapping[str, Any]) -> None:
        """Rank 0 writes the metrics."""

    def flush(self) -> int:
        """Only rank 0 has the size of the metrics."""
        return 0

    def write_json(self, name: str, value: Mapping[str, Any]) -> None:
        """Rank 0 writes all files."""


class DistributedLoop(Loop):
    """The loop of several processes, or of one in cells: the same decisions on all ranks."""

    stepper: CellStepper

    def _stop_signal(self, signals: StopSignals) -> Signals | None:
        number = self.stepper.world.largest(signals.first or 0)
        return Signals(number) if number else None

    def _affordable_steps(self, seconds: float) -> int:
        return self.stepper.world.share(super()._affordable_steps(seconds))  # by one clock

    def _not_finite(self) -> tuple[str, int] | None:
        owners = self.stepper.owners
        found = owners.world.gather(run_checkpoint.not_finite(owners.owned_tensors))
        return next(((name, count) for name, count in filter(None, found)), None)

    def _flush(self) -> int:
        size, checkpoints = 0, self.run.checkpoints
        with _Agreed(self.stepper.world) as agreed:
            size = super()._flush()
        agreed.require(0, checkpoints)
        return size

    def _commit(self) -> None:
        """Write the checkpoint of this step before the next one: all ranks agree on its files."""
        save(self.run.checkpoints, self.progress, self.stepper.owners, self.settings)
        self._committed(self.progress)

    def _rotate(self, best_step: int | None) -> None:
        if self.stepper.world.first:
            super()._rotate(best_step)
