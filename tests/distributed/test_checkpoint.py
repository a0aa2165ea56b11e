"""fenchel/distributed/checkpoint.py: runs of several processes, stopped, resumed and refused.

The commands are those of a user; the processes are forked (conftest.py) instead of by torchrun.
"""

import errno
import json
import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from fenchel.checkpoints import load_model, run_checkpoint
from fenchel.distributed.cells import CellStepper
from fenchel.files import locked, verify
from fenchel.pipeline import task

STEPS = 12
SETTINGS = {
    "text.vocabulary": 270,
    "model.context": 16,
    "model.width": 16,
    "model.layers": 2,
    "model.heads": 2,
    "model.dropout": 0.1,
    "optim.optimiser": "score",
    "train.batch": 8,
    "train.cells": 4,
    "train.threads": 1,
    "train.steps": STEPS,
    "train.save_every": 4,
    "train.evaluate_every": 6,
    "train.evaluate_tokens": 640,
    "train.log_every": 3,
    "train.timeout": 60,
}


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    draw = random.Random(0)
    words = "the people of these States have peace and trade with every nation".split()
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("\n".join(" ".join(draw.choices(words, k=9)) for _ in range(80)))
    return path


def beginning(run: Path, text: Path, **changes: Any) -> list[object]:
    settings = {**SETTINGS, **{k.replace("__", "."): v for k, v in changes.items()}}
    flags = [word for name, value in settings.items() for word in ("--set", f"{name}={value}")]
    return ["train", "--text", text, "--out", run, *flags]


def at_step(step: int, rank: int, act: Callable[[], object]) -> Callable[[int], None]:
    """Do something on one rank when step number ``step`` (from 1) begins."""

    def before(here: int) -> None:
        take = CellStepper.__call__

        def watched(stepper: CellStepper, number: int) -> Any:
            if number + 1 == step and here == rank:
                act()
            return take(stepper, number)

        CellStepper.__call__ = watched  # type: ignore[method-assign]

    return before


def stop(step: int, rank: int) -> Callable[[int], None]:
    return at_step(step, rank, lambda: os.kill(os.getpid(), signal.SIGTERM))


def tensors(folder: Path) -> dict[str, bytes]:
    """Every tensor of a checkpoint, weights and optimiser, as bytes."""
    weights = load_model(folder.parents[1], which="newest").state_dict()
    state = run_checkpoint._load_optimiser(folder)
    return {name: x.numpy().tobytes() for name, x in (*weights.items(), *state.items())}


def story(run: Path) -> dict[str, Any]:
    """All of a run that must not depend on its processes."""
    folder, wrong = run_checkpoint.newest(run / "checkpoints")
    assert folder is not None
    assert not wrong
    state = json.loads((folder / "state.json").read_text())
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return {
        "step": folder.name,
        "tensors": tensors(folder),
        "state": {k: v for k, v in state.items() if k not in ("seconds", "metrics_bytes")},
        "metrics": [
            {k: x[k] for k in x if not k.startswith("time/") and k != "crc"} for x in lines
        ],
        "sample": (run / "sample.json").read_text(),
        "validation": json.loads((run / "summary.json").read_text()).get("validation"),
    }


