"""``fenchel serve`` against ``transformers serve``, with and without its continuous batching.

    python -m benchmarks serve [--clients 1,8,32] [--words 24] [--new 16] [--dtype float32]
                               [--rounds 3] [--only fenchel] [--without transformers]

Each server is a process of its own with one thread for its products, and all read the same
directory: a Llama of 29.5M random weights, and a tokenizer trained on a built-in text. In every
round each server in turn is asked by as many clients at once, each with prompts of ``--words``
words that no other request has; answers are streamed, at temperature 1. ``--clients``, ``--words``
and ``--new`` are lists, and every combination is measured. The first round of each warms the
servers up and does not count.

    tokens_per_cpu_second   new tokens over the processor time of the server and of the processes
                            that it started, from the first request of a round to its last answer,
                            prompts included: the same on a busy machine, which seconds are not
    tokens_per_second       new tokens over seconds
    p50, p95, first         seconds of a request, and until its first event (median)
    memory                  the largest resident memory of the server so far, in bytes
    idle                    processor seconds per second of a server that has nothing to do
    ratio                   of tokens per processor second to the better of transformers' two: the
                            median over the rounds, each within a round, and their extremes
    p95_ratio               p95 over the smaller p95 of transformers' two

``--dtype`` is that of the directory and of all servers. The default takes about three minutes on a
quiet machine, most of them for transformers without continuous batching at 32 clients, which
``--without transformers`` leaves out. Prompts and answers of two lengths each: ``--words 24,128
--new 16,64``.

``transformers serve`` needs fastapi and accelerate. Where fastapi is not installed, ``_serve_peer``
puts the managers of that server (its queue, its streams, its continuous batching) behind two routes
of starlette, on which fastapi is built; that is less work per request.

The openai package asks both servers in the same way, but takes more time than either spends on
HTTP, so the client here is http.client.
"""

import argparse
import http.client
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from itertools import count, cycle, islice, product
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks.harness import record
from fenchel.checkpoints import save
from fenchel.data import open_text, train_tokenizer
from fenchel.model import ModelConfig, Transformer

MODEL = ModelConfig(vocabulary=8192, context=1024, width=512, layers=8, heads=8)
ROWS = 32
OURS, THEIRS, BATCHED = "fenchel", "transformers", "transformers continuous"
PEER_MEMORY = 0.15
"""Share of the free memory that the cache of transformers' continuous batching may take; by default
it takes nearly all."""
START = 180.0
"""Seconds that a server may take to answer for the first time."""


def main(options: list[str] | None = None) -> None:
    """Print and record a line per server and number of clients."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks serve")
    parser.add_argument("--clients", default="1,8,32", help="numbers of clients, by commas")
    parser.add_argument("--words", default="24", help="words of a prompt, by commas")
    parser.add_argument("--new", default="16", help="new tokens per request, by commas")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--rounds", type=int, default=3, help="rounds that count")
    parser.add_argument("--only", help="one server, to look at it; nothing is recorded")
    parser.add_argument("--without", help="leave a server out; nothing is recorded")
    parser.add_argument(
        "--peer", nargs=4, metavar=("DIR", "PORT", "DTYPE", "BATCHED"), help="used inside"
    )
    given = parser.parse_args(options or [])
    if given.peer is not None:
        path, port, dtype, server = given.peer
        _serve_peer(path, int(port), dtype, server == BATCHED)
        return
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model"
        words = _write_model(path, given.dtype)
        servers, missing = _start(path, given.dtype, given.only, given.without)
        lines: list[dict[str, Any]] = []
        try:
            for length, new, clients in product(
                *(
                    map(int, numbers.split(","))
                    for numbers in (given.words, given.new, given.clients)
                )
            ):
                case = {"dtype": given.dtype, "words": length, "new": new, "clients": clients}
                prompts = (" ".join(islice(words, length)) for _ in count())
                lines += _measure(servers, case, given.rounds, prompts)
        finally:
            for server in servers.values():
                server.stop()
    lines += [{"server": name, "missing": reason} for name, reason in missing.items()]
    if given.only is None and given.without is None:
        name = "serve_cpu" if given.dtype == "float32" else f"serve_cpu_{given.dtype}"
        record(name, lines, ("transformers", "starlette", "uvicorn"))


def _write_model(path: Path, dtype: str) -> Iterator[str]:
    """Write the directory; returns the words of the text that its tokenizer was trained on."""
    texts = [document.text for document in open_text("sotu").documents()]
    tokenizer = train_tokenizer(texts, MODEL.vocabulary)
    model = Transformer(MODEL)
    for p in model.parameters():  # matrices of zeros, as a new model has, may be quicker
        if p.ndim > 1:
            torch.nn.init.normal_(p, std=p.shape[-1] ** -0.5)
    save(model.to(getattr(torch, dtype)), tokenizer, path)
    settings = path / "generation_config.json"
    (path / "manifest.json").unlink()  # it would refuse the change
    settings.write_text(json.dumps({**json.loads(settings.read_text()), "do_sample": True}))
    return cycle(" ".join(texts).split())


@dataclass
class _Server:
    """A process that answers at a port of the loopback address."""

    process: subprocess.Popen[bytes]
    port: int
    model: str
    log: Path

    def cpu_seconds(self) -> float:
        """Processor time of the process and of those that it started."""
        return sum(map(_cpu_seconds, _with_children(self.process.pid)))

    def peak_memory(self) -> int:
        """The largest resident memory so far, in bytes."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return 1024 * int(status.partition("VmHWM:")[2].split()[0])

    def stop(self) -> None:
        """End the process."""
        self.process.terminate()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def _with_children(pid: int) -> Iterator[int]:
    yield pid
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in (task / "children").read_text().split():
            yield from _with_children(int(child))


