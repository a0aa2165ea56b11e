"""fenchel/choice/reverse_kl.py: the maximum, its derivatives, its limits and its digits."""

import math

import cvxpy as cp
import mpmath
import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck
from torch.func import hessian, jacfwd, jacrev, vmap

from fenchel.choice import reverse_kl

INF = math.inf


def draw(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, dtype=torch.float64, generator=generator)


@pytest.mark.parametrize("beta", [0.3, 1.0, 5.0])
@pytest.mark.parametrize("with_prior", [False, True])
def test_a_convex_solver_agrees_with_the_reverse_divergence(beta: float, with_prior: bool) -> None:
    z, log_u = draw(6), draw(6, seed=1) if with_prior else None
    u = (torch.zeros(6).double() if log_u is None else log_u).softmax(-1).numpy()
    p = cp.Variable(6)
    gain = z.numpy() @ p + (u @ cp.log(p) - u @ cp.log(u)) / beta
    problem = cp.Problem(cp.Maximize(gain), [cp.sum(p) == 1])
    problem.solve(solver=cp.CLARABEL, tol_gap_abs=1e-13, tol_gap_rel=1e-13, tol_feas=1e-13)
    found = reverse_kl(z, beta, log_u)
    assert (found.p - torch.from_numpy(p.value)).abs().max() < 1e-6
    assert float(found.value) == pytest.approx(problem.value, abs=1e-9)


@pytest.mark.parametrize("beta", [1e-6, 1e-2, 1.0, 30.0, 1e6])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_every_weight_has_its_digits(beta: float, dtype: torch.dtype) -> None:
    z = torch.tensor([0.3, -1.0, 0.2999, 2.0, 2.0, -7.0, 1e4], dtype=dtype)
    for row in (z[:6], z, z[:1], z[3:5]):
        with mpmath.workdps(40):
            x = [mpmath.mpf(t) for t in row.tolist()]
            share, top = mpmath.mpf(1) / len(x), max(x)
            low, high = share / (2 * beta), mpmath.mpf(2) / beta  # of nu - top
            for _ in range(160):
                d = (low + high) / 2
                total = sum(share / (beta * (d + top - t)) for t in x)
                low, high = (d, high) if total > 1 else (low, d)
            wanted = [float(share / (beta * (low + top - t))) for t in x]
        found = reverse_kl(row, beta).p.double()
        exact = torch.tensor(wanted, dtype=torch.float64)
        assert ((found - exact).abs() <= 8 * torch.finfo(dtype).eps * exact).all()


def test_the_weights_are_the_gradient_of_the_value_and_j_has_the_stated_form() -> None:
    z, log_u, beta = draw(5), draw(5, seed=1), 1.7
    p = reverse_kl(z, beta, log_u).p

    def value(z: Tensor) -> Tensor:
        return reverse_kl(z, beta, log_u).value

    torch.testing.assert_close(jacrev(value)(z), p)
    s = p.square() / log_u.softmax(-1)
    J = beta * (s.diag() - s.outer(s) / s.sum())
    torch.testing.assert_close(jacfwd(lambda z: reverse_kl(z, beta, log_u).p)(z), J)
    torch.testing.assert_close(hessian(value)(z), J)


def test_two_derivatives_in_scores_prior_and_temperature() -> None:
    z, log_u = draw(2, 4).requires_grad_(), draw(2, 4, seed=1).requires_grad_()
    beta = torch.tensor([[0.5], [2.0]], dtype=torch.float64, requires_grad=True)
    assert gradcheck(reverse_kl, (z, beta, log_u), check_forward_ad=True)
    assert gradgradcheck(reverse_kl, (z, beta, log_u))


def test_forbidden_alternatives_and_rows_without_any() -> None:
    z, log_u = draw(3, 4), 0.1 * draw(3, 4, seed=1)
    log_u[0, 1] = -INF
    z[1, 2] = -INF
    log_u[2] = -INF
    z.requires_grad_()
    found = reverse_kl(z, 1.3, log_u)
    assert found.p[0, 1] == found.p[1, 2] == found.p[2].abs().sum() == 0
    assert found.value[2] == -INF
    kept = [0, 2, 3]
    alone = reverse_kl(z[0, kept], 1.3, log_u[0, kept])
    torch.testing.assert_close(found.p[0, kept], alone.p)
    torch.testing.assert_close(found.value[0], alone.value)
    (g,) = torch.autograd.grad(found.p.square().sum() + found.value[:2].sum(), z)
    assert g.isfinite().all()
    assert (g[2] == 0).all()


def test_the_limits_of_beta_and_the_shape_of_what_comes_back() -> None:
    z, log_u = draw(5), draw(5, seed=1)
    torch.testing.assert_close(reverse_kl(z, 1e-9, log_u).p, log_u.softmax(-1))
    assert reverse_kl(z, 1e12, log_u).p.argmax() == z.argmax()
    assert reverse_kl(z, 1e12, log_u).p.max() > 1 - 1e-9
    rows = vmap(lambda z: reverse_kl(z, 2.0, log_u).p)(z.expand(3, 5))
    torch.testing.assert_close(rows, reverse_kl(z, 2.0, log_u).p.expand(3, 5))
    half = reverse_kl(z.bfloat16(), 2.0)
    assert half.p.dtype == half.value.dtype == torch.bfloat16
    assert reverse_kl(torch.zeros(2, 0)).p.shape == (2, 0)
    with pytest.raises(ValueError, match="reverse_kl needs 0 < beta"):
        reverse_kl(z, -1.0)
