"""Every feature of decoding through every way in: the same request, the same tokens."""

import threading
from collections.abc import Callable
from dataclasses import replace
from hashlib import sha256
from typing import Any

import pytest
import torch

from fenchel.choice import Hard
from fenchel.data import TextTokenizer
from fenchel.generation import (
    Conversation,
    Decoder,
    Emphasis,
    GenerationSettings,
    HeadChoice,
    Request,
    Sampling,
    Scheduler,
    Steering,
    Token,
    TraceAttention,
    TraceSettings,
    Update,
    draw,
    generate,
    stream,
    stream_text,
    updates,
)
from fenchel.generation.cpu_step import why_not_packed
from fenchel.generation.sampling import RowSampling, choice_seed, random_words, seed_key
from fenchel.model import Transformer
from fenchel.server.engine import Engine

Build = Callable[..., Transformer]
V, PROMPT, N, WAIT = 300, (5, 6, 7, 8, 5, 6, 7), 12, 60.0
DRAWN = Sampling(temperature=0.9, top_p=0.9)
FEATURES: dict[str, dict[str, Any]] = {
    "plain": {},
    "greedy": {"sampling": Sampling(temperature=0.0)},
    "log-probabilities": {"logprobs": 3},
    "attention": {"trace": TraceSettings(entropy=True, attention=TraceAttention(top=3))},
    "draft": {"draft": 4},
    "int8": {"cache": "int8"},
    "float16": {"cache": "float16"},
    "packed": {"step": "packed"},
    "bfloat16": {"dtype": torch.bfloat16},
    "windows": {"model": {"windows": (4, 0)}},
    "penalties": {"sampling": replace(DRAWN, repetition_penalty=0.2, frequency_penalty=-0.5)},
    "bias": {"sampling": replace(DRAWN, logit_bias=((9, 5.0),))},
    "past the context": {"model": {"context": 12}, "past_context": True},
    "end of the context": {"model": {"context": 12}, "past_context": False},
    "invariant": {"invariant": True},
    "alibi": {"model": {"positions": "alibi"}},
    "entmax": {"model": {"choice": "entmax"}},
    "steered": {"steering": {}},
    "budget per token": {"steering": {"budget": 0.05}},
    "emphasis": {"steering": {"vectors": {}, "emphasis": Emphasis(frozenset({1, 3}), 3.0)}},
    "heads": {"steering": {"heads": {(1, 1): HeadChoice(0.5), (2, 2): HeadChoice(1.0, Hard())}}},
    "emphasis and invariant": {
        "invariant": True,
        "steering": {"emphasis": Emphasis(frozenset({1, 3}), 3.0, heads=frozenset({1}))},
    },
    "steered past the context": {
        "model": {"context": 12},
        "past_context": True,
        "steering": {"budget": 0.05},
    },
    "steered and invariant": {"invariant": True, "steering": {"budget": 0.05}},
    "encoder-decoder": {
        "model": {"kind": "encoder-decoder", "positions": "buckets"},
        "source": (9, 8, 7, 6),
    },
}


class Call:
    """A model, settings and a prompt of one feature."""

    def __init__(self, feature: str, lively: Build, tokenizer: TextTokenizer) -> None:
        changes = dict(FEATURES[feature])
        shape = {"vocabulary": V, "context": 48, **changes.pop("model", {})}
        self.model = lively(**shape).to(changes.pop("dtype", torch.float32))
        self.source = changes.pop("source", None)
        self.prompt = PROMPT if self.source is None else (3,)
        self.tokenizer = tokenizer
        if "steering" in changes:
            draw = torch.Generator().manual_seed(2)
            vectors = {n: torch.randn(self.model.config.width, generator=draw) for n in (1, 2)}
            changes["steering"] = Steering(**{"vectors": vectors, **changes["steering"]})
        usual = {"max_new_tokens": N, "sampling": DRAWN, "seed": 11, "past_context": False}
        self.settings = GenerationSettings(**{**usual, **changes})

    @property
    def request(self) -> Request:
        return self.settings.request(self.prompt, source=self.source)


def text(tokens: list[Token], flush: str) -> str:
    return "".join(token.text for token in tokens) + flush


def through_generate(call: Call) -> list[Token]:
    found = [*updates(call.model, [call.request], call.settings, tokenizer=call.tokenizer)]
    return [token for update in found for token in update.tokens]


def through_stream(call: Call) -> list[Token]:
    source = None if call.source is None else torch.tensor([call.source])
    ids = torch.tensor([call.prompt])
    tokens = [int(t) for t in stream(call.model, ids, call.settings, source=source)]
    pieces = stream_text(
        call.model,
        call.tokenizer,
        ids[0],
        call.settings,
        source=None if source is None else source[0],
    )
    request = through_generate(call)
    assert "".join(pieces).startswith("".join(token.text for token in request))
    assert tokens == [token.id for token in request]
    return request


