"""fenchel/generation/prompt_lookup.py and its use: guessing ahead changes nothing but the time."""

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fenchel.generation import Decoder, PromptLookup, RowSampling, Sampling, generate, scheduler
from fenchel.generation.prompt_lookup import LONGEST, LONGEST_PAUSE, PAUSE, DraftControl
from fenchel.model import Transformer
from tests.generation.test_sampling import filter_probabilities

Build = Callable[..., Transformer]


def slowly(ids: list[int], most: int) -> list[int]:
    """What followed the longest, then the latest earlier copy of the end."""
    for size in range(min(LONGEST, len(ids)), 0, -1):
        for start in range(len(ids) - size - 1, -1, -1):
            if ids[start : start + size] == ids[-size:]:
                whole = list(ids)
                for at in range(start + size, start + size + most):
                    whole.append(whole[at])  # past the end it goes on with itself
                return whole[len(ids) :]
    return []


@settings(max_examples=300)
@given(ids=st.lists(st.integers(0, 3), min_size=1, max_size=20), most=st.integers(0, 5))
def test_the_guess_follows_the_longest_then_the_latest_match(ids: list[int], most: int) -> None:
    lookup = PromptLookup(ids[:3])
    lookup.add(ids[3:])
    assert lookup.guess(most) == slowly(ids, most)


@pytest.mark.parametrize("cache", ["model", "float16"])
@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize("draft", [1, 4, 9])
def test_the_text_is_that_of_decoding_one_by_one(
    temperature: float, draft: int, cache: Any, lively: Build, prompts: Callable[..., Tensor]
) -> None:
    model, ids = lively(vocabulary=5), prompts(1, 6, vocabulary=5)
    settings: dict[str, Any] = {
        "max_new_tokens": 50,  # three times the context
        "temperature": temperature,
        "repetition_penalty": 1.1,
        "cache": cache,
    }
    one, ahead = (
        generate(model, ids, draft=n, generator=torch.Generator().manual_seed(3), **settings)
        for n in (0, draft)
    )
    assert torch.equal(one, ahead)


@pytest.fixture
def widths(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many tokens every pass reads."""
    sizes: list[int] = []
    read, step = Decoder.read, Decoder.step

    def counted_read(decoder: Decoder, rows: Any, parts: Any, **keywords: Any) -> Tensor:
        sizes.append(len(parts[0]))
        return read(decoder, rows, parts, **keywords)

    def counted_step(decoder: Decoder, *observe: Any) -> Tensor:
        sizes.append(1)
        return step(decoder, *observe)

    monkeypatch.setattr(Decoder, "read", counted_read)
    monkeypatch.setattr(Decoder, "step", counted_step)
    return sizes


def test_guesses_save_calls_of_the_model(lively: Build, widths: list[int]) -> None:
    model = lively(vocabulary=5, context=64)
    drawn = generate(model, torch.tensor([[1, 2]]), max_new_tokens=40, temperature=0.0, draft=6)
    assert drawn.shape == (1, 42)
    assert len(widths) < 30  # a greedy model of few words soon repeats itself
    assert max(widths) <= 7


class Script:
    """Draws that take every branch in turn, and multiply the probabilities taken."""

    def __init__(self, tokens: tuple[int, ...]) -> None:
        self.tokens, self.at, self.probability = tokens, 0, 1.0

    def __call__(self, logits: Tensor, settings: RowSampling, *_: object) -> Tensor:
        token = self.tokens[self.at]
        self.at += 1
        p = torch.softmax(logits / settings.temperature, -1)
        sampling = Sampling(top_p=float(settings.top_p))
        self.probability *= float(filter_probabilities(p, sampling)[0, token])
        return torch.tensor([token])


@torch.no_grad()
def chain(model: Transformer, ids: Tensor, tokens: tuple[int, ...]) -> float:
    """The probability of the tokens by the chain rule, everything read again at each."""
    probability, said = 1.0, ids
    for token in tokens:
        p = filter_probabilities(torch.softmax(model(said)[:, -1] / 0.8, -1), Sampling(top_p=0.97))
        probability *= float(p[0, token])
        said = torch.cat([said, torch.tensor([[token]])], dim=-1)
    return probability


def test_over_all_branches_the_distribution_is_the_models(
    lively: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    V, N = 3, 4
    model, ids = (
        lively(vocabulary=V, layers=1),
        torch.tensor([[0, 1, 0, 1]]),
    )  # every end was there before
    total = 0.0
    for tokens in product(range(V), repeat=N):
        script = Script(tokens)
        monkeypatch.setattr(scheduler, "draw", script)
        drawn = generate(model, ids, max_new_tokens=N, temperature=0.8, top_p=0.97, draft=3)
        assert drawn[0, 4:].tolist() == list(tokens)
        expected = chain(model, ids, tokens)
        assert script.probability == pytest.approx(expected, abs=1e-6)
        total += script.probability
    assert total == pytest.approx(1.0, abs=1e-5)


def steps_between(control: DraftControl) -> int:
    """Plain steps before the next draft."""
    count = 0
    while not control.ready():
        count += 1
    return count


@pytest.mark.parametrize("draft", [1, 2, 4, 8])
def test_drafts_that_are_not_accepted_pause_ever_longer(draft: int) -> None:
    control = DraftControl(draft)
    pauses = []
    for _ in range(12):
        while (pause := steps_between(control)) == 0:
            control.record(0)
        pauses.append(pause)
        control.record(0)
    assert pauses == sorted(pauses)
    assert pauses[0] == PAUSE - 1
    assert pauses[-1] == LONGEST_PAUSE - 1
    steps_between(control)
    control.record(draft)  # one that is accepted ends it
    for _ in range(50):
        assert steps_between(control) == 0
        control.record(draft)


def test_a_text_that_does_not_repeat_is_read_one_by_one(lively: Build, widths: list[int]) -> None:
    """Random tokens of a small vocabulary: every end has a match, and almost none is right."""
    model = lively(vocabulary=60, context=256)
    ids = torch.randint(60, (1, 40), generator=torch.Generator().manual_seed(0))
    drawn = generate(model, ids, max_new_tokens=200, temperature=50.0, draft=6, seed=1)
    assert drawn.shape == (1, 240)
    guesses = sum(width > 1 for width in widths[1:])
    assert guesses < 12  # without a control, more than 150
