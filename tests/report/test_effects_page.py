"""fenchel/report/effects_page.py: what its sentences say of the effects."""

from pathlib import Path
from typing import Any

from fenchel.report.effects_page import (
    ablation_finding,
    patch_finding,
    render_ablation,
    render_patch,
)
from tests.browser import DESKTOP, PHONE, Browser, needs_browser


def effect(site: str, part: str, layer: int, exact: float, **at: int) -> dict[str, Any]:
    where = {"head": at.get("head"), "position": at.get("position")}
    return {"site": site, "part": part, "layer": layer, "exact": exact, "estimate": 9.0, **where}


def row(part: str) -> dict[str, Any]:
    return {"part": part, "sites": 2, "run": 2, "spearman": None, "shared": 1.0, "error": 0.1}


def ablation() -> dict[str, Any]:
    effects = [
        effect("mlp 2", "mlp", 2, -0.75),
        effect("head 1.2", "head", 1, 0.5, head=2),
        effect("mlp 1", "mlp", 1, 0.25),
        effect("head 1.1", "head", 1, -0.125, head=1),
    ]
    facts = {"name": "m", "family": "llama"}
    return {
        "subject": facts,
        "text": "a text",
        "to": "mean",
        "tokens": 9,
        "loss": 2.0,
        "effects": effects,
        "agreement": [row("mlp"), row("head")],
    }


def test_what_the_text_needs_is_said_by_the_signs_of_the_changes() -> None:
    said = ablation()
    assert ablation_finding(said) == (
        "The text needs head 1.2 most: without it the loss of 2.000 nats per token rises by 0.5. "
        "Without 2 of the 4 parts it falls, by 0.75 at most (MLP 2)."
    )
    said["effects"][2]["exact"] = 0.75
    assert "Of the heads it needs head 1.2 most (+0.5)." in ablation_finding(said)
    assert ablation_finding(said) in render_ablation(said)


def patched() -> dict[str, Any]:
    shares = {1: (0.625, 0.25), 2: (0.5, 0.25), 3: (0.125, 0.75), 4: (0.0, 1.0)}
    effects = [
        effect(f"stream {layer} at {at + 1}", "stream", layer, share, position=at + 1)
        for layer, pair in shares.items()
        for at, share in enumerate(pair)
    ]
    effects += [effect("value 2.1", "v", 2, 0.25, head=1), effect("key 2.1", "k", 2, -0.5, head=1)]
    return {
        "subject": {"name": "m", "family": "llama"},
        "clean_tokens": ["The", " war", " is"],
        "corrupt_tokens": ["The", " day", " is"],
        "words": [" lost", " long"],
        "clean": 2.0,
        "corrupt": -1.0,
        "effects": effects,
        "agreement": [row("stream"), row("v"), row("k")],
    }


def test_where_the_difference_is_layer_by_layer() -> None:
    """The stream after the last layer is left out: at the last token it is the answer."""
    said = patched()
    assert patch_finding(said) == (
        "The stream that brings back most is after layers 1 to 2 at token 1, “day” (0.62 to 0.50), "
        "after layer 3 at token 2, “is” (0.75). Of single queries, keys and values, value 2.1 "
        "brings back most: 0.25."
    )
    assert patch_finding(said) in render_patch(said)


@needs_browser
def test_the_two_signs_have_colours_of_their_own_and_zero_has_none(tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    page.write_text(render_patch(patched()))
    browser = Browser()
    pixel = (
        "const c = document.querySelector('[data-picture=k] canvas'), d = c.getContext('2d');"
        "return [...d.getImageData(140, 6, 1, 1).data].slice(0, 3)"
    )
    try:
        for width in (DESKTOP, PHONE):
            browser.open(page, width=width, scheme="light")
            assert not browser.console()
            ends = browser.text("[data-picture=k] .ramp").split()
            assert [float(end) for end in ends] == [-0.5, 0.5]
            assert browser.run(pixel) == [196, 82, 10]  # the lowest, in the colour --s1
            assert browser.text("[data-picture=streams] .ramp").split() == ["0", "1"]
    finally:
        browser.driver.quit()
