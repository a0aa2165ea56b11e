"""Hostile requests to ``fenchel serve``: each is refused in one sentence and harms no other.

    python -m tests.fuzz.hostile_requests --bodies 1000 --requests 10000 --seed 0

A tiny model is served by the command itself, in a process of its own, and gets

    bodies       sound bodies of all routes after one to three random changes, of fields, bytes,
                 headers, methods and paths
    sizes        texts of a million characters, bodies above the limit, ids out of range
    half-sent    bodies and headers that never end, while sound requests come
    slow         streams that are not read, while sound requests come
    disconnects  clients that leave, in streams and without, in the queue and at a row
    templates    conversations that make the chat template loop, grow, nest, fail, or die
    killed       an engine that fails in the middle of a step
    endurance    thousands of requests, sound and not

and must

    refuse    within 2 s of processor time, with a documented status and an object of OpenAI's shape
              whose message is one printable sentence; sound requests in between have their answer
              within 2 s of the clock
    go on     no answer of 5xx, no traceback on standard error, no text of a prompt in the log, all
              rows free, open files and threads as before
    stay      within 16 MiB of the memory it had after the first fifth of the endurance run

Figures go to results/hostile_requests.json. A violation is printed with the number of its request,
and ``--only bodies --seed SEED --start NUMBER --bodies 1 --dry`` sends the same one again.
"""

import argparse
import http.client
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks.harness import record
from fenchel.model import ModelConfig, Transformer
from fenchel.server.app import DISCARDED
from tests.fuzz.hostile_directories import NASTY, NUMBERS, value

RESULTS = Path(__file__).parent / "results"
SECONDS = 2.0
"""In which a hostile request is refused, and a sound one beside it answered."""
LONGEST = 1000
"""Characters of a message."""
GROWTH = 16 * 2**20
"""Bytes of memory by which many requests may grow the server."""
CONTEXT = 512
SECRET = "zebrafish"
"""A word of the prompts, which must not be in the log."""
TEXT = f"the sea and the {SECRET}. "
BEGIN, STOP = "<begin>", "<stop>"
_LOOP = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
TRAPS = {
    "loop": _LOOP,
    "grow": "{{ 'a' * 9999999999 }}",
    "large": "{{ 'a ' * 20000000 }}",
    "nest": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "fail": "{{ raise_exception('no \x1b[2J such ' ~ 'x' * 9999) }}",
    "class": "{{ ''.__class__.__mro__ }}",
}
"""What the template does with a message of this content."""
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    + "".join(
        f"{{% if message.content == '{content}' %}}{code}{{% endif %}}"
        for content, code in TRAPS.items()
    )
    + "{{ message.role }}: {{ message.content }}<stop>\n{% endfor %}"
    + "{% if add_generation_prompt %}assistant:{% endif %}"
)

