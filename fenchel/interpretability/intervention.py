"""Interventions: what a number of the forward pass becomes when one site of it is changed.

A metric f of the logits has the value f_0 in a pass, and f_s when site s is given another value.
The effect of the site is f_s - f_0. Two ways to compute it:

    exact       a pass per site, many sites as the rows of one batch
    estimate    <df/dy, y_s - y>, for all sites from one forward and one reverse pass

For a stream or a branch y is the site itself. For a query, a key, a value, the choice or the output
of a head, y is the output of the heads of that layer, and y_s is computed by ``attend`` with the
changed site: the choice is recomputed and only what follows it is linearised. A gradient of the
site itself misses a saturated choice, whose derivative is near zero however far the output moves
(Kramár et al. 2024, AtP*).

``effects`` ranks all sites by their estimates, runs the largest of each kind exactly, or all of
them where that is cheap, and states how far the two agree.

A loss that training has made stationary needs one thing more. Its derivative in the scale of any
part is then zero on the training text, so the estimates of removing a part cancel over the
positions although the part is needed. The rank of a site is there |estimate| + spread, with spread
the root of the sum of the squares of what the positions contribute to it. What is missing is the
second-order term, half of the derivative of the logits along y_s - y, squared in the Fisher metric:
one forward-mode pass per site, which costs more than the exact pass that it would save.

B rows, T tokens, M width of the stream, H heads, G heads of keys and values, D width per head.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fenchel.attention import AttentionCall, AttentionSpec, attend
from fenchel.interpretability.hooked_model import BRANCHES, HookedModel, RecordedPass, Taps

QKV = ("q", "k", "v")
HEAD_PARTS = (*QKV, "head")
PARTS = (*HEAD_PARTS, *BRANCHES, "stream")
"""What a site is a part of: the query, key, value or output of a head, what the attention or the
MLP of a block returns, or the stream after a block."""
_IN_HEADS = (*HEAD_PARTS, "choice")  # what is computed again by attend
EXACT = 20
"""Sites of each part that are run exactly where not all are."""
_CHEAP = {"cpu": 4e12, "cuda": 1e15}  # operations of exact passes over all sites
_LOGITS = 1 << 25  # numbers of logits in a batch
_NAMES = {"q": "query", "k": "key", "v": "value"}
Metric = Callable[[Tensor], Tensor]
"""Logits (B, T, V) to a number per row, (B,)."""
Progress = Callable[[str, int, int], None]


class Site(NamedTuple):
    """A place in the forward pass; layers and heads count from 1, positions from 0.

    >>> str(Site("q", 2, 1)), str(Site("stream", 3, None, 7))
    ('query 2.1', 'stream 3 at 7')
    """

    part: str
    layer: int
    head: int | None = None
    """None for all heads of the layer, or where there are none."""
    position: int | None = None
    """None for all positions."""

    def __str__(self) -> str:
        where = f"{self.layer}" if self.head is None else f"{self.layer}.{self.head}"
        name = f"{_NAMES.get(self.part, self.part)} {where}"
        return name if self.position is None else f"{name} at {self.position}"


HeadCounts = Mapping[int, tuple[int, int]]
"""By the number of every layer that attends: its heads, and those of keys and values."""


class Edit(NamedTuple):
    """A site and what it becomes: its new value, or for a head or a layer's attention its spec."""

    site: Site
    value: Callable[[Tensor], Tensor] | None = None
    """Its new value from that of the pass: (T, D) of one head, (T, M) of a branch or a stream, and
    with a position (D,) or (M,)."""
    spec: Callable[[AttentionSpec], AttentionSpec] | None = None
    """By which it chooses instead."""

    @property
    def place(self) -> tuple[str, int]:
        """Where in a layer it acts, and the layer."""
        return self.site.part if self.spec is None else "choice", self.site.layer


class EditedPass(Taps):
    """A pass in which row i is changed at the site of edit i."""

    def __init__(self, edits: Sequence[Edit]) -> None:
        self.edits: defaultdict[tuple[str, int], list[tuple[int, Edit]]] = defaultdict(list)
        for row, edit in enumerate(edits):
            self.edits[edit.place].append((row, edit))

    def stream(self, layer: int, x_BTM: Tensor) -> Tensor:
        """Change the rows that have an edit here."""
        return self._change(x_BTM, "stream", layer)

    def branch(self, part: str, layer: int, y_BTM: Tensor) -> Tensor:
        """Likewise."""
        return self._change(y_BTM, part, layer)

    def attention(self, layer: int, call: AttentionCall) -> Tensor | None:
        """The output with changed queries, keys, values, choices or outputs of heads."""
        if not any((part, layer) in self.edits for part in _IN_HEADS):
            return None
        q, k, v = (self._change(getattr(call, part), part, layer) for part in QKV)
        o_BHTD = attend(q, k, v, **call.spec)
        for row, edit in self.edits.get(("choice", layer), ()):
            assert edit.spec is not None
            one = slice(row, row + 1)
            other_1HTD = attend(q[one], k[one], v[one], **edit.spec(call.spec))
            o_BHTD = o_BHTD.clone()
            heads = slice(None) if edit.site.head is None else edit.site.head - 1
            o_BHTD[row, heads] = other_1HTD[0, heads]
        return self._change(o_BHTD, "head", layer)

    def _change(self, x: Tensor, part: str, layer: int) -> Tensor:
        """x (B, T, M) or (B, H, T, D) with the edits of its rows."""
        if not (edits := self.edits.get((part, layer))):
            return x
        x = x.clone()
        for row, (site, value, _) in edits:
            assert value is not None
            at: tuple[Any, ...] = (row,) if site.head is None else (row, site.head - 1)
            at = at if site.position is None else (*at, site.position)
            x[at] = value(x[at])
        return x


