"""fenchel learn: the list, and every lesson in a browser; its guard: tests/server/test_guard.py."""

import ast
import asyncio
import gc
import itertools
import os
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from selenium.webdriver.common.keys import Keys
from starlette.requests import Request

from fenchel.cli import main
from fenchel.lessons import course
from fenchel.lessons.course import COURSE, Lesson, Record
from fenchel.lessons.server import (
    Assets,
    LessonServer,
    _serialise_cells,
    _serialise_parsing,
    index_page,
)
from tests.browser import PHONE, Browser, Locator, needs_browser


def test_the_list_names_every_lesson_and_what_is_solved() -> None:
    done = Record(solved=True, prediction="equal", pencil_right=True)
    page = index_page({"softmax": done})
    assert all(f'href="/lessons/{each.name}/"' in page for each in COURSE)
    assert (
        f"1 of {len(COURSE)} exercises solved. Without code: 1 prediction, 1 question by pencil, 0"
        in page
    )
    assert page.count(">solved<") == 1
    assert "done: prediction, pencil" in page
    assert "Continue: Sums, tables" in page, "the first lesson that is not solved"
    assert "Begin: Sums, tables" in index_page({})
    assert "Continue" not in index_page({each.name: Record(solved=True) for each in COURSE})
    without_code = {"sums_and_tables": Record(pencil_right=True, choice_right=True)}
    assert "Continue: Slopes" in index_page(without_code)
    assert page.count("research, not needed") == 1
    assert "loads nothing and" not in page, "the files of the lessons are loaded with it"


def test_a_given_port_in_use_is_refused_and_the_default_avoids_it() -> None:
    first = LessonServer(0)
    with pytest.raises(ValueError, match=f"port {first.port} cannot be used"):
        LessonServer(first.port)
    second = LessonServer()
    assert second.port != first.port
    for server in (first, second):
        server.socket.close()


def test_a_lesson_that_cannot_be_built_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise RuntimeError("marimo is of another version")

    monkeypatch.setattr("fenchel.lessons.server._builder", fail)
    server = LessonServer(0)
    server.socket.close()
    server._import()
    scope = {"type": "http", "path": "/lessons/softmax/"}
    with pytest.raises(RuntimeError, match="another version"):
        asyncio.run(asyncio.wait_for(server._lesson(scope, None, None), 20))  # type: ignore[arg-type]


def test_the_cells_of_two_pages_run_one_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Levels of forward-mode derivatives are counted per process, not per thread."""
    from marimo._runtime.executor.evaluator import resolve_executor

    _serialise_cells()
    in_cell, may_end = threading.Event(), threading.Event()

    def wait() -> None:
        in_cell.set()
        may_end.wait(20)

    first, second = cell("wait(), order.append(1)"), cell("order.append(2)")
    names: dict[str, Any] = {"wait": wait, "order": []}
    other = threading.Thread(target=resolve_executor().execute_cell, args=(first, names))
    other.start()
    assert in_cell.wait(20)
    later = threading.Thread(target=resolve_executor().execute_cell, args=(second, names))
    later.start()
    later.join(0.2)
    assert names["order"] == []
    may_end.set()
    other.join(20)
    later.join(20)
    assert names["order"] == [1, 2]

    monkeypatch.setattr("fenchel.lessons.server._TURN", 0.1)
    in_cell.clear()
    may_end.clear()
    endless = threading.Thread(target=resolve_executor().execute_cell, args=(first, names))
    endless.start()
    assert in_cell.wait(20)
    resolve_executor().execute_cell(second, names)
    assert names["order"] == [1, 2, 2]
    may_end.set()
    endless.join(20)


def test_two_pages_that_parse_at_once_do_not_end_each_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A collection in the middle of a syntax tree lets another thread begin one."""
    monkeypatch.setattr(ast, "parse", ast.parse)
    _serialise_parsing.__wrapped__()
    collections, others = itertools.count(), []

    def interrupt(phase: str, _info: object) -> None:
        if phase == "start" and next(collections) == 200:
            others.append(threading.Thread(target=ast.parse, args=("y = 1",)))
            others[0].start()
            others[0].join(0.2)

    def parse_below(frames: int) -> None:
        if frames:
            parse_below(frames - 1)
        else:
            ast.parse(f"x = [{', '.join(['f(a, b.c[3])'] * 3000)}]")

    threshold = gc.get_threshold()
    gc.callbacks.append(interrupt)
    gc.set_threshold(5)
    try:
        parse_below(40)
    finally:
        gc.set_threshold(*threshold)
        gc.callbacks.remove(interrupt)
    assert others, "no collection came in the middle"
    others[0].join(20)


