"""Many processes on one run directory: exactly one trains."""

import signal
import time
from pathlib import Path
from typing import Any

import pytest

STARTS = 12


@pytest.mark.parametrize("how", ["begin", "resume"])
def test_of_many_starts_one_trains_and_the_others_name_it(
    lab: Any, whole: dict[str, Any], halfway: Path, tmp_path: Path, how: str
) -> None:
    """F16. The one that trains waits in its first step until all others have gone."""
    run = halfway if how == "resume" else tmp_path / "new"
    words = ["--resume", run] if how == "resume" else lab.beginning(run)
    go = tmp_path / "go"

    def wait() -> None:
        while not go.exists():
            time.sleep(0.01)

    first = 24 if how == "resume" else 1
    children = [lab.start(*words, mischief=lab.at_step(first, wait)) for _ in range(STARTS)]
    while sum(child.alive() for child in children) > 1:
        time.sleep(0.01)
    (winner,) = (child for child in children if child.alive())
    go.touch()
    for child in children:
        ended = child.wait()
        if child is winner:
            assert ended.code == 0
        else:
            assert ended.code == 2
            assert f"is being written by process {winner.pid} on " in ended.said
            assert ended.step == 0
    assert lab.story(run) == whole
    assert not lab.left_over(run)


def test_the_lock_of_a_killed_run_is_free(lab: Any, halfway: Path) -> None:
    import os

    ended = lab.resume(halfway, mischief=lab.at_step(24, lambda: os.kill(os.getpid(), 9)))
    assert ended.code == -signal.SIGKILL
    assert (halfway / "run.lock").read_text()
    assert lab.resume(halfway, mischief=lab.signalled(25)).code == 128 + signal.SIGTERM
