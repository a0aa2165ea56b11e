"""The pages of ``fenchel learn``: a list of the lessons, and each lesson as a marimo app.

    /                   the list, with what the reader has solved; ready before marimo is imported
    /model              the whole model on one screen (model_page.py)
    /progress           what the reader has mastered; /progress/NAME takes changes of a record
    /lessons/NAME/      a lesson; until marimo is imported a page with its question, then the lesson
    /assets-of-marimo/  the files of marimo's frontend, one address for all lessons

Imports and 250 files stand before a first lesson. Both pages above therefore name the files in a
``Link`` header, so that the browser loads them while the reader reads; they are sent from memory,
because each file that is opened gives the interpreter to the thread that imports; and a notebook is
parsed, which takes 0.2 s, when it is asked for.

The exercises run code that the reader types, so nobody else may use the server: it listens on
127.0.0.1, and a request must carry the token of the printed address (in the address at first, then
in a cookie) and come from no page of another site (server/guard.py). marimo checks neither.

Lessons compute in threads of this process, one per open page, and torch counts the levels of
forward-mode derivatives per process: of two that are taken at once, the one that ends first deletes
the level of the other. So the cells of all pages run one at a time (``_serialise_cells``). Python
counts the depth of a syntax tree per process too (3.11: "AST constructor recursion depth mismatch"
of two that are built at once), so ``ast.parse``, which marimo calls per page and torch for its
rules of derivatives, runs one at a time (``_serialise_parsing``).

Three parts of marimo that are not documented are used, in ``_build``, ``_end_sessions`` and
``_serialise_cells``: the setting of the colour scheme, the sessions that would keep the process
alive, and the function that runs a cell.
"""

import ast
import asyncio
import json
import logging
import mimetypes
import os
import re
import secrets
import socket
import sys
import threading
from collections.abc import AsyncIterator, Iterator, Mapping
from concurrent.futures import Future
from contextlib import asynccontextmanager, contextmanager, suppress
from functools import cache
from http.cookies import SimpleCookie
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

import uvicorn
from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import (
    HTMLResponse,
    PlainTextResponse,
    RedirectResponse,
    Response,
    StreamingResponse,
)
from starlette.routing import Mount, Route
from starlette.types import ASGIApp, Receive, Scope, Send

from fenchel.lessons.course import COURSE, PARTS, Lesson, Record, keep, lesson, records
from fenchel.report.html import Html, Section, document, element, join, page_header, pluralise
from fenchel.server.guard import Guard

HOST = "127.0.0.1"
_GRACE = 1
"""Seconds that open pages get to close."""
_TURN = 30.0
"""Seconds that a cell waits for those of other pages."""
_END = 2.0
"""Seconds after which the process ends, whatever a lesson still computes."""

_SWITCH = 0.0005
"""Seconds after which a thread that imports or computes lets the server answer; Python has 0.005,
and 250 files would each wait that long, more than once."""
_LONGEST = 100_000
"""Bytes of a change of a record."""
_ASSETS = "/assets-of-marimo"
_LESSON = re.compile(rf"/lessons/({'|'.join(each.name for each in COURSE)})(/.*)?")


