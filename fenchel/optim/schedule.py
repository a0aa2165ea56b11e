"""The learning rate over time: step -> factor, with 1 at the peak.

A schedule is a pure function of the step, so it has no state to save, and
``torch.optim.lr_scheduler.LambdaLR`` takes it directly. Steps count from 0, and the factor of step
0 is positive (a warm-up that starts at exactly 0 wastes its first step). With w warm-up steps, n
steps in all, f the final factor and r = (t - w) / (n - w) clamped to [0, 1]:

    warm-up          (t + 1) / w                     while t < w, then
    warmup_cosine    f + (1 - f) (1 + cos(pi r)) / 2
    warmup_linear    f + (1 - f) (1 - r)
    warmup_hold      f + (1 - f) min(1, (1 - r) / d)      flat, then linear over a share d
    inverse_sqrt     min((t+1)^-1/2, (t+1) w^-3/2) w^1/2      (the original Transformer's,
                     scaled to peak at 1; its own peak is width^-1/2 w^-1/2)
    constant         1

Past the last step each keeps its last value.

    beta2_warmup     1 - 1 / window,     window from 100 to 1000 steps, evenly

docs/maths/optimisers.md says what a rising beta2 does to Adam's steps. Lesson: optimisers.
"""

import math
from collections.abc import Callable

Schedule = Callable[[int], float]


def warmup_cosine(warmup: int, steps: int, final: float = 0.0) -> Schedule:
    """Linear rise, then half a cosine down to ``final``.

    >>> factor = warmup_cosine(warmup=2, steps=10)
    >>> [round(factor(t), 3) for t in (0, 1, 2, 6, 10)]
    [0.5, 1.0, 1.0, 0.5, 0.0]
    """
    return _after_warmup(
        warmup, steps, lambda r: final + (1.0 - final) * 0.5 * (1.0 + math.cos(math.pi * r))
    )


def warmup_linear(warmup: int, steps: int, final: float = 0.0) -> Schedule:
    """Linear rise, then a straight line down to ``final``.

    >>> factor = warmup_linear(warmup=2, steps=10)
    >>> [factor(t) for t in (0, 1, 2, 6, 10)]
    [0.5, 1.0, 1.0, 0.5, 0.0]
    """
    return _after_warmup(warmup, steps, lambda r: final + (1.0 - final) * (1.0 - r))


def warmup_hold(warmup: int, steps: int, final: float = 0.0, decay: float = 0.5) -> Schedule:
    """Linear rise, a plateau, then a straight line over the last share ``decay`` of the rest.

    >>> factor = warmup_hold(warmup=2, steps=10)
    >>> [factor(t) for t in (0, 1, 6, 8, 10)]
    [0.5, 1.0, 1.0, 0.5, 0.0]
    """
    if not 0.0 < decay <= 1.0:
        raise ValueError(f"decay={decay} should be a share of the steps, in (0, 1].")
    return _after_warmup(
        warmup, steps, lambda r: final + (1.0 - final) * min(1.0, (1.0 - r) / decay)
    )


def inverse_sqrt(warmup: int) -> Schedule:
    """The schedule of the original Transformer, with its peak at 1.

    >>> factor = inverse_sqrt(warmup=4)
    >>> [factor(t) for t in (0, 3, 15)]
    [0.25, 1.0, 0.5]
    """
    if warmup < 0:
        raise ValueError(f"warmup={warmup} should not be negative.")
    w = max(1, warmup)
    return lambda t: min((t + 1) ** -0.5, (t + 1) * w**-1.5) * w**0.5


def constant() -> Schedule:
    """Always 1.

    >>> constant()(1000)
    1.0
    """
    return lambda _: 1.0


def beta2_warmup(steps: int, start: float = 0.99, end: float = 0.999) -> Schedule:
    """Adam's second decay over time: its window 1 / (1 - beta2) grows evenly over ``steps``.

    >>> beta2 = beta2_warmup(steps=900)
    >>> [round(beta2(t), 4) for t in (0, 100, 900)]
    [0.99, 0.995, 0.999]
    """
    if not 0.0 <= start <= end < 1.0:
        raise ValueError(f"start={start} and end={end} should rise within [0, 1).")
    short, long = 1.0 / (1.0 - start), 1.0 / (1.0 - end)

    def beta2(t: int) -> float:
        share = min(1.0, t / max(1, steps))
        return 1.0 - 1.0 / (short + share * (long - short))

    return beta2


def _after_warmup(warmup: int, steps: int, fall: Callable[[float], float]) -> Schedule:
    if warmup < 0 or steps < 1:
        raise ValueError(f"warmup={warmup} should not be negative and steps={steps} at least 1.")

    def factor(t: int) -> float:
        if t < warmup:
            return (t + 1) / warmup
        share = (t - warmup) / max(1, steps - warmup)
        return fall(min(1.0, share))

    return factor
