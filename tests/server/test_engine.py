"""fenchel/server/engine.py: requests served together are those served alone."""

import gc
import threading
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from fenchel.data import TextTokenizer, train_tokenizer
from fenchel.generation import Decoder, Request, Sampling, Token, Update, generate
from fenchel.generation.attention_trace import TraceAttention, TraceSettings, trace_text
from fenchel.generation.fused_step import PendingTokens
from fenchel.generation.scheduler import Job, TurnFacts
from fenchel.model import ModelConfig, Transformer
from fenchel.server.engine import Engine, QueueFull, RequestFacts
from tests.generation.conftest import run_and_keep

CONTEXT, LONG, WAIT = 48, 300, 30.0
GREEDY = Sampling(temperature=0.0)


@pytest.fixture(scope="module")
def tokenizer() -> TextTokenizer:
    return train_tokenizer(["the sea shells, the shore; größer 東京 🐚\n" * 9], 300)


@pytest.fixture(scope="module")
def model(tokenizer: TextTokenizer) -> Transformer:
    torch.manual_seed(0)
    config = ModelConfig(
        vocabulary=tokenizer.vocabulary_size,
        context=CONTEXT,
        width=32,
        heads=4,
        kv_heads=2,
        layers=2,
        initial="normal",
        initial_std=0.3,
    )
    return Transformer(config).eval()


@pytest.fixture(scope="module")
def long_model(model: Transformer) -> Transformer:
    return model.with_context(LONG)


class Result:
    """The updates of a request, and when it ended."""

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
    def prompt(self) -> tuple[Token, ...]:
        (prompt,) = [update.prompt for update in self.updates if update.prompt is not None]
        return prompt

    @property
    def finish(self) -> str | None:
        return self.updates[-1].finish


Serve = Callable[..., Engine]


@pytest.fixture
def serve(model: Transformer, tokenizer: TextTokenizer) -> Iterator[Serve]:
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


def ask(engine: Engine, asked: Request) -> tuple[Job, Result]:
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
        frequency_penalty=s.frequency_penalty,
        stop=tuple(asked.stop_ids),
        seed=asked.seed,
    )
    return ids[0, len(asked.prompt) :].tolist()


def draw(count: int, seed: int) -> Iterator[Request]:
    generator = torch.Generator().manual_seed(seed)

    def number(low: int, high: int) -> int:
        return int(torch.randint(low, high, (1,), generator=generator))

    for i in range(count):
        prompt: Tensor = torch.randint(256, (number(1, CONTEXT),), generator=generator)
        penalties = {"repetition_penalty": 1.0 + i % 3, "frequency_penalty": 0.5 * (i % 4)}
        sampling = GREEDY if i % 2 else Sampling(top_p=0.9, **penalties)
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


def test_with_invariant_load_changes_no_bit(serve: Serve) -> None:
    """Neither a token that is drawn nor a log-probability, alone or among others, in any row."""
    engine = serve(rows=6, invariant=True)
    asked = [replace(one, logprobs=3, prompt_logprobs=2) for one in draw(7, seed=4)]
    singly = [ask(engine, one)[1].wait() for one in asked]
    together = [ask(engine, one)[1] for one in (*asked[::-1], *asked)][len(asked) :]
    for one, other in zip(singly, together, strict=True):
        assert one.tokens == other.wait().tokens
        assert one.prompt == other.prompt


