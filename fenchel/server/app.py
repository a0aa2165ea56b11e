"""HTTP around the engine: routes, limits and access.

    client -> guard -> route -> body -> call -> engine (a thread) -> updates -> response or stream

One event loop does HTTP; the engine's thread owns the model. Bodies are checked and encoded in a
pool of threads, since a text may be long; conversations in another one, since a chat template runs
in its own process and may take its full time. Updates
cross from the engine to the loop once per step for all requests (``Relay``).

**Access.** The server listens on a loopback address unless another one is configured.
``ServerGuard`` refuses what pages of other sites have sent (server/guard.py) and, where there is a
key, requests without it.

**Limits.** The head of a request has ``HEAD_SECONDS`` to arrive, or the connection ends. A body has
``LARGEST_BODY`` bytes at most, counted while they arrive, and ``BODY_SECONDS`` to do so. A request
beyond the queue gets 429 with Retry-After, one that waits too long 503, one past the deadline the
text so far. A client that leaves ends its requests, also where it does not stream. A stream that
its client does not read waits in memory, bounded by its tokens, and ends after ``STALLED_SECONDS``;
no other request waits for it.

**Logs.** One JSON line per request on standard error; texts only with ``log_text``.
"""

import asyncio
import hmac
import json
import logging
import secrets
import socket
import sys
import time
from collections import deque
from collections.abc import (
    AsyncIterator,
    Callable,
    Collection,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from ipaddress import ip_address
from typing import Any, Protocol, TypeVar

import h11
import uvicorn
from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request as HttpRequest
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from fenchel.files import printable
from fenchel.generation import Request, Sampling, Update
from fenchel.generation.scheduler import Job, TurnFacts
from fenchel.model import Transformer
from fenchel.server.embeddings import embed
from fenchel.server.engine import Engine, QueueFull, RequestFacts
from fenchel.server.guard import Guard
from fenchel.server.metrics import CONTENT_TYPE, Metrics
from fenchel.server.openai_api import (
    ApiError,
    Call,
    Reply,
    ServedModel,
    chat_call,
    completion_call,
    detokenize,
    embedding_call,
    lens_call,
    model_card,
    parse_body,
    require_model,
    tokenize,
    tokenizer_info,
)
from fenchel.server.page import content_security_policy, page

T = TypeVar("T")
LARGEST_BODY, DISCARDED = 2**20, 2**23
BODY_SECONDS = 10.0
HEAD_SECONDS = 10.0
STALLED_SECONDS = 30.0
CHECK_SECONDS = 0.25
"""Time between two looks at a connection whose client sends no more."""
MOST_BODIES = 256
"""Bodies that are read and checked at a time."""
MOST_CONNECTIONS = 1000
GRACE_SECONDS = 30
"""Seconds in which accepted requests may finish after a signal to stop."""
CLIENT_LEFT = 499
"""The status, in logs and metrics, of a request whose client has left."""
ROUTES = (
    *("/", "/health", "/metrics", "/v1/models", "/v1/completions", "/v1/chat/completions"),
    *("/v1/embeddings", "/tokenize", "/detokenize", "/tokenizer_info"),
)
OPEN_PATHS = ("/", "/health")
"""Answered without a key."""


@dataclass(frozen=True, kw_only=True)
class ServerSettings:
    """What the server allows."""

    host: str = "127.0.0.1"
    key: str | None = None
    origins: tuple[str, ...] = ()
    """Origins of web pages that may send requests, in addition to the server's own."""
    queue_seconds: float = 60.0
    """A request that has waited longer for a row gets 503."""
    deadline: float | None = None
    """Seconds after which a request ends with what it has."""
    embedding_queue: int = 64
    """Requests for embeddings at a time."""
    log_text: bool = False


def json_response(
    value: Mapping[str, Any], status: int = 200, headers: Mapping[str, str] | None = None
) -> Response:
    """JSON; a lone surrogate that a client has sent comes back as "?"."""
    return Response(_json(value), status, headers, media_type="application/json")


def error_response(error: ApiError) -> Response:
    """An error in OpenAI's shape."""
    headers = {}
    if error.retry_after is not None:
        headers["Retry-After"] = str(max(1, round(error.retry_after)))
    if error.status in (408, 413):  # the rest of the body is not read
        headers["Connection"] = "close"
    if error.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return json_response(error.body(), error.status, headers)


def _queue_full(message: str, retry_after: float = 1.0) -> ApiError:
    return ApiError(message, status=429, code="queue_full", retry_after=retry_after)


def _json(value: Mapping[str, Any]) -> bytes:
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.encode(errors="replace")


class ServerGuard(Guard):
    """Refuses requests of other pages and those without the key."""

    def __init__(self, app: ASGIApp, settings: ServerSettings) -> None:
        own = ("localhost", settings.host, socket.gethostname())
        super().__init__(app, own if settings.key is None else None, settings.origins)
        self.key = settings.key

    def response(self, scope: Scope, headers: Headers, foreign: str | None) -> Response | None:
        """An error in OpenAI's shape, or None."""
        probe = scope["path"] == "/health" and not {"host", "origin"} & {*headers}
        if foreign is not None and not (probe and scope["http_version"] == "1.0"):
            return error_response(ApiError(_FOREIGN[foreign], status=403, code=foreign))
        if self.key is None or scope["path"] in OPEN_PATHS:
            return None
        scheme, _, key = headers.get("authorization", "").partition(" ")
        given = key.strip().encode() if scheme.lower() == "bearer" else b""
        if hmac.compare_digest(given, self.key.encode()):
            return None
        message = "the key is missing or wrong; send it as Authorization: Bearer KEY."
        return error_response(ApiError(message, status=401, code="invalid_api_key"))


_FOREIGN = {
    "host": "the Host of this request is not a name of this server.",
    "origin": "pages of other origins may not use this server; --origin allows one.",
}


class AnswerCount:
    """Counts answers by route and status."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self.app, self.metrics = app, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """An ASGI application."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        status = CLIENT_LEFT

        async def send_and_note(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self.app(scope, receive, send_and_note)
        finally:
            self.metrics.on_answer(scope["path"], status)


class Relay:
    """Carries updates of the engine's thread to the event loop, once per step for all requests.

    The observer of the engine, whose numbers it passes on to the metrics.
    """

    def __init__(self) -> None:
        self.metrics = Metrics(ROUTES)
        self.loop: asyncio.AbstractEventLoop | None = None
        self._updates: deque[tuple[Exchange, int, Update]] = deque()
        self.on_end: Callable[[], None] = lambda: None
        """Called on the loop after every step."""

    def connect(self, loop: asyncio.AbstractEventLoop) -> None:
        """The loop that receives the updates."""
        self.loop = loop

    def put(self, exchange: "Exchange", number: int, update: Update) -> None:
        """An update, on the engine's thread."""
        self._updates.append((exchange, number, update))

    def on_step(self, facts: TurnFacts) -> None:
        """The end of a step, on the engine's thread."""
        self.metrics.on_step(facts)
        if self.loop is not None:
            with suppress(RuntimeError):  # the loop has closed
                self.loop.call_soon_threadsafe(self._deliver)

    def on_finish(self, request: Request, facts: RequestFacts) -> None:
        """The end of a request, on the engine's thread."""
        self.metrics.on_finish(request, facts)

    def _deliver(self) -> None:
        while self._updates:
            exchange, number, update = self._updates.popleft()
            self.metrics.on_tokens(update.tokens)
            try:
                exchange.receive(number, update)
            except BaseException as error:  # also a Rust panic; the requests of others go on
                exchange.fail(f"the server failed: {type(error).__name__}.", status=500)
        self.on_end()


class Exchange:
    """A call at the engine: what has arrived of it, and whether its client is still there."""

    def __init__(self, call: Call, relay: Relay, settings: ServerSettings) -> None:
        self.call, self.reply = call, Reply(call)
        self._relay, self._settings = relay, settings
        self._jobs: list[Job] = []
        self._end: Callable[[Job], None] = lambda _: None
        self._chunks: list[dict[str, Any]] = []
        self._event = asyncio.Event()
        self._timers: list[asyncio.TimerHandle] = []
        self._listener: asyncio.Task[None] | None = None
        self.gone = False
        """Whether the client has left."""
        self.failure: ApiError | None = None
        self.first_token: float | None = None
        self.started = time.monotonic()

    def submit(self, engine: Engine, receive: Receive) -> None:
        """Hand the requests to the engine; none of them where one has no place."""
        self._end = engine.cancel
        try:
            for number, request in enumerate(self.call.requests):
                on_update = partial(self._relay.put, self, number)
                self._jobs.append(engine.submit(request, on_update))
        except (QueueFull, ValueError, RuntimeError) as error:
            self.close()
            if isinstance(error, QueueFull):
                raise _queue_full(str(error), error.retry_after) from None
            status = 400 if isinstance(error, ValueError) else 503
            raise ApiError(str(error), status=status) from None
        self._listener = asyncio.create_task(self._listen(receive))
        loop = asyncio.get_running_loop()
        self._timers = [loop.call_later(self._settings.queue_seconds, self._waited)]
        if self._settings.deadline is not None:
            self._timers.append(loop.call_later(self._settings.deadline, self._late))

    def receive(self, number: int, update: Update) -> None:
        """An update of one request."""
        if update.tokens and self.first_token is None:
            self.first_token = time.monotonic()
        self._chunks += self.reply.add(number, update)
        if self.reply.error:
            self.fail(self.reply.error, status=500)
        self._event.set()

    def fail(self, message: str, *, status: int = 503, code: str | None = None) -> None:
        """End the call with an error."""
        if self.failure is None:
            later = 1.0 if status == 503 else None
            self.failure = ApiError(message, status=status, code=code, retry_after=later)
        self._cancel()
        self._event.set()

    async def wait(self) -> None:
        """Until something has arrived, failed or ended."""
        await self._event.wait()
        self._event.clear()

    @property
    def ended(self) -> bool:
        """Whether nothing more will come."""
        return self.gone or self.failure is not None or self.reply.finished

    def take(self) -> list[dict[str, Any]]:
        """The chunks that have arrived since the last call."""
        chunks, self._chunks = self._chunks, []
        return chunks

    def close(self) -> None:
        """End what still runs; no client is waiting."""
        self._cancel()
        for timer in self._timers:
            timer.cancel()
        if self._listener is not None:
            self._listener.cancel()

    def _cancel(self) -> None:
        for job in self._jobs:
            self._end(job)

    async def _listen(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self.gone = True
        self._cancel()
        self._event.set()

    def _waited(self) -> None:
        if not any(job.left_queue for job in self._jobs):
            seconds = self._settings.queue_seconds
            self.fail(f"the server was busy for {seconds:g} s.", code="queue_seconds")

    def _late(self) -> None:
        if self.reply.has_tokens:
            self.reply.end_early("deadline")
            self._cancel()
        else:
            seconds = self._settings.deadline or 0.0
            self.fail(f"the deadline of {seconds:g} s has passed.", code="deadline")


class EventStream(Response):
    """The answer to a call as server-sent events."""

    media_type = "text/event-stream"

    def __init__(self, exchange: Exchange, on_end: Callable[[Exchange, int], None]) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self.exchange, self._on_end = exchange, on_end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002
        """An ASGI application."""
        exchange = self.exchange

        async def write(events: bytes, *, more: bool = True) -> None:
            async with asyncio.timeout(STALLED_SECONDS):
                await send({"type": "http.response.body", "body": events, "more_body": more})

        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            await write(_events(exchange.reply.first_chunks()))
            while True:
                ended = exchange.ended
                if chunks := exchange.take():
                    await write(_events(chunks))
                if ended:
                    break
                if not exchange.ended:
                    await exchange.wait()
            if exchange.failure is not None:
                await write(_events([exchange.failure.body()]), more=False)
            else:
                last = _events(exchange.reply.last_chunks())
                await write(last + b"data: [DONE]\n\n", more=False)
        except TimeoutError:
            exchange.gone = True  # the rest is not sent, and the connection ends
        finally:
            exchange.close()
            self._on_end(exchange, 200)


def _events(chunks: Collection[Mapping[str, Any]]) -> bytes:
    return b"".join(b"data: " + _json(chunk) + b"\n\n" for chunk in chunks)


class LayerLaws(Protocol):
    """What the layers of a model would write after some tokens, with the probability of one."""

    def __call__(self, ids: Sequence[int], next_id: int | None, *, top: int) -> Iterable[Any]:
        """Per layer: ``layer``, ``tokens``, ``probabilities`` and ``next``."""
        ...


class App:
    """The routes of one served model."""

    def __init__(
        self,
        served: ServedModel,
        engine: Engine | None,
        model: Transformer,
        relay: Relay,
        settings: ServerSettings,
        lens: LayerLaws | None = None,
    ) -> None:
        """``engine`` is None for a model that does not continue texts, ``lens`` without layers.

        ``lens`` is called on the thread of the embeddings, beside the engine: it must not change
        the modules of the engine's model.
        """
        self.lens = lens
        self.served, self.engine, self.model = served, engine, model
        self.relay, self.settings = relay, settings
        self._embedding = 0
        self._reading = 0
        self._templates = ThreadPoolExecutor(2, "chat template")
        self._beside = ThreadPoolExecutor(1, "fenchel-embeddings")
        relay.on_end = self._check_engine
        if engine is not None:
            relay.metrics.watch(engine)
        self.on_failure: Callable[[], None] = lambda: None
        """Called once after the engine has failed."""
        middleware = [Middleware(AnswerCount, metrics=relay.metrics)]
        if settings.origins:
            middleware.append(
                Middleware(
                    CORSMiddleware,
                    allow_origins=settings.origins,
                    allow_methods=("GET", "POST"),
                    allow_headers=("*",),  # clients for browsers have their own, x-stainless-...
                )
            )
        middleware.append(Middleware(ServerGuard, settings=settings))
        post = partial(Route, methods=["POST"])
        self.asgi = Starlette(
            routes=[
                Route("/", self._page),
                Route("/health", self._health),
                Route("/v1/models", self._models),
                Route("/v1/models/{name:path}", self._model),
                post("/v1/completions", partial(self._generate, parse=completion_call)),
                post("/v1/chat/completions", partial(self._generate, parse=chat_call)),
                post("/v1/embeddings", self._embeddings),
                post("/tokenize", partial(self._respond, parse=tokenize)),
                post("/detokenize", partial(self._respond, parse=detokenize)),
                post("/lens", self._lens),
                Route("/tokenizer_info", self._tokenizer_info),
                Route("/metrics", self._metrics),
            ],
            middleware=middleware,
            exception_handlers={
                ApiError: self._api_error,
                HTTPException: self._http_error,
                Exception: self._failure,
            },
            lifespan=self._lifespan,
        )
        self.asgi.router.redirect_slashes = False  # a path with a slash at its end is another one

    @asynccontextmanager
    async def _lifespan(self, _: Starlette) -> AsyncIterator[None]:
        self.relay.connect(asyncio.get_running_loop())
        yield
        self._templates.shutdown(wait=False, cancel_futures=True)
        if self.engine is not None:
            await asyncio.to_thread(self.engine.close, 0.0)
        await asyncio.to_thread(self._beside.shutdown, cancel_futures=True)

    def _check_engine(self) -> None:
        if self.engine is not None and self.engine.failure is not None:
            on_failure, self.on_failure = self.on_failure, lambda: None
            on_failure()

    async def _page(self, _: HttpRequest) -> Response:
        nonce = secrets.token_urlsafe(16)
        headers = {
            "Content-Security-Policy": content_security_policy(nonce),
            "Cache-Control": "no-store",
            "Referrer-Policy": "no-referrer",
            "X-Content-Type-Options": "nosniff",
        }
        return HTMLResponse(page(nonce, self._facts()), headers=headers)

    def _facts(self) -> dict[str, Any]:
        served, usual = self.served, vars(Sampling())
        return {
            "model": served.name,
            "context": served.context,
            "layers": served.config.layers,
            "heads": served.config.heads,
            "chat": served.template is not None,
            "stops": list(served.template_stops),
            "ends": list(served.ends),
            "sampling": {
                name: value for name, value in vars(served.defaults).items() if value != usual[name]
            },
            "generates": self.engine is not None,
            "fingerprint": served.fingerprint,
            "key": self.settings.key is not None,
            "directions": {name: one.strength for name, one in served.directions.items()},
            "lens": self.lens is not None,
        }

    async def _health(self, _: HttpRequest) -> Response:
        engine = self.engine
        if engine is not None and engine.failure is not None:
            return json_response({"status": "failed", "reason": engine.failure}, 503)
        if engine is not None and not engine.ready:
            return json_response({"status": "starting"}, 503)
        return json_response({"status": "ok"})

    async def _models(self, _: HttpRequest) -> Response:
        return json_response({"object": "list", "data": [model_card(self.served)]})

    async def _model(self, request: HttpRequest) -> Response:
        require_model(request.path_params["name"], self.served)
        return json_response(model_card(self.served))

    async def _generate(
        self, request: HttpRequest, parse: Callable[[Mapping[str, Any], ServedModel], Call]
    ) -> Response:
        if self.engine is None:
            raise ApiError(
                f"this server continues no text with {self.served.name}, a model of kind "
                f"{self.served.config.kind}; use /v1/embeddings."
            )
        call = await self._parsed(request, parse)
        exchange = Exchange(call, self.relay, self.settings)
        request.state.exchange = exchange
        exchange.submit(self.engine, request.receive)
        try:
            # A stream begins with its first token, so that a failure before it has its own status.
            while not (exchange.ended or (call.stream and exchange.reply.has_tokens)):
                await exchange.wait()
        except BaseException:
            exchange.close()
            raise
        route = request.url.path
        if exchange.failure is not None:
            exchange.close()
            raise exchange.failure
        if call.stream and not exchange.gone:
            return EventStream(exchange, partial(self._log, route))
        exchange.close()
        self._log(route, exchange, CLIENT_LEFT if exchange.gone else 200)
        if exchange.gone:
            return Response(status_code=CLIENT_LEFT)
        return json_response(exchange.reply.response())

    async def _parsed(
        self, request: HttpRequest, parse: Callable[[Mapping[str, Any], ServedModel], T]
    ) -> T:
        """What ``parse`` makes of the body, in another thread; of a conversation, in its pool."""
        if self._reading >= MOST_BODIES:
            raise _queue_full(f"{self._reading} bodies are read already.")
        self._reading += 1
        try:
            body = await read_body(request)
            pool = self._templates if "messages" in body else None
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(pool, parse, body, self.served)
        finally:
            self._reading -= 1

    async def _embeddings(self, request: HttpRequest) -> Response:
        started = time.monotonic()
        call = await self._parsed(request, embedding_call)
        loop, vectors = asyncio.get_running_loop(), []
        with self._waiting():
            for ids in call.inputs:
                if await request.is_disconnected():
                    return Response(status_code=CLIENT_LEFT)
                vectors.append(await loop.run_in_executor(self._beside, embed, self.model, ids))
        answer = call.response(vectors)
        milliseconds = round(1e3 * (time.monotonic() - started), 1)
        _print_line("/v1/embeddings", status=200, **answer["usage"], ms=milliseconds)
        return json_response(answer)

    @contextmanager
    def _waiting(self) -> Iterator[None]:
        """Context manager: a request for the thread of the embeddings, of which some may wait."""
        if self._embedding >= self.settings.embedding_queue:
            raise _queue_full(f"{self._embedding} requests for embeddings wait already.")
        self._embedding += 1
        try:
            yield
        finally:
            self._embedding -= 1

    async def _lens(self, request: HttpRequest) -> Response:
        call = await self._parsed(request, lens_call)
        if self.lens is None:
            raise ApiError(f"there is no lens for {self.served.name}: its layers hold no laws.")
        with self._waiting():
            read = partial(self.lens, call.ids, call.next, top=call.top)
            loop = asyncio.get_running_loop()
            laws = await loop.run_in_executor(self._beside, read)
        return json_response(call.response(laws, self.served))

    async def _respond(
        self, request: HttpRequest, parse: Callable[[Mapping[str, Any], ServedModel], Any]
    ) -> Response:
        return json_response(await self._parsed(request, parse))

    async def _tokenizer_info(self, _: HttpRequest) -> Response:
        return json_response(tokenizer_info(self.served))

    async def _metrics(self, _: HttpRequest) -> Response:
        return Response(self.relay.metrics.text(), media_type=CONTENT_TYPE)

    def _log(self, route: str, exchange: Exchange, status: int) -> None:
        call, reply = exchange.call, exchange.reply
        finishes = sorted({choice.finish or "unfinished" for choice in reply.choices})
        if exchange.gone and not reply.finished:
            finishes = ["disconnected"]
        elif exchange.failure is not None:
            finishes = ["error"]
        now, first = time.monotonic(), exchange.first_token
        line: dict[str, Any] = {
            "id": call.id,
            "status": status,
            "stream": call.stream,
            "choices": len(call.requests),
            **reply.usage(),
            "first_ms": None if first is None else round(1e3 * (first - exchange.started), 1),
            "ms": round(1e3 * (now - exchange.started), 1),
            "finish": ",".join(finishes),
            "fingerprint": call.served.fingerprint,
        }
        if self.settings.log_text:
            decode = call.served.tokenizer.decode
            line["prompts"] = [decode(one.prompt) for one in call.requests[:: call.n]]
            line["texts"] = [choice.text for choice in reply.choices]
        _print_line(route, **line)

    async def _api_error(self, request: HttpRequest, error: Exception) -> Response:
        assert isinstance(error, ApiError)
        exchange = getattr(request.state, "exchange", None)
        if exchange is not None:
            self._log(request.url.path, exchange, error.status)
        elif request.method == "POST":
            about = {"status": error.status, "param": error.param, "code": error.code}
            _print_line(request.url.path, **about)
        return error_response(error)

    async def _http_error(self, request: HttpRequest, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        path = printable(request.url.path, 80)
        message = f"{request.method} {path} is not answered by this server."
        if error.status_code == 405:
            message = f"{path} does not take {request.method}."
        return json_response(
            ApiError(message, status=error.status_code).body(), error.status_code, error.headers
        )

    async def _failure(self, _: HttpRequest, error: Exception) -> Response:
        message = f"the server failed: {type(error).__name__}."
        return error_response(ApiError(message, status=500))


def _print_line(route: str, **more: Any) -> None:
    print(json.dumps({"time": _now(), "route": route, **more}), file=sys.stderr, flush=True)


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


async def read_body(request: HttpRequest) -> dict[str, Any]:
    """The object of a request's body.

    Of one that is too large, ``DISCARDED`` bytes are read and dropped: a client that still sends
    when its connection is closed may not see the answer.
    """
    encoding = request.headers.get("content-encoding", "identity")
    if encoding.strip().lower() not in ("", "identity"):
        raise ApiError(
            f"Content-Encoding {printable(encoding, 40)} is not decoded; send the body as it is.",
            status=415,
        )
    length = request.headers.get("content-length", "0")
    if length.isdigit() and int(length[:20]) > DISCARDED:
        raise _too_large()
    data, size = bytearray(), 0
    try:
        async with asyncio.timeout(BODY_SECONDS):
            async for part in request.stream():
                size += len(part)
                if size > DISCARDED:
                    break
                if size <= LARGEST_BODY:
                    data += part
    except TimeoutError:
        raise ApiError(f"the body did not arrive within {BODY_SECONDS:g} s.", status=408) from None
    if size > LARGEST_BODY:
        raise _too_large()
    if size > 2**16:
        return await asyncio.to_thread(parse_body, bytes(data))
    return parse_body(bytes(data))


def _too_large() -> ApiError:
    return ApiError(f"the body has more than {LARGEST_BODY:,} bytes.", status=413)


def listen(host: str, port: int) -> socket.socket:
    """A listening socket; port 0 takes a free one."""
    if not 0 <= port <= 65535:
        raise ValueError(f"a port is a number from 0 to 65535, not {port}.")
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        # asyncio switches the delay of small packets off for sockets that name the protocol.
        listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if hasattr(socket, "TCP_USER_TIMEOUT"):
                # Closing a connection waits for its client to read what was sent; this ends it.
                limit = round(1e3 * STALLED_SECONDS)
                listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, limit)
            listener.bind(address)
            listener.listen(512)
        except OSError:
            listener.close()
            raise
    except OSError as error:
        raise ValueError(f"cannot listen on {host}, port {port}: {error.strerror}.") from None
    return listener


def is_loopback(listener: socket.socket) -> bool:
    """Whether only this machine reaches the socket."""
    return ip_address(listener.getsockname()[0]).is_loopback


def address(host: str, listener: socket.socket) -> str:
    """The address of the server for a browser on this machine."""
    number, port = listener.getsockname()[:2]
    name = f"[{host}]" if ":" in host else host
    if ip_address(number).is_unspecified:
        name = "127.0.0.1" if ip_address(number).version == 4 else "[::1]"
    return f"http://{name}:{port}"


class JsonLines(logging.Formatter):
    """Messages of uvicorn as lines of JSON, such as those of requests."""

    def format(self, record: logging.LogRecord) -> str:
        """One line."""
        line = {"time": _now(), "route": None, "message": record.getMessage()}
        if record.exc_info:
            line["error"] = repr(record.exc_info[1])
        return json.dumps(line)


class BoundedProtocol(H11Protocol):
    """HTTP in which the line and the headers of a request arrive within ``HEAD_SECONDS``.

    A client that has sent its request and closed its side of the connection gets the answer. One
    that has closed both sides looks the same until something is written to it, so an interim
    response is written, and ``_check`` looks for the reset that a closed connection answers with.
    """

    _timer: asyncio.TimerHandle | None = None
    _checks: asyncio.TimerHandle | None = None

    def eof_received(self) -> bool | None:  # type: ignore[override]
        """The end of what the client sends; True keeps the connection for the answer."""
        cycle = self.cycle
        if cycle is None or cycle.response_complete or cycle.more_body:
            return None
        if not cycle.response_started and self.conn.their_http_version == b"1.1":
            self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        self._checks = self.loop.call_later(CHECK_SECONDS, self._check)
        return True

    def _check(self) -> None:
        """End a connection that is reset, or whose answer is complete."""
        peer = self.transport.get_extra_info("socket")
        if peer is None or peer.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            self.transport.abort()
        elif self.cycle is None or self.cycle.response_complete:
            self.transport.close()
        else:
            self._checks = self.loop.call_later(CHECK_SECONDS, self._check)

    def send_400_response(self, msg: str) -> None:
        """The answer to what is not HTTP, in the shape of all errors."""
        body = _json(ApiError(msg).body())
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
            (b"connection", b"close"),
        ]
        response = h11.Response(status_code=400, headers=headers, reason=b"Bad Request")
        for event in (response, h11.Data(data=body), h11.EndOfMessage()):
            self.transport.write(self.conn.send(event) or b"")
        self.transport.close()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A new connection: a request is expected."""
        super().connection_made(transport)
        self._timer = self.loop.call_later(HEAD_SECONDS, transport.abort)

    def data_received(self, data: bytes) -> None:
        """A part of a request."""
        super().data_received(data)
        if self.cycle is not None and not self.cycle.response_complete:
            self._cancel_timer()
        elif self._timer is None:  # the beginning of a further request
            self._timer = self.loop.call_later(HEAD_SECONDS, self.transport.abort)

    def connection_lost(self, exc: Exception | None) -> None:
        """The end of the connection."""
        self._cancel_timer()
        if self._checks is not None:
            self._checks.cancel()
        super().connection_lost(exc)

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


class Server:
    """Runs the application on a socket until it is stopped or the engine fails."""

    def __init__(self, app: App, listener: socket.socket) -> None:
        self.app, self._listener = app, listener
        config = uvicorn.Config(
            app.asgi,
            log_config={
                "version": 1,
                "disable_existing_loggers": False,
                "formatters": {"json": {"()": JsonLines}},
                "handlers": {"json": {"class": "logging.StreamHandler", "formatter": "json"}},
                "loggers": {"uvicorn": {"handlers": ["json"], "propagate": False}},
            },
            log_level="warning",
            access_log=False,
            server_header=False,
            http=BoundedProtocol,
            ws="none",
            limit_concurrency=MOST_CONNECTIONS,
            timeout_graceful_shutdown=GRACE_SECONDS,
        )
        self._server = uvicorn.Server(config)
        app.on_failure = self.stop

    def run(self) -> None:
        """Serve; returns after ``stop`` or a signal, when accepted requests have ended."""
        self._server.run(sockets=[self._listener])

    def stop(self) -> None:
        """Accept no more requests, finish those that run, and end."""
        self._server.should_exit = True
