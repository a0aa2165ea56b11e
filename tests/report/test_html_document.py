"""fenchel/report/html.py: one file that admits its own script and style and nothing else."""

import base64
import hashlib
import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fenchel.report.html import Html, Section, data_block, document, element

anything = st.text(st.characters(codec=None, categories=None), max_size=40)


@pytest.fixture(scope="module")
def page() -> str:
    body = element("p", "hello $title ${script}")
    part = Section(
        anchor="one", title="One", body=body, pictures={"p": {"view": "bars", "bars": []}}
    )
    return document(title="A <title>", header=Html("<h1>head</h1>"), sections=[part])


def test_the_policy_names_the_very_script_and_style(
    outline: Callable[[str], Any], page: str
) -> None:
    found = outline(page)
    (policy,) = [v for _, name, v in found.values if name == "content" and "default-src" in v]
    rules = dict(rule.split(" ", 1) for rule in policy.split("; "))
    assert rules["default-src"] == "'none'"
    for kind, content in (
        ("style-src", found.text["style"][0]),
        ("script-src", found.text["script"][1]),
    ):
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        assert rules[kind] == f"'sha256-{digest}'"
    assert rules.keys() == {
        "default-src",
        "script-src",
        "style-src",
        "base-uri",
        "form-action",
        "require-trusted-types-for",
    }


def test_the_policy_comes_before_anything_it_governs(page: str) -> None:
    assert page.index("Content-Security-Policy") < page.index("<style") < page.index("<script")


def test_there_is_one_block_of_data_and_one_script(
    outline: Callable[[str], Any], page: str
) -> None:
    found = outline(page)
    assert found.value("script", "type") == ["application/json", "module"]
    assert json.loads(found.text["script"][0]) == {"pictures": {"p": {"view": "bars", "bars": []}}}
    assert not found.strays


def test_placeholders_in_the_data_are_only_words(outline: Callable[[str], Any], page: str) -> None:
    assert outline(page).text["p"].count("hello $title ${script}") == 1


def test_the_title_is_text(outline: Callable[[str], Any], page: str) -> None:
    assert outline(page).text["title"] == ["A <title>"]


@given(
    st.recursive(
        anything, lambda inner: st.dictionaries(anything, inner) | st.lists(inner), max_leaves=5
    )
)
def test_a_block_of_data_reads_back_and_never_ends_early(value: Any) -> None:
    block = data_block(value)
    assert "<" not in block
    assert block.isascii()
    assert json.loads(block) == value


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_number_that_no_browser_reads_is_refused(value: float) -> None:
    with pytest.raises(ValueError):
        data_block({"a": value})
