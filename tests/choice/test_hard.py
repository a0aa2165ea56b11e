"""fenchel/choice/hard.py: all weight on the largest score, ties split by the prior."""

import math

import torch
from torch import Tensor
from torch.func import jacrev

from fenchel.choice import Entmax, Hard, Softmax, Sparsemax


def test_ties_are_parted_by_the_prior() -> None:
    u = torch.tensor([0.1, 0.3, 0.6], dtype=torch.float64)
    z = torch.tensor([1.0, 1.0, 0.0], dtype=torch.float64)
    wanted = torch.tensor([0.25, 0.75, 0.0], dtype=torch.float64)
    torch.testing.assert_close(Hard().weights(z, u.log()), wanted)
    torch.testing.assert_close(Hard().weights(z), torch.tensor([0.5, 0.5, 0.0]).double())


def test_the_prior_never_outvotes_a_score() -> None:
    prior = torch.tensor([-50.0, 0.0])
    assert Hard().weights(torch.tensor([1e-6, 0.0]), prior).tolist() == [1.0, 0.0]
    assert Hard().value(torch.tensor([7.0, 3.0]), torch.tensor([-math.inf, 0.0])) == 3.0


def test_it_is_the_limit_of_the_others() -> None:
    generator = torch.Generator().manual_seed(0)
    z = torch.randn(5, 8, dtype=torch.float64, generator=generator)
    for soft in (Softmax(1e4), Entmax(1.5, 1e4), Sparsemax(1e4)):
        torch.testing.assert_close(soft.weights(z), Hard().weights(z))
        torch.testing.assert_close(soft.value(z), Hard().value(z))


def test_the_share_of_a_tie_moves_with_the_prior() -> None:
    z = torch.tensor([1.0, 1.0, 0.0], dtype=torch.float64)
    prior = torch.tensor([0.1, 0.3, 0.6], dtype=torch.float64).log()

    def share(prior: Tensor) -> Tensor:
        return Hard().weights(z, prior)

    p = share(prior)
    torch.testing.assert_close(jacrev(share)(prior), torch.diag(p) - torch.outer(p, p))


def test_the_gradient_exists_and_is_zero() -> None:
    z = torch.tensor([1.0, 2.0, -math.inf], requires_grad=True)
    (g,) = torch.autograd.grad(Hard().weights(z)[1], z)
    assert g.tolist() == [0.0, 0.0, 0.0]


def test_using_what_is_forbidden_costs_infinitely_much() -> None:
    prior = torch.tensor([0.0, -math.inf])
    p = torch.tensor([[1.0, 0.0], [0.5, 0.5]])
    assert Hard().regulariser(p, prior).tolist() == [0.0, math.inf]
