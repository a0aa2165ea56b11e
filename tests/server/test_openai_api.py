"""fenchel/server/openai_api.py: every field is obeyed or refused by its name."""

import json
from dataclasses import replace
from typing import Any

import pytest
import torch

from fenchel.choice import Hard
from fenchel.data import ChatTemplate, train_tokenizer
from fenchel.generation import HeadChoice, TraceAttention, TraceSettings
from fenchel.generation.scheduler import Token, Update
from fenchel.model import ModelConfig
from fenchel.server.openai_api import (
    CHAT_FIELDS,
    COMPLETION_FIELDS,
    REFUSED,
    UNUSED,
    ApiError,
    NamedDirection,
    Reply,
    ServedModel,
    TokenTexts,
    chat_call,
    completion_call,
    parse_body,
    tokenizer_info,
)


@pytest.fixture(scope="module")
def served() -> ServedModel:
    tokenizer = train_tokenizer(["the sea shells 東京\n" * 9], 300)
    return ServedModel(
        name="shells",
        config=ModelConfig(vocabulary=tokenizer.vocabulary_size, context=32, width=32),
        tokenizer=tokenizer,
        context=32,
        ends=(0,),
    )


def refusal(body: dict[str, Any], served: ServedModel) -> ApiError:
    with pytest.raises(ApiError) as raised:
        completion_call({"prompt": "the", **body}, served)
    return raised.value


@pytest.mark.parametrize("field", [*REFUSED, "promt", "__class__", "max_completion_tokens"])
def test_a_field_that_is_not_obeyed_is_refused_by_its_name(field: str, served: ServedModel) -> None:
    error = refusal({field: {"a": 1}}, served)
    assert error.status == 400
    assert error.param == field
    assert field in error.message


def test_null_is_absent_and_unused_fields_change_nothing(served: ServedModel) -> None:
    plain = completion_call({"prompt": "the", "seed": 1}, served)
    body = {"prompt": "the", "seed": 1, **dict.fromkeys(UNUSED, "x")}
    body |= {field: None for field in (*REFUSED, *COMPLETION_FIELDS) if field not in body}
    assert completion_call(body, served).requests == plain.requests


WRONG: list[tuple[str, list[Any]]] = [
    ("prompt", [3, {}, [], [[]], ["a", 1], [True], [[1, "a"]], ["a"] * 33, [1] * 33, [300], [-1]]),
    ("max_tokens", [0, -1, 33, 1.5, "3", True, 10**400]),
    ("temperature", [-1, "1", True, 1e999, 10**400, []]),
    ("top_p", [0, 1.1, -1]),
    ("top_k", [-2, 1.5]),
    ("min_p", [-0.1, 1.1]),
    ("repetition_penalty", [0, -1]),
    ("presence_penalty", [2.1, -2.1]),
    ("frequency_penalty", [3]),
    ("logit_bias", [[], {"a": 1}, {"1": 101}, {"300": 1}, {str(i): 0 for i in range(301)}]),
    ("seed", [2**63, 1.0, "1"]),
    ("n", [0, 9, "2"]),
    ("stop", ["", [""], ["a"] * 17, "a" * 257, 3]),
    ("stop_token_ids", [3, [300], [True], list(range(17))]),
    ("stream", [1, "yes"]),
    ("logprobs", [True, 21, -1]),
    ("echo", [1]),
    ("return_token_ids", [0]),
    ("ignore_eos", ["no"]),
    ("fenchel", [3, {"entropy": 1}, {"attention": {"top": 65}}, {"other": True}]),
    ("stream_options", [3, {"include_usage": True}]),
    ("model", [3]),
]


@pytest.mark.parametrize(
    ("field", "value"), [(field, value) for field, values in WRONG for value in values]
)
def test_a_wrong_value_is_refused_by_the_name_of_its_field(
    field: str, value: Any, served: ServedModel
) -> None:
    error = refusal({field: value}, served)
    assert error.status == 400
    assert str(error.param).startswith(field)
    assert len(error.message) < 400
    json.dumps(error.body())


