"""fenchel generate, eval, report and doctor on one tiny run."""

import json
import shutil
from pathlib import Path

import pytest

from fenchel.cli import main


def out_of(words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    capsys.readouterr()
    assert main(words) == 0
    return capsys.readouterr().out


def test_the_same_seed_draws_the_same_text(
    run_directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["generate", str(run_directory), "--prompt", "the people", "--max-new-tokens", "40"]
    first = out_of([*words, "--seed", "3"], capsys)
    assert first.startswith("the people")
    assert out_of([*words, "--seed", "3"], capsys) == first
    assert out_of([*words, "--seed", "4"], capsys) != first


def test_streaming_and_json_give_the_same_text(
    run_directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["generate", str(run_directory), "--prompt", "peace", "--max-new-tokens", "30"]
    streamed = out_of(words, capsys)
    assert out_of([*words, "--no-stream"], capsys) == streamed
    told = json.loads(out_of([*words, "--json"], capsys))
    assert told["prompt"] + told["text"] + "\n" == streamed


def test_eval_of_the_validation_text_is_what_training_reported(
    run_directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    measured = json.loads(out_of(["eval", str(run_directory), "--json"], capsys))
    summary = json.loads((run_directory / "summary.json").read_text())
    assert summary["best_step"] == summary["step"]  # eval reads the best, training the last
    for name, value in summary["validation"].items():
        assert measured[name] == pytest.approx(value, rel=1e-6), name
    assert measured["loss"] == pytest.approx(summary["best"], rel=1e-6)


def test_eval_reads_any_text(
    run_directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "other.txt"
    path.write_text("the nation and the people of peace. " * 20)
    told = out_of(["eval", str(run_directory), "--text", str(path)], capsys)
    assert "bits per byte" in told
    assert "720 bytes" in told


def test_the_report_can_be_made_again(
    run_directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(run_directory, copy)
    (copy / "report.html").unlink()
    assert "report.html" in out_of(["report", str(copy)], capsys)
    assert (copy / "report.html").stat().st_size > 10_000


def test_doctor_finds_a_flipped_bit(
    run_directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["doctor", str(run_directory), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert set(told["run"].values()) == {"intact"}
    assert told["attention"]["softmax"]
    copy = tmp_path / "copy"
    shutil.copytree(run_directory, copy)
    weights = sorted(copy.glob("checkpoints/step-*"))[-1] / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-5] ^= 4
    weights.write_bytes(data)
    assert main(["doctor", str(copy)]) == 1


@pytest.mark.parametrize("command", ["generate", "eval", "report", "doctor"])
def test_a_folder_without_a_run_gets_one_sentence(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([command, str(tmp_path)]) == 2
    told = capsys.readouterr().err
    assert told.startswith("fenchel: ")
    assert told.count("\n") == 1
