"""fenchel/model/config.py: what is refused, and the sizes that follow from others."""

import math
from typing import Any

import pytest

from fenchel.config import from_mapping, to_mapping
from fenchel.model import ModelConfig

REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"vocabulary": 0}, "vocabulary=0 should be a whole number, 1 to 16777216."),
    ({"context": -1}, "context=-1 should be a whole number"),
    ({"layers": 2.0}, r"layers=2\.0 should be a whole number"),
    ({"layers": True}, "layers=True should be a whole number"),
    ({"width": 10**30}, "width=1000000000000000000000000000000 should be a whole number"),
    ({"heads": 0}, "heads=0 should be a whole number"),
    ({"hidden": 0}, "hidden=0 should be a whole number"),
    ({"kv_heads": 0}, "kv_heads=0 should be a whole number"),
    ({"width": 130, "heads": 4}, "width=130 does not split over heads=4; try width=128."),
    ({"width": 1, "heads": 4}, "width=1 does not split over heads=4; try width=4."),
    ({"heads": 4, "kv_heads": 3}, "kv_heads=3 does not divide heads=4; try kv_heads=1 or kv_h"),
    ({"width": 12, "heads": 4}, "a head of width 3 is odd; change width=12 or heads=4."),
    ({"norm": "batch"}, r"norm='batch' should be one of \('rms', 'layer'\)."),
    ({"positions": "alibis"}, "positions='alibis' should be one of"),
    ({"mlp": "tanh"}, "mlp='tanh' should be one of"),
    ({"choice": "softmaxx"}, "there is no choice map 'softmaxx'; did you mean 'softmax'?"),
    ({"choice": "entmax", "alpha": 1.0}, "needs 1 < alpha"),
    ({"choice": "entmax", "alpha": math.nan}, "needs 1 < alpha"),
    ({"dropout": 1.0}, r"dropout=1\.0 should be in \[0, 1\)."),
    ({"dropout": math.nan}, "dropout=nan should be in"),
    ({"epsilon": 0.0}, r"epsilon=0\.0 should be above 0"),
    ({"epsilon": math.nan}, "epsilon=nan should be above 0"),
    ({"rotary_base": 1.0}, r"rotary_base=1\.0 should be a finite number above 1."),
    ({"rotary_base": math.inf}, "rotary_base=inf should be a finite number above 1."),
]


@pytest.mark.parametrize(("changes", "sentence"), REFUSED, ids=str)
def test_a_setting_that_cannot_be_is_refused_in_one_sentence(
    changes: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(ValueError, match=sentence) as caught:
        ModelConfig(**{"vocabulary": 64, **changes})
    said = str(caught.value)
    assert said.endswith((".", "?"))
    assert "\n" not in said


def test_odd_heads_are_fine_where_nothing_is_turned() -> None:
    config = ModelConfig(vocabulary=9, width=12, heads=4, positions="learned")
    assert config.head_width == 3


def test_derived_sizes_follow_from_those_that_are_set() -> None:
    config = ModelConfig(vocabulary=9, width=96, heads=6, kv_heads=2)
    assert (config.head_width, config.groups) == (16, 2)
    assert ModelConfig(vocabulary=9, heads=4).groups == 4
    assert ModelConfig(vocabulary=9, mlp="gelu", width=96).mlp_width == 384
    assert ModelConfig(vocabulary=9, hidden=50).mlp_width == 50


@pytest.mark.parametrize("width", [2, 96, 98, 128, 384, 500])
def test_a_gated_mlp_is_eight_thirds_as_wide_rounded_up_to_a_multiple_of_32(width: int) -> None:
    wide = ModelConfig(vocabulary=9, width=width, heads=1).mlp_width
    assert wide % 32 == 0
    assert 0 <= wide - 8 * width / 3 < 32


def test_settings_survive_being_written_and_read() -> None:
    config = ModelConfig(vocabulary=77, heads=4, kv_heads=2, choice="entmax", alpha=1.25)
    assert from_mapping(ModelConfig, to_mapping(config)) == config