ROUTES = ("/v1/completions", "/v1/chat/completions", "/v1/embeddings", "/tokenize", "/detokenize")
_SAMPLING: dict[str, Any] = {
    "model": "default",
    "max_tokens": 4,
    "temperature": 0.7,
    "top_p": 0.9,
    "top_k": 20,
    "min_p": 0.01,
    "repetition_penalty": 1.1,
    "presence_penalty": 0.5,
    "frequency_penalty": 0.5,
    "logit_bias": {"7": -5, "9": 5.5},
    "seed": 3,
    "n": 2,
    "stop": ["sea", "x"],
    "stop_token_ids": [5],
    "stream": False,
    "return_token_ids": True,
    "fenchel": {
        "entropy": True,
        "attention": {"layers": [0, 1], "heads": "all", "top": 4},
        "sensitivity": True,
        "confidence": True,
        "draft": 4,
        "past_context": True,
    },
}
_MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": [{"type": "text", "text": TEXT}]},
    {"role": "assistant", "content": "Yes."},
    {"role": "user", "content": "Why?"},
]
SOUND: tuple[tuple[str, dict[str, Any]], ...] = (
    ("/v1/completions", {"prompt": TEXT, "logprobs": 3, "echo": True, **_SAMPLING}),
    ("/v1/completions", {"prompt": [[1, 2, 3], [4, 5]], "max_tokens": 2}),
    ("/v1/completions", {"prompt": [TEXT, "a"], "max_tokens": 1, "echo": True, "logprobs": 1}),
    (
        "/v1/completions",
        {"prompt": "a", "stream": True, "stream_options": {"include_usage": True}},
    ),
    (
        "/v1/chat/completions",
        {"messages": _MESSAGES, "logprobs": True, "top_logprobs": 4, **_SAMPLING},
    ),
    ("/v1/chat/completions", {"messages": _MESSAGES, "stream": True, "max_completion_tokens": 3}),
    ("/v1/embeddings", {"input": ["a text", TEXT], "encoding_format": "base64"}),
    ("/tokenize", {"prompt": TEXT, "add_special_tokens": True}),
    ("/tokenize", {"messages": _MESSAGES, "add_generation_prompt": True}),
    ("/detokenize", {"tokens": [1, 2, 3]}),
)
FIELDS = (
    *sorted({name for _, body in SOUND for name in body}),
    *("best_of", "suffix", "tools", "functions", "response_format", "audio", "user", "metadata"),
    *("dimensions", "ignore_eos", "max_token", "__class__", "prompt_token_ids"),
)


# hostile requests


