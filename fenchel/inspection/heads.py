"""Every head of a layer: statistics of its rows, and how far its outputs can move.

Rows. For query i, with z = scale q k^T under its soft cap, p = choice.weights(z, log u):

    entropy      -sum_j p_ij log p_ij              sensitivity   lambda_max of dp_i/dz_i, exact
    support      how many p_ij > 0                 max_logit     max over open j of |beta z_ij|
    margin       best less second best of beta z_ij + log u_ij
    first        p_i0                              itself        p_ii
    distance     sum_j p_ij |i - j|                columns       sum_i p_ij, one number per key

A sink is one more key, the first of a row: it counts in entropy, support, sensitivity and margin,
and in no number about tokens. ``not_taken`` is what the tokens do not get: its weight p_i0 or,
under a gate g_i on the outputs of the head, 1 - g_i (a sink and a gate are one:
docs/maths/attention.md); with both, 1 - g_i (1 - p_i0).

``head_similarity`` is 1 for two heads with the same weights, 0 for two that share no key. Memory is
O(n d): at most ``_BLOCK`` weights at a time, on a GPU ``_GPU_BLOCK``.

Sensitivity. With o = attend(q, k, v) of one head, sigma in q, k, v and all three together is the
spectral norm of the derivative of o in them, bracketed by Golub-Kahan on streamed products. The
derivative in v is the matrix of weights for every column of v alike, so one column is enough for
its norm. The largest of the three is the head's dominant cause: "query" (a query chooses otherwise
because it moved), "key" (queries choose otherwise because keys moved) or "mixing" (the chosen
values moved). ``bound`` is the covariance bound in its cheap form, never below sigma. Heads are
measured a few at a time, so that their weights stay in the cache.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from fenchel.attention import AttentionCall
from fenchel.attention.prior import PriorSelection
from fenchel.attention.spec import select
from fenchel.attention.tiles import row_tiles, score_tiles
from fenchel.choice import Entmax
from fenchel.inspection.blocks import operator_norm
from fenchel.inspection.linearisation import strip
from fenchel.inspection_result import Head, Interval, Method, Quantiles
from fenchel.sensitivity.attention_jacobian import AttentionJacobian
from fenchel.sensitivity.bounds.covariance import terms
from fenchel.sensitivity.operator import Operator
from fenchel.sensitivity.weight_blocks import WeightBlocks

# Weights held at a time, and queries: on a CPU few enough that most of the future is left out.
_BLOCK, _STRIP = 1 << 22, 128
_GPU_BLOCK = 1 << 26


class RowStats(NamedTuple):
    """One number per row, (H, T) each; ``columns`` is (H, S)."""

    entropy: Tensor
    support: Tensor
    sensitivity: Tensor
    max_logit: Tensor
    margin: Tensor
    first: Tensor
    itself: Tensor
    distance: Tensor
    not_taken: Tensor
    columns: Tensor


class _RowBlock(NamedTuple):
    rows: slice
    keys: slice
    z: Tensor
    """beta times the scores: (H, t, s)."""
    log_u: Tensor | None
    p: Tensor


@torch.no_grad()
def row_stats(call: AttentionCall) -> RowStats:
    """All rows of one call of attention."""
    (_, H, T, _), S = call.q.shape, call.k.shape[2]
    columns, fixed = call.q.new_zeros(H, S), call.spec.fixed_keys
    parts: list[list[Tensor]] = []
    for block in _row_blocks(call):
        columns[:, block.keys] += block.p.sum(1)
        parts.append(_numbers(call, block, S - T))
    numbers = [torch.cat(column, 1) for column in zip(*parts, strict=True)]
    return RowStats(*numbers, columns[:, fixed:])  # type: ignore[call-arg]


@torch.no_grad()
def row_weights(call: AttentionCall, size: int) -> Tensor:
    """The weights of the first ``size`` queries on the first ``size`` keys: (H, size, size)."""
    H, S, fixed = call.q.shape[1], call.k.shape[2], call.spec.fixed_keys
    weights = call.q.new_zeros(H, size, S)
    for block in _row_blocks(call, size):
        weights[:, block.rows, block.keys] = block.p
    return weights[..., fixed : fixed + size]


@torch.no_grad()
def head_similarity(call: AttentionCall) -> Tensor:
    """Similarity of two heads: mean over rows of sum_j sqrt(p_ij p'_ij), (H, H), 1 for equal ones.

    Rows without an open key are left out.
    """
    H = call.q.shape[1]
    total, count = call.q.new_zeros(H, H, dtype=torch.float64), 0
    for block in _row_blocks(call):
        root = block.p.sqrt().flatten(1)
        total += (root @ root.mT).double()
        count += int((block.p[0].sum(-1) > 0).sum())
    return total / max(count, 1)


def _numbers(call: AttentionCall, block: _RowBlock, shift: int) -> list[Tensor]:
    z, p, log_u = block.z, block.p, block.log_u
    s = z.shape[-1]
    open_ = None if log_u is None else log_u > -torch.inf
    size = z.abs() if open_ is None else torch.where(open_, z.abs(), 0.0)
    biased = z if log_u is None else z + log_u
    best = biased.topk(min(2, s), -1).values
    margin = best[..., 0] - best[..., 1] if s > 1 else best[..., 0] * torch.nan
    margin = torch.where(margin.isfinite(), margin, torch.nan)  # a row with one open key
    i = torch.arange(block.rows.start, block.rows.stop, device=z.device) + shift
    j = torch.arange(block.keys.start, block.keys.stop, device=z.device)
    itself = (p * (i[:, None] == j)).sum(-1)
    at_token = (j >= call.spec.fixed_keys).to(p.dtype)
    first = (p * (j == call.spec.fixed_keys)).sum(-1)
    return [
        torch.special.entr(p).sum(-1),
        (p > 0).sum(-1).to(p.dtype),
        call.spec.choice.sensitivity(p[None])[0],
        size.amax(-1),
        margin,
        first,
        itself,
        (p * at_token * (i[:, None] - j).abs()).sum(-1),
        (p * (1.0 - at_token)).sum(-1),
    ]


def _row_blocks(call: AttentionCall, last: int | None = None) -> Iterator[_RowBlock]:
    """The rows of a call up to ``last``; every block has at least one key."""
    q, k, spec = call.q.float(), call.k.float(), call.spec
    H, S = q.shape[1], k.shape[2]
    most = _GPU_BLOCK // (H * S)
    if q.device.type == "cpu":
        most = min(_STRIP, _BLOCK // (H * S))
    cut = row_tiles(q, k, spec.prior, height=max(1, most), last=last)
    cut = [tile._replace(keys=_at_least_one(tile.keys)) for tile in cut]
    for scored in score_tiles(q, k, spec, cut):
        log_u = scored.log_prior()
        z = scored.z * spec.choice.score_scale
        p = scored.weights()
        rows, keys = scored.tile.rows, scored.tile.keys
        yield _RowBlock(rows, keys, z[0], None if log_u is None else log_u[0], p[0])


def _at_least_one(keys: slice) -> slice:
    return slice(keys.start, max(keys.stop, keys.start + 1))


_WEIGHTS = {"cpu": 1 << 21, "cuda": 1 << 26}  # of the heads measured together
_CAUSES = {"q": "query", "k": "key", "v": "mixing"}
_QUANTILES = ("entropy", "effective", "support", "sensitivity", "max_logit", "margin")


class Sensitivities(NamedTuple):
    """The sensitivity of some heads; lists over heads."""

    sigma: dict[str, list[Interval]]
    """In q, k, v and all of them."""
    bound: list[float]
    """The covariance bound of the last."""
    top: list[list[float]]
    """Lower bounds of its four largest singular values."""


class WithCeiling(Operator):
    """A Jacobian of attention with a given upper bound in place of its own."""

    def __init__(self, J: AttentionJacobian, bound: Tensor) -> None:
        self.J, self.bound = J, bound
        self.domain, self.codomain = J.domain, J.codomain
        self.dtype, self.device = J.dtype, J.device

    def apply(self, v: Tensor) -> Tensor:
        """J v."""
        return self.J.apply(v)

    def adjoint(self, u: Tensor) -> Tensor:
        """J^T u."""
        return self.J.adjoint(u)

    @property
    def error(self) -> float:
        """That of J."""
        return self.J.error

    def ceiling(self) -> Tensor:
        """The cheap covariance bound: (1, H)."""
        return self.bound


def heads(
    call: AttentionCall,
    layer: int,
    chosen: list[int],
    method: Method,
    generator: torch.Generator,
    gate: Tensor | None = None,
) -> Iterator[Head]:
    """The heads ``chosen`` (from 0) of the layer numbered ``layer`` (from 1).

    ``gate`` (H, T) is the factor on the outputs of every head and query.
    """
    T, S = call.q.shape[2], call.k.shape[2]
    budget = _WEIGHTS.get(call.q.device.type, 1 << 26)
    together = max(1, budget // (T * S))
    alike = head_similarity(call).fill_diagonal_(-1.0).cpu()
    for first in range(0, len(chosen), together):
        batch = chosen[first : first + together]
        part = select_heads(call, batch)
        stats = RowStats(*(x.cpu() for x in row_stats(part)))  # copied once
        if gate is not None:
            taken = gate[batch].cpu() * (1.0 - stats.not_taken)
            stats = stats._replace(not_taken=1.0 - taken)
        alphas = _alphas(part)
        sigma, bound, top = sensitivities(part, method, generator)
        for place, head in enumerate(batch):
            of_head = {name: bracket[place] for name, bracket in sigma.items()}
            numbers = layer, head + 1
            measured = of_head, bound[place], top[place], alike[head]
            yield _head(stats, place, numbers, alphas[place], *measured)


def _alphas(call: AttentionCall) -> list[float] | list[None]:
    """The exponents of entmax, one per head; None under another map."""
    choice, H = call.spec.choice, call.q.shape[1]
    if not isinstance(choice, Entmax):
        return [None] * H
    if not isinstance(choice.alpha, Tensor):
        return [choice.alpha] * H
    alphas: list[float] = choice.alpha.expand(1, H, 1, 1).flatten().tolist()
    return alphas


def select_heads(call: AttentionCall, chosen: list[int]) -> AttentionCall:
    """The same call with some of its heads; shared keys and values are repeated."""
    H, G = call.q.shape[1], call.k.shape[1]
    heads = torch.tensor(chosen, device=call.q.device)
    group = heads // (H // G)
    prior = call.spec.prior
    if prior is not None and any(prior.varies()):
        prior = PriorSelection(prior, heads, H)
    choice = select(call.spec.choice, slice(None), heads, slice(None))
    spec = replace(call.spec, choice=choice, prior=prior)
    return AttentionCall(call.q[:, chosen], call.k[:, group], call.v[:, group], spec)


def sensitivities(
    call: AttentionCall,
    method: Method,
    generator: torch.Generator,
    *,
    which: tuple[str, ...] = ("q", "k", "v", "qkv"),
) -> Sensitivities:
    """sigma in the inputs that ``which`` names, the last of them all together."""
    q, k, v, spec = call
    rows, fixed = WeightBlocks(q, k, spec, strip(call), cache=True), spec.fixed_keys
    bound_terms = terms(rows, v, cheap=True, fixed=fixed)
    sigma, top = {}, torch.zeros(())
    for wrt in which:
        J = AttentionJacobian(rows, v[..., :1] if wrt == "v" else v, wrt, each=True, fixed=fixed)
        bracket = operator_norm(WithCeiling(J, bound_terms.separate(wrt)), method, generator)
        ends = zip(bracket.lower[0].tolist(), bracket.upper[0].tolist(), strict=True)
        sigma[wrt] = [Interval(low, high, bracket.iterations) for low, high in ends]
        top = bracket.values[0]
    return Sensitivities(sigma, bound_terms.separate("qkv")[0].tolist(), top.tolist())


def _head(
    stats: RowStats,
    place: int,
    numbers: tuple[int, int],
    alpha: float | None,
    sigma: dict[str, Interval],
    bound: float,
    top: list[float],
    alike: Tensor,
) -> Head:
    rows = {name: getattr(stats, name)[place] for name in _QUANTILES if name != "effective"}
    rows["effective"] = rows["entropy"].exp()
    most, nearest, alone = stats.columns[place].max(0), alike.max(0), len(alike) < 2
    dominant = max("qkv", key=lambda name: sigma[name].lower)
    return Head(
        layer=numbers[0],
        head=numbers[1],
        **{name: quantiles(rows[name]) for name in _QUANTILES},
        first=float(stats.first[place].mean()),
        itself=float(stats.itself[place].mean()),
        distance=float(stats.distance[place].mean()),
        not_taken=float(stats.not_taken[place].mean()),
        alpha=alpha,
        column=float(most.values),
        column_token=int(most.indices),
        nearest_head=None if alone else int(nearest.indices) + 1,
        similarity=0.0 if alone else float(nearest.values),
        sigma=sigma,
        top=top,
        dominant=_CAUSES[dominant],
        bound=bound,
        rows={name: rows[name].tolist() for name in _QUANTILES},
    )


def quantiles(x: Tensor) -> Quantiles:
    """Quantiles and mean of the numbers that are not nan."""
    x = x[~x.isnan()].double()
    if not len(x):
        return Quantiles(*(float("nan"),) * 6)
    places = torch.tensor([0.0, 0.05, 0.5, 0.95, 1.0], dtype=x.dtype, device=x.device)
    least, low, median, high, most = torch.quantile(x, places).tolist()
    return Quantiles(least, low, median, high, most, float(x.mean()))
