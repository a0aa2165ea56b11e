"""Calibration: whether the confidence of predictions matches their accuracy.

**Measures.** N predictions p_n over V classes with true classes y_n have

    confidence  c_n = max_v p_n(v)           hit  h_n = 1 if argmax_v p_n(v) = y_n, else 0

A model is calibrated when a share c of the predictions made at confidence c is right. Predictions
are grouped by confidence into bins B_1 ... B_M:

    ECE   = sum_m |B_m| / N  | mean of h over B_m  -  mean of c over B_m |
    Brier = mean_n sum_v (p_n(v) - [v = y_n])^2                            from 0 to 2

Bins of equal width are ((m - 1) / M, m / M]. Bins of equal mass end at every N/M-th confidence in
increasing order; equal confidences share a bin. Empty bins are left out. ECE depends on the bins,
by default 15 of equal width. Loss and Brier score need no bins and are proper: their expected value
has its unique minimum where p is the true distribution.

**Temperature scaling.** ``fit_temperature`` minimises the loss of softmax(z / T) over T. With
b = 1 / T and d_n = z_n - z_n[y_n],

    f(b)   = mean_n log sum_v exp(b d_nv)       the loss at temperature 1 / b
    f'(b)  = mean_n E d_n                       under p_n = softmax(b d_n)
    f''(b) = mean_n Var d_n >= 0

so f is convex in b (in T and in log T it is not, but has the same single minimum). Newton's method
finds the zero of f' inside a bracket, which is halved whenever a step would leave it. Scaling does
not change the most probable class, hence not the accuracy. There are two limits: T = 0 if the true
class has the largest logit in every row, and T = inf if f'(0) >= 0, where the uniform distribution
is best.

``confidence`` fits T on the first half of a text and measures on the second, at T = 1 and at the
fitted T: measured on the text of the fit, the result would be biased in its favour.

``write_calibration`` stores the fitted temperature beside a checkpoint, sealed, for the confidence
of served tokens (generation/attention_trace.py). Weights may change afterwards under the same name:
the file also holds the model's loss on a fixed sequence of ids, and ``read_calibration`` refuses a
model with another.

**Label smoothing.** The target y is replaced by a mixture with the uniform distribution,

    q = (1 - a) onehot(y) + (a / V) 1          q_y = 1 - a + a / V,   every other  a / V

The gradient of the cross-entropy in the logits is p - q, so the minimum is at p = q:

    gap      z_y - z_other = log(q_y / q_other)     finite, so more confidence costs
    minimum  H(q) = -q_y log q_y - (V - 1) q_other log q_other > 0

A smoothed loss is therefore not comparable with an unsmoothed one. (Another convention divides a
among the V - 1 other classes; this one is torch's.)

Guo, Pleiss, Sun and Weinberger (2017), On calibration of modern neural networks.
Szegedy et al. (2016), Rethinking the Inception architecture for computer vision.
"""

import math
import warnings
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from fenchel.data import Ids, PackedBatches, ProgressCallback
from fenchel.evaluate.score import document_predictions, predictions
from fenchel.files import Damaged, Notice, read_sealed_json, write_sealed_json
from fenchel.generation.attention_trace import TokenCalibration
from fenchel.model import Transformer, evaluating
from fenchel.torch_internals import to_float64

BINS = 15


class Outcomes(NamedTuple):
    """Per-prediction measures of N predictions, each (N,)."""

    confidence: Tensor
    hit: Tensor
    loss: Tensor
    brier: Tensor


class Bin(NamedTuple):
    """A bin of the reliability diagram: its edges, its size and the means over it."""

    low: float
    high: float
    size: int
    confidence: float
    accuracy: float


class Calibration(NamedTuple):
    """Means over all predictions, and the calibration error by both kinds of bins."""

    predictions: int
    loss: float
    brier: float
    accuracy: float
    confidence: float
    ece: float
    ece_mass: float
    bins: tuple[Bin, ...]
    """Bins of equal width that are not empty."""