class Sent(NamedTuple):
    """A request as bytes of a socket."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes
    changes: list[str]


def mutated(rng: random.Random) -> Sent:
    """A sound request after one to three changes."""
    path, document = rng.choice(SOUND)
    document = json.loads(json.dumps(document))
    changes = [_change(rng, document) for _ in range(rng.choice((1, 1, 1, 2, 3)))]
    body = json.dumps(document).encode()
    method, headers = "POST", {"Content-Type": "application/json"}
    kind = rng.random()
    if kind < 0.15:
        body, what = _bytes(rng, body)
        changes.append(what)
    elif kind < 0.22:
        name, content = rng.choice(_HEADERS)
        headers[name] = content
        changes.append(f"header {name}")
    elif kind < 0.25:
        method = rng.choice(("PUT", "DELETE", "PATCH", "OPTIONS", "HEAD", "TRACE", "GET", "FOO"))
        changes.append(method)
    elif kind < 0.28:
        path = rng.choice(_PATHS)
        changes.append(f"path {path[:30]!r}")
    return Sent(method, path, headers, body, changes)


_HEADERS = (
    *(("Content-Type", "text/plain"), ("Content-Type", "multipart/form-data; boundary=x")),
    *(("Host", "evil.example"), ("Host", "127.0.0.1.evil.example"), ("Host", "")),
    *(("Origin", "http://evil.example"), ("Origin", "null"), ("Cookie", "x" * 9000)),
    *(("Authorization", "Bearer " + "x" * 5000), ("Accept-Encoding", "x, " * 3000)),
    *(("Expect", "100-continue"), ("Upgrade", "websocket"), ("X-Forwarded-Host", "evil")),
    *(("Content-Encoding", "gzip"), ("Range", "bytes=0-1"), ("Transfer-Encoding", "gzip")),
)
_PATHS = (
    *("/v1/completions/", "//v1/completions", "/v1/../v1/completions", "/%2e%2e/%2e%2e/etc/passwd"),
    *("/v1/models/" + "x" * 3000, "/v1/models/%00%ff", "/v1/responses", "/metrics", "/health", "/"),
    *("/v1/completions?stream=true&n=9", "/static/../../config.json", "/docs", "/v1/models/a/b"),
)


def _change(rng: random.Random, document: dict[str, Any]) -> str:
    """Change an entry of an object, anywhere in it; returns what was changed."""
    inner: Any = document
    trail = ""
    while True:
        keys = sorted(inner) if isinstance(inner, dict) else list(range(len(inner)))
        if not keys:
            break
        key = rng.choice(keys)
        trail += f".{str(key)[:20]}"
        if isinstance(inner[key], dict | list) and rng.random() < 0.5:
            inner = inner[key]
            continue
        action = rng.randrange(6)
        if action == 0 and isinstance(inner, dict):
            del inner[key]
        elif action == 1 and isinstance(inner, dict):
            key = rng.choice((*FIELDS, *(name for name in NASTY if len(name) < 400)))
            inner[key] = value(rng)
        elif action == 2:
            inner[key] = rng.choice(NUMBERS)
        elif action == 3:
            inner[key] = [inner[key]] * rng.choice((1, 2, 33, 301))
        elif action == 4 and isinstance(inner[key], str):
            inner[key] = inner[key] * rng.choice((2, 100, 3000)) + rng.choice(NASTY)
        else:
            inner[key] = value(rng)
        break
    return trail.lstrip(".")


def _bytes(rng: random.Random, body: bytes) -> tuple[bytes, str]:
    """The body as bytes: cut, flipped, deep, of another encoding, or something else."""
    flipped = bytearray(body)
    for _ in range(rng.choice((1, 3, 20))):
        flipped[rng.randrange(len(flipped))] ^= 1 << rng.randrange(8)
    choices = {
        "cut": body[: rng.randrange(len(body))],
        "flipped": bytes(flipped),
        "twice": body + body,
        "mark of the byte order": b"\xef\xbb\xbf" + body,
        "UTF-16": body.decode().encode("utf-16"),
        "random": rng.randbytes(rng.choice((0, 1, 100, 5000))),
        "deep lists": b'{"prompt": ' + b"[" * 100_000,
        "deep objects": b'{"a":' * 50_000 + b"1" + b"}" * 50_000,
        "long number": b'{"prompt": "a", "seed": ' + b"9" * rng.choice((30, 5000, 100_000)) + b"}",
        "NaN": b'{"prompt": "a", "temperature": NaN}',
        "infinite": b'{"prompt": "a", "temperature": 1e999}',
        "a name twice": b'{"prompt": "a", "prompt": "b"}',
        "many names": json.dumps({f"x{i}": i for i in range(20_000)}).encode(),
        "null": b"null",
        "empty": b"",
    }
    name = rng.choice(sorted(choices))
    return choices[name], name


class Answer(NamedTuple):
    """What came back, and how many seconds it took; status 0 is no answer at all.

    ``CUT_OFF`` stands for no answer to a body of which the server does not read the rest: a client
    that still sends when the connection is closed does not see why.
    """

    status: int
    headers: Mapping[str, str]
    body: bytes
    seconds: float


def send(address: tuple[str, int], sent: Sent, timeout: float = 30.0) -> Answer:
    """The answer to a request on a connection of its own."""
    began = time.monotonic()
    connection = http.client.HTTPConnection(*address, timeout=timeout)
    try:
        connection.putrequest(
            sent.method, sent.path, skip_host="Host" in sent.headers, skip_accept_encoding=True
        )
        for name, content in sent.headers.items():
            connection.putheader(name, content)
        if "Transfer-Encoding" not in sent.headers:
            connection.putheader("Content-Length", str(len(sent.body)))
        connection.endheaders(sent.body)
        response = connection.getresponse()
        body = response.read()
        headers = {name.lower(): content for name, content in response.getheaders()}
        return Answer(response.status, headers, body, time.monotonic() - began)
    except (OSError, http.client.HTTPException) as error:
        status = CUT_OFF if len(sent.body) > DISCARDED else 0
        return Answer(status, {}, repr(error).encode(), time.monotonic() - began)
    finally:
        connection.close()


def post(address: tuple[str, int], path: str, body: Any, timeout: float = 30.0) -> Answer:
    """The answer to a body, as JSON or as it is."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    return send(
        address, Sent("POST", path, {"Content-Type": "application/json"}, data, []), timeout
    )


CUT_OFF = 1
STATUSES = (CUT_OFF, 200, 400, 401, 403, 404, 405, 408, 413, 429)


