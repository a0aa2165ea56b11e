"""The health of attention in a few numbers, cheap enough for every line of a training log.

    max_logit    largest |beta z| over the keys a query may see, after any soft-cap: growth without
                 end is the first sign of a run that will diverge
    entropy      mean over rows of H(p) = -sum_j p_j log p_j, in nats: 0 is one key, log S all keys
    effective    mean over rows of exp H(p): how many keys a row uses, as if evenly
    support      mean over rows of the number of keys with p_j > 0: S for softmax (until a weight
                 underflows), the true support for sparse maps

``health`` averages each over batch, heads and queries; ``health_per_head`` also gives, from the
same scores and weights, the largest logit and the mean entropy of every head by itself, and

    rms          root mean square of beta z over the pairs a head may see

A row that no key is open to has no weights and is left out. Nothing here is differentiable.

The head_patterns of heads: how evenly each one looks, how far back, and how alike two of them are.

From the weights p (B, H, T, S) of a layer, query t standing at position i = t + S - T,

    entropy_h       mean over rows of H(p) = -sum_j p_j log p_j, in nats: evenly or at one key
    distance_h      mean over rows of sum_j p_j |i - j|: near (syntax) or far (long range)
    first_h         mean weight on key 0: a head that has nothing to say rests there
    previous_h      mean weight on key i - 1: a head that looks at position alone
    similarity_hg   1 - JS(p_h, p_g) / log 2, mean over rows: 1 for the same weights, 0 for others

JS is the Jensen-Shannon divergence, H((p + q) / 2) - (H(p) + H(q)) / 2. Rows without weights (no
key was open to them) are left out. Nothing here is differentiable.

The weights of chosen queries and heads, beside a back end that keeps none.

A fused or blocked back end never holds the (B, H, T, S) weights. To look at some of them, name the
rows and the heads: they are computed alone, a block of rows at a time, and nothing else is.

Attention step by step, every intermediate kept: for lessons, and for a look inside.

    compatibility   q k^T                              how well each key fits each query
    scores          scale * compatibility, softly capped where asked
    log_prior       log u, 0 where there is no prior
    weights         choice.weights(scores, log_prior)
    outputs         weights v

Each but the last is (B, H, T, S), so this is for small inputs.

Is the scale of attention the one that was meant?

For queries and keys whose D entries are independent, with means m and variances s^2, one score q.k
has the variance D (s_q^2 s_k^2 + s_q^2 m_k^2 + s_k^2 m_q^2): it grows with D, and 1/sqrt(D) takes
that growth away. Two slips are common and raise no error,

    scale = 1                  the factor is missing: scores spread sqrt(D) too far
    scale = 1/sqrt(d_model)    the stream's width, H D, in place of a head's: sqrt(H) too little

and two are rarer: 1/D, and sqrt(D) multiplied where it should divide. Each is known by its number.
What it does is read off the weights: too large a scale leaves one key almost all the weight, too
small a one leaves all keys about the same. (Vanishing gradients come later, at widths of some
hundreds; weights show it first.)

A scale of 1 is no slip where the scores stay small by themselves, as with normalised queries and
keys or in T5, whose weights start smaller: it is told only if the scores spread beyond ``WIDE``.
"""

import math
from base64 import b64encode
from collections.abc import Sequence
from dataclasses import fields, replace
from typing import NamedTuple

import torch
from torch import Tensor
from torch.special import entr

from fenchel.attention.prior import Prior, ScoreIndex
from fenchel.attention.reference import cap, log_prior, mix, score
from fenchel.attention.reference import log_prior as log_of
from fenchel.attention.shapes import broadcast_batch, check, four_axes, output_axes
from fenchel.choice import Choice, Softmax

_SOFTMAX = Softmax()


class Health(NamedTuple):
    """One number each; all are 0 when no row has an open key."""

    max_logit: float
    entropy: float
    effective: float
    support: float


class HeadHealth(NamedTuple):
    """One number a head each, (H,) as lists."""

    max_logit: list[float]
    rms: list[float]
    entropy: list[float]


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
    return health_per_head(q, k, choice=choice, prior=prior, scale=scale, softcap=softcap)[0]


