"""fenchel/data/config.py: settings of a text that cannot be meant are refused."""

from typing import Any

import pytest

from fenchel.config import from_mapping, to_mapping
from fenchel.data.config import TextConfig


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
