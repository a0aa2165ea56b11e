"""fenchel/server/page.py: the live page in a real browser, against a server with canned streams.

The server here sends what fenchel/server/app.py sends, with token texts that are hostile and
numbers that are known, and remembers what the page has asked for. What lights up on the page is
compared with those numbers.
"""

import asyncio
import json
import math
import re
import socket
import threading
import time
import urllib.request
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from selenium.webdriver.common.keys import Keys
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from fenchel.generation import Sampling
from fenchel.server.page import content_security_policy, page
from tests.browser import DESKTOP, PHONE, Browser, Locator, needs_browser
from tests.server.conftest import ANSWERS, RunningServer

HOSTILE = '</script><img src=x onerror="document.title=1">'
FACTS = {
    "model": "tiny </title><b>",
    "context": 64,
    "layers": 3,
    "heads": 2,
    "chat": True,
    "stops": [2, "\nuser:"],
    "ends": [19],
    "sampling": {"temperature": 0.62, "top_k": 20, "repetition_penalty": 5},
    "fingerprint": "0123456789ab",
    "directions": {"kind": 0.5},
    "lens": True,
}
PROMPT = ("To", " the", " Congress")
SHELL = "🐚".encode()
ANSWER: tuple[str | bytes, ...] = (
    " of",
    HOSTILE,
    " peace\n",
    SHELL[:2],
    SHELL[2:],
    " and",
    " labor",
)
ENDLESS, REFUSED, CUT = "endless", "refused", "cut"
"""Prompts to which the server answers without end, with an error, or with half of an answer."""


def scored(id: int, piece: str | bytes, logprob: float | None) -> dict[str, Any]:
    data = piece if isinstance(piece, bytes) else piece.encode()
    text = data.decode(errors="replace")
    return {"id": id, "token": text, "bytes": list(data), "logprob": logprob}


def read(position: int, turn: int) -> dict[str, Any]:
    """Weights over the positions up to ``position`` that differ for each ``turn``."""
    raw = [1.0 + (7 * key + 5 * turn) % 11 for key in range(position + 1)]
    weights = sorted(
        ((key, w / (1.1 * sum(raw))) for key, w in enumerate(raw)), key=lambda pair: -pair[1]
    )
    return {"top": [list(pair) for pair in weights[:4]], "rest": 0.1, "first": 0.01}


def trace(position: int) -> dict[str, Any]:
    """The trace of the token after ``position``, as TokenTrace.as_json gives it."""
    layers = [
        {
            "layer": layer,
            "entropy": 0.5 + layer,
            "keys": math.exp(0.5 + layer),
            **read(position, 10 * layer),
            "heads": [
                {"entropy": 0.4, "keys": 1.5, **read(position, 10 * layer + head + 1)}
                for head in range(2)
            ],
        }
        for layer in range(3)
    ]
    bounds = {"head": 0, "lower": 0.2, "upper": 0.2501, "certified": True}
    return {
        "p": 0.25,
        "rank": 2,
        "entropy": 1.5,
        "effective": math.exp(1.5),
        "confidence": {"p": 0.22, "temperature": 1.1, "error": 0.01, "predictions": 4096},
        "attention": {"position": position, "layers": layers, "last_third": read(position, 50)},
        "sensitivity": {"layers": [{"layer": layer, **bounds} for layer in range(3)]},
    }


