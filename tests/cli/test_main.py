"""fenchel/cli/__init__.py: help at once, mistakes in one sentence."""

import os
import subprocess
import sys
import warnings
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from fenchel.cli import COMMANDS, LESS_MEMORY, main
from fenchel.files import Notice
from fenchel.model import ModelConfig
from fenchel.pipeline.config import TuneConfig
from fenchel.train.config import TrainConfig


def test_help_and_mistakes_load_neither_torch_nor_numpy() -> None:
    probe = (
        "import sys, contextlib, io\n"
        "from fenchel.cli import COMMANDS, main\n"
        "with contextlib.redirect_stdout(io.StringIO()):\n"
        "    for words in (['--help'], ['trian'], *([c, '--help'] for c in COMMANDS)):\n"
        "        with contextlib.redirect_stderr(io.StringIO()):\n"
        "            main(words)\n"
        "print(sorted({'torch', 'numpy', 'tokenizers'} & set(sys.modules)))"
    )
    told = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True)
    assert told.stdout.strip() == "[]"


@pytest.mark.parametrize("words", [["--version"], ["generate", "runs/x", "--promt", "a"]])
def test_python_m_fenchel_is_the_console_script(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    as_module = [sys.executable, "-m", "fenchel", *words]
    told = subprocess.run(as_module, capture_output=True, text=True)
    assert told.returncode == main(words)
    assert (told.stdout, told.stderr) == tuple(capsys.readouterr())


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_explains_itself(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command, "--help"]) == 0
    assert COMMANDS[command].split()[0] in capsys.readouterr().out


def test_an_unknown_command_gets_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trian"]) == 2
    assert 'Did you mean "train"' in capsys.readouterr().err


def test_an_unknown_flag_gets_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "runs/x", "--promt", "a"]) == 2
    assert "--prompt" in capsys.readouterr().err


def test_an_unknown_benchmark_gets_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "atention"]) == 2
    assert "did you mean attention_cpu?" in capsys.readouterr().err


def test_a_notice_is_a_sentence_and_other_warnings_stay_what_they_are(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def warn(*_: object, **__: object) -> int:
        warnings.warn("a file says\nsomething odd", Notice, stacklevel=1)
        warnings.warn("old", DeprecationWarning, stacklevel=1)
        return 0

    monkeypatch.setattr("fenchel.cli.app", warn)
    with pytest.warns(DeprecationWarning, match="old") as others:
        assert main([]) == 0
    assert [one.category for one in others] == [DeprecationWarning]
    assert capsys.readouterr().err == "fenchel: a file says something odd\n"


def test_completion_can_be_installed_for_every_shell() -> None:
    from fenchel.cli import app

    for shell in ("bash", "zsh", "fish"):
        script = app.generate_completion(prog_name="fenchel", shell=shell)  # type: ignore[arg-type]
        assert all(command in script for command in COMMANDS)


@pytest.mark.parametrize("command", LESS_MEMORY)
def test_the_advice_on_memory_names_flags_and_settings_that_exist(
    command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main([command, "--help"]) == 0
    flags = capsys.readouterr().out
    sections: dict[str, Any] = {"model": ModelConfig, "train": TrainConfig, "tune": TuneConfig}
    for word in LESS_MEMORY[command].replace(",", " ").split():
        if word.startswith("--"):
            assert word in flags
        elif "." in word:
            section, name = word.partition("=")[0].split(".")
            assert name in {field.name for field in fields(sections[section])}

    def exhausted(*_: object, **__: object) -> int:
        raise MemoryError

    monkeypatch.setattr("fenchel.cli.app", exhausted)
    assert main([command]) == 2
    assert capsys.readouterr().err.endswith(f"; {LESS_MEMORY[command]}.\n")


def closed_pipe(*words: str) -> subprocess.CompletedProcess[str]:
    """A command whose reader has gone before it writes."""
    ours, theirs = os.pipe()
    os.close(ours)
    try:
        return subprocess.run(
            [sys.executable, "-m", "fenchel", *words],
            stdout=theirs,
            stderr=subprocess.PIPE,
            text=True,
        )
    finally:
        os.close(theirs)


@pytest.mark.parametrize("words", [["--help"], ["settings"], ["train", "--help"], ["--version"]])
def test_a_closed_pipe_ends_a_command_in_silence(words: list[str]) -> None:
    ended = closed_pipe(*words)
    assert (ended.returncode, ended.stderr) == (141, "")


@pytest.mark.parametrize("command", ["generate", "report"])
def test_a_closed_pipe_ends_a_command_on_a_run_in_silence(
    command: str, run_directory: Path
) -> None:
    ended = closed_pipe(command, str(run_directory))
    assert ended.returncode == 141
    assert "fenchel: " not in ended.stderr
    assert "Broken pipe" not in ended.stderr


@pytest.mark.parametrize("module", ["cyclopts", "rich.progress", "numpy", "torch"])
def test_ctrl_c_while_a_module_is_imported_is_one_sentence(module: str, tmp_path: Path) -> None:
    probe = (
        "import os, signal, sys\n"
        "class Finder:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        f"        if name == {module!r}:\n"
        "            try:\n"
        "                os.kill(os.getpid(), signal.SIGINT)\n"
        "                sum(range(1000))\n"
        "            except KeyboardInterrupt:  # as the import of numpy does\n"
        "                raise RecursionError from None\n"
        "sys.meta_path.insert(0, Finder())\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        f"sys.argv = ['fenchel', 'train', '--out', {str(tmp_path / 'run')!r}]\n"
        "from fenchel.__main__ import main\n"
        "sys.exit(main())\n"
    )
    ended = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True)
    assert ended.returncode == 130
    assert ended.stderr == "fenchel: stopped at once; what was saved before is unchanged.\n"
    assert not (tmp_path / "run").exists()


def test_a_second_ctrl_c_ends_a_command_that_swallows_the_first() -> None:
    probe = (
        "import os, signal, sys\n"
        "import fenchel.cli\n"
        "def stubborn():\n"
        "    for _ in range(2):\n"
        "        try:\n"
        "            os.kill(os.getpid(), signal.SIGINT)\n"
        "        except BaseException as error:\n"
        "            print(repr(error.args[0]), flush=True)\n"
        "fenchel.cli.main = stubborn\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "from fenchel.__main__ import main\n"
        "sys.exit(main())\n"
    )
    ended = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True)
    assert ended.stdout == "<Signals.SIGINT: 2>\n"
    assert ended.returncode == 130
    assert ended.stderr.count("\n") == 1


def test_an_error_of_the_system_names_the_file(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError(24, "Too many open files", "runs/a/metrics.jsonl")

    monkeypatch.setattr("fenchel.cli.app", fail)
    assert main([]) == 2
    assert capsys.readouterr().err == "fenchel: runs/a/metrics.jsonl: too many open files\n"
