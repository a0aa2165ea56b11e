"""fenchel/choice/softmax.py: the numbers of the notes, and what is special to softmax."""

import math

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck
from torch.func import hessian, jacfwd, jacrev
from torch.nn.functional import cross_entropy

from fenchel.attention import entropy
from fenchel.choice import Hard, Softmax
from fenchel.choice.hypothesis_test import divergence


def draw(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, dtype=torch.float64, generator=generator)


def test_five_against_four_is_two_against_one() -> None:
    wanted = torch.tensor([0.7311, 0.2689])
    for pair in ([5.0, 4.0], [2.0, 1.0]):
        torch.testing.assert_close(Softmax().weights(torch.tensor(pair)), wanted, atol=5e-5, rtol=0)


def test_the_restaurants_scores_are_the_logarithms_of_their_chances() -> None:
    p = torch.tensor([0.30, 0.50, 0.20], dtype=torch.float64)
    torch.testing.assert_close(Softmax().weights(p.log() + 17.0), p)


def test_a_difference_of_scores_is_a_ratio_of_weights() -> None:
    z = draw(6)
    p = Softmax(beta=0.7).weights(z)
    torch.testing.assert_close(p[:, None] / p, (0.7 * (z[:, None] - z)).exp())


def test_entropy_falls_with_beta_from_log_k_to_the_hard_choice() -> None:
    z = draw(6)
    betas = [1e-9, 0.1, 0.5, 1.0, 3.0, 10.0, 1000.0]
    spread = torch.stack([entropy(Softmax(beta).weights(z)) for beta in betas])
    assert (spread.diff() < 0).all()
    torch.testing.assert_close(float(spread[0]), math.log(6))
    torch.testing.assert_close(Softmax(1000.0).weights(z), Hard().weights(z))


def test_beta_to_zero_gives_back_the_prior_and_to_infinity_parts_ties_by_it() -> None:
    u = torch.tensor([0.1, 0.3, 0.6], dtype=torch.float64)
    z = torch.tensor([1.0, 1.0, 0.0], dtype=torch.float64)
    torch.testing.assert_close(Softmax(1e-12).weights(z, u.log()), u)
    wanted = torch.tensor([0.25, 0.75, 0.0], dtype=torch.float64)
    torch.testing.assert_close(Softmax(1e3).weights(z, u.log()), wanted)


def test_the_value_is_log_sum_exp_and_finite_where_the_sum_overflows() -> None:
    z = draw(4, 6)
    for beta in (0.5, 1.0, 4.0):
        torch.testing.assert_close(Softmax(beta).value(z), (beta * z).logsumexp(-1) / beta)
    big = torch.tensor([89.0, 88.0])
    assert big.exp().sum().isinf()
    torch.testing.assert_close(Softmax().value(big), 89.0 + torch.tensor(1 + math.exp(-1)).log())


def test_without_a_prior_the_value_is_larger_by_log_k_than_with_the_uniform_one() -> None:
    z, beta = draw(5), 2.0
    uniform = torch.full((5,), -math.log(5), dtype=torch.float64)
    gap = Softmax(beta).value(z) - Softmax(beta).value(z, uniform)
    torch.testing.assert_close(float(gap), math.log(5) / beta)
    p = Softmax(beta).weights(z, uniform)
    torch.testing.assert_close(p, (beta * z).exp() / (beta * z).exp().sum())
    torch.testing.assert_close(divergence(p, uniform.exp()), math.log(5) - entropy(p))


def test_any_other_law_loses_its_divergence_from_the_best() -> None:
    z, beta, u = draw(5), 1.7, draw(5, seed=1).softmax(-1)
    choice = Softmax(beta)
    other = draw(20, 5, seed=2).softmax(-1)
    reached = other @ z - choice.regulariser(other, u.log()) / beta
    best = choice.weights(z, u.log())
    torch.testing.assert_close(
        choice.value(z, u.log()) - reached, divergence(other, best.expand_as(other)) / beta
    )
    torch.testing.assert_close(choice.regulariser(other, u.log()), divergence(other, u))


def test_negative_entropy_and_log_sum_exp_are_conjugate() -> None:
    p = draw(5).softmax(-1)
    reached = draw(200, 5, seed=1) @ p - Softmax().value(draw(200, 5, seed=1))
    assert (reached <= -entropy(p)).all()
    torch.testing.assert_close(p.log() @ p - Softmax().value(p.log()), -entropy(p))


def test_log_sum_exp_lies_below_its_chords() -> None:
    a, b, share = draw(50, 4), draw(50, 4, seed=1), torch.linspace(0, 1, 50).double()
    middle = Softmax().value(share[:, None] * a + (1 - share[:, None]) * b)
    assert (middle <= share * Softmax().value(a) + (1 - share) * Softmax().value(b)).all()