class Canned:
    """The server: routes of the page, canned answers, and what it was asked."""

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.left = threading.Event()
        """Set when the client of an endless answer leaves."""
        self.read_layers = threading.Event()
        """The answer of the lens waits while it is not set."""
        self.read_layers.set()
        routes = [
            Route("/", self.index),
            Route("/tokenize", self.tokenize, methods=["POST"]),
            Route("/v1/completions", self.completions, methods=["POST"]),
            Route("/lens", self.lens, methods=["POST"]),
        ]
        listener = socket.socket()
        listener.bind(("127.0.0.1", 0))
        listener.listen()  # a request that comes early waits
        self.address = f"http://127.0.0.1:{listener.getsockname()[1]}/"
        settings = uvicorn.Config(
            Starlette(routes=routes), log_level="error", timeout_graceful_shutdown=1
        )
        self.server = uvicorn.Server(settings)
        self.thread = threading.Thread(target=self.server.run, kwargs={"sockets": [listener]})
        self.thread.start()

    def close(self) -> None:
        self.server.should_exit = True
        self.thread.join()

    async def index(self, _: Request) -> Response:
        headers = {"Content-Security-Policy": content_security_policy("n0nce")}
        return HTMLResponse(page("n0nce", FACTS), headers=headers)

    async def tokenize(self, request: Request) -> Response:
        body = await request.json()
        self.bodies.append(body)
        if body.get("prompt") == REFUSED:
            error = {"message": "the prompt has 99 tokens and the model reads 64."}
            return JSONResponse({"error": error}, 400)
        self.kind = body.get("prompt")
        return JSONResponse({"tokens": [10, 11, 12]})

    async def lens(self, request: Request) -> Response:
        self.bodies.append(await request.json())
        await asyncio.to_thread(self.read_layers.wait)
        best = {"id": 7, "token": HOSTILE, "p": 0.5}
        rows = [{"layer": n, "top": [best], "p": 0.25 * n} for n in (1, 2, 3)]
        return JSONResponse({"layers": rows})

    async def completions(self, request: Request) -> Response:
        body = await request.json()
        self.bodies.append(body)
        stream = self.endless() if self.kind == ENDLESS else self.stream(body["prompt"])
        return StreamingResponse(stream, media_type="text/event-stream")

    async def stream(self, ids: list[int]) -> AsyncIterator[str]:
        """The prompt, then the answer: token k has id 10 + k and log-probability -k / 4."""
        pieces = (*PROMPT, *ANSWER)
        yield event(
            content=[
                scored(id, piece, (-9.0 if id >= 90 else -k / 4) if k else None)
                | {"top_logprobs": []}
                for k, (id, piece) in enumerate(zip(ids, pieces, strict=False))
            ]
        )
        for k in range(len(ids), len(pieces)):
            other = scored(90 + k, f" other{k}", -9.0)
            entry = scored(10 + k, pieces[k], -k / 4)
            if self.kind == CUT and k == 6:
                yield 'data: {"error": {"message": "the engine has stopped."}}\n\n'
                return
            yield event(content=[entry | {"top_logprobs": [entry, other]}], fenchel=[trace(k - 1)])
        yield event(finish="length")
        yield "data: [DONE]\n\n"

    async def endless(self) -> AsyncIterator[str]:
        yield event(content=[scored(id, " x", -1.0) for id in (10, 11, 12)])
        try:
            while True:
                yield event(content=[scored(13, " y", -1.0)], fenchel=[trace(0)])
                await asyncio.sleep(0.02)
        finally:
            self.left.set()


def event(
    content: list[dict[str, Any]] | None = None,
    fenchel: list[dict[str, Any]] | None = None,
    finish: str | None = None,
) -> str:
    choice = {
        "index": 0,
        "text": "",
        "logprobs": None if content is None else {"content": content},
        "finish_reason": finish,
        **({} if fenchel is None else {"fenchel": fenchel}),
    }
    return f"data: {json.dumps({'choices': [choice]})}\n\n"


@pytest.fixture(scope="module")
def server() -> Iterator[Canned]:
    canned = Canned()
    yield canned
    canned.close()


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    session = Browser()
    yield session
    session.driver.quit()


def pieces(browser: Browser) -> list[Locator]:
    return browser.find_all("#tokens .piece")


def lit(browser: Browser, wanted: dict[int, Any]) -> None:
    """Wait until these tokens are lit, with these weights."""
    browser.expect(lambda: weights(browser), wanted)


