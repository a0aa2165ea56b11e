"""The scripts and styles of fenchel/report: what can be held without a browser."""

import re
from importlib import resources
from itertools import pairwise

import numpy as np
import pytest

from fenchel.report.html import SCRIPTS, STYLES, read_asset

FILES = resources.files("fenchel.report")
VIEWER = "".join(map(read_asset, SCRIPTS))
SCRIPT = VIEWER + FILES.joinpath("page.js").read_text(encoding="utf-8")
STYLE = "".join(map(read_asset, STYLES))

# Machado, Oliveira and Fernandes (2009): what is left of a linear colour when one cone is missing.
BLIND = {
    "protanopia": (
        (0.152286, 1.052583, -0.204868),
        (0.114503, 0.786281, 0.099216),
        (-0.003882, -0.048116, 1.051998),
    ),
    "deuteranopia": (
        (0.367322, 0.860646, -0.227968),
        (0.280085, 0.672501, 0.047413),
        (-0.011820, 0.042940, 0.968881),
    ),
    "tritanopia": (
        (1.255528, -0.076749, -0.178779),
        (-0.078411, 0.930809, 0.147602),
        (0.004733, 0.691367, 0.303900),
    ),
}


def themes() -> dict[str, dict[str, str]]:
    light, dark = re.findall(r":root[^{]*\{([^}]*)\}", STYLE)
    read = {
        name: dict(re.findall(r"--([\w-]+):\s*([^;]+);", text))
        for name, text in (("light", light), ("dark", dark))
    }
    return {"light": read["light"], "dark": {**read["light"], **read["dark"]}}


def linear(colour: str) -> np.ndarray:
    share = np.array([int(colour.strip()[i : i + 2], 16) for i in (1, 3, 5)]) / 255
    return np.where(share <= 0.04045, share / 12.92, ((share + 0.055) / 1.055) ** 2.4)


def luminance(colour: str) -> float:
    return float(linear(colour) @ [0.2126, 0.7152, 0.0722])


def contrast(one: str, other: str) -> float:
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def test_the_scripts_are_small() -> None:
    assert len(VIEWER.encode()) < 23_000


@pytest.mark.parametrize(
    "power",
    [
        "innerHTML",
        "outerHTML",
        "insertAdjacentHTML",
        "document.write",
        "eval(",
        "new Function",
        'setAttribute("style',
        "fetch(",
        "XMLHttpRequest",
        "WebSocket",
        "sendBeacon",
        "import(",
        "import ",
        "localStorage",
        "cookie",
        ".href",
        "</script",
        "<!--",
    ],
)
def test_the_script_makes_no_markup_of_data_and_no_request(power: str) -> None:
    assert power not in SCRIPT


def test_the_only_address_is_the_name_of_a_language() -> None:
    found = re.findall(r"\w+://[^\s\"')]*", SCRIPT + STYLE)
    assert found == ["http://www.w3.org/2000/svg"]
    assert "url(" not in STYLE
    assert "@import" not in STYLE


def test_every_picture_can_be_used_alone() -> None:
    exported = set(re.findall(r"^export function (\w+)", VIEWER, re.M))
    assert exported == {
        "bars",
        "lineChart",
        "strips",
        "unpack",
        "mapGrid",
        "mapView",
        "sentence",
        "attention",
    }


def test_every_colour_that_is_drawn_is_defined() -> None:
    asked = set(re.findall(r'read\("--(\w+)"\)', VIEWER)) | set(
        re.findall(r"var\(--([\w-]+)\)", STYLE)
    )
    assert len(asked) > 10
    for theme in themes().values():
        assert asked <= theme.keys()


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_words_stand_out_from_the_paper(theme: str) -> None:
    colours = themes()[theme]
    for name in ("ink", "muted", "accent", "alert", "good"):
        assert contrast(colours[name], colours["paper"]) >= 4.5, name
        assert contrast(colours[name], colours["card"]) >= 4.5, name


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_lines_stand_out_from_the_paper(theme: str) -> None:
    colours = themes()[theme]
    for name in ("s0", "s1", "r0", "r1", "r2"):
        assert contrast(colours[name], colours["paper"]) >= 3, name


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_the_ramp_goes_one_way_in_lightness(theme: str) -> None:
    lightness = [luminance(colour) for colour in themes()[theme]["ramp"].split(",")]
    steps = [after - before for before, after in pairwise(lightness)]
    assert all(step < 0 for step in steps) if theme == "light" else all(step > 0 for step in steps)
    low, high = sorted((lightness[0], lightness[-1]))
    assert (high + 0.05) / (low + 0.05) > 10


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("kind", BLIND)
def test_training_and_validation_differ_for_the_colour_blind(theme: str, kind: str) -> None:
    colours = themes()[theme]
    seen = [
        np.clip(np.array(BLIND[kind]) @ linear(colours[name]), 0, 1) ** (1 / 2.2)
        for name in ("s0", "s1")
    ]
    assert np.abs(seen[0] - seen[1]).max() > 0.25
