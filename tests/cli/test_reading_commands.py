"""fenchel generate, eval, report and doctor on one tiny run."""

import json
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from fenchel.cli import main
from fenchel.cli.console import for_stdout
from fenchel.evaluate import PITFALLS


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
    # Evaluations while training are in its precision, which may be bfloat16.
    lines = (run_directory / "metrics.jsonl").read_text().splitlines()
    losses = [row["validation/loss"] for row in map(json.loads, lines) if "validation/loss" in row]
    assert summary["best"] == losses[-1]
    assert measured["loss"] == pytest.approx(summary["best"], rel=1e-3)


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
    assert told.keys() == {"run", "pitfalls"}  # the machine is not measured for it
    copy = tmp_path / "copy"
    shutil.copytree(run_directory, copy)
    weights = sorted(copy.glob("checkpoints/step-*"))[-1] / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-5] ^= 4
    weights.write_bytes(data)
    capsys.readouterr()
    assert main(["doctor", str(copy)]) == 1
    last = capsys.readouterr().out.splitlines()[-1]
    assert last == f"{copy} is damaged: {weights.parent.name}."


def test_doctor_shows_the_machine_and_a_grid_of_back_ends(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fenchel.cli.doctor.machine", lambda: {"torch": "x"})  # times for seconds
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["doctor"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    assert any("serve" in line and "starlette" in line for line in lines)
    (row,) = [line for line in lines if line.startswith("│ hard")]
    assert row.count("yes") == 2
    notes = [line for line in lines if line.startswith("(")]
    assert len(notes) == len({note.partition(" ")[2] for note in notes}) <= 5
    assert main(["doctor", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["attention"]["softmax"]["reference"] == "yes"


@pytest.mark.parametrize("command", ["generate", "eval", "report", "doctor"])
def test_a_folder_without_a_run_gets_one_sentence(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([command, str(tmp_path)]) == 2
    told = capsys.readouterr().err
    assert told.startswith("fenchel: ")
    assert told.count("\n") == 1


def test_one_flipped_bit_of_a_converted_checkpoint_is_found(
    run_directory: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """By every command that reads it, and by doctor; the numbers alone would pass."""
    out = tmp_path / "converted"
    assert main(["convert", str(run_directory), str(out)]) == 0
    (out / "README.md").write_text("a page of the user's own")
    assert main(["doctor", str(out), "--json"]) == 0
    told = json.loads(capsys.readouterr().out.partition("\n")[2])
    names = {"manifest.json", "weights", "tokenizer.json", "generation_config.json"}
    assert told["checkpoint"] == dict.fromkeys(names, "intact")
    weights = out / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-5] ^= 4
    weights.write_bytes(data)
    assert main(["doctor", str(out)]) == 1
    text = ["--text", "kjv"]
    flags = {"eval": text, "inspect": text, "attach": ["--map", "hard"]}
    for command in ("generate", "eval", "inspect", "attach"):
        capsys.readouterr()
        assert main([command, str(out), *flags.get(command, ())]) == 2
        assert "model.safetensors has changed since it was written" in capsys.readouterr().err
    (out / "manifest.json").write_text('{"files": "of another program"}')
    assert main(["generate", str(out), "--max-new-tokens", "1"]) == 0


def test_doctor_checks_the_model_for_pitfalls(
    run_directory: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["doctor", str(run_directory), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["pitfalls"]
    assert found.keys() == {each.name for each in PITFALLS}
    assert found["collapse"] == "none found"
    out = tmp_path / "converted"
    assert main(["convert", str(run_directory), str(out)]) == 0
    (out / "manifest.json").unlink()
    weights = load_file(out / "model.safetensors")
    queries = [name for name in weights if name.endswith("q_proj.weight")]
    for name in queries:
        weights[name] *= 1e6
    save_file(weights, out / "model.safetensors", {"format": "pt"})
    capsys.readouterr()
    assert main(["doctor", str(out), "--json"]) == 0
    *sentences, remedy = json.loads(capsys.readouterr().out)["pitfalls"]["collapse"].split("\n")
    assert [line.split(":")[0] for line in sentences] == [f"layer {n}" for n in range(len(queries))]
    assert remedy.startswith("Limit the scores")


def test_foreign_text_cannot_control_the_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    hostile = "x\x1b[2J\u202e\x07" + "y" * 5000
    assert main(["generate", str(tmp_path / hostile)]) == 2
    told = capsys.readouterr().err
    assert told.rstrip("\n").isprintable()
    assert len(told) < 900
    text = "a\x1b]0;title\x07b \u202ec\u2028d\x85e\u00a0f\u200d\n\t"
    assert for_stdout(text) == text  # a pipe gets what the model wrote
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    assert for_stdout(text) == "a]0;titleb cde\u00a0f\u200d\n\t"
