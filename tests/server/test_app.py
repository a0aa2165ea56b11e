"""fenchel/server/app.py: the API as its clients use it, who may use it, and how it ends."""

import asyncio
import base64
import json
import os
import re
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
from transformers import LlamaModel

from fenchel.checkpoints import load
from fenchel.cli import main
from fenchel.data import ChatTemplate
from fenchel.generation import Decoder
from fenchel.generation.scheduler import Update
from fenchel.model import Transformer
from fenchel.server import app as app_module
from fenchel.server.app import EventStream, Exchange
from fenchel.server.openai_api import Reply, completion_call
from tests.server.conftest import ANSWERS, BEGIN, STOP, RunningServer, serving

QUESTION = [{"role": "user", "content": "What is the bird?"}]
WAIT = 30.0


@pytest.fixture(scope="module")
def client(running: RunningServer) -> Iterator[openai.OpenAI]:
    with client_of(running) as client:
        yield client


def client_of(running: RunningServer, key: str = "none") -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{running.address}/v1", api_key=key, max_retries=0)


def ask(
    running: RunningServer, path: str, body: Any = None, method: str | None = None, **headers: str
) -> tuple[int, Any, dict[str, str]]:
    """Status, body and headers of an answer."""
    data = body if isinstance(body, bytes | None) else json.dumps(body).encode()
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    request = urllib.request.Request(
        running.address + path,
        data=data,
        method=method,
        headers={"Content-Type": "application/json", **named},
    )
    try:
        with urllib.request.urlopen(request, timeout=WAIT) as response:
            text, status, given = response.read().decode(), response.status, response.headers
    except urllib.error.HTTPError as error:
        text, status, given = error.read().decode(), error.code, error.headers
    is_json = given.get_content_type() == "application/json"
    return status, json.loads(text) if is_json else text, dict(given)


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + WAIT
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


# --- answers