@pytest.fixture(scope="module")
def whole(launch, text: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The story of a run of one process that nothing befell."""
    run = tmp_path_factory.mktemp("whole") / "run"
    ended = launch.command(1, *beginning(run, text))
    assert ended.codes == [0], ended.output
    return story(run)


def test_stopped_and_resumed_by_other_numbers_of_processes(launch, text, whole, tmp_path) -> None:
    """2, 1, 3 that divide the weights, 4 as two machines that do, 2 again: the same bits."""
    run = tmp_path / "run"
    ended = launch.command(2, *beginning(run, text), before=stop(4, rank=1))
    assert ended.codes == [128 + signal.SIGTERM] * 2, ended.output
    assert "stopped by SIGTERM after step 4" in ended.output[0]
    assert ended.output[1] == ""
    folder = run / "checkpoints" / "step-000004"
    assert {"model-00001-of-00002.safetensors", "optimiser-00002-of-00002.safetensors"} <= {
        file.name for file in folder.iterdir()
    }
    ended = launch.command(1, "train", "--resume", run, before=stop(7, rank=0))
    assert ended.codes == [128 + signal.SIGTERM], ended.output
    assert (run / "checkpoints" / "step-000007" / "model.safetensors").exists()
    ended = launch.command(
        3, "train", "--resume", run, "--set", "train.shard=full", before=stop(9, rank=2)
    )
    assert ended.codes == [128 + signal.SIGTERM] * 3, ended.output
    assert "train.shard is now full: the run goes on." in ended.output[0]
    assert ended.output[1:] == ["", ""]
    words = ("--resume", run, "--set", "train.shard=node")
    ended = launch.command(4, "train", *words, per_node=2, before=stop(10, rank=3))
    assert ended.codes == [128 + signal.SIGTERM] * 4, ended.output
    ended = launch.command(2, "train", "--resume", run)
    assert ended.codes == [0] * 2, ended.output
    assert story(run) == whole


SWITCHES = {
    "limits": {
        "optim__optimiser": "trust",
        "optim__output_change": 0.1,
        "model__norm": "layer",
        "model__bias": "true",
        "train__qk_clip": 0.5,
        "train__entropy_floor": 2.0,
    },
    "sigma": {"optim__optimiser": "muon", "model__sigma_reparam": "true"},
}


@pytest.mark.parametrize("name", SWITCHES)
def test_switches_are_resumed_by_another_number_of_processes(
    launch, text, tmp_path, name: str
) -> None:
    """Begun by 2 that divide the weights, which rank 0 alone draws; resumed by 1."""
    one, two = tmp_path / "one", tmp_path / "two"
    settings = {**SWITCHES[name], "train__steps": 4, "train__evaluate_every": 4}
    ended = launch.command(1, *beginning(one, text, **settings))
    assert ended.codes == [0], ended.output
    words = beginning(two, text, **settings, train__shard="full")
    ended = launch.command(2, *words, before=stop(3, rank=1))
    assert ended.codes == [128 + signal.SIGTERM] * 2, ended.output
    ended = launch.command(1, "train", "--resume", two)
    assert ended.codes == [0], ended.output
    assert story(two) == story(one)
    metrics = [line for line in story(one)["metrics"] if "train/loss" in line]
    acts = {"train/clipped_heads", "train/entropy_penalty"} if name == "limits" else set()
    assert all(acts <= line.keys() for line in metrics)


def test_a_checkpoint_of_two_writers_is_sealed_and_indexed(launch, text, tmp_path) -> None:
    run = tmp_path / "run"
    assert launch.command(2, *beginning(run, text, train__steps=2)).codes == [0, 0]
    folder = run / "checkpoints" / "step-000002"
    files = {file.name for file in folder.iterdir()} - {"manifest.json"}
    assert verify(folder)["files"].keys() == files
    weights = load_model(run, which="newest").state_dict()
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == weights.keys()
    assert set(index["weight_map"].values()) == {
        f"model-0000{n}-of-00002.safetensors" for n in (1, 2)
    }
    assert index["metadata"]["total_size"] == sum(4 * x.numel() for x in weights.values())
    assert all(isinstance(x, torch.Tensor) and x.isfinite().all() for x in weights.values())
    name = next(name for name in sorted(files) if name.startswith("optimiser-"))
    data = bytearray((folder / name).read_bytes())
    data[-1] ^= 1
    (folder / name).write_bytes(data)
    damaged = run_checkpoint.newest(run / "checkpoints")[1]
    assert "SHA-256 differs" in damaged[folder]


def full_disk(rank: int) -> Callable[[int], None]:
    """The disk of one rank takes no tensors."""

    def before(here: int) -> None:
        def refuse(*_: Any) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "model")

        if here == rank:
            run_checkpoint.write_tensors = refuse

    return before


def test_a_full_disk_of_one_rank_stops_all_with_one_sentence(launch, text, tmp_path) -> None:
    """A checkpoint on the way is left out; the last one must be written."""
    run = tmp_path / "run"
    ended = launch.command(2, *beginning(run, text, train__steps=6), before=full_disk(1))
    assert ended.codes.count(4) == 1, ended.output
    said = "".join(ended.output)
    assert said.count("The run goes on without this checkpoint") == 1
    assert said.count("fenchel: no space: a checkpoint of") == 1
    assert not list((run / "checkpoints").iterdir())


@pytest.mark.parametrize("words", [["--resume", "nowhere"], ["--set", "train.batch=9"]])
def test_what_is_refused_is_refused_once(launch, words, text) -> None:
    """By rank 0 for all, or by every rank before they meet."""
    if words[0] == "--set":
        words = [*words, "--text", str(text), "--set", "train.cells=2"]
    ended = launch.command(2, "train", *words)
    assert ended.codes == [2, 2]
    assert "".join(ended.output).count("fenchel: ") == 1


ALLOCATION = "DefaultCPUAllocator: can't allocate memory: you tried to allocate 123456789 bytes."


@pytest.mark.parametrize(
    ("error", "sentence"),
    [
        (ValueError("rank 1 has had enough."), "rank 1 has had enough."),
        (RuntimeError(ALLOCATION), "memory ran out (123,456,789 bytes were needed)"),
    ],
)
def test_an_error_of_rank_1_is_printed_once_and_ends_all(
    launch, text, tmp_path, error: Exception, sentence: str
) -> None:
    def fail() -> None:
        raise error

    run = tmp_path / "run"
    ended = launch.command(2, *beginning(run, text), before=at_step(3, 1, fail))
    assert ended.codes == [2, 2]
    assert "".join(ended.output).count("fenchel: ") == 1
    assert f"fenchel: {sentence}" in ended.output[1]


def test_a_process_that_never_comes_is_one_sentence(launch, text, tmp_path) -> None:
    def end(rank: int) -> None:
        if rank == 0:
            os._exit(7)

    words = beginning(tmp_path / "run", text, train__timeout=1)
    ended = launch.command(3, *words, before=end)
    assert ended.codes == [7, 2, 2]
    assert "".join(ended.output).count("fenchel: ") == 1
    assert "rank 0 of this run did not come within 1 s" in "".join(ended.output)


def test_a_restart_by_torchrun_goes_on_with_the_run(launch, text, whole, tmp_path) -> None:
    """The same command, in the same store, after rank 1 was killed: to the bits of no fault.

    The weights are divided, and rank 1 draws none of them.
    """

    def die() -> None:
        if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            os.kill(os.getpid(), signal.SIGKILL)

    def before(rank: int) -> None:
        at_step(6, 1, die)(rank)
        if rank == 1:
            task.build_model = None  # type: ignore[assignment]

    run = tmp_path / "run"
    words = beginning(run, text, train__shard="full")
    ended = launch.command(2, *words, before=before, restarts=1)
    assert ended.codes == [0, 0], ended.output
    assert "Resuming from step-000004" in ended.output[0]
    assert story(run) == whole


def test_a_restart_takes_over_no_run_of_others(launch, text, tmp_path) -> None:
    """A directory that was refused is refused again."""
    run = tmp_path / "run"
    assert launch.command(1, *beginning(run, text, train__steps=1)).codes == [0]
    ended = launch.command(2, *beginning(run, text), restarts=1)
    assert ended.codes == [2, 2]
    assert "holds a run already" in ended.output[0]


def killed_while_saving(rank: int) -> Callable[[int], None]:
    """The process of one rank ends in its second checkpoint, between two of its files."""

    def before(here: int) -> None:
        write, saved = run_checkpoint.write_tensors, []

        def counted(tensors: Any, path: Path) -> None:
            write(tensors, path)
            saved.append(path)
            if here == rank and len(saved) == 3:
                os.kill(os.getpid(), signal.SIGKILL)

        run_checkpoint.write_tensors = counted

    return before


@pytest.mark.parametrize("victim", [0, 1])
def test_a_process_killed_while_it_saves_harms_no_checkpoint(
    launch, text, whole, tmp_path, victim: int
) -> None:
    """One sentence from the other one; the checkpoint before is whole, and resumes to the bit."""
    run = tmp_path / "run"
    words = beginning(run, text, train__evaluate_every=12)
    ended = launch.command(2, *words, before=killed_while_saving(victim))
    assert ended.codes[victim] == -signal.SIGKILL
    assert ended.codes[1 - victim] == 2
    assert "a process of this run has ended or does not answer" in ended.output[1 - victim]
    folder, wrong = run_checkpoint.newest(run / "checkpoints")
    assert folder is not None
    assert folder.name == "step-000004"
    assert not wrong
    ended = launch.command(1, "train", "--resume", run, "--set", "train.evaluate_every=6")
    assert ended.codes == [0], ended.output
    assert not list((run / "checkpoints").glob("*.tmp-*"))
    assert tensors(run / "checkpoints" / f"step-{STEPS:06d}") == whole["tensors"]


def test_a_process_that_does_not_answer_ends_the_run_after_the_timeout(
    launch, text, tmp_path
) -> None:
    run = tmp_path / "run"
    words = beginning(run, text, train__timeout=2)
    ended = launch.command(2, *words, before=at_step(3, 1, lambda: time.sleep(4)))
    assert 0 not in ended.codes
    assert "".join(ended.output).count("fenchel: ") == 1
    assert "a process of this run has ended or does not answer" in ended.output[0]


def test_a_run_that_is_being_written_is_refused_to_all(launch, text, tmp_path) -> None:
    run = tmp_path / "run"
    assert launch.command(1, *beginning(run, text, train__steps=1)).codes == [0]
    with locked(run):
        ended = launch.command(2, "train", "--resume", run)
    assert ended.codes == [2, 2]
    assert ended.output[0].count("is being written by process") == 1
    assert ended.output[1] == ""
