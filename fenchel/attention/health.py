"""The health of attention in four numbers, cheap enough for every line of a training log.

    max_logit    largest |beta z| over the keys a query may see, after any soft-cap: growth without
                 end is the first sign of a run that will diverge
    entropy      mean over rows of H(p) = -sum_j p_j log p_j, in nats: 0 is one key, log S all keys
    effective    mean over rows of exp H(p): how many keys a row uses, as if evenly
    support      mean over rows of the number of keys with p_j > 0: S for softmax (until a weight
                 underflows), the true support for sparse maps

Each is averaged over batch, heads and queries. A row that no key is open to has no weights and is
left out. Nothing here is differentiable.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from fenchel.attention.prior import Prior
from fenchel.attention.reference import cap, log_prior, score
from fenchel.attention.shapes import check, four
from fenchel.choice import Choice, Hard, Softmax

_SOFTMAX = Softmax()


class Health(NamedTuple):
    """One number each; all are 0 when no row has an open key."""

    max_logit: float
    entropy: float
    effective: float
    support: float


@torch.no_grad()
def health(
    q: Tensor,
    k: Tensor,
    *,
    choice: Choice = _SOFTMAX,
    prior: Prior | None = None,
    scale: float | None = None,
    softcap: float | None = None,
) -> Health:
    """How q (B, H, T, D) attends to k (B, G, S, D), in O(T S) memory: give it a small sample."""
    check(q, k, k, softcap=softcap)
    q, k = four(q), four(k)
    z = cap(score(q, k, q.shape[-1] ** -0.5 if scale is None else scale), softcap)
    log_u = log_prior(prior, z)
    p = choice.weights(z, log_u)
    beta = 1.0 if isinstance(choice, Hard) else choice.beta
    logits = (z * beta).abs()
    if log_u is not None:
        logits = torch.where(log_u > -torch.inf, logits, 0.0)
    entropy = torch.special.entr(p).sum(-1)
    support = (p > 0).sum(-1)
    open_ = support > 0
    rows = open_.sum().clamp(min=1)
    means = [(x * open_).sum() / rows for x in (entropy, entropy.exp(), support)]
    top = logits.amax() if logits.numel() else logits.new_zeros(())
    return Health(*torch.stack([top, *means]).tolist())
