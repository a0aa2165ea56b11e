"""Logits to the next token.

    p = softmax(z / temperature), kept to the ``top_k`` largest, then to the fewest largest
    whose sum reaches ``top_p``, then to those of at least ``min_p`` times the largest;
    renormalised; one token drawn. Temperature 0 takes the largest logit.

Shapes: logits (B, V) -> ids (B,).
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How the next token is chosen from the logits."""

    temperature: float = 1.0
    """0 is greedy; below 1 is sharper, above 1 flatter."""
    top_k: int | None = None
    """Keep this many of the likeliest tokens."""
    top_p: float | None = None
    """Keep the fewest tokens whose probabilities reach this sum."""
    min_p: float | None = None
    """Keep tokens at least this likely, relative to the likeliest."""

    def __post_init__(self) -> None:
        if not 0.0 <= self.temperature < float("inf"):
            raise ValueError(f"temperature={self.temperature} should be 0 (greedy) or above.")
        if self.top_k is not None and self.top_k < 1:
            raise ValueError(f"top_k={self.top_k} should be at least 1, or left out.")
        for name in ("top_p", "min_p"):
            value = getattr(self, name)
            if value is not None and not 0.0 < value <= 1.0:
                raise ValueError(f"{name}={value} should be in (0, 1], or left out.")


def sample(
    logits_BV: Tensor, sampling: Sampling, *, generator: torch.Generator | None = None
) -> Tensor:
    """The next token of each row: (B, V) -> (B,)."""
    if sampling.temperature == 0.0:
        return logits_BV.argmax(-1)
    p_BV = kept(torch.softmax(logits_BV.float() / sampling.temperature, -1), sampling)
    return torch.multinomial(p_BV, 1, generator=generator).squeeze(-1)


def kept(p_BV: Tensor, sampling: Sampling) -> Tensor:
    """The probabilities with what the settings cut away at 0, summing to 1: (B, V) -> (B, V)."""
    if sampling.top_k is None and sampling.top_p is None and sampling.min_p is None:
        return p_BV
    ordered, order = p_BV.sort(-1, descending=True)
    keep = torch.ones_like(ordered, dtype=torch.bool)
    if sampling.top_k is not None:
        keep[:, sampling.top_k :] = False
    if sampling.top_p is not None:
        before = (ordered * keep).cumsum(-1) - ordered  # what the likelier ones already reach
        total = (ordered * keep).sum(-1, keepdim=True)
        keep &= before < sampling.top_p * total
    if sampling.min_p is not None:
        keep &= ordered >= sampling.min_p * ordered[:, :1]
    keep[:, 0] = True
    cut = torch.zeros_like(p_BV).scatter(-1, order, ordered * keep)
    return cut / cut.sum(-1, keepdim=True)
