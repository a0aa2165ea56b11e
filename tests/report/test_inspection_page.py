"""fenchel/report/inspection_page.py: a page, complete, closed and deaf to markup."""

import json
import re
from collections.abc import Callable
from importlib import resources
from typing import Any

import numpy as np
import pytest

from fenchel.inspection_result import Inspection
from fenchel.report.heat_map import span_means
from fenchel.report.html import Html, document
from fenchel.report.inspection_page import render as render_page
from tests.report.conftest import typed

Inspect = Callable[..., dict[str, Any]]


def render(data: dict[str, Any]) -> str:
    return render_page(typed(Inspection, data))


def data_of(page: str) -> dict[str, Any]:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    assert found is not None
    return dict(json.loads(found[1]))


def test_every_picture_has_its_data_and_a_table_beside_it(inspection: Inspect) -> None:
    page = render(inspection())
    asked = re.findall(r'data-picture="([^"]+)"', page)
    assert sorted(asked) == sorted(data_of(page)["pictures"])
    for figure in re.findall(r"<figure.*?</figure>", page, re.DOTALL):
        assert "<table" in figure


def test_the_page_makes_no_request(inspection: Inspect) -> None:
    page = render(inspection())
    assert "default-src 'none'" in page
    assert "<img" not in page
    assert "</script><img" not in page
    assert not re.search(r"<(?:script|link|iframe|object)[^>]*(?:src|href)=", page)


@pytest.mark.parametrize(
    "power",
    ["innerHTML", "outerHTML", "insertAdjacent", "document.write", "eval(", "fetch(", "http"],
)
def test_the_heat_map_makes_no_markup_of_data_and_no_request(power: str) -> None:
    script = resources.files("fenchel.report").joinpath("heat_map.js").read_text(encoding="utf-8")
    assert power not in script


def test_only_this_page_brings_the_heat_picture(inspection: Inspect) -> None:
    with_heat = render(inspection())
    assert "function heat(" in with_heat
    assert "function heat(" not in document(title="run", header=Html(""), sections=())


def test_the_numbers_of_a_head_stand_where_it_stands(inspection: Inspect) -> None:
    found = inspection()
    picture = data_of(render(found))["pictures"]["heads"]
    measures = {one["name"]: one["values"] for one in picture["measures"]}
    head = found["heads"][1 * 4 + 2]  # layer 2, head 3
    assert measures["entropy"][1][2] == pytest.approx(head["entropy"]["mean"], rel=1e-5)
    assert measures["sigma all"][1][2] == pytest.approx(head["sigma"]["qkv"]["lower"], rel=1e-5)


def test_a_row_stands_at_its_token_and_its_head(inspection: Inspect) -> None:
    found = inspection()
    found["heads"][5]["rows"]["margin"][3] = None
    picture = data_of(render(found))["pictures"]["rows"]
    assert picture["rows"][5] == "L2 H2"
    assert picture["columns"][3] == " token3"
    measures = {one["name"]: one["values"] for one in picture["measures"]}
    wanted = found["heads"][5]["rows"]
    assert measures["entropy"][5] == pytest.approx(wanted["entropy"], rel=1e-5)
    assert measures["margin"][5][3] is None
    longer = data_of(render(inspection(tokens=300)))["pictures"]["rows"]
    assert len(longer["columns"]) == len(longer["measures"][0]["values"][0]) == 128


def test_a_span_of_rows_is_the_mean_of_its_values() -> None:
    draw = np.random.default_rng(0)
    values = draw.normal(size=(3, 41))
    values[draw.random(values.shape) < 0.4] = np.nan
    values[1, 5:12] = np.nan
    edges = [0, 1, 5, 8, 12, 41]
    found = span_means(values.tolist(), edges)
    for row, line in zip(values, found, strict=True):
        for part, mean in zip(np.split(row, edges[1:-1]), line, strict=True):
            there = part[~np.isnan(part)]
            assert mean == pytest.approx(there.mean() if len(there) else np.nan, nan_ok=True)
    assert np.isnan(found[1, 2])


def test_long_texts_are_gathered_into_spans_that_lose_nothing(inspection: Inspect) -> None:
    found = inspection(tokens=1000)
    found["layers"][0]["moved_by"] = [0.5, *[0.5 / 999] * 999]
    pictures = data_of(render(found))["pictures"]
    shares = pictures["mass"]["measures"][0]["values"][0]
    assert len(shares) == 256
    assert shares[0] > 0.5 > shares[-1]
    assert sum(shares) == pytest.approx(1.0, abs=1e-3)
    row = pictures["influence"]["measures"][0]["values"][3]
    wanted = sum(x * x for x in found["network"]["influence"]["values"][3])
    assert sum(x * x for x in row) == pytest.approx(wanted, rel=1e-3)


def test_what_was_not_measured_leaves_its_section_out(inspection: Inspect) -> None:
    found = inspection() | {"layers": [], "network": None, "precision": None}
    page = render(found)
    assert 'id="heads"' in page
    assert 'id="blocks"' not in page
    assert 'id="network"' not in page
    found["heads"][0]["margin"]["median"] = None  # a head whose rows see one key
    picture = data_of(render(found))["pictures"]["heads"]
    margins = next(one["values"] for one in picture["measures"] if one["name"] == "margin")
    assert margins[0][0] is None