def outcomes(logits_NV: Tensor, targets_N: Tensor, *, temperature: float = 1.0) -> Outcomes:
    """Measures of the predictions softmax(logits / temperature): (N, V), (N,) -> (N,) each.

    >>> outcomes(torch.tensor([[0.0, 0.0], [9.0, 0.0]]), torch.tensor([1, 0])).hit.tolist()
    [False, True]
    """
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
    """The bins that are not empty, by increasing confidence; ``by`` is "width" or "mass".

    >>> table = reliability(torch.tensor([0.6, 0.7, 0.9]), torch.tensor([0, 1, 1]), bins=2)
    >>> [(b.size, round(b.confidence, 4), round(b.accuracy, 4)) for b in table]
    [(3, 0.7333, 0.6667)]
    """
    if bins < 1:
        raise ValueError(f"bins={bins} should be at least 1.")
    if confidence_N.shape != hit_N.shape or confidence_N.dim() != 1 or not len(hit_N):
        raise ValueError(
            "reliability needs one confidence and one hit per prediction, (N,) each with N at "
            f"least 1, got {tuple(confidence_N.shape)} and {tuple(hit_N.shape)}."
        )
    c, h = to_float64(confidence_N), to_float64(hit_N)
    if not bool(((c >= 0.0) & (c <= 1.0 + 1e-6)).all()):  # rounding may exceed 1
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
    """ECE of a table of bins.

    >>> round(calibration_error([Bin(0.5, 1.0, 10, confidence=0.9, accuracy=0.7)]), 6)
    0.2
    """
    total = sum(b.size for b in table)
    return sum(b.size * abs(b.accuracy - b.confidence) for b in table) / total


def brier_score(p_NV: Tensor, targets_N: Tensor) -> float:
    """Mean squared distance of the probabilities from the targets: (N, V), (N,) -> a number.

    >>> brier_score(torch.tensor([[0.5, 0.5]]), torch.tensor([0]))
    0.5
    """
    check(p_NV, targets_N)
    truth = torch.zeros_like(p_NV).scatter(-1, targets_N[:, None], 1.0)
    return float((p_NV - truth).square().sum(-1).mean())


def summarise(measured: Outcomes, *, bins: int = BINS) -> Calibration:
    """Calibration of a set of predictions, from its ``outcomes``."""
    table = reliability(measured.confidence, measured.hit, bins=bins)
    mass = reliability(measured.confidence, measured.hit, bins=bins, by="mass")
    names = ("loss", "brier", "hit", "confidence")
    means = (float(to_float64(getattr(measured, name)).mean()) for name in names)
    loss, brier, accuracy, confidence = means
    return Calibration(
        predictions=len(measured.hit),
        loss=loss,
        brier=brier,
        accuracy=accuracy,
        confidence=confidence,
        ece=calibration_error(table),
        ece_mass=calibration_error(mass),
        bins=table,
    )


def check(rows_NV: Tensor, targets_N: Tensor) -> None:
    """Raises unless there is one row of V numbers, none NaN, per target."""
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
    """Bin edges (M + 1,) from 0 to 1, not decreasing."""
    if by == "width":
        return torch.linspace(0.0, 1.0, bins + 1, dtype=torch.float64, device=c.device)
    if by == "mass":
        last = torch.arange(1, bins, device=c.device) * len(c) // bins - 1
        inner = c.sort().values[last.clamp(min=0)]
        return torch.cat([c.new_zeros(1), inner, c.new_ones(1)])
    raise ValueError(f'bins are made by "width" or by "mass", got {by!r}.')


_BLOCK = 1 << 20  # logits converted to float64 at a time


class TemperatureFit(NamedTuple):
    """The best temperature, the loss at it, and the number of Newton steps."""

    temperature: float
    loss: float
    steps: int


