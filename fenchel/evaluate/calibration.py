"""Does a model's confidence mean what it says?

Of N predictions p_n over V classes with truths y_n,

    confidence  c_n = max_v p_n(v)           hit  h_n = 1 if argmax_v p_n(v) = y_n, else 0

A model is calibrated when a share c of all predictions made at confidence c is right: nine of
ten at 0.9. To measure it, predictions are put into bins B_1 ... B_M by confidence:

    ECE   = sum_m |B_m| / N  | mean of h over B_m  -  mean of c over B_m |
    Brier = mean_n sum_v (p_n(v) - [v = y_n])^2                            from 0 to 2

Bins of equal width are ((m - 1) / M, m / M]; bins of equal mass end at every N/M-th confidence in
order, equal confidences staying together. An empty bin counts nothing and is left out. ECE is an
estimate that depends on the bins, so a number without them says little: the default is 15 of
equal width. The loss and the Brier score need no bins, and both are proper: the expected score is
least when p is the truth's own distribution, and only then.

Guo, Pleiss, Sun and Weinberger (2017), On calibration of modern neural networks.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

BINS = 15


class Outcomes(NamedTuple):
    """N predictions and what became of them; each is (N,)."""

    confidence: Tensor
    hit: Tensor
    loss: Tensor
    brier: Tensor


class Bin(NamedTuple):
    """Predictions of about one confidence."""

    low: float
    high: float
    size: int
    confidence: float
    accuracy: float


class Calibration(NamedTuple):
    """How far confidence and accuracy are apart."""

    predictions: int
    loss: float
    brier: float
    accuracy: float
    confidence: float
    ece: float
    ece_mass: float
    bins: tuple[Bin, ...]
    """Of equal width, those that hold something."""


def outcomes(logits_NV: Tensor, targets_N: Tensor, *, temperature: float = 1.0) -> Outcomes:
    """What softmax(logits / temperature) says of the targets: (N, V), (N,) -> (N,) each."""
    if not 0.0 < temperature < float("inf"):
        raise ValueError(f"temperature={temperature} should be a positive number.")
    check(logits_NV, targets_N)
    wide = torch.promote_types(logits_NV.dtype, torch.float32)
    log_p = (logits_NV.to(wide) / temperature).log_softmax(-1)
    p = log_p.exp()
    confidence, best = p.max(-1)
    log_p_y = log_p.gather(-1, targets_N[:, None])[:, 0]
    brier = p.square().sum(-1) - 2.0 * log_p_y.exp() + 1.0
    return Outcomes(confidence, best == targets_N, -log_p_y, brier)


def reliability(
    confidence_N: Tensor, hit_N: Tensor, *, bins: int = BINS, by: str = "width"
) -> tuple[Bin, ...]:
    """The bins that hold something, from low confidence to high; ``by`` is "width" or "mass"."""
    if bins < 1:
        raise ValueError(f"bins={bins} should be at least 1.")
    if confidence_N.shape != hit_N.shape or confidence_N.dim() != 1 or not len(hit_N):
        raise ValueError(
            "reliability needs one confidence and one hit a prediction, (N,) each with N at least "
            f"1, got {tuple(confidence_N.shape)} and {tuple(hit_N.shape)}."
        )
    c, h = confidence_N.double(), hit_N.double()
    if not bool(((c >= 0.0) & (c <= 1.0 + 1e-6)).all()):  # rounding may pass 1 by a hair
        raise ValueError("a confidence is a probability, from 0 to 1.")
    edges = _edges(c, bins, by)
    where = torch.bucketize(c, edges[1:-1].contiguous())  # edge m < c <= edge m + 1
    count = torch.bincount(where, minlength=bins)
    sums = [torch.bincount(where, weights=x, minlength=bins) for x in (c, h)]
    mean_c, mean_h = (total / count.clamp(min=1) for total in sums)
    columns = (edges[:-1], edges[1:], count, mean_c, mean_h)
    rows = zip(*(column.tolist() for column in columns), strict=True)
    return tuple(Bin(*row) for row in rows if row[2])


def calibration_error(table: Sequence[Bin]) -> float:
    """ECE of a table of bins."""
    total = sum(one.size for one in table)
    return sum(one.size * abs(one.accuracy - one.confidence) for one in table) / total


def brier_score(p_NV: Tensor, targets_N: Tensor) -> float:
    """Mean squared distance from the predictions to the truths: (N, V), (N,) -> a number."""
    check(p_NV, targets_N)
    truth = torch.zeros_like(p_NV).scatter(-1, targets_N[:, None], 1.0)
    return float((p_NV - truth).square().sum(-1).mean())


def summarise(found: Outcomes, *, bins: int = BINS) -> Calibration:
    """All of it in numbers."""
    table = reliability(found.confidence, found.hit, bins=bins)
    mass = reliability(found.confidence, found.hit, bins=bins, by="mass")
    names = ("loss", "brier", "hit", "confidence")
    loss, brier, accuracy, confidence = (float(getattr(found, x).double().mean()) for x in names)
    return Calibration(
        predictions=len(found.hit),
        loss=loss,
        brier=brier,
        accuracy=accuracy,
        confidence=confidence,
        ece=calibration_error(table),
        ece_mass=calibration_error(mass),
        bins=table,
    )


def check(rows_NV: Tensor, targets_N: Tensor) -> None:
    """A row of numbers for every target, said in one sentence when there is not."""
    if rows_NV.dim() != 2 or targets_N.shape != rows_NV.shape[:1] or not rows_NV.numel():
        raise ValueError(
            "calibration needs rows (N, V) and targets (N,) with N and V at least 1, got "
            f"{tuple(rows_NV.shape)} and {tuple(targets_N.shape)}."
        )
    if targets_N.is_floating_point() or not bool(
        ((targets_N >= 0) & (targets_N < rows_NV.shape[1])).all()
    ):
        raise ValueError(f"a target is a class from 0 to {rows_NV.shape[1] - 1}.")
    if bool(rows_NV.isnan().any()):
        raise ValueError("some of the numbers to calibrate are NaN.")


def _edges(c: Tensor, bins: int, by: str) -> Tensor:
    """(M + 1,) from 0 to 1, never falling."""
    if by == "width":
        return torch.linspace(0.0, 1.0, bins + 1, dtype=torch.float64, device=c.device)
    if by == "mass":
        last = torch.arange(1, bins, device=c.device) * len(c) // bins - 1
        inner = c.sort().values[last.clamp(min=0)]
        return torch.cat([c.new_zeros(1), inner, c.new_ones(1)])
    raise ValueError(f'bins are made by "width" or by "mass", got {by!r}.')
