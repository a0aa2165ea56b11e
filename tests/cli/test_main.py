"""fenchel/cli/__init__.py: help at once, mistakes in one sentence."""

import ast
import json
import os
import re
import subprocess
import sys
import warnings
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from fenchel.cli import COMMANDS, EXAMPLES, LESS_MEMORY, TASKS, main, reference
from fenchel.files import Notice
from fenchel.model import ModelConfig
from fenchel.pipeline.config import TuneConfig
from fenchel.train.config import TrainConfig

HEAVY = "torch numpy tokenizers safetensors transformers pandas marimo altair starlette uvicorn"
LOOKED_UP = [["settings"], ["list", "presets"], ["list", "families"], ["list", "checkpoints"]]


def test_help_mistakes_and_what_is_looked_up_load_nothing_heavy() -> None:
    probe = (
        "import sys, contextlib, io\n"
        "from fenchel.cli import COMMANDS, main\n"
        "with contextlib.redirect_stdout(io.StringIO()):\n"
        "    help = [[], *([c] for c in COMMANDS)]\n"
        f"    for words in (*([*c, '--help'] for c in help), ['trian'], *{LOOKED_UP}):\n"
        "        with contextlib.redirect_stderr(io.StringIO()):\n"
        "            main(words)\n"
        f"        loaded = sorted(set({HEAVY.split()}) & set(sys.modules))\n"
        "        assert not loaded, (words, loaded)"
    )
    told = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True)
    assert told.returncode == 0, told.stderr


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
    assert "there is no command 'trian'; did you mean train?" in capsys.readouterr().err
    assert main(["version"]) == 2
    assert "did you mean fenchel --version?" in capsys.readouterr().err


def test_a_flag_that_is_missing_and_one_without_its_value_are_told_apart(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["plan"]) == main(["plan", "--gpus"]) == main(["generate"]) == 2
    missing, empty, directory = capsys.readouterr().err.splitlines()
    assert missing == "fenchel: --gpus is missing; --help lists what the command takes."
    assert "--gpus" in empty
    assert "requires an argument" in empty
    assert "DIRECTORY is missing" in directory


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


TORCHLESS = """
import contextlib, io, json, sys
from fenchel.cli import main
answers = []
for words in json.loads(sys.argv[1]):
    err = io.StringIO()
    with contextlib.redirect_stderr(err), contextlib.redirect_stdout(io.StringIO()):
        code = main(words)
    answers.append([code, "torch" in sys.modules, err.getvalue()])
print(json.dumps(answers))
"""


def test_what_needs_no_torch_loads_none(tmp_path: Path) -> None:
    """Constants and refusals take a fraction of a second, torch takes seconds to import."""
    (tmp_path / "empty.txt").write_bytes(b"")
    (tmp_path / "latin.txt").write_bytes("mädchen".encode("latin-1"))
    (tmp_path / "utf16.txt").write_bytes("mädchen".encode("utf-16-le"))
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    wanted = {
        "list texts": "",
        "list presets": "",
        "list families": "",
        "list runs": "",
        "settings": "",
        "settings optim.l": "",
        "settings optm": "did you mean optim",
        "generate nodir": "there is no run directory or checkpoint nodir",
        "generate run --temperature -1": "--temperature",
        "generate run --top-p 2": "--top-p",
        "chat nodir": "there is no run directory",
        "chat run": "has no chat template",
        "serve nodir": "there is no run directory",
        "eval nodir": "there is no run directory",
        "eval run --text nowhere.txt": "there is no text",
        "inspect run --text nowhere.txt": "there is no text",
        "certify run --text nowhere.txt --radius 1": "there is no text",
        "convert nodir out": "there is no run directory",
        "tune nodir --text sotu": "there is no run directory",
        "attach nodir": "there is no run directory",
        "attach run": "fenchel convert run OUT",
        "plan gpt3 --gpus 8": "did you mean 'gpt2'",
        "train --text nowhere.txt": "there is no text",
        "train --text empty.txt": "is empty",
        "train --text latin.txt": "iconv -f WINDOWS-1252 -t UTF-8",
        "train --text utf16.txt": "iconv -f UTF-16LE -t UTF-8",
        "train --budget 1m --steps 3": "not both",
    }
    lines = json.dumps([line.split() for line in wanted])
    ended = subprocess.run(
        [sys.executable, "-c", TORCHLESS, lines],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    answers = json.loads(ended.stdout)
    for (line, sentence), (code, loaded, said) in zip(wanted.items(), answers, strict=True):
        assert not loaded, line
        assert code == (2 if sentence else 0), (line, said)
        assert sentence in " ".join(said.split()), (line, said)


def test_the_tables_that_need_no_torch_are_those_of_the_classes() -> None:
    assert reference.read() == json.loads(json.dumps(reference.compute())), (
        "fenchel/cli/reference.json is old: run python -m fenchel.cli.reference"
    )


def test_every_command_has_a_task_and_an_example_of_its_own_flags(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert [name for names in TASKS.values() for name in names] == list(COMMANDS)
    assert main(["--help"]) == 0
    shown = capsys.readouterr().out
    assert shown.index(" train ") < shown.index(" generate ") < shown.index("--version")
    assert "docs/" not in shown
    for name in COMMANDS:
        assert main([name, "--help"]) == 0
        shown = capsys.readouterr().out
        example = EXAMPLES[name]
        assert example in " ".join(shown.split())
        assert "docs/" not in shown
        assert not [flag for flag in re.findall(r"--[a-z-]+", example) if flag not in shown]
        assert "[default: False]" not in shown
        assert "[default: ()]" not in shown


def strings(tree: ast.Module) -> Iterator[str]:
    """The strings of a file that are no docstrings of modules, classes, functions or names."""
    alone = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in alone:
            yield node.value


def test_no_message_names_a_page_that_a_wheel_lacks() -> None:
    assert list(strings(ast.parse("'docs/a.md'\nf('docs/b.md')"))) == ["docs/b.md"]
    package = Path(reference.__file__).parents[1]
    found = {
        path.name: text
        for path in package.rglob("*.py")
        if not path.is_relative_to(package / "lessons")
        for text in strings(ast.parse(path.read_text()))
        if "docs/" in text and "python docs/" not in text
    }
    assert found == {}
    assert "docs/" not in reference.FILE.read_text()
