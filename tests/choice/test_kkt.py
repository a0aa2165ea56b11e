"""fenchel/choice/kkt.py: each residual detects its own kind of error."""

import math

import pytest
import torch
from torch import Tensor

from fenchel.choice import Capped, Choice, Entmax, Hard, Softmax, Sparsemax, kkt, multipliers

Z = torch.tensor([1.0, 0.8, -3.0, 0.9], dtype=torch.float64)


def law(*p: float) -> Tensor:
    return torch.tensor(p, dtype=torch.float64)


def test_a_sum_that_is_not_one_a_negative_weight_and_a_broken_cap_are_primal() -> None:
    assert math.isclose(float(kkt(Softmax(), Z, law(0.5, 0.2, 0.1, 0.1)).primal), 0.1)
    assert math.isclose(float(kkt(Softmax(), Z, law(0.7, 0.2, -0.1, 0.2)).primal), 0.1)
    assert math.isclose(float(kkt(Capped(0.4), Z, law(0.5, 0.2, 0.1, 0.2)).primal), 0.1)
    prior = law(0.0, 0.0, 0.0, -math.inf)
    assert math.isclose(float(kkt(Softmax(), Z, law(0.5, 0.2, 0.1, 0.2), prior).primal), 0.2)


def test_leaving_out_what_deserves_weight_is_dual() -> None:
    p = law(1.0, 0.0, 0.0, 0.0)
    found = kkt(Sparsemax(), Z, p)
    assert found.primal == found.stationarity == found.slackness == 0
    assert math.isclose(float(found.dual), 0.9)  # p_4 = 0 has nu - x_4 = (1 - 1) - 0.9 below 0
    assert found.gap > 0.1


def test_weight_on_what_deserves_none_is_slackness() -> None:
    p = Sparsemax().weights(Z)
    wrong = p + law(-0.01, -0.01, 0.03, -0.01)
    found = kkt(Sparsemax(), Z, wrong)
    assert found.slackness > 0.01
    assert found.gap > 0.01


def test_the_wrong_proportions_are_stationarity() -> None:
    p = Softmax().weights(Z)
    found = kkt(Softmax(), Z, p + law(0.01, -0.01, 0.0, 0.0))
    assert found.primal < 1e-15
    assert found.stationarity > 0.01
    assert found.gap > 1e-4


@pytest.mark.parametrize("choice", [Softmax(2.0), Entmax(1.3), Sparsemax(), Capped(0.4)], ids=repr)
def test_the_gap_is_what_is_lost_and_never_less(choice: Choice) -> None:
    generator = torch.Generator().manual_seed(0)
    rivals = torch.randn(50, 4, dtype=torch.float64, generator=generator).softmax(-1)
    rivals = rivals[(rivals <= choice.ceiling).all(-1)]
    reached = rivals @ Z - choice.regulariser(rivals) / choice.beta
    lost = choice.beta * (choice.value(Z) - reached)
    assert (kkt(choice, Z.expand_as(rivals), rivals).gap >= lost - 1e-12).all()


def test_the_multipliers_of_sparsemax_are_how_far_a_loser_trails() -> None:
    nu, mu, eta = multipliers(Sparsemax(), Z, Sparsemax().weights(Z))
    tau = float((Z[[0, 1, 3]].sum() - 1) / 3)
    torch.testing.assert_close(mu, law(0.0, 0.0, tau + 3.0, 0.0))
    torch.testing.assert_close(float(nu), tau + 0.5)
    assert (eta == 0).all()


def test_nu_is_what_one_more_unit_of_weight_is_worth() -> None:
    p, step = Softmax().weights(Z), 1e-6
    nu = multipliers(Softmax(), Z, p).total

    def best(total: float) -> Tensor:  # softmax scaled to the total solves it
        q = total * p
        return q @ Z - Softmax().regulariser(q)

    torch.testing.assert_close((best(1 + step) - best(1 - step)) / (2 * step), nu)


def test_weights_too_small_for_the_dtype_pass_as_zero() -> None:
    z = torch.tensor([0.0, -1e4, -2e4], dtype=torch.float64)
    found = kkt(Softmax(), z, Softmax().weights(z))
    assert max(float(r.abs()) for r in found) == 0
    found = kkt(Softmax(), torch.zeros(3).double(), law(1.0, 0.0, 0.0))
    assert found.dual > 100


def test_a_forbidden_row_is_certified_by_zeros() -> None:
    prior = torch.full((4,), -math.inf, dtype=torch.float64)
    for choice in (Softmax(), Entmax(), Hard(), Capped(0.5)):
        assert max(float(r) for r in kkt(choice, Z, 0.0 * Z, prior)) == 0
        assert kkt(choice, Z, law(1.0, 0.0, 0.0, 0.0), prior).primal == 1
