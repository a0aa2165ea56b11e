"""fenchel/choice/by_name.py: the table of maps that settings and commands can name."""

import math

import pytest

from fenchel.choice import MAPS, Entmax, Hard, Softmax, Sparsemax, by_name
from fenchel.choice.by_name import choice_from_record, maps_with
from fenchel.cli.doctor import backends
from fenchel.model import ModelConfig


def test_each_name_gives_its_map() -> None:
    assert by_name("softmax", beta=2.0) == Softmax(2.0)
    assert by_name("entmax", alpha=1.2, beta=2.0) == Entmax(1.2, 2.0)
    assert by_name("sparsemax", beta=3.0) == Sparsemax(3.0)
    assert by_name("hard") == Hard()


def test_a_setting_of_another_map_is_ignored_and_an_unknown_one_refused() -> None:
    assert by_name("hard", alpha=1.2, beta=2.0) == Hard()
    with pytest.raises(TypeError, match="no map has a setting 'alhpa'; known: beta, alpha"):
        by_name("entmax", alhpa=1.2)


def test_a_name_that_is_nearly_right_is_answered_with_the_right_one() -> None:
    with pytest.raises(ValueError, match="did you mean 'sparsemax'"):
        by_name("sparse-max")
    with pytest.raises(ValueError, match="known: softmax"):
        by_name("zzz")


def test_a_row_of_the_table_makes_a_map_a_setting_and_a_line_of_doctor(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(MAPS, "boltzmann", Softmax)
    assert by_name("boltzmann", beta=2.0) == Softmax(2.0)
    assert "boltzmann" in maps_with("beta")
    assert ModelConfig(vocabulary=16, choice="boltzmann").choice_of(0) == "boltzmann"
    assert "boltzmann" in backends()


@pytest.mark.parametrize(
    "value",
    [1e300, -1e300, 10**400, math.nan, math.inf],
    ids=["huge", "negative", "integer", "nan", "inf"],
)
@pytest.mark.parametrize("key", ["alpha", "beta"])
def test_a_stored_number_that_no_float32_can_be_is_a_sentence(key: str, value: float) -> None:
    with pytest.raises(ValueError, match=key):
        choice_from_record({"map": "entmax", "alpha": 1.5, "beta": 1.0, key: value})
