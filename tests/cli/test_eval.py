"""fenchel eval with --calibration, --page and --against on one tiny run."""

import json
import shutil
from pathlib import Path

import pytest
import torch

from fenchel.checkpoints import load
from fenchel.cli import main
from fenchel.evaluate import calibration_error, confidence, score, text_ids
from fenchel.evaluate.calibration import Bin


@pytest.fixture
def other_text(tmp_path: Path) -> Path:
    path = tmp_path / "other.txt"
    path.write_text("the nation and the people of peace have trade. " * 30)
    return path


@pytest.fixture
def rival(text_file: Path, flags: list[str], tmp_path: Path) -> Path:
    """A run with another tokenizer."""
    path = tmp_path / "rival"
    words = ["train", "--text", str(text_file), "--steps", "2", "--out", str(path), *flags]
    assert main([*words, "--set", "text.vocabulary=280"]) == 0
    return path


def told(words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    capsys.readouterr()
    assert main(words) == 0
    return capsys.readouterr().out


def test_calibration_is_what_the_library_says(
    run_directory: Path, other_text: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["eval", str(run_directory), "--text", str(other_text), "--calibration"]
    found = json.loads(told([*words, "--json"], capsys))["calibration"]
    model, tokenizer, config = load(run_directory)
    ids, _ = text_ids(tokenizer, str(other_text))
    direct = confidence(model, ids, context=config.context)
    assert found["temperature"] == pytest.approx(direct.temperature)
    assert found["plain"]["brier"] == pytest.approx(direct.plain.brier)
    assert found["scaled"]["ece"] == pytest.approx(direct.scaled.ece)
    table = [Bin(**one) for one in found["plain"]["bins"]]
    assert calibration_error(table) == pytest.approx(found["plain"]["ece"])
    shown = told(words, capsys)
    assert f"{direct.plain.ece:.4f}" in shown
    assert f"T = {direct.temperature:.4f} " in shown


def test_the_page_draws_every_bin_and_overwrites_nothing(
    run_directory: Path, other_text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "reliability.html"
    words = ["eval", str(run_directory), "--text", str(other_text), "--page", str(page)]
    found = json.loads(told([*words, "--json"], capsys))["calibration"]
    drawn = page.read_text()
    bins = len(found["plain"]["bins"]) + len(found["scaled"]["bins"])
    assert drawn.count("<circle") == bins + 2  # and two keys
    assert "<svg" in drawn
    assert "http://" not in drawn.replace("http://www.w3.org/2000/svg", "")
    assert main(words) == 2
    assert "exists and is left alone" in capsys.readouterr().err
    assert page.read_text() == drawn


def test_another_tokenizer_is_compared_by_bits_and_refused_by_perplexity(
    run_directory: Path, rival: Path, other_text: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["eval", str(run_directory), "--text", str(other_text), "--against"]
    shown = told([*words, str(rival)], capsys)
    assert "different tokenizers" in shown
    found = json.loads(told([*words, str(rival), "--json"], capsys))
    assert found["against"]["bits_per_byte_difference"] == pytest.approx(
        found["bits_per_byte"] - found["against"]["bits_per_byte"]
    )
    assert "perplexity_difference" not in found["against"]
    same = json.loads(told([*words, str(run_directory), "--json"], capsys))
    assert same["against"]["perplexity_difference"] == 0.0
    assert "refused" not in same["against"]


def test_a_number_of_tokens_reads_the_beginning(
    run_directory: Path, other_text: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["eval", str(run_directory), "--text", str(other_text)]
    model, tokenizer, config = load(run_directory)
    ids, size = text_ids(tokenizer, str(other_text))
    found = json.loads(told([*words, "--tokens", "50", "--calibration", "--json"], capsys))
    direct = score(model, ids, bytes=size, context=config.context, limit=50)
    assert (found["tokens"], found["loss"]) == (50, pytest.approx(direct.loss))
    assert found["bytes"] == pytest.approx(size * 50 / (len(ids) - 1), abs=1)
    assert found["calibration"]["plain"]["predictions"] == 25  # the second half of those
    assert "the first, about" in told([*words, "--tokens", "50"], capsys)
    many = json.loads(told([*words, "--tokens", "1000000", "--json"], capsys))
    assert many == json.loads(told([*words, "--json"], capsys))
    own = ["eval", str(run_directory), "--tokens", "7", "--json"]
    assert json.loads(told(own, capsys))["tokens"] == 7
    assert main([*words, "--tokens", "0"]) == 2
    assert "give at least 1" in capsys.readouterr().err


def test_the_first_tokens_of_two_tokenizers_are_not_compared(
    run_directory: Path, rival: Path, other_text: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["eval", str(run_directory), "--text", str(other_text), "--tokens", "50", "--against"]
    assert main([*words, str(rival)]) == 2
    assert "leave out --tokens" in capsys.readouterr().err
    same = json.loads(told([*words, str(run_directory), "--json"], capsys))
    assert same["against"]["tokens"] == 50


def test_a_long_reading_tells_how_far_it_is_beside_the_result(
    run_directory: Path,
    other_text: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    words = ["eval", str(run_directory), "--text", str(other_text), "--calibration"]
    brief = told(words, capsys)
    monkeypatch.setattr("fenchel.cli.console.PLAIN_EVERY", 0.0)
    capsys.readouterr()
    assert main(words) == 0
    shown = capsys.readouterr()
    assert shown.out == brief
    tokenizer = load(run_directory).tokenizer
    whole = len(text_ids(tokenizer, str(other_text))[0]) - 1
    for stage in ("reading", "calibration"):
        assert f"{stage}: {whole:,} of {whole:,}" in shown.err
    assert main([*words, "--json"]) == 0
    assert not capsys.readouterr().err


@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
def test_the_dtype_is_that_of_the_weights_that_are_evaluated(
    dtype: str, run_directory: Path, other_text: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["eval", str(run_directory), "--text", str(other_text), "--device", "cpu", "--json"]
    plain = json.loads(told(words, capsys))
    measured = json.loads(told([*words, "--dtype", dtype], capsys))
    model, tokenizer, config = load(run_directory)
    ids, size = text_ids(tokenizer, str(other_text))
    model = model.to(getattr(torch, dtype))
    direct = score(model, ids, bytes=size, context=config.context)
    assert measured["loss"] == pytest.approx(direct.loss, rel=1e-12)
    assert measured["loss"] != plain["loss"]
    assert measured["loss"] == pytest.approx(
        plain["loss"], rel=1e-5 if dtype == "float64" else 0.02
    )


def test_the_best_device_is_used_and_an_unknown_one_refused(
    run_directory: Path, other_text: Path, device: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["eval", str(run_directory), "--text", str(other_text), "--json"]
    assert json.loads(told(words, capsys))["device"] == device
    assert main([*words, "--device", "abacus"]) == 2
    error = capsys.readouterr().err
    assert "no device 'abacus'" in error
    assert error.count("\n") == 1


def test_a_comparison_without_a_text_is_refused(
    run_directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["eval", str(run_directory), "--against", str(run_directory)]) == 2
    assert "--text" in capsys.readouterr().err


def test_a_model_without_a_text_of_its_own_asks_for_one(
    run_directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(run_directory, copy)
    (copy / "text.json").unlink()
    assert main(["eval", str(copy)]) == 2
    assert "has no text of its own; name one with --text." in capsys.readouterr().err
