"""fenchel/report/curves.py: the most extreme heads, under their own names."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fenchel.report.curves import head_series, heads, most_extreme
from fenchel.report.curves import layers as layers_of
from fenchel.report.run_data import read_run

LINES = [
    {"step": 10, "attention/head_rms": [[1.0, 2.0], [3.0, 4.0]]},
    {"step": 20, "train/loss": 1.0},
    {"step": 30, "attention/head_rms": [[5.0, 6.0], [7.0, "nan"]]},
]


def run_of(folder: Path, lines: list[dict[str, Any]]) -> Any:
    folder.mkdir(exist_ok=True)
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (folder / "metrics.jsonl").write_text(text)
    return read_run(folder)


def test_a_list_a_layer_becomes_a_column_a_head(tmp_path: Path) -> None:
    steps, names, values = head_series(run_of(tmp_path, LINES), "attention/head_rms")
    assert steps.tolist() == [10, 30]
    assert names == ["L1 H1", "L1 H2", "L2 H1", "L2 H2"]
    np.testing.assert_equal(values, [[1, 2, 3, 4], [5, 6, 7, np.nan]])


def test_layers_with_different_numbers_of_heads_and_lines_without_them(tmp_path: Path) -> None:
    lines = [
        {"step": 1, "attention/head_rms": [[1.0], [2.0, 3.0]]},
        {"step": 2, "attention/head_rms": [[4.0], 5.0]},
        {"step": 3, "attention/head_rms": [[], [6.0]]},
    ]
    _, names, values = head_series(run_of(tmp_path, lines), "attention/head_rms")
    assert names == ["L1 H1", "L2 H1", "L2 H2"]
    nan = np.nan
    np.testing.assert_equal(values, [[1, 2, 3], [4, nan, nan], [nan, 6, nan]])


def test_the_heads_shown_are_the_most_extreme_at_any_step() -> None:
    values = np.array([[1.0, 9.0, 2.0, 3.0], [8.0, 1.0, 2.0, 3.0]])
    assert most_extreme(values, 2, lowest=False) == [1, 0]
    assert most_extreme(values, 2, lowest=True) == [0, 1]
    values[0, 3] = np.nan
    assert most_extreme(values, 1, lowest=False) == [3]  # what is not finite must be seen
    assert most_extreme(values, 1, lowest=True) == [3]


@pytest.mark.parametrize(("layers", "count"), [(2, 8), (24, 16)])
def test_a_picture_shows_twelve_heads_at_most_with_their_names(
    make_run: Callable[..., Path], layers: int, count: int
) -> None:
    part = heads(read_run(make_run(f"run{layers}", layers=layers, heads=count, steps=100)))
    assert list(part.pictures) == ["head-max-logit", "head-rms", "head-entropy"]
    drawn = part.pictures["head-max-logit"]
    assert len(drawn["layers"]) == len(drawn["names"]) == len(drawn["last"]) == 12
    # Its logit is 3 + (i + 2 j) part, and its row is the last by layer and head.
    assert drawn["names"][-1] == f"L{layers} H{count}"
    assert drawn["last"][-1] == pytest.approx(3 + (layers - 1) + 2 * (count - 1))
    for other in part.pictures.values():
        assert other["names"] == drawn["names"]
        assert other["least"] == 0


def test_the_heads_with_the_lowest_entropy_are_among_those_with_the_largest_scores(
    tmp_path: Path,
) -> None:
    line = {
        "step": 1,
        "attention/head_max_logit": [[float(n) for n in range(20)]],
        "attention/head_entropy": [[0.1] + [2.0] * 19],
    }
    part = heads(run_of(tmp_path, [line]))
    for drawn in part.pictures.values():
        assert len(drawn["names"]) == 12
        assert drawn["names"][0] == "L1 H1"  # its scores are the smallest
        assert drawn["names"][-1] == "L1 H20"
    assert "the 12 of 20 with" in part.body


def test_colours_run_from_nothing_to_uniform_attention_or_the_largest_value(
    make_run: Callable[..., Path],
) -> None:
    run = read_run(make_run("scales", steps=100))
    drawn = {**layers_of(run).pictures, **heads(run).pictures}
    T = run.config["model"]["context"]
    uniform = np.log(np.arange(1, T + 1)).mean()
    ends = {name: (data["least"], data["most"]) for name, data in drawn.items()}
    assert ends["entropy"] == ends["head-entropy"] == (0, pytest.approx(uniform, rel=1e-5))
    assert ends["effective"] == (0, (T + 1) / 2)
    values = np.array(drawn["max-logit"]["layers"])
    assert ends["max-logit"] == (0, values.max())


def test_support_is_shown_where_it_varies_only(tmp_path: Path) -> None:
    for name, values, shown in (
        ("dense", [[64.5, 64.5]] * 2, False),
        ("sparse", [[9.0, 8.0], [7.0, 6.0]], True),
    ):
        lines = [{"step": n, "attention/support": one} for n, one in enumerate(values, 1)]
        part = layers_of(run_of(tmp_path / name, lines))
        assert ("support" in part.pictures) is shown


def test_a_run_without_values_per_head_names_what_is_missing(tmp_path: Path) -> None:
    part = heads(run_of(tmp_path, [{"step": 1, "attention/entropy": [1.0]}]))
    assert not part.pictures
    assert "no values for: Largest logit per head" in part.body
