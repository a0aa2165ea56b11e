"""fenchel/server/engine.py: requests served together are those served alone."""

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from torch import Tensor

from fenchel.data import train_tokenizer
from fenchel.generation import Sampling, generate
from fenchel.model import ModelConfig, Transformer
from fenchel.server.engine import Engine, QueueFull, Request, Ticket, Token, Update

CONTEXT, WAIT = 48, 30.0
GREEDY = Sampling(temperature=0.0)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_tokenizer(["the sea shells, the shore; größer 東京 🐚\n" * 9], 300)


@pytest.fixture(scope="module")
def model(tokenizer: Tokenizer) -> Transformer:
    torch.manual_seed(0)
    config = ModelConfig(
        vocabulary=tokenizer.get_vocab_size(),
        context=CONTEXT,
        width=32,
        heads=4,
        kv_heads=2,
        layers=2,
        initial="normal",
        initial_std=0.3,
    )
    return Transformer(config).eval()


class Result:
    """What a request was told, and when it ended."""

    def __init__(self) -> None:
        self.updates: list[Update] = []
        self.ended = threading.Event()

    def __call__(self, update: Update) -> None:
        self.updates.append(update)
        if update.finish is not None:
            self.ended.set()

    def wait(self) -> "Result":
        assert self.ended.wait(WAIT)
        return self

    @property
    def tokens(self) -> list[Token]:
        return [token for update in self.updates for token in update.tokens]

    @property
    def ids(self) -> list[int]:
        return [token.id for token in self.tokens]

    @property
    def text(self) -> str:
        return "".join(token.text for token in self.tokens) + self.updates[-1].flush

    @property
    def finish(self) -> str | None:
        return self.updates[-1].finish


Serve = Callable[..., Engine]


@pytest.fixture
def serve(model: Transformer, tokenizer: Tokenizer) -> Iterator[Serve]:
    """Engines that are closed after the test."""
    engines: list[Engine] = []

    def start(served: Transformer = model, **settings: Any) -> Engine:
        engine = Engine(served, tokenizer, **{"rows": 4, **settings})
        engines.append(engine)
        engine.start()
        return engine

    yield start
    for engine in engines:
        engine.close(0.0)


def request(*prompt: int, **settings: Any) -> Request:
    usual: dict[str, Any] = {"max_new_tokens": 8, "sampling": GREEDY, "seed": 0}
    return Request(prompt=prompt, **{**usual, **settings})


def ask(engine: Engine, asked: Request) -> tuple[Ticket, Result]:
    result = Result()
    return engine.submit(asked, result), result


def alone(model: Transformer, asked: Request) -> list[int]:
    """The new tokens of ``generate`` for a request."""
    s = asked.sampling
    ids = generate(
        model,
        torch.tensor([asked.prompt]),
        max_new_tokens=min(asked.max_new_tokens, CONTEXT - len(asked.prompt) + 1),
        temperature=s.temperature,
        top_p=s.top_p,
        repetition_penalty=s.repetition_penalty,
        stop=tuple(asked.stop_ids),
        generator=torch.Generator().manual_seed(asked.seed),
    )
    return ids[0, len(asked.prompt) :].tolist()


def draw(count: int, seed: int) -> Iterator[Request]:
    generator = torch.Generator().manual_seed(seed)

    def number(low: int, high: int) -> int:
        return int(torch.randint(low, high, (1,), generator=generator))

    for i in range(count):
        prompt: Tensor = torch.randint(256, (number(1, CONTEXT),), generator=generator)
        sampling = GREEDY if i % 2 else Sampling(top_p=0.9, repetition_penalty=1.0 + i % 3)
        yield request(
            *prompt.tolist(), max_new_tokens=number(1, 20), sampling=sampling, seed=number(0, 99)
        )


@pytest.mark.parametrize("invariant", [False, True])
def test_requests_of_many_lengths_get_what_generate_gives(
    invariant: bool, serve: Serve, model: Transformer
) -> None:
    engine = serve(invariant=invariant)
    asked = list(draw(24, seed=1))
    results = [ask(engine, one)[1] for one in asked]
    for one, result in zip(asked, results, strict=True):
        assert result.wait().ids == alone(model, one)
        assert result.finish == "length"


def test_a_full_queue_is_refused_at_once(serve: Serve) -> None:
    engine = serve(queue=0)
    with pytest.raises(QueueFull) as full:
        ask(engine, request(1))
    assert full.value.retry_after >= 1.0