def _cpu_seconds(pid: int) -> float:
    """User and system time of a process, its threads and the processes that it has outlived."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")


def _start(
    path: Path, dtype: str, only: str | None = None, without: str | None = None
) -> tuple[dict[str, _Server], dict[str, str]]:
    """The servers that answer, and why the others do not."""
    commands = {
        OURS: [
            *(sys.executable, "-m", "fenchel", "serve", str(path)),
            *f"--device cpu --dtype {dtype} --threads 1 --rows {ROWS} --port PORT".split(),
        ]
    }
    for name, flag in ((THEIRS, "--no-continuous-batching"), (BATCHED, "--continuous-batching")):
        commands[name] = [
            *(sys.executable, "-m", "transformers.cli.transformers", "serve", str(path)),
            *f"--device cpu --dtype {dtype} --log-level error --port PORT {flag} "
            f"--cb-max-memory-percent {PEER_MEMORY}".split(),
        ]
        if find_spec("fastapi") is None:
            commands[name] = [sys.executable, "-m", "benchmarks.serve", "--peer", str(path)]
            commands[name] += ["PORT", dtype, name]
    for name in (only, without):
        if name is not None and name not in commands:
            raise SystemExit(f"{name!r} should be one of {', '.join(commands)}.")
    names = [name for name in commands if name != without and only in (None, name)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    servers: dict[str, _Server] = {}
    missing: dict[str, str] = {}
    for name in names:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        log = path.parent / f"{name}.log"
        with log.open("wb") as file:
            command = [str(port) if word == "PORT" else word for word in commands[name]]
            process = subprocess.Popen(
                command, stdout=file, stderr=subprocess.STDOUT, env=environment
            )
        servers[name] = _Server(process, port, path.name if name == OURS else str(path), log)
    for name, server in list(servers.items()):
        try:
            _wait(server)
        except RuntimeError as error:
            servers.pop(name).stop()
            missing[name] = str(error)
            print(f"{name}: {error}", file=sys.stderr)
    return servers, missing


def _wait(server: _Server) -> None:
    """Wait until a server is ready; raises with the last line of its log where it is not."""
    end = time.monotonic() + START
    while time.monotonic() < end and server.process.poll() is None:
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=5)
        try:
            connection.request("GET", "/health")
            if connection.getresponse().status == 200:
                return
        except OSError:
            pass
        finally:
            connection.close()
        time.sleep(0.2)
    last = server.log.read_text(errors="replace").strip().splitlines()[-1:] or ["no output"]
    raise RuntimeError(f"it does not answer: {last[0][:200]}")


def _serve_peer(path: str, port: int, dtype: str, batched: bool) -> None:
    """What ``transformers serve`` does for a streamed completion, without fastapi."""
    import uvicorn
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import JSONResponse, StreamingResponse
    from starlette.routing import Route
    from transformers import AutoModelForCausalLM, AutoTokenizer, ContinuousBatchingConfig
    from transformers.cli.serving.utils import CBGenerateManager, GenerateManager

    tokenizer = AutoTokenizer.from_pretrained(path)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, dtype)).eval()
    share = ContinuousBatchingConfig(max_memory_percent=PEER_MEMORY)
    manager = CBGenerateManager(share) if batched else GenerateManager()
    numbers = count()

    async def complete(request: Request) -> StreamingResponse:
        body = json.loads(await request.body())
        config = deepcopy(model.generation_config)
        config.max_new_tokens, config.temperature = body["max_tokens"], body["temperature"]
        inputs = tokenizer(body["prompt"], return_tensors=None if batched else "pt")
        if batched:
            config.use_cache = False
            manager.init_cb(model, config)
        name = f"req_{next(numbers)}"
        queue, streamer = manager.generate_streaming(model, tokenizer, inputs, config, name)

        async def events() -> AsyncIterator[str]:
            while (text := await queue.get()) is not None:
                if not isinstance(text, str):
                    yield f"data: {json.dumps({'error': text.msg})}\n\n"
                    return
                choice = {"index": 0, "text": text, "finish_reason": None}
                event = {"id": name, "object": "text_completion", "choices": [choice]}
                yield f"data: {json.dumps(event)}\n\n"
            usage = {"completion_tokens": streamer.total_tokens}
            yield f"data: {json.dumps({'id': name, 'choices': [], 'usage': usage})}\n\n"

        return StreamingResponse(events(), media_type="text/event-stream")

    async def health(_: Request) -> JSONResponse:
        return JSONResponse({"status": "ok"})

    routes = [Route("/v1/completions", complete, methods=["POST"]), Route("/health", health)]
    uvicorn.run(Starlette(routes=routes), host="127.0.0.1", port=port, log_level="warning")


class _Answer(NamedTuple):
    """New tokens of a request, and seconds until its first event and its end."""

    tokens: int
    first: float
    seconds: float


def _ask(server: _Server, prompt: str, new: int) -> _Answer:
    """One streamed request; the number of tokens is the server's own count."""
    body = {
        "model": server.model,
        "prompt": prompt,
        "max_tokens": new,
        "temperature": 1.0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    started = time.perf_counter()
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=600)
    headers = {"Content-Type": "application/json"}
    connection.request("POST", "/v1/completions", json.dumps(body), headers)
    response = connection.getresponse()
    if response.status != 200:
        raise RuntimeError(f"HTTP {response.status}: {response.read(500)!r}")
    first, usage = 0.0, None
    for line in response:
        if line.startswith(b"data: {"):
            first = first or time.perf_counter() - started
            event = json.loads(line[len(b"data: ") :])
            if "error" in event:
                raise RuntimeError(f"the stream ended with {event['error']}")
            usage = event.get("usage") or usage
    connection.close()
    if usage is None:
        raise RuntimeError("the stream ended without usage")
    return _Answer(usage["completion_tokens"], first, time.perf_counter() - started)


