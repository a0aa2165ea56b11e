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
    assert "logits of 1 word pulled back to layer 1" in said
    assert f"--steer {out}" in said


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ([], "give --toward FILE and --away FILE, or --word WORD"),
        (["--toward", "t"], "give --toward FILE and --away FILE"),
        (["--word", "peace", "--kl", "3"], "at most 1 nats"),
        (["--word", "peace", "--layer", "9"], "there is no layer 9"),
        (["--word", ""], "a word is empty"),
        (["--word", "peace", "--max-tokens", "1"], "--max-tokens 1 should be 2 or more"),
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


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--strength", "2"], "--strength belongs to --steer"),
        (["--token-kl", "0.1"], "--token-kl belongs to --steer FILE or --emphasise WORDS"),
        (["--emphasis", "2"], "--emphasis and --emphasis-layers belong to --emphasise"),
        (["--emphasise", "war"], "the prompt has no text 'war' to emphasise"),
        (["--emphasise", "the", "--emphasis", "99"], "a bias of 99 should be -20 to 20"),
        (["--emphasise", "the", "--emphasis-layers", "9"], "there is no layer 9"),
        (["--emphasise", "the", "--token-kl", "0"], "should be above 0"),
        (["--emphasise", "the", "--attention"], "is not traced"),
    ],
)
def test_flags_of_steering_that_do_not_fit_are_refused(
    words: list[str], sentence: str, run_directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", str(run_directory), "--prompt", "the people", *words]) == 2
    assert sentence in " ".join(capsys.readouterr().err.split())


def test_words_of_a_prompt_are_emphasised_within_a_budget(
    run_directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The largest budget is no budget; the smallest leaves the law as it was."""

    def logprobs(*more: str) -> list[float]:
        words = ["generate", str(run_directory), "--prompt", "peace and the people of peace"]
        assert main([*words, "--max-new-tokens", "5", "--logprobs", "0", "--json", *more]) == 0
        return [token["logprob"] for token in json.loads(capsys.readouterr().out)["tokens"]]

    plain = logprobs()
    strong = logprobs("--emphasise", "peace", "--emphasis", "12")
    assert strong != pytest.approx(plain, abs=1e-4)
    assert logprobs("--emphasise", "peace", "--emphasis", "0") == pytest.approx(plain, abs=1e-6)
    limited = ("--emphasise", "peace", "--emphasis", "12", "--token-kl")
    assert logprobs(*limited, "1e-9") == pytest.approx(plain, abs=1e-3)
    assert logprobs(*limited, "50") == pytest.approx(strong, abs=1e-4)
