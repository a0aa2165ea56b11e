"""fenchel/data/config.py: wrong settings of a text are refused; the vocabulary follows its size."""

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fenchel.config import from_mapping, to_mapping
from fenchel.data.config import LARGEST_DEFAULT, SMALLEST_DEFAULT, TextConfig, vocabulary_for


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"vocabulary": 257}, "vocabulary=257"),
        ({"vocabulary": 2**30}, "vocabulary=1073741824"),
        ({"validation": 1}, "validation=1"),
        ({"source": ""}, "source is empty"),
        ({"tokenizer": ""}, "tokenizer is empty"),
        ({"prepared": ""}, "prepared is empty"),
        ({"vocabulry": 300}, "did you mean vocabulary"),
    ],
)
def test_a_wrong_setting_is_named_with_its_value(values: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        from_mapping(TextConfig, values)


def test_settings_survive_the_way_through_a_mapping() -> None:
    config = TextConfig(source="a.txt", vocabulary=258, validation=2, prepared="shared")
    assert from_mapping(TextConfig, to_mapping(config)) == config


@given(st.integers(0, 2**50))
def test_the_vocabulary_is_twice_the_root_of_the_bytes_within_its_bounds(size: int) -> None:
    V, wanted = vocabulary_for(size), 2.0 * math.sqrt(size)
    assert V % 64 == 0
    assert SMALLEST_DEFAULT <= V <= LARGEST_DEFAULT
    if SMALLEST_DEFAULT <= wanted <= LARGEST_DEFAULT:
        assert wanted - 64 < V <= wanted


def test_a_vocabulary_that_is_left_out_stays_left_out() -> None:
    assert from_mapping(TextConfig, to_mapping(TextConfig())) == TextConfig(vocabulary=None)
