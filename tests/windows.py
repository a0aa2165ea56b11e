"""The suite on Windows, or with Windows in the place of this system.

    python -m tests.windows                       # every part of PARTS
    python -m tests.windows -x tests/cli          # some, with options of pytest

On Windows that is pytest; on Linux it is ``pytest -p tests.windows``, with this file as a plug-in.
Tests that look at POSIX itself are marked ``needs_posix`` and left out by tests/conftest.py.

``operating_system.Windows`` serves the tests, here and in the processes that they start, with
stand-ins for what it calls: an ``msvcrt`` whose locks belong to an open file and cover bytes, like
those of Windows, and a ``kernel32`` with the processes of this machine. It is loaded before
anything of fenchel. What no stand-in shows is left to the workflow that runs on Windows itself:
that an open file cannot be renamed or removed, drive letters, and the encoding of the console.
"""

import os
import struct
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

if sys.platform != "win32":
    import fcntl

SITE = Path(__file__).parent / "windows_site"
ROOT = SITE.parents[1]
PARTS = (
    "tests/test_files.py tests/test_operating_system.py tests/choice tests/attention tests/model "
    "tests/sensitivity tests/optim tests/data tests/checkpoints tests/report tests/train "
    "tests/pipeline tests/generation tests/server tests/cli tests/faults"
).split()
"""The parts of the suite that can depend on the system, after those of mathematics."""


def locking(handle: int, mode: int, count: int) -> None:
    """msvcrt.locking: a region from the current position, refused if another file has it."""
    writable = fcntl.fcntl(handle, fcntl.F_GETFL) & os.O_ACCMODE != os.O_RDONLY
    kind = fcntl.F_UNLCK if mode == 0 else fcntl.F_WRLCK if writable else fcntl.F_RDLCK
    start = os.lseek(handle, 0, os.SEEK_CUR)
    region = struct.pack("hhqqi4x", kind, os.SEEK_SET, start, count, 0)
    try:
        fcntl.fcntl(handle, fcntl.F_OFD_SETLK, region)
    except OSError as error:
        raise PermissionError(13, "Permission denied") from error


class Kernel:
    """The functions of kernel32.dll that are called."""

    def OpenProcess(self, _access: int, _inherit: bool, process: int) -> int:
        return process if Path(f"/proc/{process}").exists() else 0

    def GetLastError(self) -> int:
        return 87  # no such process

    def GetExitCodeProcess(self, handle: int, code: Any) -> int:
        code._obj.value = 259 if handle else 0
        return 1

    def CloseHandle(self, _handle: int) -> int:
        return 1

    def GetPhysicallyInstalledSystemMemory(self, kibibytes: Any) -> int:
        kibibytes._obj.value = 2**23
        return 1


def install() -> None:
    """Take the place of this system in the process, before fenchel is imported."""
    assert not {"fenchel.files", "fenchel.cli"} & set(sys.modules)
    import fenchel.operating_system as system

    msvcrt = SimpleNamespace(locking=locking, LK_UNLCK=0, LK_NBLCK=2)
    system._module = {"msvcrt": msvcrt}.__getitem__  # in sys.modules, subprocess would see it too
    system._kernel = Kernel
    system.SYSTEM = system.Windows()


def pytest_load_initial_conftests() -> None:
    """As a plug-in: before conftest.py imports fenchel, here and in every process from here on."""
    install()
    inherited = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    paths = dict.fromkeys([str(SITE), str(ROOT), *inherited])
    os.environ["PYTHONPATH"] = os.pathsep.join(paths)


def main(words: list[str]) -> int:
    """Run the parts of the suite that ``words`` name, or all, by options of pytest among them."""
    plugin = [] if sys.platform == "win32" else ["-p", "tests.windows"]
    parts = [] if any(word.startswith("tests") for word in words) else PARTS
    command = [sys.executable, "-m", "pytest", *plugin, *words, *parts]
    paths = filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    return subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
