"""fenchel/train/hardware.py: memory that stays with the process."""

import subprocess
import sys

PROGRAM = """
import resource, sys
import torch
from fenchel.train import retain_freed_memory

if sys.argv[1] == "kept":
    assert retain_freed_memory()
def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(20):  # the first few find their places
    before = faults()
    torch.ones(2**25)  # 128 MB, forgotten at once
print(faults() - before)
"""


def pages_cleared(word: str) -> int:
    """Pages that the system cleared for the twentieth tensor of a size."""
    ran = subprocess.run(
        [sys.executable, "-c", PROGRAM, word], capture_output=True, text=True, check=True
    )
    return int(ran.stdout)


def test_kept_memory_is_not_cleared_by_the_system_again() -> None:
    assert pages_cleared("given back") > 10_000 > 100 > pages_cleared("kept")