def test_entropy_lies_above_its_chords_and_below_the_logarithm_and_zeros_add_nothing() -> None:
    a, b = draw(50, 4).softmax(-1), draw(50, 4, seed=1).softmax(-1)
    share = torch.linspace(0, 1, 50).double()
    between = share[:, None] * a + (1 - share[:, None]) * b
    assert (entropy(between) >= share * entropy(a) + (1 - share) * entropy(b) - 1e-15).all()
    torch.testing.assert_close(Softmax().regulariser(between), -entropy(between))
    assert (entropy(a) < math.log(4)).all()
    even = torch.tensor([[1 / 4] * 4, [0.5, 0.5, 0.0, 0.0], [0.0, 1.0, 0.0, 0.0]]).double()
    torch.testing.assert_close(entropy(even), torch.tensor([4.0, 2.0, 1.0]).double().log())


def test_the_jacobian_is_beta_times_diag_p_less_p_p() -> None:
    z, beta = draw(5), 3.0
    p = Softmax(beta).weights(z)
    wanted = beta * (torch.diag(p) - torch.outer(p, p))
    torch.testing.assert_close(jacrev(Softmax(beta).weights)(z), wanted)
    torch.testing.assert_close(hessian(Softmax(beta).value)(z), wanted)
    at_zero = jacfwd(Softmax().weights)(torch.zeros(5).double())
    torch.testing.assert_close(at_zero, torch.eye(5).double() / 5 - 1 / 25)


def test_half_of_beta_is_reached_by_two_equal_scores_alone() -> None:
    two = Softmax(beta=3.0)
    assert two.sensitivity(two.weights(torch.zeros(2).double())) == two.lipschitz(2) == 1.5
    uniform = Softmax(beta=3.0).weights(torch.zeros(6).double())
    torch.testing.assert_close(float(two.sensitivity(uniform)), 3.0 / 6)
    # two at 0 and three at -depth
    for depth, wanted in ((1.0, 0.322), (5.0, 0.495), (20.0, 0.49999999845)):
        z = torch.tensor([0.0, 0.0, -depth, -depth, -depth], dtype=torch.float64)
        reached = float(Softmax().sensitivity(Softmax().weights(z)))
        assert abs(reached - wanted) < (5e-4 if depth < 20 else 5e-12)
        assert reached < 0.5


def test_no_pair_of_scores_moves_the_weights_faster() -> None:
    a = 5 * draw(2000, 4)
    b = a + draw(2000, 4, seed=1) * torch.logspace(-3, 1, 2000).double()[:, None]
    for beta in (0.5, 4.0):
        c = Softmax(beta)
        ratio = (c.weights(a) - c.weights(b)).norm(dim=-1) / (a - b).norm(dim=-1)
        assert ratio.max() <= c.lipschitz(4)


def test_rows_of_the_jacobian_sum_to_at_most_a_half_and_all_of_it_to_at_most_one() -> None:
    J = torch.stack([jacrev(Softmax().weights)(z) for z in 3 * draw(50, 5)])
    assert J.abs().sum(-1).max() <= 0.5
    # l-inf to l1: the largest over sign vectors
    signs = torch.cartesian_prod(*[torch.tensor([-1.0, 1.0]).double()] * 5)
    assert (J @ signs.T).abs().sum(1).max() <= 1.0


def test_a_learnable_beta_and_prior_get_their_gradients() -> None:
    z = draw(3, 4, 5).requires_grad_()
    beta = torch.rand(4, 1, dtype=torch.float64).add(0.5).requires_grad_()
    prior = draw(4, 5, seed=1).requires_grad_()

    def both(z: Tensor, beta: Tensor, prior: Tensor) -> tuple[Tensor, Tensor]:
        return Softmax(beta).weights(z, prior), Softmax(beta).value(z, prior)

    assert gradcheck(both, (z, beta, prior), check_forward_ad=True)
    assert gradgradcheck(both, (z, beta, prior))


def test_beta_per_row_follows_the_axis_of_the_choice() -> None:
    z, beta = draw(3, 5), torch.tensor([[0.5], [1.0], [2.0]], dtype=torch.float64)
    rows = [Softmax(float(b)) for b in beta]
    wanted = torch.stack([c.weights(row) for c, row in zip(rows, z, strict=True)])
    values = torch.stack([c.value(row) for c, row in zip(rows, z, strict=True)])
    torch.testing.assert_close(Softmax(beta).weights(z), wanted)
    torch.testing.assert_close(Softmax(beta.T).weights(z.T, dim=0).T, wanted)
    torch.testing.assert_close(Softmax(beta).value(z), values)
    torch.testing.assert_close(Softmax(beta.T).value(z.T, dim=0), values)
    torch.testing.assert_close(
        Softmax(beta).sensitivity(wanted),
        torch.stack([c.sensitivity(p) for c, p in zip(rows, wanted, strict=True)]),
    )


