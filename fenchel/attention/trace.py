"""Attention step by step, every intermediate kept: for lessons, and for a look inside.

    compatibility   q k^T                              how well each key fits each query
    scores          scale * compatibility, softly capped where asked
    log_prior       log u, 0 where there is no prior
    weights         choice.weights(scores, log_prior)
    outputs         weights v

Each but the last is (B, H, T, S), so this is for small inputs.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from fenchel.attention.prior import Prior
from fenchel.attention.reference import cap, mix, score
from fenchel.attention.reference import log_prior as log_of
from fenchel.attention.shapes import check, leading, together
from fenchel.choice import Choice, Softmax

_SOFTMAX = Softmax()


class Trace(NamedTuple):
    """The five steps, in order."""

    compatibility: Tensor
    scores: Tensor
    log_prior: Tensor
    weights: Tensor
    outputs: Tensor


def trace(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    choice: Choice = _SOFTMAX,
    prior: Prior | None = None,
    scale: float | None = None,
    softcap: float | None = None,
) -> Trace:
    """All steps of ``attend`` with the same arguments; the last is what it returns."""
    check(q, k, v, softcap=softcap)
    axes = leading(q, k)
    q, k, v = together(q, k, v)
    compatibility = score(q, k, 1.0)
    z = cap(compatibility * (q.shape[-1] ** -0.5 if scale is None else scale), softcap)
    found = log_of(prior, z)
    log_u = torch.zeros_like(z) if found is None else found.expand_as(z)
    p = choice.weights(z, found)
    steps = (compatibility, z, log_u, p, mix(p, v))
    return Trace(*(x.reshape(*axes, *x.shape[-2:]) for x in steps))
