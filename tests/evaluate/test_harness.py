"""fenchel/evaluate/harness.py: the numbers the harness would get, computed one by one.

lm_eval is large and not among our test dependencies; a stub of its documented base class (0.4.13)
stands in its place.
"""

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from fenchel.checkpoints import Loaded
from fenchel.data import TextTokenizer, train_tokenizer
from fenchel.evaluate.harness import HarnessAdapter, harness_model
from fenchel.generation import generate
from fenchel.model import ModelConfig, Transformer

CONTEXT = 8
WORDS = "the sea shells and the sea shore of the old sea"


@pytest.fixture(scope="module")
def tokenizer() -> TextTokenizer:
    return train_tokenizer([WORDS] * 3, 275)


@pytest.fixture(scope="module")
def model(tokenizer: TextTokenizer) -> Transformer:
    config = ModelConfig(vocabulary=tokenizer.vocabulary_size, context=CONTEXT, width=16)
    model = Transformer(config, generator=torch.Generator().manual_seed(0))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in model.parameters():
            p.normal_(0.0, 0.5, generator=generator)
    return model.eval()


@pytest.fixture
def answers(model: Transformer, tokenizer: TextTokenizer) -> HarnessAdapter:
    return HarnessAdapter(model, tokenizer, batch=3)


@torch.no_grad()
def log_p(model: Transformer, before: list[int], token: int) -> float:
    """Of one token after at most a context of others."""
    row = torch.tensor([before[-CONTEXT:]])
    return float(model(row)[0, -1].double().log_softmax(-1)[token])


def test_a_continuation_is_scored_token_by_token(
    answers: HarnessAdapter, model: Transformer, tokenizer: TextTokenizer
) -> None:
    pairs = [("the sea", " shore"), ("the", " sea shells"), ("", "old"), ("of the ", "old sea")]
    found = answers.loglikelihood(pairs)
    for (context, continuation), (value, _) in zip(pairs, found, strict=True):
        whole = tokenizer.encode(context + continuation)
        given = len(tokenizer.encode(context.rstrip()))
        ids, first = (whole, given) if context else ([tokenizer.end_id, *whole], 1)
        assert len(ids) <= CONTEXT + 1
        by_hand = sum(log_p(model, ids[:t], ids[t]) for t in range(first, len(ids)))
        assert value == pytest.approx(by_hand, rel=1e-4)
    assert len({value for value, _ in found}) == 4


def test_a_long_context_loses_its_oldest_tokens(
    answers: HarnessAdapter, model: Transformer, tokenizer: TextTokenizer
) -> None:
    context, continuation = WORDS, " shore"
    whole = tokenizer.encode(context + continuation)
    given = len(tokenizer.encode(context))
    assert given > CONTEXT
    row = torch.tensor([whole[-(CONTEXT + 1) : -1]])
    asked = len(whole) - given
    with torch.no_grad():
        rows = model(row)[0, -asked:].double().log_softmax(-1)
    by_hand = sum(float(rows[i, t]) for i, t in enumerate(whole[given:]))
    assert answers.loglikelihood([(context, continuation)])[0][0] == pytest.approx(
        by_hand, rel=1e-4
    )


def test_greedy_is_true_for_the_tokens_of_greedy_decoding(
    answers: HarnessAdapter, model: Transformer, tokenizer: TextTokenizer
) -> None:
    prompt = tokenizer.encode("the sea")
    best = generate(model, torch.tensor([prompt]), max_new_tokens=2, temperature=0.0)[0].tolist()
    answer = answers._scores([(best, 2), ([*best[:-1], (best[-1] + 1) % 270], 2)])
    assert [greedy for _, greedy in answer] == [True, False]


def test_nothing_is_certain_and_order_is_kept(answers: HarnessAdapter) -> None:
    assert answers.loglikelihood([("the", "")]) == [(0.0, True)]
    pairs = [("the", " sea"), ("the old sea", " shore"), ("", "shells"), ("of", " the")]
    together = answers.loglikelihood(pairs)
    alone = [answers.loglikelihood([pair])[0] for pair in pairs]
    for one, other in zip(together, alone, strict=True):
        assert one == pytest.approx(other, rel=1e-5)


def rolled(tokens: list[int], prefix: int) -> list[tuple[list[int], list[int]]]:
    """Windows as the harness draws them in its manual: (input, predicted, its last ones)."""
    pairs, done = [], min(CONTEXT, len(tokens))
    pairs.append(([prefix, *tokens[: done - 1]], tokens[:done]))
    while done < len(tokens):
        end = min(done + CONTEXT, len(tokens))
        pairs.append((tokens[end - CONTEXT - 1 : end - 1], tokens[done:end]))
        done = end
    return pairs


