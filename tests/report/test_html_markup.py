"""fenchel/report/html.py: data enters as text and as attribute values, and stays that."""

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fenchel.report.html import Html, clean, element, facts, flatten, join, table

anything = st.text(st.characters(codec=None, categories=None), max_size=40)


@given(anything)
def test_text_comes_back_as_it_went_in(outline: Callable[[str], Any], text: str) -> None:
    page = outline(element("p", "x", text))
    assert page.elements == {"p": 1}
    assert page.text["p"] == ["x" + clean(text)]


@given(anything)
def test_an_attribute_comes_back_as_it_went_in(outline: Callable[[str], Any], text: str) -> None:
    page = outline(element("p", "x", title=text, aria_label=text))
    assert page.elements == {"p": 1}
    assert page.values == [("p", "title", clean(text)), ("p", "aria-label", clean(text))]


@given(anything)
def test_cleaned_text_can_be_written_and_hides_nothing(text: str) -> None:
    cleaned = clean(text)
    cleaned.encode("utf-8")
    assert not any(ord(one) < 32 and one not in "\n\t" for one in cleaned)
    assert not any(0x7F <= ord(one) < 0xA0 for one in cleaned)
    assert clean(cleaned) == cleaned


def test_markup_is_not_escaped_twice() -> None:
    inner = element("b", "a & b")
    assert join([inner, "<"]) == "<b>a &amp; b</b>&lt;"
    assert isinstance(join([inner]), Html)


@pytest.mark.parametrize("name", ["style", "onclick", "onerror"])
def test_what_the_policy_forbids_cannot_be_written(name: str) -> None:
    with pytest.raises(AssertionError):
        element("p", **{name: "x"})


def test_a_table_escapes_every_cell(outline: Callable[[str], Any]) -> None:
    page = outline(table(("<a>", "<b>"), [("<c>", "<d>")], caption="<e>"))
    assert set(page.elements) == {"table", "caption", "thead", "tbody", "tr", "th", "td"}
    assert page.text["table"] == ["<e><a><b><c><d>"]


def test_facts_of_any_depth_and_length_end(outline: Callable[[str], Any]) -> None:
    deep: dict[str, Any] = {"leaf": 1}
    for _ in range(5000):
        deep = {"nest": deep}
    assert len(list(flatten(deep))) == 1
    many = facts({str(i): i for i in range(10_000)}, caption="many")
    assert outline(many).elements["tr"] == 502