class LessonServer:
    """Serves the course until Ctrl-C."""

    def __init__(self, port: int | None = None) -> None:
        """Take a port; without one, 8765 or, where that is in use, any that is free."""
        self.socket = _bind(port)
        self.port = int(self.socket.getsockname()[1])
        self.token = secrets.token_urlsafe(16)
        self._marimo: Future[None] = Future()
        self._lessons: dict[str, asyncio.Future[Any]] = {}
        self._assets = Assets(_asset_folder())
        app = Starlette(
            routes=[
                Route("/", self._index),
                Route("/model", self._model),
                Route("/progress", self._progress),
                Route("/progress/{name}", self._keep, methods=["POST"]),
                Route(_ASSETS + "/{name:path}", self._assets.response),
                Mount("/lessons", app=self._lesson),
            ],
            lifespan=self._lifespan,
        )
        config = uvicorn.Config(
            LessonGuard(app, self.port, self.token),
            log_level="warning",
            timeout_graceful_shutdown=_GRACE,
        )
        self._server = uvicorn.Server(config)

    def address(self, name: str | None = None) -> str:
        """The address of the list, or of a lesson, with the token."""
        path = "/" if name is None else f"/lessons/{lesson(name).name}/"
        return f"http://{HOST}:{self.port}{path}?token={self.token}"

    def run(self) -> None:
        """Serve until a signal ends it; the signal is then raised again."""
        # A second Ctrl-C cuts the end short, of which uvicorn would print a traceback.
        logging.getLogger("uvicorn.error").addFilter(lambda _: not self._server.force_exit)
        self._server.run(sockets=[self.socket])

    async def _index(self, _: Request) -> HTMLResponse:
        return HTMLResponse(index_page(records()), headers=self._assets.links)

    async def _model(self, _: Request) -> HTMLResponse:
        def written() -> str:  # torch takes seconds to import
            pages = import_module("fenchel.lessons.model_page")
            return str(pages.model_page(pages.page_links(All_lessons="/")))

        return HTMLResponse(await asyncio.to_thread(written))

    async def _progress(self, _: Request) -> HTMLResponse:
        def written() -> str:
            page = import_module("fenchel.lessons.web_edition").progress_page
            return str(page(lambda each: f"/lessons/{each.name}/", "/", records()))

        return HTMLResponse(await asyncio.to_thread(written))

    async def _keep(self, request: Request) -> Response:
        body = bytearray()
        async for part in request.stream():
            body += part
            if len(body) > _LONGEST:
                return PlainTextResponse("A record is not that long.", status_code=413)
        try:
            fields = json.loads(body)
            if not isinstance(fields, dict):
                raise ValueError("a record is an object of fields.")
            await asyncio.to_thread(keep, request.path_params["name"], fields)
        except (ValueError, RecursionError) as error:
            return PlainTextResponse(str(error), status_code=400)
        except OSError as error:
            return PlainTextResponse(f"It cannot be kept: {error.strerror}.", status_code=507)
        return Response(status_code=204)

    async def _lesson(self, scope: Scope, receive: Receive, send: Send) -> None:
        app: ASGIApp
        found = _LESSON.fullmatch(scope["path"])
        if found is None:
            app = PlainTextResponse("There is no such lesson.", status_code=404)
        elif scope["type"] == "http" and found[2] == "/" and not self._marimo.done():
            page = self._waiting(lesson(found[1]))
            app = StreamingResponse(page, media_type="text/html", headers=self._assets.links)
        else:
            app = await self._built(lesson(found[1]))
        await app(scope, receive, send)

    async def _built(self, each: Lesson) -> ASGIApp:
        await asyncio.wrap_future(self._marimo)
        if each.name not in self._lessons:
            self._lessons[each.name] = asyncio.ensure_future(asyncio.to_thread(_build, each))
        app: ASGIApp = await asyncio.shield(self._lessons[each.name])
        return app

    async def _waiting(self, each: Lesson) -> AsyncIterator[str]:
        """A page that ends when the lesson is ready, and then opens it."""
        yield waiting_page(each)
        with suppress(Exception):  # it is raised again when the lesson is asked for
            await self._built(each)
        yield '<meta http-equiv="refresh" content="0">'

    @asynccontextmanager
    async def _lifespan(self, _: Starlette) -> AsyncIterator[None]:
        sys.setswitchinterval(_SWITCH)
        threading.Thread(target=self._import, daemon=True).start()
        yield
        # A lesson may be in the middle of a computation, and its thread is waited for.
        last = threading.Timer(_END, os._exit, (0,))
        last.daemon = True
        last.start()
        for each in self._lessons.values():
            if each.done() and each.exception() is None:
                await _end_sessions(each.result())

    def _import(self) -> None:
        try:
            _builder()
        except Exception as error:  # else a request for a lesson would wait for ever
            self._marimo.set_exception(error)
            return
        self._marimo.set_result(None)
        import_module("fenchel.lessons.widgets")
        if not self._lessons:  # an open lesson shows its first lines without it
            import_module("torch._dynamo")  # what torch imports at the first derivative: a second


