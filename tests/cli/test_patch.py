"""fenchel patch: two prompts, and what carries their difference."""

import json
from pathlib import Path

import pytest

from fenchel.cli import main

Said = pytest.CaptureFixture[str]
CLEAN, CORRUPT = "the people have peace and", "the people have trade and"


def test_two_prompts_are_compared_and_a_page_is_written(
    run_directory: Path, tmp_path: Path, capsys: Said
) -> None:
    page, run = tmp_path / "p.html", ["patch", str(run_directory)]
    assert main([*run, CLEAN, CORRUPT, "--out", str(page)]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "Share: of that difference" in said
    assert "streams: all of" in said
    html = page.read_text()
    assert all(f'data-picture="{name}"' in html for name in ("q", "k", "streams"))
    words = ["--sites", "mlp,stream", "--answer", "peace", "--against", "trade", "--json"]
    assert main([*run, CLEAN, CORRUPT, *words]) == 0
    record = json.loads(capsys.readouterr().out)
    assert [word.strip() for word in record["words"]] == ["peace", "trade"]
    last = len(record["clean_tokens"]) - 1
    share = {(e["part"], e["position"]): e["exact"] for e in record["effects"]}
    assert share["stream", last] == pytest.approx(1.0, abs=1e-4)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ([CLEAN, f"{CORRUPT} peace"], "the same number of tokens; these have"),
        ([CLEAN, CLEAN], "that differ"),
        ([CLEAN, CORRUPT, "--sites", "w"], "no part 'w'"),
        ([CLEAN, CORRUPT, "--exact", "0"], "should be 1 or more"),
        ([CLEAN, CORRUPT, "--answer", "peace", "--against", "peace"], "are the same"),
        ([CLEAN, CORRUPT, "--answer", " "], "a word is empty"),
    ],
)
def test_bad_input_gets_a_sentence(
    words: list[str], sentence: str, run_directory: Path, capsys: Said
) -> None:
    assert main(["patch", str(run_directory), *words, "--json"]) == 2
    assert sentence in " ".join(capsys.readouterr().err.split())