@pytest.fixture
def recorded(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> Serve:
    """Engines with recorded steps, which are the steps themselves where there is no GPU."""

    def decoder(*model: Any, **settings: Any) -> Decoder:
        return Decoder(*model, **settings, record=run_and_keep)

    monkeypatch.setattr("fenchel.server.engine.Decoder", decoder)
    return lambda **settings: serve(**{"step": "graph", **settings})


def test_recorded_steps_serve_what_generate_gives(recorded: Serve, model: Transformer) -> None:
    """Drawn, greedy and with penalties, with and without stops, beside any others."""
    engine = recorded()
    asked = list(draw(24, seed=2))
    asked[5] = replace(asked[5], stop_ids=frozenset(alone(model, asked[5])[2:3]))
    results = [ask(engine, one)[1] for one in asked]
    for one, result in zip(asked, results, strict=True):
        assert result.wait().ids == alone(model, one)
    assert results[5].finish == "stop"


def test_recorded_draws_depend_on_the_request_alone(recorded: Serve) -> None:
    """By settings of its own, whatever others need: numbers, penalties or nothing but tokens."""
    engine, settings = recorded(), [{}, {"top_p": 0.8}, {"top_k": 5}, {"temperature": 0.5}]
    asked = [
        replace(one, sampling=Sampling(**settings[i % 4]), max_new_tokens=12)
        for i, one in enumerate(draw(8, seed=6))
    ]
    singly = [ask(engine, one)[1].wait() for one in asked]
    others = [replace(one, logprobs=2) for one in draw(8, seed=3)]
    pairs = zip(asked, others, strict=True)
    together = [[ask(engine, one)[1] for one in pair] for pair in pairs]
    assert [one.ids for one in singly] == [one.wait().ids for one, _ in together]
    assert all(token.logprob is not None for _, other in together for token in other.wait().tokens)
    assert len({tuple(one.ids) for one in singly}) == len(asked)


def test_a_recorded_step_launches_the_next_before_its_tokens_are_read(
    recorded: Serve, model: Transformer, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []
    launch, wait = Decoder.launch, PendingTokens.wait
    monkeypatch.setattr(Decoder, "launch", lambda *a: (events.append("launch"), launch(*a))[1])
    monkeypatch.setattr(PendingTokens, "wait", lambda *a: (events.append("wait"), wait(*a))[1])
    asked = request(5, 6, max_new_tokens=5)
    assert ask(recorded(), asked)[1].wait().ids == alone(model, asked)
    assert events == ["launch", "launch", "wait", "launch", "wait", "launch", "wait", "wait"]


def test_text_comes_as_it_is_certain_and_ends_before_a_stop(
    serve: Serve, tokenizer: TextTokenizer
) -> None:
    engine, drawn = serve(), Sampling(temperature=1.5)
    free = ask(engine, request(5, max_new_tokens=40, sampling=drawn, seed=3))[1].wait()
    assert free.text == tokenizer.decode(free.ids)
    assert any(not token.text for token in free.tokens)  # part of a character
    at = next(i for i in range(4, 30) if len(free.tokens[i].text) > 1)
    stop = free.tokens[at].text[1:] + free.tokens[at + 1].text[:1]  # ends inside a token
    settings = {"max_new_tokens": 40, "sampling": drawn, "seed": 3}
    cut = ask(engine, request(5, stop_strings=(stop,), **settings))[1].wait()
    assert cut.finish == "stop"
    assert cut.text == free.text[: free.text.index(stop)]
    stop_id = free.ids[9]
    ended = ask(engine, request(5, stop_ids=frozenset({stop_id}), **settings))[1].wait()
    assert ended.finish == "stop"
    assert ended.ids == free.ids[: free.ids.index(stop_id) + 1]


@pytest.mark.parametrize("n", [1, 2, 129, LONG])
def test_a_prompt_is_scored_in_chunks(n: int, serve: Serve, long_model: Transformer) -> None:
    ids = torch.randint(256, (n,), generator=torch.Generator().manual_seed(n)).tolist()
    engine = serve(long_model)
    scored = request(*ids, max_new_tokens=0, prompt_logprobs=2)
    result, more = ask(engine, scored)[1], ask(engine, replace(scored, max_new_tokens=1))[1]
    with torch.no_grad():
        log_p = torch.log_softmax(deepcopy(long_model).double()(torch.tensor([ids]))[0], -1)
    assert result.wait().finish == "length"
    assert not result.tokens
    assert result.prompt == more.wait().prompt
    assert [token.id for token in result.prompt] == ids
    assert (result.prompt[0].logprob, result.prompt[0].top) == (None, ())
    for t, token in enumerate(result.prompt[1:]):
        assert token.logprob == pytest.approx(float(log_p[t, token.id]), abs=1e-4)
        wanted = log_p[t].topk(2)
        assert [i for i, _ in token.top] == wanted.indices.tolist()
        assert [p for _, p in token.top] == pytest.approx(wanted.values.tolist(), abs=1e-4)
    assert more.ids == [int(log_p[-1].argmax())]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_prompt_has_its_own_scores_and_penalties_whatever_is_read_with_it(
    dtype: torch.dtype, serve: Serve, model: Transformer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """float32 packs prompts, and float64 pads them with token 0."""
    served = deepcopy(model).to(dtype)
    with torch.no_grad():
        z = served(torch.tensor([[5, 6, 7]]))[0, -1]
    enough = float(z.max() - z[0]) + 0.01  # a penalty of token 0 would decide against it
    penalised = Sampling(temperature=0.0, repetition_penalty=3.0, logit_bias=((0, enough),))
    scored = request(5, 6, 7, max_new_tokens=0, prompt_logprobs=1)
    wanted = ask(serve(served), scored)[1].wait().prompt
    engine = serve(served)
    gate = Gate(engine, monkeypatch)
    ask(engine, request(9, max_new_tokens=2))  # holds the worker while the others arrive
    longer = request(*range(20, 40))
    first, _, second, _ = [
        ask(engine, one)[1]
        for one in (scored, longer, request(5, 6, 7, sampling=penalised), longer)
    ]
    gate.open(60)
    assert [token.id for token in first.wait().prompt] == [5, 6, 7]
    for token, other in zip(first.prompt[1:], wanted[1:], strict=True):
        assert token.logprob == pytest.approx(other.logprob, abs=1e-4)
    assert second.wait().ids[0] == 0


def test_log_probabilities_are_those_before_any_setting(serve: Serve, model: Transformer) -> None:
    sampling = Sampling(temperature=0.3, top_k=2, frequency_penalty=1.0)
    result = ask(serve(), request(9, 4, logprobs=1, sampling=sampling, seed=2))[1].wait()
    ids = [9, 4, *result.ids]
    with torch.no_grad():
        log_p = torch.log_softmax(model(torch.tensor([ids]))[0, 1:], -1)
    for row, token in zip(log_p, result.tokens, strict=False):
        assert token.logprob == pytest.approx(float(row[token.id]), abs=1e-4)
        assert [i for i, _ in token.top] == [int(row.argmax())]
    assert all(dict(t.top).get(t.id, t.logprob) == t.logprob for t in result.tokens)


@pytest.mark.parametrize("step", ["auto", "graph"])
def test_the_attention_of_a_request_is_traced_while_others_run(
    step: str, recorded: Serve, model: Transformer
) -> None:
    settings = TraceSettings(entropy=True, attention=TraceAttention(top=3))
    engine = recorded(step=step)
    asked = request(5, 6, 7, trace=settings)
    results = [ask(engine, one)[1] for one in (*draw(3, seed=8), asked, *draw(3, seed=9))]
    result = results[3].wait()
    wanted = trace_text(model, [5, 6, 7, *result.ids], 3, settings)
    assert len(result.tokens) == len(wanted) == 8
    for token, trace in zip(result.tokens, wanted, strict=True):
        assert token.trace is not None
        assert token.trace.p == pytest.approx(trace.p, rel=1e-4)
        for one, other in zip(token.trace.layers, trace.layers, strict=True):
            assert one.entropy == pytest.approx(other.entropy, abs=1e-4)
            assert one.read is not None
            assert other.read is not None
            assert dict(one.read.top) == pytest.approx(dict(other.read.top), abs=1e-4)
    assert all(token.trace is None for token in results[0].wait().tokens)


class Gate:
    """Holds every step of a batch until it is opened, and can make the next one fail."""

    def __init__(self, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
        self.steps = threading.Semaphore(0)
        self.error: Exception | None = None
        self.made = threading.Semaphore(0)
        step = engine.decoder.step

        def held(*observe: Any) -> Tensor:
            assert self.steps.acquire(timeout=WAIT)
            if self.error is not None:
                raise self.error
            self.made.release()
            return step(*observe)

        monkeypatch.setattr(engine.decoder, "step", held)

    def open(self, steps: int = 1) -> None:
        self.steps.release(steps)

    def wait(self) -> None:
        assert self.made.acquire(timeout=WAIT)


def test_a_cancelled_request_frees_its_row_at_the_next_step(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = serve(rows=1)
    gate = Gate(engine, monkeypatch)
    job, first = ask(engine, request(1, max_new_tokens=40))
    waiting, second = ask(engine, request(2, max_new_tokens=40))
    _, third = ask(engine, request(3, max_new_tokens=3))
    gate.open()
    gate.wait()
    assert job.left_queue
    assert not waiting.left_queue
    engine.cancel(job)
    engine.cancel(waiting)
    gate.open()  # the step that runs while both are cancelled
    gate.wait()
    assert first.wait().finish == second.wait().finish == "cancelled"
    assert len(first.tokens) <= 3
    assert not second.tokens
    gate.open(40)
    assert third.wait().finish == "length"
    assert len(third.tokens) == 3


def test_a_failing_step_ends_every_request_with_an_error(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = serve(rows=2)
    gate = Gate(engine, monkeypatch)
    gate.error = RuntimeError("out of memory")
    results = [ask(engine, request(i, max_new_tokens=9))[1] for i in range(5)]
    gate.open()
    for result in results:
        assert result.wait().finish == "error"
        assert "out of memory" in result.updates[-1].error
    engine.close()
    assert not engine.alive
    assert not engine.ready
    assert "out of memory" in str(engine.failure)
    with pytest.raises(RuntimeError, match="out of memory"):
        ask(engine, request(1))


def test_logits_that_are_not_finite_end_their_own_request(
    serve: Serve, tokenizer: TextTokenizer
) -> None:
    """And leave nothing behind in the row for the next one."""
    torch.manual_seed(0)
    config = ModelConfig(
        vocabulary=tokenizer.vocabulary_size,
        context=CONTEXT,
        width=16,
        heads=2,
        layers=1,
        positions="learned",
    )
    model = Transformer(config).eval()
    with torch.no_grad():
        assert model.pos_embed is not None
        model.pos_embed.weight[9] = torch.nan
    engine = serve(model, rows=2)
    results = [ask(engine, request(1, 2, 3, max_new_tokens=n))[1] for n in (20, 4, 6, 20, 5)]
    assert [result.wait().finish for result in results] == [
        "error",
        "length",
        "length",
        "error",
        "length",
    ]
    assert "not finite" in results[0].updates[-1].error
    assert [len(result.tokens) for result in results] == [7, 4, 6, 7, 5]
    assert engine.alive


def test_a_failing_receiver_ends_its_own_request(serve: Serve) -> None:
    engine = serve()

    def fail(_: Update) -> None:
        raise OSError("the connection is closed")

    engine.submit(request(1, max_new_tokens=40), fail)
    assert len(ask(engine, request(2, max_new_tokens=9))[1].wait().tokens) == 9
    assert engine.alive


def storage_bytes(x: Tensor) -> int:
    """0 for a tensor without memory of its own: packed weights, wrappers of torch.func."""
    try:
        return x.untyped_storage().nbytes()
    except NotImplementedError:
        return 0


def test_thousands_of_requests_leave_memory_as_it_was(serve: Serve) -> None:
    engine = serve(queue=2000)

    def run(count: int) -> None:
        results = [ask(engine, request(i % 256, max_new_tokens=2))[1] for i in range(count)]
        for result in results:
            result.wait()

    def tensors() -> tuple[int, int]:
        gc.collect()
        sizes = [storage_bytes(x) for x in gc.get_objects() if type(x) is Tensor]
        return len(sizes), sum(sizes)

    run(50)
    before = tensors(), engine.decoder.cache.bytes, len(gc.get_objects())
    run(2000)
    after = tensors(), engine.decoder.cache.bytes, len(gc.get_objects())
    (count, size), cache, objects = after
    assert (count, cache) == (before[0][0], before[1])
    assert size < before[0][1] + 2000  # a step's tensors are as long as its rows; not 1 per request
    assert objects < before[2] + 200
    assert (engine.active, engine.queued) == (0, 0)


def test_close_finishes_what_was_accepted_or_ends_it(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = serve(rows=1)
    results = [ask(engine, request(i, max_new_tokens=9))[1] for i in range(3)]
    engine.close(WAIT)
    assert [result.finish for result in results] == ["length"] * 3
    assert not engine.alive
    assert engine.failure is None
    with pytest.raises(RuntimeError, match="does not run"):
        ask(engine, request(1))
    engine = serve(rows=1)
    gate = Gate(engine, monkeypatch)
    results = [ask(engine, request(i, max_new_tokens=9))[1] for i in range(3)]
    gate.open(2)
    gate.wait()
    closing = threading.Thread(target=engine.close, args=(0.0,))
    closing.start()
    gate.open(2)
    closing.join(WAIT)
    assert {result.wait().finish for result in results} == {"cancelled"}


@pytest.mark.parametrize(
    ("wrong", "match"),
    [
        ({"prompt": ()}, "at least one token"),
        ({"prompt": (1,) * (CONTEXT + 1)}, f"{CONTEXT + 1} tokens and the model reads {CONTEXT}"),
        ({"prompt": (10**9,)}, "ids run from"),
        ({"prompt": (-1,)}, "ids run from"),
        ({"max_new_tokens": 0}, "at least 1"),
        ({"logprobs": 21}, "0 to 20"),
        ({"prompt_logprobs": -1}, "0 to 20"),
        ({"sampling": Sampling(logit_bias=((10**6, 1.0),))}, "logit_bias names token"),
        ({"stop_strings": ("",)}, "empty"),
    ],
)
def test_a_request_that_cannot_be_served_is_refused_with_one_sentence(
    wrong: dict[str, Any], match: str, serve: Serve
) -> None:
    engine = serve()
    with pytest.raises(ValueError, match=match):
        ask(engine, replace(request(1), **wrong))
    assert ask(engine, request(*range(CONTEXT), max_new_tokens=5))[1].wait().finish == "length"


class Facts:
    """An observer that keeps its numbers."""

    def __init__(self) -> None:
        self.steps: list[TurnFacts] = []
        self.ends: list[RequestFacts] = []

    def on_step(self, facts: TurnFacts) -> None:
        self.steps.append(facts)

    def on_finish(self, request: Request, facts: RequestFacts) -> None:  # noqa: ARG002
        self.ends.append(facts)


def test_an_observer_gets_every_token_and_every_end(serve: Serve) -> None:
    facts = Facts()
    engine = serve(observer=facts)
    asked = list(draw(6, seed=3))
    results = [ask(engine, one)[1].wait() for one in asked]
    engine.close()
    assert sum(end.prompt_tokens for end in facts.ends) == sum(len(one.prompt) for one in asked)
    assert sum(step.prompt_tokens for step in facts.steps) <= sum(len(one.prompt) for one in asked)
    new = [len(result.tokens) for result in results]
    assert [end.new_tokens for end in facts.ends] == new
    assert sum(step.active for step in facts.steps) == sum(new) - len(new)  # less the first ones
    assert all(step.bucket >= step.active for step in facts.steps)
    for end in facts.ends:
        assert end.first_token_seconds is not None
        assert 0 <= end.queue_seconds <= end.first_token_seconds <= end.seconds


def test_a_full_queue_is_refused_at_once(serve: Serve) -> None:
    engine = serve(queue=0)
    with pytest.raises(QueueFull) as full:
        ask(engine, request(1))
    assert full.value.retry_after >= 1.0


def test_the_attention_of_a_few_requests_is_traced_at_once(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = serve(tracing=1)
    gate = Gate(engine, monkeypatch)
    traced = request(1, max_new_tokens=4, trace=TraceSettings(entropy=True))
    first = ask(engine, traced)[1]
    with pytest.raises(QueueFull, match="1 requests is traced"):
        ask(engine, traced)
    gate.open(9)
    first.wait()
    assert ask(engine, traced)[1].wait().finish == "length"
