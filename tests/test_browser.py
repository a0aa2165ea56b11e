"""tests/browser.py: actions on a page that adds, covers and replaces its elements meanwhile."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from selenium.common.exceptions import NoSuchElementException, StaleElementReferenceException

from tests.browser import Browser, needs_browser

PAGE = """
<!doctype html><p id="count">0</p><div id="place"></div>
<div id="cover" style="position: fixed; inset: 0"></div>
<script>
function draw() {
    const button = document.createElement("button");
    button.textContent = "more";
    button.onclick = () => setTimeout(() => {
        const count = document.createElement("p");
        count.id = "count";
        count.textContent = 1 + Number(document.querySelector("#count").textContent);
        document.querySelector("#count").replaceWith(count);
    }, 200);
    document.querySelector("#place").replaceChildren(button);
}
setTimeout(() => setInterval(draw, 40), 300);
setTimeout(() => document.querySelector("#cover").remove(), 600);
</script>
"""


@pytest.fixture
def browser(tmp_path: Path) -> Iterator[Browser]:
    session = Browser()
    (tmp_path / "page.html").write_text(PAGE)
    session.open(tmp_path / "page.html")
    yield session
    session.driver.quit()


@needs_browser
def test_an_action_finds_its_element_until_it_succeeds(browser: Browser) -> None:
    button = browser.find("button")
    with pytest.raises(NoSuchElementException):
        _ = button.element
    button.click()
    browser.expect(lambda: browser.text("#count"), "1")
    held = button.element

    def replaced() -> bool:
        try:
            return not held.is_displayed()
        except StaleElementReferenceException:
            return True

    browser.until(replaced)
    assert button.text == "more"
    assert browser.texts("button") == ["more"]
    (same,) = browser.find_all("button")
    same.click()
    browser.expect(lambda: browser.text("#count"), "2")
    assert browser.run("return arguments[0].textContent", same) == "more"


@needs_browser
def test_what_does_not_come_is_an_assertion_with_what_came(browser: Browser) -> None:
    with pytest.raises(AssertionError, match=r"after 0\.3 s '0', not '7'"):
        browser.expect(lambda: browser.text("#count"), "7", seconds=0.3)
