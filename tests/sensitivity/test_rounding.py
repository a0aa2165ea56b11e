"""fenchel/sensitivity/rounding.py: exact sizes, products and bounds that never fall short."""

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fenchel.sensitivity.rounding import (
    above,
    bound_dtype,
    frobenius,
    lengths,
    outward,
    product,
    round_up,
    unit_size,
)

finite = st.floats(allow_nan=False, allow_infinity=False)
positive = st.floats(min_value=5e-324, max_value=1.7e308)


def double(values: list[float]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


@settings(max_examples=200)
@given(st.lists(finite, min_size=1, max_size=5))
def test_a_size_is_a_power_of_two_near_the_largest_entry(values: list[float]) -> None:
    x = double(values)
    y, size = unit_size(x, (-1,))
    assert math.frexp(float(size))[0] == 0.5
    if float(x.abs().max()) > 0:
        assert 1.0 <= float(y.abs().max()) < 2.0
    large = y.abs() > 1e-290  # entries that differ by more than the range of the dtype vanish
    assert torch.equal((y * size)[large], x[large])


@settings(max_examples=200)
@given(st.lists(finite, min_size=1, max_size=5))
def test_a_length_is_right_at_every_scale(values: list[float]) -> None:
    exact = sum((Fraction(v) ** 2 for v in values), Fraction(0))
    found = float(lengths(double(values)))
    if math.isfinite(found):
        size = Fraction(found)
        slack = Fraction(1, 10**14) * size + Fraction(1, 10**320)
        assert max(size - slack, Fraction(0)) ** 2 <= exact <= (size + slack) ** 2
    outer = float(frobenius(double(values)[None]))
    assert math.isinf(outer) or Fraction(outer) ** 2 >= exact or outer < 1e-300


@settings(max_examples=200)
@given(st.lists(positive, min_size=1, max_size=5))
def test_a_product_overflows_only_where_its_value_does(factors: list[float]) -> None:
    exact = math.prod((Fraction(f) for f in factors), start=Fraction(1))
    found = float(product(*(double([f]) for f in factors)))
    if math.isinf(found):
        assert exact > Fraction(8e307)
    else:
        assert abs(Fraction(found) - exact) <= exact / 10**14 + Fraction(1, 10**323)


@settings(max_examples=200)
@given(positive)
def test_rounding_up_never_falls_short(value: float) -> None:
    x = double([value])
    for dtype in (torch.float32, torch.float64):
        rounded = round_up(x, dtype)
        assert rounded.dtype == dtype
        assert float(rounded) >= value
    assert float(above(x)) > value
    assert float(outward(x, 3)) >= value


def test_a_bound_that_is_no_number_is_infinite_and_half_precision_is_widened() -> None:
    assert round_up(double([math.nan]), torch.float32).item() == math.inf
    assert bound_dtype(torch.zeros(1, dtype=torch.bfloat16)) == torch.float32
    assert bound_dtype(torch.zeros(1), torch.zeros(1, dtype=torch.float64)) == torch.float64


@pytest.mark.parametrize("shape", [(0,), (2, 0)])
def test_nothing_has_length_zero(shape: tuple[int, ...]) -> None:
    assert not lengths(torch.zeros(shape)).any()
