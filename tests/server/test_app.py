"""fenchel/server/app.py and openai_api.py: the API as its clients use it."""

import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.server.conftest import ANSWERS, RunningServer


@pytest.fixture(scope="module")
def client(running: RunningServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{running.address}/v1", api_key="none", max_retries=0) as client:
        yield client


def post(
    running: RunningServer, path: str, body: Any, **headers: str
) -> tuple[int, dict[str, Any], dict[str, str]]:
    """Status, body and headers of an answer."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    request = urllib.request.Request(
        running.address + path, data=data, headers={"Content-Type": "application/json", **headers}
    )
    try:
        with urllib.request.urlopen(request, timeout=30) as response:
            return response.status, json.load(response), dict(response.headers)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error), dict(error.headers)


@pytest.mark.parametrize("thing", ANSWERS)
def test_a_chat_through_the_openai_client(client: openai.OpenAI, thing: str) -> None:
    answer = client.chat.completions.create(
        model="parrot",
        messages=[{"role": "user", "content": f"What is {thing}?"}],
        temperature=0,
    )
    assert answer.choices[0].message.content == ANSWERS[thing]
    assert answer.choices[0].finish_reason == "stop"


def test_a_stream_is_the_answer_in_pieces_with_its_usage(client: openai.OpenAI) -> None:
    chunks = list(
        client.chat.completions.create(
            model="parrot",
            messages=[{"role": "user", "content": "What is the bird?"}],
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    pieces = [c.choices[0].delta.content or "" for c in chunks if c.choices]
    assert "".join(pieces) == ANSWERS["the bird"]
    assert "\ufffd" not in "".join(pieces)
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "stop"
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert all(chunk.usage is None for chunk in chunks[:-1])


def test_an_unknown_field_is_refused_by_name(running: RunningServer) -> None:
    status, body, _ = post(running, "/v1/completions", {"prompt": "a", "max_token": 3})
    assert status == 400
    assert body["error"]["param"] == "max_token"
    assert "did you mean 'max_tokens'" in body["error"]["message"]
