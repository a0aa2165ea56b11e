"""fenchel/cli/tune.py: the command, its flags and its sentences."""

import json
from pathlib import Path

import pytest
import transformers

from fenchel.cli import main

QUICK = ("--set", "train.threads=1", "--set", "train.precision=float32")


def test_a_run_is_tuned_exported_and_resumed(
    run_directory: Path, text_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, out = tmp_path / "run", tmp_path / "out"
    words = ["tune", str(run_directory), "--text", str(text_file), "--out", str(run)]
    assert main([*words, "--steps", "3", "--export", str(out), *QUICK]) == 0
    shown = capsys.readouterr().out
    assert "document" in shown
    assert f"Model          {out}" in shown
    assert transformers.AutoModelForCausalLM.from_pretrained(out) is not None
    assert main(["tune", "--resume", str(run), "--steps", "4", "--json"]) == 0
    summary = json.loads(capsys.readouterr().out)
    assert (summary["status"], summary["step"]) == ("finished", 4)
    assert main(["train", "--resume", str(run), "--steps", "5", "--json"]) == 0
    for command in (["eval"], ["generate", "--prompt", "the", "--max-new-tokens", "2"], ["doctor"]):
        assert main([command[0], str(run), *command[1:]]) == 0


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ([], "name the checkpoint to tune"),
        (["DIR"], "name the text to tune on"),
        (["DIR", "--text", "nowhere.txt"], "there is no text"),
        (["nowhere", "--text", "TEXT"], "there is no run directory or checkpoint nowhere"),
        (["DIR", "--text", "TEXT", "--steps", "2", "--epochs", "1"], "--epochs or --steps"),
        (["DIR", "--text", "TEXT", "--epochs", "0"], "tune.epochs=0"),
        (["DIR", "--text", "TEXT", "--template", "plain"], "--template writes conversations"),
        (["DIR", "--resume", "DIR"], "no DIR with it"),
        (["DIR", "--text", "TEXT", "--export", "DIR"], "exists and is not overwritten"),
        (["DIR", "--text", "TEXT", "--set", "model.width=8"], "model.width is the checkpoint's"),
    ],
)
def test_a_wrong_command_line_ends_with_a_sentence(
    words: list[str],
    sentence: str,
    run_directory: Path,
    text_file: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    places = {"DIR": str(run_directory), "TEXT": str(text_file)}
    assert main(["tune", *(places.get(word, word) for word in words)]) == 2
    assert sentence in " ".join(capsys.readouterr().err.split())
    assert not list(tmp_path.glob("runs/*"))