class Assets:
    """The files of marimo's frontend, read once."""

    def __init__(self, folder: Path) -> None:
        self.paths = {
            path.relative_to(folder).as_posix(): path
            for path in folder.rglob("*")
            if path.is_file()
        }
        page = self.paths["index.html"].read_text(encoding="utf-8")
        first = [name for name in re.findall(r'"\./(assets/[^"]+)"', page) if name in self.paths]
        self.links = {"Link": ", ".join(f"<{_ASSETS}/{name}>; rel=prefetch" for name in first)}
        self._read = cache(Path.read_bytes)

    async def response(self, request: Request) -> Response:
        """A file. Those with a hash in their names a browser need not ask for again."""
        name = request.path_params["name"]
        if name not in self.paths:
            return PlainTextResponse("There is no such file.", status_code=404)
        seconds = 365 * 86400 if name.startswith("assets/") else 3600
        kept = f"private, max-age={seconds}" + ", immutable" * name.startswith("assets/")
        kind = mimetypes.guess_type(name)[0] or "application/octet-stream"
        content = self._read(self.paths[name])
        return Response(content, media_type=kind, headers={"Cache-Control": kept})


class LessonGuard(Guard):
    """Refuses what does not come from a page of this server with its token."""

    def __init__(self, app: ASGIApp, port: int, token: str) -> None:
        super().__init__(app, ("localhost",))
        self.token, self.cookie = token, f"fenchel_learn_{port}"

    def response(self, scope: Scope, headers: Headers, foreign: str | None) -> Response | None:
        """The cookie in exchange for the token, a refusal, or None."""
        if foreign is not None:
            return PlainTextResponse("This address is not the server's own.", status_code=403)
        query = parse_qs(scope["query_string"].decode("latin-1"))
        if self._is_token(query.get("token", [""])[0]):
            if scope["type"] != "http":
                return None
            admitted = RedirectResponse(scope["path"], status_code=303)  # without the token
            admitted.set_cookie(self.cookie, self.token, httponly=True, samesite="strict")
            return admitted
        cookie = SimpleCookie(headers.get("cookie", "")).get(self.cookie)
        if (cookie is not None and self._is_token(cookie.value)) or _is_manifest(scope):
            return None
        sentence = "Open the address that `fenchel learn` printed: it holds a token."
        return PlainTextResponse(sentence, status_code=403)

    def _is_token(self, token: str) -> bool:
        return secrets.compare_digest(token.encode(), self.token.encode())


def index_page(done: Mapping[str, Record]) -> str:
    """The list of lessons as one page, with what the reader has done."""
    minutes = sum(each.minutes for each in COURSE)
    lead = (
        f"{len(COURSE)} lessons, about {minutes // 60} hours in all. Each begins with a question: "
        "predict, move a control, read why, solve an exercise, and see the same on a trained "
        "model. Every statement is computed while you read."
    )
    steps = [done.get(each.name, Record()).steps for each in COURSE]
    open_ = [
        each
        for each, step in zip(COURSE, steps, strict=True)
        if not (step["code"] or (step["pencil"] and step["choice"]) or each.research)
    ]
    begun = any(any(step.values()) for step in steps)
    following = [
        element(
            "a",
            f"{'Continue' if begun else 'Begin'}: {each.title}",
            href=f"/lessons/{each.name}/",
        )
        for each in open_[:1]
    ]
    count = {kind: sum(step[kind] for step in steps) for kind in Record().steps}
    sentence = (
        f"{count['code']} of {len(COURSE)} exercises solved. Without code: "
        f"{pluralise(count['prediction'], 'prediction')}, "
        f"{pluralise(count['pencil'], 'question')} by pencil, {count['choice']} by choice. "
    )
    mastered = element("a", "What you have mastered", href="/progress")
    note = element("p", sentence, join([*following, mastered], " · "), class_="note")
    header = page_header("· lessons", "Attention, from slopes to scores", lead, below=note)
    sections = [
        model_section("/model"),
        *(
            Section(
                anchor=f"part-{number}",
                title=title,
                body=join([_entry(each, done.get(each.name, Record())) for each in lessons]),
            )
            for number, (title, lessons) in enumerate(PARTS.items(), start=1)
        ),
    ]
    footer = "Served by fenchel on this computer: nothing is loaded from elsewhere or sent."
    return document(title="fenchel lessons", header=header, sections=sections, footer=footer)


def model_section(address: str) -> Section:
    """What the list shows first: the page of the model."""
    body = element(
        "article",
        element("h3", element("a", "The whole model on one screen", href=address)),
        element(
            "p",
            "Type a sentence and watch it become tokens, vectors, scores, weights, a mix and the "
            "next word. Open any number down to its arithmetic; cut a line and see what changes.",
        ),
        element("p", "A trained model of two million numbers, live. 10 minutes.", class_="over"),
    )
    return Section(anchor="model", title="Look first", body=body)


