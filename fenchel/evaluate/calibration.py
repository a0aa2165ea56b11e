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

One number that mends confidence: softmax(z / T), with T fitted by the loss.

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

How sure a model is of a text, and how often it is right.

The temperature is fitted on the first half of the text and everything is measured on the second,
at T = 1 and at the fitted T: a number fitted and judged on the same words would flatter itself.
Of the first half as many predictions are kept as fit into ``KEPT`` numbers, at equal distances.

What label smoothing asks of a model, in closed form.

The truth y among V classes is replaced by a mixture with the uniform distribution,

    q = (1 - a) onehot(y) + (a / V) 1          q_y = 1 - a + a / V,   every other  a / V

The gradient of the cross-entropy in the logits becomes p - q, so the loss is least at p = q and
not at certainty. There

    gap      z_y - z_other = log(q_y / q_other)     finite: more confidence is punished
    minimum  H(q) = -q_y log q_y - (V - 1) q_other log q_other

The minimum is above 0, so a smoothed loss and its perplexity must not be compared with unsmoothed
ones. (Another convention shares a among the V - 1 others; this one is torch's.)

Szegedy et al. (2016), Rethinking the Inception architecture for computer vision.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fenchel.data import Ids, ProgressCallback
from fenchel.evaluate.score import predictions

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


_NUMBERS = 1 << 20  # scores widened to float64 at a time


class TemperatureFit(NamedTuple):
    """The best temperature, the loss at it, and how many steps it took."""

    temperature: float
    loss: float
    steps: int


@torch.no_grad()
def fit_temperature(
    logits_NV: Tensor, targets_N: Tensor, *, tolerance: float = 1e-10
) -> TemperatureFit:
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
        return TemperatureFit(0.0, float(ties.log().mean()), 0)
    loss, slope, curvature = _loss(logits_NV, targets_N, 0.0)
    if slope >= 0.0:
        return TemperatureFit(math.inf, loss, 0)
    low, high, b = 0.0, math.inf, curvature**-0.5  # scores of variance 1, whatever their scale
    for steps in range(1, 1001):
        loss, slope, curvature = _loss(logits_NV, targets_N, b)
        low, high = (b, high) if slope < 0.0 else (low, b)
        step = b - slope / curvature if curvature > 0.0 else math.nan
        if not low <= step <= high:  # also where step is nan
            step = 2.0 * b if high == math.inf else (low + high) / 2.0
        if min(abs(step - b), high - low) <= tolerance * b:
            return TemperatureFit(1.0 / b, loss, steps)
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
    progress: ProgressCallback | None = None,
) -> Confidence:
    """Calibration on the second half of ``ids``, before and after the first half's temperature."""
    if len(ids) < 4:
        raise ValueError(f"the text has {len(ids)} tokens; calibration needs at least 4.")
    middle = len(ids) // 2
    first, second = _halves(progress, middle, len(ids) - 1)
    reading: dict[str, Any] = {"context": context, "batch": batch}
    logits_NV, targets_N = _kept(model, ids[: middle + 1], progress=first, **reading)
    T = fit_temperature(logits_NV, targets_N).temperature
    temperatures = (1.0, T) if 0.0 < T < float("inf") else (1.0,)
    found = _measured(model, ids[middle:], temperatures, progress=second, **reading)
    plain, *scaled = (summarise(one, bins=bins) for one in found)
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


class LabelSmoothing(NamedTuple):
    """The best a model can do under label smoothing."""

    confidence: float
    """q_y, the probability it should give the truth."""
    other: float
    """q of every other class."""
    gap: float
    """How far the truth's logit should stand above the others."""
    minimum: float
    """The loss there, in nats."""


def label_smoothing(V: int, a: float) -> LabelSmoothing:
    """The optimum of cross-entropy over V classes smoothed by a.

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
    """q for every target: (N,) -> (N, V) in float32."""
    _check(V, a)
    q = torch.full((len(targets_N), V), a / V, device=targets_N.device)
    return q.scatter(-1, targets_N[:, None], 1.0 - a + a / V)


def _check(V: int, a: float) -> None:
    if V < 1 or not 0.0 <= a <= 1.0:
        raise ValueError(
            f"label smoothing needs at least 1 class and a in [0, 1], got V={V}, a={a}."
        )
