"""Laws that every choice map obeys. A new map joins by its row in fenchel.choice.MAPS."""

import cvxpy as cp
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.autograd import forward_ad, gradcheck, gradgradcheck
from torch.func import hessian, jacfwd, jacrev, jvp, vmap

from fenchel.choice import (
    MAPS,
    Capped,
    Choice,
    Entmax,
    Hard,
    Sigmoid,
    Softmax,
    Sparsemax,
    by_name,
    kkt,
)

CHOICES: list[Choice] = [
    *(by_name(name) for name in MAPS),
    Softmax(beta=0.6),
    Entmax(1.01),
    Entmax(1.5, beta=2.0),
    Entmax(4.0, beta=0.1),
    Sparsemax(beta=0.7),
    Capped(0.3),
    Sigmoid(beta=1.7, log_odds=-1.5),
]
every_choice = pytest.mark.parametrize("choice", CHOICES, ids=repr)
SIMPLEX = [choice for choice in CHOICES if choice.feasible == "simplex"]
every_choice_of_the_simplex = pytest.mark.parametrize("choice", SIMPLEX, ids=repr)
INF = float("inf")


def draw(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, dtype=torch.float64, generator=generator)


@pytest.fixture
def z() -> Tensor:
    return draw(3, 7)


@pytest.fixture
def log_prior() -> Tensor:
    """One alternative forbidden in the first row, all in the last."""
    prior = 0.1 * draw(3, 7, seed=1)
    prior[0, 2] = -INF
    prior[2] = -INF
    return prior


def scale_of(choice: Choice) -> float:
    """What multiplies the scores of a map, as a number."""
    return float(choice.score_scale)


def nothing(choice: Choice) -> float:
    """The value where all is forbidden: no point of the simplex is left, one of the box is."""
    return -INF if choice.feasible == "simplex" else 0.0


@every_choice
def test_weights_lie_in_the_feasible_set(choice: Choice, z: Tensor) -> None:
    p = choice.weights(z)
    assert (p >= 0).all()
    assert (p <= min(choice.ceiling, 1.0)).all()
    total = p.sum(-1)
    if choice.feasible == "simplex":
        torch.testing.assert_close(total, torch.ones(3, dtype=torch.float64))
    else:
        assert total.std() > 0.1  # nothing holds it


@every_choice
def test_a_better_score_never_weighs_less(choice: Choice, z: Tensor) -> None:
    p = choice.weights(z)
    assert (p.gather(-1, z.argsort(-1)).diff(dim=-1) >= -1e-15).all()


@every_choice_of_the_simplex
def test_a_common_shift_changes_nothing(choice: Choice, z: Tensor) -> None:
    torch.testing.assert_close(choice.weights(z + 100.0), choice.weights(z))
    torch.testing.assert_close(choice.value(z + 100.0), choice.value(z) + 100.0)


@every_choice
def test_no_step_towards_a_corner_does_better(choice: Choice, z: Tensor, log_prior: Tensor) -> None:
    z, log_prior = z[:2], log_prior[:2]
    p = choice.weights(z, log_prior)[:, None, None]  # (2, 1, 1, 7)
    corners = torch.eye(7, dtype=torch.float64)[:, None]  # (7, 1, 7)
    step = torch.tensor([1e-3, 1e-1, 0.5, 1.0], dtype=torch.float64)[:, None]
    rivals = p + step * (corners - p)  # (2, 7, 4, 7)
    spent = choice.regulariser(rivals, log_prior[:, None, None]) / scale_of(choice)
    reached = (rivals * z[:, None, None]).sum(-1) - spent
    assert (reached <= choice.value(z, log_prior)[:, None, None] + 1e-12).all()


@every_choice
def test_the_value_is_reached_by_the_weights(choice: Choice, z: Tensor, log_prior: Tensor) -> None:
    z, log_prior = z[:2], log_prior[:2]
    p = choice.weights(z, log_prior)
    reached = (p * z).sum(-1) - choice.regulariser(p, log_prior) / scale_of(choice)
    torch.testing.assert_close(choice.value(z, log_prior), reached)