def waiting_page(each: Lesson) -> str:
    """What a lesson shows before marimo is imported, without its end."""
    header = join(
        [
            element("p", f"Lesson {each.number}", class_="over"),
            element("h1", each.title),
            element("p", each.question, class_="lead"),
            element("p", "The lesson opens in a few seconds.", class_="note"),
        ]
    )
    return document(title=each.title, header=header, sections=[]).partition("<nav")[0]


def lesson_facts(each: Lesson) -> str:
    """Minutes, and what to read before."""
    needs = ", ".join(str(lesson(name).number) for name in each.needs)
    facts = f"{each.minutes} minutes" + (
        f" · after {pluralise(len(each.needs), 'lesson').split()[1]} {needs}" if needs else ""
    )
    return facts + (" · research, not needed for the other lessons" if each.research else "")


def _entry(each: Lesson, done: Record) -> Html:
    mark = element("span", "solved", class_="status finished") if done.solved else None
    link = element("a", f"{each.number}. {each.title}", href=f"/lessons/{each.name}/")
    without = [name for name, step in done.steps.items() if step and name != "code"]
    facts = lesson_facts(each) + (f" · done: {', '.join(without)}" if without else "")
    return element(
        "article",
        element("h3", link, " ", mark),
        element("p", each.question),
        element("p", facts, class_="over"),
    )


def _bind(port: int | None) -> socket.socket:
    if port is not None and not 0 <= port <= 65535:
        raise ValueError(f"a port is a number from 0 to 65535, not {port}")
    for number in (8765, 0) if port is None else (port,):
        listener = socket.socket()
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((HOST, number))
            listener.listen()  # until then Linux lets another process bind it too
        except OSError as error:
            listener.close()
            if port is not None:
                raise ValueError(f"port {port} cannot be used: {error.strerror}") from error
        else:
            return listener
    raise ValueError("no port is free")


def _asset_folder() -> Path:
    """Where marimo has its pages, found without importing it."""
    found = find_spec("marimo")
    assert found is not None
    assert found.origin is not None
    return Path(found.origin).parent / "_static"


def _builder() -> Any:
    import marimo

    _serialise_cells()
    _serialise_parsing()
    return marimo.create_asgi_app(quiet=True, include_code=True, session_ttl=30, asset_url=_ASSETS)


@cache
def _serialise_cells() -> None:
    """Have marimo run the cells of all pages one at a time."""
    from marimo._runtime.executor import evaluator
    from marimo._runtime.executor.executor import DefaultExecutor

    turn = threading.Lock()

    @contextmanager
    def wait() -> Iterator[None]:
        # An exercise may loop for ever: the other pages go on then.
        mine = turn.acquire(timeout=_TURN)
        try:
            yield
        finally:
            if mine:
                turn.release()

    class OneAtATime(DefaultExecutor):
        def execute_cell(self, cell: Any, glbls: Any) -> Any:
            with wait():
                return super().execute_cell(cell, glbls)

        async def execute_cell_async(self, cell: Any, glbls: Any) -> Any:
            with wait():
                return await super().execute_cell_async(cell, glbls)

    evaluator._EXECUTOR_REGISTRY.register("fenchel", OneAtATime)


@cache
def _serialise_parsing() -> None:
    """Have the threads of this process build one syntax tree at a time."""
    turn, parse = threading.RLock(), ast.parse

    def one_at_a_time(*args: Any, **kwargs: Any) -> Any:
        with turn:
            return parse(*args, **kwargs)

    ast.parse = one_at_a_time


def _build(each: Lesson) -> Any:
    app = _builder().with_app(path=f"/{each.name}", root=str(each.path)).build()
    for state in _states(app):
        chosen = state.config_manager.with_overrides({"display": {"theme": "system"}})
        state.config_manager = state.session_manager._config_manager = chosen
    return app


async def _end_sessions(app: Any) -> None:
    for state in _states(app):
        await state.session_manager.shutdown()


def _states(app: Any) -> list[Any]:
    apps = (getattr(route, "app", None) for route in app.routes)
    states = (getattr(each, "state", None) for each in apps)
    return [state for state in states if hasattr(state, "session_manager")]


def _is_manifest(scope: Scope) -> bool:
    """Whether it asks for a file of marimo's that browsers ask for without cookies."""
    return scope["type"] == "http" and str(scope["path"]).endswith("/manifest.json")
