"""optim/first_order.py against the formulas of its docstring and the notes' worked numbers."""

import math
from collections.abc import Callable, Iterator
from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn

from fenchel.optim import (
    adam_l2,
    adamw,
    beta2_warmup,
    nesterov,
    sgd,
    sgd_average,
    warmup_cosine,
)

Build = Callable[[list[nn.Parameter]], torch.optim.Optimizer]
Slope = Callable[[Tensor], Tensor]


def walk(build: Build, gradient: Slope, start: list[float]) -> Iterator[Tensor]:
    """theta before the first step, after it, after the second, ..."""
    theta = nn.Parameter(torch.tensor(start, dtype=torch.float64))
    optimiser = build([theta])
    while True:
        yield theta.detach().clone()
        theta.grad = gradient(theta.detach())
        optimiser.step()


def after(steps: int, build: Build, gradient: Slope) -> list[float]:
    """x of the first ``steps`` + 1 points from x = 3."""
    places = walk(build, gradient, [3.0])
    return [next(places).item() for _ in range(steps + 1)]


def slope(x: Tensor) -> Tensor:
    """Of x^2."""
    return 2.0 * x


# --- descent


def test_the_worked_table_of_descent_on_a_parabola() -> None:
    x = after(10, lambda p: sgd(p, lr=0.1), slope)
    assert x[:4] == pytest.approx([3.0, 2.4, 1.92, 1.536])
    assert [v**2 for v in x[:3]] == pytest.approx([9.0, 5.76, 3.6864])
    assert [2 * v for v in x[:3]] == pytest.approx([6.0, 4.8, 3.84])
    assert x == pytest.approx([3.0 * 0.8**k for k in range(11)])
    assert (x[10], x[10] ** 2) == pytest.approx((0.3221, 0.1038), abs=5e-5)
    # and of x^2 + y^2: straight to the origin
    places = walk(lambda p: sgd(p, lr=0.1), slope, [3.0, -4.0])
    for k in range(11):
        assert next(places).tolist() == pytest.approx([3.0 * 0.8**k, -4.0 * 0.8**k])


@pytest.mark.parametrize(
    ("rate", "ends", "gap"),
    [
        (0.1, 0.3221, 0.084),
        (0.05, 0.3647, 0.041),
        (0.025, 0.3855, 0.020),
        (0.0125, 0.3958, 0.010),
    ],
)
def test_descent_is_the_euler_step_of_the_gradient_flow(
    rate: float, ends: float, gap: float
) -> None:
    """The flow of x^2 from 3 is 3 exp(-2 t): 0.4060 at time 1, approached as the rate falls."""
    flow = 3.0 * math.exp(-2.0)
    assert flow == pytest.approx(0.4060, abs=5e-5)
    found = after(round(1 / rate), lambda p: sgd(p, lr=rate), slope)[-1]
    assert found == pytest.approx(ends, abs=5e-5)
    assert flow - found == pytest.approx(gap, abs=5e-4)
    assert 0 < flow - found < 0.9 * rate  # first order in the rate, from below


@pytest.mark.parametrize(
    ("rate", "shrinks", "alternates"),
    [(0.1, True, False), (0.5, True, False), (0.8, True, True), (1.1, False, True)],
)
def test_the_regimes_of_the_rate_on_a_parabola(
    rate: float, shrinks: bool, alternates: bool
) -> None:
    x = after(6, lambda p: sgd(p, lr=rate), slope)
    assert (abs(x[-1]) < abs(x[0])) == shrinks
    assert (x[0] * x[1] < 0) == alternates
    assert x[1] == pytest.approx(0.0, abs=1e-15) or rate != 0.5  # there in one step


# --- momentum


def drawn(theta: Tensor) -> Tensor:
    """A gradient that is no multiple of theta and changes with it."""
    return torch.sin(3.0 * theta) + 0.3 * theta + 0.1


def check(build: Build, formula: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]) -> None:
    """``formula``: (theta, v, g) -> (theta, v), twelve times, from v = 0."""
    places = walk(build, drawn, [0.7, -1.3, 2.0])
    theta = next(places)
    v = torch.zeros_like(theta)
    for _ in range(12):
        theta, v = formula(theta, v, drawn(theta))
        torch.testing.assert_close(next(places), theta, rtol=1e-13, atol=1e-14)


