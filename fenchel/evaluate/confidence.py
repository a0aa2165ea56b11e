"""How sure a model is of a text, and how often it is right.

The temperature is fitted on the first half of the text and everything is measured on the second,
at T = 1 and at the fitted T: a number fitted and judged on the same words would flatter itself.
Of the first half as many predictions are kept as fit into ``KEPT`` numbers, at equal distances.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fenchel.data import Ids
from fenchel.evaluate.calibration import BINS, Calibration, Outcomes, outcomes, summarise
from fenchel.evaluate.score import Watch, predictions
from fenchel.evaluate.temperature import fit_temperature

KEPT = 1 << 26
"""Logits held at once: a quarter of a gigabyte."""


class Confidence(NamedTuple):
    """A model on a text, as it is and at the temperature that suits it."""

    temperature: float
    fitted_on: int
    plain: Calibration
    scaled: Calibration | None
    """None when no finite positive temperature is best."""


def confidence(
    model: nn.Module,
    ids: Ids,
    *,
    context: int,
    bins: int = BINS,
    batch: int = 8,
    watch: Watch | None = None,
) -> Confidence:
    """Calibration on the second half of ``ids``, before and after the first half's temperature."""
    if len(ids) < 4:
        raise ValueError(f"the text has {len(ids)} tokens; calibration needs at least 4.")
    middle = len(ids) // 2
    first, second = _halves(watch, middle, len(ids) - 1)
    reading: dict[str, Any] = {"context": context, "batch": batch}
    logits_NV, targets_N = _kept(model, ids[: middle + 1], watch=first, **reading)
    T = fit_temperature(logits_NV, targets_N).temperature
    temperatures = (1.0, T) if 0.0 < T < float("inf") else (1.0,)
    found = _measured(model, ids[middle:], temperatures, watch=second, **reading)
    plain, *scaled = (summarise(one, bins=bins) for one in found)
    return Confidence(T, len(targets_N), plain, scaled[0] if scaled else None)


def _halves(watch: Watch | None, middle: int, whole: int) -> tuple[Watch | None, Watch | None]:
    """What watches the whole text, for each half of it."""
    if watch is None:
        return None, None
    return lambda done, _: watch(done, whole), lambda done, _: watch(middle + done, whole)


def _kept(model: nn.Module, ids: Ids, **reading: Any) -> tuple[Tensor, Tensor]:
    """Predictions at equal distances, few enough to hold: (N, V), (N,)."""
    rows, truths, seen, apart = [], [], 0, 0
    for logits_NV, targets_N in predictions(model, ids, **reading):
        apart = apart or 1 + (len(ids) - 1) * logits_NV.shape[1] // KEPT
        first = -seen % apart
        rows.append(logits_NV[first::apart].float())
        truths.append(targets_N[first::apart])
        seen += len(targets_N)
    return torch.cat(rows), torch.cat(truths)


def _measured(
    model: nn.Module, ids: Ids, temperatures: tuple[float, ...], **reading: Any
) -> list[Outcomes]:
    """Outcomes of every prediction at each temperature, in one reading."""
    found: list[list[Outcomes]] = [[] for _ in temperatures]
    for logits_NV, targets_N in predictions(model, ids, **reading):
        for part, T in zip(found, temperatures, strict=True):
            part.append(outcomes(logits_NV, targets_N, temperature=T))
    return [Outcomes(*(torch.cat(x) for x in zip(*part, strict=True))) for part in found]
