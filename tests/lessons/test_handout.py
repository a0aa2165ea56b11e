"""``fenchel learn --print``: a sheet per lesson, printed by a browser."""

import base64
import re
from pathlib import Path

import pytest

from fenchel.cli import main
from fenchel.lessons.course import COURSE
from fenchel.lessons.handout import plan
from tests.browser import Browser, needs_browser

NAME = "cross_entropy"


@pytest.fixture(scope="module")
def sheet(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sheets") / "print"
    assert main(["learn", NAME, "--print", str(folder)]) == 0
    (page,) = folder.iterdir()
    return page


def test_the_key_stands_on_the_teachers_page_only(sheet: Path) -> None:
    text = sheet.read_text()
    body = text[text.index("<main") : text.index("</main>")]
    mine, key = body.split('<section class="teacher">')
    for part in ("Predict.", "By pencil", "By choice", "In code", "data-chart"):
        assert part in mine
    for part in ("A plan for", "What readers get wrong", "about seven times as much", "xlogy"):
        assert part in key
    assert "<strong>By pencil. 1.5.</strong>" in key
    assert "1.5." not in mine
    assert "xlogy" not in mine, "the solution"


@pytest.mark.parametrize("minutes", sorted({each.minutes for each in COURSE}))
def test_the_plan_adds_up(minutes: int) -> None:
    parts = [int(part.split()[0]) for part in plan(minutes)]
    assert sum(parts) == minutes
    assert min(parts) >= 5


@needs_browser
def test_it_prints_on_two_sides_and_a_page_for_the_key(sheet: Path) -> None:
    browser = Browser()
    try:
        browser.open(sheet)
        charts = "return document.querySelectorAll('.sheet .chart > svg').length"
        browser.until(lambda: browser.run(charts) == 1)  # drawn once the page has a width
        assert browser.console() == []
        options = {"preferCSSPageSize": True, "printBackground": True}
        made = browser.driver.execute_cdp_cmd("Page.printToPDF", options)
    finally:
        browser.driver.quit()
    pdf = base64.b64decode(made["data"])
    assert 2 <= len(re.findall(rb"/Type\s*/Page\b(?!s)", pdf)) <= 3
    assert re.search(rb"/MediaBox \[0 0 59[45]\S* 84[12]\S*\]", pdf), "A4"


def test_a_sheet_is_not_written_over_a_file_of_the_readers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "softmax.html").write_text("mine")
    assert main(["learn", "softmax", "--print", str(tmp_path)]) == 2
    assert main(["learn", "softmax", "--print", str(tmp_path / "a"), "--edit"]) == 2
    error = capsys.readouterr().err
    assert "is not a page of fenchel" in error
    assert "--freeze and --print write pages, --edit opens an editor: give one." in error
    assert (tmp_path / "softmax.html").read_text() == "mine"
