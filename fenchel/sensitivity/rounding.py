"""Bounds that hold after rounding: numbers of a common size, sums and products rounded outward.

A bound is computed in float64 whatever the dtype of its inputs, since float64 represents float32
exactly. Numbers are divided by a power of two near the largest of them first (``unit_size``), which
is exact, so that squares neither overflow nor vanish, and products of the sizes are taken without
overflow on the way (``product``). The result is enlarged by more than the rounding of its sums,

    outward(b, n) = b (1 + (64 + 4 n) eps),            n the length of the longest sum,

and rounded up to the dtype of its inputs (``round_up``). Where terms cancel, a relative margin is
not enough: the rounding of each term is then added by the function that subtracts them.
"""

import torch
from torch import Tensor


def frobenius(A: Tensor) -> Tensor:
    """An upper bound of the spectral norm, the Frobenius norm: (..., m, n) -> (...), float64."""
    size = lengths(A.double().flatten(-2))
    return outward(size, A.shape[-2] * A.shape[-1])


def lengths(x: Tensor) -> Tensor:
    """|x| along the last axis, without overflow or underflow of squares: (..., n) -> (...)."""
    if x.shape[-1] == 0:
        return x.new_zeros(x.shape[:-1])
    x, size = unit_size(x, (-1,))
    length: Tensor = torch.linalg.vector_norm(x, dim=-1) * size[..., 0]
    return length


def unit_size(x: Tensor, axes: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """x / size and size, a power of two near the largest entry along ``axes``, which are kept."""
    largest_entry = x.abs().amax(axes, keepdim=True)
    # Halved, so that the power of two above the largest number of the dtype is finite.
    size = torch.ldexp(torch.ones_like(largest_entry), torch.frexp(largest_entry).exponent - 1)
    size = torch.where((largest_entry > 0) & largest_entry.isfinite(), size, 1.0)
    return x / size, size


def product(*factors: Tensor) -> Tensor:
    """The product of tensors that broadcast, without overflow or underflow on the way to it."""
    mantissa, exponent = torch.frexp(factors[0])
    for factor in factors[1:]:
        part = torch.frexp(factor)
        mantissa, exponent = mantissa * part.mantissa, exponent + part.exponent
    half = exponent // 2  # 2^1024 overflows, though half of it times 1.5 does not
    return torch.ldexp(torch.ldexp(mantissa, half), exponent - half)


def outward(bound: Tensor, terms: int = 0) -> Tensor:
    """A bound enlarged beyond the rounding of sums of ``terms`` numbers."""
    return bound * (1.0 + (64.0 + 4.0 * terms) * torch.finfo(bound.dtype).eps)


def round_up(bound: Tensor, dtype: torch.dtype) -> Tensor:
    """The least number of ``dtype`` that is not below a float64 bound; inf where that is nan.

    >>> round_up(torch.tensor(0.1, dtype=torch.float64), torch.float32) >= 0.1
    tensor(True)
    """
    bound = torch.where(bound.isnan(), torch.inf, bound)
    rounded = bound.to(dtype)
    above = torch.nextafter(rounded, torch.full_like(rounded, torch.inf))
    return torch.where(rounded.double() < bound, above, rounded)


def above(bound: Tensor) -> Tensor:
    """The next number of the dtype: above the exact value of one rounded operation."""
    return torch.nextafter(bound, torch.full_like(bound, torch.inf))


def bound_dtype(*tensors: Tensor) -> torch.dtype:
    """The dtype of a bound of these tensors: float32 or better."""
    dtype = torch.float32
    for x in tensors:
        dtype = torch.promote_types(dtype, x.dtype)
    return dtype
