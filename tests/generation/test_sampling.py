"""fenchel/generation/sampling.py: exactly the right tokens stay."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.generation.logits_process import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from fenchel.generation import Sampling, sample
from fenchel.generation.sampling import (
    apply_repetition_penalty,
    draw,
    filter_probabilities,
    sample_or_mark,
)


def slowly(p: list[float], sampling: Sampling) -> set[int]:
    """Which tokens stay, one by one, as the docstring says."""
    order = sorted(range(len(p)), key=lambda i: -p[i])
    if sampling.top_k is not None:
        order = order[: sampling.top_k]
    if sampling.top_p is not None:
        total, reached, stay = sum(p[i] for i in order), 0.0, []
        for i in order:
            if stay and reached >= sampling.top_p * total:
                break
            stay.append(i)
            reached += p[i]
        order = stay
    if sampling.min_p is not None:
        order = [i for i in order if p[i] >= sampling.min_p * p[order[0]]]
    return set(order)


@settings(max_examples=200, deadline=None)
@given(
    weights=st.lists(st.integers(1, 10_000), min_size=1, max_size=12, unique=True),
    top_k=st.none() | st.integers(1, 14),
    top_p=st.none() | st.sampled_from([0.05, 0.31, 0.5, 0.77, 0.9, 1.0]),
    min_p=st.none() | st.sampled_from([0.013, 0.1, 0.5, 1.0]),
)
def test_the_right_tokens_stay_and_their_proportions_too(
    weights: list[int], top_k: int | None, top_p: float | None, min_p: float | None
) -> None:
    p = torch.tensor([weights], dtype=torch.float64)
    p = p / p.sum()
    sampling = Sampling(top_k=top_k, top_p=top_p, min_p=min_p)
    cut = filter_probabilities(p, sampling)[0]
    stay = slowly(p[0].tolist(), sampling)
    assert {i for i, q in enumerate(cut.tolist()) if q > 0} == stay
    expected = torch.tensor([p[0, i] if i in stay else 0.0 for i in range(len(weights))])
    torch.testing.assert_close(cut, (expected / expected.sum()).to(cut))


def test_temperature_0_takes_the_largest() -> None:
    logits = torch.tensor([[0.0, 3.0, 1.0], [5.0, 3.0, 1.0]])
    assert sample(logits, Sampling(temperature=0.0)).tolist() == [1, 0]


def test_a_high_temperature_flattens_and_a_low_one_sharpens() -> None:
    logits = torch.tensor([[0.0, 1.0]]).expand(20_000, 2)
    generator = torch.Generator().manual_seed(0)
    for temperature in (0.5, 1.0, 4.0):
        drawn = sample(logits, Sampling(temperature=temperature), generator=generator)
        expected = torch.sigmoid(torch.tensor(1.0 / temperature)).item()
        assert drawn.double().mean().item() == pytest.approx(expected, abs=0.015)


@pytest.mark.parametrize("penalty", [0.7, 1.0, 1.8])
def test_the_whole_line_is_that_of_transformers(penalty: float) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(5, 40, generator=generator, dtype=torch.float64)
    said = torch.randint(40, (5, 12), generator=generator)
    theirs = LogitsProcessorList(
        [
            RepetitionPenaltyLogitsProcessor(penalty),
            TemperatureLogitsWarper(1.3),
            TopKLogitsWarper(20),
            TopPLogitsWarper(0.9),
            MinPLogitsWarper(0.02),
        ]
    )(said, logits)
    seen = torch.zeros(5, 40, dtype=torch.bool).scatter(1, said, True)
    p = torch.softmax(apply_repetition_penalty(logits, seen, penalty) / 1.3, -1)
    ours = filter_probabilities(p, Sampling(top_k=20, top_p=0.9, min_p=0.02))
    torch.testing.assert_close(ours, torch.softmax(theirs, -1))


def test_what_was_seen_is_chosen_only_if_it_is_better_by_the_penalty() -> None:
    logits, seen = torch.tensor([[2.0, 1.5], [-2.0, -2.5]]), torch.tensor([[True, False]])
    for penalty, expected in ((1.0, [0, 0]), (1.2, [0, 0]), (1.4, [1, 1])):
        sampling = Sampling(temperature=0.0, repetition_penalty=penalty)
        assert sample(logits, sampling, previous_BV=seen).tolist() == expected


@pytest.mark.parametrize(
    "wrong",
    [
        {"temperature": -1.0},
        {"temperature": float("nan")},
        {"top_k": 0},
        {"top_p": 0.0},
        {"min_p": 2.0},
        {"repetition_penalty": 0.0},
    ],
)
def test_a_wrong_setting_is_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        Sampling(**wrong)  # type: ignore[arg-type]


def test_draws_are_those_of_torchs_multinomial() -> None:
    p = torch.rand(50, 9, generator=torch.Generator().manual_seed(1))
    p[:, 4] = 0.0
    ours, theirs = (torch.Generator().manual_seed(7) for _ in range(2))
    for _ in range(20):
        wanted = torch.multinomial(p, 1, generator=theirs).squeeze(-1)
        assert torch.equal(draw(p, ours), wanted)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_that_is_not_finite_is_marked(temperature: float) -> None:
    logits = torch.tensor([[0.0, 9e9, 0.0], [0.0, torch.nan, 0.0], [torch.inf, 0.0, 0.0]])
    chosen = Sampling(temperature=temperature, top_p=0.9)
    assert sample_or_mark(logits, chosen).tolist() == [1, -1, -1]
    with pytest.raises(ValueError, match="not finite"):
        sample(logits, chosen)