def _measure(
    servers: Mapping[str, _Server], case: Mapping[str, Any], rounds: int, prompts: Iterator[str]
) -> list[dict[str, Any]]:
    """All servers in turn, ``rounds`` times after a first one that does not count."""
    clients, new = case["clients"], case["new"]
    requests = 4 if clients == 1 else 1  # per client
    answers: dict[str, list[_Answer]] = {name: [] for name in servers}
    cpu: dict[str, list[float]] = {name: [] for name in servers}
    wall: dict[str, list[float]] = {name: [] for name in servers}
    rates: dict[str, list[float]] = {name: [] for name in servers}
    for r in range(rounds + 1):
        asked = [[next(prompts) for _ in range(requests)] for _ in range(clients)]
        for name in list(servers) if r % 2 else reversed(list(servers)):
            server = servers[name]
            before, started = server.cpu_seconds(), time.perf_counter()
            with ThreadPoolExecutor(clients) as pool:
                own = pool.map(partial(_ask_all, server, new), asked)
                got = [answer for one in own for answer in one]
            if r:
                wall[name].append(time.perf_counter() - started)
                cpu[name].append(server.cpu_seconds() - before)
                rates[name].append(sum(answer.tokens for answer in got) / cpu[name][-1])
                answers[name] += got
    idle = _idle(servers)
    lines = [
        {
            "server": name,
            **case,
            **_summary(answers[name], cpu[name], wall[name]),
            "memory": servers[name].peak_memory(),
            "idle": idle[name],
        }
        for name in servers
    ]
    theirs = [name for name in servers if name != OURS]
    for line in lines if theirs else ():
        peers = zip(*(rates[name] for name in theirs), strict=True)
        ratios = [own / max(best) for own, best in zip(rates[line["server"]], peers, strict=True)]
        line["ratio"] = round(statistics.median(ratios), 3)
        line["ratio_range"] = [round(min(ratios), 3), round(max(ratios), 3)]
        least = min(other["p95"] for other in lines if other["server"] != OURS)
        line["p95_ratio"] = round(line["p95"] / least, 3)
    for line in lines:
        print("  ".join(f"{key} {value}" for key, value in line.items()), flush=True)
    return lines


def _idle(servers: Mapping[str, _Server]) -> dict[str, float]:
    """Processor seconds per second of every server while none is asked."""
    before, started = [server.cpu_seconds() for server in servers.values()], time.perf_counter()
    time.sleep(1.0)
    seconds = time.perf_counter() - started
    return {
        name: round((server.cpu_seconds() - spent) / seconds, 3)
        for (name, server), spent in zip(servers.items(), before, strict=True)
    }


def _ask_all(server: _Server, new: int, prompts: Sequence[str]) -> list[_Answer]:
    """The requests of one client, one after another."""
    return [_ask(server, prompt, new) for prompt in prompts]


def _summary(
    answers: Sequence[_Answer], cpu: Sequence[float], wall: Sequence[float]
) -> dict[str, Any]:
    """The numbers of a server over all rounds."""
    tokens, seconds = sum(a.tokens for a in answers), [a.seconds for a in answers]
    return {
        "tokens": tokens,
        "tokens_per_cpu_second": round(tokens / sum(cpu), 1),
        "tokens_per_second": round(tokens / sum(wall), 1),
        "p50": round(statistics.median(seconds), 3),
        "p95": round(statistics.quantiles(seconds, n=20, method="inclusive")[-1], 3),
        "first": round(statistics.median(a.first for a in answers), 3),
    }


if __name__ == "__main__":
    main(sys.argv[1:])
