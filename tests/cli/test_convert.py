"""fenchel convert on one tiny run, and on what it wrote."""

import json
from pathlib import Path

import pytest
import torch
import transformers

from fenchel.checkpoints import load
from fenchel.cli import main
from fenchel.steering import Direction

TEXT = "the people of these States, déjà vu <|end|> and peace"


def test_a_run_becomes_a_directory_that_transformers_reads_alike(
    run_directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "exported"
    capsys.readouterr()
    assert main(["convert", str(run_directory), str(out), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    ours = load(run_directory)
    assert told["family"] == "llama"
    assert told["parameters"] == sum(p.numel() for p in ours.model.parameters())
    theirs = transformers.AutoModelForCausalLM.from_pretrained(out).eval()
    ids = torch.tensor([ours.tokenizer.encode("the people of these States")])
    with torch.no_grad():
        torch.testing.assert_close(theirs(ids).logits, ours.model(ids), atol=1e-4, rtol=0)


def test_the_tokenizer_goes_with_it(run_directory: Path, tmp_path: Path) -> None:
    out = tmp_path / "exported"
    assert main(["convert", str(run_directory), str(out)]) == 0
    theirs = transformers.AutoTokenizer.from_pretrained(out)
    text = TEXT.replace("<|end|>", "")
    ids = load(run_directory).tokenizer.encode(text)
    assert theirs(text, add_special_tokens=False)["input_ids"] == ids
    assert theirs.decode(ids) == text
    assert (theirs.eos_token, theirs.pad_token) == ("<|end|>", "<|pad|>")


def test_the_other_commands_read_what_was_written(
    run_directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "exported"
    assert main(["convert", str(run_directory), str(out)]) == 0
    words = ["--prompt", "the people", "--max-new-tokens", "20", "--json"]
    capsys.readouterr()
    assert main(["generate", str(run_directory), *words]) == 0
    from_run = json.loads(capsys.readouterr().out)
    assert main(["generate", str(out), *words]) == 0
    from_copy = json.loads(capsys.readouterr().out)
    assert from_copy | {"seconds": 0.0} == from_run | {"seconds": 0.0}


def test_another_dtype_is_that_dtype_of_the_same_numbers(
    run_directory: Path, tmp_path: Path
) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    assert main(["convert", str(run_directory), str(one)]) == 0
    assert main(["convert", str(one), str(two), "--dtype", "bfloat16"]) == 0
    exact, rounded = load(one).model.state_dict(), load(two).model.state_dict()
    assert {t.dtype for t in rounded.values()} == {torch.bfloat16}
    assert all(torch.equal(exact[name].bfloat16(), rounded[name]) for name in exact)
    assert json.loads((two / "config.json").read_text())["dtype"] == "bfloat16"
    assert (two / "tokenizer.json").read_bytes() == (one / "tokenizer.json").read_bytes()


def test_nothing_is_overwritten_without_force(
    run_directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "kept"
    out.mkdir()
    (out / "diary.txt").write_text("mine")
    assert main(["convert", str(run_directory), str(out)]) == 2
    assert "not empty" in capsys.readouterr().err
    assert (out / "diary.txt").read_text() == "mine"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["kept"]
    assert main(["convert", str(run_directory), str(out), "--force"]) == 2
    assert (out / "diary.txt").read_text() == "mine"
    (out / "diary.txt").unlink()
    assert main(["convert", str(run_directory), str(out)]) == 0
    first = (out / "manifest.json").stat().st_ino
    assert main(["convert", str(run_directory), str(out), "--force"]) == 0
    assert (out / "manifest.json").stat().st_ino != first
    assert sorted(path.name for path in tmp_path.iterdir()) == ["kept"]
    load(out)


def test_a_missing_directory_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["convert", str(tmp_path / "nowhere"), str(tmp_path / "out")]) == 2
    assert "no run directory or checkpoint" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_an_adapter_alone_is_no_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text("{}")
    assert main(["convert", str(adapter), str(tmp_path / "out")]) == 2
    assert "is an adapter and no model" in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "out").exists()


@torch.no_grad()
def test_a_direction_is_written_into_the_weights(
    run_directory: Path,
    text_file: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    file, out = tmp_path / "w.safetensors", tmp_path / "steered"
    words = ["--word", "peace", "--text", str(text_file), "--out", str(file)]
    assert main(["steer", str(run_directory), *words]) == 0
    flags = ["--steer", str(file), "--strength", "-1.5"]
    assert main(["convert", str(run_directory), str(out), *flags]) == 0
    ours = load(run_directory)
    direction = Direction.load(file, ours.model).at(-1.5)
    ids = torch.tensor([ours.tokenizer.encode("the people of these States")])
    steer = {layer - 1: v_M.view(1, 1, -1) for layer, v_M in direction.scaled.items()}
    wanted = ours.model(ids, steer=steer)
    assert float((wanted - ours.model(ids)).abs().max()) > 0.1
    theirs = transformers.AutoModelForCausalLM.from_pretrained(out).eval()
    torch.testing.assert_close(theirs(ids).logits, wanted, atol=1e-4, rtol=0)
    torch.testing.assert_close(load(out).model(ids), wanted, atol=1e-4, rtol=0)

    capsys.readouterr()
    assert main(["convert", str(out), str(tmp_path / "twice"), *flags]) == 2
    assert "made with other weights" in capsys.readouterr().err
    peft = ["convert", str(run_directory), str(tmp_path / "p"), "--peft", *flags]
    assert main(peft) == 2
    assert "--steer" in capsys.readouterr().err
