"""fenchel/sensitivity/golub_kahan.py: the exact constant, and a bracket that keeps its promise."""

import math
import subprocess
import sys
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from fenchel.attention import ALiBi, Causal, Padding, Prior
from fenchel.choice import Choice, Entmax, Softmax, Sparsemax
from fenchel.sensitivity import (
    Matrix,
    attention_jacobian,
    identity,
    jacobian,
    self_attention_jacobian,
    singular_values,
    spectral_norm,
)
from fenchel.sensitivity.golub_kahan import _Bidiagonalisation

Draw = Callable[..., Tensor]
Instance = Callable[..., tuple[Tensor, Tensor, Tensor, Tensor]]


def truth(D: Tensor) -> Tensor:
    norms: Tensor = torch.linalg.matrix_norm(D, 2)
    return norms


@pytest.mark.parametrize("choice", [Softmax(), Entmax(1.5), Sparsemax()], ids=repr)
@pytest.mark.parametrize("scale", [0.3, 3.0])
@pytest.mark.parametrize("prior", [None, Causal(), Padding(torch.tensor([9, 6] * 8))], ids=repr)
def test_the_value_in_X_is_that_of_the_dense_decomposition(
    prior: Prior | None,
    scale: float,
    choice: Choice,
    instance: Instance,
    generator: torch.Generator,
) -> None:  # 18 settings of 16 instances
    X, *W = instance(9, 4, (16,))
    J = self_attention_jacobian(X, *W, each=True, choice=choice, prior=prior, scale=scale / 2)
    found = spectral_norm(J, tol=1e-6, generator=generator)
    exact = truth(J.dense())
    torch.testing.assert_close(found.lower, exact, rtol=1e-6, atol=0)
    assert (found.upper >= exact).all()
    assert (found.ratio <= 1 + 2e-6).all()


@pytest.mark.parametrize("choice", [Softmax(), Entmax(1.5), Sparsemax()], ids=repr)
@pytest.mark.parametrize("prior", [ALiBi(4), Causal() + ALiBi(4)], ids=repr)
@pytest.mark.parametrize("wrt", ["qkv", "q", "k", "v"])
def test_the_value_in_queries_keys_and_values_with_shared_keys(
    wrt: str, prior: Prior, choice: Choice, draw: Draw, generator: torch.Generator
) -> None:  # 24 settings of 8 heads
    q, k, v = draw(2, 4, 6, 3), draw(2, 2, 8, 3), draw(2, 2, 8, 5)
    J = attention_jacobian(q, k, v, choice=choice, prior=prior, wrt=wrt, each=True)
    found = spectral_norm(J, tol=1e-6, generator=generator)
    torch.testing.assert_close(found.lower, truth(J.dense()), rtol=1e-6, atol=0)
    together = attention_jacobian(q, k, v, choice=choice, prior=prior, wrt=wrt)
    whole = spectral_norm(together, tol=1e-6, generator=generator)
    torch.testing.assert_close(whole.lower, truth(together.dense()), rtol=1e-6, atol=0)


def test_the_vectors_attain_the_lower_end(draw: Draw, generator: torch.Generator) -> None:
    J = self_attention_jacobian(draw(7, 4), *(draw(4, 4) for _ in range(3)))
    found = spectral_norm(J, generator=generator)
    assert isinstance(found.right, Tensor)
    for unit in (found.left, found.right):
        torch.testing.assert_close(unit.norm(), torch.ones((), dtype=torch.float64))
    moved = J @ found.right
    assert moved.norm() >= found.lower * (1 - 1e-14)
    torch.testing.assert_close((found.left * moved).sum(), found.lower)


@pytest.mark.parametrize("failure", [1e-3, 0.1])
def test_the_bracket_misses_no_more_often_than_promised(
    failure: float, generator: torch.Generator
) -> None:
    # The hardest case: one value stands above a crowd, so a start that is blind to it sees a narrow
    # spectrum and grows sure of itself. Here the promise is met almost with equality.
    trials, n = 4000, 24
    crowd = torch.linspace(0.495, 0.5, n - 1, dtype=torch.float64)
    J = Matrix(torch.cat([crowd, torch.ones(1, dtype=torch.float64)]).diag().expand(trials, n, n))
    allowed = trials * failure + 4 * math.sqrt(trials * failure)
    misses = []
    for iterations in (1, 2, 3):
        found = spectral_norm(
            J, tol=1e-12, failure=failure, iterations=iterations, generator=generator
        )
        assert (found.lower <= 1 + 1e-14).all()
        misses.append(int((found.upper < 1.0).sum()))
    assert max(misses) <= allowed
    assert max(misses) > 0  # a promise that is never called upon would not be tested


def test_the_bracket_covers_attention_over_many_starts(
    draw: Draw, generator: torch.Generator
) -> None:
    X, W = draw(1, 6, 3), [draw(3, 3) for _ in range(3)]
    exact = truth(self_attention_jacobian(X[0], *W).dense())
    J = self_attention_jacobian(X.expand(1500, 6, 3), *W, each=True)
    found = spectral_norm(J, failure=1e-3, tol=0.5, generator=generator)
    assert (found.lower <= exact * (1 + 1e-12)).all()
    assert int((found.upper < exact).sum()) <= 6  # 1.5 are promised