@every_choice
def test_a_forbidden_alternative_weighs_nothing(choice: Choice, z: Tensor) -> None:
    kept = [0, 1, 3, 4, 5, 6]
    prior = torch.zeros(7, dtype=torch.float64)
    prior[2] = -INF
    for p in (choice.weights(z, prior), choice.weights(z + prior)):
        assert (p[:, 2] == 0).all()
        torch.testing.assert_close(p[:, kept], choice.weights(z[:, kept]))
    torch.testing.assert_close(choice.value(z, prior), choice.value(z[:, kept]))


@every_choice
def test_a_prior_adds_to_the_scores(choice: Choice, z: Tensor, log_prior: Tensor) -> None:
    if isinstance(choice, Hard):
        shifted = z.masked_fill(log_prior == -INF, -INF)
    else:
        shifted = z + log_prior / scale_of(choice)
    torch.testing.assert_close(choice.weights(z, log_prior), choice.weights(shifted))


@every_choice
def test_a_row_with_all_forbidden_gives_zeros_and_no_nan_anywhere(
    choice: Choice, z: Tensor, log_prior: Tensor
) -> None:
    z, log_prior = z.requires_grad_(), log_prior.requires_grad_()
    p, value = choice.weights(z, log_prior), choice.value(z, log_prior)
    assert (p[2] == 0).all()
    assert value[2] == nothing(choice)
    assert value[:2].isfinite().all()
    for function in (choice.weights, choice.value):
        p, out = choice.weights(z, log_prior), function(z, log_prior)
        first = torch.autograd.grad(
            out.sum() + (p * p).sum(), (z, log_prior), create_graph=True, allow_unused=True
        )
        first = [g for g in first if g is not None]
        assert all(g.isfinite().all() for g in first)
        assert all((g[2] == 0).all() for g in first)
        twice = sum((g * g).sum() for g in first)
        second = torch.autograd.grad(twice, (z, log_prior), allow_unused=True)
        assert all(g is None or g.isfinite().all() for g in second)
    tangents = (torch.ones_like(z), torch.ones_like(z))
    for function in (choice.weights, choice.value):
        _, tangent = jvp(function, (z.detach(), log_prior.detach()), tangents)
        assert tangent.isfinite().all()
        assert (tangent[2] == 0).all()


@every_choice
def test_scores_of_minus_infinity_throughout_are_no_choice_either(choice: Choice) -> None:
    z = torch.full((2, 4), -INF, dtype=torch.float64)
    z[1] = draw(4)
    z.requires_grad_()
    p = choice.weights(z)
    assert (p[0] == 0).all()
    assert choice.value(z)[0] == nothing(choice)
    (g,) = torch.autograd.grad((p * p).sum(), z)
    assert g.isfinite().all()


@every_choice_of_the_simplex
def test_equal_scores_share_equally(choice: Choice) -> None:
    p = choice.weights(torch.full((5,), 3.0, dtype=torch.float64))
    torch.testing.assert_close(p, torch.full((5,), 0.2, dtype=torch.float64))


@every_choice_of_the_simplex
def test_one_alternative_gets_everything(choice: Choice) -> None:
    z = draw(4, 1).requires_grad_()
    p = choice.weights(z)
    assert (p == 1).all()
    torch.testing.assert_close(choice.value(z), z[:, 0] - choice.omega(p[:, 0]) / scale_of(choice))
    assert (torch.autograd.grad(p.sum(), z)[0] == 0).all()
    assert (choice.sensitivity(p) == 0).all()
    assert choice.lipschitz(1) == 0


@every_choice
def test_no_alternative_at_all_is_an_empty_row(choice: Choice) -> None:
    z = torch.zeros(3, 0)
    assert choice.weights(z).shape == (3, 0)
    assert (choice.value(z) == nothing(choice)).all()


