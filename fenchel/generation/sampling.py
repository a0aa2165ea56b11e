"""Logits to the next token.

    z = the logits, lowered at tokens that the sequence already has by the repetition penalty r:
        z / r where z > 0, z r where z < 0
    p = softmax(z / temperature), restricted to the ``top_k`` largest, then to the fewest largest
        whose sum reaches ``top_p``, then to those of at least ``min_p`` times the largest;
        renormalised; one token is drawn from it. Temperature 0 takes the largest z. Of equally
        likely tokens those with smaller ids are preferred.

Shapes: logits (B, V) -> ids (B,).
"""

from dataclasses import dataclass

import torch
from torch import Tensor

NOT_FINITE = (
    "the largest logit of a row is not finite, so no token can be drawn; "
    "the model's weights are damaged or it has diverged."
)
_MIN_TEMPERATURE = 1e-30
"""Smaller temperatures would be 0 in float32."""


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How the next token is drawn from the logits."""

    temperature: float = 1.0
    """0 is greedy; below 1 is sharper, above 1 flatter."""
    top_k: int | None = None
    """Keep this many of the likeliest tokens."""
    top_p: float | None = None
    """Keep the fewest tokens whose probabilities reach this sum."""
    min_p: float | None = None
    """Keep tokens at least this likely, relative to the likeliest."""
    repetition_penalty: float = 1.0
    """Above 1 makes tokens that the sequence already has less likely; 1 is no penalty."""

    def __post_init__(self) -> None:
        if not 0.0 <= self.temperature < float("inf"):
            raise ValueError(f"temperature={self.temperature} should be 0 (greedy) or above.")
        if self.top_k is not None and self.top_k < 1:
            raise ValueError(f"top_k={self.top_k} should be at least 1, or left out.")
        for name in ("top_p", "min_p"):
            value = getattr(self, name)
            if value is not None and not 0.0 < value <= 1.0:
                raise ValueError(f"{name}={value} should be in (0, 1], or left out.")
        if not 0.0 < self.repetition_penalty < float("inf"):
            raise ValueError(
                f"repetition_penalty={self.repetition_penalty} should be a finite number "
                "above 0; 1 is no penalty."
            )


def sample(
    logits_BV: Tensor,
    sampling: Sampling,
    *,
    previous_BV: Tensor | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """The next token of each row: (B, V) -> (B,).

    ``previous_BV`` is True at the tokens a row already has, for the repetition penalty.

    >>> sample(torch.tensor([[0.0, 3.0, 1.0]]), Sampling(temperature=0.0)).tolist()
    [1]
    """
    token_B = sample_or_mark(logits_BV, sampling, previous_BV=previous_BV, generator=generator)
    if bool((token_B < 0).any()):
        raise ValueError(NOT_FINITE)
    return token_B


def sample_or_mark(
    logits_BV: Tensor,
    sampling: Sampling,
    *,
    previous_BV: Tensor | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """``sample`` without a transfer to the host: -1 where the largest logit is not finite."""
    if previous_BV is not None:
        logits_BV = apply_repetition_penalty(logits_BV, previous_BV, sampling.repetition_penalty)
    top_B1, token_B1 = logits_BV.max(-1, keepdim=True)
    token_B = token_B1.squeeze(-1)
    if sampling.temperature != 0.0:
        # With the largest at 0 no division overflows, however small the temperature.
        z_BV = (logits_BV.float() - top_B1.float()) / max(sampling.temperature, _MIN_TEMPERATURE)
        token_B = draw(filter_probabilities(torch.softmax(z_BV, -1), sampling), generator)
    return torch.where(top_B1.squeeze(-1).isfinite(), token_B, -1)


def draw(p_BV: Tensor, generator: torch.Generator | None) -> Tensor:
    """One token per row, drawn from its distribution: (B, V) -> (B,).

    With independent exponential variables e_v the smallest of e_v / p_v belongs to v with
    probability p_v. torch.multinomial draws the same tokens, and waits for the device to check p.
    """
    e_BV = torch.empty_like(p_BV).exponential_(1.0, generator=generator)
    return p_BV.div(e_BV).argmax(-1)


def apply_repetition_penalty(logits_BV: Tensor, previous_BV: Tensor, penalty: float) -> Tensor:
    """Logits, lowered at previous tokens when ``penalty`` is above 1.

    Keskar et al. (2019), CTRL.
    """
    smaller = torch.where(logits_BV > 0, logits_BV / penalty, logits_BV * penalty)
    return torch.where(previous_BV, smaller, logits_BV)


def filter_probabilities(p_BV: Tensor, sampling: Sampling) -> Tensor:
    """Probabilities after top-k, top-p and min-p, renormalised: (B, V) -> (B, V)."""
    if sampling.top_k is None and sampling.top_p is None and sampling.min_p is None:
        return p_BV
    ordered, order = p_BV.sort(dim=-1, descending=True, stable=True)  # of equals, the first ids
    keep = torch.ones_like(ordered, dtype=torch.bool)
    if sampling.top_k is not None:
        keep[:, sampling.top_k :] = False
    if sampling.top_p is not None and sampling.top_p < 1.0:
        # float32 would lose the tail of a large vocabulary, which decides.
        reached = (ordered * keep).cumsum(-1, dtype=torch.float64)
        keep[:, 1:] &= reached[:, :-1] < sampling.top_p * reached[:, -1:]
    if sampling.min_p is not None:
        keep &= ordered >= sampling.min_p * ordered[:, :1]
    cut = torch.zeros_like(p_BV).scatter(-1, order, ordered * keep)
    return cut / cut.sum(-1, keepdim=True)