class Effect(NamedTuple):
    """What a site does to the metric."""

    site: Site
    estimate: float
    spread: float
    """Root of the sum of the squares of what the positions contribute to the estimate."""
    exact: float | None
    """None where it was not run."""

    @property
    def size(self) -> float:
        """The exact effect where it is known, else the estimate, without its sign."""
        return abs(self.estimate if self.exact is None else self.exact)

    def plain(self) -> dict[str, Any]:
        """The effect as plain values."""
        return {**self.site._asdict(), **self._asdict(), "site": str(self.site)}


class RankAgreement(NamedTuple):
    """The ranking and the estimates against exact effects, over the sites that were run."""

    part: str
    sites: int
    run: int
    """Sites that were run exactly."""
    spearman: float | None
    """Rank correlation with the absolute effects; None for fewer than three sites."""
    shared: float
    """Share of the ten largest, or of the larger half, that the two have in common."""
    error: float
    """Mean absolute difference of estimate and effect over the mean absolute effect."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Effects:
    """Sites by the size of their effect, largest first."""

    base: float
    """The metric of the unchanged pass."""
    effects: list[Effect]
    agreement: list[RankAgreement]

    def plain(self) -> dict[str, Any]:
        """The effects and their agreement as plain values."""
        return {
            "effects": [effect.plain() for effect in self.effects],
            "agreement": [row._asdict() for row in self.agreement],
        }


def effects(
    model: HookedModel,
    ids: Sequence[int],
    edits: Sequence[Edit],
    metric: Metric,
    *,
    stationary: bool = False,
    exact: int | None = None,
    progress: Progress | None = None,
) -> Effects:
    """The effect of every edit on a metric; ``exact`` of each part are run, or all where cheap.

    ``stationary`` where the metric is a loss that training has minimised.
    """
    if not edits:
        raise ValueError("there is no site to change.")
    base, estimates = _estimates(model, ids, edits, metric)
    flops = 2.0 * model.parameters * len(ids) * len(edits)
    cheap = flops <= _CHEAP.get(model.device.type, _CHEAP["cpu"])
    most = (len(edits) if cheap else EXACT) if exact is None else exact
    ranks = [abs(estimate) + stationary * spread for estimate, spread in estimates]
    of_part: defaultdict[str, list[int]] = defaultdict(list)
    for n in sorted(range(len(edits)), key=lambda n: -ranks[n]):
        of_part[edits[n].site.part].append(n)
    chosen = sorted(n for places in of_part.values() for n in places[:most])
    values = _exact(model, ids, [edits[n] for n in chosen], metric, progress)
    found = dict(zip(chosen, (value - base for value in values), strict=True))
    results = [Effect(e.site, *estimates[n], found.get(n)) for n, e in enumerate(edits)]
    agreement = [
        _agreement([results[n] for n in places], [ranks[n] for n in places])
        for places in of_part.values()
    ]
    # What was run comes first: an estimate may be large and wrong.
    results.sort(key=lambda effect: (effect.exact is None, -effect.size))
    return Effects(base=base, effects=results, agreement=agreement)


def require_site(model: HookedModel, site: Site, heads: HeadCounts, tokens: int) -> None:
    """Refuse a site that the model or the text does not have."""
    part, layer, head, position = site
    if part not in PARTS:
        raise ValueError(f"there is no part {part!r}; there are {', '.join(PARTS)}.")
    if not 1 <= layer <= model.layers:
        raise ValueError(f"there is no layer {layer}; {model.name} has 1 to {model.layers}.")
    if part in HEAD_PARTS and layer not in heads:
        raise ValueError(f"there is no {site}: layer {layer} gives no weights to keys.")
    count = heads.get(layer, (0, 0))[part in ("k", "v")]
    if head is not None and (part not in HEAD_PARTS or not 1 <= head <= count):
        raise ValueError(f"there is no {site}; a layer has {count} of them.")
    if position is not None and not 0 <= position < tokens:
        raise ValueError(f"there is no position {position} in a text of {tokens} tokens.")
    if part in BRANCHES and getattr(model.blocks[layer - 1], part) is None:
        raise ValueError(f"the blocks of {model.name} have no separate {part} to change.")


@torch.no_grad()
def _exact(
    model: HookedModel,
    ids: Sequence[int],
    edits: Sequence[Edit],
    metric: Metric,
    progress: Progress | None,
) -> list[float]:
    """The metric of a pass per edit, in batches."""
    values: list[float] = []
    rows = 1
    while len(values) < len(edits):
        if progress is not None:
            progress("exact passes", len(values), len(edits))
        batch = edits[len(values) : len(values) + rows]
        logits_BTV = model.logits(model.batch(ids, len(batch)), EditedPass(batch))
        values += metric(_wide(logits_BTV)).tolist()
        rows = max(1, min(64, _LOGITS // logits_BTV[0].numel()))
    return values


def _estimates(
    model: HookedModel, ids: Sequence[int], edits: Sequence[Edit], metric: Metric
) -> tuple[float, list[tuple[float, float]]]:
    """The metric, and <df/dy, y_s - y> of every edit with its spread over positions."""
    recorded = RecordedPass(grad=True)
    with torch.enable_grad():
        value = metric(_wide(model.logits(model.batch(ids), recorded)))[0]
    if not bool(value.isfinite()):
        raise ValueError("the logits of this text are not finite, so nothing can be compared.")
    numbered: defaultdict[tuple[str, int], list[int]] = defaultdict(list)
    for n, edit in enumerate(edits):
        numbered[edit.place].append(n)
    sites = {place: _output(recorded, *place) for place in numbered}
    tensors = list({id(y): y for y in sites.values()}.values())
    found = torch.autograd.grad(value, tensors, allow_unused=True)
    gradients = dict(zip(map(id, tensors), found, strict=True))
    results = [(0.0, 0.0)] * len(edits)
    with torch.no_grad():
        for (part, layer), group in numbered.items():
            y = sites[part, layer]
            g = gradients[id(y)]
            if g is None:
                continue  # the metric does not depend on it
            rows = max(1, min(64, (1 << 24) // y.numel()))
            for first in range(0, len(group), rows):
                some = group[first : first + rows]
                new = _edited([edits[n] for n in some], recorded, part, layer, y.detach())
                change = ((new - y.detach()).double() * g.double()).sum(-1)
                change_BT = change.sum(1) if change.dim() == 3 else change
                sums = torch.stack((change_BT.sum(1), change_BT.norm(dim=1)), 1).tolist()
                for n, (estimate, spread) in zip(some, sums, strict=True):
                    results[n] = estimate, spread
    return float(value.detach()), results


def _wide(x: Tensor) -> Tensor:
    """In float32 at least."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _output(recorded: RecordedPass, part: str, layer: int) -> Tensor:
    """The tensor whose gradient serves a part: of a head, the output of all heads."""
    if part in _IN_HEADS:
        return recorded.outputs[layer]
    return recorded.streams[layer] if part == "stream" else recorded.branches[part, layer]