@every_choice
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_scores_of_ten_thousand_and_half_precision_give_no_nan(
    choice: Choice, dtype: torch.dtype
) -> None:
    z = (1e4 * draw(6, 9)).to(dtype)
    z[0, :2] = 1e4  # a tie at the top
    z[1] = -1e4
    z.requires_grad_()
    prior = torch.zeros(9, dtype=dtype)
    prior[3] = -INF
    p, value = choice.weights(z, prior), choice.value(z, prior)
    assert p.dtype == value.dtype == dtype
    assert p.isfinite().all()
    assert value.isfinite().all()
    if choice.feasible == "simplex":
        torch.testing.assert_close(p.double().sum(-1), torch.ones(6).double(), atol=1e-2, rtol=0)
    (g,) = torch.autograd.grad((p * p).sum() + value.sum(), z)
    assert g.dtype == dtype
    assert g.isfinite().all()


@every_choice
def test_half_precision_rounds_the_float32_answer(choice: Choice) -> None:
    z = draw(64, 33).to(torch.bfloat16)
    p = choice.weights(z)
    wanted = choice.weights(z.float())
    torch.testing.assert_close(p, wanted.to(torch.bfloat16), atol=1e-6, rtol=2**-7)


@every_choice
def test_another_axis_is_the_same_choice(choice: Choice, z: Tensor, log_prior: Tensor) -> None:
    wanted = choice.weights(z, log_prior)
    torch.testing.assert_close(choice.weights(z.T, log_prior.T, dim=0).T, wanted)
    torch.testing.assert_close(choice.weights(z.T, log_prior.T, dim=-2).T, wanted)
    torch.testing.assert_close(
        choice.value(z.T, log_prior.T, dim=0), choice.value(z, log_prior, dim=1)
    )


@every_choice
def test_first_and_second_derivatives(choice: Choice, z: Tensor, log_prior: Tensor) -> None:
    z = z[:2].requires_grad_()
    for function in (choice.weights, choice.value):
        assert gradcheck(function, z, check_forward_ad=True)
        assert gradgradcheck(function, z, check_fwd_over_rev=True)
    allowed = log_prior[:2, [0, 1, 3, 4, 5, 6]].requires_grad_()

    def by_prior(prior: Tensor) -> tuple[Tensor, Tensor]:
        wider = torch.cat([prior, torch.full((2, 1), -INF, dtype=torch.float64)], -1)
        return choice.weights(z.detach(), wider), choice.value(z.detach(), wider)

    if not isinstance(choice, Hard):
        assert gradcheck(by_prior, allowed, check_forward_ad=True)
        assert gradgradcheck(by_prior, allowed)


@every_choice
def test_weights_are_the_gradient_of_the_value_and_its_hessian_their_derivative(
    choice: Choice, z: Tensor
) -> None:
    torch.testing.assert_close(jacrev(choice.value)(z[0]), choice.weights(z[0]))
    torch.testing.assert_close(jacfwd(choice.value)(z[0]), choice.weights(z[0]))
    torch.testing.assert_close(hessian(choice.value)(z[0]), jacfwd(choice.weights)(z[0]))


@every_choice
def test_forward_and_reverse_agree_and_vmap(choice: Choice, z: Tensor) -> None:
    forward = vmap(jacfwd(choice.weights))(z)
    moves = forward.abs().amax((1, 2))
    assert isinstance(choice, Hard) or (moves > 0.01).all()  # or the laws below say nothing
    torch.testing.assert_close(forward, vmap(jacrev(choice.weights))(z))
    torch.testing.assert_close(forward, forward.transpose(-1, -2))
    torch.testing.assert_close(vmap(choice.weights, in_dims=1)(z), choice.weights(z.T))
    torch.testing.assert_close(
        vmap(lambda prior: choice.weights(z, prior))(z[:, None]),
        torch.stack([choice.weights(z, prior) for prior in z]),
    )