@torch.no_grad()
def fit_temperature(
    logits_NV: Tensor, targets_N: Tensor, *, tolerance: float = 1e-10
) -> TemperatureFit:
    """The temperature with the least loss, to the relative ``tolerance``; or a limit, 0 or inf.

    Logits three times too large for targets drawn from softmax(z):

    >>> generator = torch.Generator().manual_seed(0)
    >>> z = torch.randn(4000, 5, generator=generator)
    >>> y = torch.multinomial(z.softmax(-1), 1, generator=generator)[:, 0]
    >>> round(fit_temperature(3 * z, y).temperature, 1)
    3.0
    """
    check(logits_NV, targets_N)
    truth_N = logits_NV.gather(-1, targets_N[:, None])[:, 0]
    if not bool(truth_N.isfinite().all()) or bool((logits_NV == torch.inf).any()):
        raise ValueError(
            "a temperature cannot correct an impossible target (logit -inf) or a certain class "
            "(logit inf); leave out the rows with such logits."
        )
    ahead = (to_float64(logits_NV.amax(-1)) - to_float64(truth_N)).sum()
    if ahead == 0.0:  # f'(inf) = 0: the target has the largest logit in every row
        ties = to_float64((logits_NV == truth_N[:, None]).sum(-1))
        return TemperatureFit(0.0, float(ties.log().mean()), 0)
    loss, slope, curvature = _loss(logits_NV, targets_N, 0.0)
    if slope >= 0.0:
        return TemperatureFit(math.inf, loss, 0)
    low, high = 0.0, math.inf
    b = curvature**-0.5  # a first guess that does not depend on the scale of the logits
    for steps in range(1, 1001):
        loss, slope, curvature = _loss(logits_NV, targets_N, b)
        low, high = (b, high) if slope < 0.0 else (low, b)
        step = b - slope / curvature if curvature > 0.0 else math.nan
        if not low <= step <= high:  # also if step is nan
            step = 2.0 * b if high == math.inf else (low + high) / 2.0
        if min(abs(step - b), high - low) <= tolerance * b:
            return TemperatureFit(1.0 / b, loss, steps)
        b = min(step, 4.0 * b)  # far out f' is flat, and a full step could overflow
    raise AssertionError("a bracket that halves ends after a thousand steps")


