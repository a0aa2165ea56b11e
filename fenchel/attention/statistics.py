"""What attention does, in numbers: health, patterns of heads, chosen weights, all steps, the scale.

**Entropy.** H(p) = -sum_j p_j log p_j in nats: 0 for one key, log S for all keys evenly.
``entropy(p)`` gives it per row, and ``head_entropy(q, k, **spec)`` its mean per head, tile by tile.
Derivative, with J that of the weights (symmetric, and J 1 = 0, which removes the -1):

    dH/dz = J (-log p)          dH/dq = scale dH/dz k          dH/dk = scale dH/dz^T q

with the factor 1 - (z / c)^2 in between when scores are softly capped, z = c tanh(s / c). All rows
of a head weigh alike, so its gradient is known up to one factor per head as soon as p is: it is
computed with the value, and no (T, S) square is stored for the backward pass. Heads that share keys
keep their parts of dH/dk apart until their factors are known. The gradient cannot be differentiated
again.

**Health** is cheap enough for every line of a training log:

    max_logit    largest |beta z| over the keys open to a query, after any soft cap: growth without
                 end is the first sign of a run that will diverge
    entropy      mean over rows of H(p)
    effective    mean over rows of exp H(p): the number of keys a row uses, as if evenly
    support      mean over rows of the number of keys with p_j > 0: S for softmax (until a weight
                 underflows), the true support for sparse maps

``health`` averages each over batch, heads and queries; ``health_per_head`` also gives, from the
same scores and weights, the largest logit and the mean entropy per head, and

    rms          root mean square of beta z over the open pairs of a head

**Patterns of heads.** From the weights p (B, H, T, S) of a layer, query t at position
i = t + S - T,

    entropy_h       mean over rows of H(p)
    distance_h      mean over rows of sum_j p_j |i - j|: near (syntax) or far (long range)
    first_h         mean weight on key 0: where a head without anything to add puts its weight
    previous_h      mean weight on key i - 1: a head that goes by position alone
    similarity_hg   1 - JS(p_h, p_g) / log 2, mean over rows: 1 for equal weights, 0 for disjoint

JS is the Jensen-Shannon divergence, H((p + q) / 2) - (H(p) + H(q)) / 2.

**The scale.** For queries and keys whose D entries are independent, with means m and variances s^2,
one score q.k has the variance D (s_q^2 s_k^2 + s_q^2 m_k^2 + s_k^2 m_q^2): it grows with D, and
1/sqrt(D) removes that growth. Two mistakes are common and raise no error,

    scale = 1                  the factor is missing: scores spread sqrt(D) too far
    scale = 1/sqrt(d_model)    the width H D of the stream in place of D: sqrt(H) too little

and two are rarer: 1/D, and sqrt(D) multiplied where it should divide. What multiplies q.k is scale
times the beta of the map, so the factor may also be applied twice, once in each:

    scale = beta = 1/sqrt(D)               together 1/D
    scale = t/sqrt(D), beta = t            a temperature 1/t in both places

``scale_warning`` recognises each by its number and reads its effect off the weights: too large a
scale gives one key almost all the weight, too small a scale gives all keys about the same.
(Vanishing gradients come later, at widths of some hundreds.) A scale of 1 is no mistake where the
scores stay small by themselves, as with normalised queries and keys or in T5, whose weights start
smaller: it is reported only if the scores spread beyond ``WIDE``.

Over the box weights do not sum to 1: health takes the entropy of p over its sum.

A row that no key is open to has no weights and is left out of every mean. Only
``head_entropy``, ``attention_weights`` and ``trace`` are differentiable.
"""

import math
from base64 import b64encode
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple, Unpack

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.special import entr

from fenchel.attention.prior import PriorSelection
from fenchel.attention.reference import (
    cap,
    cap_slope,
    log_prior,
    logits,
    mix,
    mix_transposed,
    score,
)
from fenchel.attention.shapes import broadcast_batch, check, output_axes
from fenchel.attention.spec import AttentionKeywords, AttentionSpec, select
from fenchel.attention.tiles import join_rows, score_tiles, tiles
from fenchel.choice import Softmax
from fenchel.choice.base import require_simplex
from fenchel.torch_internals import to_float64


def entropy(p: Tensor) -> Tensor:
    """H(p) = -sum_j p_j log p_j in nats, 0 for a row without weights: (..., K) -> (...).

    >>> entropy(torch.tensor([[0.5, 0.5], [1.0, 0.0]]))
    tensor([0.6931, 0.0000])
    """
    per_row: Tensor = entr(p).sum(-1)
    return per_row


