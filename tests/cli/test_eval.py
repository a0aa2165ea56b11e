"""fenchel eval with --split, --calibration, --page and --against on one tiny run."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from fenchel.checkpoints import load
from fenchel.cli import main
from fenchel.evaluate import calibration_error, confidence, score, text_ids
from fenchel.evaluate.calibration import Bin, read_calibration
from fenchel.pipeline import open_corpus


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


def test_calibration_is_that_of_the_library(
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


def test_the_fitted_temperature_is_stored_for_a_server(
    run_directory: Path, other_text: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["eval", str(run_directory), "--text", str(other_text), "--save", "--json"]
    found = json.loads(told(words, capsys))["calibration"]
    stored = read_calibration(run_directory, load(run_directory).model)
    assert stored is not None
    assert stored.temperature == pytest.approx(found["temperature"])
    assert stored.error == pytest.approx(found["scaled"]["ece"])
    (run_directory / "calibration.json").unlink()


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
    assert "exists and is not overwritten" in capsys.readouterr().err
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


def bits_of(directory: Path, texts: list[str]) -> float:
    """Bits per byte of a model on documents, computed without the command."""
    model, tokenizer, config = load(directory)
    ids = [tokenizer.end_id]
    for n, text in enumerate(texts):
        ids += [*([tokenizer.end_id] if n else []), *tokenizer.encode(text)]
    size = sum(len(text.encode()) for text in texts)
    return score(model, np.array(ids), bytes=size, context=config.context).bits_per_byte


def test_the_first_tokens_of_two_tokenizers_are_the_text_of_the_first_ones(
    run_directory: Path, rival: Path, other_text: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["eval", str(run_directory), "--text", str(other_text), "--tokens", "50", "--against"]
    found = json.loads(told([*words, str(rival), "--json"], capsys))
    tokenizer = load(run_directory).tokenizer
    begin = tokenizer.decode(tokenizer.encode(other_text.read_text())[:50])
    assert found["bytes"] == len(begin.encode())
    assert found["bits_per_byte"] == pytest.approx(bits_of(run_directory, [begin]))
    assert found["against"]["bits_per_byte"] == pytest.approx(bits_of(rival, [begin]))
    assert found["text"] == f"{other_text}, its first 50 tokens"
    assert main([*words[:4], "--tokens", "0", "--against", str(rival)]) == 2
    assert "give at least 1" in capsys.readouterr().err
    same = json.loads(told([*words, str(run_directory), "--json"], capsys))
    assert same["against"]["tokens"] == 50


def test_a_cut_inside_a_character_leaves_the_character_out(
    run_directory: Path, rival: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = tmp_path / "signs.txt"
    text.write_text("\N{SNOWMAN}\N{COMET}" * 9)
    words = ["eval", str(run_directory), "--text", str(text), "--tokens", "7", "--json"]
    found = json.loads(told([*words, "--against", str(rival)], capsys))
    assert found["bytes"] == 6  # two signs of three bytes, and the first byte of a third


def test_two_runs_with_other_tokenizers_are_compared_on_the_held_out_text_of_the_first(
    run_directory: Path, rival: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = json.loads(
        told(["eval", str(run_directory), "--against", str(rival), "--json"], capsys)
    )
    corpus = open_corpus(run_directory)
    held_out = corpus.text(validation=True).decode().split("\f")
    assert found["bytes"] == corpus.facts.validation_bytes == sum(map(len, held_out))
    assert found["bits_per_byte"] == pytest.approx(bits_of(run_directory, held_out))
    assert found["against"]["bits_per_byte"] == pytest.approx(bits_of(rival, held_out))
    assert found["text"] == f"validation text of {run_directory}"


@pytest.mark.parametrize("split", ["validation", "train"])
def test_a_part_of_the_runs_own_text_is_named_by_split(
    split: str, run_directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = json.loads(told(["eval", str(run_directory), "--split", split, "--json"], capsys))
    corpus = open_corpus(run_directory)
    ids = corpus.train if split == "train" else corpus.validation
    assert found["tokens"] == len(ids) - 1
    assert found["bytes"] == getattr(corpus.facts, f"{split}_bytes")
    stated = json.loads((run_directory / "summary.json").read_text())["validation"]["loss"]
    assert (found["loss"] == pytest.approx(stated)) == (split == "validation")
    assert told(["eval", str(run_directory), "--split", split], capsys).startswith(f"{split} text")
    assert main(["eval", str(run_directory), "--split", split, "--text", "sotu"]) == 2
    assert "leave out --text" in capsys.readouterr().err


def test_a_long_evaluation_shows_progress_beside_the_result(
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


def test_context_reads_past_the_trained_positions(
    run_directory: Path, other_text: Path, text_file: Path, flags: list[str], tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    model, tokenizer, config = load(run_directory)
    further = 2 * config.context + 3
    words = ["eval", str(run_directory), "--text", str(other_text), "--device", "cpu", "--json"]
    measured = json.loads(told([*words, "--context", str(further)], capsys))
    ids, size = text_ids(tokenizer, str(other_text))
    direct = score(model.with_context(further), ids, bytes=size, context=further)
    assert measured["loss"] == pytest.approx(direct.loss, rel=1e-6)
    assert measured["context"] == further
    prompt = ["generate", str(run_directory), "--prompt", "the nation", "--temperature", "0"]
    prompt += ["--max-new-tokens", str(2 * config.context), "--device", "cpu"]
    assert told([*prompt, "--context", str(4 * config.context)], capsys)

    learned = tmp_path / "learned"
    train = ["train", "--text", str(text_file), "--steps", "1", "--out", str(learned), *flags]
    assert main([*train, "--set", "model.positions=learned"]) == 0
    capsys.readouterr()
    assert main([*words[:1], str(learned), *words[2:], "--context", str(further)]) == 2
    assert "without a row for later ones" in capsys.readouterr().err


def test_the_best_device_is_used_and_an_unknown_one_refused(
    run_directory: Path, other_text: Path, device: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["eval", str(run_directory), "--text", str(other_text), "--json"]
    assert json.loads(told(words, capsys))["device"] == device
    assert main([*words, "--device", "abacus"]) == 2
    error = capsys.readouterr().err
    assert "no device 'abacus'" in error
    assert error.count("\n") == 1


def test_a_model_without_its_own_text_needs_one(
    run_directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(run_directory, copy)
    (copy / "text.json").unlink()
    assert main(["eval", str(copy)]) == 2
    assert "has no text; name one with --text." in capsys.readouterr().err


def test_the_distance_of_windows_can_be_set(
    run_directory: Path, other_text: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["eval", str(run_directory), "--text", str(other_text), "--context", "8", "--json"]
    model, tokenizer, _ = load(run_directory)
    ids, size = text_ids(tokenizer, str(other_text))
    losses = {}
    for given, stride in (([], 4), (["--stride", "8"], 8), (["--stride", "1"], 1)):
        found = json.loads(told([*words, *given], capsys))
        assert found["stride"] == stride
        losses[stride] = found["loss"]
        direct = score(model, ids, bytes=size, context=8, stride=stride)
        assert found["loss"] == pytest.approx(direct.loss)
    assert len(set(losses.values())) == 3
    half, whole = (
        json.loads(told([*words, "--calibration", *given], capsys))["calibration"]["plain"]
        for given in ([], ["--stride", "8"])
    )
    assert half["brier"] != whole["brier"]
    for wrong in ("0", "9"):
        assert main([*words, "--stride", wrong]) == 2
        assert f"--stride {wrong} should be 1 to 8" in capsys.readouterr().err
