"""fenchel/server/app.py: tests/fuzz/hostile_requests.py in its small form."""

import random
import socket
from urllib.parse import urlsplit

import pytest

import fenchel.server.app as app_module
from fenchel.server.app import listen
from tests.fuzz.hostile_requests import SOUND, mutated, post, send, violations
from tests.server.conftest import RunningServer


@pytest.fixture
def address(running: RunningServer) -> tuple[str, int]:
    parts = urlsplit(running.address)
    assert parts.hostname is not None
    assert parts.port is not None
    return parts.hostname, parts.port


@pytest.mark.parametrize(("path", "body"), SOUND)
def test_the_bodies_that_are_changed_are_sound(
    address: tuple[str, int], path: str, body: dict[str, object]
) -> None:
    answer = post(address, path, body)
    assert answer.status == 200, answer.body


def test_a_hundred_hostile_requests_are_refused_in_a_sentence(
    address: tuple[str, int], running: RunningServer, capfd: pytest.CaptureFixture[str]
) -> None:
    refused = 0
    for number in range(100):
        sent = mutated(random.Random(f"7 {number}"))
        answer = send(address, sent)
        # How long an answer takes is the fuzzer's to say.
        wrong = list(violations(answer._replace(seconds=0.0), sent.method))
        assert not wrong, (number, sent.changes, answer.status, answer.body[:300])
        refused += answer.status != 200
    assert 50 < refused < 100
    assert running.engine.alive
    assert running.engine.active == running.engine.queued == 0
    assert "Traceback" not in capfd.readouterr().err
    assert post(address, *SOUND[0]).status == 200


@pytest.mark.parametrize("letter", ["a", " ", "\n", "東", "<begin>"])
@pytest.mark.parametrize("chat", [False, True])
def test_a_text_that_cannot_fit_is_refused_before_it_is_encoded(
    address: tuple[str, int], letter: str, chat: bool
) -> None:
    text = letter * (200_000 // len(letter.encode()))
    body = {"messages": [{"role": "user", "content": text}]} if chat else {"prompt": text}
    route = "/v1/chat/completions" if chat else "/v1/completions"
    answer = post(address, route, body)
    assert answer.status == 400
    assert b" characters; " in answer.body
    assert not list(violations(answer._replace(seconds=0.0)))


def is_ended(connection: socket.socket) -> bool:
    """Waits for what the server does next; True if that is the end of the connection."""
    try:
        return connection.recv(100) == b""
    except ConnectionResetError:
        return True


def test_a_head_that_does_not_arrive_ends_its_connection(
    address: tuple[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(app_module, "HEAD_SECONDS", 0.3)
    for part in (b"", b"GET /health HTTP/1.1\r\nHost:"):
        with socket.create_connection(address, timeout=10) as slow:
            slow.sendall(part)
            assert is_ended(slow)
    whole = f"GET /health HTTP/1.1\r\nHost: {address[0]}\r\n\r\n".encode()
    with socket.create_connection(address, timeout=10) as again:
        again.sendall(whole)
        answer = again.recv(1000)
        while b"}" not in answer:
            answer += again.recv(1000)
        assert answer.startswith(b"HTTP/1.1 200")
        again.sendall(whole[:20])  # half of a second request on the same connection
        assert is_ended(again)


@pytest.mark.skipif(not hasattr(socket, "TCP_USER_TIMEOUT"), reason="an option of Linux")
def test_a_connection_that_is_not_read_ends_at_its_limit() -> None:
    """The socket of a connection has the options of the one that listens."""
    with listen("127.0.0.1", 0) as listener, socket.create_connection(listener.getsockname()):
        connection, _ = listener.accept()
        with connection:
            limit = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT)
    assert limit == 1000 * app_module.STALLED_SECONDS