def cell(expression: str) -> Any:
    """What marimo makes of a cell that is one expression."""
    body, last = compile("", "cell", "exec"), compile(expression, "cell", "eval")
    return SimpleNamespace(body=body, last_expr=last)


ENDLESS = """
import asyncio, threading
from types import SimpleNamespace
from fenchel.lessons.server import LessonServer

class Sessions:
    async def shutdown(self):
        print("shutting down", flush=True)
        threading.Event().wait()

async def serve():
    server._lessons["softmax"] = lesson = asyncio.Future()
    lesson.set_result(SimpleNamespace(routes=[route]))
    async with server._lifespan(None):
        pass

server = LessonServer(0)
server._import = lambda: None
state = SimpleNamespace(session_manager=Sessions())
route = SimpleNamespace(app=SimpleNamespace(state=state))
asyncio.run(serve())
"""


def test_the_server_ends_while_a_lesson_computes() -> None:
    done = subprocess.run(
        [sys.executable, "-c", ENDLESS],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "shutting down\n"), done.stderr


def test_the_lessons_are_listed_without_a_server(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["learn", "--list"]) == 0
    printed = capsys.readouterr().out
    assert all(each.title in printed for each in COURSE)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ([str(len(COURSE))], "names no lesson"),
        (["--edit"], "--edit needs a lesson"),
        (["--port", "70000"], "a port is a number from 0 to 65535, not 70000"),
        (["--port", "-1"], "a port is a number from 0 to 65535, not -1"),
    ],
)
def test_a_wrong_argument_is_one_sentence(
    arguments: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["learn", *arguments]) == 2
    error = capsys.readouterr().err
    assert sentence in error
    assert "Traceback" not in error


class Process:
    """A process of ``fenchel learn``, with the folder in which it runs."""

    def __init__(self, folder: Path) -> None:
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(sys.path),
            "XDG_STATE_HOME": str(folder / "state"),
        }
        command = [sys.executable, "-m", "fenchel", "learn", "--no-browser", "--port", "0"]
        self.process = subprocess.Popen(
            command,
            cwd=folder,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=(folder / "errors").open("w"),
            text=True,
        )
        self.errors = folder / "errors"
        assert self.process.stdout is not None
        found = re.search(r"http://127\.0\.0\.1:\d+", line := self.process.stdout.readline())
        assert found, line
        self.address = found.group(0)
        self.token = line.split("token=")[1].strip()

    def end(self) -> int:
        self.process.send_signal(signal.SIGINT)
        return self.process.wait(timeout=20)


def test_an_impatient_end_prints_no_traceback(tmp_path: Path) -> None:
    process = Process(tmp_path)
    reader = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with pytest.raises(urllib.error.HTTPError):
        reader.open(process.address)  # it serves by now
    process.process.send_signal(signal.SIGINT)
    time.sleep(0.03)  # signals that come together are one
    assert process.end() == 0
    assert "Traceback" not in process.errors.read_text()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Process]:
    process = Process(tmp_path_factory.mktemp("learn"))
    yield process
    assert process.end() == 0, "Ctrl-C ends it, with the pages of the tests open"
    errors = process.errors.read_text()
    assert "Traceback" not in errors, errors
    assert not [*COURSE[0].path.parent.rglob("__marimo__")], "nothing is written into the package"


def test_without_the_token_there_is_no_page(server: Process) -> None:
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with pytest.raises(urllib.error.HTTPError) as error:
        direct.open(server.address)
    assert error.value.code == 403


