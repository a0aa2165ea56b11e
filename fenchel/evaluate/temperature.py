"""One number that mends confidence: softmax(z / T), with T fitted by the loss.

With b = 1 / T and d_n = z_n - z_n[y_n], the scores seen from the truth's own,

    f(b)   = mean_n log sum_v exp(b d_nv)       the loss at temperature 1 / b
    f'(b)  = mean_n E d_n                       under p_n = softmax(b d_n)
    f''(b) = mean_n Var d_n                     never negative

so f is convex in b. (In T or log T it is not: where every prediction is right the loss flattens
towards b = 0 like a sigmoid. It still has one minimum there, the same one.) f' is solved for zero
by Newton's step, kept inside a bracket that halves when the step would leave it.

A temperature never changes which class is best, so accuracy stays. There are two limits: T = 0 when
the best class is the truth in every row, since more confidence always pays, and T = inf when the
rows know less than nothing, since only saying nothing helps.
"""

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from fenchel.evaluate.calibration import check

_NUMBERS = 1 << 20  # scores widened to float64 at a time


class Fit(NamedTuple):
    """The best temperature, the loss at it, and how many steps it took."""

    temperature: float
    loss: float
    steps: int


@torch.no_grad()
def fit_temperature(logits_NV: Tensor, targets_N: Tensor, *, tolerance: float = 1e-10) -> Fit:
    """T > 0 with the least loss, its relative error below ``tolerance``; or a limit, 0 or inf."""
    check(logits_NV, targets_N)
    truth_N = logits_NV.gather(-1, targets_N[:, None])[:, 0]
    if not bool(truth_N.isfinite().all()) or bool((logits_NV == torch.inf).any()):
        raise ValueError(
            "a temperature cannot mend a truth that is impossible or a class that is certain; "
            "leave out the rows whose logits are infinite there."
        )
    ahead = (logits_NV.double().amax(-1) - truth_N.double()).sum()
    if ahead == 0.0:  # f'(inf): nothing is ever ahead of the truth
        ties = (logits_NV == truth_N[:, None]).sum(-1).double()
        return Fit(0.0, float(ties.log().mean()), 0)
    loss, slope, curvature = _loss(logits_NV, targets_N, 0.0)
    if slope >= 0.0:
        return Fit(math.inf, loss, 0)
    low, high, b = 0.0, math.inf, curvature**-0.5  # scores of variance 1, whatever their scale
    for steps in range(1, 1001):
        loss, slope, curvature = _loss(logits_NV, targets_N, b)
        low, high = (b, high) if slope < 0.0 else (low, b)
        step = b - slope / curvature if curvature > 0.0 else math.nan
        if not low <= step <= high:  # also where step is nan
            step = 2.0 * b if high == math.inf else (low + high) / 2.0
        if min(abs(step - b), high - low) <= tolerance * b:
            return Fit(1.0 / b, loss, steps)
        b = min(step, 4.0 * b)  # far out, f' is flat and a step could leave the numbers
    raise AssertionError("a bracket that halves ends after a thousand steps")


def _loss(logits_NV: Tensor, targets_N: Tensor, b: float) -> tuple[float, float, float]:
    """f, f' and f'' at b, summed in float64."""
    total = [0.0, 0.0, 0.0]
    for d in _from_the_truth(logits_NV, targets_N):
        possible = d > -torch.inf
        finite = torch.where(possible, d, 0.0)
        scores = torch.where(possible, b * finite, -torch.inf)
        p = scores.softmax(-1)
        mean = (p * finite).sum(-1)
        variance = (p * (finite - mean[:, None]).square()).sum(-1)
        for i, x in enumerate((scores.logsumexp(-1), mean, variance)):
            total[i] += float(x.sum())
    f, slope, curvature = (x / len(targets_N) for x in total)
    return f, slope, curvature


def _from_the_truth(logits_NV: Tensor, targets_N: Tensor) -> Iterator[Tensor]:
    """d, some rows at a time, in float64."""
    rows = max(1, _NUMBERS // logits_NV.shape[1])
    for z, y in zip(torch.split(logits_NV, rows), torch.split(targets_N, rows), strict=True):
        yield z.double() - z.double().gather(-1, y[:, None])
