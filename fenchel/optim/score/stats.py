"""What a step did to the scores of each head, on the step's own sample.

RMS and largest absolute value run over the sampled open pairs; the scores are those the softmax
sees, scale included. The entropy is that of the softmax of a row, in nats, averaged over the
sampled queries. Where no pairs were looked at (closed-form sizes) the maxima and the entropy are
nan.

A step keeps only what these need, and they are computed when they are asked for: the root mean
squares from what was measured for the step, in a run of several processes over all of them; the
rest on the process's own sample, from the queries and keys before the step and the weights after.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from fenchel.optim.score.line import Factors, Heads, Line


class HeadStats(NamedTuple):
    """One number a head, (H,) each; stacked over layers inside the optimiser."""

    rms_change: Tensor
    max_change: Tensor
    rms_score: Tensor
    max_score: Tensor
    entropy: Tensor
    capped: Tensor
    """True where the ball scaled the head back or the step was cut to its limit."""


class Moved(NamedTuple):
    """A move of the weights of a stack along a line."""

    line: Line
    t: Factors
    shrink: Factors | None
    """None where nothing shrank, as ``back`` where there is no ball."""
    back: Factors | None
    scaled: Tensor | None
    """The factor of the ball on the scores, (L, H)."""
    measured: tuple[Tensor, Tensor] | None
    """(RMS change, RMS score), (L, H) each, where there are no parts to tell them."""
    cuts: bool
    """Whether t < 1 is a cut of a step."""

    def stats(self, W: Heads) -> HeadStats:
        """Stacked over layers; W are the weights after the move."""
        capped = self.t.Q.lt(1.0 if self.cuts else 0.0)
        if self.scaled is not None:
            capped = capped | (self.scaled < 1.0)
        change, score = self.measured or self.line.move(
            _times(self.t, self.back),
            self.back if self.shrink is None else _times(self.shrink, self.back),
        )
        if self.line.closed:
            score = score if self.scaled is None else score * self.scaled
            unknown = torch.full_like(change, torch.nan)
            return HeadStats(change, unknown, score, unknown, unknown, capped)
        after = Line(self.line.pairs, self.line.at, W)
        S, dS = after.start, after.start - self.line.start
        return HeadStats(change, _largest(dS), score, _largest(S), _entropy(after), capped)


def _times(x: Factors, back: Factors | None) -> Factors:
    return x if back is None else Factors(x.Q * back.Q, x.K * back.K)


def _largest(S: Tensor) -> Tensor:
    return S.abs().amax(dim=(1, 3, 4))


def _entropy(line: Line) -> Tensor:
    open_ = line.at.grid.open
    log_p = line.start.masked_fill(~open_, -torch.inf).log_softmax(-1)
    entropy = -(log_p.exp() * log_p.masked_fill(~open_, 0.0)).sum(-1)
    some = open_.any(-1).expand(entropy.shape[0], entropy.shape[1], 1, -1)
    return entropy.masked_fill(~some, 0.0).sum(dim=(1, 3)) / some.sum(dim=(1, 3)).clamp(min=1)