def _loss(logits_NV: Tensor, targets_N: Tensor, b: float) -> tuple[float, float, float]:
    """f, f' and f'' at b, summed in float64."""
    total = [0.0, 0.0, 0.0]
    rows = max(1, _BLOCK // logits_NV.shape[1])
    for z, y in zip(torch.split(logits_NV, rows), torch.split(targets_N, rows), strict=True):
        wide = to_float64(z)
        d = wide - wide.gather(-1, y[:, None].to(wide.device))
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


FIT_LOGITS = 1 << 26
"""The most logits that a temperature is fitted on: a quarter of a gigabyte."""


class Confidence(NamedTuple):
    """Calibration of a model on a text, at T = 1 and at the fitted temperature."""

    temperature: float
    fitted_on: int
    plain: Calibration
    scaled: Calibration | None
    """None if the best temperature is 0 or infinite."""

    def record(self) -> dict[str, Any]:
        """Plain values; a temperature of 0 or infinity is None."""
        kinds = {"plain": self.plain, "scaled": self.scaled}
        return {
            "temperature": self.temperature if 0.0 < self.temperature < math.inf else None,
            "fitted_on": self.fitted_on,
            **{
                kind: one and {**one._asdict(), "bins": [b._asdict() for b in one.bins]}
                for kind, one in kinds.items()
            },
        }


def confidence(
    model: nn.Module,
    ids: Ids,
    *,
    context: int,
    stride: int | None = None,
    batch: int = 8,
    progress: ProgressCallback | None = None,
) -> Confidence:
    """Calibration on the second half of ``ids``, at T = 1 and at the T fitted on the first half.

    The fit uses every k-th prediction of the first half, with the smallest k such that their
    logits are at most ``FIT_LOGITS``.
    """
    if len(ids) < 4:
        raise ValueError(f"the text has {len(ids)} tokens; calibration needs at least 4.")
    middle = len(ids) // 2
    first, second = _halves(progress, middle, len(ids) - 1)
    options: dict[str, Any] = {"context": context, "stride": stride, "batch": batch}
    fitted = predictions(model, ids[: middle + 1], progress=first, **options)
    measured = predictions(model, ids[middle:], progress=second, **options)
    return _confidence((x[1:] for x in fitted), middle, (x[1:] for x in measured))


def document_confidence(
    model: Transformer,
    first: PackedBatches,
    second: PackedBatches,
    *,
    progress: ProgressCallback | None = None,
) -> Confidence:
    """``confidence`` on documents: fitted on the ``first`` ones and measured on the ``second``."""
    begin, end = _halves(progress, first.targets, first.targets + second.targets)
    fitted = document_predictions(model, first, progress=begin)
    measured = document_predictions(model, second, progress=end)
    return _confidence(fitted, first.targets, measured)


Predictions = Iterable[tuple[Tensor, Tensor]]
"""Blocks of logits (N, V) and targets (N,)."""


def _confidence(fitted: Predictions, count: int, measured: Predictions) -> Confidence:
    """``count`` is the number of predictions that the temperature is fitted on."""
    logits_NV, targets_N = _subsample(fitted, count)
    T = fit_temperature(logits_NV, targets_N).temperature
    temperatures = (1.0, T) if 0.0 < T < float("inf") else (1.0,)
    plain, *scaled = map(summarise, all_outcomes(measured, temperatures))
    return Confidence(T, len(targets_N), plain, scaled[0] if scaled else None)


def _halves(
    progress: ProgressCallback | None, middle: int, total: int
) -> tuple[ProgressCallback | None, ProgressCallback | None]:
    """Callbacks for the two halves of a text that report progress through the whole of it."""
    if progress is None:
        return None, None

    def first(_: str, done: int, __: int) -> None:
        progress("calibration", done, total)

    def second(_: str, done: int, __: int) -> None:
        progress("calibration", middle + done, total)

    return first, second


def _subsample(pairs: Predictions, total: int) -> tuple[Tensor, Tensor]:
    """Logits (N, V) and targets (N,) of every k-th prediction, at most ``FIT_LOGITS`` logits."""
    logits: Tensor | None = None
    targets: list[Tensor] = []
    count, stride, filled = 0, 1, 0
    for logits_NV, targets_N in pairs:
        V = logits_NV.shape[1]
        if logits is None:  # one allocation: joining blocks at the end would need it twice
            stride = 1 + total * V // FIT_LOGITS
            logits = logits_NV.new_empty(-(-total // stride), V, dtype=torch.float32)
        part = logits_NV[-count % stride :: stride]
        logits[filled : filled + len(part)] = part
        targets.append(targets_N[-count % stride :: stride])
        count, filled = count + len(targets_N), filled + len(part)
    assert logits is not None  # a text of two tokens has a prediction
    return logits[:filled], torch.cat(targets)


def all_outcomes(pairs: Predictions, temperatures: Sequence[float] = (1.0,)) -> list[Outcomes]:
    """Outcomes of every prediction at each temperature, from one pass over the text."""
    parts: list[list[Outcomes]] = [[] for _ in temperatures]
    for logits_NV, targets_N in pairs:
        for part, T in zip(parts, temperatures, strict=True):
            part.append(outcomes(logits_NV, targets_N, temperature=T))
    return [Outcomes(*(torch.cat(x) for x in zip(*part, strict=True))) for part in parts]


CALIBRATION = "calibration.json"
"""The file of a stored calibration, beside the checkpoint."""
_PROBE_TOLERANCE = 0.02
"""Nats by which the loss on the probe may differ, for other dtypes and devices."""


def write_calibration(directory: Path, model: Transformer, result: Confidence, text: str) -> Path:
    """Store the temperature that was fitted on ``text``, a name, and the error measured at it."""
    if result.scaled is None:
        raise ValueError("no finite temperature fits this text best, so there is none to save.")
    path = directory / CALIBRATION
    value = {
        "temperature": result.temperature,
        "fitted_on": result.fitted_on,
        "error": result.scaled.ece,
        "error_at_1": result.plain.ece,
        "predictions": result.scaled.predictions,
        "text": text,
        "probe_loss": _probe_loss(model),
    }
    write_sealed_json(path, value)
    return path


def read_calibration(directory: Path, model: Transformer) -> TokenCalibration | None:
    """What ``write_calibration`` stored for this model; None where there is nothing of use.

    A file that is damaged, or was written for other weights, is left out with a warning.
    """
    path = directory / CALIBRATION
    if not path.exists():
        return None
    reason = "it does not hold the numbers of a calibration"
    try:
        value = read_sealed_json(path)
        temperature, error, probe = (value[x] for x in ("temperature", "error", "probe_loss"))
        found = TokenCalibration(float(temperature), float(error), int(value["predictions"]))
        if 0.0 < found.temperature < math.inf and 0.0 <= found.error <= 1.0:
            if abs(float(probe) - _probe_loss(model)) <= _PROBE_TOLERANCE:
                return found
            reason = "it was written for other weights; write it again by fenchel eval"
    except Damaged as error:
        reason = str(error).removesuffix(".")
    except (KeyError, TypeError, ValueError, OverflowError):
        pass
    warnings.warn(f"{CALIBRATION} is not used: {reason}.", Notice, stacklevel=2)
    return None


@torch.no_grad()
def _probe_loss(model: Transformer) -> float:
    """The loss on the first ids of the vocabulary, in order: it changes with the weights."""
    count = min(64, model.config.vocabulary, model.config.context)
    ids_1T = torch.arange(count, device=model.lm_head_weight.device)[None]
    with evaluating(model):
        logits_TV = model(ids_1T)[0, :-1].float()
    return float(cross_entropy(logits_TV, ids_1T[0, 1:])) if count > 1 else 0.0


class LabelSmoothing(NamedTuple):
    """The minimum of the cross-entropy under label smoothing."""

    confidence: float
    """q_y, the best probability of the target."""
    other: float
    """The best probability of every other class."""
    gap: float
    """Logit of the target minus that of the other classes."""
    minimum: float
    """The loss at the minimum, in nats."""


def label_smoothing(V: int, a: float) -> LabelSmoothing:
    """The minimum of the cross-entropy over V classes with smoothing a.

    >>> best = label_smoothing(10, 0.1)
    >>> f"{best.confidence:.2f} {best.gap:.3f} {best.minimum:.4f}"
    '0.91 4.511 0.5003'
    """
    _check(V, a)
    truth, other = 1.0 - a + a / V, a / V
    if a == 0.0 or V == 1:
        return LabelSmoothing(1.0, 0.0, math.inf, 0.0)
    minimum = -truth * math.log(truth) - (V - 1) * other * math.log(other)
    return LabelSmoothing(truth, other, math.log(truth / other), minimum)


def smoothed_targets(targets_N: Tensor, V: int, a: float) -> Tensor:
    """The distribution q of every target: (N,) -> (N, V) in float32.

    >>> smoothed_targets(torch.tensor([1]), 2, 0.2)
    tensor([[0.1000, 0.9000]])
    """
    _check(V, a)
    q = torch.full((len(targets_N), V), a / V, device=targets_N.device)
    return q.scatter(-1, targets_N[:, None], 1.0 - a + a / V)


def _check(V: int, a: float) -> None:
    if V < 1 or not 0.0 <= a <= 1.0:
        raise ValueError(
            f"label smoothing needs at least 1 class and a in [0, 1], got V={V}, a={a}."
        )