def test_a_learnable_beta_survives_scores_of_minus_infinity() -> None:
    z = torch.tensor([[0.0, 1.0, -math.inf], [-math.inf] * 3], requires_grad=True)
    beta = torch.tensor(1.5, requires_grad=True)
    p = Softmax(beta).weights(z)
    gradients = torch.autograd.grad((p * p).sum(), (z, beta))
    assert all(g.isfinite().all() for g in gradients)
    assert gradients[1] != 0
    _, tangent = torch.func.jvp(
        lambda b: Softmax(b).weights(z.detach()), (beta.detach(),), (torch.ones(()),)
    )
    assert tangent.isfinite().all()
    assert tangent.abs().max() > 0


def test_with_an_index_the_loss_is_cross_entropy() -> None:
    z, y = draw(5, 9), torch.tensor([0, 8, 3, 3, 1])
    torch.testing.assert_close(Softmax().loss(z, y), cross_entropy(z, y, reduction="none"))
    far = (z + 1e4).float()
    shifted = cross_entropy(far.double(), y, reduction="none").float()
    torch.testing.assert_close(Softmax().loss(far, y), shifted, atol=1e-6, rtol=1e-5)


def test_with_a_law_the_loss_is_a_divergence() -> None:
    z, y = draw(5, 9), draw(5, 9, seed=1).softmax(-1)
    torch.testing.assert_close(Softmax().loss(z, y), divergence(y, z.softmax(-1)))


def test_a_forbidden_truth_costs_infinitely_much() -> None:
    prior = torch.tensor([0.0, -math.inf, 0.0])
    loss = Softmax().loss(torch.zeros(2, 3), torch.tensor([0, 1]), prior)
    torch.testing.assert_close(loss, torch.tensor([math.log(2), math.inf]))


def test_the_plain_call_is_torch_softmax_to_the_bit() -> None:
    z = draw(4, 33).float()
    assert torch.equal(Softmax().weights(z), torch.softmax(z, -1))
    assert torch.equal(Softmax().weights(z.bfloat16()), torch.softmax(z.bfloat16(), -1))


def test_nan_is_not_taken_for_a_forbidden_row() -> None:
    z = torch.tensor([[math.nan, -math.inf], [-math.inf, -math.inf]])
    p = Softmax().weights(z)
    assert p[0].isnan().all()
    assert (p[1] == 0).all()


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: Softmax(0.0), "0 < beta < inf"),
        (lambda: Softmax(math.inf), "Hard"),
        (lambda: Softmax(torch.tensor([1.0, -1.0])), "0 < beta < inf"),
        (lambda: Softmax().weights(torch.tensor([1, 2])), "floating point"),
        (lambda: Softmax().weights(torch.zeros(3), torch.ones(3) > 0), r"mask\.float\(\)\.log\(\)"),
        (lambda: Softmax().weights(torch.zeros(3), dim=1), "dim=1"),
        (lambda: Softmax().weights(torch.tensor(1.0)), "dim=-1"),
    ],
)
def test_a_mistake_gets_a_sentence(call: object, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        call()


@pytest.mark.parametrize(
    ("dtype", "limit"), [(torch.float32, 88.72), (torch.float16, 11.09)], ids=["32", "16"]
)
def test_a_plain_exponential_overflows_where_the_value_does_not(
    dtype: torch.dtype, limit: float
) -> None:
    assert round(math.log(torch.finfo(dtype).max), 2) == limit
    below, above = (torch.tensor([x, 0.0], dtype=dtype) for x in (limit - 0.02, limit + 0.02))
    assert below.exp().isfinite().all()
    assert above.exp()[0] == math.inf
    assert (above.exp() / above.exp().sum()).isnan().any()
    assert Softmax().value(above).isfinite()
    torch.testing.assert_close(Softmax().weights(above).sum(), torch.ones((), dtype=dtype))


@pytest.mark.parametrize("temperature", [0.5, 1.0, 3.0])
def test_it_is_the_gibbs_distribution_of_the_energies_minus_z(temperature: float) -> None:
    energy = draw(6)
    boltzmann = (-energy / temperature).exp()
    choice = Softmax(1.0 / temperature)
    p = choice.weights(-energy)
    torch.testing.assert_close(p, boltzmann / boltzmann.sum())
    free_energy = (p * energy).sum() - temperature * entropy(p)
    torch.testing.assert_close(free_energy, -choice.value(-energy))
    torch.testing.assert_close(free_energy, -temperature * boltzmann.sum().log())