@pytest.fixture(scope="module")
def reader(server: Process) -> urllib.request.OpenerDirector:
    """A client that has the cookie."""
    jar = urllib.request.HTTPCookieProcessor()
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), jar)
    opener.open(f"{server.address}/?token={server.token}")
    return opener


ASSETS = re.compile(r"/assets-of-marimo/assets/[\w.-]+")


def test_until_a_lesson_is_ready_there_is_its_question(monkeypatch: pytest.MonkeyPatch) -> None:
    async def app(*_: Any) -> None:
        sent.append({"lesson": True})

    async def receive() -> dict[str, Any]:
        await asyncio.sleep(60)
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        sent.append(message)
        if len(sent) == 2:  # the head and the question are sent before marimo is imported
            server._marimo.set_result(None)

    sent: list[dict[str, Any]] = []
    monkeypatch.setattr("fenchel.lessons.server._build", lambda _: app)
    server = LessonServer(0)
    server.socket.close()
    scope = {"type": "http", "path": "/lessons/softmax/", "headers": []}

    async def twice() -> None:
        await server._lesson(scope, receive, send)
        await server._lesson(scope, receive, send)

    asyncio.run(asyncio.wait_for(twice(), 30))
    head, question, end, _, lesson = sent
    assert course.lesson("softmax").question in question["body"].decode()
    assert end["body"] == b'<meta http-equiv="refresh" content="0">', "it opens the lesson"
    assert lesson == {"lesson": True}
    assert (b"link", server._assets.links["Link"].encode()) in head["headers"]


def test_the_list_loads_what_a_lesson_needs(
    server: Process, reader: urllib.request.OpenerDirector
) -> None:
    needed = set(ASSETS.findall(lesson_page(server, reader, course.lesson("softmax"))))
    assert needed
    assert set(ASSETS.findall(reader.open(server.address).headers["Link"])) >= needed


def lesson_page(server: Process, reader: urllib.request.OpenerDirector, lesson: Lesson) -> str:
    address = f"{server.address}/lessons/{lesson.name}/"
    reader.open(address).read()  # may be its question, which ends when the lesson is ready
    return str(reader.open(address).read().decode())


def test_lessons_share_the_files_of_marimo(
    server: Process, reader: urllib.request.OpenerDirector
) -> None:
    pages = [lesson_page(server, reader, course.lesson(name)) for name in ("slopes", "softmax")]
    first, second = (set(ASSETS.findall(page)) for page in pages)
    assert first == second != set()
    headers = reader.open(f"{server.address}{min(first)}").headers
    assert "immutable" in headers["Cache-Control"]


def test_only_files_of_the_frontend_are_sent(tmp_path: Path) -> None:
    folder = tmp_path / "static"
    (folder / "assets").mkdir(parents=True)
    (folder / "index.html").write_text('<script src="./assets/a-1.js"> "./assets/missing.js"')
    (folder / "assets" / "a-1.js").write_text("1")
    (tmp_path / "secret").touch()
    assets = Assets(folder)
    assert assets.links == {"Link": "</assets-of-marimo/assets/a-1.js>; rel=prefetch"}

    def answer(name: str) -> tuple[int, str, str]:
        scope = {"type": "http", "path_params": {"name": name}}
        got = asyncio.run(assets.response(Request(scope)))
        return got.status_code, got.headers["content-type"], got.headers.get("cache-control", "")

    status, kind, kept = answer("assets/a-1.js")
    assert (status, kind) == (200, "text/javascript; charset=utf-8")
    assert "immutable" in kept
    assert "immutable" not in answer("index.html")[2], "its name has no hash"
    for name in ("../secret", "assets/../../secret", str(tmp_path / "secret"), "assets", ""):
        assert answer(name)[0] == 404


@pytest.fixture(scope="module")
def browser(server: Process) -> Iterator[Browser]:
    session = Browser()
    session.open(f"{server.address}/?token={server.token}")
    yield session
    session.driver.quit()


def words(browser: Browser) -> str:
    """The text of the page without its shadow trees, which take seconds to read."""
    return str(browser.run("return document.body?.innerText ?? ''"))


def all_words(browser: Browser) -> str:
    return browser.find("body").text


