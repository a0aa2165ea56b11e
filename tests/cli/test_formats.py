"""A run of another format is refused in one sentence by every command that reads a run."""

import json
import shutil
from pathlib import Path

import pytest

from fenchel import files
from fenchel.checkpoints import load
from fenchel.checkpoints.run_checkpoint import FORMAT
from fenchel.cli import main

ADVICE = {1: "use the older fenchel", FORMAT + 1: "use the newer fenchel"}
COMMANDS = {
    "generate": "generate {run} --prompt the",
    "eval": "eval {run} --text {text}",
    "inspect": "inspect {run} --text {text} --max-tokens 8 --json",
    "convert": "convert {run} {out}",
    "resume": "train --resume {run} --steps 25",
}


def reformat(checkpoint: Path, version: int) -> None:
    """Seal a checkpoint again under another format; nothing else about it is wrong."""
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    spare = checkpoint.with_name("spare")
    checkpoint.rename(spare)
    with files.committed(checkpoint, {"format": version, "step": manifest["step"]}) as folder:
        for file in spare.iterdir():
            if file.name != "manifest.json":
                shutil.copy(file, folder)
    shutil.rmtree(spare)


@pytest.fixture(params=ADVICE)
def other(run_directory: Path, tmp_path: Path, request: pytest.FixtureRequest) -> tuple[Path, int]:
    """A run whose checkpoints are of another format, and which."""
    run = Path(shutil.copytree(run_directory, tmp_path / "run"))
    for checkpoint in sorted(run.glob("checkpoints/step-*")):
        reformat(checkpoint, request.param)
    return run, request.param


def sentence(version: int) -> str:
    return f"has format {version}, this fenchel reads format {FORMAT}; {ADVICE[version]}"


@pytest.mark.parametrize("command", COMMANDS)
def test_a_checkpoint_of_another_format_is_refused(
    command: str,
    other: tuple[Path, int],
    text_file: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run, version = other
    places = {"run": run, "text": text_file, "out": tmp_path / "out"}
    assert main([word.format(**places) for word in COMMANDS[command].split()]) == 2
    error = capsys.readouterr().err
    assert sentence(version) in error
    assert [line for line in error.splitlines() if line.startswith("fenchel: ")] == [
        line for line in error.splitlines() if sentence(version) in line
    ]
    assert not (tmp_path / "out").exists()


def test_load_refuses_it(other: tuple[Path, int]) -> None:
    run, version = other
    with pytest.raises(ValueError, match=sentence(version)):
        load(run)


def test_doctor_names_every_checkpoint_of_another_format(
    other: tuple[Path, int], capsys: pytest.CaptureFixture[str]
) -> None:
    run, version = other
    assert main(["doctor", str(run), "--json"]) == 1
    rows = json.loads(capsys.readouterr().out)["run"]
    checkpoints = {name: text for name, text in rows.items() if name.startswith("step-")}
    assert checkpoints
    assert all(sentence(version) in text for text in checkpoints.values())
    assert rows["tokens"] == "intact"


def test_the_settings_of_another_format_are_refused_before_they_are_read(
    run_directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Path(shutil.copytree(run_directory, tmp_path / "run"))
    (run / "config.toml").write_text('format = 1\n[model]\nname_of_long_ago = "x"\n')
    assert main(["train", "--resume", str(run)]) == 2
    assert sentence(1) in capsys.readouterr().err