def generate(browser: Browser, server: Canned, prompt: str = "To", **how: Any) -> None:
    """Open the page, send a prompt to be completed, and wait until the text stands."""
    browser.open(server.address, **how)
    browser.find("input[value=completion]").click()
    server.bodies.clear()
    browser.find("#prompt").send_keys(prompt)
    browser.find("#generate").click()
    if prompt != ENDLESS:
        browser.until(lambda: browser.text("#status").startswith("7 tokens"))


def weights(browser: Browser) -> dict[int, float]:
    """Position to the square root of its weight over the largest, for the tokens that are lit."""
    found = browser.run(
        "return [...document.querySelectorAll('#tokens .piece')].map((piece) =>"
        " piece.classList.contains('read') ? +piece.style.getPropertyValue('--weight') : 0)"
    )
    return {position: weight for position, weight in enumerate(found) if weight}


def expected(read: dict[str, Any]) -> dict[int, float]:
    most = read["top"][0][1]
    return {position: pytest.approx(math.sqrt(w / most), abs=1e-3) for position, w in read["top"]}


def hover(browser: Browser, at: int) -> None:
    browser.hover(f"#tokens .piece:nth-of-type({at + 1})", 0.5, 0.5)


# --- without a browser


def test_the_document_escapes_its_facts_and_names_no_outside_resource() -> None:
    document = page("a&b", FACTS | {"fingerprint": HOSTILE})
    assert "tiny &lt;/title&gt;&lt;b&gt; · fenchel</title>" in document
    assert HOSTILE not in document
    assert document.count("</script>") == 2
    assert document.count('nonce="a&amp;b"') == 2
    addresses = set(re.findall(r"https?://[^\s\"'`)]+", document))
    assert addresses == {"http://www.w3.org/2000/svg"}  # a namespace
    assert not re.search(r"innerHTML|insertAdjacentHTML|document\.write|\beval\b", document)


def test_the_policy_admits_the_nonce_and_the_own_origin_only() -> None:
    rules = dict(rule.split(" ", 1) for rule in content_security_policy("xyz").split("; "))
    assert rules["default-src"] == "'none'"
    assert rules["connect-src"] == "'self'"
    assert rules["script-src"] == rules["style-src"] == "'nonce-xyz'"


# --- in a browser


@needs_browser
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [DESKTOP, PHONE])
def test_tokens_appear_as_text_in_silence_and_nothing_leaves_the_origin(
    browser: Browser, server: Canned, width: int, scheme: str
) -> None:
    generate(browser, server, width=width, scheme=scheme)
    texts = ["of", HOSTILE, "peace↵", "◌", "🐚", "and", "labor"]
    assert browser.texts("#tokens .piece") == [text.strip() for text in (*PROMPT, *texts)]
    assert browser.run("return document.querySelectorAll('img').length") == 0
    assert browser.find("h1").text == FACTS["model"]
    pieces(browser)[4].click()
    browser.expect(lambda: browser.text("#inspector h2"), HOSTILE.replace(" ", "·"))
    browser.until(lambda: browser.find_all(".by-layer tbody tr"))
    assert browser.run("return document.documentElement.scrollWidth") == width
    assert browser.console() == []
    assert browser.requests() == [
        server.address,
        f"{server.address}tokenize",
        f"{server.address}v1/completions",
        f"{server.address}lens",
    ]
    paper = browser.run("return getComputedStyle(document.body).backgroundColor")
    assert paper == {"light": "rgb(251, 250, 246)", "dark": "rgb(20, 23, 26)"}[scheme]