def settled(browser: Browser) -> str:
    """The text of the page once it has five claims, computes nothing and stays for two seconds."""
    last, since = "", time.monotonic()
    busy = "return document.querySelector('.marimo-output-stale, .marimo-output-loading') !== null"

    def same() -> bool:
        nonlocal last, since
        text = words(browser)
        if text != last or browser.run(busy):
            last, since = text, time.monotonic()
        return time.monotonic() - since >= 2 and text.count("✓") >= 5

    browser.until(same, seconds=120)
    return last


def background(browser: Browser) -> list[int]:
    """Red, green and blue of the page, 0 to 255."""
    script = """
        const pen = document.createElement("canvas").getContext("2d");
        pen.fillStyle = getComputedStyle(document.body).backgroundColor;
        pen.fillRect(0, 0, 1, 1);
        return [...pen.getImageData(0, 0, 1, 1).data].slice(0, 3);
    """
    return list(browser.run(script))


@needs_browser
def test_the_list_is_a_page(browser: Browser, server: Process) -> None:
    browser.open(server.address)
    assert browser.texts("h3 a") == [
        "The whole model on one screen",
        *(f"{each.number}. {each.title}" for each in COURSE),
    ]
    assert not browser.console()


HIDDEN = "return document.documentElement.scrollHeight - window.innerHeight"


def check_scenes(browser: Browser) -> str:
    """The text of the page after its scenes were moved.

    The state of each arrives in Python, and the claims follow; the frame is not scrolled.
    """
    before = settled(browser)
    for frame in browser.find_all("iframe"):
        with browser.frame(frame):
            title = browser.until(lambda: browser.run("return document.title"))
            if title == "questions":
                continue
            handle = browser.find(".words button, .grip")
            handle.send_keys(Keys.ARROW_DOWN, Keys.ARROW_DOWN, Keys.ARROW_LEFT)
            browser.until(lambda: browser.run(HIDDEN) <= 0)  # the frame is as high as the scene
        if title != "relay":  # it shows all that there is in its own page
            browser.until(lambda: words(browser) != before, seconds=60)  # noqa: B023
        before = settled(browser)
        assert "AssertionError" not in before
    return before


@needs_browser
def test_the_page_of_the_model_is_the_first_link(browser: Browser, server: Process) -> None:
    browser.open(server.address)
    browser.find("h3 a").click()
    browser.until(lambda: browser.driver.current_url == f"{server.address}/model", seconds=60)
    browser.until(lambda: browser.find("#check").get_attribute("data-worst"), seconds=60)
    assert browser.find("#check").get_attribute("class") == "good"
    assert not browser.console()
    assert not [url for url in browser.requests() if not url.startswith(server.address)]
    browser.find("header a").click()
    browser.until(lambda: browser.driver.current_url == f"{server.address}/", seconds=60)


@needs_browser
@pytest.mark.parametrize("lesson", COURSE, ids=lambda lesson: lesson.name)
def test_a_control_changes_a_number(browser: Browser, server: Process, lesson: Lesson) -> None:
    browser.open(f"{server.address}/lessons/{lesson.name}/", width=PHONE, scheme="dark")
    before = check_scenes(browser)
    assert "AssertionError" not in before
    browser.until(lambda: browser.find_deep("[role=slider], select"), seconds=60)
    sliders = browser.find_deep("[role=slider]")
    control = (sliders or browser.find_deep("select"))[0]
    browser.run("arguments[0].scrollIntoView({block: 'center'})", control)
    control.send_keys(Keys.ARROW_RIGHT)
    browser.until(lambda: words(browser) != before, seconds=60)
    wide = "return document.documentElement.scrollWidth - window.innerWidth"
    assert browser.run(wide) <= 0, "the page is wider than a phone"
    browser.until(lambda: max(background(browser)) < 80)  # as dark as was asked
    assert not [line for line in browser.console() if "error" in line.lower()]
    assert not [url for url in browser.requests() if not url.startswith((server.address, "data:"))]