def test_the_bound_holds_up_to_the_very_start_that_the_failure_prices() -> None:
    # A miss needs |gamma| < failure sqrt(pi / 2) / |g|. One percent outside of that the bound must
    # hold however few steps were taken; far inside it, this operator shows a miss.
    n, failure = 50, 1e-2
    below = torch.linspace(0.1, 1.0, n - 1, dtype=torch.float64)
    values = torch.cat([torch.tensor([2.0], dtype=torch.float64), below])
    for share, holds in ((1.01, True), (1e-3, False)):
        g = torch.ones(n, dtype=torch.float64)
        g[0] = share * failure * math.sqrt(math.pi / 2)
        run = _Bidiagonalisation(Matrix(values.diag()), None)
        run.start(g)
        for _ in range(4):
            run.step()
        assert bool(run.christoffel(failure) >= 2.0) == holds


@pytest.mark.parametrize("prior", [None, Causal()], ids=repr)
@pytest.mark.parametrize("scale", [0.3, 3.0, 10.0])
def test_the_bracket_is_narrow_within_sixty_iterations(
    scale: float, prior: Prior | None, instance: Instance, generator: torch.Generator
) -> None:
    X, *W = instance(96, 8, (2,))
    J = self_attention_jacobian(X, *W, each=True, prior=prior, scale=scale / 8**0.5)
    found = spectral_norm(J, tol=1e-9, failure=1e-6, iterations=60, generator=generator)
    assert (found.ratio <= 1.03).all()
    coarse = spectral_norm(J, generator=generator)
    assert coarse.iterations <= 60
    assert (coarse.ratio <= 1 + 1.1e-4).all()


def test_the_upper_end_is_below_that_of_kuczynski_and_wozniakowski(
    generator: torch.Generator,
) -> None:
    n = 400
    hard = Matrix(torch.linspace(0.0, 1.0, n, dtype=torch.float64).sqrt().diag())
    for k in (15, 30, 60):
        found = spectral_norm(hard, tol=1e-12, iterations=k, generator=generator)
        share = math.log(1.648 * math.sqrt(n) / 1e-6) / (2 * k - 1)
        if share < 1:
            assert found.upper <= found.lower / math.sqrt(1 - share**2)


def test_further_values_are_never_above_the_singular_values_of_their_rank(
    instance: Instance, generator: torch.Generator
) -> None:
    X, *W = instance(12, 4, (3,))
    J = self_attention_jacobian(X, *W, each=True)
    true = torch.linalg.svdvals(J.dense())
    for steps, wanted in ((1, 1), (3, 3), (6, 4), (48, 4)):
        found = spectral_norm(J, tol=1e-12, iterations=steps, generator=generator).values
        assert found.shape == (*J.batch, wanted)
        assert (found <= true[..., :wanted] * (1 + 1e-10)).all()
    torch.testing.assert_close(found, true[..., :4], rtol=1e-3, atol=0.0)


def test_the_ceiling_closes_a_bracket_that_ran_out_of_steps(
    instance: Instance, generator: torch.Generator
) -> None:
    X, *W = instance(16, 4)
    J = self_attention_jacobian(X, *W)
    found = spectral_norm(J, iterations=1, generator=generator)
    assert found.iterations == 1
    torch.testing.assert_close(found.upper, J.ceiling())
    assert found.lower <= truth(J.dense()) <= found.upper


def test_failure_zero_takes_the_ceiling_or_is_refused(
    instance: Instance, draw: Draw, generator: torch.Generator
) -> None:
    X, *W = instance(8, 4)
    J = self_attention_jacobian(X, *W)
    found = spectral_norm(J, failure=0.0, iterations=20, generator=generator)
    torch.testing.assert_close(found.upper, J.ceiling())
    torch.testing.assert_close(found.lower, truth(J.dense()))
    with pytest.raises(ValueError, match="certain upper bound"):
        spectral_norm(jacobian(torch.sin, draw(4)), failure=0.0)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_equal_singular_values_are_found(dtype: torch.dtype, generator: torch.Generator) -> None:
    J = jacobian(lambda x: 3.0 * x, torch.ones(5, 4, dtype=dtype))  # exhausted at once
    found = spectral_norm(J, generator=generator)
    torch.testing.assert_close(
        found.lower, torch.tensor(3.0, dtype=torch.float64), rtol=1e-5, atol=0
    )
    assert 3.0 <= found.upper <= 3.001
    small = spectral_norm(identity(torch.ones(1, dtype=dtype)), generator=generator)
    assert small.iterations == 1