@every_choice
def test_second_derivatives_agree_however_they_are_taken(choice: Choice, z: Tensor) -> None:
    wanted = jacrev(jacrev(choice.weights))(z[0])
    for twice in (jacfwd(jacfwd(choice.weights)), jacfwd(jacrev(choice.weights))):
        torch.testing.assert_close(twice(z[0]), wanted, atol=1e-10, rtol=1e-6)


@every_choice
def test_the_jacobian_product_is_the_derivative(choice: Choice, z: Tensor) -> None:
    p, v = choice.weights(z), draw(3, 7, seed=2)
    _, tangent = jvp(choice.weights, (z,), (v,))
    torch.testing.assert_close(choice.jacobian_product(p, v), tangent)
    common = float(choice.feasible == "simplex") * torch.ones_like(v)
    torch.testing.assert_close(choice.jacobian_product(p, common), 0.0 * common)


@every_choice
def test_dual_numbers_carry_the_same_tangent(choice: Choice, z: Tensor) -> None:
    v = draw(3, 7, seed=2)
    with forward_ad.dual_level():
        dual = choice.weights(forward_ad.make_dual(z, v))
        tangent = forward_ad.unpack_dual(dual).tangent
    assert tangent is not None
    torch.testing.assert_close(tangent, choice.jacobian_product(choice.weights(z), v))


@every_choice
def test_compiled_in_one_graph_with_gradient_tangent_and_the_gradient_of_the_tangent(
    choice: Choice, z: Tensor, log_prior: Tensor
) -> None:
    v = draw(3, 7, seed=2)

    def everything(z: Tensor) -> Tensor:
        return torch.stack(jvp(lambda z: choice.weights(z, log_prior), (z,), (v,)))

    torch.compiler.reset()
    compiled = torch.compile(everything, backend="aot_eager", fullgraph=True)
    leaf = z.clone().requires_grad_()
    wanted, got = everything(leaf), compiled(leaf)
    torch.testing.assert_close(got, wanted)
    pull = draw(*wanted.shape, seed=3)
    (wanted_slope,) = torch.autograd.grad(wanted, leaf, pull)
    (slope,) = torch.autograd.grad(got, leaf, pull)
    torch.testing.assert_close(slope, wanted_slope)
    assert isinstance(choice, Hard) or got[1].abs().max() > 0.01  # no silent zero tangent


@every_choice
def test_the_sensitivity_is_the_largest_eigenvalue_and_the_constant_bounds_it(
    choice: Choice, z: Tensor
) -> None:
    J = vmap(jacfwd(choice.weights))(z)
    largest = torch.linalg.eigvalsh(J)[:, -1]
    torch.testing.assert_close(choice.sensitivity(choice.weights(z)), largest)
    assert (largest <= choice.lipschitz(7) + 1e-12).all()


@every_choice
def test_the_loss_is_never_negative_and_its_gradient_is_the_choice_less_the_truth(
    choice: Choice, z: Tensor
) -> None:
    index = torch.tensor([0, 6, 3])
    sure = torch.nn.functional.one_hot(index, 7).double()
    spread_out = choice.weights(draw(3, 7, seed=5))
    for y, law in ((index, sure), (sure, sure), (spread_out, spread_out)):
        loss = choice.loss(z, y)
        assert (loss >= 0).all()
        assert torch.equal(loss == INF, (law > choice.ceiling).any(-1))
        slope = torch.func.grad(lambda z, y=y: choice.loss(z, y).sum())(z)
        torch.testing.assert_close(slope, choice.weights(z) - law)
    p = choice.weights(z)
    torch.testing.assert_close(choice.loss(z, p), torch.zeros(3, dtype=torch.float64))


