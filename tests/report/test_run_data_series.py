"""fenchel/report/run_data.py, curves.py: thinning keeps what a reader looks for."""

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from fenchel.report.curves import reduce_spans
from fenchel.report.run_data import (
    RunData,
    Series,
    axis_values,
    chart_series,
    even_indices,
    extremes,
    layer_series,
    series,
    table_rows,
)

MakeRun = Callable[..., Path]
values_of_a_run = st.lists(st.floats(width=32), min_size=1, max_size=200)


def a_run(*rows: dict[str, float | tuple[float, ...]]) -> RunData:
    return RunData(
        name="r",
        config={},
        config_text="",
        environment={},
        rows=rows,
        summary={},
        sample={},
        troubles={},
    )


@given(values_of_a_run, st.integers(1, 30))
def test_the_extremes_the_ends_and_a_hole_survive_thinning(values: list[float], count: int) -> None:
    all_of_them = np.array(values)
    kept = extremes(all_of_them, spans=count)
    assert len(kept) <= max(4 * count, 5 * count)
    assert (np.diff(kept) > 0).all()
    assert kept[0] == 0
    assert kept[-1] == len(values) - 1
    finite, seen = all_of_them[np.isfinite(all_of_them)], all_of_them[kept]
    if len(finite):
        assert seen[np.isfinite(seen)].min() == finite.min()
        assert seen[np.isfinite(seen)].max() == finite.max()
    assert np.isfinite(seen).all() == np.isfinite(all_of_them).all()


def test_a_short_series_is_drawn_whole() -> None:
    assert len(extremes(np.arange(1600.0))) == 1600
    assert len(extremes(np.arange(1601.0))) < 1600


@given(st.integers(0, 500), st.integers(2, 60))
def test_rows_of_a_table_are_few_distinct_and_have_both_ends(count: int, most: int) -> None:
    kept = even_indices(count, most)
    assert len(kept) == len(set(kept)) == min(count, most)
    assert not kept or (kept[0], kept[-1]) == (0, count - 1)


def test_an_evaluation_finds_its_tokens_and_time_between_the_lines_around_it() -> None:
    run = a_run(
        {"step": 5.0, "validation/loss": 3.0},
        {"step": 10.0, "train/tokens": 100.0, "time/elapsed": 1.0},
        {"step": 15.0, "validation/loss": 2.0},
        {"step": 20.0, "train/tokens": 300.0, "time/elapsed": math.nan},
    )
    found = axis_values(run, series(run, "validation/loss").steps)
    assert found == {"step": [5, 15], "tokens": [50, 200], "elapsed": [0.5, 1]}


def test_an_axis_without_values_is_not_offered() -> None:
    run = a_run({"step": 10.0, "train/loss": 1.0})
    assert chart_series(run, "x", series(run, "train/loss"))["x"] == {"step": [10]}


def test_a_hole_in_a_curve_is_a_null() -> None:
    run = a_run({"step": 1.0, "a": 2.0}, {"step": 2.0, "a": math.nan}, {"step": 3.0, "a": math.inf})
    assert chart_series(run, "x", series(run, "a"))["y"] == [2.0, None, None]


def test_layers_that_come_and_go_leave_nan() -> None:
    run = a_run({"step": 1.0, "a": (1.0,)}, {"step": 2.0, "a": ()}, {"step": 3.0, "a": (1.0, 2.0)})
    steps, values = layer_series(run, "a")
    assert steps.tolist() == [1, 3]
    np.testing.assert_array_equal(values, [[1.0, math.nan], [1.0, 2.0]])


def test_a_table_has_a_blank_where_a_column_was_not_measured() -> None:
    train = Series(np.array([1.0, 2.0]), np.array([5.0, 4.0]))
    held = Series(np.array([2.0]), np.array([4.5]))
    assert table_rows([train, held]) == [[1.0, 5.0, None], [2.0, 4.0, 4.5]]


def test_a_narrow_strip_keeps_the_peak_or_the_mean_and_every_hole() -> None:
    values = np.arange(12.0).reshape(6, 2)
    values[5, 1] = math.nan
    ends, peak = reduce_spans(values, 3, peak=True)
    assert ends == [1, 3, 5]
    np.testing.assert_array_equal(peak, [[2, 3], [6, 7], [10, math.nan]])
    np.testing.assert_array_equal(
        reduce_spans(values, 3, peak=False)[1], [[1, 2], [5, 6], [9, math.nan]]
    )
    assert reduce_spans(values, 100, peak=True)[0] == [0, 1, 2, 3, 4, 5]
