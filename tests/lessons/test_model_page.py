"""The page of the model in a browser, against the library; and the checkpoint that it runs."""

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from selenium.webdriver.common.keys import Keys

import fenchel
from fenchel.checkpoints import Loaded
from fenchel.files import sha256, verify
from fenchel.lessons.course import MODEL
from fenchel.lessons.model_page import CASES, Case, model_page, page_links, result, settings
from fenchel.report.html import read_asset
from tests.browser import PHONE, Browser, needs_browser

WEIGHTS = "503d032c6583b794682e5ad0c8bca78fe511a37614d884775b9d3c42bbba2cf6"
"""SHA-256 of the weights; ``make lesson-model`` writes others on another machine."""


def test_the_checkpoint_is_the_recorded_one_and_small() -> None:
    verify(MODEL)
    assert sha256(MODEL / "model.safetensors") == WEIGHTS
    assert sum(path.stat().st_size for path in MODEL.iterdir()) < 4.5e6
    stored = fenchel.load(MODEL)
    assert {value.dtype for value in stored.model.state_dict().values()} == {torch.float16}


@pytest.fixture(scope="module")
def library() -> Loaded:
    return fenchel.load(MODEL, dtype=torch.float64)


def test_a_model_that_the_script_does_not_have_is_refused(library: Loaded) -> None:
    other = library._replace(config=replace(library.config, mlp="gelu"))
    with pytest.raises(ValueError, match=r"model\.js runs decoders"):
        settings(other)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    session = Browser()
    yield session
    session.driver.quit()


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("page") / "model.html"
    path.write_text(model_page(page_links(All_lessons="index.html")), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def opened(browser: Browser, page: Path) -> Browser:
    browser.open(page)
    checked(browser)
    return browser


def checked(browser: Browser) -> dict[str, float]:
    """What the page found when it compared itself with the library."""
    found = browser.until(lambda: browser.find("#check").get_attribute("data-worst"))
    return dict(json.loads(found))


@needs_browser
def test_all_logits_and_weights_of_twenty_sentences_are_the_library_s(
    browser: Browser, page: Path, library: Loaded, tmp_path: Path
) -> None:
    data = re.search(r'<script type="application/json".*?</script>', page.read_text(), re.DOTALL)
    assert data is not None
    bare = tmp_path / "bare.html"
    script = read_asset("model.js", "fenchel.lessons")
    bare.write_text(f'<!doctype html><meta charset="utf-8">{data[0]}<script>{script}</script>')
    browser.open(bare)
    browser.run(
        """
        const data = JSON.parse(document.getElementById("data").textContent);
        window.tokenizer = new Tokenizer(data.tokenizer);
        window.model = new Model(unpack(fromBase64(data.weights), data.shapes), data.settings);
        """
    )
    assert len(CASES) == 20
    for case in CASES:
        found = result(library, case)
        ids, logits, weights = browser.run(
            """
            const ids = tokenizer.encode(arguments[0]), last = ids.length - 1;
            model.run(ids.slice(0, 2), arguments[1]); // the rest comes on top of the KV cache
            const z = [...model.run(ids, arguments[1]).logits(last)];
            const rows = model.trace[last].blocks.map((b) => b.heads.map((h) => h.p));
            return [ids, z, rows];
            """,
            case.text,
            case.how(),
        )
        assert ids == found.ids, case.text
        torch.testing.assert_close(
            torch.tensor(logits, dtype=torch.float64), found.logits, atol=1e-4, rtol=0.0
        )
        for rows, expected in zip(weights, found.weights, strict=True):
            torch.testing.assert_close(
                torch.tensor(rows, dtype=torch.float64), expected, atol=1e-4, rtol=0.0
            )


@needs_browser
def test_texts_of_all_kinds_have_the_library_s_tokens(opened: Browser, library: Loaded) -> None:
    """Pieces under the words of the page; typed, with what a keyboard can send."""
    for text in (
        "we'll pay $1,200.50 (in gold)",
        "UNITED  STATES'S",
        "the people's will",
        "x",
        "Ça déjà-vu — no",
    ):
        type_text(opened, text)
        shown = "return [...document.querySelectorAll('.id')].map((t) => t.textContent)"
        ids = [str(i) for i in library.tokenizer.encode(text)]
        opened.expect(lambda: opened.run(shown), ids)  # noqa: B023


def type_text(browser: Browser, text: str) -> None:
    field = browser.find("#text")
    field.send_keys(Keys.CONTROL, "a")
    field.send_keys(text)


def bars(browser: Browser) -> dict[str, float]:
    rows = browser.run(
        """return [...document.querySelectorAll("#next .bar-row")].map((row) =>
        [row.children[0].textContent, row.children[2].textContent])"""
    )
    return {name: float(value) for name, value in rows}


@needs_browser
def test_the_page_loads_nothing_and_compares_itself_with_the_library(
    browser: Browser, page: Path
) -> None:
    for width, scheme in ((1280, "light"), (PHONE, "light"), (PHONE, "dark")):
        browser.open(page, width=width, scheme=scheme)
        worst = checked(browser)
        assert worst["cases"] == 20
        assert worst["wrong"] == 0
        assert max(worst[name] for name in ("logits", "probabilities", "weights")) < 1e-4
        assert browser.find("#check").get_attribute("class") == "good"
        assert browser.run("return document.documentElement.scrollWidth") <= width
        assert browser.console() == []
        assert [each for each in browser.requests() if each != page.as_uri()] == []


@needs_browser
def test_a_page_that_computes_something_else_says_so(
    browser: Browser, page: Path, tmp_path: Path
) -> None:
    for old, new in (('"epsilon":1e-05', '"epsilon":0.1'), ('"ids":[349,', '"ids":[350,')):
        text = page.read_text()
        assert old in text
        other = tmp_path / "other.html"
        other.write_text(text.replace(old, new))
        browser.open(other)
        checked(browser)
        assert browser.find("#check").get_attribute("class") == "bad"
        assert "does not compute what fenchel computes" in browser.text("#check")


@needs_browser
def test_another_map_temperature_prior_and_cut_show_the_library_s_numbers(
    browser: Browser, page: Path, library: Loaded
) -> None:
    text = "The ships and the sailors need the Secretary of the"
    cases = {
        "map=sparsemax": Case(text, "sparsemax"),
        "T=0.5&map=entmax": Case(text, "entmax", 0.5),
        "prior=window": Case(text, prior="window"),
        "cuts=2,0,10,1": Case(text, cuts=((2, 0, 10, 1),)),
    }
    for address, case in cases.items():
        browser.open("about:blank")
        browser.open(f"{page.as_uri()}#{address}&layer=2&head=0&key=1")
        found = result(library, case)
        p = found.logits.softmax(-1)
        top = int(p.argmax())
        word, share = library.tokenizer.decode([top]).strip(), float(p[top])
        near = pytest.approx(share, abs=6e-4)
        browser.expect(lambda: bars(browser).get(word), near)  # noqa: B023
        weight = float(found.weights[2][0, 1])
        browser.until(lambda: f"with weight {weight:.4f}" in browser.text("#cell"))  # noqa: B023
    browser.until(lambda: "goes from 0.876" in browser.text("#said"))


@needs_browser
def test_a_cell_is_opened_by_mouse_and_keys_and_its_line_is_cut(opened: Browser) -> None:
    def says(part: str, words: str) -> None:
        opened.until(lambda: words in opened.text(part))

    opened.run("location.hash = '#T=1'")
    type_text(opened, "The ships and the sailors need the Secretary of the")
    opened.until(lambda: "Navy" in bars(opened))
    before = bars(opened)
    opened.run("document.querySelectorAll('#heads button')[1].click()")
    says("#cell", "Block 1, head 2")
    opened.find("#matrix").send_keys(Keys.ARROW_UP, Keys.ARROW_LEFT)
    says("#cell", "“of” reads")
    opened.expect(lambda: opened.text("#after"), "“of”")
    opened.find("#stack").send_keys(Keys.ARROW_RIGHT)
    opened.expect(lambda: opened.text("#after"), "“the”")
    opened.run("document.querySelectorAll('.grasp')[0].dispatchEvent(new MouseEvent('click'))")
    says("#cell", "Block 1, head 1: “the” reads")
    opened.run("document.querySelectorAll('#heads button')[4].click()")
    says("#cell", "“the” reads “ships”")
    opened.find("#cut").click()
    says("#cell", "with weight 0.0000")
    opened.until(lambda: bars(opened) != before)
    opened.until(lambda: opened.text("#said").startswith("With the line cut, “"))
    effect = opened.text("#said").removesuffix(" Red marks: before the cut.")
    says(".steps", effect)  # beside the button too, which may be a screen below
    opened.until(lambda: "cuts=2%2C0%2C10%2C1" in opened.driver.current_url)
    opened.find("#cut").click()
    opened.expect(lambda: bars(opened), before)
    opened.run("document.querySelectorAll('.steps details').forEach((d) => { d.open = true; })")
    opened.until(lambda: opened.find_all(".steps table"))
    products = opened.run(
        """const rows = [...document.querySelector(".steps table").rows].slice(1);
        return rows.map((row) => +row.cells[3].textContent.replace("\u2212", "-"));"""
    )
    score = re.search(r"z = (−?[\d.]+)", opened.text("#steps"))
    assert score is not None
    assert sum(products) / 8 == pytest.approx(float(score[1].replace("−", "-")), abs=5e-3)
    assert opened.console() == []


@needs_browser
def test_an_empty_text_and_a_long_one_are_shown(opened: Browser) -> None:
    type_text(opened, " ")
    opened.find("#text").send_keys(Keys.BACKSPACE)
    opened.expect(lambda: opened.text("#said"), "Type a word.")
    opened.run(
        """const field = document.getElementById("text");
        field.value = "the people of the United States ".repeat(40);
        field.dispatchEvent(new Event("input"));"""
    )
    ids = "return document.querySelectorAll('.id').length"
    opened.expect(lambda: opened.run(ids), 96)
    assert opened.console() == []
