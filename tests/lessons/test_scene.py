"""Scenes in a browser, as files: choice maps, handles, frames, and numbers against the library.

A scene is opened from file:// with the values that its lesson hands to it. That its state arrives
in Python is checked with the lessons (test_server.py), and that claims hold at the ends of what a
handle reaches with the notebooks (test_notebooks.py).
"""

import ast
import cmath
import json
import math
import re
from collections.abc import Callable, Iterator
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from selenium.webdriver.common.keys import Keys

import fenchel
from fenchel.lessons.course import COURSE
from fenchel.lessons.scene import Scene, scene_page
from fenchel.model.rotary_table import sinusoids
from fenchel.report.html import read_asset
from fenchel.sensitivity import cone
from tests.browser import DESKTOP, PHONE, Browser, Locator, needs_browser


def scene_cells() -> dict[str, str]:
    """The cells that make a scene, with their lessons: they have names, so that they can be run."""
    found = {}
    for lesson in COURSE:
        for cell in ast.parse(lesson.path.read_text()).body:
            calls = [node.func for node in ast.walk(cell) if isinstance(node, ast.Call)]
            if isinstance(cell, ast.FunctionDef) and "Scene" in map(ast.unparse, calls):
                found[f"{lesson.name}.{cell.name}"] = lesson.name
    return {name: lesson for name, lesson in found.items() if not name.endswith("._")}


CELLS = list(scene_cells())


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    session = Browser()
    yield session
    session.driver.quit()


