"""Triton is optional: torch has no copy of it on macOS, on Windows and in its CPU builds."""

import subprocess
import sys

PACKAGES = "cli, pipeline, inspection, hf, generation, evaluate, report, optim, train"


def test_the_package_imports_where_triton_is_missing() -> None:
    code = "import sys; sys.modules['triton'] = None\n"
    code += "import " + ", ".join(f"fenchel.{name}" for name in PACKAGES.split(", "))
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
