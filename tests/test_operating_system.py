"""fenchel/operating_system.py: one file knows the system, and its Windows passes the same tests."""

import ast
import errno
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import fenchel
from fenchel.data import sandbox
from fenchel.distributed import processes
from fenchel.operating_system import SYSTEM, Posix, System, Windows
from tests.conftest import POSIX
from tests.windows import PARTS

PACKAGE = Path(fenchel.__file__).parent
ROOT = PACKAGE.parent
MODULES = set("fcntl resource termios tty pty pwd grp posix msvcrt winreg _winapi".split())
OF_OS = set(
    "pread pwrite sysconf sched_getaffinity getuid geteuid getgid getsid setsid fork forkpty kill "
    "killpg getpgid mkfifo mknod chown fchmod fchown lockf posix_fallocate posix_fadvise statvfs "
    "O_NOFOLLOW O_NONBLOCK O_CLOEXEC O_DIRECTORY O_BINARY WIFEXITED waitpid uname".split()
)
OF_SIGNAL = set("SIGHUP SIGPIPE SIGKILL SIGUSR1 SIGUSR2 SIGALRM SIGCHLD SIGXCPU alarm".split())
KEYWORDS = {"pass_fds", "start_new_session", "preexec_fn"}


def used(tree: ast.AST) -> Iterator[str]:
    """Names of the lists above that a file uses."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from MODULES & {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names = {alias.name for alias in node.names}
            yield from MODULES & {(node.module or "").partition(".")[0]}
            yield from names & {"os": OF_OS, "signal": OF_SIGNAL}.get(node.module or "", set())
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            yield from {node.attr} & {"os": OF_OS, "signal": OF_SIGNAL}.get(node.value.id, set())
        elif isinstance(node, ast.keyword):
            yield from {node.arg} & KEYWORDS


def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def test_no_other_file_uses_what_some_system_lacks() -> None:
    found = {
        path.relative_to(PACKAGE).as_posix(): set(used(parse(path)))
        for path in PACKAGE.rglob("*.py")
    }
    assert {name for name, names in found.items() if names} == {"operating_system.py"}
    assert found["operating_system.py"] >= {"fcntl", "resource", "pread", "SIGHUP", "pass_fds"}


def test_the_scan_sees_every_form_of_a_use() -> None:
    forms = (
        "import fcntl",
        "from resource import getrlimit",
        "from os import pread",
        "import os; os.kill(1, 9)",
        "from signal import SIGHUP",
        "run(['x'], start_new_session=True)",
    )
    assert all(list(used(ast.parse(form))) for form in forms)
    assert not list(used(ast.parse("import os, signal; os.replace('a', 'b'); signal.SIGINT")))


def without_encoding(tree: ast.AST) -> Iterator[int]:
    """Lines that read or write text in the encoding of the system: on Windows not UTF-8."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        name = getattr(node.func, "attr", getattr(node.func, "id", ""))
        given = any(keyword.arg == "encoding" for keyword in node.keywords)
        given |= len(node.args) > {"read_text": 0, "write_text": 1}.get(name, -1)
        if name in {"read_text", "write_text"} and not given:
            yield node.lineno


def test_every_text_is_read_and_written_as_utf_8() -> None:
    forms = ast.parse("a.read_text()\na.read_text('utf-8')\nb.write_text(x)\nread_text(encoding=y)")
    assert list(without_encoding(forms)) == [1, 3]
    paths = [*PACKAGE.rglob("*.py"), *(ROOT / "examples").glob("*.py")]
    found = {path.name: list(without_encoding(parse(path))) for path in paths}
    assert not {name: lines for name, lines in found.items() if lines}


SIMULATED = (
    "tests/test_files.py tests/train/test_rundir.py tests/faults/test_second_writer.py "
    "tests/faults/test_begun.py tests/checkpoints/test_run_checkpoint.py "
    "tests/cli/test_output_paths.py tests/data/test_chat.py tests/train/test_loop.py "
    "tests/train/test_loop_stop_signals.py"
).split()
"""Files, locks, run directories, outputs, child processes and signals: the quick ones of PARTS."""


@pytest.mark.skipif(sys.platform != "linux", reason="the stand-in is made of locks of Linux")
@pytest.mark.needs_posix("sessions")
def test_the_suite_passes_with_windows_in_the_place_of_this_system() -> None:
    assert isinstance(SYSTEM, Posix)
    assert all(POSIX.values())
    assert all((ROOT / part).exists() for part in PARTS)
    assert all(any(Path(one).is_relative_to(part) for part in PARTS) for one in SIMULATED)
    quick = ["-x", "-k", "not flipped", "-rs", "-p", "no:cacheprovider"]  # no bits of files
    command = [sys.executable, "-m", "tests.windows", *quick, *SIMULATED]
    ran = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert ran.returncode == 0, ran.stdout[-3000:]
    skipped = re.findall(r"^SKIPPED .*: (.*)$", ran.stdout, re.MULTILINE)
    assert {reason.split(",")[0].removeprefix("needs ") for reason in skipped} <= set(POSIX)