def violations(answer: Answer, method: str = "POST") -> Iterator[str]:
    """What is wrong with an answer to a request that may be refused."""
    if answer.status not in STATUSES:
        yield f"status {answer.status}"
    if b"Traceback" in answer.body or b'File "' in answer.body:
        yield "a traceback"
    if answer.status in (200, CUT_OFF) or method == "HEAD":
        return
    if answer.seconds > SECONDS:
        yield f"refused after {answer.seconds:.1f} s"
    if b"nvalid HTTP request" in answer.body or b"nsupported" in answer.body:
        return  # no request of HTTP at all: the server's library answers it
    try:
        error = json.loads(answer.body)["error"]
        message = error["message"]
        wrong = set(error) != {"message", "type", "param", "code"}
    except (ValueError, KeyError, TypeError):
        yield "no error object"
        return
    if wrong:
        yield "an error of another shape"
    if not isinstance(message, str) or not message.isprintable():
        yield "a message with control characters"
    elif not 0 < len(message) <= LONGEST or message[-1] not in ".?" or "\n" in message:
        yield f"no sentence: {message[:80]!r}"


def sound(address: tuple[str, int]) -> Iterator[str]:
    """Violations of a sound request."""
    answer = post(address, "/v1/completions", {"prompt": TEXT, "max_tokens": 2, "temperature": 0})
    if answer.status != 200:
        yield f"a sound request got {answer.status}: {answer.body[:200]!r}"
    elif answer.seconds > SECONDS:
        yield f"a sound request took {answer.seconds:.1f} s"


# the server


def directory(home: Path, template: str = TEMPLATE) -> Path:
    """A tiny Llama with a beginning token and a template."""
    from fenchel.checkpoints import save
    from fenchel.data import train_tokenizer

    tokenizer = train_tokenizer([TEXT * 4], 300)
    tokenizer.library.add_special_tokens([BEGIN, STOP])
    config = ModelConfig(
        vocabulary=tokenizer.vocabulary_size, context=CONTEXT, width=16, layers=2, heads=2
    )
    save(Transformer(config, generator=torch.Generator().manual_seed(1)), tokenizer, home)
    (home / "manifest.json").unlink()
    (home / "chat_template.jinja").write_text(template)
    file = home / "tokenizer_config.json"
    names = {"bos_token": BEGIN, "eos_token": STOP}
    file.write_text(json.dumps(json.loads(file.read_text()) | names))
    return home


