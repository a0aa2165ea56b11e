"""fenchel/report/comparison.py: several runs as a table, as JSON and as one page."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fenchel.config import to_toml
from fenchel.report.comparison import COLUMNS, TONES, compare_runs, render
from fenchel.report.html import STYLES, read_asset

TEXT = {"text_sha256": "a" * 64, "tokenizer_sha256": "b" * 64, "validation_bytes": 1000}


def write(
    folder: Path,
    *,
    bits: float = 2.0,
    choice: str = "softmax",
    text: dict[str, Any] | None = None,
    status: str = "finished",
    steps: int = 4,
) -> Path:
    """A run directory with what a comparison reads."""
    folder.mkdir(parents=True)
    config = {"seed": 3, "model": {"choice": choice, "width": 16}, "train": {"threads": steps}}
    (folder / "config.toml").write_text(to_toml(config))
    lines = [
        {
            "step": step,
            "train/loss": 5.0 - step * bits,
            "train/tokens": 64 * step,
            "time/elapsed": 0.5 * step,
            "attention/entropy": [1.0, bits + step],
        }
        for step in range(1, steps + 1)
    ]
    lines.append({"step": steps, "validation/loss": bits * 2, "validation/bits_per_byte": bits})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    summary: dict[str, Any] = {
        "status": status,
        "step": steps,
        "parameters": 12_345,
        "tokens": 64 * steps,
        "seconds": 1.5,
        "text": TEXT | (text or {}),
    }
    if status == "finished":
        summary["validation"] = {"loss": bits * 2.1, "bits_per_byte": bits * 1.1}
    (folder / "summary.json").write_text(json.dumps(summary))
    return folder


def pictures(page: str) -> dict[str, Any]:
    data = re.search(r'<script type="application/json"[^>]*>(.*?)</script>', page, re.DOTALL)
    assert data is not None
    return dict(json.loads(data[1])["pictures"])


def test_the_table_has_the_numbers_of_every_run_and_the_settings_that_differ(
    tmp_path: Path,
) -> None:
    paths = [write(tmp_path / "a"), write(tmp_path / "b", bits=1.5, choice="entmax", steps=6)]
    comparison = compare_runs(paths)
    assert comparison.names == ("a", "b")
    assert comparison.settings == {"model.choice": ("softmax", "entmax")}  # threads: the machine's
    first, second = comparison.results
    assert first.keys() == {column.key for column in COLUMNS}
    assert second["bits_per_byte"] == pytest.approx(1.65)  # of the whole text, not of the metrics
    assert (second["steps"], second["tokens"], second["parameters"]) == (6, 384, 12_345)
    assert second["entropy"] == pytest.approx(np.mean([1.0, 1.5 + 6]))
    assert comparison.notes == ()
    plain = json.loads(json.dumps(comparison.plain()))
    assert [run["settings"]["model.choice"] for run in plain["runs"]] == ["softmax", "entmax"]


def test_the_page_overlays_one_curve_per_run(tmp_path: Path) -> None:
    paths = [write(tmp_path / name, bits=2.0 + n / 10) for n, name in enumerate("abc")]
    page = render(compare_runs(paths))
    charts = pictures(page)
    lines = {name: data for name, data in charts.items() if data["view"] == "lineChart"}
    assert {name.partition("-")[0] for name in lines} == {"loss", "bits", "entropy"}
    for data in lines.values():
        assert [one["name"] for one in data["series"]] == ["a", "b", "c"]
        assert [one["tone"] for one in data["series"]] == [0, 1, 2]
        assert all(one["x"].keys() == {"step", "tokens", "elapsed"} for one in data["series"])
    training = next(data for name, data in lines.items() if len(data["series"][0]["y"]) == 4)
    assert training["series"][1]["y"] == pytest.approx([5 - 2.1 * step for step in (1, 2, 3, 4)])
    bars = charts["ranking"]["bars"]
    assert [bar["name"] for bar in bars] == ["a", "b", "c"]
    assert [bar["note"] for bar in bars] == ["", "+5.0 %", "+10 %"]


def test_a_bar_has_the_colour_of_the_curves_of_its_run(tmp_path: Path) -> None:
    paths = [write(tmp_path / name, bits=bits) for name, bits in (("a", 2.0), ("b", 1.9))]
    charts = pictures(render(compare_runs(paths)))
    bars = {bar["name"]: bar["tone"] for bar in charts["ranking"]["bars"]}
    assert list(bars) == ["b", "a"]
    for data in charts.values():
        if data["view"] == "lineChart":
            assert {one["name"]: one["tone"] for one in data["series"]} == bars


def test_every_tone_has_a_colour_in_both_schemes() -> None:
    css = "".join(map(read_asset, STYLES))
    for tone in range(TONES):
        assert len(re.findall(rf"--s{tone}: #[0-9a-f]{{6}};", css)) == 2
        assert f".line.s{tone}, .dot.s{tone}, .bar.s{tone}, .key.s{tone}::before" in css


@pytest.mark.parametrize(
    ("other", "says"),
    [
        ({"text_sha256": "c" * 64}, "different validation texts"),
        ({"validation_bytes": 999}, "different validation texts"),
        ({"tokenizer_sha256": "c" * 64}, "different tokenizers"),
    ],
)
def test_runs_that_cannot_be_compared_get_a_note(
    other: dict[str, Any], says: str, tmp_path: Path
) -> None:
    comparison = compare_runs([write(tmp_path / "a"), write(tmp_path / "b", text=other)])
    (note,) = comparison.notes
    assert says in note
    assert note in render(comparison)


def test_an_unfinished_run_has_the_numbers_of_its_last_evaluation(tmp_path: Path) -> None:
    paths = [write(tmp_path / "a"), write(tmp_path / "b", status="interrupted")]
    comparison = compare_runs(paths)
    assert comparison.results[1]["bits_per_byte"] == 2.0
    assert "Not finished: b (interrupted)" in comparison.notes[0]


def test_runs_of_one_name_are_shown_by_their_paths(tmp_path: Path) -> None:
    paths = [write(tmp_path / "x/run"), write(tmp_path / "y/run")]
    assert compare_runs(paths).names == tuple(map(str, paths))


def test_hostile_names_and_values_do_not_become_markup(tmp_path: Path) -> None:
    paths = [write(tmp_path / "<b>a", choice="<i>x"), write(tmp_path / "b\x1b[31m")]
    page = render(compare_runs(paths))
    assert "<b>" not in page
    assert "<i>x" not in page
    assert "\x1b" not in page


def test_too_few_runs_and_one_run_twice_are_refused(tmp_path: Path) -> None:
    run = write(tmp_path / "a")
    with pytest.raises(ValueError, match="two runs or more, got 1"):
        compare_runs([run])
    with pytest.raises(ValueError, match="named twice"):
        compare_runs([run, tmp_path / "." / "a"])


def test_a_run_without_metrics_leaves_the_others_their_curves(tmp_path: Path) -> None:
    bare = write(tmp_path / "b")
    (bare / "metrics.jsonl").unlink()
    comparison = compare_runs([write(tmp_path / "a"), bare])
    assert "entropy" not in comparison.results[1]
    lines = [data for data in pictures(render(comparison)).values() if data["view"] == "lineChart"]
    assert all([one["name"] for one in data["series"]] == ["a"] for data in lines)
