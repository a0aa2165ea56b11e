"""fenchel inspect on a run directory: what is printed, what is written, and what is refused."""

import json
import shlex
import shutil
from pathlib import Path

import pytest
import torch

from fenchel.checkpoints import load
from fenchel.cli import main
from fenchel.cli.inspect import numbers
from fenchel.evaluate import attention_maps
from fenchel.inspection import open_model
from fenchel.inspection.heads import row_stats, row_weights


def words(run: Path, text: Path, *more: str) -> list[str]:
    return ["inspect", str(run), "--text", str(text), "--max-tokens", "12", *more]


def test_a_run_is_read_as_its_model_reads(run_directory: Path) -> None:
    ids = torch.tensor([[0, 5, 9, 200, 31, 7, 7, 80]])
    trace = open_model(run_directory).trace(ids)
    model = load(run_directory).model
    ours = torch.stack([row_weights(p.attention, 8) for p in trace.blocks])
    torch.testing.assert_close(ours, attention_maps(model, ids), rtol=0, atol=1e-6)
    entropy = torch.special.entr(ours).sum(-1)
    torch.testing.assert_close(row_stats(trace.blocks[0].attention).entropy, entropy[0])
    with torch.no_grad():
        logits = model(ids, last=True)[0, -1]
    assert trace.lm_head is not None
    torch.testing.assert_close(trace.lm_head(trace.blocks[-1].output), logits)


def test_a_table_and_a_page_come_out(
    run_directory: Path, text_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "page.html"
    assert main(words(run_directory, text_file, "--out", str(out))) == 0
    told = capsys.readouterr().out
    assert "most sensitive of" in told
    assert "Lyapunov exponent" in told
    assert str(out) in told.replace("\n", "")
    page = out.read_text()
    assert "Influence of tokens on tokens" in page
    assert "block = gain of the block" in " ".join(told.split())
    assert main(words(run_directory, text_file, "--out", str(out), "--no-blocks")) == 0  # again
    assert "of the block" not in capsys.readouterr().out


def test_why_a_head_attends_where_it_does(
    run_directory: Path, text_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "page.html"
    more = ["--no-blocks", "--why", "1.2:7:3"]
    assert main(words(run_directory, text_file, "--out", str(out), *more)) == 0
    assert "why head 1.2 attends from" in " ".join(capsys.readouterr().out.split())
    assert "Why it attends there" in out.read_text()
    assert main(words(run_directory, text_file, "--json", *more)) == 0
    why = json.loads(capsys.readouterr().out)["why"]
    assert (why["layer"], why["head"], why["query"], why["key"]) == (1, 2, 7, 3)
    assert sum(map(sum, why["pairs"])) == pytest.approx(why["score"] - why["mean"], abs=1e-5)
    for given, sentence in (("2", "takes LAYER.HEAD"), ("9.1", "no layer 9"), ("1.1:3:5", "sees")):
        assert main(words(run_directory, text_file, "--json", "--why", given)) == 2
        assert sentence in capsys.readouterr().err


def test_the_next_command_runs_where_there_is_one(
    run_directory: Path,
    text_file: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    more = ["--no-blocks", "--out", str(tmp_path / "page.html")]
    assert main(words(run_directory, text_file, *more)) == 0
    command = shlex.split(capsys.readouterr().out.splitlines()[-1].removeprefix("Next"))
    assert main([*command[1:], *more]) == 0
    assert "why head" in capsys.readouterr().out
    monkeypatch.setattr("fenchel.interpretability.has_score_parts", lambda _: False)
    assert main(words(run_directory, text_file, *more)) == 0
    assert "Next  fenchel ablate" in capsys.readouterr().out
    monkeypatch.setattr("fenchel.interpretability.can_be_hooked", lambda _: False)
    assert main(words(run_directory, text_file, *more)) == 0
    assert "Next" not in capsys.readouterr().out


def test_json_is_one_object_and_writes_nothing(
    run_directory: Path,
    text_file: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(words(run_directory, text_file, "--json", "--rows", "--heads", "2")) == 0
    told = json.loads(capsys.readouterr().out)
    assert [head["head"] for head in told["heads"]] == [2]
    assert len(told["heads"][0]["rows"]["sensitivity"]) == 12
    assert told["network"]["stream"]["lower"] <= told["network"]["stream"]["upper"]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        (["--layers", "9"], "there is no layer 9"),
        (["--layers", "one"], "--layers takes numbers"),
        (["--max-tokens", "1"], "should be 2 or more"),
        (["--device", "abacus"], "there is no device 'abacus'"),
        (["--text", "nowhere.txt"], "there is no text 'nowhere.txt'"),
        (["--iterations", "0"], "iterations >= 1"),
    ],
)
def test_wrong_words_are_one_sentence_and_code_2(
    run_directory: Path,
    text_file: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    more: list[str],
    sentence: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    line = words(run_directory, text_file)
    for flag, value in zip(more[::2], more[1::2], strict=True):
        if flag in line:
            line[line.index(flag) + 1] = value
        else:
            line += [flag, value]
    assert main(line) == 2
    said = capsys.readouterr()
    assert sentence in said.err
    assert said.err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_a_longer_text_is_read_up_to_the_context(
    run_directory: Path,
    text_file: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["inspect", str(run_directory), "--text", str(text_file), "--no-blocks"]) == 0
    said = capsys.readouterr()
    assert "fenchel: The first 16 tokens of" in said.err
    assert "16 tokens" in said.out


def test_weights_that_changed_on_disk_are_refused(
    run_directory: Path, text_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = Path(shutil.copytree(run_directory, tmp_path / "copy"))
    for weights_file in copy.glob("checkpoints/*/model.safetensors"):
        weights_file.write_bytes(weights_file.read_bytes()[:-7])
    assert main(words(copy, text_file)) == 2
    *notices, refusal = capsys.readouterr().err.splitlines()
    assert notices
    assert all("fenchel: step-" in line and "is skipped" in line for line in notices)
    assert "no intact checkpoint" in refusal


def test_a_file_that_is_no_page_of_ours_is_never_written_over(
    run_directory: Path, text_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mine = tmp_path / "thesis.html"
    mine.write_text("four years of work")
    assert main(words(run_directory, text_file, "--out", str(mine))) == 2
    assert "is not a page of fenchel; choose another" in capsys.readouterr().err
    assert mine.read_text() == "four years of work"
    assert main(words(run_directory, text_file, "--out", str(tmp_path / "no" / "p.html"))) == 2


def test_numbers_are_read_as_people_write_them() -> None:
    assert numbers(None, "--layers") is None
    assert numbers("2, 4-6", "--layers") == [2, 4, 5, 6]
    for wrong in ("", "a", "3-", "-2", "1-99999999", "3-1"):
        with pytest.raises(ValueError, match="--layers"):
            numbers(wrong, "--layers")
