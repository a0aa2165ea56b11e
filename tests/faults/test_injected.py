"""tests/fuzz/faults.py in its small form: errors and kills at calls on the file system, readers."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import fenchel


@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler: calls cannot be intercepted")
def test_after_any_fault_or_kill_a_run_ends_with_the_bytes_of_one_never_disturbed(
    tmp_path: Path,
) -> None:
    out = tmp_path / "rows.json"
    counts = "--faults 15 --kills 6 --flips 0 --reads 10 --processes 0 --seed 11".split()
    ended = subprocess.run(
        [sys.executable, "-m", "tests.fuzz.faults", *counts, "--out", str(out)],
        cwd=Path(fenchel.__file__).parents[1],
        env={**os.environ, "PYTHONPATH": str(Path(fenchel.__file__).parents[1])},
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 0, ended.stderr
    faults, kills, reads = json.loads(out.read_text())
    assert faults["first_failures"] == []
    assert set(faults["exit_codes"]) <= {"0", "2", "4"}
    assert set(faults["exit_codes"]) & {"2", "4"}, "no fault was noticed"
    assert kills["first_failures"] == []
    assert kills["exit_codes"]["-9"] >= 5
    assert reads["read"] == 10, reads
