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
    parse_toml,
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


integers = st.integers(min_value=1 - 2**64, max_value=2**64 - 1)
inners = st.builds(
    Inner,
    width=integers,
    rate=st.floats(allow_nan=False),
    name=st.text(),
    loud=st.booleans(),
    many=st.lists(st.text()).map(tuple),
    maybe=st.none() | integers,
)


@given(st.builds(Outer, seed=integers, inner=inners))
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
def test_a_value_is_parsed_by_its_form(text: str, value: object) -> None:
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


def test_without_the_source_settings_have_no_meaning_and_a_run_can_begin(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def absent(_: object) -> str:
        raise OSError

    monkeypatch.setattr("fenchel.config.inspect.getsource", absent)
    rows = list(reference(House))
    assert [row.about for row in rows] == [""] * 4
    comments = {row.name: row.about for row in rows}
    assert to_toml({"rooms": 2}, comments) == "rooms = 2\n"


@pytest.mark.parametrize("text", ["x", '"""', "a # b"])
def test_comments_leave_the_values_as_they_are(text: str) -> None:
    mapping = {"seed": 1, "inner": {"name": "x = 1 # y"}}
    comments = {"seed": text, "inner.name": text, "inner": text, "other": text}
    written = to_toml(mapping, comments)
    assert tomllib.loads(written) == mapping
    assert written.count(f"# {text}\n") == 2


@pytest.mark.parametrize("huge", [10**400, -(10**400), 2**64, 10**5000], ids="abcd")
@pytest.mark.parametrize("key", ["width", "rate", "maybe", "name"])
def test_an_absurd_number_is_refused_in_one_short_sentence(key: str, huge: int) -> None:
    with pytest.raises(ValueError, match=rf"setting 'inner\.{key}' should be") as refused:
        from_mapping(Outer, {"inner": {key: huge}})
    assert len(str(refused.value)) < 200


@pytest.mark.parametrize("many", [[10**400], [1], [["a"]], "a"], ids="abcd")
def test_the_elements_of_a_list_have_types_too(many: Any) -> None:
    with pytest.raises(ValueError, match=r"setting 'inner\.many"):
        from_mapping(Outer, {"inner": {"many": many}})


def test_a_value_of_any_length_gives_a_short_message() -> None:
    with pytest.raises(ValueError, match="should be int") as refused:
        from_mapping(Outer, {"seed": "x" * 10**6})
    assert len(str(refused.value)) < 200


@pytest.mark.parametrize("text", ["9" * 5000, "[" * 100_000, "1" + "0" * 400], ids="abc")
def test_a_value_that_cannot_be_parsed_is_text_or_a_number(text: str) -> None:
    assert str(parse_value(text)) == text


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"a = " + b"[" * 4000 + b"]" * 4000, "nested too deeply"),
        (b".".join([b"a"] * 50_000) + b" = 1", "a line of 100003 bytes"),
        (b"[" + b".".join([b"a"] * 50_000) + b"]", "a line of 100001 bytes"),
        (b"a = 1\n" * 200_000, "has 1200000 bytes"),
        (b"a = 1\na = 2", "Cannot overwrite"),
        (b"a = '\xff'", "utf-8"),
    ],
    ids="abcdef",
)
def test_toml_of_any_kind_is_read_or_refused_in_bounded_time(data: bytes, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        parse_toml(data)


def test_a_name_of_many_parts_is_no_setting() -> None:
    with pytest.raises(ValueError, match="there is no setting"):
        assign({}, ".".join("a" * 50_000), 1)
