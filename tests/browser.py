"""A headless Chromium for the tests of pages: those of the reports and those of the lessons."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from selenium import webdriver
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
                del sent[parameters["requestId"]]
        return list(sent.values())

    def run(self, script: str, *arguments: Any) -> Any:
        return self.driver.execute_script(script, *arguments)

    def find(self, selector: str) -> WebElement:
        return self.driver.find_element(By.CSS_SELECTOR, selector)

    def find_deep(self, selector: str) -> list[WebElement]:
        """The elements of a selector in the page and in all its shadow trees, in order."""
        return list(
            self.run(
                """
                const found = [], visit = (root) => {
                    for (const element of root.querySelectorAll("*")) {
                        if (element.matches(arguments[0])) found.push(element);
                        if (element.shadowRoot) visit(element.shadowRoot);
                    }
                };
                visit(document);
                return found;
                """,
                selector,
            )
        )

    def text(self, selector: str) -> str:
        return self.find(selector).text

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

    def drag(self, element: WebElement, right: float, down: float) -> None:
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
            element,
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

    def until(self, true: Callable[[], Any], seconds: float = 10.0) -> None:
        """Wait for what an event brings about."""
        WebDriverWait(self.driver, seconds, poll_frequency=0.02).until(lambda _: true())

    def focused(self) -> WebElement:
        return self.driver.switch_to.active_element