def submit(browser: Browser, code: str) -> None:
    """Replace the answer to the exercise and press its button."""
    check = browser.until(lambda: browser.find_deep("button", "Check"), seconds=60)[0]
    browser.run("arguments[0].scrollIntoView({block: 'center'})", check)
    editor = browser.until(lambda: browser.find_deep(".cm-content"))[0]
    editor.send_keys(Keys.CONTROL, Keys.END)
    editor.send_keys(*[Keys.BACKSPACE] * 500)
    editor.send_keys(code)
    editor.send_keys(Keys.ESCAPE)  # the menu of completions
    browser.expect(lambda: editor.text.strip(), code)
    check.click()


@needs_browser
def test_an_answer_is_marked_and_remembered(browser: Browser, server: Process) -> None:
    browser.open(f"{server.address}/lessons/softmax/")
    settled(browser)
    submit(browser, "weights = lambda z, T: z")
    browser.until(lambda: "Not yet." in all_words(browser), seconds=60)
    submit(browser, "weights = lambda z, T: torch.softmax(z / T, -1)")
    browser.until(lambda: "Solved." in all_words(browser), seconds=60)
    browser.open(server.address)
    browser.until(lambda: f"1 of {len(COURSE)} exercises solved." in words(browser))


def frame_with(browser: Browser, selector: str) -> Locator:
    """The frame that has an element."""

    def found() -> Locator | None:
        for frame in browser.find_all("iframe"):
            with browser.frame(frame):
                if browser.find_all(selector):
                    return frame
        return None

    frame = browser.until(found)
    assert frame
    return frame


@needs_browser
def test_questions_are_answered_and_kept_without_code(browser: Browser, server: Process) -> None:
    address = f"{server.address}/lessons/similarity/"
    browser.open(address)
    settled(browser)
    chosen = browser.find_deep("[role=radio]")[1]
    browser.run("arguments[0].scrollIntoView({block: 'center'})", chosen)
    chosen.click()
    with browser.frame(frame_with(browser, ".ladder")):
        browser.find("[data-step=pencil] input").send_keys("24/25", Keys.ENTER)
        browser.expect(lambda: browser.text("[data-step=pencil] .said"), "Right.")
    with browser.frame(frame_with(browser, ".recap")):
        browser.run("document.querySelector('.recap > .card .turn').click()")
        browser.run("document.querySelector('.recap > .card [data-known=no]').click()")
        browser.until(lambda: browser.text(".recap > .card .said"))

    def shown() -> str:
        browser.open(f"{server.address}/progress")
        return browser.text(".count") + browser.text(".weak")

    browser.until(lambda: "1 prediction, 1 question by pencil, 0 by choice" in shown())
    assert "How large is the cosine of two random directions" in shown()
    # A weak card can be turned on that page too.
    browser.run("document.querySelector('.weak .card:not([hidden]) .turn').click()")
    browser.run("document.querySelector('.weak .card:not([hidden]) [data-known=yes]').click()")
    assert browser.console() == []
    browser.until(lambda: browser.open(f"{server.address}/progress") or not browser.text(".weak"))
    browser.open(address)
    settled(browser)
    chosen = browser.find_deep("[role=radio]")[1]
    browser.expect(lambda: chosen.get_attribute("aria-checked"), "true")
    with browser.frame(frame_with(browser, ".ladder")):
        field = browser.find("[data-step=pencil] input")
        browser.expect(lambda: field.get_attribute("value"), "24/25")


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("similarity", b'{"opened": true}', 204),
        ("similarity", b"{", 400),
        ("similarity", b"[1]", 400),
        ("similarity", b"[" * 50_000, 400),
        ("similarity", b'{"solved": "yes"}', 400),
        ("similarity", b'{"pencil": "' + b"1" * 200_000 + b'"}', 413),
        ("nothing", b"{}", 400),
    ],
)
def test_a_change_of_a_record_is_checked(
    server: Process, reader: urllib.request.OpenerDirector, path: str, body: bytes, status: int
) -> None:
    address = f"{server.address}/progress/{path}"
    got = 0
    try:
        got = reader.open(urllib.request.Request(address, body, method="POST")).status
    except urllib.error.HTTPError as error:
        got = error.code
    assert got == status
