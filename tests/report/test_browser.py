"""The pages in a real browser: fenchel/report's .js, .css and .html, driven through Chromium.

One headless session opens the pages of a run, an inspection, certificates and a calibration from
file://, watches the console and the network, uses the controls with mouse and keyboard, and
compares what the page then shows with the numbers it was made of. Without Chromium and its driver
the tests are skipped, and the summary of the suite says so in one line (tests/conftest.py).
"""

import base64
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from selenium.webdriver.common.keys import Keys

from fenchel.evaluate import Confidence, outcomes, summarise
from fenchel.inspection_result import Certification, Inspection
from fenchel.report import certificates, reliability
from fenchel.report import page as run_page
from fenchel.report.comparison import compare_runs
from fenchel.report.comparison import render as render_comparison
from fenchel.report.inspection_page import render
from tests.browser import DESKTOP, PHONE, Browser, needs_browser
from tests.report.conftest import typed

pytestmark = needs_browser

PAGES = ("run", "comparison", "inspection", "certificates", "reliability")


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    session = Browser()
    yield session
    session.driver.quit()


def certification(inspection: dict[str, Any]) -> dict[str, Any]:
    """The data of a certificates page: a layer that is refused, and one without a bound."""
    tokens = inspection["tokens"]
    layer = {
        "layer": 1,
        "refused": None,
        "centre": {"lower": 0.47, "upper": 0.48, "iterations": 27},
        "lower": 0.473,
        "upper": 1.127,
        "failure": 1e-9,
        "token_norm": 7.46,
        "moved": [1.0 / len(tokens)] * len(tokens),
        "heads": [],
    }
    refusal = {**layer, "layer": 3, "refused": "Layer 3 has no certificate."}
    return {
        "subject": inspection["subject"],
        "text": inspection["text"],
        "tokens": tokens,
        "device": "cpu",
        "seed": 0,
        "certificates": {
            "level": "attention",
            "radius": 0.05,
            "norm": "fro",
            "dtype": "float64",
            "layers": [
                layer,
                {**layer, "layer": 2, "upper": 2.5},
                refusal,
                {**layer, "layer": 4, "upper": None},
            ],
        },
        "seconds": {"certificates": 1.0},
    }


