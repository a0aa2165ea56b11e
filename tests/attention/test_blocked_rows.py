"""fenchel/attention/blocked.py: a row from one number, against the map that solves for it."""

import pytest
import torch

from fenchel.attention.blocked import exponent, recompute_rows_, solve_rows_
from fenchel.choice import Choice, Entmax, Hard, Softmax, Sparsemax

MAPS = [Softmax(), Entmax(1.1), Entmax(1.5), Entmax(1.7), Sparsemax(), Entmax(3.0)]


@pytest.mark.parametrize("choice", MAPS, ids=repr)
@pytest.mark.parametrize("size", [1e-3, 1.0, 30.0, 1e4])
def test_one_number_a_row_gives_back_weights_and_their_spread(choice: Choice, size: float) -> None:
    generator = torch.Generator().manual_seed(0)
    x = size * torch.randn(5, 40, dtype=torch.float64, generator=generator)
    x[1, 3:] = -torch.inf
    x[2] = -torch.inf
    alpha = exponent(choice)
    assert alpha is not None
    p, nu = solve_rows_(x.clone(), choice, alpha)
    torch.testing.assert_close(p, choice.weights(x))
    rise = 1.0 if alpha == 1.0 else alpha - 1.0
    same, s = recompute_rows_(rise * x, nu, alpha, torch.empty_like(x))
    near = {"atol": 1e-9 * max(size, 1.0), "rtol": 1e-7}
    torch.testing.assert_close(same, p, **near)
    if alpha <= 2.0:  # beyond, s jumps from infinity to 0 where a weight vanishes
        torch.testing.assert_close(s, choice.spread(same), **near)
    assert (p[2] == 0).all()
    assert (same[2] == 0).all()
    assert (s[2] == 0).all()
    assert nu[2] == torch.inf


def test_maps_that_need_more_than_one_number_say_so() -> None:
    assert exponent(Hard()) is None
    assert exponent(Entmax(1.01)) is None
    assert exponent(Entmax(torch.tensor(1.5))) is None
