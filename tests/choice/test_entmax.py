"""fenchel/choice/entmax.py: against the entmax package, its limits, and its l2 constant."""

import math

import entmax as peer
import mpmath
import pytest
import torch
from torch import Tensor
from torch.func import jvp, vjp, vmap

from fenchel.choice import Entmax, Softmax, Sparsemax


def draw(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, dtype=torch.float64, generator=generator)


@pytest.mark.parametrize("alpha", [1.05, 1.25, 1.5, 1.75, 2.0, 2.5, 4.0])
@pytest.mark.parametrize("scale", [0.05, 1.0, 8.0])
def test_the_entmax_package_agrees(alpha: float, scale: float) -> None:
    z = scale * draw(20, 50)
    z[:, 7] = -math.inf
    wanted = peer.entmax_bisect(z, alpha, n_iter=100)
    torch.testing.assert_close(Entmax(alpha).weights(z), wanted, atol=1e-6, rtol=0)


def test_the_sorting_solution_agrees_at_three_halves() -> None:
    for scale in (0.1, 1.0, 5.0):
        z = scale * draw(10, 700)
        torch.testing.assert_close(
            Entmax(1.5).weights(z), peer.entmax15(z, -1), atol=1e-12, rtol=1e-9
        )


def test_alpha_to_one_is_softmax_and_two_is_sparsemax() -> None:
    z = draw(6, 9)
    for alpha in (1.0001, 1.000001):
        near = Entmax(alpha)
        torch.testing.assert_close(
            near.weights(z), Softmax().weights(z), atol=5 * (alpha - 1), rtol=0
        )
        torch.testing.assert_close(near.value(z), Softmax().value(z), atol=5 * (alpha - 1), rtol=0)
        in_float32 = near.weights(z.float())  # pow would have two digits left
        torch.testing.assert_close(in_float32, near.weights(z).float(), atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(Entmax(2.0).weights(z), Sparsemax().weights(z))
    torch.testing.assert_close(Entmax(2.0).value(z), Sparsemax().value(z))


@pytest.mark.parametrize("alpha", [1.25, 1.5, 2.0, 3.0])
def test_a_loser_vanishes_once_it_trails_by_one_over_alpha_less_one(alpha: float) -> None:
    edge = 1.0 / (alpha - 1.0)
    p = Entmax(alpha).weights(torch.tensor([[0.0, -0.99 * edge], [0.0, -1.01 * edge]]).double())
    assert p[0, 1] > 0
    assert p[1, 1] == 0


def test_a_sure_choice_costs_nothing() -> None:
    corners = torch.eye(4, dtype=torch.float64)
    for choice in (Entmax(1.3), Entmax(3.0), Sparsemax(), Softmax()):
        torch.testing.assert_close(choice.regulariser(corners), corners.new_zeros(4))


def test_the_loss_is_zero_once_the_truth_is_far_enough_ahead() -> None:
    z = torch.tensor([[0.0, 5.0], [0.0, 1.0]])
    loss = Entmax(1.5).loss(z, torch.tensor([1, 1]))
    assert loss[0] == 0
    assert loss[1] > 0


@pytest.mark.parametrize("alpha", [1.05, 1.25, 1.5, 1.75, 2.0])
@pytest.mark.parametrize("K", [2, 3, 10, 1000])
def test_the_constant_is_reached_and_never_exceeded(alpha: float, K: int) -> None:
    choice = Entmax(alpha)
    bound = float(choice.lipschitz(K))
    # reached: two equal weights, or one heavy weight and K - 1 equal ones at the best share
    two = torch.zeros(1, K, dtype=torch.float64)
    two[0, :2] = 0.5
    heavy = torch.linspace(0.001, 0.999, 2000, dtype=torch.float64)[:, None]
    one = torch.cat([heavy, ((1 - heavy) / (K - 1)).expand(-1, K - 1)], 1)
    reached = max(float(choice.sensitivity(two)), float(choice.sensitivity(one).max()))
    assert reached <= bound * (1 + 1e-12)
    assert reached >= bound * (1 - 1e-4)
    # never exceeded: laws of every shape
    generator = torch.Generator().manual_seed(0)
    power = torch.logspace(-1, 1.5, 300, dtype=torch.float64)[:, None]
    laws = torch.rand(300, K, dtype=torch.float64, generator=generator).pow(power)
    few = laws * (torch.rand(300, K, generator=generator) < 0.3) + 1e-12
    for p in (laws, few):
        assert choice.sensitivity(p / p.sum(-1, keepdim=True)).max() <= bound * (1 + 1e-12)


def test_climbing_from_any_law_ends_below_the_constant() -> None:
    for alpha, K in ((1.2, 5), (1.5, 12), (1.5, 40), (1.8, 30)):
        choice = Entmax(alpha)
        logits = draw(30, K).requires_grad_()
        climber = torch.optim.Adam([logits], lr=0.1)
        for _ in range(150):
            climber.zero_grad()
            reached = choice.sensitivity(logits.softmax(-1))
            (-reached.sum()).backward()
            climber.step()
        assert reached.max() <= float(choice.lipschitz(K)) * (1 + 1e-9)
        assert reached.max() >= float(choice.lipschitz(K)) * 0.98


def test_between_the_two_candidates_no_mixture_is_better() -> None:
    # w = (1, -(1 - t), -t / (K - 2), ...): 0 is two equal, (K - 2) / (K - 1) is one heavy
    t = torch.linspace(0, 1, 4001, dtype=torch.float64)
    for K in (3, 4, 7, 20, 100, 10_000, 10_000_000):
        for alpha in torch.linspace(1.001, 1.999, 60).tolist():
            m, rest = 2.0 / (3.0 - alpha), K - 2.0
            length = 1 + (1 - t).pow(2) + t.pow(2) / rest
            norm = 1 + (1 - t).pow(m) + t.pow(m) * rest ** (1 - m)
            best = (length / norm.pow(2 / m)).max()
            assert best <= float(Entmax(alpha).lipschitz(K)) * (1 + 1e-12)


def test_above_alpha_two_three_alternatives_have_no_constant() -> None:
    assert Entmax(3.0).lipschitz(3) == math.inf
    p = torch.tensor([1 - 2e-9, 1e-9, 1e-9], dtype=torch.float64)
    assert Entmax(3.0).sensitivity(p) > 1e8
    share = torch.linspace(1e-9, 1 - 1e-9, 2001, dtype=torch.float64)
    for alpha in (2.5, 3.0, 3.5, 4.0):
        reached = Entmax(alpha).sensitivity(torch.stack([share, 1 - share], -1)).max()
        assert 0.999 < float(reached) / float(Entmax(alpha).lipschitz(2)) <= 1 + 1e-9


def test_a_tensor_alpha_has_a_tensor_constant() -> None:
    alpha = torch.tensor([[1.5], [2.0]], dtype=torch.float64)
    wanted = torch.tensor([[Entmax(1.5).lipschitz(9)], [2.0 * 0.5]], dtype=torch.float64)
    torch.testing.assert_close(Entmax(alpha).lipschitz(9), wanted)


@pytest.mark.parametrize("alpha", [1.0, 0.5, 4.5, math.nan, torch.tensor([1.5, 1.0])])
def test_an_alpha_out_of_range_gets_a_sentence(alpha: float | Tensor) -> None:
    with pytest.raises(ValueError, match="1 < alpha <= 4"):
        Entmax(alpha)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("alpha", [1.0001, 1.49, 1.7, 2.0, 2.1, 3.0, 4.0])
def test_weights_are_right_to_rounding_for_every_alpha(
    alpha: float, dtype: torch.dtype, mp_weights
) -> None:
    """Light weights too, where the power of a difference has no digits: also in the traced form."""
    generator = torch.Generator().manual_seed(0)
    eps, reach = torch.finfo(dtype).eps, 1.0 / (alpha - 1.0)
    rows = [[0.0, -reach * (1.0 - 10.0**-k)] for k in (1, 3, 5, 7)]
    rows += [[0.7, 0.7 - reach * (1.0 - 3.0**-k)] for k in (2, 8)]
    rows += (0.5 * min(reach, 3.0) * torch.randn(3, 4, generator=generator)).tolist()
    rows += [[0.0, -reach], [0.0, -0.99 * reach, -0.99 * reach], [0.3, 0.3, 0.3 - 0.2 * reach]]
    for row in rows:
        x = torch.tensor(row, dtype=dtype)
        with mpmath.workdps(30 + 15 * int(alpha)):
            wanted = torch.tensor(
                [float(t) for t in mp_weights(x.tolist(), alpha)], dtype=torch.float64
            )
        steep = float(Entmax(alpha).sensitivity(wanted))  # the effect of rounding the scores
        allowed = 4.0 * eps * max(1.0, steep * float(x.abs().max()))
        for p in (Entmax(alpha).weights(x), vmap(Entmax(alpha).weights)(x[None])[0]):
            assert (p.double() - wanted).abs().max() <= allowed


@pytest.mark.parametrize("alpha", [2.5, 4.0])
def test_the_derivative_at_a_light_weight_keeps_its_digits(alpha: float) -> None:
    """Two alternatives: J = g ((1, -1), (-1, 1)) with g = s_1 s_2 / (s_1 + s_2), about 1."""
    x = torch.tensor([0.0, -(1.0 - 1e-5) / (alpha - 1.0)], dtype=torch.float64)
    p = Entmax(alpha).weights(x)
    s = p.pow(2.0 - alpha)
    v = torch.tensor([0.3, -0.4])
    wanted = s.prod() / s.sum() * (v[0] - v[1]).double() * torch.tensor([1.0, -1.0]).double()
    single = x.float().requires_grad_()
    choice = Entmax(alpha)
    weights = choice.weights(single)
    (g,) = torch.autograd.grad(weights, single, v, create_graph=True)
    (plain,) = torch.autograd.grad(weights, single, v)
    products = [choice.jacobian_product(p.float(), v), g, plain]
    products += [
        jvp(choice.weights, (x.float(),), (v,))[1],
        vjp(choice.weights, x.float())[1](v)[0],
    ]
    for product in products:
        torch.testing.assert_close(product.detach().double(), wanted, atol=0, rtol=2e-3)
    learns = Entmax(torch.tensor(alpha))
    torch.testing.assert_close(learns.jacobian_product(p.float(), v), products[0])