@pytest.fixture(scope="module")
def pages(
    make_run: Callable[..., Path],
    inspection: Callable[..., dict[str, Any]],
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[str, Path]:
    """The kinds of page as files."""
    folder = tmp_path_factory.mktemp("pages")
    data = inspection()
    area = data["maps"]["size"] ** 2
    draw = np.random.default_rng(2).integers(0, 256, 12 * area, dtype=np.uint8)
    data["maps"]["data"] = base64.b64encode(draw.tobytes()).decode()
    (folder / "inspection.html").write_text(render(typed(Inspection, data)), encoding="utf-8")
    (folder / "inspection.json").write_text(json.dumps(data))
    certified = certificates.render(typed(Certification, certification(data)))
    (folder / "certificates.html").write_text(certified, encoding="utf-8")
    generator = torch.Generator().manual_seed(0)
    logits = 3.0 * torch.randn(400, 5, generator=generator)
    targets = torch.randint(5, (400,), generator=generator)
    plain, scaled = (
        summarise(outcomes(logits, targets, temperature=temperature)) for temperature in (1.0, 4.0)
    )
    record = Confidence(4.0, 400, plain, scaled).record()
    reliability_page = reliability.render("tiny", "a text", record)
    (folder / "reliability.html").write_text(reliability_page, encoding="utf-8")
    runs = [make_run("browsed", steps=500), make_run("a run of another name", steps=300)]
    compared = render_comparison(compare_runs(runs))
    (folder / "comparison.html").write_text(compared, encoding="utf-8")
    return {
        "run": run_page(runs[0]),
        "comparison": folder / "comparison.html",
        "inspection": folder / "inspection.html",
        "certificates": folder / "certificates.html",
        "reliability": folder / "reliability.html",
    }


@pytest.mark.parametrize(("scheme", "width"), [("light", DESKTOP), ("dark", PHONE)])
@pytest.mark.parametrize("name", PAGES)
def test_a_page_opens_in_silence_and_fits_the_screen(
    browser: Browser, pages: dict[str, Path], name: str, scheme: str, width: int
) -> None:
    """No console message (a blocked style or script would be one), no request, no overflow."""
    browser.open(pages[name], width=width, scheme=scheme)
    assert browser.console() == []
    assert browser.requests() == [pages[name].as_uri()]
    assert browser.run("return document.documentElement.scrollWidth") == width
    hosts = "return document.querySelectorAll('[data-picture]').length"
    charts = {"run": 14, "comparison": 8, "inspection": 7, "certificates": 2, "reliability": 0}
    assert browser.run(hosts) == charts[name]
    sizes = """
        return Array.from(document.querySelectorAll("figure svg, figure canvas"), (drawing) => {
            const { width, height } = drawing.getBoundingClientRect();
            return [width, height];
        });
    """
    browser.until(lambda: len(browser.run(sizes)) >= max(charts[name], 1))
    for across, down in browser.run(sizes):
        assert across >= 20
        assert down >= 5
    paper = browser.run("return getComputedStyle(document.body).backgroundColor")
    assert paper == {"light": "rgb(251, 250, 246)", "dark": "rgb(20, 23, 26)"}[scheme]


@pytest.mark.parametrize("name", PAGES)
def test_every_figure_has_its_numbers_in_a_table_without_the_script_too(
    browser: Browser, pages: dict[str, Path], name: str
) -> None:
    browser.driver.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": True})
    try:
        browser.open(pages[name])
        for figure in browser.find_all("figure"):
            assert len(figure.find_all("details table tbody tr")) > 1
        folded = "figure details:not([open])"
        table = browser.find(f"{folded} table")
        assert not table.is_displayed()
        browser.find(f"{folded} summary").click()
        browser.until(lambda: browser.find("figure details[open] table").is_displayed())
        if name != "reliability":
            assert "Every number is also in a table." in browser.text("noscript p")
    finally:
        browser.driver.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": False})


def test_the_policy_runs_nothing_but_the_page_itself(
    browser: Browser, pages: dict[str, Path], tmp_path: Path
) -> None:
    """A script, a style, a picture and a handler that slipped in are all inert."""
    smuggled = (
        "<script>document.title = 'taken'</script><style>body { opacity: 0 }</style>"
        '<img src="http://127.0.0.1:9/x.png" onerror="document.title = \'taken\'">'
    )
    html = pages["run"].read_text(encoding="utf-8").replace("</footer>", smuggled + "</footer>")
    (tmp_path / "smuggled.html").write_text(html, encoding="utf-8")
    browser.open(tmp_path / "smuggled.html")
    assert browser.driver.title == "browsed · fenchel"
    assert browser.run("return getComputedStyle(document.body).opacity") == "1"
    assert len(browser.console()) >= 3  # the policy reports what it refused
    assert browser.requests() == [(tmp_path / "smuggled.html").as_uri()]
    assert len(browser.find_all("[data-picture=loss] svg")) == 1


def test_the_curves_of_a_comparison_have_a_legend_and_show_every_run_under_the_mouse(
    browser: Browser, pages: dict[str, Path]
) -> None:
    browser.open(pages["comparison"])
    chart = "[data-picture=loss-0]"
    assert browser.texts(f"{chart} .legend li") == ["browsed", "a run of another name"]
    colour = "return getComputedStyle(document.querySelector(arguments[0])).stroke"
    strokes = [browser.run(colour, f"{chart} path.line.s{tone}") for tone in (0, 1)]
    assert strokes == ["rgb(0, 114, 178)", "rgb(196, 82, 10)"]
    fill = colour.replace("stroke", "fill")
    assert [browser.run(fill, f"[data-picture=ranking] .bar.s{tone}") for tone in (0, 1)] == strokes
    browser.hover(f"{chart} svg", 0.3, 0.5)
    told = r"step \d+: browsed [\d.]+.*, a run of another name [\d.]+"
    browser.until(lambda: re.match(told, browser.text(f"{chart} .readout")))
    browser.expect(lambda: len(browser.find_all(f"{chart} g .dot")), 2)


def test_a_phone_shows_the_results_of_a_comparison_and_their_numbers(
    browser: Browser, pages: dict[str, Path]
) -> None:
    browser.open(pages["comparison"], width=PHONE)
    heads = browser.find_all("#results > .scroll thead th")
    assert [head.text for head in heads[:3]] == ["run", "bits/byte", "loss"]
    for element in (*heads[:3], *browser.find_all("svg .label")):
        assert element.rect["x"] >= 0
        assert element.rect["x"] + element.rect["width"] <= PHONE
    labels = browser.find_all("[data-picture=ranking] .label")
    assert re.fullmatch(r"[\d.]+ \+[\d.]+ %", labels[-1].text)


def test_commands_are_whole_on_a_phone_and_copied_by_a_button(
    browser: Browser, pages: dict[str, Path]
) -> None:
    browser.open(pages["run"], width=PHONE)
    items = browser.find_all(".commands li")
    assert len(items) == 5
    for item in items:
        code, purpose = (item.find_all(name)[0] for name in ("code", "span"))
        assert code.rect["x"] + code.rect["width"] <= PHONE
        assert purpose.rect["y"] >= code.rect["y"] + code.rect["height"]  # below, not beside
        assert item.get_property("scrollWidth") <= item.get_property("clientWidth")
    browser.driver.execute_cdp_cmd(
        "Browser.grantPermissions",
        {"permissions": ["clipboardReadWrite", "clipboardSanitizedWrite"]},
    )
    button = browser.find(".commands li:nth-of-type(2) button")
    button.click()
    browser.until(lambda: button.text == "Copied")
    read = "navigator.clipboard.readText().then(arguments[arguments.length - 1])"
    copied = browser.driver.execute_async_script(read)
    assert copied == "fenchel eval browsed --calibration"


def test_the_axis_switch_relabels_every_curve(browser: Browser, pages: dict[str, Path]) -> None:
    browser.open(pages["run"])
    before = browser.text("[data-picture=loss] .readout")
    assert before.startswith("step 500: training ")
    shape = browser.find("[data-picture=loss] path.line.s0").get_attribute("d")
    browser.find("input[value=elapsed]").click()
    loss = lambda: browser.text("[data-picture=loss] .readout")  # noqa: E731
    browser.expect(loss, before.replace("step 500", "time 1:21"))  # 500 x 0.1614 s
    entropy = "[data-picture=entropy] .readout"
    browser.until(lambda: browser.text(entropy).startswith("time 1:21, layer 4: "))
    browser.until(lambda: "0:30" in browser.text("[data-picture=loss] svg"))
    browser.find("input[value=elapsed]").send_keys(Keys.ARROW_LEFT)  # the radio before it
    browser.until(lambda: loss().startswith("tokens 2.05M: "))
    assert browser.find("[data-picture=loss] path.line.s0").get_attribute("d") == shape


def test_the_mouse_reads_a_curve_where_it_points(browser: Browser, pages: dict[str, Path]) -> None:
    """What the readout says is the line of metrics.jsonl at that step."""
    browser.open(pages["run"])
    lines = [
        json.loads(line)
        for line in (pages["run"].parent / "metrics.jsonl").read_text().splitlines()
    ]
    losses = {line["step"]: line["train/loss"] for line in lines if "train/loss" in line}
    browser.hover("[data-picture=loss] svg", 0.5, 0.5)
    browser.until(lambda: browser.find_all("[data-picture=loss] .cursor"))
    readout = browser.text("[data-picture=loss] .readout")
    step = int(readout.split()[1].rstrip(":"))
    assert 200 < step < 300
    assert f"training {losses[step]:.4g}," in readout


def test_the_keyboard_walks_along_a_curve(browser: Browser, pages: dict[str, Path]) -> None:
    browser.open(pages["run"])
    chart = browser.find("[data-picture=loss] svg")
    browser.run("document.querySelector('.axis input').focus()")
    browser.focused().send_keys(Keys.TAB)
    browser.until(chart.is_focused)  # the next stop after the axis switch
    chart.send_keys(Keys.HOME)
    readout = lambda: browser.text("[data-picture=loss] .readout")  # noqa: E731
    browser.until(lambda: readout().startswith("step 10: "))
    chart.send_keys(Keys.ARROW_RIGHT)
    browser.until(lambda: readout().startswith("step 20: "))


def weight(maps: dict[str, Any], layer: int, head: int, query: int, key: int) -> str:
    """A weight as the page prints it, from the bytes the page was made of."""
    data = np.frombuffer(base64.b64decode(maps["data"]), np.uint8)
    size = maps["size"]
    index = ((layer * maps["heads"] + head) * size + query) * size + key
    return f"{(data[index] / 255) ** 2:.3f}"


def most_telling(maps: dict[str, Any]) -> tuple[int, ...]:
    """(layer, head, query, key) of the largest p log(p n), off the query and the first key."""
    size = maps["size"]
    shape = (maps["layers"], maps["heads"], size, size)
    p = (np.frombuffer(base64.b64decode(maps["data"]), np.uint8).reshape(shape) / 255.0) ** 2
    score = p * np.log(np.maximum(p, 1e-30) * np.arange(1, size + 1)[:, None])
    score[..., 0] = -np.inf
    score[..., np.arange(size), np.arange(size)] = -np.inf
    return tuple(map(int, np.unravel_index(np.argmax(score), shape)))


def test_a_head_is_chosen_by_mouse_and_by_keyboard(
    browser: Browser, pages: dict[str, Path]
) -> None:
    sample = json.loads((pages["run"].parent / "sample.json").read_text())
    tokens = [token.replace(" ", "·") for token in sample["tokens"]]
    browser.open(pages["run"])
    telling = most_telling(sample["attention"])
    query, key = (tokens[i] for i in telling[2:])
    told = weight(sample["attention"], *telling)
    where = f"Layer {telling[0] + 1}, head {telling[1] + 1}"
    wanted = f"{where}: {query} attends to {key} with weight {told}"
    assert browser.text(".map-row .readout") == wanted
    before = browser.colours(".map-view canvas")
    browser.find('[aria-label="layer 2, head 3"]').click()
    readout = lambda: browser.text(".map-row .readout")  # noqa: E731
    browser.until(lambda: readout().startswith(f"Layer 2, head 3: {query} "))
    strongest = max(
        range(len(tokens)),
        key=lambda k: float(weight(sample["attention"], 1, 2, telling[2], k)),
    )
    told = weight(sample["attention"], 1, 2, telling[2], strongest)
    assert readout().endswith(f"{tokens[strongest]} with weight {told}")
    browser.colours_after(".map-view canvas", before)
    browser.focused().send_keys(Keys.ARROW_DOWN)
    browser.expect(lambda: browser.focused().get_attribute("aria-label"), "layer 3, head 3")
    browser.expect(lambda: browser.focused().get_attribute("aria-checked"), "true")
    browser.until(lambda: readout().startswith("Layer 3, head 3: "))
    stops = browser.find_all(".map-grid button[tabindex='0']")
    assert [stop.get_attribute("aria-label") for stop in stops] == ["layer 3, head 3"]


def test_the_map_and_the_sentence_follow_one_choice(
    browser: Browser, pages: dict[str, Path]
) -> None:
    sample = json.loads((pages["run"].parent / "sample.json").read_text())
    tokens = [token.replace(" ", "·") for token in sample["tokens"]]
    browser.open(pages["run"])
    browser.find('[aria-label="layer 1, head 1"]').click()
    browser.find_all(".sentence button")[5].click()
    readout = lambda: browser.text(".map-row .readout")  # noqa: E731
    browser.until(lambda: f"head 1: {tokens[5]} " in readout())
    canvas = browser.find(".map-view canvas")
    browser.run("arguments[0].focus()", canvas)
    canvas.send_keys(Keys.HOME, Keys.ARROW_RIGHT, Keys.ARROW_DOWN)
    read = f"{tokens[1]} with weight {weight(sample['attention'], 0, 0, 6, 1)}"
    browser.until(lambda: f"head 1: {tokens[6]} " in readout() and readout().endswith(read))
    browser.expect(lambda: browser.texts(".sentence [aria-checked=true]"), [sample["tokens"][6]])
    browser.find(".map-row summary").click()
    rows = browser.until(lambda: browser.texts(".map-row tbody tr"))
    assert len(rows) == len(tokens)
    assert rows[1].endswith(weight(sample["attention"], 0, 0, 6, 1))


def test_a_measure_of_every_head_is_chosen_and_read(
    browser: Browser, pages: dict[str, Path]
) -> None:
    data = json.loads((pages["inspection"].parent / "inspection.json").read_text())
    head = data["heads"][1 * 4 + 2]  # layer 2, head 3
    browser.open(pages["inspection"])
    heads = "[data-picture=heads]"
    readout = browser.text(f"{heads} .readout")
    least = min(data["heads"], key=lambda one: one["entropy"]["mean"])
    assert readout.startswith(f"layer {least['layer']}, head {least['head']}: entropy ")
    canvas = browser.find(f"{heads} canvas")
    canvas.send_keys(Keys.HOME, *[Keys.ARROW_UP] * 3)
    canvas.send_keys(Keys.ARROW_RIGHT, Keys.ARROW_RIGHT, Keys.ARROW_DOWN)
    told = lambda: browser.text(f"{heads} .readout")  # noqa: E731
    browser.expect(told, f"layer 2, head 3: entropy {head['entropy']['mean']:.4g}")
    before = browser.colours(f"{heads} canvas")
    choices = browser.texts(f"{heads} button")
    browser.find_all(f"{heads} button")[choices.index("sigma all")].click()
    browser.expect(told, f"layer 2, head 3: sigma all {head['sigma']['qkv']['lower']:.4g}")
    browser.colours_after(f"{heads} canvas", before)
    browser.focused().send_keys(Keys.ARROW_LEFT)
    browser.expect(lambda: browser.focused().text, "sigma v")
    browser.until(lambda: "sigma v" in told())
    browser.hover(f"{heads} canvas", 0.08, 0.1)
    browser.until(lambda: told().startswith("layer 1, head 1: sigma v "))


@pytest.mark.parametrize("width", [DESKTOP, PHONE])
def test_the_ends_of_a_certificate_stand_beside_their_bars_with_a_verdict(
    browser: Browser, pages: dict[str, Path], width: int
) -> None:
    browser.open(pages["certificates"], width=width)
    chart = "[data-picture=certificates] svg"
    labels = browser.find_all(f"{chart} .label")
    assert browser.texts(f"{chart} .label") == [
        *("layer 1", "0.473", "1.13"),  # upper is 1.127
        *("layer 2", "0.473", "2.50"),
        *("layer 4", "0.473", "no bound"),
    ]
    bars = browser.find_all(f"{chart} .interval")
    first, second, open_ = (bar.rect for bar in bars)
    span = (2.5 - 0.473) / (1.127 - 0.473)
    assert second["width"] / first["width"] == pytest.approx(span, rel=0.02)
    assert open_["width"] >= second["width"]
    for label in labels:  # none is cut off
        assert label.rect["x"] >= 0
        assert label.rect["x"] + label.rect["width"] <= width
    assert browser.text(".verdict") == (
        "2 of 4 attention layers are certified within 2.39 to 5.29 times of what is attained. "
        "The radius, 0.05 for all tokens together, is 0.67 % of the mean length of a token (7.46)."
    )
    assert "Layer 3 has no certificate." in browser.text("#certificates")
    assert browser.find("#certificates details table").is_displayed()
    scroll = browser.find("#certificates details .scroll")
    assert scroll.get_property("scrollWidth") == scroll.get_property("clientWidth")


def test_the_sentence_shows_whole_lines_from_its_beginning_and_whole_words(
    browser: Browser, make_run: Callable[..., Path]
) -> None:
    run = make_run("pieces")
    sample = json.loads((run / "sample.json").read_text())
    pieces = [piece for token in sample["tokens"] for piece in (token[:3], token[3:]) if piece]
    pieces = (pieces * 4)[: len(pieces) * 3] + ["東京", "の", "塔", "が", "見える"] * 8
    maps = np.eye(len(pieces), dtype=np.uint8) * 255
    maps[2, 1] = 200
    sample["tokens"] = pieces
    sample["attention"] |= {
        "layers": 1,
        "heads": 1,
        "size": len(pieces),
        "data": base64.b64encode(maps.tobytes()).decode(),
    }
    (run / "sample.json").write_text(json.dumps(sample))
    browser.open(run_page(run), width=PHONE)
    query, key = (
        pieces[i].replace(" ", "·") for i in (2, 1)
    )  # every other token attends to itself
    wanted = f"Layer 1, head 1: {query} attends to {key} with weight 0.615"
    assert browser.text(".map-row .readout") == wanted
    panel = browser.find(".sentence")
    assert browser.run("return arguments[0].scrollTop", panel) == 0
    tops = browser.run(
        "return [...arguments[0].querySelectorAll('button')].map((one) => one.offsetTop)", panel
    )
    words = "".join(f"|{p}" if p[0] == " " else p for p in pieces[: len(pieces) - 40]).split("|")
    at = 0
    for word in words:  # every piece of a word stands on one line
        count, length = 0, 0
        while length < len(word):
            length += len(pieces[at + count])
            count += 1
        assert len({round(top / 32) for top in tops[at : at + count]}) == 1, word
        at += count
    assert len({round(top / 32) for top in tops[at:]}) > 1  # a script without spaces breaks
    assert browser.run("return arguments[0].scrollWidth <= arguments[0].clientWidth", panel)
    browser.run("arguments[0].querySelectorAll('button')[arguments[1]].click()", panel, at + 30)
    line = browser.run("return parseFloat(getComputedStyle(arguments[0]).lineHeight)", panel)
    scrolled = browser.until(lambda: browser.run("return arguments[0].scrollTop", panel))
    assert scrolled % line == 0
    assert panel.get_property("clientHeight") % line == 0


def test_tokens_name_the_columns_of_a_heat_map_and_the_largest_cell_is_read_first(
    browser: Browser, pages: dict[str, Path], tmp_path: Path
) -> None:
    data = json.loads((pages["inspection"].with_suffix(".json")).read_text())
    for n, layer in enumerate(data["layers"]):
        layer["moved_by"] = [0.01] * len(data["tokens"])
        layer["moved_by"][5] = 0.5 + 0.1 * n
    (tmp_path / "page.html").write_text(render(typed(Inspection, data)), encoding="utf-8")
    browser.open(tmp_path / "page.html")
    layers = len(data["layers"])
    mass = browser.text("[data-picture=mass] .readout")
    assert mass == f"layer {layers}, token 5 “ token5”: moved by {0.5 + 0.1 * (layers - 1):.4g}"
    entropies = np.array([head["rows"]["entropy"] for head in data["heads"]])
    focused = entropies - np.log(np.arange(1, entropies.shape[1] + 1))
    head, token = np.unravel_index(np.argmin(focused), focused.shape)
    name = f"L{data['heads'][head]['layer']} H{data['heads'][head]['head']}"
    rows = browser.text("[data-picture=rows] .readout")
    assert rows.startswith(f"{name}, token {token} “")


def test_a_change_of_colour_scheme_repaints_what_is_drawn(
    browser: Browser, pages: dict[str, Path]
) -> None:
    browser.open(pages["run"], scheme="light")
    canvas = "[data-picture=entropy] canvas"
    light = browser.colours(canvas)
    assert len(light) == 30  # a ramp, not one flat colour
    browser.set_scheme("dark")
    dark = browser.colours_after(canvas, light)
    assert len(dark) == 30
    assert set(dark).isdisjoint(light)
    browser.set_scheme("light")
    assert browser.colours_after(canvas, dark) == light


def test_the_reliability_diagram_draws_every_bin(browser: Browser, pages: dict[str, Path]) -> None:
    browser.open(pages["reliability"])
    bins = browser.find_all("figure details tbody tr")
    dots = browser.find_all("figure svg circle.dot")
    assert len(bins) > 10
    assert len(dots) == len(bins) + 2  # two are in the legend
    assert browser.text("figure svg").count("T = 4.000") == 1


def test_small_differences_stay_small_on_a_heat_map(
    browser: Browser, pages: dict[str, Path], tmp_path: Path
) -> None:
    """Entropies of 3.0 to 3.1 in one page and of 0.5 to 3.1 in another: the scale shows both."""
    data = json.loads((pages["inspection"].with_suffix(".json")).read_text())
    scales = {}
    for name, least in (("alike", 3.0), ("apart", 0.5)):
        for n, head in enumerate(data["heads"]):
            head["entropy"]["mean"] = least if n else 3.1
        page = render(typed(Inspection, data))
        (tmp_path / f"{name}.html").write_text(page, encoding="utf-8")
        browser.open(tmp_path / f"{name}.html")
        scales[name] = browser.text("[data-picture=heads] .ramp").split()
    assert [float(end) for end in scales["alike"]] == pytest.approx([2.6625, 3.4375], abs=1e-3)
    assert [float(end) for end in scales["apart"]] == [0.5, 3.1]
