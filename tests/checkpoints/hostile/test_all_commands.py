"""tests/fuzz/hostile_directories.py in its small form: every command, random changes."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]


def test_forty_hostile_directories_over_all_commands() -> None:
    """In a process of its own, which forks: it must have no other threads."""
    words = ["tests.fuzz.hostile_directories", "--directories", "40", "--seed", "77", "--dry"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    ran = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", *words],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert ran.returncode == 0, (ran.stdout + ran.stderr)[-4000:]
    assert "\n0 violations" in ran.stdout