def test_all_fields_have_a_wrong_value_here() -> None:
    assert {field for field, _ in WRONG} == set(COMPLETION_FIELDS)
    assert set(CHAT_FIELDS) - {field for field, _ in WRONG} == {
        *("messages", "max_completion_tokens", "top_logprobs")
    }


def test_another_model_is_not_found_unless_any_is_served(served: ServedModel) -> None:
    error = refusal({"model": "gpt-5"}, served)
    assert (error.status, error.code) == (404, "model_not_found")
    body = {"prompt": "a", "model": "gpt-5"}
    assert completion_call(body, replace(served, aliases=frozenset()))


def test_without_a_template_a_chat_is_refused(served: ServedModel) -> None:
    with pytest.raises(ApiError, match="no chat template; use /v1/completions"):
        chat_call({"messages": [{"role": "user", "content": "a"}]}, served)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"[]",
        b"\xff",
        b'{"a": NaN}',
        b'{"a": 1, "a": 2}',
        b'{"a": ' + b"[" * 16 + b"]" * 16 + b"}",
        b"[" * 100_000,
        b'{"a": ' + b"9" * 5000 + b"}",
    ],
)
def test_a_body_that_is_no_plain_object_is_refused(data: bytes) -> None:
    with pytest.raises(ApiError, match=r"^the body"):
        parse_body(data)


def test_a_body_may_nest_as_deep_as_the_limit() -> None:
    assert parse_body(b'{"a": ' + b"[" * 15 + b"]" * 15 + b"}")


def test_seeds_of_choices_differ_and_the_first_is_the_seed(served: ServedModel) -> None:
    call = completion_call({"prompt": ["the", "sea"], "n": 3, "seed": 5}, served)
    seeds = [request.seed for request in call.requests]
    assert seeds[0] == 5
    assert len(set(seeds)) == 6
    assert all(-(2**63) <= seed < 2**63 for seed in seeds)


def test_the_text_of_a_token_is_its_text_within_a_text(served: ServedModel) -> None:
    texts = TokenTexts(served.tokenizer)
    ids = served.tokenizer.encode("the sea")
    assert "".join(map(texts.text, ids)) == "the sea"
    assert texts.text(0) == "<|end|>"
    whole = [texts.bytes(id) for id in served.tokenizer.encode("東")]
    assert bytes(byte for part in whole for byte in part or []) == "東".encode()
    part = served.tokenizer.token_to_id("æ")
    assert texts.label(part) == "bytes:\\xe6"


def test_log_probabilities_carry_ids_with_return_token_ids(served: ServedModel) -> None:
    body = {"prompt": [3, 4], "echo": True, "logprobs": 2}
    scored = (Token(3, "", None), Token(4, "", -0.5, ((4, -0.5), (6, -1.0))))
    new = Token(5, "x", -1.5, ((7, -0.25), (5, -1.5)))
    for asked in (True, False):
        reply = Reply(completion_call({**body, "return_token_ids": asked}, served))
        reply.add(0, Update((new,), scored, "length"))
        (choice,) = reply.response()["choices"]
        scores = choice["logprobs"]
        assert len(scores["tokens"]) == len(scores["text_offset"]) == 3
        if not asked:
            assert "content" not in scores
            continue
        assert [one["id"] for one in scores["content"]] == [3, 4, 5]
        assert [one["logprob"] for one in scores["content"]] == [None, -0.5, -1.5]
        likeliest = [[other["id"] for other in one["top_logprobs"]] for one in scores["content"]]
        assert likeliest == [[], [4, 6], [7, 5]]


def test_a_refusal_of_the_template_does_not_name_its_path(served: ServedModel) -> None:
    source = "{% if messages[0].content == 'b' %}{{ raise_exception('no b') }}{% endif %}a"
    template = ChatTemplate(source, {}, "the chat template of /home/me/model")
    body = {"messages": [{"role": "user", "content": "b"}]}
    with pytest.raises(ApiError, match=r"^the chat template refuses this conversation: no b\.$"):
        chat_call(body, replace(served, template=template))


