"""fenchel/optim/first_order.py: one factor for all, safe at the edges."""

import math

import pytest
import torch
from torch import nn

from fenchel.optim import clip_

NAN = float("nan")


def with_gradients(*gradients: list[float] | None) -> list[nn.Parameter]:
    parameters = []
    for gradient in gradients:
        p = nn.Parameter(torch.zeros(1 if gradient is None else len(gradient)))
        p.grad = None if gradient is None else torch.tensor(gradient)
        parameters.append(p)
    return parameters


def gradients(parameters: list[nn.Parameter]) -> list[list[float]]:
    return [p.grad.tolist() for p in parameters if p.grad is not None]


def test_the_worked_example_norm_50_cut_to_5_is_a_factor_of_one_tenth() -> None:
    parameters = with_gradients([30.0, 0.0], None, [-40.0])
    assert clip_(parameters, 5.0) == pytest.approx(50.0)
    assert gradients(parameters)[0] == pytest.approx([3.0, 0.0])
    assert gradients(parameters)[1] == pytest.approx([-4.0])


def test_the_length_is_never_above_the_limit() -> None:
    chance = torch.Generator().manual_seed(0)
    for limit in (1e-4, 1.0, 30.0):
        parameters = with_gradients(*(torch.randn(7, generator=chance).tolist() for _ in range(5)))
        clip_(parameters, limit)
        left = math.sqrt(sum(x * x for g in gradients(parameters) for x in g))
        assert left <= limit * (1 + 1e-6)


def test_a_gradient_within_the_limit_is_left_alone_to_the_bit() -> None:
    parameters = with_gradients([0.3, -0.1], [0.2])
    before = gradients(parameters)
    assert clip_(parameters, 1.0) < 1.0
    assert gradients(parameters) == before


@pytest.mark.parametrize("nothing", [[[0.0, 0.0]], [None], []])
def test_no_gradient_stays_none(nothing: list[list[float] | None]) -> None:
    parameters = with_gradients(*nothing)
    assert clip_(parameters, 1.0) == 0.0
    assert all(x == 0.0 for g in gradients(parameters) for x in g)


@pytest.mark.parametrize("wrong", [NAN, math.inf, -math.inf])
def test_a_gradient_that_is_not_finite_is_reported_and_does_not_spread(wrong: float) -> None:
    parameters = with_gradients([3.0, 4.0], [wrong])
    assert not math.isfinite(clip_(parameters, 1.0))
    assert gradients(parameters)[0] == [3.0, 4.0]


def test_a_norm_beyond_its_dtype_is_infinite_and_leaves_the_gradients() -> None:
    parameters = with_gradients([1e30, 1e30])
    assert clip_(parameters, 1.0) == math.inf
    assert gradients(parameters) == [[pytest.approx(1e30), pytest.approx(1e30)]]
