"""fenchel/model/config.py: a wrong setting is refused in one sentence."""

from typing import Any

import pytest

from fenchel.model import ModelConfig


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"width": 30, "heads": 4}, "width=30 does not split over heads=4; try width=32"),
        ({"heads": 4, "kv_heads": 3}, "kv_heads=3 does not divide heads=4"),
        ({"width": 6, "heads": 2}, "a head of width 3 is odd"),
        ({"layers": 0}, "layers=0 should be at least 1"),
        ({"layers": -1}, "layers=-1"),
        ({"norm": "batch"}, "norm='batch' should be one of"),
        ({"choice": "sofmax"}, "choice='sofmax' should be one of"),
        ({"dropout": 1.0}, "dropout=1.0"),
        ({"epsilon": float("nan")}, "epsilon"),
        ({"rotary_base": 0.0}, "rotary_base"),
        ({"hidden": 0}, "hidden=0"),
        ({"vocabulary": 0}, "vocabulary=0"),
    ],
)
def test_a_wrong_setting_gets_one_sentence(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says) as refusal:
        ModelConfig(**{"vocabulary": 10, **settings})
    assert "\n" not in str(refusal.value)


def test_derived_sizes_follow_the_settings() -> None:
    config = ModelConfig(vocabulary=10, width=96, heads=6, kv_heads=2)
    assert (config.head_width, config.groups) == (16, 2)
    assert config.mlp_width == 256  # 8/3 x 96, a multiple of 32
    assert ModelConfig(vocabulary=10, width=96, heads=6, mlp="gelu").mlp_width == 384
    assert ModelConfig(vocabulary=10, hidden=77).mlp_width == 77
