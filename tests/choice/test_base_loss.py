"""fenchel/choice/base.py: the Fenchel-Young loss, where a plain sum would lose it."""

import math
from collections.abc import Sequence
from dataclasses import replace

import mpmath
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck

from fenchel.choice import Capped, Choice, Entmax, Hard, Softmax, Sparsemax

INF = math.inf
MAPS = [Softmax, Sparsemax, lambda b: Entmax(1.5, b), lambda b: Entmax(3.5, b)]
MAPS += [lambda b: Entmax(1.001, b), lambda b: Capped(0.6, b)]
every_map = pytest.mark.parametrize("build", MAPS, ids=lambda build: repr(build(1.0)))
Y = [0.5, 0.25, 0.125, 0.125, 0.0]
"""A distribution that is exact in every dtype."""


def loss_in_digits(
    solver, choice: Choice, z: Sequence[float], y: Sequence[float], log_u: Sequence[float]
) -> float:
    """[max <p, x> - Omega(p)  -  (<y, x> - Omega(y))] / beta in 60 digits."""
    with mpmath.workdps(60):
        beta = mpmath.mpf(float(choice.beta))
        x = [beta * mpmath.mpf(s) + mpmath.mpf(u) for s, u in zip(z, log_u, strict=True)]
        alpha = {Softmax: 1, Capped: 1, Sparsemax: 2}.get(type(choice)) or choice.alpha

        def omega(t: mpmath.mpf) -> mpmath.mpf:
            a = mpmath.mpf(alpha)
            return t * mpmath.log(t) if a == 1 else (t**a - t) / (a * (a - 1))

        def objective(p: Sequence[mpmath.mpf]) -> mpmath.mpf:
            return sum(t * s - omega(t) for t, s in zip(p, x, strict=True) if t > 0)

        best = objective(solver(x, alpha, min(choice.ceiling, 1.0)))
        return float((best - objective([mpmath.mpf(t) for t in y])) / beta)


@every_map
@pytest.mark.parametrize("beta", [1e-6, 1e-3, 1.0, 1e3, 1e6])
def test_it_has_its_digits_at_every_temperature(build, beta: float, mp_weights) -> None:
    choice = build(beta)
    generator = torch.Generator().manual_seed(1)
    for dtype, tolerance in ((torch.float32, 2e-5), (torch.float64, 1e-12)):
        for log_u in ([0.0] * 5, [0.25, -0.5, 0.0, 1.0, -INF]):
            z = torch.randn(5, generator=generator).to(dtype)
            y, prior = torch.tensor(Y, dtype=dtype), torch.tensor(log_u, dtype=dtype)
            wanted = loss_in_digits(mp_weights, choice, z.tolist(), Y, log_u)
            found = float(choice.loss(z, y, prior))
            assert abs(found - wanted) <= tolerance * wanted


@every_map
@pytest.mark.parametrize("beta", [1e-6, 1e-4])
def test_a_target_near_the_weights_keeps_its_digits(build, beta: float, mp_weights) -> None:
    choice = build(beta)
    z = torch.randn(8, dtype=torch.float64, generator=torch.Generator().manual_seed(4))
    wanted = loss_in_digits(mp_weights, choice, z.tolist(), [0.125] * 8, [0.0] * 8)
    found = float(choice.loss(z, torch.full_like(z, 0.125)))
    assert abs(found - wanted) <= 1e-8 * wanted


@every_map
@pytest.mark.parametrize("beta", [1e-12, 1e-6, 1.0, 1e6])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_loss_of_its_own_weights_is_nothing(build, beta: float, dtype: torch.dtype) -> None:
    choice, eps = build(beta), torch.finfo(dtype).eps
    generator = torch.Generator().manual_seed(2)
    z = 3.0 * torch.randn(20, 19, generator=generator).to(dtype)
    z[0, :9] = -INF
    z[1, 3:] = z[1, 3]
    loss = choice.loss(z, choice.weights(z))
    assert (loss >= 0).all()
    assert (loss <= 100 * eps**2 / beta).all()


@every_map
@pytest.mark.parametrize("y", [[0.0, 0.5, 0.5], 2])
def test_a_forbidden_score_has_no_part_in_it(build, y: list[float] | int) -> None:
    choice = build(1.0)
    target, short = torch.tensor(y), torch.tensor(y[1:] if isinstance(y, list) else y - 1)
    for dtype, sizes in ((torch.float32, (1e4, 1e8, 3e38)), (torch.float64, (1e17, 1e300))):
        prior = torch.tensor([-INF, 0.0, 0.0], dtype=dtype)
        kept = torch.tensor([1.0, 2.0], dtype=dtype, requires_grad=True)
        wanted = choice.loss(kept, short)
        (wanted_slope,) = torch.autograd.grad(wanted, kept)
        for size in sizes:
            z = torch.tensor([size, 1.0, 2.0], dtype=dtype, requires_grad=True)
            loss = choice.loss(z, target, prior)
            torch.testing.assert_close(loss, wanted)
            (slope,) = torch.autograd.grad(loss, z)
            assert slope[0] == 0
            torch.testing.assert_close(slope[1:], wanted_slope)
            values = choice.value(z, prior), choice.value(kept)
            torch.testing.assert_close(*values)