@needs_browser
def test_a_token_lights_up_what_it_read_by_the_chosen_layer_and_head(
    browser: Browser, server: Canned
) -> None:
    generate(browser, server)
    hover(browser, 6)
    lit(browser, expected(read(5, 50)))
    hover(browser, 8)
    lit(browser, expected(read(7, 50)))
    pieces(browser)[8].click()
    browser.find("select[aria-label=Layer] option[value='1']").click()
    lit(browser, expected(read(7, 10)))
    browser.find("select[aria-label=Head] option[value='1']").click()
    lit(browser, expected(read(7, 12)))
    rows = browser.texts(":not(.by-layer) > .layers tbody tr")
    assert [row.split() for row in rows] == [
        [str(layer + 1), f"{math.exp(0.5 + layer):.3g}", "≤", "0.251"] for layer in range(3)
    ]
    browser.find("body").send_keys(Keys.ESCAPE)
    hover(browser, 0)  # a token of the prompt shows which tokens read it
    given = {
        at: dict(map(tuple, read(at - 1, 12)["top"])).get(0, 0.0)
        for at in range(3, len(PROMPT) + len(ANSWER))
    }
    most = max(given.values())
    near = {at: pytest.approx(math.sqrt(w / most), abs=1e-3) for at, w in given.items() if w}
    lit(browser, near)


@needs_browser
def test_the_lens_arrives_beside_a_control_in_use(browser: Browser, server: Canned) -> None:
    generate(browser, server)
    server.read_layers.clear()
    pieces(browser)[8].click()
    browser.expect(lambda: browser.text(".by-layer .note"), "Reading the layers.")
    layer = browser.find("select[aria-label=Layer] option[value='1']").element
    server.read_layers.set()
    browser.until(lambda: browser.find_all(".by-layer tbody tr"))
    layer.click()  # the same element
    lit(browser, expected(read(7, 10)))
    asked = [body for body in server.bodies if "next" in body]
    assert len(asked) == 1, "a choice does not ask again"


@needs_browser
def test_the_last_token_is_shown_first_and_its_weights_once_a_layer_is_chosen(
    browser: Browser, server: Canned
) -> None:
    last = len(PROMPT) + len(ANSWER) - 1
    generate(browser, server)
    browser.expect(lambda: browser.text("#inspector h2"), "·labor")
    lit(browser, {})  # the text is shaded by surprise
    assert "latest" in pieces(browser)[last].get_attribute("class")
    hover(browser, 6)
    browser.until(lambda: browser.text("#inspector h2") != "·labor")
    browser.hover("h1", 0.5, 0.5)
    browser.expect(lambda: browser.text("#inspector h2"), "·labor")
    browser.find("select[aria-label=Layer] option[value='1']").click()
    lit(browser, expected(read(last - 1, 10)))
    browser.find("body").send_keys(Keys.ESCAPE)
    lit(browser, {})
    generate(browser, server, width=PHONE)  # where the numbers would cover the text
    assert browser.text("#inspector").startswith("Point at a token")


@needs_browser
def test_the_numbers_of_a_token_do_not_cover_it_on_a_phone(
    browser: Browser, server: Canned
) -> None:
    generate(browser, server, width=PHONE)
    # By its event: the driver would scroll to it before a click.
    browser.run("document.querySelectorAll('#tokens .piece')[8].click()")
    browser.until(lambda: browser.find_all(".piece.kept"))
    token, numbers = (
        browser.run(f"return document.querySelector('{one}').getBoundingClientRect().toJSON()")
        for one in (".piece.kept", "#inspector")
    )
    assert 0 <= token["top"] < token["bottom"] <= numbers["top"] < 900


@needs_browser
def test_sampling_begins_as_the_checkpoint_has_it(browser: Browser, server: Canned) -> None:
    generate(browser, server)
    names = ("temperature", "top_p", "top_k", "repetition_penalty")
    # A penalty of 5 is outside of the control.
    assert [server.bodies[1].get(name) for name in names] == [0.62, 1, 20, 2]
    shown = browser.run("return document.querySelector('.control output').textContent")
    assert shown == "0.62"


