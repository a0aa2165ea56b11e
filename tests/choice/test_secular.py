"""fenchel/choice/secular.py: the largest eigenvalue, also where others lose all digits."""

import math

import mpmath
import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck

from fenchel.choice import Capped, Choice, Entmax, Softmax, Sparsemax
from fenchel.choice.secular import eigenvalue_bounds, largest_eigenvalue


def exact(s: Tensor) -> float:
    """By mpmath, with digits enough to tell the smallest entry from the rounding of 1."""
    with mpmath.workdps(60 if float(s.min()) > 1e-40 else 700):
        v = mpmath.matrix([mpmath.mpf(float(a)) for a in s])
        matrix = mpmath.diag(list(v)) - v * v.T / sum(v)
        return float(max(mpmath.eigsy(matrix, eigvals_only=True)))


SATURATED = {
    "one sure": [1.0, 1e-9, 3e-10, 2e-12],
    "one surer": [1.0, 1e-30, 1e-31, 1e-33],
    "all digits gone": [1.0, 1e-300, 1e-301],
    "two almost equal": [0.5 + 1e-12, 0.5 - 1e-12, 1e-20],
    "uniform but for one": [0.25 + 1e-9] + [0.25 - 1e-9 / 3] * 3,
    "one heavy, many light": [0.9] + [1e-3] * 20,
    "steps": [0.5**k for k in range(1, 25)],
    "cluster below the first": [0.3, 0.3 - 1e-7, 0.3 - 2e-7, 0.1 + 3e-7],
    "second alone near the first": [0.4, 0.39, 1e-8, 1e-8, 1e-8],
}


@pytest.mark.parametrize("name", SATURATED)
def test_saturated_rows_keep_their_digits(name: str) -> None:
    s = torch.tensor(SATURATED[name], dtype=torch.float64)
    wanted = exact(s)
    assert abs(float(largest_eigenvalue(s)) - wanted) <= 1e-12 * wanted
    single = s.float()
    if (single > 0).all():
        assert abs(float(largest_eigenvalue(single)) / exact(single.double()) - 1) < 1e-6


def test_random_rows_of_every_sharpness() -> None:
    generator = torch.Generator().manual_seed(0)
    for scale in (0.01, 1.0, 10.0, 60.0):
        s = (scale * torch.randn(4, 15, dtype=torch.float64, generator=generator)).softmax(-1)
        for row, found in zip(s, largest_eigenvalue(s), strict=True):
            wanted = exact(row)
            assert abs(float(found) - wanted) <= 1e-12 * wanted


def test_ties_lone_weights_and_nothing() -> None:
    s = torch.tensor([[2.0, 2.0, 0.5], [3.0, 0.0, 0.0], [0.0, 0.0, 0.0]])
    torch.testing.assert_close(largest_eigenvalue(s), torch.tensor([2.0, 0.0, 0.0]).double())
    assert largest_eigenvalue(torch.ones(4, 1)).tolist() == [0.0] * 4


def test_it_has_two_derivatives() -> None:
    generator = torch.Generator().manual_seed(1)
    z = torch.randn(3, 5, dtype=torch.float64, generator=generator).requires_grad_()

    def sharpness(z: Tensor) -> Tensor:
        return largest_eigenvalue(z.softmax(-1))

    assert gradcheck(sharpness, z, check_forward_ad=True)
    assert gradgradcheck(sharpness, z)
    tied = torch.tensor([0.5, 0.5, 0.0], dtype=torch.float64, requires_grad=True)
    (g,) = torch.autograd.grad(largest_eigenvalue(tied), tied)
    assert g.isfinite().all()


def test_half_precision_weights_give_a_half_precision_answer() -> None:
    p = torch.tensor([0.75, 0.125, 0.125], dtype=torch.bfloat16)
    for choice in (Softmax(2.0), Entmax(1.5)):
        found = choice.sensitivity(p)
        assert found.dtype == torch.bfloat16
        torch.testing.assert_close(found, choice.sensitivity(p.double()).bfloat16())