class Served(NamedTuple):
    """A server in a process of its own."""

    process: subprocess.Popen[str]
    address: tuple[str, int]
    errors: Path

    def status(self, name: str) -> int:
        """A number of /proc/PID/status: VmRSS in bytes, Threads."""
        text = Path(f"/proc/{self.process.pid}/status").read_text()
        found = re.search(rf"^{name}:\s+(\d+)( kB)?", text, re.MULTILINE)
        assert found is not None
        return int(found[1]) * (1024 if found[2] else 1)

    def processor(self) -> float:
        """Seconds of processor time, with those of children that have ended."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")

    def send(self, sent: Sent) -> Answer:
        """The answer to a request, with the processor time that it took."""
        before = self.processor()
        answer = send(self.address, sent)
        return answer._replace(seconds=self.processor() - before)

    def post(self, path: str, body: Any) -> Answer:
        """As ``post``, with the processor time."""
        before = self.processor()
        answer = post(self.address, path, body)
        return answer._replace(seconds=self.processor() - before)

    @property
    def files(self) -> int:
        """Open files and connections."""
        return len(os.listdir(f"/proc/{self.process.pid}/fd"))

    def children(self) -> list[int]:
        """Processes that it has started."""
        file = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        mine = {int(word) for word in file.read_text().split()}
        for task in Path(f"/proc/{self.process.pid}/task").iterdir():
            mine |= {int(word) for word in (task / "children").read_text().split()}
        return sorted(mine)

    def trouble(self) -> Iterator[str]:
        """What its log has that it should not, and whether it still runs and answers."""
        log = self.errors.read_text(errors="replace")
        if "Traceback" in log:
            yield f"a traceback in the log: {log[log.index('Traceback') :][:2000]}"
        if SECRET in log:
            yield "the text of a prompt in the log"
        if self.process.poll() is not None:
            yield f"the server has ended with {self.process.returncode}: {log[-500:]}"
            return
        answer = send(self.address, Sent("GET", "/health", {}, b"", []))
        if answer.status != 200:
            yield f"/health gave {answer.status}"

    def settled(self, true: Callable[[], bool], seconds: float = 10.0) -> bool:
        """Whether something becomes true in time."""
        until = time.monotonic() + seconds
        while not true() and time.monotonic() < until:
            time.sleep(0.05)
        return true()


@contextmanager
def serving(path: Path, *flags: str, program: str | None = None) -> Iterator[Served]:
    """Serve a directory; ``program`` runs before the command."""
    start = ["-m", "fenchel"]
    if program is not None:
        start = [
            "-c",
            f"{program}\nfrom fenchel.__main__ import main\nimport sys\nsys.exit(main())",
        ]
    words = ["serve", str(path), "--port", "0", "--threads", "1", "--device", "cpu", *flags]
    errors = path.parent / f"errors_{time.monotonic_ns()}.txt"
    with errors.open("w") as log:
        process = subprocess.Popen(
            [sys.executable, *start, *words],
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        found = re.search(r"http://([\d.]+):(\d+)", line)
        assert found is not None, (line, errors.read_text()[-2000:])
        served = Served(process, (found[1], int(found[2])), errors)
        for route, body in SOUND:  # sound bodies pass, or the changes prove nothing
            answer = post(served.address, route, body)
            assert answer.status == 200, (route, answer.body[:300])
        yield served
    finally:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(40)
        process.kill()
        process.wait()


# the parts


Part = dict[str, Any]


def bodies(served: Served, count: int, seed: int, start: int = 0) -> Part:
    """Random changes to sound requests, one after another."""
    statuses: Counter[int] = Counter()
    bad: list[dict[str, Any]] = []
    slowest = (0.0, 0)
    for number in range(start, start + count):
        sent = mutated(random.Random(f"{seed} {number}"))
        answer = served.send(sent)
        statuses[answer.status] += 1
        if answer.status != 200:
            slowest = max(slowest, (round(answer.seconds, 3), number))
        wrong = list(violations(answer, sent.method))
        if wrong:
            bad.append({"number": number, "changes": sent.changes, "violations": wrong})
            print(f"{seed} {number}: {sent.method} {sent.path[:60]} {bad[-1]}", flush=True)
            print(f"  {sent.body[:300]!r}\n  {answer.body[:300]!r}", flush=True)
    return {
        "requests": count,
        "seed": seed,
        "statuses": {str(status): n for status, n in sorted(statuses.items())},
        "slowest_refusal": dict(zip(("seconds", "number"), slowest, strict=True)),
        "violations": bad,
    }


def sizes(served: Served) -> Part:
    """Large texts and bodies, and numbers out of range."""
    million = 10**6
    texts = {
        "one letter": "a" * million,
        "spaces": " " * million,
        "control tokens": BEGIN * (million // len(BEGIN)),
        "emoji": "🐚" * (million // 4),
        "words": (TEXT * million)[:million],
        "lines": "\n" * (million // 2),
    }
    requests: dict[str, tuple[str, Any]] = {}
    for name, text in texts.items():
        data = json.dumps({"prompt": text}, ensure_ascii=False).encode()
        requests[f"a million characters, {name}"] = ("/v1/completions", data)
        message = {"messages": [{"role": "user", "content": text}]}
        data = json.dumps(message, ensure_ascii=False).encode()
        requests[f"a million characters, {name}, chat"] = ("/v1/chat/completions", data)
    for token in (-1, 302, 2**31, 2**63, 10**400):
        requests[f"id {str(token)[:20]}"] = ("/v1/completions", {"prompt": [1, token]})
    requests |= {
        "ids": ("/v1/completions", {"prompt": [1] * 300_000}),
        "lists of ids": ("/v1/completions", {"prompt": [[1]] * 100_000}),
        "texts": ("/v1/completions", {"prompt": ["a"] * 100_000}),
        "choices": ("/v1/completions", {"prompt": ["a"] * 32, "n": 8, "max_tokens": CONTEXT}),
        "stops": ("/v1/completions", {"prompt": "a", "stop": ["x"] * 10_000}),
        "biases": (
            "/v1/completions",
            {"prompt": "a", "logit_bias": {str(i): 1 for i in range(10_000)}},
        ),
        "messages": ("/v1/chat/completions", {"messages": _MESSAGES[:1] * 10_000}),
        "one byte too many": ("/v1/completions", b" " * (2**20 + 1)),
        "context": ("/v1/completions", {"prompt": [1] * (CONTEXT + 1)}),
        "weights": (
            "/v1/completions",
            {"prompt": "a", "fenchel": {"attention": {"top": 10**9}}, "logprobs": 10**9},
        ),
    }
    rows, bad = [], []
    for name, (path, body) in requests.items():
        answer = served.post(path, body)
        wrong = list(violations(answer))
        if answer.status == 200:
            wrong.append("accepted")
        rows.append((name, answer.status, round(answer.seconds, 2)))
        if wrong:
            print(name, wrong, answer.body[:200], flush=True)
            bad.append({"name": name, "violations": wrong})
    slowest = max(rows, key=lambda row: row[2])
    return {
        "requests": len(rows),
        "slowest": {"seconds": slowest[2], "name": slowest[0]},
        "violations": bad,
    }


def _connect(served: Served, data: bytes, receive_buffer: int | None = None) -> socket.socket:
    connection = socket.socket()
    if receive_buffer is not None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    connection.settimeout(60)
    connection.connect(served.address)
    connection.sendall(data)
    return connection


def _head(served: Served, length: int) -> bytes:
    host = f"{served.address[0]}:{served.address[1]}"
    return (
        f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {length}\r\n\r\n"
    ).encode()


def _request(served: Served, body: Mapping[str, Any]) -> bytes:
    data = json.dumps(body).encode()
    return _head(served, len(data)) + data


def half_sent(served: Served, count: int = 100) -> Part:
    """Bodies and heads that never end: bodies get 408 after their time, heads are cut off."""
    began = time.monotonic()
    connections = [_connect(served, _head(served, 500) + b'{"prompt": ') for _ in range(count)]
    heads = [_connect(served, _head(served, 9)[: i % 60]) for i in range(count)]
    bad = list(sound(served.address))
    statuses: Counter[str] = Counter()
    for connection in connections:
        answer = connection.recv(4096)
        statuses[answer[9:12].decode(errors="replace")] += 1
        connection.close()
    seconds = time.monotonic() - began
    if statuses != {"408": count}:
        bad.append(f"half a body got {dict(statuses)}")
    bad += sound(served.address)
    ended = 0
    for connection in heads:
        with suppress(ConnectionResetError):
            assert not connection.recv(100)
        ended += 1
        connection.close()
    return {"requests": count + ended, "seconds": round(seconds, 1), "violations": bad}


def slow(served: Served, count: int = 3) -> Part:
    """Streams that are not read: sound requests do not wait, and the streams end."""
    files = served.files
    body = {
        "prompt": [1] * 8,
        "max_tokens": CONTEXT - 8,
        "stream": True,
        "ignore_eos": True,
        "logprobs": 20,
        "fenchel": {"attention": {"heads": "all", "top": 64}, "entropy": True},
    }
    memory = served.status("VmRSS")
    connections = [_connect(served, _request(served, body), 4096) for _ in range(count)]
    bad = []
    for _ in range(10):
        bad += sound(served.address)
        time.sleep(0.2)
    grown = served.status("VmRSS") - memory
    ended = served.settled(lambda: served.files <= files, 60)
    if not ended:
        bad.append("streams that are not read do not end")
    for connection in connections:
        connection.close()
    return {"requests": count, "megabytes": round(grown / 2**20, 1), "violations": bad}


def disconnects(served: Served, count: int = 100) -> Part:
    """Clients that leave; their rows and connections are free again."""
    files = served.files
    body = {"prompt": [1] * 8, "max_tokens": CONTEXT - 8, "ignore_eos": True}
    for number in range(count):
        streams = number % 2 == 0
        connection = _connect(served, _request(served, {**body, "stream": streams}))
        if streams and number % 4 == 0:
            connection.recv(200)
        if number % 3 == 0:  # resets instead of closing
            linger = b"\x01\x00\x00\x00\x00\x00\x00\x00"
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        connection.close()
    bad = list(sound(served.address))
    began = time.monotonic()
    if not served.settled(lambda: served.files <= files, 10):
        bad.append(f"{served.files} open files, {files} before")
    free = time.monotonic() - began
    log = [line for line in served.errors.read_text().splitlines() if "disconnected" in line]
    if not log:
        bad.append("no request was ended by its client")
    return {"requests": count, "ended": len(log), "free": round(free, 2), "violations": bad}


def templates(served: Served) -> Part:
    """Conversations for which the template misbehaves, and a rendering process that is killed."""
    rows: dict[str, Any] = {}
    bad = []
    for content in TRAPS:
        body = {"messages": [{"role": "user", "content": content}], "max_tokens": 2}
        answer = post(served.address, "/v1/chat/completions", body)
        # Rendering has 2 s of the clock; the limit here is for what comes on top.
        wrong = list(violations(answer._replace(seconds=answer.seconds - SECONDS)))
        if answer.status == 200:
            wrong.append("accepted")
        rows[content] = round(answer.seconds, 2)
        if wrong:
            bad.append({"content": content, "violations": wrong, "body": str(answer.body[:300])})
    for child in served.children():
        os.kill(child, signal.SIGKILL)
    time.sleep(0.5)  # until they have ended
    body = {"messages": [{"role": "user", "content": "Hello."}], "max_tokens": 2}
    statuses = [post(served.address, "/v1/chat/completions", body).status for _ in range(2)]
    if statuses != [200, 200]:
        bad.append({"content": "a killed process", "violations": [str(statuses)]})
    return {"seconds": rows, "after_kill": statuses, "violations": bad}


FAILING = """
from pathlib import Path
from fenchel.generation import Decoder
step = Decoder.step
def failing(decoder, *words):
    if Path(FLAG).exists():
        raise MemoryError("no \\x1b[2J memory")
    return step(decoder, *words)