@pytest.mark.parametrize("repeats", [1, 2, 3])
def test_a_long_text_is_read_in_the_harness_s_windows(
    repeats: int, answers: HarnessAdapter, model: Transformer, tokenizer: TextTokenizer
) -> None:
    texts = [WORDS * repeats, "sea", ""]
    by_hand = []
    for text in texts[:2]:
        total = 0.0
        for inputs, predicted in rolled(tokenizer.encode(text), tokenizer.end_id):
            with torch.no_grad():
                rows = model(torch.tensor([inputs]))[0, -len(predicted) :].log_softmax(-1)
            total += sum(float(rows[i, t]) for i, t in enumerate(predicted))
        by_hand.append(total)
    assert len(tokenizer.encode(texts[0])) > CONTEXT
    assert answers.loglikelihood_rolling(texts) == pytest.approx([*by_hand, 0.0], rel=1e-4)


def test_text_is_continued_up_to_the_first_stop(
    answers: HarnessAdapter, model: Transformer, tokenizer: TextTokenizer
) -> None:
    ids = torch.tensor([tokenizer.encode("the sea")])
    drawn = generate(model, ids, max_new_tokens=30, temperature=0.0, stop=[tokenizer.end_id])[
        0, ids.shape[1] :
    ].tolist()
    if tokenizer.end_id in drawn:
        drawn = drawn[: drawn.index(tokenizer.end_id)]
    whole = tokenizer.decode(drawn)
    assert answers.generate_until("the sea", {"max_gen_toks": 30}) == whole
    assert len(whole) > 4
    stop = whole[3:5]
    cut = answers.generate_until("the sea", {"until": [stop, "never"], "max_gen_toks": 30})
    assert cut == whole[: whole.find(stop)]
    assert answers.generate_until("the sea", {"until": stop, "max_gen_toks": 30}) == cut
    assert (
        answers.generate_until("the sea", {"max_gen_toks": 30, "temperature": 9.0}) == whole
    )  # greedy


def test_of_two_stops_in_one_token_the_first_cuts(
    answers: HarnessAdapter, tokenizer: TextTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = tokenizer.encode(" the old sea")
    assert len(words) == 3  # a token each
    drawn = lambda *_, **__: (torch.tensor([i]) for i in words)  # noqa: E731
    monkeypatch.setattr("fenchel.evaluate.harness.stream", drawn)
    assert answers.generate_until("on", {"until": ["d", "l"]}) == " the o"
    assert answers.generate_until("on", {"until": ["he o", "xx"]}) == " t"  # across tokens
    assert answers.generate_until("on", {"until": ["xx"]}) == " the old sea"


def test_sampling_repeats_by_its_seed(model: Transformer, tokenizer: TextTokenizer) -> None:
    ask = {"do_sample": True, "temperature": 1.5, "max_gen_toks": 20}
    texts = [HarnessAdapter(model, tokenizer, seed=s).generate_until("the", ask) for s in (0, 0, 1)]
    assert texts[0] == texts[1] != texts[2]


def test_what_cannot_be_done_is_refused(answers: HarnessAdapter) -> None:
    with pytest.raises(ValueError, match="num_beams"):
        answers.generate_until("the", {"num_beams": 4})
    with pytest.raises(ValueError, match="tokens and the model reads 8"):
        answers.loglikelihood([("the", WORDS)])


class Base:
    """The parts of lm_eval.api.model.LM that a subclass is promised."""

    def __init__(self) -> None:
        self.kept: list[tuple[str, Any, Any]] = []
        self.cache_hook = SimpleNamespace(add_partial=lambda *told: self.kept.append(told))


def test_the_harness_gets_an_instance_of_its_own_class(
    answers: HarnessAdapter, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("lm_eval", "lm_eval.api", "lm_eval.api.model"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setattr(sys.modules["lm_eval.api.model"], "LM", Base, raising=False)
    loaded = Loaded(answers.model, answers.tokenizer, answers.model.config)
    monkeypatch.setattr("fenchel.evaluate.harness.load", lambda _: loaded)
    lm = harness_model(tmp_path, batch=3)
    assert isinstance(lm, Base)

    def requests(*arguments: tuple[Any, ...]) -> list[SimpleNamespace]:
        return [SimpleNamespace(args=one) for one in arguments]

    pair = ("the sea", " shore")
    assert lm.loglikelihood(requests(pair)) == answers.loglikelihood([pair])
    assert lm.loglikelihood_rolling(requests((WORDS,))) == answers.loglikelihood_rolling([WORDS])
    ask = {"until": ["\n"], "max_gen_toks": 4}
    assert lm.generate_until(requests(("the", ask))) == [answers.generate_until("the", ask)]
    assert [kind for kind, _, _ in lm.kept] == [
        "loglikelihood",
        "loglikelihood_rolling",
        "generate_until",
    ]
    assert lm.tokenizer_name == str(tmp_path)


def test_without_the_harness_the_error_names_the_extra_to_install(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    with pytest.raises(ValueError, match=r"fenchel\[eval\]"):
        harness_model(tmp_path)
