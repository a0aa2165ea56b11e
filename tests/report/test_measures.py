"""fenchel/report/measures.py: one table of measures for the page and for the terminal."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from fenchel.cli.inspection_tables import certificate_tables, tables
from fenchel.inspection_result import (
    Certificates,
    Head,
    HeadCertificate,
    Inspection,
    Interval,
    LayerCertificate,
)
from fenchel.report.measures import (
    BLOCK,
    CERTIFICATE,
    HEAD,
    HEAD_CERTIFICATE,
    format_value,
    head_measure,
    measures_table,
    top_tokens,
)
from tests.report.conftest import typed


@pytest.fixture
def result(inspection: Callable[..., dict[str, Any]]) -> Inspection:
    found: Inspection = typed(Inspection, inspection())
    return found


@pytest.fixture
def head(result: Inspection) -> Head:
    return result.heads[5]


def cells(column: Any) -> list[str]:
    return [str(cell) for cell in column.cells]


@pytest.mark.parametrize("measures", [HEAD, BLOCK, CERTIFICATE, HEAD_CERTIFICATE])
def test_every_measure_of_a_table_has_its_own_name(measures: tuple[Any, ...]) -> None:
    names = [measure.name for measure in measures]
    assert len(set(names)) == len(names)


def test_a_bracket_is_written_by_both_ends_or_by_its_lower_one(head: Head) -> None:
    sigma = {name: Interval(1.2345, 2.0, 9) for name in ("q", "k", "v", "qkv")}
    head = replace(head, sigma=sigma)
    both, lower = head_measure("sigma all"), head_measure("sigma q")
    assert (both.text(head), both.terminal(head)) == ("1.23 to 2", "1.23-2")
    assert (lower.text(head), lower.terminal(head)) == ("1.23 to 2", "1.23")
    assert both.number(head) == lower.number(head) == 1.2345


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_number_that_is_not_finite_is_left_empty(head: Head, value: float) -> None:
    head = replace(head, first=value)
    measure = head_measure("on the first")
    assert measure.text(head) == measure.terminal(head) == ""


def test_page_and_terminal_show_the_same_heads(result: Inspection) -> None:
    heads = next(table for table in tables(result) if "most sensitive" in str(table.title))
    shown = {str(column.header): cells(column) for column in heads.columns}
    ranked = sorted(result.heads, key=lambda h: -h.sigma["qkv"].lower)
    assert shown["head"] == [f"L{h.layer} H{h.head}" for h in ranked]
    assert shown["dominant"] == [h.dominant for h in ranked]
    for measure in HEAD:
        heading = measure.short or measure.name
        if heading in shown:
            assert shown[heading] == [measure.terminal(h) for h in ranked]
    page = measures_table(HEAD, result.heads, caption="")
    assert all(f">{measure.name}</th>" in page for measure in HEAD)
    assert page.count("<tr>") == 1 + len(result.heads)


def test_a_layer_shows_the_mean_or_the_largest_of_its_heads(result: Inspection) -> None:
    first = next(iter(tables(result)))
    shown = {str(column.header): cells(column) for column in first.columns}
    heads = [h for h in result.heads if h.layer == 2]
    assert shown["entropy"][1] == f"{sum(h.entropy.mean for h in heads) / len(heads):.2f}"
    assert shown["logit"][1] == f"{max(h.max_logit.most for h in heads):.1f}"
    assert shown["row"][1] == f"{max(h.sensitivity.most for h in heads):.3f}"
    assert shown["token"][1] == f"{result.layers[1].token.lower:.3g}"
    assert shown["1/s"][1] == "0.9"


@pytest.mark.parametrize("exact", [0.000123456, 0.0213456, 0.4731, 1.1264, 65.834, 1234.4, 2.0])
def test_a_bound_is_rounded_to_the_side_on_which_it_stays_one(exact: float) -> None:
    layer = LayerCertificate(
        layer=1, centre=Interval(exact, exact, 3), lower=exact, upper=exact * (1 + 1e-9)
    )
    lower, upper, ratio = (
        next(one for one in CERTIFICATE if one.name == name)
        for name in ("lower", "upper", "upper / lower")
    )
    for shown in (lower.text, lower.terminal):
        assert 0.9 * exact < float(shown(layer).replace(",", "")) <= exact
    for shown in (upper.text, upper.terminal):
        assert exact < float(shown(layer).replace(",", "")) < 1.1 * exact
    assert ratio.text(layer) == "1.01"
    low, high = format_value(Interval(exact, 1.5 * exact, 3)).replace(",", "").split(" to ")
    assert float(low) <= exact
    assert float(high) >= 1.5 * exact


def test_a_certificate_without_an_upper_end_shows_none() -> None:
    centre = Interval(0.5, 0.5, 3)
    head = HeadCertificate(head=2, centre=centre, upper=None)
    layer = LayerCertificate(
        layer=1, centre=centre, lower=0.5, token_norm=8.0, moved=[0.25, 0.75], heads=[head]
    )
    refused = LayerCertificate(layer=2, refused="layer 2 caps its scores.")
    certificates = Certificates(
        level="attention", radius=0.1, norm="fro", dtype="float64", layers=[layer, refused]
    )
    layers, heads = certificate_tables(certificates, ["a", "b"])
    shown = {str(column.header): cells(column) for column in layers.columns}
    assert shown["centre"] == ["0.500", ""]
    assert shown["upper"] == ["none", ""]
    assert shown["ratio"] == ["", ""]
    assert shown["witness moves"] == ["1 'b' 75%, 0 'a' 25%", "layer 2 caps its scores."]
    assert [cells(column) for column in heads.columns] == [["L1 H2"], ["0.500"], ["none"]]
    assert "none" in measures_table(CERTIFICATE, [layer], caption="")


def test_tokens_with_equal_shares_stand_in_the_order_of_the_text() -> None:
    assert top_tokens([0.3, 0.4, 0.3], ["a", "b", "c"], 2) == ["1: b (0.40)", "0: a (0.30)"]
