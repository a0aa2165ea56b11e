"""fenchel/optim/schedule.py against its formulas."""

import math
from itertools import pairwise

import pytest
import torch

from fenchel.optim import (
    Schedule,
    beta2_warmup,
    constant,
    inverse_sqrt,
    warmup_cosine,
    warmup_hold,
    warmup_linear,
)

FALLING = {
    "cosine": warmup_cosine(10, 110, 0.1),
    "linear": warmup_linear(10, 110, 0.1),
    "hold": warmup_hold(10, 110, 0.1),
}
every_fall = pytest.mark.parametrize("schedule", FALLING.values(), ids=FALLING)


@every_fall
def test_it_rises_to_1_and_falls_to_the_end_and_stays_there(schedule: Schedule) -> None:
    assert schedule(0) == pytest.approx(0.1)  # the first step is not wasted
    assert [schedule(t) for t in range(10)] == pytest.approx([(t + 1) / 10 for t in range(10)])
    assert schedule(10) == pytest.approx(1.0)
    assert schedule(110) == pytest.approx(0.1)
    assert schedule(10_000) == schedule(110)  # a cosine would rise again
    values = [schedule(t) for t in range(10, 111)]
    assert all(a >= b for a, b in pairwise(values))


def test_each_falls_in_its_own_way() -> None:
    quarter = 10 + 25
    assert FALLING["cosine"](quarter) == pytest.approx(0.1 + 0.45 * (1 + math.cos(math.pi / 4)))
    assert FALLING["linear"](quarter) == pytest.approx(0.1 + 0.9 * 0.75)
    assert FALLING["hold"](quarter) == 1.0
    assert FALLING["hold"](10 + 75) == pytest.approx(0.1 + 0.9 * 0.5)


def test_the_original_schedule_peaks_at_its_published_rate() -> None:
    """d_model^-1/2 min(t^-1/2, t w^-3/2): 6.988e-4 at w for width 512 and 4000 steps."""
    schedule, peak = inverse_sqrt(4000), 512**-0.5 * 4000**-0.5
    assert peak == pytest.approx(6.988e-4, rel=1e-4)
    for t in (1, 100, 3999, 4000, 4001, 50_000):
        published = 512**-0.5 * min(t**-0.5, t * 4000**-1.5)
        assert peak * schedule(t - 1) == pytest.approx(published)
    assert schedule(3999) == pytest.approx(1.0)


def test_constant_is_1() -> None:
    assert {constant()(t) for t in (0, 5, 10**6)} == {1.0}


def test_the_window_of_beta2_grows_evenly() -> None:
    beta2 = beta2_warmup(1000)
    assert beta2(0) == pytest.approx(0.99)
    assert beta2(1000) == pytest.approx(0.999)
    assert 1 / (1 - beta2(500)) == pytest.approx((100 + 1000) / 2)
    assert beta2(10**6) == beta2(1000)


def test_they_fit_lambda_lr() -> None:
    optimiser = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=2.0)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimiser, warmup_linear(2, 4))
    rates = []
    for _ in range(4):
        rates.append(scheduler.get_last_lr()[0])
        optimiser.step()
        scheduler.step()
    assert rates == pytest.approx([1.0, 2.0, 2.0, 1.0])


@pytest.mark.parametrize("wrong", [(-1, 10), (1, 0)])
def test_nonsense_is_refused(wrong: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="warmup"):
        warmup_cosine(*wrong)
