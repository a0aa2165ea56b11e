"""fenchel compare, as a person and as a program would call it."""

import json
from pathlib import Path

import pytest

from fenchel.cli import main


@pytest.fixture(scope="module")
def second(run_directory: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on the same text with another map and twice the steps."""
    out = tmp_path_factory.mktemp("second") / "entmax"
    config = str(run_directory / "config.toml")
    words = ["train", config, "--set", "model.choice=entmax", "--steps", "40", "--out", str(out)]
    assert main(words) == 0
    return out


def test_two_runs_side_by_side(
    run_directory: Path, second: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "page.html"
    assert main(["compare", str(run_directory), str(second), "--out", str(page)]) == 0
    shown = capsys.readouterr().out
    assert "1 tiny" in shown
    assert "2 entmax" in shown
    (difference,) = (line.split() for line in shown.splitlines() if "model.choice" in line)
    assert difference == ["model.choice", "softmax", "entmax"]
    assert shown.splitlines()[-1] == f"Page  {page}"
    assert "2 runs compared" in page.read_text()
    assert main(["compare", str(run_directory), str(second), "--json"]) == 0
    runs = json.loads(capsys.readouterr().out)["runs"]
    assert [run["steps"] for run in runs] == [20, 40]
    assert runs[0]["settings"]["train.steps"] == "20"
    stated = json.loads((second / "summary.json").read_text())["validation"]
    assert runs[1]["bits_per_byte"] == stated["bits_per_byte"]


def test_what_is_no_run_gets_one_sentence(
    run_directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["compare", str(run_directory), str(tmp_path)]) == 2
    assert "holds none of config.toml" in capsys.readouterr().err
    assert main(["compare", str(run_directory)]) == 2
    assert "two runs or more, got 1" in capsys.readouterr().err
    mine = tmp_path / "mine.html"
    mine.write_text("my own page")
    assert main(["compare", str(run_directory), str(run_directory), "--out", str(mine)]) == 2
    assert mine.read_text() == "my own page"