def test_sgd_follows_the_sum() -> None:
    def formula(theta: Tensor, v: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
        v = 0.9 * v + (g + 0.2 * theta)
        return theta - 0.05 * v, v

    check(lambda p: sgd(p, lr=0.05, momentum=0.9, weight_decay=0.2), formula)


def test_sgd_average_follows_the_average() -> None:
    def formula(theta: Tensor, v: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
        v = 0.9 * v + 0.1 * (g + 0.2 * theta)
        return theta - 0.05 * v, v

    check(lambda p: sgd_average(p, lr=0.05, momentum=0.9, weight_decay=0.2), formula)


def test_nesterov_is_its_formula() -> None:
    def formula(theta: Tensor, v: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
        v = 0.9 * v + (g + 0.2 * theta)
        return theta - 0.05 * (g + 0.2 * theta + 0.9 * v), v

    check(lambda p: nesterov(p, lr=0.05, momentum=0.9, weight_decay=0.2), formula)


def test_the_first_steps_of_the_two_conventions_and_of_dampening() -> None:
    assert after(1, lambda p: sgd(p, lr=0.1, momentum=0.9), slope)[1] == pytest.approx(2.40)
    assert after(1, lambda p: sgd_average(p, lr=0.1), slope)[1] == pytest.approx(2.94)
    damped = after(1, lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, dampening=0.9), slope)
    assert damped[1] == pytest.approx(2.40)  # so dampening is not the average


def test_momentum_gathers_speed_one_way_and_cancels_back_and_forth() -> None:
    steady = after(60, lambda p: sgd(p, lr=0.01, momentum=0.9), torch.ones_like)
    assert steady[-2] - steady[-1] == pytest.approx(0.01 / (1 - 0.9), rel=0.01)
    signs = iter([1.0, -1.0] * 30)
    zigzag = after(
        60, lambda p: sgd(p, lr=0.01, momentum=0.9), lambda x: next(signs) * torch.ones_like(x)
    )
    assert abs(zigzag[-2] - zigzag[-1]) == pytest.approx(0.01 / (1 + 0.9), rel=0.01)


def test_an_average_with_momentum_1_is_refused() -> None:
    with pytest.raises(ValueError, match="momentum in"):
        sgd_average([nn.Parameter(torch.zeros(1))], lr=0.1, momentum=1.0)


# --- Adam


@pytest.mark.parametrize("size", [1e-3, 1.0, 1e3])
def test_a_constant_gradient_moves_by_the_rate_whatever_its_size(size: float) -> None:
    x = after(20, lambda p: adamw(p, lr=0.01), lambda x: size * torch.ones_like(x))
    assert [a - b for a, b in pairwise(x)] == pytest.approx([0.01] * 20, rel=1e-4)


def test_without_bias_correction_the_first_step_is_3_16_rates_and_the_twelfth_6_57() -> None:
    theta = nn.Parameter(torch.zeros(1, dtype=torch.float64))
    optimiser = adamw([theta], lr=0.01)
    lengths = []
    for _ in range(30):
        theta.grad = torch.ones_like(theta)
        optimiser.step()
        held = optimiser.state[theta]
        lengths.append((held["exp_avg"] / held["exp_avg_sq"].sqrt()).item())
    assert lengths[0] == pytest.approx(3.162, abs=5e-4)
    assert lengths.index(max(lengths)) + 1 == 12
    assert max(lengths) == pytest.approx(6.57, abs=5e-3)


@pytest.mark.parametrize("s", [0.5, 2.0])
def test_noise_shortens_adams_step(s: float) -> None:
    """Mean 1 and noise s: mh is near 1 and vh near 1 + s^2, so the step is 1 / sqrt(1 + s^2)."""
    chance = torch.Generator().manual_seed(0)

    def noisy(x: Tensor) -> Tensor:
        return 1 + s * torch.randn(x.shape, dtype=x.dtype, generator=chance)

    places = walk(lambda p: adamw(p, lr=1e-3), noisy, [0.0] * 1000)
    x = [next(places).mean().item() for _ in range(301)]
    assert (x[200] - x[300]) / 100 == pytest.approx(1e-3 / math.sqrt(1 + s**2), rel=0.02)


def adam_formula(decay: float, *, decoupled: bool, steps: int = 50) -> Tensor:
    theta = torch.tensor([0.7, -1.3, 2.0], dtype=torch.float64)
    m = v = torch.zeros_like(theta)
    for t in range(1, steps + 1):
        g = drawn(theta) + (0.0 if decoupled else decay * theta)
        m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g * g
        move = m / (1 - 0.9**t) / ((v / (1 - 0.999**t)).sqrt() + 1e-8)
        theta = theta * (1 - 0.05 * decay if decoupled else 1.0) - 0.05 * move
    return theta


def last(build: Build, steps: int = 50) -> Tensor:
    places = walk(build, drawn, [0.7, -1.3, 2.0])
    return [next(places) for _ in range(steps + 1)][-1]


def test_adam_with_l2_puts_the_decay_into_both_moments_and_adamw_beside_them() -> None:
    within = last(lambda p: adam_l2(p, lr=0.05, weight_decay=0.3))
    beside = last(lambda p: adamw(p, lr=0.05, weight_decay=0.3))
    torch.testing.assert_close(within, adam_formula(0.3, decoupled=False), rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(beside, adam_formula(0.3, decoupled=True), rtol=1e-12, atol=1e-13)
    assert (within - beside).abs().max() > 0.05  # two methods, not two ways to write one


def test_adamws_decay_does_not_depend_on_the_gradient_and_adams_does() -> None:
    """Alternating gradients of size 1 and 100 give no drift; what is left is the decay."""

    def kept(build: Build, size: float) -> float:
        signs = iter([1.0, -1.0] * 50)
        return after(100, build, lambda x: size * next(signs) * torch.ones_like(x))[-1]

    def with_decay(p: list[nn.Parameter]) -> torch.optim.Optimizer:
        return adamw(p, lr=0.001, weight_decay=1.0)

    def with_l2(p: list[nn.Parameter]) -> torch.optim.Optimizer:
        return adam_l2(p, lr=0.001, weight_decay=1.0)

    assert kept(with_decay, 100.0) == pytest.approx(kept(with_decay, 1.0), rel=1e-4)
    assert kept(with_decay, 1.0) == pytest.approx(3.0 * 0.999**100, rel=1e-3)
    assert 3.0 - kept(with_l2, 100.0) < 0.1 * (3.0 - kept(with_l2, 1.0))


def test_a_rising_beta2_never_lengthens_a_step() -> None:
    """Against the exact divisor, 1 less the product of all beta2: at most 18 % shorter."""
    beta2, product, shares = beta2_warmup(1000), 1.0, []
    for t in range(1, 3000):
        product *= beta2(t - 1)
        shares.append(math.sqrt((1 - beta2(t - 1) ** t) / (1 - product)))
    assert max(shares) <= 1.0 + 1e-12
    assert min(shares) == pytest.approx(0.828, abs=1e-3)


# --- warm-up


def update_sizes(warmup: int, steps: int = 60) -> list[float]:
    """RMS of every step of AdamW on a small model, in units of the peak rate."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Embedding(16, 32), torch.nn.Flatten(), torch.nn.Linear(4 * 32, 64),
        torch.nn.GELU(), torch.nn.Linear(64, 16),
    )  # fmt: skip
    rate = 3e-3
    optimiser = adamw(model.parameters(), lr=rate)
    factor = warmup_cosine(warmup, 10**6)
    generator = torch.Generator().manual_seed(1)
    sizes = []
    for step in range(steps):
        optimiser.param_groups[0]["lr"] = rate * factor(step)
        ids = torch.randint(16, (16, 4), generator=generator)
        loss = torch.nn.functional.cross_entropy(model(ids), ids.sum(1) % 16)
        optimiser.zero_grad()
        loss.backward()
        before = [p.detach().clone() for p in model.parameters()]
        optimiser.step()
        moved = torch.cat(
            [(p.detach() - b).flatten() for p, b in zip(model.parameters(), before, strict=True)]
        )
        sizes.append(float(moved.square().mean().sqrt()) / rate)
    return sizes


def test_without_a_warm_up_the_first_update_is_the_largest() -> None:
    """OP-27: m / sqrt(v) of one gradient is its sign, so every entry moves by the whole rate.

    Later gradients disagree and updates are several times shorter; a warm-up of w steps divides the
    first by w, so that the largest update comes when averages mean something.
    """
    bare, warm = update_sizes(warmup=0), update_sizes(warmup=20)
    assert bare[0] == pytest.approx(1.0, abs=0.01)
    assert max(bare) == bare[0]
    assert sum(bare[-10:]) / 10 < 0.5
    assert warm[0] == pytest.approx(1 / 20, abs=0.001)
    assert max(warm) < 0.7 * bare[0]
