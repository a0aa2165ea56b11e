"""What label smoothing asks of a model, in closed form.

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
from typing import NamedTuple

import torch
from torch import Tensor


class Smoothing(NamedTuple):
    """The best a model can do under label smoothing."""

    confidence: float
    """q_y, the probability it should give the truth."""
    other: float
    """q of every other class."""
    gap: float
    """How far the truth's logit should stand above the others."""
    minimum: float
    """The loss there, in nats."""


def smoothing(V: int, a: float) -> Smoothing:
    """The optimum of cross-entropy over V classes smoothed by a.

    >>> best = smoothing(10, 0.1)
    >>> f"{best.confidence:.2f} {best.gap:.3f} {best.minimum:.4f}"
    '0.91 4.511 0.5003'
    """
    _check(V, a)
    truth, other = 1.0 - a + a / V, a / V
    if a == 0.0 or V == 1:
        return Smoothing(1.0, 0.0, math.inf, 0.0)
    minimum = -truth * math.log(truth) - (V - 1) * other * math.log(other)
    return Smoothing(truth, other, math.log(truth / other), minimum)


def smoothed(targets_N: Tensor, V: int, a: float) -> Tensor:
    """q for every target: (N,) -> (N, V) in float32."""
    _check(V, a)
    q = torch.full((len(targets_N), V), a / V, device=targets_N.device)
    return q.scatter(-1, targets_N[:, None], 1.0 - a + a / V)


def _check(V: int, a: float) -> None:
    if V < 1 or not 0.0 <= a <= 1.0:
        raise ValueError(
            f"label smoothing needs at least 1 class and a in [0, 1], got V={V}, a={a}."
        )