Decoder.step = failing
"""
"""A step that fails once the file FLAG exists."""


def killed(path: Path) -> Part:
    """An engine that fails: every request that waits gets an error, and the process ends with 4."""
    flag = path.parent / "fail"
    program = f"FLAG = {str(flag)!r}{FAILING}"
    bad = []
    with serving(path, "--rows", "2", program=program) as served:
        body = {"prompt": [1] * 8, "max_tokens": CONTEXT - 8, "ignore_eos": True}
        with ThreadPoolExecutor(8) as pool:
            waiting = [
                pool.submit(post, served.address, "/v1/completions", {**body, "stream": i % 2 == 0})
                for i in range(8)
            ]
            time.sleep(0.5)
            flag.touch()
            began = time.monotonic()
            answers = [one.result() for one in waiting]
        seconds = time.monotonic() - began
        for answer in answers:
            text = answer.body.decode(errors="replace")
            events = [line[6:] for line in text.splitlines() if line.startswith("data: {")]
            document = events[-1] if events else text
            if '"error"' not in document or "\x1b" in text or "Traceback" in text:
                bad.append(f"a request that waited got {answer.status}: {document[:200]}")
        with suppress(subprocess.TimeoutExpired):
            served.process.wait(10)
        if served.process.returncode != 4:
            bad.append(f"the process ended with {served.process.returncode} and not with 4")
        if "Traceback" in served.errors.read_text():
            bad.append("a traceback in the log")
    return {"requests": len(answers), "seconds": round(seconds, 2), "violations": bad}


def endurance(served: Served, count: int, seed: int, clients: int = 4) -> Part:
    """Many requests, every third of them changed: memory, files and threads stay as they are."""
    memory: list[int] = []
    statuses: Counter[int] = Counter()
    lock, numbers = threading.Lock(), iter(range(count))
    files, threads = served.files, served.status("Threads")
    began = time.monotonic()

    def client() -> None:
        while (number := _next(lock, numbers)) is not None:
            rng = random.Random(f"endurance {seed} {number}")
            if number % 3 == 0:
                answer = send(served.address, mutated(rng))
            else:
                path, body = rng.choice(SOUND)
                answer = post(served.address, path, body)
            with lock:
                statuses[answer.status] += 1
                if number % max(1, count // 20) == 0:
                    memory.append(served.status("VmRSS"))

    workers = [threading.Thread(target=client) for _ in range(clients)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    memory.append(served.status("VmRSS"))
    early = max(memory[: max(1, len(memory) // 5)])
    bad = [f"status {status}" for status in statuses if status not in STATUSES]
    if memory[-1] - early > GROWTH:
        bad.append(f"memory grew from {early / 2**20:.0f} to {memory[-1] / 2**20:.0f} MiB")
    if not served.settled(lambda: served.files <= files + 2):
        bad.append(f"{served.files} open files, {files} before")
    if served.status("Threads") > threads + 8:  # pools of threads grow up to their size
        bad.append(f"{served.status('Threads')} threads, {threads} before")
    return {
        "requests": count,
        "seconds": round(time.monotonic() - began, 1),
        "statuses": {str(status): n for status, n in sorted(statuses.items())},
        "mebibytes": [round(one / 2**20, 1) for one in memory],
        "violations": bad,
    }


def _next(lock: threading.Lock, numbers: Iterator[int]) -> int | None:
    with lock:
        return next(numbers, None)


PARTS = ("bodies", "sizes", "half-sent", "slow", "disconnects", "templates", "endurance", "killed")


def attempt(
    parts: tuple[str, ...], *, count: int, requests: int, seed: int, start: int = 0
) -> dict[str, Part]:
    """The parts that are asked for, one after another; figures and violations of each."""
    figures: dict[str, Part] = {}
    with tempfile.TemporaryDirectory() as folder:
        path = directory(Path(folder) / "model")
        with serving(path) as served:
            todo: dict[str, Callable[[], Part]] = {
                "bodies": lambda: bodies(served, count, seed, start),
                "sizes": lambda: sizes(served),
                "half-sent": lambda: half_sent(served),
                "slow": lambda: slow(served),
                "disconnects": lambda: disconnects(served),
                "templates": lambda: templates(served),
                "endurance": lambda: endurance(served, requests, seed),
            }
            for name, run in todo.items():
                if name in parts:
                    figures[name] = run()
                    figures[name]["violations"] += list(served.trouble())
                    print(name, json.dumps(figures[name]), flush=True)
        if "killed" in parts:
            figures["killed"] = killed(path)
            print("killed", json.dumps(figures["killed"]), flush=True)
    return figures


def main(options: list[str] | None = None) -> None:
    """Run the parts, print the violations and write the figures."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz.hostile_requests")
    parser.add_argument("--bodies", type=int, default=1000)
    parser.add_argument("--requests", type=int, default=10_000, help="of the endurance run")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--start", type=int, default=0)
    parser.add_argument("--only", choices=PARTS, action="append", help="one part; repeatable")
    parser.add_argument("--dry", action="store_true", help="write no results")
    chosen = parser.parse_args(options)
    figures = attempt(
        tuple(chosen.only or PARTS),
        count=chosen.bodies,
        requests=chosen.requests,
        seed=chosen.seed,
        start=chosen.start,
    )
    found = sum(len(part["violations"]) for part in figures.values())
    print(f"{found} violations")
    if not chosen.dry:
        rows = [{"part": name, **part} for name, part in figures.items()]
        packages = ("starlette", "uvicorn", "jinja2", "tokenizers")
        record("hostile_requests", rows, packages, folder=RESULTS)
    if found:
        sys.exit(1)


if __name__ == "__main__":
    main()