def test_what_drowns_in_rounding_counts_as_the_size_of_the_rounding() -> None:
    run = _Bidiagonalisation(
        Matrix(3.0 * torch.eye(6, dtype=torch.float64)), torch.Generator().manual_seed(0)
    )
    run.step()  # J^T J v = 9 v: nothing is left but rounding, and a fresh vector goes on
    assert float(run.b[0]) == pytest.approx(9.0 * run.J.error)
    assert abs(float((run.basis.chunks[0][0] * run.v).sum())) < 1e-14
    assert float(run.v.norm()) == pytest.approx(1.0)


def test_zero_is_zero_and_one_number_is_exact(generator: torch.Generator) -> None:
    found = spectral_norm(torch.zeros(4, 3), generator=generator)
    assert (found.lower, found.upper) == (0.0, 0.0)
    assert found.ratio == 1.0
    one = spectral_norm(torch.tensor([[-2.5]], dtype=torch.float64), generator=generator)
    assert 2.5 <= one.upper <= 2.5 * (1 + 1e-13)


def test_float32_is_right_to_its_own_precision(
    instance: Instance, generator: torch.Generator
) -> None:
    X, *W = instance(32, 8, (4,))
    exact = truth(self_attention_jacobian(X, *W, each=True).dense())
    single = self_attention_jacobian(X.float(), *(w.float() for w in W), each=True)
    found = spectral_norm(single, generator=generator)
    torch.testing.assert_close(found.lower, exact, rtol=1e-6, atol=0)
    assert (found.upper >= exact).all()


def test_what_cannot_be_measured_is_refused(generator: torch.Generator) -> None:
    with pytest.raises(ValueError, match="tol > 0"):
        spectral_norm(torch.eye(3), tol=0.0)
    with pytest.raises(ValueError, match="no singular value"):
        spectral_norm(torch.zeros(0, 3))
    with pytest.raises(ValueError, match="inf or nan"):
        spectral_norm(torch.full((2, 2), torch.inf), generator=generator)


@pytest.mark.parametrize(
    ("dtype", "exponent"),
    [(torch.float32, e) for e in (-44, -38, -25, -22, 19, 30, 37)]
    + [(torch.float64, e) for e in (-310, -300, -170, -150, 150, 200, 300)],
)
def test_a_bracket_holds_at_every_scale_of_the_dtype(
    dtype: torch.dtype, exponent: int, generator: torch.Generator
) -> None:
    A = torch.randn(3, 30, 20, dtype=torch.float64, generator=generator)
    A = (A * 10.0 ** (exponent // 2) * 10.0 ** (exponent - exponent // 2)).to(dtype)
    size = A.double().abs().amax()
    truth = torch.linalg.matrix_norm(A.double() / size, 2)
    bracket = spectral_norm(A, generator=generator)
    upper, lower = bracket.upper / size, bracket.lower / size
    spacing = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps / size
    assert (upper >= truth).all()
    assert (upper <= truth * (1 + 2e-4)).all()
    assert (lower <= truth * (1 + 4 * torch.finfo(dtype).eps) + spacing).all()
    top = singular_values(A, 2, generator=generator)
    assert ((top.values[..., 0].double() / size - truth).abs() <= 1e-5 * truth + spacing).all()


@pytest.mark.parametrize("margin", [5.0, 60.0, 200.0, 600.0])
@pytest.mark.parametrize("wrt", ["q", "k", "qk", "qkv"])
def test_a_saturated_head_is_bracketed_though_float32_underflows(
    wrt: str, margin: float, generator: torch.Generator
) -> None:
    q = torch.zeros(1, 1, 6, 4, dtype=torch.float64)
    q[..., 0] = 2.0 * margin
    k, v = (torch.randn(1, 1, 6, 4, dtype=torch.float64, generator=generator) for _ in range(2))
    k = 0.1 * k
    k[..., 0, 0] += 1.0
    J = attention_jacobian(q, k, v, wrt=wrt)
    D = J.dense()
    size = D.abs().amax()
    truth = torch.linalg.matrix_norm(D / size, 2) * size
    bracket = spectral_norm(J, generator=generator)
    assert truth * (1 - 1e-12) <= bracket.upper <= truth * (1 + 2e-4)
    assert bracket.lower <= truth * (1 + 1e-12)
    assert J.ceiling() >= truth * (1 - 1e-12)


def test_a_function_and_its_point_or_a_sentence() -> None:
    module = torch.nn.Linear(4, 4)
    x = torch.randn(4, generator=torch.Generator().manual_seed(0))
    exact = float(torch.linalg.matrix_norm(module.weight.detach(), 2))
    assert float(spectral_norm(module, x).lower) == pytest.approx(exact, rel=1e-3)
    with pytest.raises(ValueError, match=r"got Linear; .* jacobian\(f, x\)"):
        spectral_norm(module)


def test_the_first_derivative_warns_of_nothing() -> None:
    """In a process of its own: torch loads its rules for forward mode once."""
    code = (
        "import warnings, torch, fenchel; warnings.simplefilter('error');"
        "fenchel.spectral_norm(fenchel.jacobian(torch.sin, torch.zeros(3)))"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