def test_a_client_that_renders_the_template_itself_gets_the_tokens_it_names(
    served: ServedModel,
) -> None:
    """A checkpoint may end documents by one token and turns by its eos_token."""
    tokens = {"bos_token": "<begin>", "eos_token": "<turn>", "sep_token": "<next>"}
    template = ChatTemplate("{{ eos_token }}{{ sep_token }}", tokens)
    info = tokenizer_info(replace(served, template=template))
    assert {name: info[name] for name in tokens} == tokens
    assert info["chat_template"] == template.source
    assert "sep_token" not in tokenizer_info(replace(served, template=None))


@pytest.fixture(scope="module")
def steerable(served: ServedModel) -> ServedModel:
    kind = NamedDirection({1: torch.ones(32), 2: torch.arange(32.0)}, 0.5)
    war = NamedDirection({2: -torch.ones(32)}, 2.0)
    return replace(served, directions={"kind": kind, "war": war})


@pytest.mark.parametrize(
    ("field", "strengths"),
    [
        ({}, {"kind": 0.5, "war": 2.0}),
        ({"steer": {}}, {}),
        ({"steer": {"kind": 1.5}}, {"kind": 1.5}),
        ({"steer": {"war": None}}, {"war": 2.0}),
        ({"steer": {"war": -1, "kind": 0.25}}, {"kind": 0.25, "war": -1.0}),
    ],
)
def test_a_request_has_the_directions_of_the_server_or_its_own_strengths(
    field: dict[str, Any], strengths: dict[str, float], steerable: ServedModel
) -> None:
    (request,) = completion_call({"prompt": "the", "fenchel": field}, steerable).requests
    wanted: dict[int, torch.Tensor] = {}
    for name, strength in strengths.items():
        for layer, v in steerable.directions[name].vectors.items():
            wanted[layer] = wanted.get(layer, 0.0) + strength * v
    assert (request.steering is None) == (not wanted)
    found = {} if request.steering is None else request.steering.vectors
    assert found.keys() == wanted.keys()
    for layer, v in wanted.items():
        torch.testing.assert_close(found[layer], v)


def test_words_are_emphasised_where_they_stand(served: ServedModel) -> None:
    field = {"emphasise": ["sea shells"], "emphasis": -2, "emphasis_layers": [1], "token_kl": 0.1}
    text = "the sea shells, the 東京 sea"
    (request,) = completion_call({"prompt": text, "fenchel": field}, served).requests
    assert request.steering is not None
    assert request.steering.budget == 0.1
    emphasis = request.steering.emphasis
    assert emphasis is not None
    assert (emphasis.bias, emphasis.layers, emphasis.texts) == (-2.0, {1}, ())
    chosen = served.tokenizer.decode([request.prompt[i] for i in sorted(emphasis.tokens)])
    assert chosen.strip() == "sea shells"
    every = {"emphasise": ["sea", "京"]}
    (request,) = completion_call({"prompt": text, "fenchel": every}, served).requests
    assert request.steering is not None
    assert request.steering.emphasis is not None
    marked = sorted(request.steering.emphasis.tokens)
    assert served.tokenizer.decode([request.prompt[i] for i in marked]).split()[-1] == "sea"
    assert "京" in served.tokenizer.decode([request.prompt[i] for i in marked])


@pytest.fixture(scope="module")
def deep(served: ServedModel) -> ServedModel:
    return replace(served, config=replace(served.config, layers=4))


def test_what_a_trace_measures(deep: ServedModel) -> None:
    def settings(field: dict[str, Any]) -> TraceSettings | None:
        (request,) = completion_call({"prompt": "the", "fenchel": field}, deep).requests
        return request.trace

    found = settings({"entropy": True, "attention": {"layers": [3, 1], "heads": "all", "top": 3}})
    assert found == TraceSettings(
        entropy=True, attention=TraceAttention(layers=(3, 1), heads="all", top=3)
    )
    assert found.layers(deep.config) == (1, 3)
    assert settings({"attention": True}) == TraceSettings(attention=TraceAttention())
    assert settings({"attention": False}) == settings({}) == TraceSettings()
    assert settings({"draft": 1}) is None
    assert settings({"draft": 1, "confidence": True}) == TraceSettings(confidence=True)