@every_choice
def test_the_certificate_is_clean(choice: Choice, z: Tensor, log_prior: Tensor) -> None:
    for scale in (1e-3, 1.0, 30.0):
        p = choice.weights(scale * z, log_prior)
        residuals = kkt(choice, scale * z, p, log_prior)
        assert max(float(r.abs().max()) for r in residuals) < 1e-9


@every_choice
def test_a_wrong_answer_does_not_pass_the_certificate(choice: Choice, z: Tensor) -> None:
    p = choice.weights(z)
    for wrong in (p.flip(-1), 0.99 * p + 0.01 / 7, 1.01 * p):
        residuals = kkt(choice, z, wrong)
        assert max(float(r.abs().max()) for r in residuals) > 1e-4


@every_choice
@pytest.mark.filterwarnings("ignore:Solution may be inaccurate")  # it says so at 1e-14
@pytest.mark.filterwarnings("ignore:invalid value encountered in power")
def test_a_convex_solver_agrees(choice: Choice, z: Tensor, log_prior: Tensor) -> None:
    for row, prior in zip(z[:2], log_prior[:2], strict=True):
        wanted = solved_by_cvxpy(choice, row, prior)
        assert (choice.weights(row, prior) - wanted).abs().max() < 1e-6


def solved_by_cvxpy(choice: Choice, z: Tensor, log_prior: Tensor) -> Tensor:
    allowed = log_prior > -INF
    x = (scale_of(choice) * z + (0.0 if isinstance(choice, Hard) else log_prior))[allowed]
    p = cp.Variable(len(x))
    omega = {
        Softmax: lambda: -cp.sum(cp.entr(p)),
        Capped: lambda: -cp.sum(cp.entr(p)),
        Sparsemax: lambda: cp.sum_squares(p) / 2,
        Hard: lambda: 0.0,
        Sigmoid: lambda: -cp.sum(cp.entr(p) + cp.entr(1 - p)) - choice.log_odds * cp.sum(p),
        Entmax: lambda: (
            # below 1.5 the power cone is the more exact form, from there on the rational one
            cp.sum(cp.power(p, choice.alpha, approx=choice.alpha >= 1.5))
            / (choice.alpha * (choice.alpha - 1))
        ),
    }[type(choice)]()
    rules = [p >= 0] + ([p <= choice.ceiling] if choice.ceiling < 1 else [])
    if choice.feasible == "simplex":
        x, rules = x - x.max(), [*rules, cp.sum(p) == 1]
    problem = cp.Problem(cp.Maximize(x.numpy() @ p - omega), rules)
    problem.solve(solver=cp.CLARABEL, tol_gap_abs=1e-14, tol_gap_rel=1e-14, tol_feas=1e-14)
    return torch.zeros_like(z).masked_scatter(allowed, torch.from_numpy(p.value))


wild = st.one_of(
    st.floats(-5.0, 5.0, width=32),
    st.sampled_from([0.0, 1.0, -INF, 1e4, -1e4, 1e-30]),
)


@every_choice
@settings(max_examples=30)
@given(rows=st.integers(1, 6).flatmap(lambda K: st.lists(wild, min_size=2 * K, max_size=2 * K)))
def test_wild_inputs_have_a_defined_answer(choice: Choice, rows: list[float]) -> None:
    both = torch.tensor(rows, dtype=torch.float32).view(2, -1)
    z, prior = both[0].clone().requires_grad_(), both[1].clone().requires_grad_()
    p, value = choice.weights(z, prior), choice.value(z, prior)
    possible = bool(((z > -INF) & (prior > -INF)).any())
    assert p.isfinite().all()
    if choice.feasible == "simplex":
        assert bool(value.isfinite()) == possible
        assert abs(float(p.detach().double().sum()) - possible) < 1e-5
    else:
        assert value.isfinite()
    gradients = torch.autograd.grad((p * p).sum() + value, (z, prior), allow_unused=True)
    assert all(g is None or g.isfinite().all() for g in gradients)
