"""Processes that exchange values by gloo, forked from one that has loaded torch already.

torchrun starts each process anew and gives it its rank by the environment. Loading torch takes
longer than a test, so here the parent forks, sets the same environment in each child, and another
process keeps the store in which they meet, as that of torchrun does.
"""

import json
import os
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch._dynamo
import torch.distributed.fsdp
from torch.distributed import TCPStore

import fenchel.cli.train
import fenchel.pipeline  # noqa: F401
from fenchel.cli import main
from fenchel.distributed.processes import World, start

Work = Callable[[World], Any]
"""What a process does; its plain result is returned to the parent."""


class Ended(NamedTuple):
    """How the processes of a command ended, by rank."""

    codes: list[int]
    output: list[str]
    """What each printed, on both streams."""


class Launcher:
    """Runs a function in several processes at once."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __call__(
        self, processes: int, work: Work, *, seconds: float = 60.0, per_node: int | None = None
    ) -> list[Any]:
        """The results by rank; an exception in a process is one here.

        ``per_node`` of the processes are a machine of their own to themselves; None is all of them.
        """

        def child(_: int, file: Path) -> int:
            return self._child(work, file, seconds)

        codes, texts = self._fork(processes, child, per_node)
        assert codes == [0] * processes, "\n".join(texts)
        return [json.loads(text) for text in texts]

    def command(
        self,
        processes: int,
        *words: object,
        before: Callable[[int], object] = lambda _: None,
        per_node: int | None = None,
        restarts: int = 0,
    ) -> Ended:
        """``fenchel WORDS`` in every process; ``before`` is called with the rank in each.

        Where one fails all are started again so often, with the same store.
        """

        def child(rank: int, file: Path) -> int:
            handle = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
            os.dup2(handle, 1)
            os.dup2(handle, 2)
            sys.stdout, sys.stderr = (os.fdopen(n, "w", buffering=1) for n in (1, 2))
            torch.set_num_threads(1)
            before(rank)
            try:
                return main([str(word) for word in words])
            except BaseException:
                traceback.print_exc()
                return 99

        codes, texts = self._fork(processes, child, per_node, restarts)
        assert 99 not in codes, "\n".join(texts)
        return Ended(codes, [" ".join(text.split()) for text in texts])

    def _fork(
        self,
        processes: int,
        child: Callable[[int, Path], int],
        per_node: int | None,
        restarts: int = 0,
    ) -> tuple[list[int], list[str]]:
        """The exit codes of ``child(rank, file)`` in forked processes, and what the files hold."""
        sys.stdout.flush()
        sys.stderr.flush()
        agent, port = keep_store()
        files = [self.folder / f"rank-{rank}-of-{processes}" for rank in range(processes)]
        for attempt in range(restarts + 1):
            children = []
            for rank, file in enumerate(files):
                file.unlink(missing_ok=True)
                if not (process := os.fork()):
                    if processes > 1:
                        environment(rank, processes, port, per_node or processes, attempt)
                    try:
                        os._exit(child(rank, file))
                    finally:
                        os._exit(98)
                children.append(process)
            codes = [os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) for process in children]
            if not any(codes):
                break
        os.kill(agent, signal.SIGKILL)
        os.waitpid(agent, 0)
        return codes, [file.read_text() if file.exists() else "no answer" for file in files]

    @staticmethod
    def _child(work: Work, file: Path, seconds: float) -> int:
        try:
            torch.set_num_threads(1)
            world = start("cpu", seconds=seconds)
            file.write_text(json.dumps(work(world)))
            world.close()
        except BaseException:
            file.write_text(traceback.format_exc())
            return 1
        return 0


def keep_store() -> tuple[int, int]:
    """A process that keeps a store, and its port.

    Not this process: its threads and sockets would be forked with it, and exchanges would hang.
    """
    read, write = os.pipe()
    if not (agent := os.fork()):
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        os.write(write, str(store.port).encode())
        while True:
            signal.pause()
    port = int(os.read(read, 16))
    os.close(read)
    os.close(write)
    return agent, port


def environment(rank: int, processes: int, port: int, per_node: int, attempt: int) -> None:
    """What torchrun sets."""
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(processes),
        LOCAL_RANK=str(rank % per_node),
        LOCAL_WORLD_SIZE=str(per_node),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        TORCHELASTIC_USE_AGENT_STORE="True",
        TORCHELASTIC_RESTART_COUNT=str(attempt),
    )


@pytest.fixture(scope="session")
def launch(tmp_path_factory: pytest.TempPathFactory) -> Launcher:
    return Launcher(tmp_path_factory.mktemp("ranks"))