@torch.no_grad()
def health_per_head(
    q: Tensor,
    k: Tensor,
    *,
    choice: Choice = _SOFTMAX,
    prior: Prior | None = None,
    scale: float | None = None,
    softcap: float | None = None,
) -> tuple[Health, HeadHealth]:
    """``health``, and the same by head."""
    check(q, k, k, softcap=softcap)
    q, k = four_axes(q), four_axes(k)
    z = cap(score(q, k, q.shape[-1] ** -0.5 if scale is None else scale), softcap)
    log_u = log_prior(prior, z)
    p = choice.weights(z, log_u)
    logits = (z * choice.score_scale).abs()
    if log_u is not None:
        logits = torch.where(log_u > -torch.inf, logits, 0.0)
    entropy = torch.special.entr(p).sum(-1)
    support = (p > 0).sum(-1)
    open_ = support > 0
    rows = open_.sum().clamp(min=1)
    means = [(x * open_).sum() / rows for x in (entropy, entropy.exp(), support)]
    top_H = logits.amax((0, 2, 3)) if logits.numel() else logits.new_zeros(q.shape[1])
    seen = torch.ones_like(z) if log_u is None else (log_u > -torch.inf).expand_as(z)
    rms_H = (logits.square().sum((0, 2, 3)) / seen.sum((0, 2, 3)).clamp(min=1)).sqrt()
    entropy_H = (entropy * open_).sum((0, 2)) / open_.sum((0, 2)).clamp(min=1)
    top = top_H.amax() if len(top_H) else top_H.new_zeros(())
    heads = torch.stack([top_H, rms_H, entropy_H]).tolist()
    return Health(*torch.stack([top, *means]).tolist()), HeadHealth(*heads)


class HeadPatterns(NamedTuple):
    """One number a head, (H,), and one a pair of heads, (H, H)."""

    entropy: Tensor
    distance: Tensor
    first: Tensor
    previous: Tensor
    similarity: Tensor


@torch.no_grad()
def head_patterns(p: Tensor) -> HeadPatterns:
    """What the heads of a layer do with their weights p (B, H, T, S)."""
    if p.dim() != 4 or 0 in p.shape:
        raise ValueError(f"weights should be (B, H, T, S) and not empty, got {tuple(p.shape)}.")
    p = p.to(torch.promote_types(p.dtype, torch.float32))
    T, S = p.shape[2:]
    i = torch.arange(T, device=p.device).unsqueeze(-1) + (S - T)
    j = torch.arange(S, device=p.device)
    open_ = p.sum(-1) > 0
    rows = open_.sum((0, 2)).clamp(min=1)

    def mean(x_BHT: Tensor) -> Tensor:
        return x_BHT.sum((0, 2)) / rows

    entropy_BHT = entr(p).sum(-1)
    return HeadPatterns(
        entropy=mean(entropy_BHT),
        distance=mean((p * (i - j).abs()).sum(-1)),
        first=mean(p[..., 0]),
        previous=mean((p * (j == i - 1)).sum(-1)),
        similarity=_similarity(p, entropy_BHT, open_),
    )


def _similarity(p: Tensor, entropy_BHT: Tensor, open_: Tensor) -> Tensor:
    """Head by head against all, so that no more than the weights themselves is held at once."""
    lines = []
    for h in range(p.shape[1]):
        both = open_ & open_[:, h : h + 1]
        mixed = entr((p + p[:, h : h + 1]) / 2).sum(-1)
        apart = (mixed - (entropy_BHT + entropy_BHT[:, h : h + 1]) / 2) * both
        lines.append(1.0 - apart.sum((0, 2)) / both.sum((0, 2)).clamp(min=1) / math.log(2))
    return torch.stack(lines)


_BLOCK = 1 << 22  # scores at a time


