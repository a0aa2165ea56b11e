"""fenchel/report/attention_over_time.py: the most extreme heads, under their own names."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fenchel.report.attention_over_time import head_series, heads, most_extreme
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
    assert names == ["1.1", "1.2", "2.1", "2.2"]
    np.testing.assert_equal(values, [[1, 2, 3, 4], [5, 6, 7, np.nan]])


def test_layers_with_different_numbers_of_heads_and_lines_without_them(tmp_path: Path) -> None:
    lines = [
        {"step": 1, "attention/head_rms": [[1.0], [2.0, 3.0]]},
        {"step": 2, "attention/head_rms": [[4.0], 5.0]},
        {"step": 3, "attention/head_rms": [[], [6.0]]},
    ]
    _, names, values = head_series(run_of(tmp_path, lines), "attention/head_rms")
    assert names == ["1.1", "2.1", "2.2"]
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
    assert drawn["names"][0] == f"{layers}.{count}"  # its logit is 3 + (i + 2 j) part
    assert drawn["last"][0] == pytest.approx(3 + (layers - 1) + 2 * (count - 1))
    lowest = part.pictures["head-entropy"]
    assert lowest["last"] == sorted(lowest["last"]) or lowest["least"] == 0.0


def test_a_run_without_values_per_head_names_what_is_missing(tmp_path: Path) -> None:
    part = heads(run_of(tmp_path, [{"step": 1, "attention/entropy": [1.0]}]))
    assert not part.pictures
    assert "no values for: Largest logit per head" in part.body