@needs_browser
def test_surprise_is_the_shade_of_a_token(browser: Browser, server: Canned) -> None:
    generate(browser, server)
    ramp = browser.run(
        "return getComputedStyle(document.documentElement).getPropertyValue('--ramp')"
    )
    ends = [[int(c.strip()[i : i + 2], 16) for i in (1, 3, 5)] for c in ramp.split(",")]
    colours = """return Array.from(document.querySelectorAll("#tokens .piece"),
        (piece) => piece.style.backgroundColor)"""
    for at, colour in enumerate(browser.run(colours)):
        if at == 0:
            assert colour == ""
            continue
        place = at / 4 / 8 * (len(ends) - 1)
        low = min(int(place), len(ends) - 2)
        blend = [a + (b - a) * (place - low) for a, b in zip(ends[low], ends[low + 1], strict=True)]
        assert [int(n) for n in re.findall(r"\d+", colour)] == pytest.approx(blend, abs=0.51)


@needs_browser
def test_a_kept_token_shows_what_each_layer_would_write(browser: Browser, server: Canned) -> None:
    generate(browser, server)
    hover(browser, 5)
    assert not browser.find_all(".by-layer")  # only once it is kept
    pieces(browser)[5].click()
    rows = browser.until(lambda: browser.texts(".by-layer tbody tr"))
    assert server.bodies[-1] == {
        "model": FACTS["model"],
        "tokens": [10, 11, 12, 13, 14],
        "next": 15,
        "top": 1,
    }
    assert [row.split()[0] for row in rows] == ["1", "2", "3"]
    assert [row.split()[-1] for row in rows] == ["0.25", "0.50", "0.75"]
    assert HOSTILE.replace(" ", "·") in rows[0]
    assert browser.console() == []


@needs_browser
def test_a_slider_of_a_direction_draws_the_text_again(browser: Browser, server: Canned) -> None:
    generate(browser, server)
    assert server.bodies[-1]["fenchel"]["steer"] == {"kind": 0.5}
    assert "token_kl" not in server.bodies[-1]["fenchel"]
    first = server.bodies[-1]
    move = (
        "const slider = document.getElementById(`sampling-${arguments[0]}`);"
        "slider.value = arguments[1]; for (const name of ['input', 'change'])"
        " slider.dispatchEvent(new Event(name, { bubbles: true }));"
    )
    browser.run(move, "kind", "0.95")
    browser.until(lambda: len(server.bodies) == 3)
    steer = server.bodies[-1]["fenchel"]["steer"]["kind"]
    assert steer == pytest.approx(0.5 * 0.95)
    browser.run(move, "token_kl", "0.01")  # the text before may not have come yet
    browser.until(lambda: len(server.bodies) == 4)
    assert server.bodies[-1]["fenchel"]["token_kl"] == 0.01
    for name in ("prompt", "seed", "max_tokens"):
        assert server.bodies[-1][name] == first[name]


@needs_browser
def test_another_token_continues_from_its_place_by_ids_and_the_same_seed(
    browser: Browser, server: Canned
) -> None:
    generate(browser, server)
    _, first = server.bodies
    assert first["prompt"] == [10, 11, 12]
    assert (first["echo"], first["stream"], first["return_token_ids"]) == (True, True, True)
    assert first["fenchel"]["attention"] == {"layers": "all", "heads": "all", "top": 8}
    pieces(browser)[7].click()
    options = browser.until(lambda: browser.find_all(".alternatives button"))
    assert [option.is_enabled() for option in options] == [False, True]  # the first is the token
    options[1].click()
    browser.until(lambda: browser.text("#status").startswith("2 tokens"))
    again = server.bodies[-1]
    assert again["prompt"] == [*range(10, 17), 97]
    assert again["seed"] == first["seed"]
    hover(browser, 6)  # what came before keeps its trace, and so does the place that changed
    lit(browser, expected(read(5, 50)))
    hover(browser, 7)
    lit(browser, expected(read(6, 50)))
    browser.expect(lambda: browser.text("#inspector dd"), "1.23e-4\nsurprise 9.00 nats")


