"""What a step did to the scores of each head, on the step's own sample.

RMS and largest absolute value run over the sampled open pairs; the scores are those the softmax
sees, scale included. The entropy is that of the softmax of a row, in nats, averaged over the
sampled queries. Where no pairs were looked at (closed-form sizes) the maxima and the entropy are
nan.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from fenchel.optim.score.line import Line


class HeadStats(NamedTuple):
    """One number a head, (H,) each; stacked over layers inside the optimiser."""

    rms_change: Tensor
    max_change: Tensor
    rms_score: Tensor
    max_score: Tensor
    entropy: Tensor
    capped: Tensor
    """True where the ball scaled the head back or the step was cut to its limit."""


def measured(line: Line, S: Tensor, capped: Tensor) -> HeadStats:
    """Of scores S (L, n, H, m, T) after a step."""
    assert line.start is not None
    dS = S - line.start
    log_p = S.masked_fill(~line.at.open, -torch.inf).log_softmax(-1)
    entropy = -(log_p.exp() * log_p.masked_fill(~line.at.open, 0.0)).sum(-1)
    some = line.at.open.any(-1)
    entropy = entropy.masked_fill(~some, 0.0).sum(dim=(1, 3)) / some.sum(dim=(1, 3)).clamp(min=1)
    return HeadStats(
        line.rms(dS),
        dS.abs().amax(dim=(1, 3, 4)),
        line.rms(S),
        S.abs().amax(dim=(1, 3, 4)),
        entropy,
        capped,
    )


def estimated(change: Tensor, score: Tensor, capped: Tensor) -> HeadStats:
    """Without pairs: only the root mean squares are known."""
    unknown = torch.full_like(change, torch.nan)
    return HeadStats(change, unknown, score, unknown, unknown, capped)
