"""fenchel steer, and --steer in the commands that decode or evaluate."""

import json
from pathlib import Path

import pytest

from fenchel.cli import main


@pytest.fixture
def texts(tmp_path: Path) -> tuple[str, str]:
    (tmp_path / "toward.txt").write_text("peace and trade\n\nevery nation has peace\n")
    (tmp_path / "away.txt").write_text("the people of these States\n")
    return str(tmp_path / "toward.txt"), str(tmp_path / "away.txt")


def steer(run: Path, text: Path, out: Path, *words: str) -> int:
    return main(["steer", str(run), "--text", str(text), "--out", str(out), *words])


def test_a_direction_is_made_and_moves_what_commands_draw(
    run_directory: Path,
    text_file: Path,
    texts: tuple[str, str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = tmp_path / "d.safetensors"
    flags = ("--toward", texts[0], "--away", texts[1], "--kl", "0.2", "--json")
    assert steer(run_directory, text_file, out, *flags) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["kl"]["mean"] == pytest.approx(0.2, rel=0.02)
    assert record["layer"] == 1

    def generate(*more: str) -> str:
        words = ["generate", str(run_directory), "--prompt", "the", "--max-new-tokens", "8"]
        assert main([*words, "--seed", "1", "--json", *more]) == 0
        return str(json.loads(capsys.readouterr().out)["text"])

    plain = generate()
    assert generate("--steer", str(out), "--strength", "0") == plain
    assert generate("--steer", str(out), "--strength", "40") != plain

    def loss(*more: str) -> float:
        words = ["eval", str(run_directory), "--text", str(text_file), "--tokens", "40", "--json"]
        assert main([*words, *more]) == 0
        return float(json.loads(capsys.readouterr().out)["loss"])

    unsteered = loss()
    assert loss("--steer", str(out), "--strength", "0") == unsteered
    assert loss("--steer", str(out)) != unsteered


def test_words_are_raised(
    run_directory: Path, text_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "w.safetensors"
    assert steer(run_directory, text_file, out, "--word", "peace", "--against", "trade") == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "logits of 1 words pulled back to layer 1" in said
    assert f"--steer {out}" in said


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ([], "give --toward FILE and --away FILE, or --word WORD"),
        (["--toward", "t"], "give --toward FILE and --away FILE"),
        (["--word", "peace", "--kl", "3"], "at most 1 nats"),
        (["--word", "peace", "--layer", "9"], "there is no layer 9"),
        (["--toward", "missing", "--away", "missing"], "missing"),
    ],
)
def test_bad_input_gets_a_sentence_and_leaves_nothing(
    words: list[str],
    sentence: str,
    run_directory: Path,
    text_file: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert steer(run_directory, text_file, tmp_path / "x", *words) == 2
    assert sentence in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "x").exists()


def test_strength_without_a_direction_is_refused(
    run_directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", str(run_directory), "--strength", "2"]) == 2
    assert "--strength belongs to --steer" in capsys.readouterr().err
