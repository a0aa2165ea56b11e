"""fenchel ablate: the change of the loss, part by part."""

import json
from pathlib import Path

import pytest

from fenchel.cli import main

Said = pytest.CaptureFixture[str]


def run(directory: Path, text: Path, *words: str) -> int:
    return main(["ablate", str(directory), "--text", str(text), "--max-tokens", "12", *words])


def test_the_parts_of_a_run_are_removed_and_a_page_is_written(
    run_directory: Path, text_file: Path, tmp_path: Path, capsys: Said
) -> None:
    page = tmp_path / "a.html"
    assert run(run_directory, text_file, "--to", "zero", "--out", str(page)) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "with the part replaced by zero" in said
    assert "heads: all of" in said
    assert 'data-picture="head"' in page.read_text()
    assert run(run_directory, text_file, "--to", "zero", "--json") == 0
    record = json.loads(capsys.readouterr().out)
    assert {one["part"] for one in record["effects"]} == {"head", "attention", "mlp"}
    sizes = [abs(one["exact"]) for one in record["effects"]]
    assert sizes == sorted(sizes, reverse=True)
    assert run(run_directory, text_file, "--to", "hard", "--exact", "1", "--json") == 0
    record = json.loads(capsys.readouterr().out)
    assert {one["part"] for one in record["effects"]} == {"head", "attention"}


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--to", "median"], "to='median' is not known"),
        (["--exact", "0"], "should be 1 or more"),
    ],
)
def test_bad_input_gets_a_sentence(
    words: list[str], sentence: str, run_directory: Path, text_file: Path, capsys: Said
) -> None:
    assert run(run_directory, text_file, "--json", *words) == 2
    assert sentence in " ".join(capsys.readouterr().err.split())
