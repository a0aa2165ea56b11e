"""fenchel/cli/__init__.py: help at once, mistakes in one sentence."""

import subprocess
import sys
import warnings
from dataclasses import fields
from typing import Any

import pytest

from fenchel.cli import COMMANDS, LESS_MEMORY, main
from fenchel.files import Notice
from fenchel.model import ModelConfig
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
    for word in LESS_MEMORY[command].replace(",", " ").split():
        if word.startswith("--"):
            assert word in flags
        elif "." in word:
            section, name = word.split(".")
            classes: dict[str, Any] = {"model": ModelConfig, "train": TrainConfig}
            assert name in {field.name for field in fields(classes[section])}

    def exhausted(*_: object, **__: object) -> int:
        raise MemoryError

    monkeypatch.setattr("fenchel.cli.app", exhausted)
    assert main([command]) == 2
    assert capsys.readouterr().err.endswith(f"; {LESS_MEMORY[command]}.\n")
