"""Top-k attention as a prior that forbids, with a bound on the mass that it drops.

Every query keeps the ``keep`` admissible keys of the largest scores and forbids the others:

    p = argmax over p in the simplex, p_j = 0 off the kept keys,  of <p, x> - Omega(p),

the choice over the simplex of at most ``keep`` non-zero weights, which is where the best ``keep``
scores win. (That set is not convex, and the map is still the gradient of a convex function: the
largest of the values over all sets of ``keep`` keys.)

What is lost. Let p be the weights on the kept keys and p' those of the whole problem. Weights rise
with their own score and fall when a key is added, so a dropped key has p'_j <= p'_min <= p_min with
p_min the least kept weight, and the n - keep dropped ones have together at most

    x = (n - keep) p_min,         for softmax x / (1 + x), since Z' <= Z + x Z,

a bound from the kept keys alone. It is 0 where a sparse map gives the least kept key no weight:
then top-k is exact. A selection by other scores (an indexer) has the same bound as long as no
dropped key scores above the least kept one.

Shapes: q (B, H, T, D), k (B, G, S, D); the mask (B, H, T, S), the bound (B, H, T).

Gupta et al. (2021), Memory-efficient transformers via top-k attention.
"""

from typing import NamedTuple, Unpack

import torch
from torch import Tensor

from fenchel.attention.prior import Dense, Prior
from fenchel.attention.reference import logits
from fenchel.attention.shapes import broadcast_batch, check
from fenchel.attention.spec import AttentionKeywords, AttentionSpec
from fenchel.choice import Softmax

_ROUNDING = 1e-9  # of weights in float64, far above theirs


class TopK(NamedTuple):
    """The kept keys as a prior, and how much of the weights the others could have had."""

    prior: Prior
    """The given prior with all but the kept keys forbidden."""
    dropped: Tensor
    """An upper bound of the weight of the forbidden keys in the whole problem: (B, H, T)."""


def top_k(q: Tensor, k: Tensor, keep: int, **keywords: Unpack[AttentionKeywords]) -> TopK:
    """The ``keep`` best keys of every query as a prior: arguments as in ``attend``.

    >>> q, k = torch.ones(1, 1, 1, 1), torch.tensor([3.0, 1.0, 2.0]).view(1, 1, 3, 1)
    >>> best = top_k(q, k, 2, scale=1.0)
    >>> best.prior.log(1, 3)
    tensor([[[[0., -inf, 0.]]]])
    >>> best.dropped  # at most; it is 0.0900
    tensor([[[0.2119]]])
    """
    if keep < 1:
        raise ValueError(f"top-k keeps at least one key, got keep={keep}.")
    spec = AttentionSpec(**keywords)
    check(q, k, k, softcap=spec.softcap)
    q, k, _ = broadcast_batch(q, k, k)
    if spec.prior is not None:
        spec.prior.check(q.shape[0], q.shape[1], q.shape[2], k.shape[2])
    with torch.no_grad():
        z, log_u = logits(q.double(), k.double(), spec)  # the bound holds after rounding
        x, _ = spec.choice.scores(z, log_u, -1)
        open_ = x > -torch.inf
        best = x.topk(min(keep, x.shape[-1]), -1).indices
        kept = torch.zeros_like(open_).scatter_(-1, best, True) & open_
        log_kept = torch.where(kept, 0.0 if log_u is None else log_u, -torch.inf)
        p = spec.choice.weights(z, log_kept)
        least = torch.where(kept, p, 1.0).amin(-1)
        bound = (open_ & ~kept).sum(-1) * least * (1.0 + _ROUNDING)
        most = 1.0 if spec.choice.feasible == "simplex" else torch.inf
        softmax = isinstance(spec.choice, Softmax)
        bound = bound / (1.0 + bound) if softmax else bound.clamp(max=most)
        upper = torch.nextafter(bound.to(q.dtype), torch.full((), most, dtype=q.dtype))
    prior = Dense(kept) if spec.prior is None else spec.prior + Dense(kept)
    return TopK(prior, torch.where(bound > 0, upper, 0.0))
