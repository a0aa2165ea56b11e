"""fenchel/config.py: settings survive the way through text, and mistakes are named."""

import tomllib
from dataclasses import dataclass, field
from typing import Any, ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fenchel.config import (
    Use,
    assign,
    from_mapping,
    parse_value,
    read_with,
    reference,
    require_read,
    to_mapping,
    to_toml,
)


@dataclass(frozen=True, kw_only=True)
class Inner:
    width: int = 3
    rate: float = 0.5
    name: str = "x"
    loud: bool = False
    many: tuple[str, ...] = ()
    maybe: int | None = None


@dataclass(frozen=True, kw_only=True)
class Outer:
    seed: int = 0
    inner: Inner = field(default_factory=Inner)


inners = st.builds(
    Inner,
    width=st.integers(),
    rate=st.floats(allow_nan=False),
    name=st.text(),
    loud=st.booleans(),
    many=st.lists(st.text()).map(tuple),
    maybe=st.none() | st.integers(),
)


@given(st.builds(Outer, seed=st.integers(), inner=inners))
def test_settings_survive_toml(settings: Outer) -> None:
    text = to_toml(to_mapping(settings))
    assert from_mapping(Outer, tomllib.loads(text)) == settings


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"sede": 1}, "did you mean seed"),
        ({"inner": {"widht": 1}}, "did you mean inner.width"),
        ({"qqqq": 1}, "known: seed, inner"),
        ({"seed": "one"}, "'seed' should be int, got 'one'"),
        ({"seed": True}, "should be int"),
        ({"seed": 1.5}, "should be int"),
        ({"inner": 3}, "should be Inner"),
        ({"inner": {"maybe": "x"}}, "'inner.maybe' should be int"),
    ],
)
def test_a_mistake_is_named(values: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        from_mapping(Outer, values)


def test_a_whole_number_serves_as_a_float() -> None:
    assert from_mapping(Inner, {"rate": 2}).rate == 2.0


def test_assigning_leaves_the_rest_and_the_original_alone() -> None:
    before = {"seed": 1, "inner": {"width": 2, "name": "a"}}
    after = assign(before, "inner.width", 7)
    assert after == {"seed": 1, "inner": {"width": 7, "name": "a"}}
    assert before["inner"] == {"width": 2, "name": "a"}
    assert assign(before, "seed", 3) == {**before, "seed": 3}


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("3", 3),
        ("3.5", 3.5),
        ("1e-3", 1e-3),
        ("true", True),
        ("false", False),
        ("plain words", "plain words"),
        ('"3"', "3"),
        ('["a", "b"]', ["a", "b"]),
        ("2m", "2m"),
    ],
)
def test_a_value_is_read_as_it_looks(text: str, value: object) -> None:
    assert parse_value(text) == value


@dataclass(frozen=True, kw_only=True)
class Kitchen:
    """Settings of which some are read under a condition."""

    stove: str = "gas"
    """What it burns."""
    flame: float = 1.0
    """How high
    it burns."""
    pans: tuple[int, ...] = ()
    """Sizes."""

    USES: ClassVar = (read_with("flame", "stove", "gas", "wood"),)


@dataclass(frozen=True, kw_only=True)
class House:
    kitchen: Kitchen
    rooms: int | None = None
    """How many."""

    USES: ClassVar = (Use(("kitchen.pans",), "rooms", lambda c: c.rooms is not None),)


def test_a_setting_that_nothing_reads_is_refused_with_what_it_needs() -> None:
    require_read(Kitchen(flame=2.0))
    require_read(Kitchen(stove="power"))
    with pytest.raises(
        ValueError, match=r'^flame=2\.0 would do nothing; it needs stove="gas" or "wood"\.$'
    ):
        require_read(Kitchen(stove="power", flame=2.0))
    require_read(House(kitchen=Kitchen(pans=(3,)), rooms=2))
    with pytest.raises(ValueError, match=r"^kitchen\.pans=\(3,\) would do nothing; it needs rooms"):
        require_read(House(kitchen=Kitchen(pans=(3,))))


def test_the_reference_has_type_default_meaning_and_condition_of_every_setting() -> None:
    assert [tuple(row) for row in reference(House)] == [
        ("rooms", "int", "", "How many.", ""),
        ("kitchen.stove", "str", '"gas"', "What it burns.", ""),
        ("kitchen.flame", "float", "1.0", "How high it burns.", 'stove="gas" or "wood"'),
        ("kitchen.pans", "list of int", "[]", "Sizes.", "rooms"),
    ]


@pytest.mark.parametrize("text", ["x", '"""', "a # b"])
def test_comments_leave_the_values_as_they_are(text: str) -> None:
    mapping = {"seed": 1, "inner": {"name": "x = 1 # y"}}
    comments = {"seed": text, "inner.name": text, "inner": text, "other": text}
    written = to_toml(mapping, comments)
    assert tomllib.loads(written) == mapping
    assert written.count(f"# {text}\n") == 2