def secular_root(counts: dict[float, int]) -> float:
    """The root between the two largest values, by bisection in 50 digits; values have counts."""
    with mpmath.workdps(50):
        (first, _), *others = sorted(counts.items(), reverse=True)
        rest = [(mpmath.mpf(s), n) for s, n in others]
        low, high = rest[0][0], mpmath.mpf(first)
        for _ in range(170):
            middle = (low + high) / 2
            phi = sum(n * s / (middle - s) for s, n in rest)
            low, high = (middle, high) if phi * (first - middle) > first else (low, middle)
        return float(low)


@pytest.mark.parametrize("ulps", [1, 2, 3, 7])
@pytest.mark.parametrize("seconds", [1, 3, 100_000])
@pytest.mark.parametrize("others", [0, 5])
@pytest.mark.parametrize("size", [0.5, 0.3, 3e-5, 1e-290])
def test_a_tie_but_for_the_last_digits(ulps: int, seconds: int, others: int, size: float) -> None:
    second = size
    for _ in range(ulps):
        second = math.nextafter(second, 0.0)
    counts = {size: 1, second: seconds} | {second / 2**k: 3 for k in range(1, others)}
    flat = [s for s, n in reversed(counts.items()) for _ in range(n)]
    s = torch.tensor(flat, dtype=torch.float64, requires_grad=True)
    found = largest_eigenvalue(s)
    wanted = secular_root(counts)
    assert abs(found.item() - wanted) <= 4e-16 * wanted
    (g,) = torch.autograd.grad(found, s)
    assert g.isfinite().all()


@pytest.mark.parametrize("choice", [Softmax(), Entmax(1.5), Entmax(1.01), Sparsemax(), Capped(0.6)])
def test_weights_almost_tied_have_a_sensitivity(choice: Choice) -> None:
    p = torch.tensor([[0.5, math.nextafter(0.5, 0.0)]], dtype=torch.float64)
    torch.testing.assert_close(choice.sensitivity(p), choice.sensitivity(torch.full_like(p, 0.5)))


def require_bounds(rows: Tensor) -> Tensor:
    """lower <= exact <= upper for each row; returns upper / lower."""
    lower, upper = eigenvalue_bounds(rows)
    for row, low, high in zip(rows, lower.tolist(), upper.tolist(), strict=True):
        wanted = exact(row.double())
        assert low <= wanted <= high
    return upper / lower


@pytest.mark.parametrize("name", SATURATED)
def test_bounds_enclose_the_root_of_saturated_rows(name: str) -> None:
    assert float(require_bounds(torch.tensor([SATURATED[name]], dtype=torch.float64))) < 1 + 3e-9


def test_bounds_of_many_entries_take_the_small_ones_together() -> None:
    generator = torch.Generator().manual_seed(1)
    for scale, width in ((0.01, 1.05), (1.0, 1.3), (4.0, 1.01), (20.0, 1 + 1e-6)):
        s = (scale * torch.randn(1, 40, dtype=torch.float64, generator=generator)).softmax(-1)
        assert bool((require_bounds(s) < width).all())


def test_bounds_of_ties_lone_weights_and_nothing() -> None:
    s = torch.tensor([[2.0, 2.0, 0.5], [3.0, 0.0, 0.0], [0.0, 0.0, 0.0]])
    for bound in eigenvalue_bounds(s):
        assert bound.tolist() == [2.0, 0.0, 0.0]
    assert [bound.tolist() for bound in eigenvalue_bounds(torch.ones(2, 1))] == [[0.0, 0.0]] * 2


def test_rounding_inside_the_bounds_of_a_map() -> None:
    """At exactly these weights, in float32, and with beta."""
    generator = torch.Generator().manual_seed(2)
    p = torch.randn(3, 20, generator=generator).softmax(-1)
    choices: tuple[Choice, ...] = (Softmax(beta=3.0), Entmax(1.5, beta=0.3), Capped(0.2))
    for choice in choices:
        lower, upper = choice.sensitivity_bounds(p)
        for row, low, high in zip(p, lower.tolist(), upper.tolist(), strict=True):
            wanted = float(choice.beta) * exact(choice.spread(row.double()))
            assert low <= wanted <= high <= low * 1.05
