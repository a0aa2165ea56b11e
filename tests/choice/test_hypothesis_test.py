"""choice/hypothesis_test.py: the worked example, counted exactly, and the bounds tried hard.

The example: scores 0, 1, 3 under the prior 0.5, 0.3, 0.2, and an observed mean score of 1.5.
"""

import math

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.func import grad, vmap

from fenchel.attention import entropy
from fenchel.choice import Hard, Softmax, beta_for_budget
from fenchel.choice.hypothesis_test import (
    chernoff_information,
    divergence,
    divergence_upper,
    evidence,
    large_deviation,
    pinsker_upper,
    sample_size_lower,
    tilted,
    total_variation,
    total_variation_upper,
)

Z = torch.tensor([0.0, 1.0, 3.0], dtype=torch.float64)
U = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)


def draw(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, dtype=torch.float64, generator=generator)


def law_of_the_sum(law: Tensor, m: int) -> np.ndarray:
    """The chances of each sum of m scores, by convolution."""
    one = np.array([law[0], law[1], 0.0, law[2]])
    total = np.array([1.0])
    for _ in range(m):
        total = np.convolve(total, one)
    return total


def near(found: object, wanted: object, digits: int) -> None:
    torch.testing.assert_close(
        torch.as_tensor(found, dtype=torch.float64),
        torch.as_tensor(wanted, dtype=torch.float64),
        atol=0.51 * 10**-digits,
        rtol=0,
    )


def test_the_numbers_of_the_example() -> None:
    rare = large_deviation(Z, 1.5, U.log())
    near(rare.beta, 0.3918, 4)
    near(rare.p, [0.314, 0.279, 0.407], 3)
    near(rare.rate, 0.1228, 4)
    near(divergence(U, rare.p), 0.1123, 4)
    near(chernoff_information(rare.p, U), 0.0296, 4)
    near(rare.p @ Z, 1.5, 12)


def test_given_an_unlikely_mean_one_draw_follows_the_tilted_law() -> None:
    m, least = 640, 960
    tail = law_of_the_sum(U, m)[least:].sum()
    near(-math.log(tail) / m, 0.128, 3)
    others = law_of_the_sum(U, m - 1)
    given = [float(U[i]) * others[least - int(Z[i]) :].sum() / tail for i in range(3)]
    near(given, [0.313, 0.279, 0.408], 3)
    near(given, large_deviation(Z, 1.5, U.log()).p, 2)


def test_false_alarms_fall_at_the_rate_of_stein() -> None:
    law = large_deviation(Z, 1.5, U.log()).p
    miss = 0.1
    found = []
    for m in (20, 80, 320, 640):
        null, other = law_of_the_sum(U, m), law_of_the_sum(law, m)
        below = np.cumsum(other)
        edge = int(np.searchsorted(below, miss, side="right"))
        share = (miss - below[edge - 1]) / other[edge]  # of the edge itself, kept as a miss
        alarm = null[edge + 1 :].sum() + (1 - share) * null[edge]
        found.append(-math.log(alarm) / m)
    near(found, [0.084, 0.087, 0.098, 0.104], 3)
    assert all(rate < float(divergence(law, U)) for rate in found)


def test_along_beta_mean_and_divergence_rise_by_the_variance() -> None:
    for beta in (0.1, 0.7, 3.0):
        b = torch.tensor(beta, dtype=torch.float64)
        here = tilted(Z, b, U.log())
        slope = grad(lambda b: tilted(Z, b, U.log()).mean)(b)
        torch.testing.assert_close(slope, here.variance)
        slope = grad(lambda b: tilted(Z, b, U.log()).divergence)(b)
        torch.testing.assert_close(slope, b * here.variance)
        torch.testing.assert_close(here.divergence, divergence(here.p, U))
        torch.testing.assert_close(here.p, Softmax(beta).weights(Z, U.log()))


def test_the_divergence_is_the_integral_of_s_times_the_variance() -> None:
    s = torch.linspace(0, 2.0, 20001, dtype=torch.float64)
    variance = vmap(lambda b: tilted(Z, b, U.log()).variance)(s)
    torch.testing.assert_close(
        torch.trapezoid(s * variance, s), tilted(Z, 2.0, U.log()).divergence, rtol=1e-7, atol=0
    )


def test_the_limits_of_the_divergence() -> None:
    small = tilted(Z, 1e-4, U.log())
    torch.testing.assert_close(
        small.divergence, 0.5e-8 * tilted(Z, 0.0, U.log()).variance, rtol=1e-3, atol=0
    )
    z = torch.tensor([1.0, 1.0, 0.0], dtype=torch.float64)
    torch.testing.assert_close(float(tilted(z, 1e4, U.log()).divergence), -math.log(0.8))
    torch.testing.assert_close(tilted(z, 1e4, U.log()).p, Hard().weights(z, U.log()))