class Template:
    """A chat template that gives every conversation the ids of the call."""

    name = "test"

    def __init__(self, call: Call) -> None:
        self.ids = list(call.prompt if call.source is None else call.source)

    def encode(self, *_: Any, **__: Any) -> list[int]:
        return self.ids


def through_chat(call: Call) -> list[Token]:
    start = None if call.source is None else call.prompt[0]
    conversation = Conversation(
        call.model,
        call.tokenizer,
        Template(call),  # type: ignore[arg-type]
        call.settings,
        decoder_start=start,
    )
    return list(conversation.ask("Hello.", lambda _: None).tokens)


def through_serve(call: Call) -> list[Token]:
    settings = call.settings
    engine = Engine(
        call.model,
        call.tokenizer,
        rows=32 if settings.invariant else 4,
        invariant=settings.invariant,
        cache=settings.cache,
        step=settings.step,
    )
    engine.start()
    try:
        beside = [Receiver() for _ in range(2)]
        if call.source is None:  # other requests at the same time
            for seed, one in enumerate(beside):
                other = replace(call.request, prompt=(seed + 1,), trace=None, steering=None)
                engine.submit(other, one)
        result = Receiver()
        engine.submit(call.request, result)
        return result.wait()
    finally:
        engine.close(0.0)


class Receiver:
    """Collects the tokens of a request."""

    def __init__(self) -> None:
        self.tokens: list[Token] = []
        self.ended = threading.Event()
        self.error = ""

    def __call__(self, update: Update) -> None:
        self.tokens += update.tokens
        self.error = update.error
        if update.finish is not None:
            self.ended.set()

    def wait(self) -> list[Token]:
        assert self.ended.wait(WAIT)
        assert not self.error
        return self.tokens


DOORS = {"stream": through_stream, "chat": through_chat, "serve": through_serve}


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("feature", FEATURES)
def test_a_request_has_the_same_tokens_through_every_door(
    feature: str, door: str, lively: Build, tokenizer: TextTokenizer
) -> None:
    call = Call(feature, lively, tokenizer)
    if feature in ("packed", "bfloat16") and why_not_packed(call.model) is not None:
        pytest.skip("this torch has no oneDNN")
    wanted = through_generate(call)
    found = DOORS[door](call)
    expected = N if feature != "end of the context" else 12 - len(PROMPT) + 1
    if door == "chat" and feature == "end of the context":
        wanted, expected = wanted[:-1], expected - 1  # a conversation reads its whole answer
    assert len(wanted) == expected
    assert [token.id for token in found] == [token.id for token in wanted]
    for one, other in zip(found, wanted, strict=True):
        assert one.logprob == pytest.approx(other.logprob, abs=1e-3)
        assert len(one.top) == len(other.top) == (call.settings.logprobs or 0)
        assert (one.trace is None) == (other.trace is None) == (call.settings.trace is None)
        if one.trace is not None and other.trace is not None:
            pairs = zip(one.trace.layers, other.trace.layers, strict=True)
            assert all(a.entropy == pytest.approx(b.entropy, abs=1e-3) for a, b in pairs)


def test_the_features_differ_from_the_plain_call(lively: Build, tokenizer: TextTokenizer) -> None:
    """So that none of them is ignored by all doors alike."""
    ids = {
        feature: [token.id for token in through_generate(Call(feature, lively, tokenizer))]
        for feature in (
            *("plain", "greedy", "penalties", "bias", "windows", "alibi", "entmax"),
            *("steered", "budget per token", "emphasis"),
        )
    }
    assert len({tuple(one) for one in ids.values()}) == len(ids)