def head_entropy(q: Tensor, k: Tensor, **spec: Unpack[AttentionKeywords]) -> Tensor:
    """The mean entropy of the rows of every head: (B, H, T, D), (B, G, S, D) -> (H,).

    >>> q = k = torch.zeros(1, 2, 3, 4)
    >>> head_entropy(q, k).exp()  # equal scores: uniform over the three keys
    tensor([3.0000, 3.0000])
    """
    call = AttentionSpec(**spec)
    require_simplex(call.choice, "the entropy of a head")
    check(q, k, k, softcap=call.softcap)
    if q.dim() != 4:
        raise ValueError(f"head_entropy takes q with four axes, (B, H, T, D); got {q.dim()}.")
    q, k, _ = broadcast_batch(q, k, k)
    learns = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad)
    with torch.autocast(q.device.type, enabled=False):  # which would narrow the scores again
        entropy_H: Tensor = _HeadEntropy.apply(q, k, call, learns)  # type: ignore[no-untyped-call]
    return entropy_H


class _HeadEntropy(torch.autograd.Function):
    """The entropies, with their gradients computed in the forward pass."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, spec: AttentionSpec, learns: bool) -> Tensor:
        scale = spec.scale_for(q.shape[-1])
        wide = torch.promote_types(q.dtype, torch.float32)
        (B, H, T, D), S = q.shape, k.shape[2]
        total_H, rows_H = (q.new_zeros(H, dtype=wide) for _ in range(2))
        gq_BHTD = q.new_zeros((B, H, T, D) if learns else 0, dtype=wide)
        gk_BHSD = q.new_zeros((B, H, S, D) if learns else 0, dtype=wide)
        for scored in score_tiles(q, k, spec):
            tile, p = scored.tile, scored.weights()
            q_t, k_t = tile.queries(q), tile.items(k)
            on = p > 0
            log_p = torch.where(on, p, 1.0).log()
            total_H[tile.heads] -= (p * log_p).sum((0, 2, 3))
            rows_H[tile.heads] += on.any(-1).sum((0, 2))
            if learns:
                dz = scale * scored.choice.jacobian_product(p, -log_p)
                if (slope := cap_slope(scored.z, spec.softcap)) is not None:
                    dz *= slope
                tile.queries(gq_BHTD).copy_(mix(dz, k_t.to(wide)))
                mine = gk_BHSD[tile.batch, tile.heads, tile.keys]
                mine += mix_transposed(dz, q_t.to(wide), q_t.shape[1])
        ctx.save_for_backward(gq_BHTD, gk_BHSD, rows_H)
        ctx.dtype, ctx.groups = q.dtype, k.shape[1]
        return total_H / rows_H.clamp(min=1.0)

    @staticmethod
    def backward(ctx: Any, g_H: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():  # the gradients are constants here: a derivative would be lost
            raise RuntimeError("head_entropy has no second derivative.")
        gq_BHTD, gk_BHSD, rows_H = ctx.saved_tensors
        share_H11 = (g_H / rows_H.clamp(min=1.0))[:, None, None]
        gk_BGRSD = (gk_BHSD * share_H11).unflatten(1, (ctx.groups, -1))
        gq, gk = (x.to(ctx.dtype) for x in (gq_BHTD * share_H11, gk_BGRSD.sum(2)))
        return gq, gk, None, None


class Health(NamedTuple):
    """One number each; all are 0 when no row has an open key."""

    max_logit: float
    entropy: float
    effective: float
    support: float


class HeadHealth(NamedTuple):
    """One number per head each: lists of length H."""

    max_logit: list[float]
    rms: list[float]
    entropy: list[float]


@torch.no_grad()
def health(q: Tensor, k: Tensor, **spec: Unpack[AttentionKeywords]) -> Health:
    """How q (B, H, T, D) attends to k (B, G, S, D), in O(T S) memory: give it a small sample.

    >>> q = torch.zeros(1, 2, 4, 8)
    >>> health(q, q).support
    4.0
    """
    return health_per_head(q, k, **spec)[0]


@torch.no_grad()
def health_per_head(
    q: Tensor, k: Tensor, **spec: Unpack[AttentionKeywords]
) -> tuple[Health, HeadHealth]:
    """``health``, and the same per head."""
    call = AttentionSpec(**spec)
    check(q, k, k, softcap=call.softcap)
    q, k, _ = broadcast_batch(q, k, k)
    z, log_u = logits(q, k, call)
    p = call.choice.weights(z, log_u)
    size = (z * call.choice.score_scale).abs()
    if log_u is not None:
        size = torch.where(log_u > -torch.inf, size, 0.0)
    shares = p
    if call.choice.feasible == "box":
        total = p.sum(-1, keepdim=True)
        shares = p / torch.where(total > 0, total, 1.0)
    entropy_BHT = entropy(shares)
    support = (p > 0).sum(-1)
    open_ = support > 0
    rows = open_.sum().clamp(min=1)
    means = [(x * open_).sum() / rows for x in (entropy_BHT, entropy_BHT.exp(), support)]
    top_H = size.amax((0, 2, 3)) if size.numel() else size.new_zeros(q.shape[1])
    pairs = torch.ones_like(z) if log_u is None else (log_u > -torch.inf).expand_as(z)
    rms_H = (size.square().sum((0, 2, 3)) / pairs.sum((0, 2, 3)).clamp(min=1)).sqrt()
    entropy_H = (entropy_BHT * open_).sum((0, 2)) / open_.sum((0, 2)).clamp(min=1)
    top = top_H.amax() if len(top_H) else top_H.new_zeros(())
    heads = torch.stack([top_H, rms_H, entropy_H]).tolist()
    return Health(*torch.stack([top, *means]).tolist()), HeadHealth(*heads)


class HeadPatterns(NamedTuple):
    """One number per head, (H,), and one per pair of heads, (H, H)."""

    entropy: Tensor
    distance: Tensor
    first: Tensor
    previous: Tensor
    similarity: Tensor


@torch.no_grad()
def head_patterns(p: Tensor) -> HeadPatterns:
    """Where the heads of a layer put their weights p (B, H, T, S).

    >>> head_patterns(torch.eye(3).view(1, 1, 3, 3)).distance
    tensor([0.])
    """
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

    entropy_BHT = entropy(p)
    return HeadPatterns(
        entropy=mean(entropy_BHT),
        distance=mean((p * (i - j).abs()).sum(-1)),
        first=mean(p[..., 0]),
        previous=mean((p * (j == i - 1)).sum(-1)),
        similarity=_similarity(p, entropy_BHT, open_),
    )


def _similarity(p: Tensor, entropy_BHT: Tensor, open_: Tensor) -> Tensor:
    """One head against all others at a time, so that memory is that of the weights."""
    lines = []
    for h in range(p.shape[1]):
        both = open_ & open_[:, h : h + 1]
        mixed = entropy((p + p[:, h : h + 1]) / 2)
        divergence = (mixed - (entropy_BHT + entropy_BHT[:, h : h + 1]) / 2) * both
        lines.append(1.0 - divergence.sum((0, 2)) / both.sum((0, 2)).clamp(min=1) / math.log(2))
    return torch.stack(lines)


def attention_weights(
    q: Tensor,
    k: Tensor,
    *,
    rows: Sequence[int] | Tensor | None = None,
    heads: Sequence[int] | Tensor | None = None,
    **spec: Unpack[AttentionKeywords],
) -> Tensor:
    """p for queries ``rows`` of heads ``heads`` (None for all; negative counts from the end).

    Fused and blocked back ends never hold the (B, H, T, S) weights; this computes the chosen ones
    and nothing else, tile by tile.

    q (B, H, T, D), k (B, G, S, D) -> (B, len(heads), len(rows), S)

    >>> q = torch.zeros(1, 2, 4, 8)
    >>> attention_weights(q, q, rows=[-1], heads=[0])
    tensor([[[[0.2500, 0.2500, 0.2500, 0.2500]]]])
    """
    call = AttentionSpec(**spec)
    check(q, k, k, softcap=call.softcap)
    q, k, _ = broadcast_batch(q, k, k)
    (B, H, T, _), (_, G, S, _) = q.shape, k.shape
    prior = call.prior
    if prior is not None:
        prior.check(B, H, T, S)
    t, h = _indices(rows, T, "row", q.device), _indices(heads, H, "head", q.device)
    if not len(t) or not len(h):
        return q.new_empty(B, len(h), len(t), S)
    queries, keys = q[:, h][:, :, t], k[:, h // (H // G)]
    call = replace(
        call,
        choice=select(call.choice, slice(None), h, t),
        prior=None if prior is None else PriorSelection(prior, h, H, t, T),
    )
    cut = tiles(queries, keys, call.prior)
    pieces = (
        pad(scored.weights(), (scored.tile.keys.start, S - scored.tile.keys.stop))
        for scored in score_tiles(queries, keys, call, cut)
    )
    return join_rows(cut, pieces).to(q.dtype)


def _indices(
    which: Sequence[int] | Tensor | None, size: int, name: str, device: torch.device
) -> Tensor:
    if which is None:
        return torch.arange(size, device=device)
    index = torch.as_tensor(which, dtype=torch.int64, device=device).view(-1)
    wrong = index[(index < -size) | (index >= size)]
    if len(wrong):
        raise ValueError(f"there is no {name} {int(wrong[0])} among {size}.")
    return index % max(size, 1)


class Trace(NamedTuple):
    """The steps of attention in order; all but the last are (B, H, T, S)."""

    compatibility: Tensor
    """q k^T: how well each key fits each query."""
    scores: Tensor
    """scale * compatibility, after the soft cap if there is one."""
    log_prior: Tensor
    """log u, 0 where there is no prior."""
    weights: Tensor
    """choice.weights(scores, log_prior)."""
    outputs: Tensor
    """weights v."""


def trace(q: Tensor, k: Tensor, v: Tensor, **spec: Unpack[AttentionKeywords]) -> Trace:
    """All steps of ``attend(q, k, v, **spec)``, for small inputs; the last is what it returns.

    >>> q = torch.zeros(1, 2, 4, 8)
    >>> trace(q, q, q).weights.shape
    torch.Size([1, 2, 4, 4])
    """
    call = AttentionSpec(**spec)
    check(q, k, v, softcap=call.softcap)
    axes = output_axes(q, k)
    q, k, v = broadcast_batch(q, k, v)
    compatibility = score(q, k, 1.0)
    z = cap(compatibility * call.scale_for(q.shape[-1]), call.softcap)
    log_u = log_prior(call.prior, z)
    p = call.choice.weights(z, log_u)
    full_log_u = torch.zeros_like(z) if log_u is None else log_u.expand_as(z)
    steps = (compatibility, z, full_log_u, p, mix(p, v))
    return Trace(*(x.reshape(*axes, *x.shape[-2:]) for x in steps))


WIDE = 2.0
"""A standard deviation of the scores up to which ``scale=1`` is fine; normal q and k give 1."""


@torch.no_grad()
def scale_warning(
    q: Tensor, k: Tensor, *, width: int | None = None, **spec: Unpack[AttentionKeywords]
) -> str | None:
    """One sentence if the scale looks like a mistake on q (B, H, T, D), k (B, G, S, D), else None.

    ``width`` is d_model, H D by default. None too where no key is open to any query. O(T S) memory:
    a small sample suffices.

    >>> q = torch.zeros(1, 2, 3, 64)
    >>> scale_warning(q, q) is None
    True
    >>> scale_warning(q, q, choice=Softmax(beta=0.125)).partition(";")[0]
    'scale=0.125 and beta=0.125 apply 1/sqrt(D) twice'
    """
    call = AttentionSpec(**spec)
    check(q, k, k, softcap=call.softcap)
    q, k, _ = broadcast_batch(q, k, k)
    H, D = q.shape[1], q.shape[3]
    scale, factor = call.scale_for(D), call.choice.score_scale
    beta = float(to_float64(torch.as_tensor(factor)).mean())
    product = scale * beta
    if not math.isfinite(product) or product == 0.0:
        return (
            f"scale={product} makes every score the same or none; with heads of {D} use "
            f"{_right(D)}."
        )
    mistake = _mistake(scale, beta, D, H * D if width is None else width)
    found = None if mistake is None else _spread_and_best(q, k, call)
    if mistake is None or found is None:
        return None
    usual = replace(call, choice=Softmax(), scale=D**-0.5)
    (spread, best), (usual_spread, usual_best) = found, _spread_and_best(q, k, usual) or found
    if product == 1.0 and spread <= WIDE:
        return None
    return (
        f"{mistake}; with heads of {D} use {_right(D)}: the scores spread by "
        f"{spread:.2g} where {usual_spread:.2g} was meant, and a query gives its best key "
        f"{best:.2g} of its weight instead of {usual_best:.2g}."
    )


def _mistake(scale: float, beta: float, D: int, width: int) -> str | None:
    """Which mistake the numbers are, if they are one."""

    def close(x: float, y: float) -> bool:
        return math.isclose(x, y, rel_tol=1e-3)

    right, product = D**-0.5, scale * beta
    both = f"scale={scale:.4g} and beta={beta:.4g}"
    if close(product, right):
        return None
    if close(scale, beta) and close(scale, right):
        return f"{both} apply 1/sqrt(D) twice"
    if not close(beta, 1.0) and close(scale, beta * right):
        return f"{both} hold the factor {beta:.4g} twice"
    mistakes = {
        1.0: "looks as if 1/sqrt(D) were missing",
        width**-0.5: f"is 1/sqrt(d_model) for d_model {width}",
        1.0 / D: "is 1/D, the root is missing",
        D**0.5: "is sqrt(D), which should divide",
    }
    name = f"scale={scale:.4g}" if close(beta, 1.0) else f"scale * beta = {product:.4g}"
    for number, mistake in mistakes.items():
        if close(product, number):
            return f"{name} {mistake}"
    return None


def _spread_and_best(q: Tensor, k: Tensor, spec: AttentionSpec) -> tuple[float, float] | None:
    """Standard deviation of beta z over the open pairs, and the largest weight per row, on average.

    None where no pair is open.
    """
    z, log_u = logits(q, k, spec)
    size = z * spec.choice.score_scale
    open_ = size if log_u is None else size[(log_u > -torch.inf).expand_as(z)]
    if not open_.numel():
        return None
    best = spec.choice.weights(z, log_u).amax(-1)
    return float(open_.std(correction=0)), float(best[best > 0].mean())


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