@needs_browser
@pytest.mark.parametrize(
    ("chat", "mode", "label", "button"),
    [(True, "chat", "Message", "Send"), (False, "completion", "Prompt", "Generate")],
    ids=["template", "no template"],
)
def test_the_page_opens_on_chat_where_the_checkpoint_has_a_template(
    browser: Browser, tmp_path: Path, chat: bool, mode: str, label: str, button: str
) -> None:
    file = tmp_path / "page.html"
    file.write_text(page("n0nce", FACTS | {"chat": chat}), encoding="utf-8")
    browser.open(file)
    assert browser.find("input[name=mode]:checked").get_attribute("value") == mode
    assert browser.find(".modes").is_displayed() == chat
    assert browser.text("#prompt-label") == label
    assert browser.text("#generate") == button


@needs_browser
def test_a_chat_sends_its_messages_and_its_answer(browser: Browser, server: Canned) -> None:
    browser.open(server.address)
    server.bodies.clear()
    browser.find("#prompt").send_keys("Hello.", Keys.ENTER)
    browser.until(lambda: browser.text("#status").startswith("7 tokens"))
    question, answer = server.bodies
    assert question == {
        "messages": [{"role": "user", "content": "Hello."}],
        "add_generation_prompt": True,
    }
    assert answer["stop"] == ["\nuser:"]
    assert answer["stop_token_ids"] == [2]
    browser.find("#prompt").send_keys("More.", Keys.ENTER)
    browser.until(lambda: len(server.bodies) == 4)
    said = f"of{HOSTILE} peace\n🐚 and"  # without " labor", which ends a text
    assert server.bodies[2]["messages"] == [
        {"role": "user", "content": "Hello."},
        {"role": "assistant", "content": said},
        {"role": "user", "content": "More."},
    ]


@needs_browser
def test_stop_ends_the_request(browser: Browser, server: Canned) -> None:
    server.left.clear()
    generate(browser, server, ENDLESS)
    browser.until(lambda: len(pieces(browser)) > 5)
    assert not server.left.is_set()
    browser.find("#stop").click()
    assert server.left.wait(10)
    browser.until(lambda: "stopped" in browser.text("#status"))
    count = len(pieces(browser))
    time.sleep(0.1)
    assert len(pieces(browser)) == count


@needs_browser
@pytest.mark.parametrize(
    ("prompt", "sentence"),
    [
        (REFUSED, "The prompt has 99 tokens and the model reads 64."),
        (CUT, "The engine has stopped."),
    ],
)
def test_an_error_is_one_sentence(
    browser: Browser, server: Canned, prompt: str, sentence: str
) -> None:
    browser.open(server.address)
    browser.find("input[value=completion]").click()
    browser.find("#prompt").send_keys(prompt)
    browser.find("#generate").click()
    browser.until(lambda: browser.text("#error"))
    assert browser.text("#error") == sentence
    browser.until(lambda: browser.find("#generate").is_enabled())
    browser.until(lambda: not browser.find("#stop").is_enabled())


@needs_browser
def test_tokens_are_one_tab_stop_and_name_the_positions_they_read(
    browser: Browser, server: Canned
) -> None:
    generate(browser, server)
    stops = [piece for piece in pieces(browser) if piece.get_attribute("tabindex") == "0"]
    assert len(stops) == 1
    browser.run("arguments[0].focus()", stops[0])
    for key, at in ((Keys.END, 9), (Keys.ARROW_LEFT, 8)):
        browser.focused().send_keys(key)
        focused = pieces(browser)[at]
        browser.until(focused.is_focused)
    assert focused.get_attribute("role") == "button"
    top = read(7, 50)["top"][:3]
    names = ["To", "the", "Congress", "of", HOSTILE, "peace", "part of a character", "🐚", "and"]
    words = ", ".join(f"{names[at]} {weight:.2f}" for at, weight in top)
    assert focused.get_attribute("aria-label") == (
        f"and, new token 9; probability 0.1353, rank 2; read {words}"
    )
    lit(browser, expected(read(7, 50)))
    focused.send_keys(Keys.ENTER)  # keeps the token and goes to what else could stand there
    other = "other8, probability 1.23e-4"
    browser.expect(lambda: browser.focused().get_attribute("aria-label"), other)