HERE = Windows if sys.platform == "win32" else Posix
SYSTEMS = [HERE()] if HERE is Windows else [Posix(), Windows()]
"""Those that can do their work on this machine."""


def test_the_two_systems_have_the_same_operations() -> None:
    public = {name for name in vars(System) | System.__annotations__ if not name.startswith("_")}
    for one in (Posix(), Windows()):
        assert {name for name in dir(one) if not name.startswith("_")} == public
    assert signal.SIGINT in HERE().stop_signals
    assert Windows().stop_signals[:2] == (signal.SIGINT, signal.SIGTERM)


@pytest.mark.parametrize("system", SYSTEMS, ids=lambda system: type(system).__name__)
def test_a_link_and_a_folder_are_not_opened_as_files(system: System, tmp_path: Path) -> None:
    file, link = tmp_path / "file", tmp_path / "link"
    file.write_bytes(b"abc")
    link.symlink_to(file)
    handle = system.open(file, os.O_RDONLY)
    assert system.read_start(handle, 2) == b"ab"
    assert os.read(handle, 3) == b"abc"  # the position has not moved
    os.close(handle)
    with pytest.raises(OSError) as refused:
        system.open(link, os.O_RDONLY)
    assert refused.value.errno == errno.ELOOP
    with pytest.raises(FileNotFoundError):
        system.open(tmp_path / "none", os.O_RDONLY)
    os.close(system.open(tmp_path / "new", os.O_RDWR | os.O_CREAT))


def test_windows_refuses_a_file_that_was_replaced_while_it_was_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, other = tmp_path / "file", tmp_path / "other"
    file.write_bytes(b"mine")
    other.write_bytes(b"theirs")
    opened = os.open

    def swap(path: Path, *rest: int) -> int:
        other.replace(file)
        return opened(path, *rest)

    monkeypatch.setattr(os, "open", swap)
    with pytest.raises(OSError) as refused:
        Windows().open(file, os.O_RDONLY)
    assert refused.value.errno == errno.ELOOP


def test_windows_renames_again_while_another_program_has_the_file_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target = tmp_path / "a", tmp_path / "b"
    source.write_text("new")
    target.write_text("old")
    replace, refusals = Path.replace, [PermissionError(), PermissionError()]

    def scanned(self: Path, to: Path) -> Path:
        if refusals:
            raise refusals.pop()
        return replace(self, to)

    monkeypatch.setattr(Path, "replace", scanned)
    assert Windows().rename(source, target).read_text() == "new"
    monkeypatch.setattr("fenchel.operating_system._RENAME_SECONDS", 0.0)
    refusals.extend([PermissionError()] * 1000)
    with pytest.raises(PermissionError):
        Windows().rename(target, source)


def test_a_folder_replaces_an_empty_one_on_both_systems(tmp_path: Path) -> None:
    for number, system in enumerate(SYSTEMS):
        source, target = tmp_path / f"from-{number}", tmp_path / f"to-{number}"
        source.mkdir()
        (source / "file").touch()
        target.mkdir()
        assert (system.rename(source, target) / "file").exists()


ENDLESS = (
    "import pathlib, sys, time\n"
    "sys.path.insert(0, sys.argv[1])\n"
    "from fenchel.operating_system import SYSTEM\n"
    "pipe = SYSTEM.pipe_of_child(sys.argv[-1])\n"
    "pipe.recv_bytes(); pathlib.Path(sys.argv[3]).touch(); pipe.send_bytes(b'{}')\n"
    "pipe.recv_bytes(); time.sleep(60)"
)


def test_a_child_without_limits_is_ended_by_the_clock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sandbox, "SYSTEM", Windows())
    monkeypatch.setattr(sandbox, "_CHILD", ENDLESS)
    answered = tmp_path / "answered"
    child = sandbox.BoundedProcess(str(answered), "", seconds=0.2, memory=2**30)
    with pytest.raises(sandbox.ChildEnded):
        child.ask("a")
    assert answered.exists()  # it has not ended by itself


def test_several_processes_are_refused_where_they_were_never_tried(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(processes, "SYSTEM", Windows())
    with pytest.raises(ValueError, match="on Linux and macOS only"):
        processes.launch(2, ["train"])
