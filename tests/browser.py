"""A headless Chromium for the tests of pages: those of the reports and those of the lessons.

A page answers an event when it comes to it: after a frame, after a timer, after a server. On a busy
machine that is later than the next line of a test. So

- an element is named by a ``Locator``, found anew for every action, and the action is repeated
  while the page replaces, covers or has not yet added the element;
- what an event brings about is awaited, by ``until`` or ``expect``, and not read once.

FENCHEL_CPU_SLOWDOWN=6 makes the pages of a run six times as slow as the machine is.
"""

import json
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import pytest
from selenium import webdriver
from selenium.common.exceptions import (
    ElementNotInteractableException,
    InvalidElementStateException,
    MoveTargetOutOfBoundsException,
    NoSuchElementException,
    NoSuchFrameException,
    StaleElementReferenceException,
    TimeoutException,
)
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By
from selenium.webdriver.remote.webelement import WebElement
from selenium.webdriver.support.wait import WebDriverWait

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser"))), None)
DRIVER = shutil.which("chromedriver")
needs_browser = pytest.mark.skipif(
    not (CHROMIUM and DRIVER), reason="no browser: apt-get install chromium chromium-driver"
)
DESKTOP, PHONE = 1280, 390
PATIENCE = 30.0
"""Seconds until an action or an expectation fails. Only a failure takes that long."""
PASSING = (
    ElementNotInteractableException,  # also: another element takes the click
    InvalidElementStateException,
    MoveTargetOutOfBoundsException,
    NoSuchElementException,
    NoSuchFrameException,
    StaleElementReferenceException,
)
"""What an element raises while its page is being drawn."""

Result = TypeVar("Result")


class Locator:
    """An element by the way to find it. Every action finds it anew, until the action succeeds."""

    def __init__(self, browser: "Browser", find: Callable[[], WebElement]) -> None:
        self._browser, self._find = browser, find

    @property
    def element(self) -> WebElement:
        """The element that is in the page now."""
        return self._find()

    def act(self, action: Callable[[WebElement], Result]) -> Result:
        """The result of an action on the element."""
        return self._browser.repeat(lambda: action(self._find()))

    def click(self) -> None:
        self.act(lambda element: element.click())

    def clear(self) -> None:
        self.act(lambda element: element.clear())

    def send_keys(self, *keys: str) -> None:
        self.act(lambda element: element.send_keys(*keys))

    def is_displayed(self) -> bool:
        return self.act(lambda element: element.is_displayed())

    def is_enabled(self) -> bool:
        return self.act(lambda element: element.is_enabled())

    def get_attribute(self, name: str) -> str:
        """The attribute or property; empty where there is none."""
        return self.act(lambda element: element.get_attribute(name) or "")

    def get_property(self, name: str) -> Any:
        return self.act(lambda element: element.get_property(name))

    def value_of_css_property(self, name: str) -> str:
        return self.act(lambda element: element.value_of_css_property(name))

    @property
    def text(self) -> str:
        return self.act(lambda element: element.text)

    @property
    def tag_name(self) -> str:
        return self.act(lambda element: element.tag_name)

    @property
    def rect(self) -> dict[str, float]:
        return self.act(lambda element: dict(element.rect))

    def matches(self, selector: str) -> bool:
        return bool(self._browser.run("return arguments[0].matches(arguments[1])", self, selector))

    def is_focused(self) -> bool:
        return bool(self._browser.run("return arguments[0] === document.activeElement", self))

    def find_all(self, selector: str) -> list["Locator"]:
        """The elements of a selector inside this one."""
        return self._browser.locators(
            lambda: self._find().find_elements(By.CSS_SELECTOR, selector), selector
        )