@needs_browser
def test_a_saved_page_opens_alone_and_shows_the_same(
    browser: Browser, server: Canned, tmp_path: Path
) -> None:
    where = {"behavior": "allow", "downloadPath": str(tmp_path)}
    browser.driver.execute_cdp_cmd("Browser.setDownloadBehavior", where)
    generate(browser, server)
    browser.find("#save").click()
    browser.until(lambda: [file.suffix for file in tmp_path.iterdir()] == [".html"])
    (file,) = tmp_path.iterdir()
    browser.open(file)
    assert browser.console() == []
    assert browser.requests() == [file.as_uri()]
    assert browser.run("return document.forms.length") == 0
    assert pieces(browser)[4].text == HOSTILE
    assert browser.run("return document.querySelectorAll('img').length") == 0
    hover(browser, 8)
    lit(browser, expected(read(7, 50)))
    assert "default-src 'none'" in file.read_text(encoding="utf-8")
    assert "connect-src" not in file.read_text(encoding="utf-8").partition("<style>")[0]


@needs_browser
def test_the_page_of_an_encoder_offers_neither_a_prompt_nor_tokens(
    browser: Browser, tmp_path: Path
) -> None:
    file = tmp_path / "encoder.html"
    file.write_text(page("n0nce", FACTS | {"generates": False}), encoding="utf-8")
    browser.open(file)
    assert "continues no text" in browser.text("#hint")
    assert not browser.find("#form").is_displayed()
    assert not browser.find("#inspector").is_displayed()


# --- against fenchel/server/app.py


def test_the_page_has_the_end_tokens_and_the_sampling_defaults(
    running: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    app, served = running.server.app, running.served
    facts = app._facts()
    assert facts["ends"] == [served.tokenizer.token_to_id("<stop>")]
    assert facts["sampling"] == {}
    drawn = Sampling(temperature=0.6, top_k=20)
    monkeypatch.setattr(app, "served", replace(served, defaults=drawn))
    assert app._facts()["sampling"] == {"temperature": 0.6, "top_k": 20}


def ask(running: RunningServer, path: str, body: dict[str, Any]) -> dict[str, Any]:
    data = json.dumps(body).encode()
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(running.address + path, data=data, headers=headers)
    with urllib.request.urlopen(request, timeout=30) as response:
        return dict(json.load(response))


@needs_browser
def test_a_chat_on_the_page_is_the_answer_of_the_model_and_of_the_api(
    browser: Browser, running: RunningServer
) -> None:
    browser.open(running.address)
    browser.run("document.getElementById('sampling-temperature').value = 0")
    browser.find("#prompt").send_keys("What is the sea?", Keys.ENTER)
    browser.until(lambda: "ended by the model" in browser.text("#status"))
    made = browser.run(
        "return [...document.querySelectorAll('.piece.made')].map((piece) =>"
        " (piece.previousSibling?.data ?? '') + piece.textContent)"
    )
    assert "".join(made) == ANSWERS["the sea"] + "<stop>"
    messages = [{"role": "user", "content": "What is the sea?"}]
    ids = ask(running, "/tokenize", {"messages": messages})["tokens"]
    body = {
        "prompt": ids,
        "temperature": 0,
        "max_tokens": len(made),
        "fenchel": {"attention": {"heads": "all"}},
    }
    (choice,) = ask(running, "/v1/completions", body)["choices"]
    for step in (0, 5):
        hover(browser, len(ids) + step)
        traced = choice["fenchel"][step]["attention"]
        lit(browser, expected(traced["last_third"]))
    assert browser.console() == []