@pytest.mark.parametrize(
    ("field", "word"),
    [
        ([], "object"),
        ({"entropi": True}, "did you mean 'entropy'"),
        ({"entropy": 1}, "true or false"),
        ({"attention": 3}, "object"),
        ({"attention": {"layers": [4]}}, "from 0 to 3"),
        ({"attention": {"layers": []}}, "list of 1 to 4"),
        ({"attention": {"layers": [True]}}, "list of 1 to 4 numbers"),
        ({"attention": {"layers": [0] * 5}}, "list of 1 to 4"),
        ({"attention": {"heads": "some"}}, '"mean" or "all"'),
        ({"attention": {"top": 10**9}}, "from 1 to 64"),
        ({"attention": {"top": 0}}, "from 1 to 64"),
        ({"attention": {"top": 2.0}}, "whole number"),
    ],
)
def test_a_trace_that_cannot_be_is_refused(field: Any, word: str, deep: ServedModel) -> None:
    error = refusal({"fenchel": field}, deep)
    assert word in error.message
    assert str(error.param).startswith("fenchel")


def test_the_weights_per_token_are_bounded(served: ServedModel) -> None:
    config = replace(served.config, layers=64, heads=16, width=256)
    large = replace(served, config=config)
    body = {"prompt": "the", "fenchel": {"attention": {"top": 64}}}
    assert completion_call(body, large).requests[0].trace is not None
    error = refusal({"fenchel": {"attention": {"top": 64, "heads": "all"}}}, large)
    assert "weights per token" in error.message


def test_sinks_of_the_token_are_not_traced(served: ServedModel) -> None:
    sinks = replace(served, config=replace(served.config, sinks=True, sink_score="token"))
    body = {"prompt": "the", "fenchel": {"confidence": True}}
    assert completion_call(body, sinks).requests[0].trace == TraceSettings(confidence=True)
    error = refusal({"fenchel": {"entropy": True}}, sinks)
    assert "attention of new tokens is not traced" in error.message


def test_heads_choose_as_a_request_says(served: ServedModel) -> None:
    field = {"head_beta": {"1": 0.5, "1.2": 2}, "head_choice": {"1.1": "hard"}, "token_kl": 0.1}
    (request,) = completion_call({"prompt": "the sea", "fenchel": field}, served).requests
    assert request.steering is not None
    assert (request.steering.budget, request.steering.vectors) == (0.1, {})
    assert request.steering.heads[1, 1] == HeadChoice(0.5, Hard())
    assert request.steering.heads[1, 2] == HeadChoice(2)


@pytest.mark.parametrize(
    ("field", "sentence"),
    [
        ({"steer": [1]}, "an object of names and strengths"),
        ({"steer": {"peace": 1}}, "fenchel.steer.peace"),
        ({"steer": {"kind": "a"}}, "a number from -1000 to 1000"),
        ({"steer": {"kind": 1e9}}, "a number from -1000 to 1000"),
        ({"emphasise": "the"}, "a list of up to 16 texts"),
        ({"emphasise": [""]}, "a list of up to 16 texts"),
        ({"emphasise": ["war"]}, "no text 'war' to emphasise"),
        ({"emphasise": ["the"], "emphasis_layers": [7]}, "there is no layer 7"),
        ({"emphasise": ["the"], "emphasis_layers": ["1"]}, "a list of layers"),
        ({"emphasise": ["the"], "token_kl": 0}, "a number of nats above 0"),
        ({"head_beta": {"1.1": "2"}}, "an object of heads and numbers"),
        ({"head_beta": {"1.1": True}}, "an object of heads and numbers"),
        ({"head_beta": {"1.1": 1e9}}, "should be 0 to 100"),
        ({"head_beta": {"9.1": 1.0}}, "there is no head 9.1"),
        ({"head_choice": ["hard"]}, "an object of heads and names of maps"),
        ({"head_choice": {"all": "softest"}}, "no choice map 'softest'"),
    ],
)
def test_steering_that_cannot_be_is_refused(
    field: dict[str, Any], sentence: str, steerable: ServedModel
) -> None:
    assert sentence in refusal({"fenchel": field}, steerable).message
