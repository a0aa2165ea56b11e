"""fenchel/choice/capped.py: no weight exceeds the cap, whose multiplier is its price."""

import math

import pytest
import torch

from fenchel.choice import Capped, Softmax, kkt, multipliers


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, dtype=torch.float64, generator=generator)


def test_a_cap_that_does_not_bind_changes_nothing() -> None:
    z = 0.1 * draw(4, 7)
    torch.testing.assert_close(Capped(0.9).weights(z), Softmax().weights(z))
    torch.testing.assert_close(Capped(1.0, 3.0).weights(9 * z), Softmax(3.0).weights(9 * z))


def test_what_is_not_capped_keeps_its_proportions() -> None:
    z = torch.tensor([5.0, 4.0, 1.0, 0.0], dtype=torch.float64)
    p = Capped(0.4).weights(z)
    torch.testing.assert_close(p[:2], torch.full((2,), 0.4).double())
    torch.testing.assert_close(p[2] / p[3], torch.tensor(math.e).double())


def test_the_multiplier_is_the_derivative_of_the_value_by_the_cap() -> None:
    z, step = 3 * draw(9), 1e-6
    choice = Capped(0.3)
    p = choice.weights(z)
    eta = multipliers(choice, z, p).ceiling
    assert ((eta > 0) == (p == 0.3)).all()
    assert eta.max() > 0.1
    gained = (Capped(0.3 + step).value(z) - Capped(0.3 - step).value(z)) / (2 * step)
    torch.testing.assert_close(gained, eta.sum(), rtol=1e-6, atol=1e-8)


def test_where_the_cap_cannot_be_kept_the_row_is_uniform() -> None:
    z = 3 * draw(4, 4)
    causal = torch.ones(4, 4).tril().log().double()
    p = Capped(0.4).weights(z, causal)
    torch.testing.assert_close(p[0], torch.tensor([1.0, 0, 0, 0]).double())
    torch.testing.assert_close(p[1], torch.tensor([0.5, 0.5, 0, 0]).double())
    assert p[2:].max() <= 0.4
    assert max(float(r.abs().max()) for r in kkt(Capped(0.4), z, p, causal)) < 1e-12
    torch.testing.assert_close(Capped(0.05).weights(z), torch.full((4, 4), 0.25).double())


def test_ties_at_the_cap_are_capped_together() -> None:
    z = torch.tensor([2.0, 2.0, 2.0, -9.0], dtype=torch.float64)
    p = Capped(0.3).weights(z)
    torch.testing.assert_close(p, torch.tensor([0.3, 0.3, 0.3, 0.1]).double())


def test_the_constant_bounds_and_half_the_cap_is_not_enough() -> None:
    for cap, K in ((0.7, 2), (0.3, 5), (0.21, 12)):
        choice = Capped(cap)
        reached = choice.sensitivity(choice.weights(4 * draw(3000, K))).max()
        assert reached <= choice.lipschitz(K)
    two = torch.tensor([0.3 - 1e-12, 0.3 - 1e-12, 0.2, 0.2], dtype=torch.float64)
    assert Capped(0.3).sensitivity(two) > 0.99 * Capped(0.3).lipschitz(4)
    assert Capped(0.25).lipschitz(4) == 0.0


def test_a_half_precision_weight_at_the_cap_does_not_move() -> None:
    for dtype in (torch.bfloat16, torch.float16):
        p = Capped(0.3).weights(torch.tensor([9.0, 0.0, 0.1, 0.2], dtype=dtype))
        moved = Capped(0.3).jacobian_product(p, torch.tensor([1.0, 0, 0, 0], dtype=dtype))
        assert (moved == 0).all()


@pytest.mark.parametrize("cap", [0.0, -0.1, 1.5, math.nan])
def test_a_cap_out_of_range_gets_a_sentence(cap: float) -> None:
    with pytest.raises(ValueError, match="0 < cap <= 1"):
        Capped(cap)