EVERY = [build(1.0) for build in MAPS] + [Hard()]


@pytest.mark.parametrize("choice", EVERY, ids=repr)
@pytest.mark.parametrize("by_score", [False, True])
def test_a_forbidden_truth_costs_infinity_with_a_finite_gradient(
    choice: Choice, by_score: bool
) -> None:
    z = torch.zeros(3, 3, dtype=torch.float64)
    prior = torch.tensor([[0.0, -INF, 0.0], [0.0, 0.0, 0.0], [-INF] * 3], dtype=torch.float64)
    if by_score:
        z, prior = z + prior, None
    z.requires_grad_()
    certain = torch.tensor([1, 1, 1])
    spread = torch.tensor([[0.5, 0.5, 0.0]] * 3, dtype=torch.float64)
    for y in (certain, spread):
        loss = choice.loss(z, y, prior)
        assert loss[[0, 2]].tolist() == [INF, INF]
        corner_above_cap = y is certain and choice.ceiling < 1
        assert loss[1].isfinite() != corner_above_cap
        (slope,) = torch.autograd.grad(loss.sum(), z)
        assert slope.isfinite().all()


def test_above_the_cap_nothing_is_admissible() -> None:
    z = torch.tensor([[10.0, 0.0, 0.0], [-1.0, 0.0, 3.0]])
    choice = Capped(0.5)
    assert choice.loss(z, torch.tensor([0, 1])).tolist() == [INF, INF]
    assert choice.regulariser(torch.tensor([0.6, 0.4, 0.0])) == INF
    at_cap = torch.tensor([[0.5, 0.5, 0.0], [0.5, 0.25, 0.25]])
    assert (choice.loss(z, at_cap) >= 0).all()
    # where the cap cannot be met, it is one over the number of allowed alternatives
    alone = torch.tensor([-INF, 0.0, -INF])
    assert choice.loss(z, torch.tensor([1, 1]), alone).tolist() == [0.0, 0.0]
    assert Capped(0.2).loss(z[0], torch.full((3,), 1 / 3)) == 0.0
    assert Capped(0.3).loss(torch.zeros(2).bfloat16(), torch.full((2,), 0.5).bfloat16()) == 0.0


@pytest.mark.parametrize("choice", EVERY[:-1], ids=repr)
def test_it_is_differentiable_twice_in_scores_and_temperature(choice: Choice) -> None:
    generator = torch.Generator().manual_seed(3)
    z = torch.randn(2, 5, dtype=torch.float64, generator=generator).requires_grad_()
    y = torch.tensor([Y, [0.2] * 5], dtype=torch.float64)
    beta = torch.tensor([[0.7], [1.3]], dtype=torch.float64, requires_grad=True)

    def loss(z: Tensor, beta: Tensor) -> Tensor:
        return replace(choice, beta=beta).loss(z, y)

    assert gradcheck(loss, (z, beta), check_forward_ad=True)
    assert gradgradcheck(loss, (z, beta))


wild = st.one_of(
    st.floats(-5.0, 5.0, width=32),
    st.sampled_from([0.0, 1.0, -INF, 1e4, -1e4, 1e-30, 3e38]),
)


@pytest.mark.parametrize("choice", EVERY, ids=repr)
@settings(max_examples=60)
@given(
    rows=st.integers(1, 5).flatmap(lambda K: st.lists(wild, min_size=3 * K, max_size=3 * K)),
    target=st.integers(0, 4),
)
def test_wild_inputs_have_a_loss_that_is_no_less_than_zero(
    choice: Choice, rows: list[float], target: int
) -> None:
    z, prior, tilt = torch.tensor(rows, dtype=torch.float32).view(3, -1)
    prior, z = prior.clamp(max=1e4), z.requires_grad_()
    y = choice.weights(tilt)
    targets = [torch.tensor(target % len(z))] + ([y] if y.sum() > 0 else [])
    for y in targets:
        loss = choice.loss(z, y, prior)
        assert loss >= 0  # and is not nan
        feasible = (z > -INF) & (prior > -INF)
        law = y if y.is_floating_point() else torch.nn.functional.one_hot(y, len(z))
        if (~feasible & (law > 0)).any():
            assert loss == INF
        (slope,) = torch.autograd.grad(loss, z)
        assert slope.isfinite().all()