@pytest.fixture(scope="module")
def page_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The page of a scene as a file, with what its lesson computes for it."""
    folder = tmp_path_factory.mktemp("scenes")

    def page(name: str) -> Path:
        path = folder / f"{name}.html"
        if not path.exists():
            lesson, cell = name.split(".")
            module = import_module(f"fenchel.lessons.notebooks.{lesson}")
            values = getattr(module, cell).run()[1].values()
            (scene,) = (value for value in values if isinstance(value, Scene))
            path.write_text(scene.page, encoding="utf-8")
        return path

    return page


def test_every_script_is_shown_by_a_lesson() -> None:
    folder = Path(fenchel.__file__).parent / "lessons" / "scenes"
    shown = {
        found
        for lesson in COURSE
        for found in re.findall(r'Scene\(\s*"(\w+)"', lesson.path.read_text())
    }
    assert shown == {path.stem for path in folder.glob("*.js")}
    assert len({name.split(".")[0] for name in CELLS}) == 13


def test_a_scene_is_one_field_of_marimo_and_one_page() -> None:
    scene = Scene(
        "two_arrows", {"ux": 1.0, "uy": 0.0, "length": 1.0, "angle": 0.5}, odd="</script>"
    )
    assert scene.state == {"ux": 1.0, "uy": 0.0, "length": 1.0, "angle": 0.5}
    assert scene.text.count("<marimo-text") == scene.text.count("<iframe") == 1
    assert scene.page.count("</script>") == 2, "data cannot end its element"
    assert "default-src 'none'" in scene.page


@needs_browser
def test_the_maps_of_the_page_are_those_of_the_library(browser: Browser, tmp_path: Path) -> None:
    """All three, with and without a prior that forbids, to scores of size 100."""
    (tmp_path / "maps.html").write_text(
        f"<!doctype html><script>{read_asset('maps.js', 'fenchel.lessons')}</script>"
    )
    browser.open(tmp_path / "maps.html")
    rng = np.random.default_rng(0)
    maps: dict[str, Callable[[float], Any]] = {
        "softmax": fenchel.Softmax,
        "entmax": lambda beta: fenchel.Entmax(1.5, beta),
        "sparsemax": fenchel.Sparsemax,
    }
    cases: list[tuple[str, list[float], float, list[float] | None]] = []
    for number in range(300):
        count = int(rng.integers(1, 40))
        scores = (rng.choice([0.1, 1.0, 30.0, 100.0]) * rng.standard_normal(count)).round(6)
        prior = rng.random(count) * (rng.random(count) > 0.3)
        given = None if number % 3 == 0 or not prior.any() else (prior / prior.sum()).tolist()
        beta = float(rng.choice([0.05, 1.0, 3.0]))
        cases += [(name, scores.tolist(), beta, given) for name in maps]
    cases += [(name, [1.0, 1.0, 0.0], 1.0, None) for name in maps]  # a tie
    cases += [(name, [1.0, 2.0], 1.0, [0.0, 0.0]) for name in maps]  # everything forbidden
    found = browser.run("return arguments[0].map((each) => choose(...each))", cases)
    for (name, scores, beta, given), weights in zip(cases, found, strict=True):
        log_prior = None if given is None else torch.tensor(given, dtype=torch.float64).log()
        z = torch.tensor(scores, dtype=torch.float64)
        expected = maps[name](beta).weights(z, log_prior).tolist()
        assert weights == pytest.approx(expected, abs=2e-13), (name, scores, beta, given)
        assert [w == 0 for w in weights] == [w == 0 for w in expected]


DRAWN = "return [...document.querySelectorAll('svg')].map((svg) => svg.outerHTML).join('')"
FRAME = (
    "return [...document.querySelectorAll('svg.scene > g:nth-of-type(1)')].map((g) => g.outerHTML)"
)


def changes(browser: Browser, *ways: Callable[[], None], said: Locator | None = None) -> None:
    """Wait until one of the ways has made another drawing, and a handle says another value.

    A value at its end moves in one direction only. The drawing comes with the next frame.
    """

    def seen() -> tuple[str, str]:
        return browser.run(DRAWN), said.get_attribute("aria-valuetext") if said else ""

    before = seen()

    def changed() -> bool:
        for way in ways:
            way()
            browser.driver.execute_async_script(
                "const done = arguments[0];"
                "requestAnimationFrame(() => requestAnimationFrame(() => done()))"
            )
            drawn, value = seen()
            if drawn != before[0] and (said is None or value != before[1]):
                return True
        return False

    browser.until(changed)


def drag(browser: Browser, handle: Locator) -> None:
    """A handle follows the mouse, with what it says."""
    ways = [(-130, 0), (0, -130), (130, 0), (0, 130)]
    changes(browser, *(partial(browser.drag, handle, *way) for way in ways), said=handle)


def press(browser: Browser, element: Locator, *keys: str) -> None:
    """One of the keys moves something."""
    changes(browser, *(partial(element.send_keys, key) for key in keys))


@needs_browser
@pytest.mark.parametrize("name", CELLS)
def test_a_scene_follows_the_hand_in_a_frame_that_stays(
    browser: Browser, page_of: Callable[[str], Path], name: str
) -> None:
    page = page_of(name)
    browser.open(page)
    assert browser.run("return document.documentElement.scrollWidth") == DESKTOP
    frame = browser.run(FRAME)
    for control in browser.find_all("input[type=range]"):
        press(browser, control, Keys.END, Keys.HOME)
    for menu in browser.find_all(".controls select"):
        press(browser, menu, Keys.END, Keys.HOME)
    for group in browser.find_all(".choice"):
        for choice in group.find_all("input"):
            if not choice.matches(":checked"):
                changes(browser, choice.click)
    handles = browser.find_all("[role=slider]")
    handles += browser.find_all(".words button")[:1]
    assert handles
    for handle in handles:
        if handle.tag_name == "button":
            changes(browser, handle.click)
        else:
            drag(browser, handle)
        arrows = (Keys.ARROW_RIGHT, Keys.ARROW_UP, Keys.ARROW_LEFT, Keys.ARROW_DOWN)
        press(browser, browser.focused(), *arrows)  # an arrow moves what is focused
    assert browser.run(FRAME) == frame, "no axis moves"
    assert browser.console() == []
    assert {url.split("#")[0] for url in browser.requests()} == {page.as_uri()}


@needs_browser
@pytest.mark.parametrize("name", CELLS)
def test_a_scene_fits_a_phone_in_the_dark(
    browser: Browser, page_of: Callable[[str], Path], name: str
) -> None:
    browser.open(page_of(name), width=PHONE, scheme="dark")
    assert browser.run("return document.documentElement.scrollWidth") == PHONE
    paper = browser.run("return getComputedStyle(document.body).backgroundColor")
    assert paper == "rgb(20, 23, 26)"
    for area in browser.find_all(".grip-area, .play"):
        assert min(area.rect["width"], area.rect["height"]) >= 43, "a finger finds it"
    words = """return Array.from(document.querySelectorAll("svg.scene text, .side, .says"), (word) => {
        const { left, right } = word.getBoundingClientRect();
        return [word.textContent, left, right, parseFloat(getComputedStyle(word).fontSize)];
    })"""  # noqa: E501
    for word, left, right, size in browser.run(words):
        assert left >= -1, word
        assert right <= PHONE + 1, word
        assert size >= 10.5, word
    assert browser.console() == []


@needs_browser
def test_the_play_button_moves_a_value_to_its_end_and_a_hand_stops_it(
    browser: Browser, page_of: Callable[[str], Path]
) -> None:
    """With reduced motion, as this browser asks for: five still pictures."""
    browser.open(page_of("residuals.residual_circle"))
    button = browser.find(".play")
    both = """return [".play", ".slide output"].map((part) =>
        document.querySelector(part).textContent)"""
    assert browser.run(both) == ["▶ Add layers", "6"]
    button.click()
    label, _ = browser.until(lambda: (now := browser.run(both))[1] != "6" and now)
    assert label == "❚❚ Pause"
    browser.find("[role=slider]").send_keys(Keys.ARROW_LEFT)
    browser.expect(lambda: button.text, "▶ Add layers")


@needs_browser
def test_a_state_is_shared_by_its_address(browser: Browser, page_of: Callable[[str], Path]) -> None:
    page = page_of("lipschitz.double_cone")
    browser.open(page)
    limit = browser.find("[data-handle=limit]")
    start = limit.get_attribute("aria-valuetext")
    browser.drag(limit, 0, 60)
    browser.until(lambda: limit.get_attribute("aria-valuetext") != start)

    def address() -> str | None:
        """The address once it has the state that is drawn: it follows ten times a second."""
        found = re.search(r"[#&]L=([\d.]+)", url := str(browser.driver.current_url))
        said = limit.get_attribute("aria-valuetext")
        return url if found and said.startswith(f"speed limit {float(found[1]):.2f},") else None

    shared, said = browser.until(address), limit.get_attribute("aria-valuetext")
    browser.driver.get("about:blank")
    browser.open(shared)
    browser.expect(lambda: limit.get_attribute("aria-valuetext"), said)


def softmax(z: list[float], beta: float, prior: list[float] | None = None) -> torch.Tensor:
    log_prior = None if prior is None else torch.tensor(prior, dtype=torch.float64).log()
    return fenchel.Softmax(beta).weights(torch.tensor(z, dtype=torch.float64), log_prior)


def points_and_variety(s: dict[str, Any]) -> list[float]:
    z = [s["A"], s["B"], s["C"]]
    value = fenchel.Softmax(1 / s["T"]).value(torch.tensor(z, dtype=torch.float64))
    return [value.item(), *softmax(z, 1 / s["T"]).tolist()]


def mountains(s: dict[str, Any]) -> list[float]:
    z = torch.tensor([s[name] for name in "ABCDEF"], dtype=torch.float64)
    return [1.0, *fenchel.Entmax(1.5, s["beta"]).weights(z).tolist()]


def leash(s: dict[str, Any]) -> list[float]:
    u = [s["A"], s["B"], s["C"]]
    p = softmax([0.0, 1.0, 3.0], s["beta"], u)
    away = (p * (p / torch.tensor(u, dtype=torch.float64)).log()).sum()
    return [(p @ torch.tensor([0.0, 1.0, 3.0], dtype=torch.float64)).item(), away.item(), *p, *u]


def parabola(s: dict[str, Any]) -> list[float]:
    weight = torch.nn.Parameter(torch.tensor([s["start"]], dtype=torch.float64))
    optimiser = fenchel.optim.sgd([weight], lr=s["rate"])
    for _ in range(int(s["steps"])):
        optimiser.zero_grad()
        weight.square().sum().backward()
        optimiser.step()
    return [weight.item(), 1 - 2 * s["rate"], weight.item() ** 2]


def clocks(s: dict[str, Any]) -> list[float]:
    first, second = sinusoids(torch.tensor([s["m"], s["m"] + s["gap"]]), 64)
    return [s["m"], s["m"] + s["gap"], abs(s["gap"]), 32, (first @ second).item()]


def residual(s: dict[str, Any]) -> list[float]:
    h = torch.tensor([1.0, 0.0], dtype=torch.float64)
    for _ in range(s["layers"]):
        h = h + math.pi / 2 / s["layers"] * torch.stack([-h[1], h[0]])
    return [math.hypot(h[0].item(), h[1].item() - 1), h.norm().item(), s["layers"]]


NUMBERS: list[tuple[str, dict[str, Any], str, Callable[[dict[str, Any]], list[float]]]] = [
    (
        "softmax.points_and_variety",
        {"T": 0.62, "A": 1.0, "B": 2.35, "C": 2.0},
        ".big.s1, .bar-row b",
        points_and_variety,
    ),
    (
        "sparse_choice.mountains_and_sea",
        {
            "A": 0.3,
            "B": 1.6,
            "C": 1.9,
            "D": 0.4,
            "E": -0.5,
            "F": -2.0,
            "map": "entmax",
            "beta": 0.7,
        },
        ".big, .bar-row b",
        mountains,
    ),
    (
        "priors_and_budgets.dog_on_a_leash",
        {"beta": 0.9, "A": 0.2, "B": 0.7, "C": 0.1},
        ".big, .bar-row b",
        leash,
    ),
    ("slopes.walk_on_the_parabola", {"rate": 0.17, "start": 2.4, "steps": 7}, ".big", parabola),
    (
        "gradient_flow.walk_on_the_parabola",
        {"rate": 1.1, "start": 3, "steps": 9},
        ".big",
        parabola,
    ),
    ("positions.clock_hands", {"m": 130, "gap": -47}, ".says", clocks),
    ("residuals.residual_circle", {"layers": 3}, ".big", residual),
    (
        "lipschitz.double_cone",
        {"L": 0.82, "tip": 0.4},
        ".big",
        lambda s: [
            cone(torch.sin, s["tip"], s["L"], x=cone(torch.sin, 0.0, 1.0).x).violations,
            math.cos(s["tip"]),
        ],
    ),
    (
        "similarity.two_arrows",
        {"ux": 0.8, "uy": -0.2, "length": 1.5, "angle": 2.0},
        ".big",
        lambda s: [
            math.cos(s["angle"] - math.atan2(s["uy"], s["ux"])),
            s["length"] * (s["ux"] * math.cos(s["angle"]) + s["uy"] * math.sin(s["angle"])),
            abs(complex(s["ux"], s["uy"]) - cmath.rect(s["length"], s["angle"])),
        ],
    ),
]


@needs_browser
@pytest.mark.parametrize(
    ("name", "state", "selector", "expected"), NUMBERS, ids=[case[0] for case in NUMBERS]
)
def test_the_numbers_of_a_scene_are_those_of_the_library(
    browser: Browser,
    page_of: Callable[[str], Path],
    name: str,
    state: dict[str, Any],
    selector: str,
    expected: Callable[[dict[str, Any]], list[float]],
) -> None:
    page = page_of(name).read_text(encoding="utf-8")
    found = re.search(r'id="data">(.*?)</script>', page)
    assert found
    data = json.loads(found[1])
    start = {**data.pop("state"), **state}
    path = page_of(name).with_name("numbers.html")
    path.write_text(scene_page(name.split(".")[1], start, data), encoding="utf-8")
    browser.open(path)
    texts = " ".join(browser.texts(selector)).replace("−", "-")
    numbers = re.findall(r"-?\d+(?:\.\d+)?(?:e[+-]\d+)?", texts)
    for number, value in zip(numbers, expected(start), strict=True):
        decimals = len(number.partition(".")[2])
        close = 0.05 * abs(value) if "e" in number else 0.5001 * 10**-decimals
        assert abs(float(number) - value) <= close, (number, value)