class Browser:
    """A headless Chromium whose console, requests, width and colour scheme can be read and set."""

    def __init__(self) -> None:
        options = webdriver.ChromeOptions()
        options.binary_location = str(CHROMIUM)
        flags = ["--headless=new", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars"]
        flags += ["--no-first-run", "--disable-background-networking", "--disable-component-update"]
        flags += ["--no-sandbox"] if os.geteuid() == 0 else []
        for flag in flags:
            options.add_argument(flag)
        options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
        self.driver = webdriver.Chrome(options=options, service=Service(DRIVER))
        if slowdown := os.environ.get("FENCHEL_CPU_SLOWDOWN"):
            rate = {"rate": float(slowdown)}
            self.driver.execute_cdp_cmd("Emulation.setCPUThrottlingRate", rate)

    def open(self, page: Path | str, *, width: int = DESKTOP, scheme: str = "light") -> None:
        """Open a file or an address."""
        screen = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width == PHONE}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", screen)
        self.set_scheme(scheme)
        for log in ("browser", "performance"):
            self.driver.get_log(log)  # reading empties it
        self.driver.get(page.as_uri() if isinstance(page, Path) else page)

    def set_scheme(self, scheme: str) -> None:
        """Also without smooth scrolling, which would move an element while it is clicked."""
        wanted = {"prefers-color-scheme": scheme, "prefers-reduced-motion": "reduce"}
        features = [{"name": name, "value": value} for name, value in wanted.items()]
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})

    def console(self) -> list[str]:
        return [entry["message"] for entry in self.driver.get_log("browser")]

    def requests(self) -> list[str]:
        """Addresses that were requested since the page was opened and that no policy refused."""
        sent: dict[str, str] = {}
        for entry in self.driver.get_log("performance"):
            message = json.loads(entry["message"])["message"]
            parameters = message["params"]
            if message["method"] == "Network.requestWillBeSent":
                sent[parameters["requestId"]] = parameters["request"]["url"]
            elif parameters.get("blockedReason") == "csp":
                sent.pop(parameters["requestId"], None)  # may be of the page before
        return list(sent.values())

    def run(self, script: str, *arguments: Any) -> Any:
        """The value of a script; a locator among the arguments is its element."""

        def execute() -> Any:
            given = [each.element if isinstance(each, Locator) else each for each in arguments]
            return self.driver.execute_script(script, *given)

        return self.repeat(execute)

    def repeat(self, action: Callable[[], Result]) -> Result:
        """The result of an action, repeated while its element is being drawn."""
        deadline = time.monotonic() + PATIENCE
        while True:
            try:
                return action()
            except PASSING:
                if time.monotonic() > deadline:
                    raise
            time.sleep(0.02)

    def find(self, selector: str) -> Locator:
        return Locator(self, lambda: self.driver.find_element(By.CSS_SELECTOR, selector))

    def find_all(self, selector: str) -> list[Locator]:
        """The elements that a selector has now."""
        return self.locators(lambda: self.driver.find_elements(By.CSS_SELECTOR, selector), selector)

    def find_deep(self, selector: str, text: str = "") -> list[Locator]:
        """The elements of a selector in the page and in all its shadow trees, in order.

        With a text only those that show it.
        """
        script = """
            const found = [], visit = (root) => {
                for (const element of root.querySelectorAll("*")) {
                    const right = !arguments[1] || element.innerText === arguments[1];
                    if (element.matches(arguments[0]) && right) found.push(element);
                    if (element.shadowRoot) visit(element.shadowRoot);
                }
            };
            visit(document);
            return found;
        """
        run = self.driver.execute_script
        return self.locators(lambda: list(run(script, selector, text)), selector)

    def locators(self, find: Callable[[], list[WebElement]], name: str) -> list[Locator]:
        """One locator for each element of a list that is found anew for every action."""

        def at(index: int) -> Callable[[], WebElement]:
            def found() -> WebElement:
                elements = find()
                if index < len(elements):
                    return elements[index]
                raise NoSuchElementException(f"{name}, number {index + 1} of {len(elements)}")

            return found

        return [Locator(self, at(index)) for index in range(len(self.repeat(find)))]

    def focused(self) -> Locator:
        return Locator(self, lambda: self.driver.switch_to.active_element)

    @contextmanager
    def frame(self, frame: Locator) -> Iterator[None]:
        """Actions inside go to the page of a frame."""
        frame.act(self.driver.switch_to.frame)
        try:
            yield
        finally:
            self.driver.switch_to.default_content()

    def text(self, selector: str) -> str:
        return self.find(selector).text

    def texts(self, selector: str) -> list[str]:
        """The texts of all elements of a selector, of one drawing of the page."""
        find = self.driver.find_elements
        return self.repeat(lambda: [each.text for each in find(By.CSS_SELECTOR, selector)])

    def hover(self, selector: str, across: float, down: float) -> None:
        """Move the mouse over an element, to shares of its width and height.

        A layout that is still changing may move the element away: then once more.
        """
        target = self.find(selector)

        def move() -> bool:
            self.run("arguments[0].scrollIntoView({block: 'center'})", target)
            box = self.run("return arguments[0].getBoundingClientRect()", target)
            place = {
                "x": box["left"] + across * box["width"],
                "y": box["top"] + down * box["height"],
            }
            self.driver.execute_cdp_cmd("Input.dispatchMouseEvent", {"type": "mouseMoved", **place})
            return bool(self.run("return arguments[0].matches(':hover')", target))

        self.until(move)

    def drag(self, handle: Locator, right: float, down: float) -> None:
        """Press the mouse on the middle of an element, move it by so many pixels, release it.

        The element may be in the frame to which the driver has switched.
        """
        box = self.run(
            """
            arguments[0].scrollIntoView({block: "center"});
            const box = arguments[0].getBoundingClientRect(), frame = window.frameElement;
            const outer = frame ? frame.getBoundingClientRect() : {left: 0, top: 0};
            return [outer.left + box.left + box.width / 2, outer.top + box.top + box.height / 2];
            """,
            handle,
        )
        for kind, share in (
            ("mouseMoved", 0.0),
            ("mousePressed", 0.0),
            ("mouseMoved", 0.5),
            ("mouseMoved", 1.0),
            ("mouseReleased", 1.0),
        ):
            place = {"x": box[0] + share * right, "y": box[1] + share * down}
            held = {"button": "left", "buttons": 1, "clickCount": 1} if share or "P" in kind else {}
            event = {"type": kind, **place, **held}
            self.driver.execute_cdp_cmd("Input.dispatchMouseEvent", event)

    def colours(self, selector: str) -> list[int]:
        """The opaque colours of a canvas as numbers, the most frequent first, at most 30."""
        return self.run(
            """
            const canvas = arguments[0], pen = canvas.getContext("2d"), count = new Map();
            const { data } = pen.getImageData(0, 0, canvas.width, canvas.height);
            for (const pixel of new Uint32Array(data.buffer))
                if (pixel >>> 24 === 255) count.set(pixel, (count.get(pixel) ?? 0) + 1);
            return [...count].sort((a, b) => b[1] - a[1]).slice(0, 30).map(([colour]) => colour);
            """,
            self.find(selector),
        )

    def colours_after(self, selector: str, before: list[int]) -> list[int]:
        """The colours once they differ from ``before``: a new scheme arrives as an event."""
        self.until(lambda: self.colours(selector) != before)
        return self.colours(selector)

    def until(self, true: Callable[[], Result], seconds: float = PATIENCE) -> Result:
        """Wait for what an event brings about, and return it."""
        wait = WebDriverWait(self.driver, seconds, 0.02, ignored_exceptions=PASSING)
        return wait.until(lambda _: true())

    def expect(self, read: Callable[[], Any], wanted: Any, seconds: float = PATIENCE) -> None:
        """Wait until what is read equals what an event should bring about."""
        try:
            self.until(lambda: read() == wanted, seconds)
        except TimeoutException:
            raise AssertionError(f"after {seconds:g} s {read()!r}, not {wanted!r}") from None
