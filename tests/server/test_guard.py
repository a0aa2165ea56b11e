"""fenchel/server/guard.py in front of the server and of the lessons: one set of rules for both."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from starlette.requests import ClientDisconnect

from fenchel.lessons.server import LessonGuard
from fenchel.server.app import ServerGuard, ServerSettings
from fenchel.server.guard import Guard

PORT, TOKEN, FRIEND = 8765, "a-token", "http://localhost:3000"
COOKIE = f"fenchel_learn_{PORT}={TOKEN}"
OWN = f"127.0.0.1:{PORT}"
Make = Callable[[Any], Guard]


def lessons(app: Any) -> Guard:
    return LessonGuard(app, PORT, TOKEN)


def served(app: Any) -> Guard:
    return ServerGuard(app, ServerSettings(host="box.lan", origins=(FRIEND,)))


def with_key(app: Any) -> Guard:
    return ServerGuard(app, ServerSettings(host="box.lan", key=TOKEN, origins=(FRIEND,)))


BOTH = pytest.mark.parametrize("make", [lessons, served])


def ask(
    make: Make,
    *more: tuple[str, str],
    path: str = "/lessons/softmax/",
    query: str = "",
    kind: str = "http",
    credentials: bool = True,
    version: str = "1.1",
) -> tuple[int | str, dict[str, str]]:
    """What a guard answers: (status, "passed" or the code of a closed socket; headers)."""
    sent: list[dict[str, Any]] = []

    async def inner(*_: Any) -> None:
        sent.append({"type": "passed"})

    async def receive() -> dict[str, Any]:
        return {"type": "http.request"}

    async def send(message: Any) -> None:
        sent.append(message)

    own = [("cookie", COOKIE), ("authorization", f"Bearer {TOKEN}")] if credentials else []
    scope = {
        "type": kind,
        "method": "GET",
        "http_version": version,
        "path": path,
        "query_string": query.encode(),
        "headers": [(key.encode(), value.encode()) for key, value in (*own, *more)],
    }
    asyncio.run(make(inner)(scope, receive, send))
    first = sent[0]
    if first["type"] == "passed":
        return "passed", {}
    given = {key.decode(): value.decode() for key, value in first.get("headers", [])}
    return first.get("status", first.get("code")), given


@BOTH
@pytest.mark.parametrize("kind", ["http", "websocket"])
@pytest.mark.parametrize(
    "headers",
    [
        [("host", OWN)],
        [("host", f"localhost:{PORT}")],
        [("host", "LOCALHOST")],
        [("host", "localhost:9000")],  # a forwarded port
        [("host", f"[::1]:{PORT}")],
        [("host", "[::1]")],
        [("host", "192.0.2.1:80")],  # a number cannot be rebound
        [("host", OWN), ("origin", f"http://{OWN}")],
        [("host", OWN), ("origin", f"https://{OWN}")],  # behind a proxy that speaks TLS
        [("host", f"[::1]:{PORT}"), ("origin", f"http://[::1]:{PORT}")],
    ],
)
def test_addresses_and_pages_of_the_server_pass(
    make: Make, kind: str, headers: list[tuple[str, str]]
) -> None:
    assert ask(make, *headers, kind=kind)[0] == "passed"


@BOTH
@pytest.mark.parametrize(
    "headers",
    [
        [],
        [("host", "")],
        [("host", OWN), ("host", "evil.example")],
        [("host", f"rebound.example:{PORT}")],
        [("host", f"127.0.0.1.evil.example:{PORT}")],
        [("host", "localhost:80@evil.example")],
        [("host", "localhost.")],
        [("host", "[localhost]")],
        [("host", "::1")],
        [("host", "2130706433")],
        [("host", OWN), ("origin", "https://page.example")],
        [("host", OWN), ("origin", "null")],
        [("host", OWN), ("origin", "")],
        [("host", OWN), ("origin", OWN)],
        [("host", OWN), ("origin", f"ftp://{OWN}")],
        [("host", OWN), ("origin", f"http://127.0.0.1:{PORT + 1}")],
        [("host", OWN), ("origin", f"http://localhost:{PORT}")],
        [("host", OWN), ("origin", f"http://{OWN}"), ("origin", "null")],
        [("host", OWN), ("origin", f"http://{OWN}"), ("origin", f"http://{OWN}")],
        [("host", OWN), ("origin", f"http://{OWN}"), ("origin", f"https://{OWN}")],
        [("host", OWN), ("origin", f"http://{OWN}, http://{OWN}")],
    ],
)
def test_other_hosts_and_origins_are_refused(make: Make, headers: list[tuple[str, str]]) -> None:
    assert ask(make, *headers)[0] == 403
    assert ask(make, *headers, kind="websocket")[0] == 1008


def test_a_probe_of_http_1_0_needs_no_host() -> None:
    assert ask(served, path="/health", version="1.0")[0] == "passed"
    assert ask(served, path="/v1/models", version="1.0")[0] == 403
    assert ask(served, path="/health")[0] == 403
    assert ask(served, ("host", "evil.example"), path="/health", version="1.0")[0] == 403
    assert ask(served, ("origin", "null"), path="/health", version="1.0")[0] == 403


def test_a_configured_origin_is_allowed() -> None:
    assert ask(served, ("host", OWN), ("origin", FRIEND))[0] == "passed"
    assert ask(lessons, ("host", OWN), ("origin", FRIEND))[0] == 403


def test_the_server_has_its_own_names() -> None:
    assert ask(served, ("host", "Box.lan:80"))[0] == "passed"
    assert ask(lessons, ("host", "box.lan:80"))[0] == 403


@pytest.mark.parametrize("hosts", [[], [("host", "api.example")]])
def test_with_a_key_any_host_passes_and_no_other_origin(hosts: list[tuple[str, str]]) -> None:
    assert ask(with_key, *hosts)[0] == "passed"
    for origin in ("null", "https://page.example", "http://", "ftp://api.example", FRIEND + "/"):
        assert ask(with_key, *hosts, ("origin", origin))[0] == 403
    assert ask(with_key, *hosts, credentials=False)[0] == 401
    assert ask(with_key, *hosts, kind="websocket", credentials=False)[0] == 1008
    assert ask(with_key, *hosts, path="/health", credentials=False)[0] == "passed"


@BOTH
def test_a_page_that_is_closed_is_no_error(make: Make) -> None:
    async def closed(*_: Any) -> None:
        raise ClientDisconnect

    headers = [(b"host", OWN.encode()), (b"cookie", COOKIE.encode())]
    scope = {"type": "http", "path": "/", "query_string": b"", "headers": headers}
    asyncio.run(make(closed)(scope, None, None))  # type: ignore[arg-type]


def test_the_address_with_the_token_is_exchanged_for_a_cookie() -> None:
    given = {"query": f"token={TOKEN}", "credentials": False}
    status, headers = ask(lessons, ("host", OWN), **given)  # type: ignore[arg-type]
    assert status == 303
    assert headers["location"] == "/lessons/softmax/"
    assert headers["set-cookie"].startswith(COOKIE)
    assert "HttpOnly" in headers["set-cookie"]
    assert "samesite=strict" in headers["set-cookie"].lower()


@pytest.mark.parametrize(
    "given",
    [
        [],
        [("cookie", f"fenchel_learn_{PORT}=another")],
        [("cookie", f"fenchel_learn_{PORT + 1}={TOKEN}")],
    ],
)
@pytest.mark.parametrize("query", ["", "token=", "token=another"])
def test_without_the_token_of_the_lessons_nothing_passes(
    given: list[tuple[str, str]], query: str
) -> None:
    headers = [("host", OWN), *given]
    assert ask(lessons, *headers, query=query, credentials=False)[0] == 403
    assert ask(lessons, *headers, query=query, credentials=False, kind="websocket")[0] == 1008