def _edited(
    edits: Sequence[Edit], recorded: RecordedPass, part: str, layer: int, y: Tensor
) -> Tensor:
    """That tensor with every edit in a row of its own, computed again from the site on."""
    edited, rows = EditedPass(edits), len(edits)
    if part in _IN_HEADS:
        q, k, v, spec = recorded.calls[layer]
        q, k, v = (x.detach().expand(rows, -1, -1, -1) for x in (q, k, v))
        output = edited.attention(layer, AttentionCall(q, k, v, spec))
        assert output is not None
        return output
    y = y.expand(rows, -1, -1)
    return edited.stream(layer, y) if part == "stream" else edited.branch(part, layer, y)


def _agreement(results: Sequence[Effect], ranks: Sequence[float]) -> RankAgreement:
    run = [effect for effect in results if effect.exact is not None]
    rank = torch.tensor(ranks[: len(run)], dtype=torch.float64)  # the largest were run
    exact = torch.tensor([effect.exact or 0.0 for effect in run], dtype=torch.float64)
    estimate = torch.tensor([effect.estimate for effect in run], dtype=torch.float64)
    ten = min(10, max(1, len(run) // 2))
    orders = (x.abs().argsort(descending=True, stable=True) for x in (exact, rank))
    tops = [set(order[:ten].tolist()) for order in orders]
    size = float(exact.abs().mean()) if run else 0.0
    return RankAgreement(
        results[0].site.part,
        len(results),
        len(run),
        _spearman(exact.abs(), rank) if len(run) > 2 else None,
        len(tops[0] & tops[1]) / ten if run else 0.0,
        float((exact - estimate).abs().mean()) / size if size > 0.0 else 0.0,
    )


def _spearman(a: Tensor, b: Tensor) -> float:
    """The correlation of ranks, equal values at their mean rank.

    >>> round(_spearman(torch.tensor([1.0, 2.0, 9.0]), torch.tensor([0.1, 0.3, 0.2])), 6)
    0.5
    """
    ranks = []
    for x in (a, b):
        below, equal = (x[:, None] > x).sum(1), (x[:, None] == x).sum(1)
        rank = below.double() + (equal.double() - 1.0) / 2.0
        ranks.append(rank - rank.mean())
    norm = float(ranks[0].norm() * ranks[1].norm())
    return float(ranks[0] @ ranks[1]) / norm if norm > 0.0 else 0.0