def test_a_prompt_that_shares_a_beginning_is_not_read_again(
    lively: Build, tokenizer: TextTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a conversation, in a server, and in calls that share a decoder."""
    model, read = lively(vocabulary=V, context=64), list[int]()
    settings = GenerationSettings(max_new_tokens=4, sampling=DRAWN, seed=1)
    original = Decoder.read

    def counted(decoder: Decoder, rows: Any, parts: Any, **keywords: Any) -> Any:
        read.append(sum(map(len, parts)))
        return original(decoder, rows, parts, **keywords)

    monkeypatch.setattr(Decoder, "read", counted)
    decoder = settings.decoder(model)
    first = [*stream(model, torch.tensor([PROMPT]), settings, decoder=decoder)]
    longer = torch.tensor([[*PROMPT, *map(int, first), 1, 2]])
    again = [*stream(model, longer, settings, decoder=decoder)]
    assert read == [7, 3]  # the last new token was drawn and not read
    assert [*stream(model, longer, settings)] == again

    read.clear()
    engine = Engine(model, tokenizer, rows=2)
    engine.start()
    try:
        for ids in (PROMPT, longer[0].tolist()):
            receiver = Receiver()
            engine.submit(settings.request(ids), receiver)
            receiver.wait()
    finally:
        engine.close(0.0)
    assert read == [7, 3]
    assert [token.id for token in receiver.tokens] == [int(token) for token in again]


@pytest.mark.parametrize("step", ["model", "cpu", "packed"])
def test_a_seed_draws_the_same_alone_and_among_31_others(step: str, lively: Build) -> None:
    """In float64, where rounding moves no draw; packed weights are in float32."""
    model = lively(vocabulary=V, context=40)
    if step == "packed":
        if why_not_packed(model) is not None:
            pytest.skip("this torch has no oneDNN")
    else:
        model = model.double()
    prompts = [torch.tensor([n % 7, *range(1 + n % 5)]) for n in range(32)]
    together = generate(model, prompts, max_new_tokens=9, seed=3, step=step)
    for number in (0, 13, 31):
        seed = choice_seed(3, number, 0)
        (alone,) = generate(model, [prompts[number]], max_new_tokens=9, seed=seed, step=step)
        assert torch.equal(alone, together[number])


def test_random_numbers_depend_on_seed_position_and_token_alone(device: str) -> None:
    """The same integers for one row and for many, on every device."""
    seeds, positions = torch.tensor([5, -1, 2**62]), torch.tensor([0, 7, 10**6])
    seeds = seed_key(seeds)
    together = random_words(seeds, positions, 101)
    there = random_words(seeds.to(device), positions.to(device), 101).cpu()
    assert torch.equal(together, there)
    for row in range(3):
        alone = random_words(seeds[row : row + 1], positions[row : row + 1], 1001)
        assert torch.equal(alone[0, :101], together[row])
    assert len(set(together.flatten().tolist())) == together.numel()


def test_only_the_first_choice_of_the_first_prompt_draws_by_the_seed_itself() -> None:
    digest = sha256(b"5 1 0").digest()
    assert choice_seed(5, 0, 0) == 5
    assert choice_seed(5, 1, 0) == int.from_bytes(digest[:8], "big") >> 1
    assert len({choice_seed(5, j, i) for j in range(4) for i in range(4)}) == 16


def test_an_invariant_call_has_the_steps_and_rows_of_a_server(lively: Build) -> None:
    settings = GenerationSettings(max_new_tokens=1, invariant=True)
    own, served = settings.decoder(lively()), Decoder(lively(), rows=32, invariant=True)
    assert (own.kind, own.buckets, own.chunk) == (served.kind, served.buckets, served.chunk)


def test_a_draw_does_not_depend_on_the_rows_beside_it() -> None:
    logits = torch.randn(32, 500, generator=torch.Generator().manual_seed(0))
    kinds = [Sampling(), DRAWN, Sampling(top_k=7), Sampling(temperature=0.0), Sampling(min_p=0.1)]
    rows = [(kinds[i % 5], i) for i in range(32)]
    numbers = torch.arange(32) * 3
    together = draw(logits, RowSampling.of(rows), numbers)
    for i, row in enumerate(rows):
        alone = draw(logits[i : i + 1], RowSampling.of([row]), numbers[i : i + 1])
        assert alone.item() == together[i].item()


def test_choices_of_one_prompt_read_it_once(
    lively: Build, tokenizer: TextTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, read = lively(vocabulary=V, context=64), list[int]()
    original = Decoder.read

    def counted(decoder: Decoder, rows: Any, parts: Any, **keywords: Any) -> Any:
        read.append(len(parts))
        return original(decoder, rows, parts, **keywords)

    monkeypatch.setattr(Decoder, "read", counted)
    scheduler = Scheduler(Decoder(model, rows=4), tokenizer)
    tokens: dict[int, list[int]] = {seed: [] for seed in range(3)}
    settings = GenerationSettings(max_new_tokens=5, sampling=DRAWN, seed=0)
    for seed, ids in tokens.items():
        request = replace(settings.request(PROMPT), seed=seed)
        scheduler.submit(request, lambda update, to=ids: to.extend(t.id for t in update.tokens))
    while scheduler.busy:
        scheduler.turn()
    assert read == [1]
    for seed, ids in tokens.items():
        drawn = {"max_new_tokens": 5, "seed": seed, "temperature": 0.9, "top_p": 0.9}
        alone = generate(model, torch.tensor([PROMPT]), **drawn)  # type: ignore[arg-type]
        assert ids == alone[0, len(PROMPT) :].tolist()


def test_choices_of_a_prompt_that_fills_the_context_have_rows_of_their_own(lively: Build) -> None:
    """The row of a request holds its own tokens, also after the newest ones were read again."""
    model = lively(vocabulary=V, context=len(PROMPT))
    settings = GenerationSettings(max_new_tokens=6, sampling=DRAWN, seed=0)
    scheduler = Scheduler(Decoder(model, rows=3))
    for seed in range(3):
        scheduler.submit(replace(settings.request(PROMPT), seed=seed), lambda _: None)
    checked = 0
    while scheduler.busy:
        scheduler.turn()
        for row, job in scheduler.jobs.items():
            assert row.ids == job.ids[row.left :][: row.length]
            checked += 1
    assert checked > 6
