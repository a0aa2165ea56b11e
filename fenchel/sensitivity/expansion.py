"""The first-order expansion, looked at: how fast what it leaves out disappears.

    f(x + h d) = f(x) + h J d + o(h),        remainder(h) = |f(x + h d) - f(x) - h J d|

For a smooth f the remainder falls like h^2, a straight line of slope 2 in logarithms until rounding
stops it. A wrong derivative leaves a slope of 1, a kink on the way something between.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fenchel.sensitivity.autodiff import jacobian, plain
from fenchel.sensitivity.operator import Operator


class Remainder(NamedTuple):
    """What a first-order expansion leaves out."""

    h: Tensor
    error: Tensor
    """|f(x + h d) - f(x) - h J d| for every h."""
    slope: float
    """Of log error over log h, over the steps where the error is clear of rounding."""


def remainder(
    f: Callable[..., Any], x: Tensor, d: Tensor, *, J: Operator | None = None, steps: int = 12
) -> Remainder:
    """The remainder along d for h = 1, 1/2, 1/4, ...; ``J`` is the derivative on trial."""
    f, x, d = plain(f), x.detach(), d.detach()
    first = (jacobian(f, x) if J is None else J) @ d
    h = 0.5 ** torch.arange(steps, dtype=torch.float64)
    with torch.no_grad():
        y = f(x)
        error = torch.stack(
            [(f(x + float(t) * d) - y - float(t) * first).double().norm() for t in h]
        )
    clear = error > 1e3 * torch.finfo(x.dtype).eps * float(y.double().norm())
    if int(clear.sum()) < 2:
        return Remainder(h, error, float("nan"))  # linear, as far as the dtype can tell
    a, b = h[clear].log(), error[clear].log()
    # The last steps are the ones where the leading term rules.
    a, b = a[-4:], b[-4:]
    a, b = a - a.mean(), b - b.mean()
    return Remainder(h, error, float((a * b).sum() / a.square().sum()))