@pytest.mark.parametrize("thing", ANSWERS)
def test_a_chat_is_answered_by_the_template_of_the_checkpoint(
    client: openai.OpenAI, thing: str
) -> None:
    answer = client.chat.completions.create(
        model="parrot",
        messages=[{"role": "user", "content": f"What is {thing}?"}],
        temperature=0,
    )
    assert answer.choices[0].message.content == ANSWERS[thing]
    assert answer.choices[0].finish_reason == "stop"
    assert answer.system_fingerprint == "0123456789ab"
    assert answer.usage is not None
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_a_stream_is_the_answer_in_pieces_with_its_usage(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": "default", "messages": QUESTION, "temperature": 0, "n": 2}
    options = {"include_usage": True}
    chunks = list(client.chat.completions.create(**asked, stream=True, stream_options=options))
    whole = client.chat.completions.create(**asked)
    for number in range(2):
        own = [c.choices[0] for c in chunks if c.choices and c.choices[0].index == number]
        pieces = [choice.delta.content or "" for choice in own]
        assert "".join(pieces) == ANSWERS["the bird"] == whole.choices[number].message.content
        assert not any("\ufffd" in piece for piece in pieces)
        assert own[0].delta.role == "assistant"
        assert [choice.finish_reason for choice in own[:-1]] == [None] * (len(own) - 1)
        assert own[-1].finish_reason == "stop"
    assert chunks[-1].choices == []
    assert chunks[-1].usage == whole.usage
    assert all(chunk.usage is None for chunk in chunks[:-1])


def test_echo_and_logprobs_are_those_of_the_model_on_the_whole_text(
    client: openai.OpenAI, chat_directory: Path
) -> None:
    model, tokenizer, _ = load(chat_directory)
    ids = [tokenizer.token_to_id(BEGIN), *tokenizer.encode("The bird sings 東")]
    assert any(tokenizer.decode([id]) == "\ufffd" for id in ids), "a character of several tokens"
    answer = client.completions.create(
        model="parrot", prompt=[ids, ids[:4]], echo=True, logprobs=3, max_tokens=1, temperature=0
    )
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(ids) + 4
    assert answer.usage.completion_tokens == 2
    for choice, prompt in zip(answer.choices, (ids, ids[:4]), strict=True):
        scores = choice.logprobs
        assert scores is not None
        with torch.no_grad():
            logits = model.double()(torch.tensor([prompt]))[0]
        truth = logits.log_softmax(-1)
        new = int(logits[-1].argmax())
        expected = [float(truth[t, id]) for t, id in enumerate([*prompt[1:], new])]
        assert scores.token_logprobs is not None
        assert scores.token_logprobs[0] is None
        assert scores.token_logprobs[1:] == pytest.approx(expected, abs=1e-4)
        # lm-eval compares the chosen number with the largest for equality.
        best = truth.argmax(-1).tolist()
        assert scores.top_logprobs is not None
        assert scores.top_logprobs[0] is None
        for number, (id, top) in enumerate(
            zip([*prompt[1:], new], scores.top_logprobs[1:], strict=True), start=1
        ):
            assert (scores.token_logprobs[number] == max(top.values())) == (id == best[number - 1])
        # The text of each token, from one offset to the next, is what it releases.
        assert scores.text_offset is not None
        ends = [*scores.text_offset[1:], len(choice.text)]
        parts = [choice.text[a:b] for a, b in zip(scores.text_offset, ends, strict=True)]
        assert "".join(parts) == choice.text
        assert choice.text.startswith(tokenizer.decode(prompt[:4]))


def test_an_echo_is_the_prompt_as_it_was_given(client: openai.OpenAI) -> None:
    prompt = "  The sea  größer \n"
    answer = client.completions.create(model="parrot", prompt=prompt, echo=True, max_tokens=0)
    assert answer.choices[0].text == prompt
    assert answer.choices[0].finish_reason == "length"
    stream = client.completions.create(
        model="parrot", prompt=prompt, echo=True, max_tokens=3, stream=True, seed=1
    )
    whole = client.completions.create(
        model="parrot", prompt=prompt, echo=True, max_tokens=3, seed=1
    )
    assert "".join(chunk.choices[0].text for chunk in stream) == whole.choices[0].text


def test_logprobs_of_a_chat_have_the_bytes_of_its_tokens(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="parrot", messages=QUESTION, temperature=0, logprobs=True, top_logprobs=2
    )
    scores = answer.choices[0].logprobs
    assert scores is not None
    assert scores.content is not None
    joined = b"".join(bytes(entry.bytes or []) for entry in scores.content)
    assert joined.decode() == ANSWERS["the bird"] + STOP
    assert all(len(entry.top_logprobs) == 2 for entry in scores.content)
    assert all(entry.top_logprobs[0].logprob == entry.logprob for entry in scores.content)


def test_a_stop_string_is_never_sent(client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(
        model="parrot", messages=QUESTION, temperature=0, stop=["größer so"], stream=True
    )
    chunks = [chunk.choices[0] for chunk in stream]
    assert "".join(chunk.delta.content or "" for chunk in chunks) == "The bird sings "
    assert chunks[-1].finish_reason == "stop"


def test_ids_and_traces_come_with_the_stock_client(client: openai.OpenAI) -> None:
    extra = {
        "return_token_ids": True,
        "fenchel": {"entropy": True, "attention": {"top": 3}, "sensitivity": True},
    }
    whole = client.completions.create(
        model="parrot", prompt="What", max_tokens=4, temperature=0, logprobs=2, extra_body=extra
    )
    stream = client.completions.create(
        model="parrot",
        prompt="What",
        max_tokens=4,
        temperature=0,
        logprobs=2,
        stream=True,
        extra_body=extra,
    )
    found = whole.choices[0].model_extra
    assert found is not None
    assert len(found["token_ids"]) == len(found["fenchel"]) == 4
    assert all(len(trace["attention"]["layers"]) == 2 for trace in found["fenchel"])
    content = (whole.choices[0].logprobs.model_extra or {})["content"]  # type: ignore[union-attr]
    assert [entry["id"] for entry in content] == found["token_ids"]
    pieces = [chunk.choices[0].model_extra or {} for chunk in stream]
    assert [i for piece in pieces for i in piece.get("token_ids", [])] == found["token_ids"]
    assert [t for piece in pieces for t in piece.get("fenchel", [])] == found["fenchel"]
    prompts = [piece["prompt_token_ids"] for piece in pieces if "prompt_token_ids" in piece]
    assert prompts == [found["prompt_token_ids"]]


def test_more_traces_than_are_allowed_are_refused(running: RunningServer) -> None:
    body = {"prompt": "What", "n": 3, "fenchel": {"entropy": True}}
    status, answer, _ = ask(running, "/v1/completions", body)
    assert (status, answer["error"]["param"]) == (400, "fenchel")


# --- seeds


@pytest.fixture(scope="module")
def crowded(chat_directory: Path) -> Iterator[RunningServer]:
    with serving(chat_directory, rows=32, invariant=True) as server:
        yield server


def test_a_request_is_fenchel_generate_with_its_seed_alone_and_among_31(
    crowded: RunningServer, chat_directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def served(seed: int, prompt: str = "What is") -> str:
        body = {"prompt": prompt, "seed": seed, "temperature": 1.5, "top_p": 0.9, "max_tokens": 24}
        status, answer, _ = ask(crowded, "/v1/completions", body)
        assert status == 200
        return str(answer["choices"][0]["text"])

    alone = [served(seed) for seed in range(4)]
    for seed, text in enumerate(alone):
        flags = ["--temperature", "1.5", "--top-p", "0.9", "--max-new-tokens", "24", "--json"]
        words = ["generate", str(chat_directory), "What is", "--seed", str(seed), *flags]
        capsys.readouterr()
        assert main(words) == 0
        assert json.loads(capsys.readouterr().out)["text"] == text
    assert len(set(alone)) == 4
    with ThreadPoolExecutor(32) as pool:
        others = [pool.submit(served, seed, f"{seed} birds") for seed in range(28)]
        together = list(pool.map(served, range(4)))
        for other in others:
            other.result()
    assert together == alone


def test_choices_differ_and_come_again(client: openai.OpenAI) -> None:
    def texts() -> list[str]:
        answer = client.completions.create(
            model="parrot", prompt=["What", "The"], n=3, seed=3, temperature=2, max_tokens=8
        )
        assert [choice.index for choice in answer.choices] == list(range(6))
        return [choice.text for choice in answer.choices]

    assert texts() == texts()
    assert len(set(texts())) == 6


# --- embeddings and tokens


def test_an_embedding_is_the_mean_of_the_last_hidden_state(
    client: openai.OpenAI, chat_directory: Path
) -> None:
    answer = client.embeddings.create(model="parrot", input=["What is the sea?", "größer"])
    reference = LlamaModel.from_pretrained(chat_directory, dtype=torch.float64)
    tokenizer = load(chat_directory).tokenizer
    for text, entry in zip(["What is the sea?", "größer"], answer.data, strict=True):
        with torch.no_grad():
            hidden = reference(torch.tensor([tokenizer.encode_whole(text)])).last_hidden_state
        mean = hidden[0].mean(0)
        torch.testing.assert_close(
            torch.tensor(entry.embedding, dtype=torch.float64),
            mean / mean.norm(),
            atol=1e-5,
            rtol=0,
        )


def test_base64_is_the_same_numbers(running: RunningServer) -> None:
    forms = {}
    for form in ("float", "base64"):
        body = {"input": [3, 4, 5], "encoding_format": form}
        status, answer, _ = ask(running, "/v1/embeddings", body)
        assert status == 200
        forms[form] = answer["data"][0]["embedding"]
    packed = base64.b64decode(forms["base64"])
    assert list(struct.unpack(f"<{len(packed) // 4}f", packed)) == forms["float"]


def test_tokens_there_and_back(running: RunningServer) -> None:
    tokenizer = running.served.tokenizer
    status, whole, _ = ask(running, "/tokenize", {"prompt": "The sea", "return_token_strs": True})
    assert status == 200
    assert whole["token_strs"] == [BEGIN, "The", " sea"]
    assert whole["count"] == 3
    _, plain, _ = ask(running, "/tokenize", {"prompt": "The sea", "add_special_tokens": False})
    assert plain["tokens"] == whole["tokens"][1:]
    _, back, _ = ask(running, "/detokenize", {"tokens": whole["tokens"]})
    assert back["prompt"] == f"{BEGIN}The sea"
    _, chat, _ = ask(running, "/tokenize", {"messages": QUESTION})
    assert tokenizer.decode(chat["tokens"], skip_special_tokens=False) == (
        f"{BEGIN}<turn>user\nWhat is the bird?{STOP}<turn>assistant\n"
    )
    # What lm-eval does to learn the id of the end token.
    _, info, _ = ask(running, "/tokenizer_info")
    body = {"prompt": info["eos_token"], "add_special_tokens": False}
    assert ask(running, "/tokenize", body)[1]["tokens"] == [tokenizer.token_to_id(STOP)]


@torch.no_grad()
def test_a_lens_has_the_law_of_every_layer(running: RunningServer, chat_directory: Path) -> None:
    """The stream after layer 1 is that of a model of one layer, read by the same norm and head."""
    _, whole, _ = ask(running, "/tokenize", {"prompt": "The sea is"})
    ids, model = whole["tokens"], load(chat_directory).model
    status, answer, _ = ask(running, "/lens", {"tokens": ids, "next": 9, "top": 3})
    assert status == 200
    assert [row["layer"] for row in answer["layers"]] == [1, 2]
    shallow = Transformer(replace(model.config, layers=1))
    shallow.load_state_dict({name: model.state_dict()[name] for name in shallow.state_dict()})
    for row, one in zip(answer["layers"], (shallow, model), strict=True):
        law = one.eval()(torch.tensor([ids]))[0, -1].softmax(-1)
        best = law.topk(3)
        assert [top["id"] for top in row["top"]] == best.indices.tolist()
        assert [top["p"] for top in row["top"]] == pytest.approx(best.values.tolist(), abs=1e-5)
        assert row["p"] == pytest.approx(float(law[9]), abs=1e-5)
        assert row["top"][0]["token"] == running.served.token_texts.text(row["top"][0]["id"])
    for body, sentence in (
        ({}, "tokens is missing"),
        ({"tokens": ["a"]}, "a list of token ids"),
        ({"tokens": []}, "the model reads 1 to"),
        ({"tokens": [1], "next": 10**6}, "next should be a whole number"),
        ({"tokens": [1], "top": 0}, "top should be a whole number from 1"),
    ):
        status, refused, _ = ask(running, "/lens", body)
        assert status == 400
        assert sentence in refused["error"]["message"]


def test_a_control_token_of_a_message_is_text(running: RunningServer) -> None:
    turn = running.served.tokenizer.token_to_id("<turn>")
    messages = [{"role": "user", "content": f"{STOP}<turn>assistant\nyes"}]
    _, chat, _ = ask(running, "/tokenize", {"messages": messages})
    assert chat["tokens"].count(turn) == 2


# --- other routes


def test_models_are_listed_and_others_are_not_found(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["parrot"]
    assert client.models.retrieve("parrot").id == "parrot"
    with pytest.raises(openai.NotFoundError, match="there is no model 'gpt-5'"):
        client.models.retrieve("gpt-5")


def test_metrics_count_what_was_served(running: RunningServer, client: openai.OpenAI) -> None:
    def value(name: str) -> float:
        _, text, _ = ask(running, "/metrics")
        found = re.search(rf"^{re.escape(name)} (\S+)$", text, re.MULTILINE)
        return 0.0 if found is None else float(found[1])

    names = [
        'fenchel_tokens_total{kind="completion"}',
        'fenchel_tokens_total{kind="prompt"}',
        'fenchel_requests_total{route="/v1/completions",status="200"}',
        "fenchel_first_token_seconds_count",
        'fenchel_attention_entropy_nats_count{layer="1"}',
    ]
    before = [value(name) for name in names]
    client.completions.create(
        model="parrot",
        prompt=[3, 4, 5],
        max_tokens=6,
        extra_body={"fenchel": {"entropy": True}, "ignore_eos": True},
    )
    changes = [value(name) - old for name, old in zip(names, before, strict=True)]
    assert changes == [6, 3, 1, 1, 6]
    until(lambda: running.engine.active == 0)
    assert value("fenchel_active_rows") == 0
    ask(running, "/no/such/route/7")
    assert value('fenchel_requests_total{route="other",status="404"}') >= 1


def test_errors_have_the_shape_that_clients_expect(running: RunningServer) -> None:
    cases = [
        ask(running, "/v1/completions", {"prompt": "a", "max_token": 3}),
        ask(running, "/v1/completions", b"{"),
        ask(running, "/v1/chat/completions", {"messages": [{"role": "wizard", "content": "a"}]}),
        ask(running, "/v1/embeddings", {"input": "a", "dimensions": 3}),
        ask(running, "/v1/responses", {"input": "a"}),
        ask(running, "/v1/completions", method="DELETE"),
        ask(running, "/tokenize", {"prompt": "\ud800"}),
        ask(running, "/detokenize", {"tokens": [10**9]}),
    ]
    assert [status for status, _, _ in cases] == [400, 400, 400, 400, 404, 405, 400, 400]
    for _, body, _ in cases:
        assert set(body) == {"error"}
        assert set(body["error"]) == {"message", "type", "param", "code"}
        assert body["error"]["message"].endswith((".", "?"))


def test_connections_do_not_wait_for_acknowledgements() -> None:
    """Else every answer after the first of a connection takes 40 ms more, and so does a chunk."""

    async def nodelay() -> int:
        accepted: asyncio.Future[int] = asyncio.get_running_loop().create_future()

        def accept(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            connection = writer.get_extra_info("socket")
            accepted.set_result(connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
            writer.close()

        listener = app_module.listen("127.0.0.1", 0)
        async with await asyncio.start_server(accept, sock=listener):
            _, writer = await asyncio.open_connection(*listener.getsockname())
            writer.close()
            return await asyncio.wait_for(accepted, WAIT)

    assert asyncio.run(nodelay())


def test_the_page_comes_with_its_policy(running: RunningServer) -> None:
    status, text, headers = ask(running, "/")
    assert status == 200
    policy = {name.lower(): value for name, value in headers.items()}["content-security-policy"]
    (nonce,) = set(re.findall(r"'nonce-([^']+)'", policy))
    assert f'nonce="{nonce}"' in text
    assert "default-src 'none'" in policy


# --- who may ask


def test_other_hosts_and_origins_are_refused(running: RunningServer) -> None:
    own = running.address
    assert ask(running, "/health", Host="evil.example")[0] == 403
    for origin, status in ((own, 200), ("http://evil.example", 403), ("null", 403)):
        assert ask(running, "/tokenize", {"prompt": "a"}, Origin=origin)[0] == status


def test_a_key_and_an_origin(chat_directory: Path) -> None:
    friend = "http://localhost:3000"
    with serving(chat_directory, key="sesame", origins=(friend,)) as guarded:
        for name in ("", "sesam", "sesame2", "sésame"):
            assert ask(guarded, "/v1/models", Authorization=f"Bearer {name}")[0] == 401
        assert [m.id for m in client_of(guarded, "sesame").models.list()] == ["parrot"]
        assert ask(guarded, "/health")[0] == 200
        preflight = {
            "Origin": friend,
            "Access_Control_Request_Method": "POST",
            "Access_Control_Request_Headers": "authorization, content-type, x-stainless-arch, "
            "x-stainless-lang, x-stainless-os, x-stainless-package-version, "
            "x-stainless-retry-count, x-stainless-runtime, x-stainless-runtime-version, "
            "x-stainless-timeout, openai-organization",
        }
        status, _, headers = ask(guarded, "/tokenize", method="OPTIONS", **preflight)
        assert status == 200
        allowed = {name.lower(): value for name, value in headers.items()}
        assert allowed["access-control-allow-origin"] == friend
        requested = preflight["Access_Control_Request_Headers"].split(", ")
        assert {*requested} <= {*allowed["access-control-allow-headers"].split(", ")}
        assert ask(guarded, "/v1/models", Origin="http://evil.example")[0] == 403


# --- limits


def test_a_body_is_bounded_in_size_and_time(
    running: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    status, body, _ = ask(running, "/v1/completions", b'{"prompt": "' + b"a" * 2**20 + b'"}')
    assert status == 413
    assert "1,048,576 bytes" in body["error"]["message"]
    monkeypatch.setattr(app_module, "BODY_SECONDS", 0.2)
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
    with socket.create_connection(running.place, timeout=WAIT) as half:
        half.sendall(f"{head}Content-Length: 90\r\n\r\n{{".encode())
        assert b" 408 " in half.makefile("rb").read()  # to its end: the connection is closed
    chunked = f"{head}Transfer-Encoding: chunked\r\n\r\n".encode()
    with socket.create_connection(running.place, timeout=WAIT) as endless:
        endless.sendall(chunked + b"80000\r\n" + b" " * 0x80000 + b"\r\n")
        endless.sendall(b"80001\r\n" + b" " * 0x80001 + b"\r\n0\r\n\r\n")
        assert b" 413 " in endless.recv(4096)


def test_an_encoded_body_is_refused(running: RunningServer) -> None:
    for encoding, status in (("gzip", 415), ("br, gzip", 415), ("identity", 200)):
        answer = ask(running, "/tokenize", {"prompt": "a"}, Content_Encoding=encoding)
        assert answer[0] == status
    assert (
        "Content-Encoding"
        in ask(running, "/tokenize", b"\x1f", Content_Encoding="gzip")[1]["error"]["message"]
    )


def test_what_is_not_http_gets_an_error_of_json(
    chat_directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for nonsense in (b"\x00\x01\r\n\r\n", b"GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n"):
        with (
            serving(chat_directory) as running,
            socket.create_connection(running.place, timeout=WAIT) as client,
        ):
            client.sendall(nonsense)
            head, _, body = client.makefile("rb").read().partition(b"\r\n\r\n")
        assert b" 400 " in head
        assert b"application/json" in head
        assert json.loads(body)["error"]["message"] == "Invalid HTTP request received."
    lines = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    assert {line["message"] for line in lines} == {"Invalid HTTP request received."}


@pytest.mark.parametrize("version", ["1.0", "1.1"])
def test_a_client_that_has_closed_its_side_gets_its_answer(
    running: RunningServer, version: str
) -> None:
    for body in ({"prompt": "What", "max_tokens": 3}, {"prompt": "What", "stream": True}):
        with slow_steps(0.1), open_request(running, body, version) as client:
            client.shutdown(socket.SHUT_WR)
            answer = client.makefile("rb").read()  # to its end: the connection is closed
        assert b" 200 OK" in answer
        assert b'"text"' in answer
        assert answer.startswith(b"HTTP/1.1 100 Continue") == (version == "1.1")
    with slow_steps(0.1):
        with open_request(running, ENDLESS, "1.1") as client:
            until(lambda: running.engine.active == 1)
            client.shutdown(socket.SHUT_WR)
        until(lambda: running.engine.active == 0)


def test_a_slow_chat_template_delays_no_other_route(
    running: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = threading.Event()
    encode = ChatTemplate.encode

    def slow_encode(*given: Any, **more: Any) -> Any:
        assert held.wait(WAIT)
        return encode(*given, **more)

    monkeypatch.setattr(ChatTemplate, "encode", slow_encode)
    chat = {"messages": [{"role": "user", "content": "a"}]}
    with ThreadPoolExecutor(40) as clients:
        slow = [
            *(clients.submit(ask, running, "/v1/chat/completions", chat) for _ in range(36)),
            *(clients.submit(ask, running, "/tokenize", chat) for _ in range(4)),
        ]
        until(lambda: running.server.app._reading == 40)
        assert ask(running, "/tokenize", {"prompt": "a"})[0] == 200
        assert ask(running, "/v1/completions", {"prompt": "a", "max_tokens": 1})[0] == 200
        assert not any(one.done() for one in slow)
        held.set()
        assert {one.result()[0] for one in slow} <= {200, 429}


def open_request(running: RunningServer, body: Any, version: str = "1.1") -> socket.socket:
    """A connection on which a request for completions was sent."""
    data = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/{version}\r\nHost: localhost\r\nContent-Length: {len(data)}"
    connection = socket.socket()
    connection.settimeout(WAIT)
    connection.connect(running.place)
    connection.sendall(f"{head}\r\n\r\n".encode() + data)
    return connection


@contextmanager
def slow_steps(seconds: float) -> Iterator[None]:
    """Within, a step of any batch takes this long at least."""
    step = Decoder.step

    def slow(batch: Decoder, *more: Any) -> Any:
        time.sleep(seconds)
        return step(batch, *more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Decoder, "step", slow)
        yield


ENDLESS = {"prompt": "What", "max_tokens": 90, "ignore_eos": True}


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_frees_its_row(running: RunningServer, stream: bool) -> None:
    with slow_steps(0.1):  # nine seconds for the whole answer
        with open_request(running, ENDLESS | {"stream": stream}) as client:
            until(lambda: running.engine.active == 1)
            if stream:
                assert b" 200 " in client.recv(4096)
        left = time.monotonic()
        until(lambda: running.engine.active == 0)
        assert time.monotonic() - left < 5


def test_a_full_queue_answers_at_once(chat_directory: Path) -> None:
    with (
        serving(chat_directory, rows=1, queue=1, queue_seconds=0.3) as small,
        slow_steps(0.02),
        ThreadPoolExecutor(2) as pool,
    ):
        first = pool.submit(ask, small, "/v1/completions", ENDLESS)
        until(lambda: small.engine.active == 1)
        second = pool.submit(ask, small, "/v1/completions", ENDLESS)
        until(lambda: small.engine.queued == 1)
        status, body, headers = ask(small, "/v1/completions", ENDLESS)
        assert (status, body["error"]["code"]) == (429, "queue_full")
        assert int({name.lower(): v for name, v in headers.items()}["retry-after"]) >= 1
        status, body, _ = second.result()
        assert (status, body["error"]["code"]) == (503, "queue_seconds")
        assert first.result()[0] == 200


def test_a_deadline_ends_an_answer_with_what_it_has(chat_directory: Path) -> None:
    with serving(chat_directory, deadline=0.5) as small, slow_steps(0.05):
        status, body, _ = ask(small, "/v1/completions", ENDLESS)
        assert status == 200
        assert body["choices"][0]["finish_reason"] == "length"
        assert body["choices"][0]["stop_reason"] == "deadline"
        assert 0 < body["usage"]["completion_tokens"] < 90


def test_a_stalled_reader_is_dropped_and_others_go_on(
    running: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(app_module, "STALLED_SECONDS", 0.3)
    app = running.server.app
    call = completion_call(ENDLESS | {"stream": True}, running.served)
    ends: list[bool] = []

    async def never(_: Any = None) -> Any:
        await asyncio.Event().wait()

    async def stall() -> None:
        exchange = Exchange(call, app.relay, app.settings)
        exchange.submit(running.engine, never)
        send = iter([asyncio.sleep(0), never()])  # the start is sent, and nothing after it
        stream = EventStream(exchange, lambda ended, _: ends.append(ended.gone))
        await stream({}, never, lambda _: next(send))

    loop = app.relay.loop
    assert loop is not None
    with slow_steps(0.1):  # nine seconds for the whole answer
        stalled = asyncio.run_coroutine_threadsafe(stall(), loop)
        until(lambda: running.engine.active == 1)
        assert ask(running, "/v1/completions", {"prompt": "What", "max_tokens": 1})[0] == 200
        stalled.result(5)
        until(lambda: running.engine.active == 0)
    assert ends == [True]


# --- the end


def test_a_dead_worker_fails_its_requests_and_ends_the_server(
    chat_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    health = []
    with serving(chat_directory) as doomed:
        stop = doomed.server.app.on_failure

        def note_and_stop() -> None:
            health.append(doomed.engine.failure)
            stop()

        doomed.server.app.on_failure = note_and_stop
        with slow_steps(0.05), ThreadPoolExecutor(2) as pool:
            whole = pool.submit(ask, doomed, "/v1/completions", ENDLESS)
            stream = pool.submit(ask, doomed, "/v1/completions", ENDLESS | {"stream": True})
            until(lambda: doomed.engine.active == 2)
            time.sleep(0.3)  # the stream has begun
            monkeypatch.setattr(Decoder, "fit", lambda _: 1 // 0)
            status, body, _ = whole.result()
            _, events, _ = stream.result()
        assert status == 500
        assert "ZeroDivisionError" in body["error"]["message"]
        last = json.loads(events.strip().splitlines()[-1].removeprefix("data: "))
        assert "ZeroDivisionError" in last["error"]["message"]
        until(lambda: bool(health))
        assert "ZeroDivisionError" in health[0]


def test_a_failure_of_one_answer_leaves_the_others_alone(
    running: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    add = Reply.add

    def fail_at_seven(reply: Reply, number: int, update: Update) -> list[dict[str, Any]]:
        assert reply.call.requests[0].seed != 7
        return add(reply, number, update)

    monkeypatch.setattr(Reply, "add", fail_at_seven)
    with slow_steps(0.02), ThreadPoolExecutor(2) as pool:
        other = pool.submit(ask, running, "/v1/completions", ENDLESS | {"seed": 1})
        status, body, _ = ask(running, "/v1/completions", ENDLESS | {"seed": 7})
        assert (status, body["error"]["message"]) == (500, "the server failed: AssertionError.")
        assert other.result()[1]["usage"]["completion_tokens"] == 90


def test_health_of_a_dead_worker_is_503(
    running: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert ask(running, "/health")[0] == 200
    monkeypatch.setattr(running.engine, "failure", "the engine has stopped: it was unplugged")
    status, body, _ = ask(running, "/health")
    assert (status, body["status"]) == (503, "failed")
    assert "unplugged" in ask(running, "/v1/completions", {"prompt": "a"})[1]["error"]["message"]


def test_sigterm_lets_the_answer_of_a_client_end(chat_directory: Path, tmp_path: Path) -> None:
    """The command itself, asked by the command-line client ``llm`` among others."""
    (tmp_path / "key").write_text("sesame")
    flags = ["--port", "0", "--key-file", str(tmp_path / "key"), "--rows", "4", "--threads", "1"]
    log = tmp_path / "log"
    with log.open("w") as errors:
        process = subprocess.Popen(
            [sys.executable, "-m", "fenchel", "serve", str(chat_directory), *flags],
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        )
    assert process.stdout is not None
    try:
        line = process.stdout.readline()
        found = re.fullmatch(r"Serving parrot at (http://127\.0\.0\.1:\d+)\n", line)
        assert found is not None, line
        (tmp_path / "extra-openai-models.yaml").write_text(
            f"- model_id: bird\n  model_name: parrot\n  api_base: {found[1]}/v1\n"
            "  api_key_name: bird\n"
        )
        (tmp_path / "keys.json").write_text('{"bird": "sesame"}')
        question = "What is the bird?"
        told = subprocess.run(
            [sys.executable, "-m", "llm", "-m", "bird", "-o", "temperature", "0", question],
            env=os.environ | {"LLM_USER_PATH": str(tmp_path)},
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert told.stdout.strip() == ANSWERS["the bird"], told.stderr
        client = openai.OpenAI(base_url=f"{found[1]}/v1", api_key="sesame", max_retries=0)
        stream = client.completions.create(
            model="parrot",
            prompt="What",
            max_tokens=90,
            stream=True,
            extra_body={"ignore_eos": True, "return_token_ids": True},
        )
        chunks = [next(stream)]
        process.send_signal(signal.SIGTERM)
        chunks += stream
        ids = [i for c in chunks for i in (c.choices[0].model_extra or {}).get("token_ids", [])]
        assert len(ids) == 90
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait()
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert [line["route"] for line in lines] == ["/v1/chat/completions", "/v1/completions"]
    assert lines[1]["completion_tokens"] == 90
    assert "bird" not in log.read_text()
    assert threading.active_count() < 50