def test_no_scores_and_prior_exceed_the_bounds() -> None:
    z, prior = 3 * draw(2000, 6), 2 * draw(2000, 6, seed=1)
    corner = torch.zeros(2000, 6, dtype=torch.float64)
    corner[:, 1] = 1.0  # two values, the case of equality in Hoeffding's lemma
    for scores in (z, corner):
        for beta in (1e-3, 0.3, 2.0):
            here = tilted(scores, beta, prior)
            u = prior.softmax(-1)
            apart = total_variation(here.p, u)
            assert (here.divergence <= divergence_upper(scores, beta) * (1 + 1e-9) + 1e-15).all()
            assert (apart <= total_variation_upper(scores, beta) * (1 + 1e-9)).all()
            assert (apart <= pinsker_upper(here.divergence.clamp(min=0)) + 1e-8).all()
    even = torch.zeros(2, dtype=torch.float64)
    pair = torch.tensor([0.0, 1.0], dtype=torch.float64)
    assert tilted(pair, 1e-2, even).divergence > 0.999 * divergence_upper(pair, 1e-2)


def test_evidence_is_the_log_of_posterior_over_prior() -> None:
    z, prior = draw(4, 6), draw(6, seed=1)
    posterior = Softmax(1.3).weights(z, prior)
    torch.testing.assert_close(evidence(z, 1.3, prior), (posterior / prior.softmax(-1)).log())
    torch.testing.assert_close(evidence(z, 1.3), (Softmax(1.3).weights(z) * 6).log())


def test_a_forbidden_alternative_stays_out_of_every_sum() -> None:
    prior = torch.tensor([0.0, -math.inf, 0.0], dtype=torch.float64)
    here = tilted(Z, 1.0, prior)
    kept = tilted(Z[[0, 2]], 1.0, prior[[0, 2]])
    assert here.p[1] == 0
    for ours, wanted in zip(here[1:], kept[1:], strict=True):
        torch.testing.assert_close(ours, wanted)
    assert divergence(U, here.p) == math.inf
    assert entropy(torch.eye(3)).tolist() == [0.0, 0.0, 0.0]


def test_more_distance_needs_fewer_draws() -> None:
    near(sample_size_lower(torch.tensor(0.1228), 0.01), math.log(100) / 0.1228, 4)
    least = 8 * math.log(100) / (0.3918**2 * 9)
    assert sample_size_lower(large_deviation(Z, 1.5, U.log()).rate, 0.01) >= least
    with pytest.raises(ValueError, match="between 0 and 1"):
        sample_size_lower(torch.tensor(0.1), 1.0)


def test_chernoff_information_is_symmetric_and_below_both_exponents() -> None:
    p, u = draw(50, 5).softmax(-1), draw(50, 5, seed=1).softmax(-1)
    here = chernoff_information(p, u)
    torch.testing.assert_close(here, chernoff_information(u, p))
    assert (here <= torch.minimum(divergence(p, u), divergence(u, p))).all()
    assert chernoff_information(torch.eye(2)[0], torch.eye(2)[1]) == math.inf


def test_a_mean_that_is_not_rare_gets_a_sentence() -> None:
    for mean in (0.5, 3.0):
        with pytest.raises(ValueError, match="should lie between"):
            large_deviation(Z, mean, U.log())


@pytest.mark.parametrize("beta", [0.0, 0.5, 2.0, 300.0])
@pytest.mark.parametrize("by_prior", [False, True])
def test_a_forbidden_alternative_is_as_if_it_were_not_there(beta: float, by_prior: bool) -> None:
    wide = torch.tensor([0.0, -math.inf, 1.0, 3.0], dtype=torch.float64)
    log_u = torch.tensor([0.5, 1e-3, 0.3, 0.2], dtype=torch.float64).log()
    if by_prior:
        wide[1], log_u[1] = 1e4, -math.inf
    kept = [0, 2, 3]
    for prior in (None, log_u):
        if prior is None and by_prior:
            continue
        found = tilted(wide, beta, prior)
        p = tilted(wide[kept], beta, None if prior is None else prior[kept])
        assert found.p[1] == 0
        torch.testing.assert_close(found.p[kept], p.p)
        torch.testing.assert_close(found[1:], p[1:])
        wide.requires_grad_()
        (slope,) = torch.autograd.grad(sum(tilted(wide, beta, prior)[1:]), wide)
        assert slope.isfinite().all()
        wide.requires_grad_(False)
    assert [float(x.sum()) for x in tilted(torch.full((3,), -math.inf), beta)] == [0.0] * 4


def test_budgets_and_large_deviations_under_a_forbidden_score() -> None:
    z = torch.tensor([0.0, 1.0, -math.inf], dtype=torch.float64)
    assert float(tilted(z, beta_for_budget(z, 0.3)).divergence) == pytest.approx(0.3, rel=1e-12)
    found, wanted = large_deviation(z, mean=0.8), large_deviation(z[:2], mean=0.8)
    torch.testing.assert_close(found.beta, wanted.beta)
    torch.testing.assert_close(found.p[:2], wanted.p)
