"""fenchel/attention/blocked.py: a row from one number, against the map that solves for it."""

import pytest
import torch

from fenchel.attention import attend
from fenchel.attention.blocked import recompute_rows_, solve_rows_
from fenchel.attention.spec import exponent
from fenchel.choice import Choice, Entmax, Hard, Softmax, Sparsemax

MAPS = [Softmax(), Entmax(1.1), Entmax(1.5), Entmax(1.7), Sparsemax()]


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
    torch.testing.assert_close(s, choice.spread(same), **near)
    assert (p[2] == 0).all()
    assert (same[2] == 0).all()
    assert (s[2] == 0).all()
    assert nu[2] == torch.inf


def test_maps_that_need_more_than_one_number_are_refused_with_the_reason() -> None:
    assert exponent(Hard()) is None
    assert exponent(Entmax(1.01)) is None
    assert exponent(Entmax(2.1)) is None  # s would jump from infinity to 0 with the last digit
    assert exponent(Entmax(torch.tensor(1.5))) is None


def test_a_light_weight_above_alpha_two_has_the_gradient_of_the_reference() -> None:
    choice = Entmax(4.0)
    q = torch.ones(1, 1, 3, 1)
    k = torch.tensor([0.0, -0.3333, -2.0]).view(1, 1, 3, 1)  # weights 1 - 3e-5, 3e-5 and 0
    v = torch.tensor([[1.0, 0.5], [-2.0, 3.0], [0.0, 7.0]]).view(1, 1, 3, 2)
    for x in (q, k, v):
        x.requires_grad_()
    results = {}
    for name, dtype in (("blocked", torch.float32), ("reference", torch.float64)):
        call = [x.to(dtype) for x in (q, k, v)]
        out = attend(*call, choice=choice, scale=1.0, backend=name)
        results[name] = [
            t.double() for t in (out, *torch.autograd.grad(out.square().sum(), (q, k)))
        ]
    for ours, wanted in zip(*results.values(), strict=True):
        torch.testing.assert_close(ours, wanted, atol=1e-6, rtol=1e-5)
