"""fenchel bench: runs a benchmark of fenchel and its peers in one process and prints ratios.

The benchmarks are part of the source tree and not of the package, since they need the peers.
"""

import subprocess
import sys
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from fenchel.config import did_you_mean

FOLDER = Path(__file__).parents[2] / "benchmarks"


def run(
    name: str,
    /,
    *options: Annotated[str, Parameter(allow_leading_hyphen=True)],
) -> int:
    """Run a benchmark of the source tree: fenchel and its peers in one process.

    Parameters
    ----------
    name
        The name of its file, such as attention_cpu, or without _cpu.
    options
        Options of the benchmark itself, such as --quick for optim.
    """
    known = sorted(path.stem for path in FOLDER.glob("*.py")) if FOLDER.is_dir() else []
    known = [stem for stem in known if stem not in ("__main__", "harness")]
    if not known:
        raise ValueError(
            "the benchmarks are in the source tree of fenchel; run the command from there."
        )
    chosen = next((stem for stem in known if stem in (name, f"{name}_cpu")), None)
    if chosen is None:
        hint = did_you_mean(name, known, show=str, cutoff=0.4)
        raise ValueError(f"there is no benchmark {name!r}; {hint}")
    return subprocess.run(
        [sys.executable, "-m", "benchmarks", chosen, *options],
        cwd=FOLDER.parent,
        check=False,
    ).returncode
