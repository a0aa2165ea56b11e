"""fenchel/report/lens_page.py and lens.js: the grid of words, and the law of a cell."""

import re
from importlib import resources
from pathlib import Path
from typing import Any

import pytest

from fenchel.report.lens_page import finding, render
from tests.browser import DESKTOP, PHONE, Browser, needs_browser

TOKENS = ["<s>", "a", "</script><b>", " of"]


def record(kinds: tuple[str, ...] = ("logit", "jacobian without offset", "jacobian")) -> Any:
    """Two layers of a model that says word 2 at the end and word 1 before it."""

    def lens(kind: str) -> dict[str, Any]:
        agreement = [
            {"layer": 1, "top": 0.5, "kl": 1.25, "rank": 1.0, "loss": 3.0},
            {"layer": 2, "top": 1.0, "kl": 0.0, "rank": 1.0, "loss": 2.0},
        ]
        return {
            "kind": kind,
            "layers": [1, 2],
            "agreement": agreement,
            "first": [1, 2, 2, 1],
            "top": [[[2, 1], [1, 2], [1, 2], [2, 1]], [[2, 1]] * 4],
            "probability": [[[0.5, 0.25]] * 4, [[0.9, 0.1]] * 4],
            "kl": [[0.1, 1.5, 2.0, 0.3], [0.0] * 4],
            "rank": [[1, 2, 2, 1], [1] * 4],
        }

    fit = {
        "about": "two stretches",
        "texts": 2,
        "positions": 20,
        "skip": 16,
        "targets": "later",
        "error": {1: 0.08},
        "spread_positions": {1: 0.5},
        "spread_texts": {1: 0.11},
    }
    return {
        "subject": {"name": "<i>m</i>", "family": "llama", "parameters": 10},
        "text": "a text",
        "tokens": TOKENS,
        "did": "The lens is fitted to a text.",
        "fit": fit if len(kinds) > 1 else None,
        "words": {1: "<img>", 2: " the"},
        "lenses": [lens(kind) for kind in kinds],
    }


@pytest.mark.parametrize("kinds", [("logit",), ("logit", "jacobian without offset", "jacobian")])
def test_every_picture_has_a_table_and_no_markup_comes_from_data(kinds: tuple[str, ...]) -> None:
    page = render(record(kinds))
    for figure in re.findall(r"<figure.*?</figure>", page, re.DOTALL):
        assert "<table" in figure
    assert "<i>m</i>" not in page
    assert "<img>" not in page
    assert "</script><b>" not in page
    assert ("error of J" in page) == (len(kinds) > 1)
    assert "layer 2" in page


@pytest.mark.parametrize("power", ["innerHTML", "insertAdjacent", "eval(", "fetch(", "http"])
def test_the_script_makes_no_markup_of_data_and_no_request(power: str) -> None:
    script = resources.files("fenchel.report").joinpath("lens.js").read_text(encoding="utf-8")
    assert power not in script


@needs_browser
def test_a_cell_shows_its_law(tmp_path: Path) -> None:
    page = tmp_path / "lens.html"
    page.write_text(render(record()))
    browser = Browser()

    def law() -> str:
        return str(browser.run("return document.querySelector('.lens-law').textContent"))

    def cells() -> list[str]:
        classes = "return [...document.querySelectorAll('.lens td')].map(c => c.className.trim())"
        return list(browser.run(classes))

    def checked() -> str:
        choice = ".heat-choice[aria-checked=true]"
        return str(browser.run(f"return document.querySelector('{choice}').textContent"))

    try:
        for width in (DESKTOP, PHONE):
            browser.open(page, width=width)
            assert not browser.console()
            assert browser.run("return document.documentElement.scrollWidth") <= width
            assert law().startswith(f"Layer 1, after {TOKENS[2]}")
            assert "rank 2" in law()
            browser.run("document.querySelectorAll('.lens tbody td')[4].click()")
            browser.until(lambda: law().startswith("The model itself, after <s>"))
            browser.expect(cells, ["agrees", "", "", "agrees", "chosen", "", "", ""])
            browser.run("document.querySelectorAll('.heat-choice')[0].click()")
            browser.expect(checked, "Logit lens")
    finally:
        browser.driver.quit()


def test_the_lens_that_is_nearest_is_the_one_that_is_summed_up() -> None:
    told = record()
    assert finding(told) == (
        "After layer 1 of 2 the likeliest next word is the final one for 50% of the tokens. The "
        "largest step from there is layer 2 (+50%). Read by the lens that is nearest to the model "
        "here, the logit lens."
    )
    told["lenses"][2]["agreement"][0] |= {"kl": 1.0, "top": 0.25}
    assert "25% of the tokens, after layer 2 for 100%" in finding(told)
    assert finding(told).endswith("the Jacobian lens with its offset.")
    assert finding(told) in render(told)


@needs_browser
def test_the_grid_and_the_map_begin_with_the_lens_that_is_summed_up(tmp_path: Path) -> None:
    told, page, browser = record(), tmp_path / "lens.html", Browser()
    told["lenses"][1]["agreement"][0]["kl"] = 0.5
    page.write_text(render(told))
    checked = "return [...document.querySelectorAll('[aria-checked=true]')].map(c => c.textContent)"
    try:
        browser.open(page, width=DESKTOP)
        browser.expect(lambda: list(browser.run(checked)), ["J x", "J x"])
    finally:
        browser.driver.quit()