def attention_weights(
    q: Tensor,
    k: Tensor,
    *,
    rows: Sequence[int] | Tensor | None = None,
    heads: Sequence[int] | Tensor | None = None,
    choice: Choice = _SOFTMAX,
    prior: Prior | None = None,
    scale: float | None = None,
    softcap: float | None = None,
) -> Tensor:
    """p for queries ``rows`` of heads ``heads`` (None for all; negative counts from the end).

    q (B, H, T, D), k (B, G, S, D) -> (B, len(heads), len(rows), S)
    """
    check(q, k, k, softcap=softcap)
    q, k = four_axes(q), four_axes(k)
    (B, H, T, D), (_, G, S, _) = q.shape, k.shape
    if prior is not None:
        prior.check(B, H, T, S)
    t, h = _chosen(rows, T, "row", q.device), _chosen(heads, H, "head", q.device)
    wide = torch.promote_types(q.dtype, torch.float32)
    queries = q[:, h][:, :, t].to(wide) * (D**-0.5 if scale is None else scale)
    keys = k[:, h // (H // G)].to(wide).mT
    height = max(1, _BLOCK // max(1, B * len(h) * S))
    blocks = [queries.new_empty(B, len(h), 0, S)]
    for some, part in zip(torch.split(queries, height, 2), torch.split(t, height), strict=True):
        z = cap(some @ keys, softcap)
        at = _place(B, h, part + (S - T), S)
        blocks.append(
            _of(choice, h, part).weights(z, None if prior is None else _log(prior, at, z))
        )
    return torch.cat(blocks, 2).to(q.dtype)


def _chosen(
    which: Sequence[int] | Tensor | None, size: int, name: str, device: torch.device
) -> Tensor:
    if which is None:
        return torch.arange(size, device=device)
    index = torch.as_tensor(which, dtype=torch.int64, device=device).view(-1)
    wrong = index[(index < -size) | (index >= size)]
    if len(wrong):
        raise ValueError(f"there is no {name} {int(wrong[0])} among {size}.")
    return index % max(size, 1)


def _place(B: int, h: Tensor, i: Tensor, S: int) -> ScoreIndex:
    b, j = torch.arange(B, device=h.device), torch.arange(S, device=h.device)
    return ScoreIndex(
        b.view(-1, 1, 1, 1), h.view(1, -1, 1, 1), i.view(1, 1, -1, 1), j.view(1, 1, 1, -1), S
    )


def _log(prior: Prior, at: ScoreIndex, z: Tensor) -> Tensor:
    open_, bias = prior.admits(at), prior.bias(at)
    log_u = z.new_zeros(()) if bias is None else bias.to(z.dtype)
    return log_u if open_ is None else torch.where(open_, log_u, -torch.inf)


def _of(choice: Choice, h: Tensor, t: Tensor) -> Choice:
    """The map with those entries of its tensors that belong to heads h and rows t."""
    cut = {}
    for field in fields(choice):  # type: ignore[arg-type]
        x = getattr(choice, field.name)
        if isinstance(x, Tensor) and x.dim() > 0:
            x = x[(None,) * (4 - x.dim())]
            x = x if x.shape[1] == 1 else x[:, h]
            cut[field.name] = x if x.shape[2] == 1 else x[:, :, t]
    return replace(choice, **cut) if cut else choice  # type: ignore[type-var]


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
    axes = output_axes(q, k)
    q, k, v = broadcast_batch(q, k, v)
    compatibility = score(q, k, 1.0)
    z = cap(compatibility * (q.shape[-1] ** -0.5 if scale is None else scale), softcap)
    found = log_of(prior, z)
    log_u = torch.zeros_like(z) if found is None else found.expand_as(z)
    p = choice.weights(z, found)
    steps = (compatibility, z, log_u, p, mix(p, v))
    return Trace(*(x.reshape(*axes, *x.shape[-2:]) for x in steps))


WIDE = 2.0
"""Scores that spread less are no trouble; normal queries and keys spread by 1."""


@torch.no_grad()
def scale_warning(
    q: Tensor,
    k: Tensor,
    *,
    scale: float,
    width: int | None = None,
    prior: Prior | None = None,
) -> str | None:
    """One sentence if ``scale`` looks like a slip on q (B, H, T, D) and k (B, G, S, D), else None.

    ``width`` is d_model, H D unless given. O(T S) memory: a small sample says as much.
    """
    check(q, k, k)
    q, k = four_axes(q), four_axes(k)
    H, D = q.shape[1], q.shape[3]
    width = H * D if width is None else width
    if not math.isfinite(scale) or scale == 0.0:
        return (
            f"scale={scale} makes every score the same or none; with heads of {D} use {_right(D)}."
        )
    slip = _slip(scale, D, width)
    if slip is None:
        return None
    spread, best = _seen(q, k, scale, prior)
    meant, best_meant = _seen(q, k, D**-0.5, prior)
    if scale == 1.0 and spread <= WIDE:
        return None
    return (
        f"scale={scale:.4g} {slip}; with heads of {D} use {_right(D)}: the scores spread by "
        f"{spread:.2g} where {meant:.2g} was meant, and a query gives its best key {best:.2g} of "
        f"its weight instead of {best_meant:.2g}."
    )


def _slip(scale: float, D: int, width: int) -> str | None:
    """Which slip the number is, if it is one."""
    if math.isclose(scale, D**-0.5, rel_tol=1e-3):
        return None
    slips = {
        1.0: "looks as if 1/sqrt(D) were missing",
        width**-0.5: f"is 1/sqrt(d_model) for d_model {width}",
        1.0 / D: "is 1/D, the root is missing",
        D**0.5: "is sqrt(D), which should divide",
    }
    found = (told for number, told in slips.items() if math.isclose(scale, number, rel_tol=1e-3))
    return next(found, None)


def _seen(q: Tensor, k: Tensor, scale: float, prior: Prior | None) -> tuple[float, float]:
    """Standard deviation of the scores that count, and the mean of each row's largest weight."""
    z = score(q, k, scale)
    log_u = log_prior(prior, z)
    p = Softmax().weights(z, log_u)
    open_ = z if log_u is None else z[(log_u > -torch.inf).expand_as(z)]
    return float(open_.std(correction=0)), float(p.amax(-1).mean())


def _right(D: int) -> str:
    return f"1/sqrt({D}) = {D**-0.5:.4g}"


def pack_weights(p: Tensor) -> str:
    """Weights of any shape as base64 text: bytes round(255 sqrt p), row-major, for a page.

    Eight bits on a square-root scale keep small weights visible: p is recovered as (byte / 255)^2
    to within sqrt(p) / 255.

    >>> pack_weights(torch.tensor([0.0, 0.25, 1.0]))
    'AID/'
    """
    data = (p.clamp(0, 1).sqrt() * 255).round().to(torch.uint8).cpu().numpy().tobytes()
    return b64encode(data).decode()
