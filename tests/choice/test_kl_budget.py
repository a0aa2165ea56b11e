"""fenchel/choice/kl_budget.py: the beta whose divergence equals the budget."""

import math

import cvxpy as cp
import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck

from fenchel.choice import Softmax, beta_for_budget
from fenchel.choice.hypothesis_test import divergence


def draw(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, dtype=torch.float64, generator=generator)


def spent(z: Tensor, beta: Tensor, log_prior: Tensor) -> Tensor:
    u = log_prior.softmax(-1)
    return divergence(Softmax(beta.unsqueeze(-1)).weights(z, log_prior), u)


def test_the_budget_is_spent_at_every_size_of_scores_and_budget() -> None:
    kappa = torch.tensor([1e-8, 1e-3, 0.1, 0.5, 0.9, 0.999], dtype=torch.float64)
    for scale in (1e-4, 1.0, 1e4):
        z, prior = scale * draw(6, 9), draw(9, seed=1)
        limit = -prior.log_softmax(-1)[z.argmax(-1)]
        budget = kappa * limit
        beta = beta_for_budget(z, budget, prior)
        torch.testing.assert_close(
            spent(z, beta, prior.expand(6, 9)), budget, rtol=1e-9, atol=1e-15
        )


def test_it_solves_the_problem_with_the_constraint() -> None:
    z, prior, kappa = draw(6), draw(6, seed=1), 0.3
    p = cp.Variable(6)
    u = prior.softmax(-1).numpy()
    rules = [cp.sum(p) == 1, p >= 0, cp.sum(cp.rel_entr(p, u)) <= kappa]
    problem = cp.Problem(cp.Maximize(z.numpy() @ p), rules)
    problem.solve(solver=cp.CLARABEL)
    beta = beta_for_budget(z, kappa, prior)
    found = Softmax(float(beta)).weights(z, prior)
    torch.testing.assert_close(found, torch.from_numpy(p.value), atol=1e-5, rtol=0)
    # beta is one over the multiplier of the budget
    torch.testing.assert_close(1 / float(rules[2].dual_value), float(beta), rtol=1e-4, atol=0)


def test_nothing_to_spend_too_much_to_spend_and_nothing_to_choose() -> None:
    z = torch.tensor([0.0, 1.0, 1.0], dtype=torch.float64)
    limit = math.log(3 / 2)  # two of three are best
    assert beta_for_budget(z, 0.0) == 0
    assert beta_for_budget(z, limit + 1e-9) == math.inf
    assert beta_for_budget(z, limit - 1e-9) < math.inf
    assert beta_for_budget(torch.zeros(3).double(), 0.1) == math.inf
    assert beta_for_budget(z, 0.1, torch.full((3,), -math.inf).double()) == 0


def test_forbidden_alternatives_do_not_count() -> None:
    z, prior = draw(6), draw(6, seed=1)
    prior[2] = -math.inf
    kept = [0, 1, 3, 4, 5]
    torch.testing.assert_close(
        beta_for_budget(z, 0.2, prior), beta_for_budget(z[kept], 0.2, prior[kept])
    )
    forbidden = z + torch.where(prior == -math.inf, -math.inf, 0.0)
    torch.testing.assert_close(beta_for_budget(forbidden, 0.2), beta_for_budget(z[kept], 0.2))


def test_it_follows_scores_budget_and_prior() -> None:
    z, prior = draw(2, 5).requires_grad_(), draw(5, seed=1).requires_grad_()
    kappa = torch.tensor([0.1, 0.4], dtype=torch.float64, requires_grad=True)
    assert gradcheck(beta_for_budget, (z, kappa, prior), check_forward_ad=True)


def test_a_negative_budget_gets_a_sentence() -> None:
    with pytest.raises(ValueError, match="kappa >= 0"):
        beta_for_budget(torch.zeros(3), -0.1)


def test_a_prior_that_is_all_but_certain_has_its_beta_too() -> None:
    """KL is 1e-60 up to some beta and then rises at once to its limit."""
    draw = torch.Generator().manual_seed(0)
    prior, z = (60.0 * torch.randn(500, 17, generator=draw).double() for _ in range(2))
    kappa = 10 ** (4 * torch.rand(500, generator=draw).double() - 3.5)
    log_u = prior.log_softmax(-1)
    beta = beta_for_budget(z, kappa, log_u)
    p = (log_u + beta.unsqueeze(-1) * z).log_softmax(-1)
    found = (p.exp() * (p - log_u)).sum(-1)
    inside = beta.isfinite()
    assert int(inside.sum()) > 400
    torch.testing.assert_close(found[inside], kappa[inside], rtol=1e-6, atol=1e-9)
