"""fenchel/evaluate/calibration.py against autograd and a search that knows no derivative."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import cross_entropy

from fenchel.evaluate import fit_temperature


def predictions(seed: int, spread: float, n: int = 60, V: int = 5) -> tuple[torch.Tensor, ...]:
    """Rows that know something, spread as told, and truths drawn from them: best T is about it."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(n, V, generator=generator, dtype=torch.float64)
    targets = torch.multinomial((1.5 * logits).softmax(-1), 1, generator=generator)[:, 0]
    return spread * logits, targets


def golden(f, low: float, high: float) -> float:
    """The least point of a function with one valley, by cutting the interval at golden points."""
    ratio = (math.sqrt(5.0) - 1.0) / 2.0
    while high - low > 1e-9 * (abs(low) + abs(high)):
        a, b = high - ratio * (high - low), low + ratio * (high - low)
        low, high = (low, b) if f(a) < f(b) else (a, high)
    return (low + high) / 2.0


def slope(logits: torch.Tensor, targets: torch.Tensor, T: float) -> float:
    b = torch.tensor(1.0 / T, dtype=torch.float64, requires_grad=True)
    return float(torch.autograd.grad(cross_entropy(b * logits, targets), b)[0])


@pytest.mark.parametrize("spread", [1e-3, 0.3, 1.0, 20.0, 1e4])
def test_the_loss_has_no_slope_there_and_a_search_ends_there(spread: float) -> None:
    logits, targets = predictions(0, spread)
    found = fit_temperature(logits, targets)
    scale = abs(slope(logits, targets, 10.0 * found.temperature))
    assert abs(slope(logits, targets, found.temperature)) <= 1e-8 * scale
    searched = golden(
        lambda s: float(cross_entropy(logits * math.exp(-s), targets)),
        math.log(spread) - 4.0,
        math.log(spread) + 4.0,
    )
    # a search by values alone is good to the root of their rounding
    assert found.temperature == pytest.approx(math.exp(searched), rel=1e-6)
    assert found.loss == pytest.approx(float(cross_entropy(logits / found.temperature, targets)))
    assert found.steps < 15


def test_it_is_exact_to_eight_digits_where_the_answer_is_known() -> None:
    """Two classes, gap 3, right three times in four: sigmoid(3 / T) = 3 / 4."""
    logits = torch.tensor([[3.0, 0.0]] * 4)
    targets = torch.tensor([0, 0, 0, 1])
    found = fit_temperature(logits, targets)
    assert found.temperature == pytest.approx(3.0 / math.log(3.0), rel=1e-9)


@settings(max_examples=40)
@given(st.integers(0, 10_000), st.floats(1e-4, 1e4), st.floats(0.1, 10.0))
def test_scaling_the_logits_scales_the_temperature(seed: int, spread: float, by: float) -> None:
    logits, targets = predictions(seed, spread, n=25, V=4)
    one, other = fit_temperature(logits, targets), fit_temperature(by * logits, targets)
    if math.isfinite(one.temperature) and one.temperature > 0.0:
        assert other.temperature == pytest.approx(by * one.temperature, rel=1e-7)
    assert one.loss == pytest.approx(other.loss, rel=1e-9)


def test_a_model_that_is_always_right_may_be_as_sure_as_it_likes() -> None:
    logits = torch.tensor([[2.0, 0.0, 1.0], [0.0, 4.0, -torch.inf]])
    assert fit_temperature(logits, torch.tensor([0, 1]))[:2] == (0.0, 0.0)
    tied = torch.zeros(3, 4)
    assert fit_temperature(tied, torch.tensor([0, 1, 2])).loss == pytest.approx(math.log(4.0))


def test_a_model_worse_than_chance_gets_an_infinite_temperature() -> None:
    logits = torch.tensor([[2.0, 0.0], [3.0, 0.0]])
    found = fit_temperature(logits, torch.tensor([1, 1]))
    assert found.temperature == math.inf
    assert found.loss == pytest.approx(math.log(2.0))


def test_forbidden_classes_count_for_nothing() -> None:
    logits, targets = predictions(3, 2.0)
    wider = torch.cat([logits, torch.full((len(logits), 2), -torch.inf)], dim=-1)
    assert fit_temperature(wider, targets) == pytest.approx(fit_temperature(logits, targets))


def test_rows_are_read_in_parts_without_a_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    logits, targets = predictions(4, 2.0)
    whole = fit_temperature(logits, targets)
    monkeypatch.setattr("fenchel.evaluate.calibration._BLOCK", 35)  # seven rows of five
    assert fit_temperature(logits, targets) == pytest.approx(whole, rel=1e-12)


def test_an_impossible_truth_is_refused() -> None:
    with pytest.raises(ValueError, match="impossible"):
        fit_temperature(torch.tensor([[0.0, -torch.inf]]), torch.tensor([1]))
    with pytest.raises(ValueError, match="certain"):
        fit_temperature(torch.tensor([[0.0, torch.inf]]), torch.tensor([0]))
