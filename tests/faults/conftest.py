"""Real processes that train a tiny model and come to grief, cheaply.

Importing torch takes longer than training twelve thousand parameters, so the parent imports
everything once and each process is forked from it: the command itself runs in the child, with
whatever mischief the test has prepared for it there.
"""

import json
import mmap
import os
import random
import shutil
import signal
import struct
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch._dynamo  # noqa: F401  an optimiser loads it at its first step, for four seconds

import fenchel.cli.train
import fenchel.pipeline  # noqa: F401  loaded once, before any process is forked
from fenchel.checkpoints import run_checkpoint
from fenchel.cli import main
from fenchel.files import sha256
from fenchel.train.checkpoint_writer import CheckpointWriter
from fenchel.train.step import Stepper

STEPS, SAVE_EVERY = 40, 5
SETTINGS = (
    "text.vocabulary=280",
    "model.context=16",
    "model.width=16",
    "model.layers=2",
    "model.heads=2",
    "model.dropout=0.1",
    "train.batch=4",
    "train.accumulate=2",
    "train.threads=1",
    "train.keep=3",
    f"train.steps={STEPS}",
    f"train.save_every={SAVE_EVERY}",
    "train.evaluate_every=10",
    "train.evaluate_tokens=64",
    "train.log_every=5",
)
Mischief = Callable[[], object]
"""Something done in the child before its command runs."""


class Ended(NamedTuple):
    """How a process ended: its exit code, or minus the signal; what it said; steps begun."""

    code: int
    said: str
    step: int


class Child:
    """A process running one command."""

    def __init__(self, words: list[str], log: Path, mischief: Mischief | None) -> None:
        self.log = log
        self._step = mmap.mmap(-1, 8)  # shared with the child
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = os.fork()
        if not self.pid:
            try:
                os._exit(self._run(words, mischief))
            except BaseException:
                traceback.print_exc()
                sys.stderr.flush()
            finally:
                os._exit(99)

    def _run(self, words: list[str], mischief: Mischief | None) -> int:
        handle = os.open(self.log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        os.dup2(handle, 1)
        os.dup2(handle, 2)
        sys.stdout, sys.stderr = (os.fdopen(n, "w", buffering=1) for n in (1, 2))
        take = Stepper.__call__

        def count(stepper: Stepper, step: int) -> Any:
            self._step[:] = struct.pack("q", step)
            return take(stepper, step)

        Stepper.__call__ = count  # type: ignore[method-assign]
        if mischief is not None:
            mischief()
        code = main(words)
        sys.stdout.flush()
        return code

    def alive(self) -> bool:
        """Whether it still runs; it stays a zombie until it is waited for."""
        return os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None

    def wait(self) -> Ended:
        _, status = os.waitpid(self.pid, 0)
        code = os.waitstatus_to_exitcode(status)
        said = self.log.read_text() if self.log.exists() else ""
        assert code != 99, said  # a traceback
        return Ended(code, " ".join(said.split()), struct.unpack("q", self._step[:])[0])


class Lab:
    """Starts processes and compares what they leave."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.text = folder, folder / "text.txt"
        draw = random.Random(0)
        words = "the people of these States have peace and trade with every nation".split()
        lines = (" ".join(draw.choices(words, k=9)) for _ in range(80))
        self.text.write_text("\n".join(lines))

    def start(self, *words: object, mischief: Mischief | None = None) -> Child:
        log = self.folder / f"log-{random.randrange(2**60)}"
        return Child(["train", *map(str, words)], log, mischief)

    def begin(
        self, run: Path, *words: object, text: Path | None = None, mischief: Mischief | None = None
    ) -> Ended:
        return self.start(*self.beginning(run, text), *words, mischief=mischief).wait()

    def beginning(self, run: Path, text: Path | None = None) -> list[object]:
        flags = [word for setting in SETTINGS for word in ("--set", setting)]
        return ["--text", text or self.text, "--out", run, *flags]

    def resume(self, run: Path, *words: object, mischief: Mischief | None = None) -> Ended:
        return self.start("--resume", run, *words, mischief=mischief).wait()

    @staticmethod
    def at_step(step: int, act: Callable[[], object]) -> Mischief:
        """Do something when step number ``step`` (from 1) begins."""

        def prepare() -> None:
            take = Stepper.__call__

            def watched(stepper: Stepper, number: int) -> Any:
                if number + 1 == step:
                    act()
                return take(stepper, number)

            Stepper.__call__ = watched  # type: ignore[method-assign]

        return prepare

    def signalled(self, step: int, by: signal.Signals = signal.SIGTERM) -> Mischief:
        """Be signalled in the middle of step number ``step``."""
        return self.at_step(step, lambda: os.kill(os.getpid(), by))

    @staticmethod
    def story(run: Path) -> dict[str, Any]:
        """All of a run that must be the same bits, however often it was stopped."""
        folder, wrong = run_checkpoint.newest(run / "checkpoints")
        assert folder is not None
        assert not wrong
        state = json.loads((folder / "state.json").read_text())
        for name in ("seconds", "metrics_bytes"):  # they measure time, or lines that tell it
            state.pop(name)
        lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
        same = [{k: x[k] for k in x if not k.startswith("time/") and k != "crc"} for x in lines]
        return {
            "step": folder.name,
            "weights": sha256(folder / "model.safetensors"),
            "optimiser": sha256(folder / run_checkpoint.OPTIMISER),
            "state": state,
            "metrics": same,
            "sample": (run / "sample.json").read_text(),
            "validation": json.loads((run / "summary.json").read_text()).get("validation"),
        }

    @staticmethod
    def kept(run: Path) -> list[int]:
        """The steps of the checkpoints that are there."""
        return [int(folder.name[5:]) for folder in run_checkpoint.folders(run / "checkpoints")]

    @staticmethod
    def written_at_once() -> None:
        """Write every checkpoint before the next step begins."""
        start = CheckpointWriter.start

        def start_and_wait(writer: CheckpointWriter, write: Callable[[], None]) -> None:
            start(writer, write)
            writer.close()

        CheckpointWriter.start = start_and_wait  # type: ignore[method-assign]

    @staticmethod
    def left_over(run: Path) -> list[str]:
        """What dead writers and damage have left in a run."""
        return [str(p) for p in run.rglob("*") if ".tmp" in p.name or ".damaged" in p.name]


@pytest.fixture(scope="session")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Lab:
    return Lab(tmp_path_factory.mktemp("lab"))


@pytest.fixture(scope="session")
def whole(lab: Lab) -> dict[str, Any]:
    """The story of a run that nothing befell."""
    run = lab.folder / "whole"
    ended = lab.begin(run)
    assert ended.code == 0, ended.said
    return lab.story(run)


@pytest.fixture(scope="session")
def half(lab: Lab) -> Path:
    """A run stopped after step 23 of 40, with checkpoints of steps 15, 20 and 23. Copy it."""
    run = lab.folder / "half"
    ended = lab.begin(run, mischief=lab.signalled(23))
    assert ended.code == 128 + signal.SIGTERM, ended.said
    return run


@pytest.fixture
def halfway(half: Path, tmp_path: Path) -> Iterator[Path]:
    """A copy of that run, to be done harm to."""
    run = tmp_path / "run"
    shutil.copytree(half, run)
    yield run
    shutil.rmtree(run)
