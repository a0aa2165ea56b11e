"""fenchel/generation/sampling.py: exactly the right tokens stay."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers.generation.logits_process import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from fenchel.generation import Penalties, RowSampling, Sampling, draw, log_probabilities
from fenchel.generation.sampling import (
    DEFAULTS,
    MOST_BIASED,
    MOST_LOGPROBS,
    RepeatedDraws,
    apply_repetition_penalty,
    exponentials,
    likeliest,
    random_words,
    resolve_sampling,
    seed_key,
)


def filter_probabilities(p_BV: Tensor, sampling: Sampling) -> Tensor:
    """Probabilities after top-k, top-p and min-p by sorting, renormalised: (B, V) -> (B, V)."""
    ordered, order = p_BV.sort(dim=-1, descending=True, stable=True)  # of equals, the first ids
    keep = torch.ones_like(ordered, dtype=torch.bool)
    if sampling.top_k is not None:
        keep[:, sampling.top_k :] = False
    if sampling.top_p is not None and sampling.top_p < 1.0:
        reached = (ordered * keep).cumsum(-1, dtype=torch.float64)
        top_p = float(torch.tensor(sampling.top_p))  # settings of rows are in float32
        keep[:, 1:] &= reached[:, :-1] < top_p * reached[:, -1:]
    if sampling.min_p is not None:
        keep &= ordered >= sampling.min_p * ordered[:, :1]
    cut = torch.zeros_like(p_BV).scatter(-1, order, ordered * keep)
    return cut / cut.sum(-1, keepdim=True)


def sample(logits_BV: Tensor, sampling: Sampling, seed: int = 0, n: int = 0) -> Tensor:
    """A token per row, each by a seed of its own."""
    rows = RowSampling.of([(sampling, seed + row) for row in range(len(logits_BV))])
    return draw(logits_BV, rows, torch.full((len(logits_BV),), n))


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def slowly(p: list[float], sampling: Sampling) -> set[int]:
    """Which tokens stay, one by one, as the docstring says."""
    order = sorted(range(len(p)), key=lambda i: -p[i])
    if sampling.top_k is not None:
        order = order[: sampling.top_k]
    if sampling.top_p is not None:
        total, reached, stay = sum(p[i] for i in order), 0.0, []
        top_p = float(torch.tensor(sampling.top_p))
        for i in order:
            if stay and reached >= top_p * total:
                break
            stay.append(i)
            reached += p[i]
        order = stay
    if sampling.min_p is not None:
        order = [i for i in order if p[i] >= sampling.min_p * p[order[0]]]
    return set(order)


@settings(max_examples=200)
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
    for temperature in (0.5, 1.0, 4.0):
        drawn = sample(logits, Sampling(temperature=temperature))
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
        penalties = Penalties(sampling, seen.expand(2, 2))
        assert sample(penalties.apply(logits), sampling).tolist() == expected


def test_penalties_and_bias_are_those_of_the_formula_token_by_token() -> None:
    """z - frequency n - presence [n > 0] + bias, with n counted by hand in each row."""
    logits = torch.randn(3, 7, generator=seeded(0), dtype=torch.float64)
    bias = {2: 1.5, 6: -100.0}
    sampling = Sampling(
        presence_penalty=0.7, frequency_penalty=-0.4, logit_bias=tuple(bias.items())
    )
    prompt = torch.ones(3, 7, dtype=torch.bool)  # the tokens of a prompt do not count
    penalties = Penalties(sampling, prompt)
    drawn = [[0, 0, 3, 0], [2, 5, 5, 5], [1, 1, -1, 6]]
    for token_B in torch.tensor(drawn).unbind(1):
        penalties.add(token_B)
    for z, row, changed in zip(logits, drawn, penalties.apply(logits), strict=True):
        for token in range(7):
            n = row.count(token)
            expected = z[token] + 0.4 * n - 0.7 * (n > 0) + bias.get(token, 0.0)
            assert changed[token].item() == pytest.approx(expected.item(), abs=1e-6)


def test_half_precision_logits_are_penalised_in_float32() -> None:
    penalties = Penalties(Sampling(frequency_penalty=0.001), torch.zeros(1, 2, dtype=torch.bool))
    penalties.add(torch.tensor([0]))
    changed = penalties.apply(torch.tensor([[8.0, 8.0]], dtype=torch.bfloat16))
    assert changed[0, 0] < changed[0, 1]


def test_a_bias_beyond_the_vocabulary_is_refused() -> None:
    with pytest.raises(ValueError, match="token 4; the vocabulary has 4 tokens"):
        Penalties(Sampling(logit_bias=((4, 1.0),)), torch.zeros(1, 4, dtype=torch.bool))


def test_the_bias_of_a_token_may_be_a_whole_number() -> None:
    penalties = Penalties(Sampling(logit_bias=((1, -3),)), torch.zeros(1, 3, dtype=torch.bool))
    assert penalties.apply(torch.ones(1, 3)).tolist() == [[1.0, -2.0, 1.0]]


@pytest.mark.parametrize(
    "wrong",
    [
        {"temperature": -1.0},
        {"temperature": float("nan")},
        {"top_k": 0},
        {"top_p": 0.0},
        {"min_p": 2.0},
        {"repetition_penalty": 0.0},
        {"presence_penalty": 2.1},
        {"frequency_penalty": float("nan")},
        {"logit_bias": ((3, 101.0),)},
        {"logit_bias": ((3, 1.0), (3, 2.0))},
        {"logit_bias": ((-1, 1.0),)},
        {"logit_bias": tuple((token, 0.0) for token in range(MOST_BIASED + 1))},
    ],
)
def test_a_wrong_setting_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        Sampling(**wrong)


ROWS: dict[str, Callable[[torch.Generator], torch.Tensor]] = {
    "spread": lambda g: 3 * torch.randn(4, 3000, generator=g),
    "ties": lambda g: torch.randint(-3, 4, (4, 3000), generator=g).float(),
    "flat": lambda _: torch.zeros(4, 700),
    "two levels": lambda g: 4.0 * (torch.rand(4, 2000, generator=g) < 0.02),
    "banned": lambda g: torch.where(torch.rand(4, 900, generator=g) < 0.9, -torch.inf, 0.0),
    "sharp": lambda g: 60 * torch.randn(4, 3000, generator=g),
    "one token": lambda _: torch.zeros(4, 1),
    "large": lambda g: 2 * torch.randn(2, 150_000, generator=g),
}


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize(
    "restricted",
    [
        {},
        {"top_p": 0.95},
        {"top_p": 0.1},
        {"top_p": 1.0, "min_p": 0.3},
        {"top_k": 1},
        {"top_k": 40, "top_p": 0.9},
        {"top_k": 500, "top_p": 0.6, "min_p": 0.01},
    ],
    ids=str,
)
def test_the_draw_is_that_of_the_sorted_distribution(rows: str, restricted: dict[str, Any]) -> None:
    z, sampling = ROWS[rows](seeded(1)), Sampling(**restricted)
    w = (z - z.amax(-1, keepdim=True)).exp()  # exact where all are equal
    kept = filter_probabilities(w, sampling)
    for seed in range(8):
        n = torch.full((len(z),), 3)
        e = exponentials(seed_key(torch.arange(seed, seed + len(z))), n, z.shape[1])
        assert torch.equal(sample(z, sampling, seed, 3), (kept / e).argmax(-1))


@settings(max_examples=100)
@given(
    levels=st.lists(st.integers(-3, 3), min_size=1, max_size=30),
    top_k=st.none() | st.integers(1, 32),
    top_p=st.none() | st.sampled_from([0.05, 0.31, 0.5, 0.77, 0.9, 1.0]),
    min_p=st.none() | st.sampled_from([0.013, 0.1, 0.5, 1.0]),
    seed=st.integers(0, 2**32),
)
def test_a_draw_among_ties_is_that_of_the_tokens_that_stay(
    levels: list[int], top_k: int | None, top_p: float | None, min_p: float | None, seed: int
) -> None:
    """Powers of two, whose sums are exact: equals are decided by their ids alone."""
    p = torch.tensor([levels]).exp2()
    sampling = Sampling(top_k=top_k, top_p=top_p, min_p=min_p)
    stay = slowly(p[0].tolist(), sampling)
    e = exponentials(seed_key(torch.tensor([seed])), torch.tensor([0]), len(levels))[0]
    w = (p[0] / p.max()).tolist()
    expected = max(stay, key=lambda i: w[i] / float(e[i]))
    assert sample(p.log(), sampling, seed).tolist() == [expected]


def test_random_words_are_those_of_splitmix64() -> None:
    """Against whole numbers of Python."""
    word, golden = 2**64 - 1, 0x9E3779B97F4A7C15

    def mix(x: int) -> int:
        x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & word
        x = (x ^ (x >> 27)) * 0x94D049BB133111EB & word
        return x ^ (x >> 31)

    for seed, n, V in ((5, 7, 9), (-3, 100, 8), (2**63 - 1, 12345, 33), (0, 0, 1)):
        state = mix(mix(seed + golden & word) + n * golden & word)
        pairs = [mix(state + (i + 1) * golden & word) for i in range(V)]
        halves = [half for x in pairs for half in (x & 0xFFFFFFFF, x >> 32)][:V]
        found = random_words(seed_key(torch.tensor([seed])), torch.tensor([n]), V)[0]
        assert [x & 0xFFFFFFFF for x in found.tolist()] == halves


@pytest.mark.parametrize(
    "rows",
    [
        [{}],
        [{"top_p": 0.9}],
        [{"top_k": 5}],
        [{"min_p": 0.3}],
        [{"temperature": 0.0}],
        [{"temperature": 0.0}, {}],
        [{"temperature": 0.7}, {"top_p": 0.8, "temperature": 0.0}, {"min_p": 0.2}, {"top_k": 3}],
    ],
    ids=str,
)
def test_repeated_draws_are_those_of_single_ones(rows: list[dict[str, Any]]) -> None:
    """Also where a position comes again, is left out, or is before the last one."""
    chosen = RowSampling.of([(Sampling(**row), 3 + i) for i, row in enumerate(rows)])
    repeated, B = RepeatedDraws(chosen), len(rows)
    z_NBV = 2 * torch.randn(60, B, 900, generator=seeded(2))
    z_NBV[7, 0, 5] = torch.nan
    positions = [*range(4, 44), 43, 41, 60, 58, 2]
    for n, z_BV in zip(positions, z_NBV, strict=False):
        n_B = n + 10 * torch.arange(B)
        expected = draw(z_BV, chosen, n_B)
        assert torch.equal(draw(z_BV, chosen, n_B, repeated), expected)
        if all(row.get("temperature") == 0.0 for row in rows):
            assert likeliest(z_BV.bfloat16()) == draw(z_BV.bfloat16(), chosen, n_B).tolist()


def test_exponential_variables_have_their_distribution() -> None:
    e = exponentials(seed_key(torch.arange(40)), torch.arange(40), 500)
    assert bool((e > 0).all())
    assert e.mean().item() == pytest.approx(1.0, abs=0.03)
    assert (e > 1.0).double().mean().item() == pytest.approx(math.exp(-1.0), abs=0.015)


def test_neighbouring_seeds_positions_and_tokens_are_not_correlated() -> None:
    """Correlations of 40,000 pairs are below five standard deviations."""
    e = exponentials(
        seed_key(torch.arange(200)).repeat_interleave(4), torch.arange(4).repeat(200), 50
    )
    x = e.view(200, 4, 50).clamp(max=5.0)
    x = (x - x.mean()) / x.std()
    pairs = [(x[1:], x[:-1]), (x[:, 1:], x[:, :-1]), (x[..., 1:], x[..., :-1])]
    for one, other in pairs:
        assert abs((one * other).mean().item()) < 5 / one.numel() ** 0.5


def test_log_probabilities_are_those_of_the_raw_logits() -> None:
    logits, token = 4 * torch.randn(5, 300, generator=seeded(0)), torch.arange(5)
    result = log_probabilities(logits, token, count=7)
    expected = torch.log_softmax(logits.double(), -1)
    values, ids = expected.sort(-1, descending=True)
    assert torch.equal(result.top_ids, ids[:, :7])
    torch.testing.assert_close(result.top.double(), values[:, :7], rtol=1e-6, atol=1e-6)
    chosen = expected[range(5), token]
    torch.testing.assert_close(result.chosen.double(), chosen, rtol=1e-6, atol=1e-6)


def test_the_largest_log_probability_is_the_greedy_tokens_to_the_bit() -> None:
    logits = 9 * torch.randn(50, 40, generator=seeded(0)).bfloat16()
    result = log_probabilities(logits, logits.argmax(-1), count=1)
    assert torch.equal(result.chosen, result.top[:, 0])


def test_log_probabilities_have_a_limit_and_may_be_of_the_token_alone() -> None:
    logits = torch.zeros(1, 3)
    assert log_probabilities(logits, torch.tensor([0])).top.shape == (1, 0)
    assert log_probabilities(logits, torch.tensor([0]), count=9).top_ids.tolist() == [[0, 1, 2]]
    with pytest.raises(ValueError, match=f"0 to {MOST_LOGPROBS}"):
        log_probabilities(logits, torch.tensor([0]), count=MOST_LOGPROBS + 1)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_that_is_not_finite_is_marked(temperature: float) -> None:
    logits = torch.tensor([[0.0, 9e9, 0.0], [0.0, torch.nan, 0.0], [torch.inf, 0.0, 0.0]])
    chosen = Sampling(temperature=temperature, top_p=0.9)
    assert sample(logits, chosen).tolist() == [1, -1, -1]


def test_rows_draw_from_their_restricted_distributions() -> None:
    """4,000 draws of each setting have the frequencies of ``filter_probabilities``."""
    z = torch.tensor([2.0, 0.5, 1.0, 0.5, -1.0, 1.7])
    N = 4000
    for sampling in (
        Sampling(),
        Sampling(temperature=0.6, top_p=0.8),
        Sampling(top_k=3),
        Sampling(top_k=4, top_p=0.7, temperature=2.0),
        Sampling(min_p=0.3),
    ):
        rows = RowSampling.of([(sampling, seed) for seed in range(N)])
        token_N = draw(z.expand(N, -1), rows, torch.full((N,), 9))
        p = filter_probabilities((z / sampling.temperature).softmax(-1)[None], sampling)[0]
        frequency = token_N.bincount(minlength=len(z)) / N
        assert bool((frequency[p == 0] == 0).all())
        torch.testing.assert_close(frequency, p, atol=4 * (0.25 / N) ** 0.5, rtol=0)


def test_a_row_draws_by_its_seed_and_number() -> None:
    z = torch.zeros(4, 1000)
    rows = RowSampling.of([(Sampling(), seed) for seed in (5, 5, 6, 5)])
    a, b, c, d = draw(z, rows, torch.tensor([1, 1, 1, 2])).tolist()
    assert a == b
    assert len({a, c, d}) == 3


def test_given_settings_come_before_those_of_a_checkpoint_and_these_before_the_defaults() -> None:
    sampled = Sampling(temperature=0.5, top_k=4, repetition_penalty=1.2)
    sampling, theirs = resolve_sampling(sampled, {"top_k": 9})
    assert sampling == Sampling(temperature=0.5, top_k=9, repetition_penalty=1.2)
    assert theirs == {"temperature": 0.5, "top_p": None, "repetition_penalty": 1.2}
    greedy = Sampling(temperature=0.0, top_k=4, presence_penalty=0.5)
    assert resolve_sampling(greedy, {})[0] == Sampling(
        temperature=DEFAULTS.temperature, top_p=DEFAULTS.top_p, presence_penalty=0.5
    )
