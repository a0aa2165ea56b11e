"""fenchel settings, and docs/settings.md, which is its output."""

import json
import tomllib
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest

import fenchel
from fenchel.cli import main
from fenchel.config import reference
from fenchel.pipeline import RunConfig

PAGE = Path(fenchel.__file__).parents[1] / "docs/settings.md"


def names(cls: Any, where: str = "") -> list[str]:
    """Dotted names of all fields, found without ``reference``."""
    found = []
    for field in fields(cls):
        kind = get_type_hints(cls)[field.name]
        kind = next(filter(is_dataclass, get_args(kind)), kind)  # a section may be absent
        inner = f"{where}{field.name}"
        found += names(kind, f"{inner}.") if is_dataclass(kind) else [inner]
    return found


def test_every_setting_has_a_row_with_a_meaning() -> None:
    rows = {row.name: row for row in reference(RunConfig)}
    assert sorted(rows) == sorted(names(RunConfig))
    assert all(row.about.endswith(".") and row.kind for row in rows.values())
    assert rows["model.entmax_alpha"].needs == 'choice, layer_choices or router "entmax"'
    assert rows["train.balance_weight"].needs == "model.experts"


def test_the_page_is_the_output_of_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["settings", "--markdown"]) == 0
    assert PAGE.read_text().endswith(capsys.readouterr().out), (
        "docs/settings.md is old: replace its tables by the output of fenchel settings --markdown"
    )


def test_a_prefix_selects_and_a_wrong_one_gets_the_nearest(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    assert main(["settings", "optim.score"]) == 0
    shown = capsys.readouterr().out
    assert shown.count("optim.") == 5
    assert "optim.score_total (float, 2.3 by default)" in shown
    assert max(map(len, shown.splitlines())) <= 60
    assert main(["settings", "optm"]) == 2
    assert "did you mean optim?" in capsys.readouterr().err
    assert main(["settings", "model.widht"]) == 2
    assert "did you mean model.width?" in capsys.readouterr().err


def test_a_program_gets_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["settings", "train.batch", "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out).values()
    assert (row["kind"], row["default"]) == ("int", "32")


def test_the_settings_of_a_run_stand_below_their_meaning(run_directory: Path) -> None:
    text = (run_directory / "config.toml").read_text()
    assert "# Width of the residual stream, M.\nwidth = 16\n" in text
    assert max(map(len, text.splitlines())) <= 100
    assert tomllib.loads(text)["model"]["width"] == 16
